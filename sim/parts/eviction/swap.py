"""`Swap`: a victim's KV goes to host memory before the step and comes back whole (vLLM 0.5.5's `swap` mode).

A full host turns a swap into a recomputation; vLLM 0.5.5 aborts there.
"""

from collections import deque
from collections.abc import Iterable
from typing import ClassVar

from sim.engine.changes import Tier
from sim.engine.plan import IterationPlan, Origin
from sim.engine.sequence import Sequence, Status
from sim.parts.eviction.recompute import Recompute
from sim.parts.needs import Need


class Swap(Recompute):
    """Victims return first come, first served, before any prompt is admitted."""

    name: ClassVar[str] = "swap"
    needs: ClassVar[tuple[Need, ...]] = (Need("memory", "moves whole sequences", offers="can_swap"),)
    moves_whole: ClassVar[bool] = True
    returns_when_asked: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.swapped: deque[Sequence] = deque()
        self._swapped_out: list[Sequence] = []

    def evict(self, seq: Sequence, plan: IterationPlan) -> None:
        if self.swap_out(seq, plan):
            self._swapped_out.append(seq)

    @property
    def has_victims(self) -> bool:
        return bool(self._preempted or self._swapped_out)

    def requeue_victims(self) -> bool:
        any_recomputed = super().requeue_victims()
        if not self._swapped_out:
            return any_recomputed
        self.swapped.extend(self._swapped_out)
        self._swapped_out.clear()
        return True

    def bring_back(self, plan: IterationPlan, budget: int, num_seqs: int) -> None:
        """Bring swapped sequences back in order, as long as blocks and budget last."""
        scheduler, memory, batch = self.scheduler, self.memory, self.batch
        while self.swapped:
            seq = self.swapped[0]
            if memory.outgrew_gpu(seq):
                self._give_up_head()
                continue
            if not self.swaps.can_swap_in(seq, scheduler.admission.keep_free):
                return
            # Not chunked, even under chunked prefill: the rest of a half-done prompt must fit the budget whole.
            num_new = seq.num_tokens - seq.num_computed if seq.prefilling else 1
            if num_new > budget or num_seqs >= scheduler.limits.max_num_seqs:
                return
            self.swapped.popleft()
            self.swaps.swap_in(seq, plan)
            budget -= num_new
            num_seqs += 1
            seq.status = Status.RUNNING
            if seq.prefilling:
                plan.add_chunk(seq, num_new, Origin.SWAPPED_IN)
                continue
            scheduler.join(seq)
            memory.append(seq)
            plan.num_decodes += 1
            plan.decode_context_tokens += batch.num_tokens_of(seq)
            plan.decodes = batch.members

    def _give_up_head(self) -> None:
        seq = self.swapped.popleft()
        self.scheduler.tell_left(seq)
        self.swaps.drop_swapped(seq)
        self.scheduler.ignore(seq, "swapped sequence outgrew the GPU blocks")

    def unblock(self) -> bool:
        """Nothing runs, the GPU is empty, and the head of `swapped` is still refused: vLLM would wait for ever.

        A half-done prompt whose rest exceeds the token budget is computed anew; what the watermark refuses is given up.
        """
        scheduler, gpu = self.scheduler, self.memory.gpu
        if not self.swapped or scheduler.num_running or gpu.free < gpu.num_blocks:
            return False
        seq = self.swapped[0]
        if seq.prefilling and seq.num_tokens - seq.num_computed > scheduler.limits.max_num_batched_tokens:
            self.swapped.popleft()
            self.swaps.drop_swapped(seq)
            seq.reset_for_recompute()
            scheduler.counters.preemptions += 1
            scheduler.order.put_back([seq])
        else:
            self._give_up_head()
        return True

    @property
    def num_out(self) -> int:
        return len(self.swapped)

    def holders(self) -> Iterable[tuple[Sequence, Tier]]:
        return ((seq, Tier.HOST) for seq in self.swapped)
