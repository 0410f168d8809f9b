"""Traffic like a trace's: blocks of time of it, drawn with replacement (the block bootstrap, Künsch 1989).

What lies within a block stays as it was: bursts, turns of a session, prefixes shared. Blocks are put end to end, so
that the mean rate stays too.
"""

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import count

from traces.errors import TraceError
from traces.rates import check_seed
from traces.request import Request


def resample(requests: Sequence[Request], block_s: float, seed: int) -> Iterator[Request]:
    """Endless traffic of blocks of about `block_s` seconds; the same seed gives the same.

    A block that comes again is other text by other people: hash ids and sessions that stand in it alone are renamed.
    What several blocks share, as system prompts, stays shared.

    Raises:
        TraceError: the requests are none, or arrive at one moment.
    """
    check_seed(seed)
    if len(requests) < 2 or not (span_s := requests[-1].arrival_s - requests[0].arrival_s) > 0:
        raise TraceError("requests that arrive at one moment have no blocks of time; give arrivals over time")
    return _drawn(requests, span_s * len(requests) / (len(requests) - 1), block_s, seed)


def _drawn(requests: Sequence[Request], span_s: float, block_s: float, seed: int) -> Iterator[Request]:
    num_blocks = max(1, round(span_s / block_s))
    length_s, begin_s = span_s / num_blocks, requests[0].arrival_s
    blocks: list[list[Request]] = [[] for _ in range(num_blocks)]
    for request in requests:
        place = min(int((request.arrival_s - begin_s) / length_s), num_blocks - 1)
        # Rounding must not put a request into the block before or after.
        within_s = min(max(request.arrival_s - begin_s - place * length_s, 0.0), length_s)
        blocks[place].append(request._replace(arrival_s=within_s))
    names = [_names(block) for block in blocks]
    shared = _in_several(names)
    apart = 1 + max((name for found in names for name in found if isinstance(name, int)), default=0)
    draw, taken = random.Random(seed), [0] * num_blocks
    number = count()
    for slot in count():
        place = draw.randrange(num_blocks)
        copy = taken[place]
        taken[place] += 1
        for request in blocks[place]:
            again = _renamed(request, copy, apart, shared) if copy else request
            # Nor behind the next one's begin, which rounds by itself.
            at_s = min(slot * length_s + request.arrival_s, (slot + 1) * length_s)
            yield again._replace(request_id=next(number), arrival_s=at_s)


def _names(block: Iterable[Request]) -> set[int | str]:
    """Hash ids and sessions of a block."""
    found: set[int | str] = set()
    for request in block:
        found.update(request.hash_ids, request.output_hash_ids)
        if request.session_id:
            found.add(request.session_id)
    return found


def _in_several(sets: Iterable[set[int | str]]) -> set[int | str]:
    seen = Counter(name for names in sets for name in names)
    return {name for name, times in seen.items() if times > 1}


def _renamed(request: Request, copy: int, apart: int, shared: set[int | str]) -> Request:
    def other(ids: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(ident if ident in shared else ident + copy * apart for ident in ids)

    session = request.session_id
    if session and session not in shared:
        session = f"{session}~{copy}"
    return request._replace(
        session_id=session, hash_ids=other(request.hash_ids), output_hash_ids=other(request.output_hash_ids)
    )
