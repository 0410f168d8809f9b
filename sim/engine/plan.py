"""`IterationPlan`: what the engine wants done next. A driver prices it (simulator) or executes it (GPU)."""

from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import NamedTuple, cast

from sim.engine.sequence import Sequence


class Direction(Enum):
    """Which way a copy goes over PCIe."""

    D2H = "d2h"
    H2D = "h2d"


class Origin(Enum):
    """Where a prefill chunk's sequence was before this iteration."""

    ADMITTED = "waiting"
    CONTINUED = "running"
    SWAPPED_IN = "swapped"


class PrefillChunk(NamedTuple):
    """`num_new` prompt tokens of `seq` to compute, after `num_cached` that are computed already."""

    seq: Sequence
    num_new: int
    num_cached: int
    origin: Origin


class StepTimes(NamedTuple):
    """When the tokens of `steps` iterations came, s: the first at `first_end_s`, the last at `end_s`.

    The second iteration took `second_s`, each further one `slope_s` more than the one before.
    """

    steps: int
    first_end_s: float
    second_s: float
    slope_s: float
    end_s: float


class Transfer(NamedTuple):
    """A copy beside the computation: `num_bytes` (per GPU) of `layers` layers of `seq` in `num_copies` pieces.

    The driver reports its completion to the engine at the first iteration boundary after it; then `num_blocks` blocks
    of the GPU pool are free.
    """

    seq: Sequence
    direction: Direction
    layers: int
    num_blocks: int
    num_bytes: float
    num_copies: int


# `PrefillChunk(*fields)` and `Transfer(*fields)` at half their cost: a named tuple's own constructor is a Python
# function, the tuple's is not.
_chunk = cast(Callable[[tuple[Sequence, int, int, Origin]], PrefillChunk], partial(tuple.__new__, PrefillChunk))
make_transfer = cast(
    Callable[[tuple[Sequence, Direction, int, int, float, int]], Transfer], partial(tuple.__new__, Transfer)
)


class IterationPlan:
    """One iteration, or `max_steps` decode iterations that nothing can tell apart.

    Sums are what prices need (tokens; `prefill_pairs` counts query-context pairs, `prefill_squares` is the sum of
    squared chunk lengths); the sequences themselves are what execution needs. `num_decodes` members of the batch take a
    token: all of them, or only the first (`decodes_first`) where a token budget cut the batch.
    """

    # Defaults live on the class: most iterations change few of them, and a plan is made for each.
    chunks: tuple[PrefillChunk, ...] = ()
    prefill_tokens = 0
    prefill_pairs = 0
    prefill_squares = 0
    num_sampled_prefills = 0
    num_decodes = 0
    decode_context_tokens = 0
    decodes_first = False
    max_steps = 1
    cut_on_arrival = True
    """False where a jump may run through arrivals: the head of the queue is blocked by memory."""
    swapped_out_blocks = 0
    swapped_in_blocks = 0
    """Blocks copied before the computation, on its stream (vLLM 0.5.5's swap)."""
    streamed_bytes = 0.0
    streamed_copies = 0
    """Host-resident KV that each layer of the computation waits for."""
    pipelined_layers = 0
    pipelined_bytes = 0.0
    pipelined_copies = 0
    """KV of the prefills that leaves for the host, layer by layer, while later layers compute."""
    pipelined_d2h: tuple[Transfer, ...] = ()
    """Those of these copies whose end the engine wants to hear of."""
    background: tuple[Transfer, ...] = ()
    """Copies that nothing in this iteration waits for."""

    @property
    def kind(self) -> str:
        """What the computation is, for people: decode, prefill or mixed."""
        return "decode" if not self.chunks else "mixed" if self.num_decodes else "prefill"

    @property
    def has_swaps(self) -> bool:
        """Whether blocks are copied before the computation."""
        return bool(self.swapped_out_blocks or self.swapped_in_blocks)

    def add_chunk(self, seq: Sequence, num_new: int, origin: Origin) -> None:
        """Compute `num_new` more prompt tokens of `seq`."""
        cached = seq.num_computed
        self.chunks += (_chunk((seq, num_new, cached, origin)),)
        self.prefill_tokens += num_new
        self.prefill_pairs += num_new * cached + num_new * (num_new + 1) // 2
        self.prefill_squares += num_new * num_new
        if cached + num_new == seq.num_tokens:
            self.num_sampled_prefills += 1
