"""`CostModel`: what an iteration, a layer and a copy take. The clock and every policy's predictions share it.

`LayerWork` says what one class of like layers computes and moves; `CostModel.layer_s` turns it into seconds on each
lane, whatever the form. `sim.cost.forms` has the forms.
"""

from abc import ABC, abstractmethod
from math import ceil, inf, sqrt
from typing import TYPE_CHECKING, NamedTuple

from sim.engine.changes import Direction
from sim.engine.plan import IterationPlan, WindowTokens

if TYPE_CHECKING:
    from sim.cost.host import Host

ACTIVATION_BYTES = 2
"""Bytes of an activation element (fp16/bf16)."""


class LayerWork(NamedTuple):
    """What each of `num_layers` like layers does in one pass: its own computation, and what it waits for and sends out.

    `h2d` and `d2h` are bytes and separate copies. `project_tokens` have their keys and values made from hidden states,
    `recompute_tokens` are computed again from the layer's input.
    """

    num_layers: int
    compute_s: float
    h2d_bytes: float = 0.0
    h2d_copies: int = 0
    d2h_bytes: float = 0.0
    d2h_copies: int = 0
    project_tokens: int = 0
    recompute_tokens: int = 0


class LayerTimes(NamedTuple):
    """Seconds that each of `num_layers` like layers takes of the compute lane and of PCIe in each direction."""

    num_layers: int
    compute_s: float
    h2d_s: float
    d2h_s: float


BATCHED_COPIES = 4
"""So many pieces or more are asked for in one call of the driver, fewer one by one."""


class CostModel(ABC):
    """Seconds of iterations, layers and copies. Deterministic; its one state is what it was asked beyond its range."""

    beyond: dict[str, float]
    """What was priced beyond the range the constants were fitted on: quantity of `FittedRange`, most seen."""
    all_reduce_on_pcie: bool = False
    """Whether all-reduces travel over the same lane as KV copies."""
    num_all_reduces: int = 0
    """All-reduces in one iteration."""
    straight_decodes: float = inf
    """Most decodes whose durations do not bend with their context; those of more do where `straight_steps` says."""
    follows_longest: bool = False
    """Whether decodes of unlike contexts take longer than alike ones: then plans say the longest."""
    copies_beside_compute: bool = True
    """Whether copies run while the device computes; else it makes them itself, one after the other."""
    host: "Host | None" = None
    """The engine's own time, which `iteration_s` and `decode_run` leave out; None: prices are all there is."""

    def __init__(self) -> None:
        self.beyond = {}

    @abstractmethod
    def iteration_s(self, plan: IterationPlan) -> float:
        """Computation of one iteration, copies and the engine's host time left out."""

    def prelude_s(self, plan: IterationPlan) -> float:
        """Part of `iteration_s` before the GPU begins, which stages of a pipeline do not share; not `host`'s."""
        return 0.0

    def added_host_s(self, num_sequences: int) -> float:
        """What `host` adds to an iteration of so many sequences: nothing where it is hidden, s."""
        return 0.0 if self.host is None else self.host.added_s(num_sequences)

    @abstractmethod
    def decode_run(
        self, num_decodes: int, context_tokens: int, window: WindowTokens | None = None, longest_tokens: int = 0
    ) -> tuple[float, float]:
        """First duration (s) and growth (s per iteration) of decode iterations of a batch that stays the same.

        `window` is what layers with a sliding window read, where the model has any; `longest_tokens` the longest of
        the contexts, where the cost follows it (0: all are alike).
        """

    def note_jump(self, plan: IterationPlan, iterations: int) -> None:  # noqa: B027 - not all have a range
        """So many iterations were priced together: the last one's contexts may be beyond the range."""

    def decode_steps(
        self, num_decodes: int, context_tokens: int, window: WindowTokens | None = None, longest_tokens: int = 0
    ) -> tuple[float, float]:
        """`decode_run` with host time that is not hidden: how long the iterations last, where nothing else moves."""
        first_s, slope_s = self.decode_run(num_decodes, context_tokens, window, longest_tokens)
        return first_s + self.added_host_s(num_decodes), slope_s

    def straight_steps(
        self, num_decodes: int, context_tokens: int, window: WindowTokens | None = None, longest_tokens: int = 0
    ) -> float:
        """Iterations, at least 1, over which `decode_run` is exact; asked beyond `straight_decodes`."""
        return inf

    @abstractmethod
    def prefill_s(self, prompt_tokens: int) -> float:
        """Prefill of one prompt, alone, with host time that is not hidden."""

    @abstractmethod
    def copy_s(self, num_bytes: float, num_copies: int, direction: Direction) -> float:
        """Copy over PCIe of `num_bytes` per GPU in `num_copies` pieces, alone on the link."""

    @abstractmethod
    def num_copies(self, num_blocks: int, layers: int) -> int:
        """Pieces in which `num_blocks` blocks that hold `layers` layers each are copied."""

    @abstractmethod
    def project_s(self, num_tokens: int) -> float:
        """Keys and values of one layer made from its input for `num_tokens` tokens (HCache)."""

    @abstractmethod
    def recompute_s(self, num_tokens: int) -> float:
        """One layer computed again for a sequence's first `num_tokens` tokens."""

    @abstractmethod
    def unread_s(self, num_tokens: int) -> float:
        """What an iteration saves where `num_tokens` of its decodes' contexts are read together with others', s.

        No more than they cost in `iteration_s`: what is read once is still attended to by each."""

    def layer_s(self, work: LayerWork) -> LayerTimes:
        """What each layer of a class takes of each lane."""
        compute_s, h2d_s, d2h_s = work.compute_s, 0.0, 0.0
        if work.project_tokens:
            compute_s += self.project_s(work.project_tokens)
        if work.recompute_tokens:
            compute_s += self.recompute_s(work.recompute_tokens)
        if work.h2d_copies:
            h2d_s = self.copy_s(work.h2d_bytes, work.h2d_copies, Direction.H2D)
        if work.d2h_copies:
            d2h_s = self.copy_s(work.d2h_bytes, work.d2h_copies, Direction.D2H)
        return LayerTimes(work.num_layers, compute_s, h2d_s, d2h_s)

    def all_reduce_s(self, num_tokens: int) -> float:
        """All-reduces of one iteration, part of `iteration_s`, s."""
        return 0.0


def ridge(compute_s: float, memory_s: float, exponent: float) -> float:
    """Time of work that computes for `compute_s` and moves memory for `memory_s`, s.

    (c^p + m^p)^(1/p): p = 1 one after the other, p towards infinity perfect overlap, max(c, m). Kernels lie between:
    waves of tiles that leave multiprocessors idle, and prologues that wait for memory, round off the roofline's ridge.
    """
    if compute_s < memory_s:
        compute_s, memory_s = memory_s, compute_s
    return compute_s * (1.0 + (memory_s / compute_s) ** exponent) ** (1.0 / exponent)


def run_s(first_s: float, slope_s: float, steps: int) -> float:
    """Duration of `steps` iterations, the first `first_s` long and each further one longer by `slope_s`."""
    return first_s * steps + slope_s * (steps * (steps - 1) / 2)


def steps_until(target_s: float, first_s: float, slope_s: float, max_steps: int) -> int:
    """Fewest iterations (at least 1, at most `max_steps`) that together last `target_s` or longer."""
    if target_s <= first_s:
        return 1
    if first_s <= 0.0 and slope_s <= 0.0:
        # Iterations that take no time never get there.
        return max_steps
    if slope_s * max_steps <= 1e-9 * first_s:
        steps = ceil(target_s / first_s)
    else:
        half = first_s - slope_s / 2
        steps = ceil((sqrt(half * half + 2 * slope_s * target_s) - half) / slope_s)
    steps = max(1, min(steps, max_steps))
    # Rounding may be off by one either way.
    while steps > 1 and run_s(first_s, slope_s, steps - 1) >= target_s:
        steps -= 1
    while steps < max_steps and run_s(first_s, slope_s, steps) < target_s:
        steps += 1
    return steps
