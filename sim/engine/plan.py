"""`IterationPlan`: what the engine wants done next. An instance prices it (simulator) or executes it (GPU).

A plan leaves nothing to guess: it says how many tokens of each sequence are computed, which blocks change hands and in
what order (`changes`), and what is copied before, beside and behind the computation and between its layers.
"""

from collections.abc import Collection, Mapping
from enum import Enum
from math import inf
from typing import Final, NamedTuple

from sim.engine.changes import Change, Gathered, Move, Projected, Rebuilt, Restore, Streamed
from sim.engine.sequence import Sequence


class Origin(Enum):
    """Where a prefill chunk's sequence was before this iteration."""

    ADMITTED = "waiting"
    CONTINUED = "running"
    SWAPPED_IN = "swapped"


# For the hot path, as those of `sim.engine.changes`.
ADMITTED: Final = Origin.ADMITTED
CONTINUED: Final = Origin.CONTINUED
SWAPPED_IN: Final = Origin.SWAPPED_IN


class PrefillChunk:
    """`num_new` prompt tokens of `seq` to compute, after `num_cached` that are computed already."""

    __slots__ = ("num_cached", "num_new", "origin", "seq")

    def __init__(self, seq: Sequence, num_new: int, num_cached: int, origin: Origin) -> None:
        self.seq = seq
        self.num_new = num_new
        self.num_cached = num_cached
        self.origin = origin


class StepTimes:
    """When the tokens of a run of like iterations came, s: the first at `first_end_s`, the last at `end_s`.

    The second iteration took `second_s`, each further one `slope_s` more than the one before. Every decoding sequence
    took `tokens` tokens in all, as many in each iteration; all tokens of one iteration come at its end.
    """

    __slots__ = ("end_s", "first_end_s", "iterations", "second_s", "slope_s", "tokens")

    def __init__(
        self, iterations: int, first_end_s: float, second_s: float, slope_s: float, end_s: float, tokens: int
    ) -> None:
        self.iterations = iterations
        self.first_end_s = first_end_s
        self.second_s = second_s
        self.slope_s = slope_s
        self.end_s = end_s
        self.tokens = tokens

    @property
    def last_s(self) -> float:
        """Duration of the last iteration, s, where there were several: the reader knows when the first began."""
        return self.second_s + self.slope_s * (self.iterations - 2)


class WindowTokens(NamedTuple):
    """What a layer with a sliding window reads for the decodes: `tokens` in all, one more an iteration for each of the
    `num_growing` whose context is yet shorter than the window."""

    tokens: int
    num_growing: int


SLOTS = (
    "chunks",
    "prefill_tokens",
    "prefill_pairs",
    "prefill_squares",
    "num_sampled_prefills",
    "decodes",
    "num_decodes",
    "num_single_chunks",
    "decode_context_tokens",
    "decode_window",
    "decode_longest_tokens",
    "drafts",
    "taken",
    "decode_shared_tokens",
    "max_steps",
    "until_s",
    "cut_on_arrival",
    "changes",
    "swapped_out_blocks",
    "swapped_in_blocks",
    "mixed_restores",
    "beside",
    "after",
    "awaited",
    "behind",
    "behind_groups",
    "behind_blocks",
    "pulled",
    "streamed",
    "added_s",
)
"""What a plan says; a copy of one says the same."""


class IterationPlan:
    """One iteration, or `max_steps` decode iterations that nothing can tell apart.

    Sums are what prices need (tokens; `prefill_pairs` counts query-context pairs, `prefill_squares` is the sum of
    squared chunk lengths); the sequences themselves are what execution needs.
    """

    __slots__ = SLOTS

    def __init__(self) -> None:
        self.chunks: tuple[PrefillChunk, ...] = ()
        self.prefill_tokens = 0
        self.prefill_pairs = 0
        self.prefill_squares = 0
        self.num_sampled_prefills = 0
        self.decodes: Collection[Sequence] = ()
        """The sequences that take a token, in order. `batch.members` itself where all do: read it before the commit."""
        self.num_decodes = 0
        self.num_single_chunks = 0
        """Chunks of one generated token that sample nothing: a computation like a decode's, and priced as one."""
        self.decode_context_tokens = 0
        """Context lengths of `decodes` and single chunks in all, the tokens being fed included."""
        self.decode_window: WindowTokens | None = None
        """The same in layers with a sliding window; None where the model has none."""
        self.decode_longest_tokens = 0
        """The longest of the contexts of `decodes`; 0 where the price of none depends on it (`RankedBatch`)."""
        self.drafts: Mapping[Sequence, int] | None = None
        """Where tokens are drafted: how many of each sequence are verified beside the one that is fed. A sequence among
        `chunks` may have some, too, which are there to make rows alike and are never accepted."""
        self.taken: Mapping[Sequence, int] | None = None
        """And how many tokens each of `decodes` has of this iteration: those accepted, and one sampled behind them. As
        drawn; a device puts it right when it has computed."""
        self.decode_shared_tokens = 0
        """Of `decode_context_tokens`, those read together with another decode's: each sharer's but the first."""
        self.max_steps = 1
        self.until_s = inf
        """A jump ends at the first boundary at or after this time: then some part has something to decide."""
        self.cut_on_arrival = True
        """False where a jump may run through arrivals: what is refused stays refused, and no arrival can overtake."""
        self.changes: tuple[Change, ...] = ()
        """What happens to blocks before the computation, in the order in which it was decided. Moves and Restores are
        copied on the computation's own stream (vLLM 0.5.5's swap)."""
        self.swapped_out_blocks = 0
        self.swapped_in_blocks = 0
        """Pool blocks that the Moves and Restores of `changes` copy."""
        self.mixed_restores: tuple[Restore, ...] = ()
        """Those Restores that compute as well as copy; their blocks are not in `swapped_in_blocks`."""
        self.beside: tuple[Move, ...] = ()
        """Copies that nothing in this iteration waits for."""
        self.after: tuple[Move, ...] = ()
        """Copies that start when the iteration has ended, and that nothing waits for."""
        self.awaited: tuple[Move, ...] = ()
        """Copies, under way or among `beside`, that the computation waits for; then those `beside` start before it."""
        self.behind: tuple[Move, ...] = ()
        """KV of the prefills that leaves for the host, layer by layer, while later layers compute."""
        self.behind_groups = 0
        """Most layer groups that one of the prefills sends out."""
        self.behind_blocks = 0
        self.pulled: tuple[Move, ...] = ()
        """Copies from other engines (`Tier.PEER`) to start now, which nothing in this iteration waits for."""
        self.streamed: tuple[Streamed | Gathered | Projected | Rebuilt, ...] = ()
        """KV on the host that the layers of the computation wait for."""
        self.added_s = 0.0
        """Of each iteration, on top of all else: finding blocks in a map table; drafting tokens and verifying them."""

    @property
    def kind(self) -> str:
        """What the computation is, for people: decode, prefill or mixed."""
        return "decode" if not self.chunks else "mixed" if self.num_decodes else "prefill"

    @property
    def num_tokens(self) -> int:
        """Tokens that it computes."""
        return self.prefill_tokens + self.num_decodes + self.num_single_chunks

    @property
    def has_swaps(self) -> bool:
        """Whether blocks are copied before the computation."""
        return bool(self.swapped_out_blocks or self.swapped_in_blocks or self.mixed_restores)

    def copy(self) -> "IterationPlan":
        """Another plan of the same."""
        twin = IterationPlan()
        for name in SLOTS:
            setattr(twin, name, getattr(self, name))
        return twin

    def add_chunk(self, seq: Sequence, num_new: int, origin: Origin) -> None:
        """Compute `num_new` more prompt tokens of `seq`."""
        cached = seq.num_computed
        self.chunks += (PrefillChunk(seq, num_new, cached, origin),)
        self.prefill_tokens += num_new
        self.prefill_pairs += num_new * cached + num_new * (num_new + 1) // 2
        self.prefill_squares += num_new * num_new
        if cached + num_new == seq.num_tokens:
            self.num_sampled_prefills += 1

    def add_single_chunk(self, seq: Sequence, origin: Origin) -> None:
        """Compute one generated token of `seq` again, not the last."""
        self.chunks += (PrefillChunk(seq, 1, seq.num_computed, origin),)
        self.num_single_chunks += 1
        self.decode_context_tokens += seq.num_computed + 1
