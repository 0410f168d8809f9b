"""`SlackAdmission`: prefills only within the TPOT slack of all that decode (LayerKV, Algorithm 1, Eq. 1-3).

Memory is asked first: its refusals last, slack changes with every iteration.
"""

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, ClassVar, Self

from sim.engine.plan import IterationPlan, StepTimes
from sim.engine.sequence import Sequence
from sim.parts.admission.watermark import Watermark
from sim.systems.layerkv.equations import Equations
from sim.systems.layerkv.preset import LayerKVOptions
from sim.systems.layerkv.slack_book import SlackBook

if TYPE_CHECKING:
    from sim.systems.builder import Builder


class SlackAdmission(Watermark):
    """The head starts if it has blocks and all prefills of this step together leave all their TPOT (Eq. 2).

    Args:
        num_gpu_blocks: of the pool, for the watermark.
        prefill_s: Eq. 3's time of a prompt of so many tokens.
        options: the TPOT that Eq. 1 defends, and what is left out of Eq. 2.
    """

    name: ClassVar[str] = "slack"
    by_memory_alone: ClassVar[bool] = False
    options: ClassVar[type | None] = LayerKVOptions
    # Of a step, as the first prompt that witnesses did not hold up has found it.
    memoized = ("_least_s",)

    def __init__(self, num_gpu_blocks: int, prefill_s: Callable[[int], float], options: LayerKVOptions) -> None:
        super().__init__(num_gpu_blocks)
        self.prefill_s = prefill_s
        self.book = SlackBook(options.tpot_slo_ms / 1e3, drop_irrecoverable=options.drop_irrecoverable)
        self._least_s: float | None = None
        self._admitted_s = 0.0
        # Prefill time that Eq. 2 refused in this step.
        self._refused_s: float | None = None
        self._last_tpot_s: float | None = None

    @classmethod
    def build(cls, b: "Builder") -> Self:
        return cls(b.limits.num_gpu_blocks, Equations.of(b).prefill_s, b.options(LayerKVOptions))

    def prepare(self, now_s: float) -> None:
        self._least_s = self._refused_s = None
        self._admitted_s = 0.0

    def admits(self, seq: Sequence) -> bool:
        return self.memory.fits(seq, self.keep_free) and not self.delays(seq)

    def delays(self, seq: Sequence) -> bool:
        """Eq. 2 is violated."""
        prefill_s = self._admitted_s + self.prefill_s(seq.num_tokens)
        if self._least_s is None:
            batch, now_s = self.batch, self.scheduler.now_s
            tpot_s = self._last_tpot_s
            if tpot_s is None:
                cost = self.scheduler.deployment.cost
                tpot_s = cost.decode_steps(
                    max(1, len(batch)), batch.context_tokens, batch.windowed, batch.longest_tokens
                )[0]
            if not self.book.is_blocked(prefill_s, now_s, tpot_s, batch.step):
                self._least_s = self.book.least_s(prefill_s, now_s, tpot_s, batch.step)
        return self._least_s is None or prefill_s >= self._least_s

    @property
    def refused_for_slo(self) -> bool:
        return self._refused_s is not None

    @property
    def reason(self) -> str:
        prefills = "" if self._refused_s is None else f", prefills {self._refused_s * 1e3:.0f} ms"
        if self._least_s is None:
            return f"less slack{prefills}" if prefills else ""
        return f"slack {self._least_s * 1e3:.0f} ms{prefills}" if self._least_s < inf else "no slack to keep"

    def admitted(self, seq: Sequence) -> None:
        self._admitted_s += self.prefill_s(seq.num_tokens)

    def delayed(self, seq: Sequence) -> None:
        self._refused_s = self._admitted_s + self.prefill_s(seq.num_tokens)

    def repeats(self, plan: IterationPlan, steps: int) -> int:
        """Slack changes with time: as long as one that blocks is sure to go on blocking."""
        if self._refused_s is None:
            return steps
        cost = self.scheduler.deployment.cost
        if self.batch.cohorts or (cost.host is not None and cost.host.hidden):
            # Iterations that wait for the link, or for the host beside them, are not the cost model's run.
            return 1
        first_s, slope_s = cost.decode_steps(
            plan.num_decodes, plan.decode_context_tokens, self.batch.windowed, plan.decode_longest_tokens
        )
        return 1 + self.book.blocked_steps(
            self._refused_s, self.scheduler.now_s, self.batch.step, first_s, slope_s, steps - 1
        )

    def committed(self, plan: IterationPlan, times: StepTimes) -> None:
        if plan.num_decodes and not plan.chunks:
            self._last_tpot_s = times.last_s if times.iterations > 1 else times.end_s - self.scheduler.now_s

    def joined(self, seq: Sequence) -> None:
        self.book.update(seq, decoding=True)

    def moved(self, seq: Sequence) -> None:
        self.book.update(seq, decoding=True)

    def parked(self, seq: Sequence) -> None:
        self.book.update(seq, decoding=False)

    def left(self, seq: Sequence) -> None:
        self.book.remove(seq)
