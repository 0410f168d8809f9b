"""`BatchAndRatio`: eLLM's choice, every step, of how many sequences run and which share of their tokens is uncached.

What runs goes on. Among the batch sizes from there on the best by Eq. 5 is taken with the least uncached ratio that
memory allows; where none keeps to the SLO none is admitted. If those that run can only be held with so many tokens
uncached that T exceeds the SLO, the last is computed again. With memory that caches all tokens the ratio is 0, as in
the paper's baselines, and only the batch is chosen.
"""

from itertools import islice
from math import inf
from typing import TYPE_CHECKING, ClassVar, Self

from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence
from sim.parts.admission.watermark import WATERMARK
from sim.parts.base import Admission
from sim.parts.needs import Need
from sim.systems.ellm.equations import CONFIGURATIONS, Configuration, StepCosts
from sim.systems.ellm.preset import TokenWiseOptions
from sim.systems.ellm.solver import Batch, Choice, Memory, best, least_bubble
from sim.systems.ellm.token_wise import TokenWiseMemory

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler
    from sim.systems.builder import Builder


class BatchAndRatio(Admission):
    """The head starts while the batch is smaller than what was chosen.

    Args:
        times: what a step takes.
        options: the TPOT that T(b, r), and the longest wait since a running sequence's last token, keep to together;
            the kernels. Where the equations are `printed` it chooses as the paper does: T with all layers computed
            again, the largest batch (Eq. 5 does not say which), M_o as for (3, 2) at first, then as for the
            configuration with the least bubble.
    """

    name: ClassVar[str] = "token-wise"
    options: ClassVar[type | None] = TokenWiseOptions
    needs: ClassVar[tuple[Need, ...]] = (
        Need("batching", "counts whole prompts", lacks="splits_prompts"),
        Need("stage", "takes sequences that run to have all blocks", lacks="brings_layers_back"),
        Need("order", "takes requests in the order in which they come", offers="sticky"),
    )

    def __init__(self, times: StepCosts, options: TokenWiseOptions) -> None:
        self.times, self.tpot_slo_s, self.printed = times, options.tpot_slo_ms / 1e3, options.printed
        self.fused, self.overlapped = options.fused, options.overlapped
        self._may_run = 0
        self._started = 0

    @classmethod
    def build(cls, b: "Builder") -> Self:
        options = b.options(TokenWiseOptions)
        return cls(options.step_times(b.deployment, b.limits.block_size), options)

    def bind(self, scheduler: "Scheduler") -> None:
        super().bind(scheduler)
        memory, limits = scheduler.memory, scheduler.limits
        self.token_wise = memory if isinstance(memory, TokenWiseMemory) else None
        if self.token_wise is not None:
            self.room = self.token_wise.room
        else:
            self.keep_free = int(WATERMARK * limits.num_gpu_blocks)
            tokens = limits.num_gpu_blocks * limits.block_size
            self.room = Memory(tokens, (1.0,) * len(CONFIGURATIONS), most_ratio=0.0)

    # -- the choice --------------------------------------------------------------------------------------------------

    def prepare(self, now_s: float) -> None:
        self._started = 0
        waiting, members = self.scheduler.order.waiting, self.batch.members
        if waiting or (members and not self._all_fit()):
            while not self._choose(now_s):
                self._preempt_last()

    def _all_fit(self) -> bool:
        memory = self.token_wise
        if memory is None:
            return True
        if memory.lacking or memory.room.least_ratio:
            return False
        return self.batch.blocks_needed(1) * memory.unit <= memory.gpu.free

    def _choose(self, now_s: float) -> bool:
        """Set batch size and ratio; False where those that run cannot go on."""
        batch, order, memory = self.batch, self.scheduler.order, self.token_wise
        running = len(batch.members)
        lengths = [batch.num_tokens_of(seq) for seq in batch.members]
        lengths += [seq.num_tokens for seq in islice(order, self.scheduler.limits.max_num_seqs - running)]
        waited_s = max((now_s - batch.last_token_s_of(seq) for seq in batch.members), default=0.0)
        found, first = None, max(running, 1)
        if len(lengths) > running:
            found = self._best(lengths, self.tpot_slo_s - waited_s, first)
        if found is None and lengths:
            found = self._best(lengths[:first], inf, first)
            if found and running > 1 and found.ratio > self.room.least_ratio and found.step_s > self.tpot_slo_s:
                found = None
        self._may_run = found.batch_size if found else running
        if memory is None:
            return True
        if found is None:
            return not running
        memory.choose(found.ratio, found.configuration)
        return True

    def _best(self, lengths: list[int], budget_s: float, least: int) -> Choice | None:
        batch, times = Batch(lengths, self.memory.block_size), self.times
        if not self.printed:
            return best(
                times, batch, self.room, budget_s, least=least, fused=self.fused, overlapped=self.overlapped
            )  # fmt: skip
        # M_o as for (3, 2) may leave no room where that of another configuration does.
        tried = (self._largest(batch, budget_s, least, c) for c in reversed(CONFIGURATIONS))
        found = next((choice for choice in tried if choice is not None), None)
        if found is None or found.ratio == 0.0:
            return found
        b = found.batch_size - 1
        place = least_bubble(times, float(batch.tokens[b]), float(batch.squares[b]), found.ratio, CONFIGURATIONS)
        return self._largest(batch, budget_s, least, CONFIGURATIONS[place]) or found

    def _largest(self, batch: Batch, budget_s: float, least: int, configuration: Configuration) -> Choice | None:
        room, place = self.room, CONFIGURATIONS.index(configuration)
        room = room._replace(
            scratch=room.scratch[place : place + 1], hosted=room.hosted and room.hosted[place : place + 1]
        )  # fmt: skip
        return best(
            self.times, batch, room, budget_s, least=least, configurations=(configuration,),
            all_recomputed=True, largest=True, fused=self.fused, overlapped=self.overlapped,
        )  # fmt: skip

    def _preempt_last(self) -> None:
        """Those that run cannot go on whatever is uncached: the last is computed again."""
        scheduler = self.scheduler
        seq = next(reversed(self.batch.members))
        scheduler.take_out(seq)
        scheduler.recompute(seq)
        scheduler.counters.preemptions += 1
        scheduler.changed = True
        scheduler.order.put_back([seq])

    # -- what may start ----------------------------------------------------------------------------------------------

    def admits(self, seq: Sequence) -> bool:
        running = len(self.batch.members) + self._started
        return running < self._may_run and self.memory.fits(seq, self.keep_free)

    def admitted(self, seq: Sequence) -> None:
        self._started += 1

    def repeats(self, plan: IterationPlan, steps: int) -> int:
        return 1 if self.scheduler.order.waiting else steps
