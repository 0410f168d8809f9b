"""`UnifiedOffloading`: `Unified` with vLLM's OffloadingConnector.

A request that is to load a prefix takes its blocks and waits for the copy beside the queue (vLLM's
`kv_holding_waiting`), first in line once it has come. A request that the connector puts off is passed by those behind.

With async scheduling, a step hears of the copies that have ended when it is launched, and the scheduler with that
step's tokens. Steps without work are launched, too. No sequence is preempted whose step is in flight.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, ClassVar

from sim.engine.changes import Move, Tier
from sim.engine.plan import IterationPlan, StepTimes
from sim.engine.sequence import Sequence
from sim.kv.offloading import Offloading, OffloadingPaged
from sim.kv.tiers.tiering import TieringConnector
from sim.parts.batching.base import NEVER_FITS
from sim.parts.batching.unified import Unified
from sim.parts.needs import Need
from sim.parts.order.priority import urgency

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler


class UnifiedOffloading(Unified):
    """vLLM v1's `schedule()` with a connector."""

    resumes = False
    needs: ClassVar[tuple[Need, ...]] = (
        *Unified.needs,
        Need("memory", "with --kv-offloading-size tells a connector of blocks", names=("paged",)),
        Need("stage", "with --kv-offloading-size keeps its sequences", lacks="hands_over"),
        Need("stage", "with --kv-offloading-size takes no other engine's sequences", lacks="pulls"),
    )

    def bind(self, scheduler: "Scheduler") -> None:
        super().bind(scheduler)
        offloading = scheduler.memory.backing or scheduler.memory
        assert isinstance(offloading, Offloading | OffloadingPaged)
        self.offloading, self.connector = offloading, offloading.connector
        self.connector.schedules_ahead = self.schedules_ahead
        scheduler.counters.tiers["host"] = self.connector.tier
        if isinstance(self.connector, TieringConnector):
            scheduler.counters.tiers["disk"] = self.connector.storage_tier
        self.kv_holding: dict[Sequence, int] = {}
        """Sequences that load, or have loaded and wait; how many tokens of each are computed then."""
        # Whether the next step may decide otherwise about requests that wait, though nothing seems to happen.
        self._unsure = False
        # Whether a request was refused that no other may pass.
        self._stopped = False
        # Steps in flight, each with the copies that had ended when it was launched.
        self._in_flight: deque[tuple[IterationPlan, list[Move]]] = deque()

    @property
    def reports_copies(self) -> bool:
        return self.schedules_ahead

    @property
    def num_paused(self) -> int:
        return len(self.kv_holding)

    def holders(self) -> Iterable[tuple[Sequence, Tier]]:
        yield from super().holders()
        for seq in self.kv_holding:
            yield seq, Tier.GPU

    # -- a step ------------------------------------------------------------------------------------------------------

    def fill(self, plan: IterationPlan, now_s: float) -> None:
        scheduler, connector = self.scheduler, self.connector
        scheduler.beside += connector.begin()
        self._unsure = self._stopped = False
        budget = self._run_running(plan)
        preempted = self.eviction.requeue_victims()
        if not preempted and budget > 0:
            self._admit(plan, now_s, budget)
            if self._passed:
                self._put_back()
        if self.record is not None and not preempted:
            self._note(plan, ())
        told = connector.build(plan, scheduler.beside, lambda: self._scheduled(plan))
        if told and self.record is not None:
            self.record.copies(told, of_last=bool(plan.chunks or plan.num_decodes or preempted))
        plan.cut_on_arrival = not (self._stopped and self.order.sticky) or self._arrivals_help
        if not plan.chunks and not plan.num_decodes:
            # A step without work takes no time: what had ended is seen, and stores begin, at once.
            if self.schedules_ahead:
                scheduler.changed |= connector.wants_step
            elif not plan.awaited and not plan.after:
                scheduler.changed |= connector.report(connector.get_finished()) or connector.wants_step
        elif not (plan.chunks or self.partials or preempted or plan.after or plan.awaited or scheduler.last_in_flight):
            scheduler.allow_jump(plan)

    def _scheduled(self, plan: IterationPlan) -> Iterator[tuple[Sequence, int]]:
        """Sequences that compute in this step, in order, and how many of their tokens are computed then."""
        after = {chunk.seq: chunk.num_cached + chunk.num_new for chunk in plan.chunks}
        for seq in plan.decodes:
            after[seq] = self._num_known(seq)
        return ((seq, after[seq]) for seq in self.running if seq in after)

    def _num_known(self, seq: Sequence) -> int:
        """Tokens of a member of the batch, but for one that is in flight."""
        return self.batch.num_tokens_of(seq) - self.scheduler.num_unknown(seq)

    def _admit(self, plan: IterationPlan, now_s: float, budget: int) -> None:
        """First those that hold blocks, then those that wait; both until one of them finds no room."""
        budget = self._admit_loaded(plan, now_s, budget)
        order, memory, connector = self.order, self.paged, self.connector
        longest = self._longest_chunk()
        while not self._stopped and order.waiting:
            if budget <= 0 or len(self.running) >= self.max_num_seqs:
                self._stopped = True
                break
            seq = order.head()
            if self._passes_over(seq):
                continue
            if not memory.ever_fits(seq, 0):
                self.scheduler.ignore(order.pop(), NEVER_FITS)
                continue
            memory.look_up(seq)
            cached = memory.cached_tokens(seq)
            external = connector.lookup(seq, cached)
            if external is None:
                self._pass_over()
                self._unsure = True
                continue
            chunk = min(seq.num_tokens - cached, longest, budget)
            tokens = cached + (external or chunk)
            if not self._fits_whole(seq):
                # Evicting what it would hit changes nothing, but may reveal a chunk that is being stored.
                self._stopped, self._unsure = True, connector.copies
                break
            if not self._has_room_for(plan, seq, tokens, loads=bool(external)):
                self._stopped = self._unsure = True
                break
            order.pop()
            if external:
                memory.take(seq, tokens)
                self.kv_holding[seq] = tokens
                connector.load(seq, cached, external)
            else:
                budget -= chunk
                self._start(plan, seq, cached, chunk, now_s)

    def _admit_loaded(self, plan: IterationPlan, now_s: float, budget: int) -> int:
        """Those whose loads are seen to have ended; returns what is left of the budget."""
        memory, loaded = self.paged, self.connector.loaded
        longest = self._longest_chunk()
        for seq in sorted(self.kv_holding, key=urgency) if self.by_priority else list(self.kv_holding):
            if budget <= 0 or len(self.running) >= self.max_num_seqs:
                self._stopped = True
                break
            if seq in loaded:
                # From now on others may hit it. The last token must be computed all the same.
                loaded.remove(seq)
                memory.publish(seq, self.kv_holding[seq])
                num_computed = self.kv_holding[seq] = min(self.kv_holding[seq], seq.num_tokens - 1)
                self.connector.tier.hit_tokens += num_computed - seq.num_computed
                seq.num_computed = num_computed
            elif seq.num_computed < self.kv_holding[seq]:
                continue
            if self._must_wait(seq):
                continue
            chunk = min(seq.num_tokens - seq.num_computed, longest, budget)
            tokens = seq.num_computed + chunk
            wanted = memory.blocks_missing(seq, seq.num_tokens if self.reserve_whole_prompt else tokens)
            if wanted + self._keep_free > memory.gpu.free:
                self._stopped = True
                break
            del self.kv_holding[seq]
            budget -= chunk
            self.offloading.resume(seq)
            memory.count_hits(seq, seq.num_computed)
            decodes = chunk == 1 and tokens == seq.num_tokens and tokens > seq.request.prompt_tokens
            # A decode takes the block that it begins; where blocks have one token, the load has taken it.
            decodes &= seq.num_blocks <= memory.blocks_holding(seq.num_computed)
            if not decodes:
                memory.take_chunk(seq, tokens)
            self._run(plan, seq, chunk, now_s, decodes=decodes)
        return budget

    @property
    def _keep_free(self) -> int:
        return self.watermark_blocks if self.running else 0

    def _fits_whole(self, seq: Sequence) -> bool:
        """Whether `seq` could take the blocks of all its tokens, where that is asked for."""
        if not self.reserve_whole_prompt:
            return True
        return self.paged.blocks_wanted(seq, seq.num_tokens) <= self.paged.gpu.free - self._keep_free

    def _has_room_for(self, plan: IterationPlan, seq: Sequence, num_tokens: int, *, loads: bool) -> bool:
        """Whether `seq` may take the blocks of its first `num_tokens` tokens, to compute or to load some of them."""
        free = self.paged.gpu.free - self._keep_free
        if loads:
            # Loads make no room, and are not preempted: they leave what others need to go on.
            free -= self._blocks_promised(plan)
        return self.paged.blocks_wanted(seq, num_tokens) <= free

    def _blocks_promised(self, plan: IterationPlan) -> int:
        """Blocks that half-done prompts and loads have yet to take."""
        promised = dict.fromkeys((*self.kv_holding, *self.partials, *(chunk.seq for chunk in plan.chunks)))
        return sum(max(0, self.paged.blocks_holding(seq.num_tokens) - seq.num_blocks) for seq in promised)

    def _run(self, plan: IterationPlan, seq: Sequence, chunk: int, now_s: float, *, decodes: bool) -> None:
        super()._run(plan, seq, chunk, now_s, decodes=decodes)
        self.connector.admitted(seq)

    def _may_preempt(self, victim: Sequence) -> bool:
        # What a step in flight writes to must not be loaded into (vLLM's `defer_block_free`).
        scheduler = self.scheduler
        for plan, _ in self._in_flight:
            if victim in scheduler.last_in_flight or any(chunk.seq is victim for chunk in plan.chunks):
                return False
            if plan.num_decodes and victim in self.batch.members and victim not in scheduler.landed:
                return False
        return True

    def _preempt(self, victim: Sequence, plan: IterationPlan, scheduled: int) -> None:
        super()._preempt(victim, plan, scheduled)
        self.connector.preempted(victim)

    # -- afterwards --------------------------------------------------------------------------------------------------

    def committed(self, plan: IterationPlan, times: StepTimes) -> None:
        if self.schedules_ahead:
            self._in_flight.append((plan, self.connector.get_finished()))
        else:
            self.connector.report(self.connector.get_finished())

    def delivered(self) -> None:
        self.connector.report(self._in_flight.popleft()[1])

    def repeats(self, plan: IterationPlan, steps: int) -> int:
        if self._unsure or any(heard for _, heard in self._in_flight):
            return 1
        return self.connector.repeats(steps, plan.decodes, self._num_known)
