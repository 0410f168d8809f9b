"""What a trace looks like: counts, rate, interval statistics, length percentiles, correlation, prefix-cache hits.

One pass over the stream. Memory grows with the number of distinct lengths and of distinct hash ids, not of requests;
percentiles are exact all the same (lengths are whole numbers, counted by value).
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import accumulate, islice
from math import ceil, floor, nan, sqrt

from traces.errors import TraceError
from traces.hash_ids import prefixes
from traces.request import Request

_AT_ONCE = 8192


@dataclass(frozen=True, slots=True)
class LengthSummary:
    """Statistics of a length in tokens; percentiles interpolate linearly, as numpy's do."""

    mean: float
    std: float
    min: int
    p50: float
    p90: float
    p99: float
    max: int
    total: int


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """Statistics of a trace. Values that need two requests are NaN for one; hits are None without hash ids."""

    requests: int
    duration_s: float
    request_rate: float  # 1/s, from first to last arrival
    interval_mean_s: float
    interval_cv: float
    shared_stamps: float  # share of the requests that arrive with the one before them
    prompt_tokens: LengthSummary
    output_tokens: LengthSummary
    correlation: float  # Pearson's, of prompt and output tokens
    sessions: int
    infinite_cache_block_hits: float | None  # share of the prompts' blocks in it, in an unbroken run from the first
    infinite_cache_token_hits: float | None  # share of the prompt tokens in those blocks

    def to_dict(self) -> dict[str, object]:
        """Return the statistics as plain values for JSON (NaN becomes None)."""
        return {name: None if value != value else value for name, value in asdict(self).items()}


class _Prefixes:
    """An infinite prefix cache: a request hits the leading run of its blocks that requests before it have filled.

    They fill the blocks of their prompts and answers, but for the last token of all: it ends the request and is never
    computed. A block filled in part serves a prompt that needs no more of it.
    """

    def __init__(self) -> None:
        self.known: dict[tuple[int, int], int] = {}
        self.filled: dict[int, int] = {}  # how many tokens of each block, behind what stands before it, are there
        self.blocks = self.hit_blocks = self.hit_tokens = 0

    def add(self, request: Request) -> None:
        """Count one request's hits, then remember its blocks."""
        block, needed, hits = request.hash_block_tokens, request.prompt_tokens, 0
        keys = prefixes(request.hash_ids + request.output_hash_ids, self.known)
        for key in keys[: len(request.hash_ids)]:
            if self.filled.get(key, 0) < min(needed, block):
                break
            hits += 1
            needed -= block
        self.blocks += len(request.hash_ids)
        self.hit_blocks += hits
        self.hit_tokens += min(hits * block, request.prompt_tokens)
        if request.hash_ids:
            self._fill(keys, block, request)

    def _fill(self, keys: list[int], block: int, request: Request) -> None:
        full, rest = divmod(request.prompt_tokens + request.output_tokens - 1, block)
        self.filled.update(dict.fromkeys(keys[:full], block))
        for key in keys[full:]:  # one at most
            self.filled[key] = max(rest, self.filled.get(key, 0))


def summarize(requests: Iterable[Request]) -> TraceSummary:
    """Return the statistics of a stream of requests, or raise `TraceError` where it is empty."""
    prompts: Counter[int] = Counter()
    outputs: Counter[int] = Counter()
    sessions: set[str] = set()
    prefixes = _Prefixes()
    products = ties = 0
    squares = 0.0
    first = last = None
    stream = iter(requests)
    while block := list(islice(stream, _AT_ONCE)):
        prompt_column = [request.prompt_tokens for request in block]
        output_column = [request.output_tokens for request in block]
        prompts.update(prompt_column)
        outputs.update(output_column)
        products += sum(p * o for p, o in zip(prompt_column, output_column, strict=True))
        times = [request.arrival_s for request in block]
        first = times[0] if first is None else first
        intervals = [
            b - a for a, b in zip(times if last is None else [last, *times], times[last is None :], strict=False)
        ]
        squares += sum(interval * interval for interval in intervals)
        ties += intervals.count(0.0)
        last = times[-1]
        if any(request.session_id or request.hash_ids for request in block):
            for request in block:
                sessions.add(request.session_id)
                prefixes.add(request)
    if first is None or last is None:
        raise TraceError("the trace holds no request; widen the window or check the input")
    count, duration_s = prompts.total(), last - first
    prompt, output = _lengths(prompts), _lengths(outputs)
    mean_s = duration_s / (count - 1) if count > 1 else nan
    variance = max(squares / (count - 1) - mean_s * mean_s, 0.0) if count > 1 else nan
    spread = prompt.std * output.std
    return TraceSummary(
        requests=count,
        duration_s=duration_s,
        request_rate=1.0 / mean_s if mean_s > 0 else nan,
        interval_mean_s=mean_s,
        interval_cv=sqrt(variance) / mean_s if mean_s > 0 else nan,
        shared_stamps=ties / count,
        prompt_tokens=prompt,
        output_tokens=output,
        correlation=(products / count - prompt.mean * output.mean) / spread if spread else nan,
        sessions=len(sessions - {""}),
        infinite_cache_block_hits=prefixes.hit_blocks / prefixes.blocks if prefixes.blocks else None,
        infinite_cache_token_hits=prefixes.hit_tokens / prompt.total if prefixes.blocks else None,
    )


def _lengths(counts: Counter[int]) -> LengthSummary:
    count = counts.total()
    total = sum(value * times for value, times in counts.items())
    squares = sum(value * value * times for value, times in counts.items())
    # Exact in whole numbers until the last division, so that large traces lose nothing.
    std = sqrt((count * squares - total * total) / (count * count))
    values = sorted(counts.items())
    p50, p90, p99 = (_percentile(values, (count - 1) * level) for level in (0.5, 0.9, 0.99))
    return LengthSummary(total / count, std, values[0][0], p50, p90, p99, values[-1][0], total)


def _percentile(values: list[tuple[int, int]], rank: float) -> float:
    """Return the value at a fractional rank (from 0) of a sorted list of (value, times)."""
    ends = list(accumulate(times for _, times in values))
    below, above = (values[bisect_right(ends, whole)][0] for whole in (floor(rank), ceil(rank)))
    return below if rank == floor(rank) else below + (above - below) * (rank - floor(rank))
