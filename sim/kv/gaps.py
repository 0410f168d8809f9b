"""Prompts of which some blocks are there wherever they stand: which tokens are left to compute, and in what chunks."""

from collections.abc import Iterator, Mapping

from sim.engine.plan import IterationPlan, Origin, PrefillChunk
from sim.engine.sequence import Sequence

Span = tuple[int, int]
"""Tokens of a sequence, by position: the first, and the one behind the last."""
Places = range | tuple[int, ...] | list[int]
"""Of blocks of a prompt, in order: how many blocks stand before each."""


def gaps(places: Places, block_size: int, end: int) -> list[Span]:
    """The first `end` tokens of a prompt without those of the blocks at `places`."""
    found, begin = [], 0
    for place in places:
        if place * block_size > begin:
            found.append((begin, place * block_size))
        begin = (place + 1) * block_size
    return [*found, (begin, end)]


def split_by_gap(plan: IterationPlan, places_of: Mapping[Sequence, Places], block_size: int) -> None:
    """Each chunk of a prompt with gaps becomes one chunk for each gap, after all that stands before it.

    `places_of` says of sequences which of their blocks were there and count as computed.
    """
    if not any(_has_gaps(places_of.get(chunk.seq, ())) for chunk in plan.chunks):
        return
    chunks: list[PrefillChunk] = []
    for chunk in plan.chunks:
        places = places_of.get(chunk.seq, ())
        if not _has_gaps(places):
            chunks.append(chunk)
            continue
        plan.prefill_pairs -= _pairs(chunk)
        plan.prefill_squares -= chunk.num_new**2
        for part in _parts(chunk, places, block_size):
            plan.prefill_pairs += _pairs(part)
            plan.prefill_squares += part.num_new**2
            chunks.append(part)
    plan.chunks = tuple(chunks)


def _has_gaps(places: Places) -> bool:
    return bool(places) and places[-1] >= len(places)


def _pairs(chunk: PrefillChunk) -> int:
    return chunk.num_new * chunk.num_cached + chunk.num_new * (chunk.num_new + 1) // 2


def _parts(chunk: PrefillChunk, places: Places, block_size: int) -> Iterator[PrefillChunk]:
    seq, left, origin = chunk.seq, chunk.num_new, chunk.origin
    skipped = chunk.num_cached - len(places) * block_size
    for begin, end in gaps(places, block_size, seq.num_tokens):
        first = begin + skipped
        skipped = max(0, first - end)
        count = min(end - first, left)
        if count > 0:
            yield PrefillChunk(seq, count, first, origin)
            left, origin = left - count, Origin.CONTINUED
