"""`Scheduler`: six parts and what they share, the queues' owner of one engine. `sim.parts.base` has the contracts.

Fast path: while memory suffices, every member of the batch decodes and only counts change. Hooks that no part overrides
cost nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from sim.engine.batch import DecodeBatch
from sim.engine.changes import PEER, Append, Change, Move, Tier
from sim.engine.decisions import DecisionLog
from sim.engine.drafting_batch import DraftingBatch
from sim.engine.limits import Counters, Deployment, Limits
from sim.engine.plan import IterationPlan, PrefillChunk, StepTimes
from sim.engine.ranked_batch import RankedBatch
from sim.engine.sequence import FINISHED, PARKED, RUNNING, Sequence, Status
from sim.engine.windowed_batch import WindowedBatch
from sim.kv.memory import Memory
from sim.parts.base import Admission, Eviction, Order, Part, Stage, overrides
from sim.parts.batching.base import Batching

if TYPE_CHECKING:
    from sim.engine.itl import GapCollector


@dataclass(frozen=True, eq=False, repr=False)
class Parts:
    """One of each kind."""

    order: Order
    memory: Memory
    admission: Admission
    eviction: Eviction
    stage: Stage
    batching: Batching

    def all(self) -> tuple[Part, ...]:
        """In the order in which they are bound and asked."""
        backing = () if self.memory.backing is None else (self.memory.backing,)
        return self.order, *backing, self.memory, self.admission, self.stage, self.eviction, self.batching


class Scheduler:
    """Queues, pools and the decode batch of one engine, and the decisions over them."""

    # Beyond 30 attributes CPython finds those of a plain object by hashing.
    __slots__ = (
        "_committed",
        "_complete",
        "_delivered",
        "_ended_ahead",
        "_ends_by_place",
        "_followed",
        "_frees_in_order",
        "_joined",
        "_last_ended",
        "_left",
        "_moved",
        "_parked",
        "_prepare",
        "_repeats",
        "_reports_copies",
        "_reserve",
        "_transferred",
        "_wakes",
        "admission",
        "batch",
        "batching",
        "beside",
        "changed",
        "changes",
        "counters",
        "decisions",
        "deployment",
        "drafting",
        "eviction",
        "finished",
        "gaps",
        "gpu",
        "host",
        "in_flight",
        "landed",
        "last_in_flight",
        "limits",
        "memory",
        "now_s",
        "order",
        "parts",
        "pulled",
        "stage",
    )

    def __init__(self, parts: Parts, limits: Limits, gaps: "GapCollector", deployment: Deployment) -> None:
        self.limits, self.gaps, self.deployment = limits, gaps, deployment
        self.batch = DecodeBatch(limits.block_size, gaps)
        self._followed: WindowedBatch | RankedBatch | None = None
        if parts.stage.drafts:
            # Of no other stage's batch the members take unlike counts of tokens.
            self.batch = self.drafting = DraftingBatch(limits.block_size, gaps)
        elif limits.window is not None:
            self.batch = self._followed = WindowedBatch(limits.block_size, gaps, limits.window)
        elif deployment.cost.follows_longest:
            self.batch = self._followed = RankedBatch(limits.block_size, gaps)
        self.counters = Counters()
        self.finished: list[Sequence] = []
        """Ended since the engine last looked, completed or ignored."""
        self.changed = False
        """Whether this step ended or preempted anything: an empty step is then followed by another at once."""
        self.changes: list[Change] = []
        """What has happened to blocks since the last plan, in order."""
        self.beside: list[Move] = []
        """Copies to start with the next plan."""
        self.pulled: list[Move] = []
        """Copies from other engines to start with it."""
        self.now_s = 0.0
        self.decisions: DecisionLog | None = None
        self.in_flight = 0
        """Plans committed ahead whose tokens have not come."""
        self.last_in_flight: dict[Sequence, None] = {}
        """Whose last tokens are in flight; they hold their blocks and seats."""
        self.landed: set[Sequence] = set()
        """Members of the batch that sampled nothing in the plan in flight."""
        self._ended_ahead: list[Sequence] | None = None
        self._last_ended: list[Sequence] = []
        self.order, self.memory, self.admission = parts.order, parts.memory, parts.admission
        self.eviction, self.stage, self.batching = parts.eviction, parts.stage, parts.batching
        self.gpu, self.host = parts.memory.gpu, parts.memory.host
        self.parts = parts.all()
        for part in self.parts:
            part.bind(self)
        self._prepare = self._having("prepare")
        self._reserve = self._having("reserve")
        self._complete = self._having("complete")
        self._repeats = self._having("repeats")
        self._committed = self._having("committed")
        self._delivered = self._having("delivered")
        self._joined = self._having("joined")
        self._parked = self._having("parked")
        self._moved = self._having("moved")
        self._left = self._having("left")
        self._transferred = self._having("transferred")
        self._wakes = self._having("wakes_s")
        self._frees_in_order = self.batching.frees_in_order
        self._ends_by_place = not overrides(self.batching, "end_in_order", Batching)
        self._reports_copies = self.batching.reports_copies

    def _having(self, hook: str) -> list[Part]:
        """The parts with a hook: of a part it is called sooner than as an object of its own."""
        return [part for part in self.parts if overrides(part, hook)]

    # -- events ----------------------------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """A request arrived."""
        if reason := self.batching.refusal(seq):
            self.ignore(seq, reason)
            return
        self.order.add(seq)

    def schedule(self, now_s: float) -> IterationPlan | None:
        """Decide the next iteration, or None if there is nothing to do until another event arrives."""
        self.now_s = now_s
        while True:
            self.changed = False
            for part in self._prepare:
                part.prepare(now_s)
            for part in self._reserve:
                part.reserve()
            plan = IterationPlan()
            self.batching.fill(plan, now_s)
            if plan.num_decodes or plan.chunks or plan.swapped_out_blocks or plan.awaited or plan.after:
                for part in self._complete:
                    part.complete(plan)
                break
            if self._reports_copies:
                if not self.changed and not self.beside:
                    return None
                break
            if self.in_flight:
                return None
            # Like vLLM's engine loop: an empty step that changed the queues is followed by another at once.
            if not self.changed and not self.eviction.unblock():
                if not self.beside and not self.pulled:
                    return None
                break
        if self._followed is not None and plan.num_decodes:
            self._followed.follow(plan)
        if self.changes:
            plan.changes = tuple(self.changes)
            self.changes = []
        if self.beside:
            plan.beside = tuple(self.beside)
            self.beside = []
        if self.pulled:
            plan.pulled = tuple(self.pulled)
            self.pulled = []
        return plan

    def commit(self, plan: IterationPlan, times: StepTimes) -> None:
        """The plan was carried out for `times.iterations` iterations."""
        batch, end_s = self.batch, times.end_s
        ended: list[Sequence] = []
        if plan.num_decodes:
            if plan.taken is not None:
                self.batching.accepted(plan)
                ended = self.drafting.advance_unevenly(plan.taken, end_s)
            elif plan.num_decodes == len(batch.members):
                if times.tokens > 1:
                    self.memory.grow_further(batch, times.tokens)
                ended = batch.advance(times)
            else:
                ended = batch.advance_some(plan.decodes, end_s)
                if self._moved:
                    for seq in plan.decodes:
                        if seq in batch.members:
                            for part in self._moved:
                                part.moved(seq)
        if self._frees_in_order and not self._ends_by_place:
            self.batching.end_in_order(plan, ended, end_s)
        elif self._frees_in_order and ended:
            self._end_by_place(plan, ended, end_s)
        elif plan.chunks:
            self.batching.commit_chunks(plan, end_s)
        if times.iterations > 1:
            self.batching.record_repeats(times.iterations - 1)
        for part in self._committed:
            part.committed(plan, times)
        if not self._frees_in_order:
            for seq in ended:
                self.end(seq, end_s)

    def commit_ahead(self, plan: IterationPlan, times: StepTimes) -> list[Sequence]:
        """The plan is in flight: count its tokens, and let sequences that end with them wait for `deliver`."""
        members = self.batch.members
        if self.landed:
            for seq in self.landed.intersection(plan.decodes):
                # All that this step computes of it was known when it was scheduled.
                seq.num_computed = self.batch.num_tokens_of(seq)
            self.landed = set()
        if plan.num_decodes < len(members):
            self.landed = set(members).difference(plan.decodes)
        ended = self._ended_ahead = self._last_ended = []
        self.commit(plan, times)
        self._ended_ahead = None
        for seq in ended:
            self.last_in_flight[seq] = None
        self.in_flight += 1
        return ended

    def take_back(self, seq: Sequence, last_token_s: float) -> None:
        """The token of `seq`, in no batch, that is in flight is dropped when it comes: its last came at `last_token_s`.

        That is as if it had not been computed; it will be, again.
        """
        if seq in self.last_in_flight:
            del self.last_in_flight[seq]
            self._last_ended.remove(seq)
        seq.num_generated -= 1
        seq.num_tokens -= 1
        if seq.num_generated:
            self.gaps.add(seq.last_token_s - last_token_s, 0.0, 1, -1)
        else:
            seq.first_token_s = -1.0
        seq.last_token_s = last_token_s
        if self.batch.token_log is not None:
            self.batch.token_log[seq.request.request_id].pop()

    def deliver(self, ended: list[Sequence]) -> None:
        """The oldest plan in flight was carried out, and `ended` with it."""
        self.in_flight -= 1
        for seq in ended:
            if seq in self.last_in_flight:
                del self.last_in_flight[seq]
                self.end(seq, seq.last_token_s)
            else:
                # Preempted with its last token in flight.
                self.order.remove(seq)
                if seq.calls:
                    self.stage.call(seq)
                else:
                    self._finish(seq, seq.last_token_s)
        for part in self._delivered:
            part.delivered()

    def _end_by_place(self, plan: IterationPlan, ended: list[Sequence], end_s: float) -> None:
        """Decoded and prefilled sequences may end together: they give back their blocks in the order of the step."""
        at_once = [chunk.seq for chunk in plan.chunks if self._ends_with(chunk)]
        if not at_once:
            # Chunks are in order, and prompts stand behind decodes.
            for seq in self.batching.in_order(ended) if len(ended) > 1 else ended:
                self.end(seq, end_s)
            self.batching.commit_chunks(plan, end_s)
            return
        # A sequence may have several chunks: a prompt with gaps.
        for seq in self.batching.in_order([*ended, *at_once]):
            if seq in at_once:
                self.batching.commit_chunks(plan, end_s, [chunk for chunk in plan.chunks if chunk.seq is seq])
            else:
                self.end(seq, end_s)
        self.batching.commit_chunks(plan, end_s, [chunk for chunk in plan.chunks if chunk.seq not in at_once])

    @staticmethod
    def _ends_with(chunk: PrefillChunk) -> bool:
        seq = chunk.seq
        return chunk.num_cached + chunk.num_new == seq.num_tokens and seq.num_generated + 1 >= seq.output_tokens

    def transfer_done(self, move: Move) -> None:
        """A copy beside or behind the computation, or between engines, ended."""
        if move.source is PEER or move.target is PEER:
            self.stage.migrated(move)
            return
        self.memory.transfer_done(move)
        for part in self._transferred:
            part.transferred(move)

    def truncate(self, seq: Sequence, output_tokens: int) -> None:
        """`seq` ends with its `output_tokens`-th token, which is yet to come (a stop token; a client that has left)."""
        if seq in self.batch.members:
            self.batch.shorten(seq, output_tokens)
        else:
            seq.output_tokens = output_tokens

    def stop(self, seq: Sequence, output_tokens: int, now_s: float) -> None:
        """`seq` has ended at `now_s` with its `output_tokens`-th token, though it may have been scheduled beyond."""
        is_out = False
        if seq in self.batch.members:
            self.take_out(seq)
        elif seq in self.last_in_flight:
            del self.last_in_flight[seq]
        else:
            # Preempted with the token in flight.
            is_out = self.order.remove(seq)
        seq.num_generated = seq.output_tokens = output_tokens
        if is_out:
            self.memory.forget(seq)
            self._finish(seq, now_s)
        else:
            self.end(seq, now_s)

    def cancel(self, seq: Sequence) -> None:
        """The client of `seq` has left: it leaves the queue, or ends with its next token (a tool answers first)."""
        if seq.status in (Status.FINISHED, Status.IGNORED):
            return
        if seq.status is Status.WAITING and self.order.remove(seq):
            self.ignore(seq, "cancelled")
            return
        seq.drop_calls()
        self.truncate(seq, min(seq.output_tokens, self.num_generated_of(seq) + 1))

    @property
    def wakes_s(self) -> float:
        """When some part has something to decide though nothing has happened, s; infinite where none has."""
        return min([part.wakes_s() for part in self._wakes]) if self._wakes else inf

    # -- what others may know ----------------------------------------------------------------------------------------

    def num_unknown(self, seq: Sequence) -> int:
        """Tokens of a member of the batch that are in flight when a step is scheduled: 1 or 0."""
        return 1 if self.in_flight and seq not in self.landed else 0

    def num_generated_of(self, seq: Sequence) -> int:
        """Output tokens that a sequence has had."""
        return self.batch.num_generated_of(seq) if seq in self.batch.members else seq.num_generated

    @property
    def num_waiting(self) -> int:
        """Sequences that are yet to be admitted, or to be computed again."""
        return len(self.order)

    @property
    def num_running(self) -> int:
        """Sequences admitted and not finished, parked or paused ones included, swapped ones not."""
        batching = self.batching
        running = len(self.batch.members) + len(batching.partials) + len(self.last_in_flight)
        return running + batching.num_paused + self.stage.num_parked

    @property
    def num_seated(self) -> int:
        """Sequences that have a seat: those that decode, are partly prefilled, or are on the way back."""
        return len(self.batch.members) + len(self.batching.partials) + self.stage.num_returning

    @property
    def num_swapped(self) -> int:
        """Sequences whose KV is (partly) on the host and that do not decode."""
        return self.eviction.num_out + self.stage.num_parked - self.stage.num_calling

    @property
    def has_unfinished(self) -> bool:
        """Whether any sequence is still to end."""
        return bool(self.order) or self.eviction.num_out > 0 or self.num_running > 0

    def holders(self) -> Iterator[tuple[Sequence, Tier]]:
        """Every sequence that holds blocks and is not in the decode batch, and where. For recounts."""
        for part in self.parts:
            yield from part.holders()
        for seq in self.last_in_flight:
            yield seq, Tier.GPU

    def record_tokens(self, log: dict[int, list[float]]) -> None:
        """Keep the time of every token, by request id, in `log`."""
        self.batch.token_log = log

    def record_decisions(self) -> None:
        """Keep a hash of every decision in `decisions`, where the batching tells them."""
        if self.batching.records_decisions:
            self.decisions = self.batching.record = DecisionLog()

    # -- what parts do -----------------------------------------------------------------------------------------------

    def start(self, seq: Sequence, now_s: float, *, placed: bool = False) -> None:
        """`seq`, which was admitted, gets its blocks, unless it has them, and runs."""
        if not placed:
            self.memory.place(seq, seq.num_tokens)
        self.admission.admitted(seq)
        seq.status = RUNNING
        if seq.first_scheduled_s < 0.0:
            seq.first_scheduled_s = now_s

    def join(self, seq: Sequence, *, first: bool = False, num_hosted: int = 0) -> None:
        """`seq` decodes from the next step on, `num_hosted` of its layer groups from the host."""
        seq.status = RUNNING
        self.batch.add(seq, first=first, num_hosted=num_hosted)
        for part in self._joined:
            part.joined(seq)

    def join_known(self, seq: Sequence) -> None:
        """`seq` decodes from the next step on, and no token of it is in flight."""
        self.join(seq)
        if self.batching.schedules_ahead:
            self.landed.add(seq)

    def park(self, seq: Sequence, status: Status = PARKED) -> None:
        """`seq`, prefilled and in no batch, waits for something else than its turn."""
        seq.status = status
        for part in self._parked:
            part.parked(seq)

    def append(self, seq: Sequence, num_tokens: int) -> None:
        """`seq`, in no batch, has `num_tokens` more tokens of context that it did not generate."""
        seq.num_tokens += num_tokens
        self.changes.append(Append(seq, num_tokens))

    def take_out(self, seq: Sequence) -> None:
        """Take `seq` out of the batch between steps."""
        self.batching.leaving(seq)
        self.batch.remove(seq)

    def allow_jump(self, plan: IterationPlan) -> None:
        """Let decode iterations that repeat themselves be one event, as long as every part's answers hold."""
        batch = self.batch
        if plan.num_decodes != len(batch.members) or not plan.num_decodes or plan.has_swaps or self.beside:
            return
        steps = batch.steps_to_finish()
        for part in self._repeats:
            if steps <= 1:
                return
            steps = part.repeats(plan, steps)
        if steps > 1 and self._wakes:
            plan.until_s = min(plan.until_s, self.wakes_s)
        plan.max_steps = steps

    def emit_token(self, seq: Sequence, end_s: float) -> bool:
        """The token a complete prefill samples; False if it was the last."""
        if seq.first_token_s < 0.0:
            seq.first_token_s = end_s
        else:
            self.gaps.add(end_s - seq.last_token_s, 0.0, 1, 1)
        if self.batch.token_log is not None:
            self.batch.token_log.setdefault(seq.request.request_id, []).append(end_s)
        seq.last_token_s = end_s
        seq.prefilling = False
        seq.num_generated += 1
        seq.num_tokens += 1
        if seq.num_generated < seq.output_tokens:
            return True
        self.end(seq, end_s)
        return False

    def end(self, seq: Sequence, end_s: float) -> None:
        """A sequence has all its tokens: its blocks are free for the next step. Or it calls a tool."""
        if self._ended_ahead is not None:
            self._ended_ahead.append(seq)
            self.memory.await_last_token(seq)
            return
        if seq.calls:
            self.stage.call(seq)
            return
        for part in self._left:
            part.left(seq)
        self.memory.release(seq)
        self._finish(seq, end_s)

    def _finish(self, seq: Sequence, end_s: float) -> None:
        seq.status = FINISHED
        seq.finish_s = end_s
        self.finished.append(seq)

    def release(self, seq: Sequence) -> None:
        """`seq`, in no queue and no batch, gives up its KV."""
        self.tell_left(seq)
        self.memory.release(seq)

    def tell_left(self, seq: Sequence) -> None:
        """Tell all parts that `seq` gives up its KV, wherever that is."""
        for part in self._left:
            part.left(seq)

    def recompute(self, seq: Sequence) -> None:
        """`seq` gives up its KV and is to be computed again; the caller puts it back in the queue."""
        # With its last token in flight it may seem to have ended: memory is told that its blocks are needed now.
        seq.status = Status.WAITING
        self.release(seq)
        seq.reset_for_recompute()

    def ignore(self, seq: Sequence, reason: str) -> None:
        """End `seq` without completing it (vLLM's FINISHED_IGNORED); it must hold no blocks."""
        self.memory.forget(seq)
        seq.status = Status.IGNORED
        seq.error = f"ignored: {reason}"
        self.changed = True
        self.counters.ignored[reason] = self.counters.ignored.get(reason, 0) + 1
        self.finished.append(seq)
