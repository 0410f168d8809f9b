"""Tool calls of requests: how files have them, what is wrong with them, and drawing some for requests that have none.

In CSV a cell `40:1.5:32;90:0.3:8`: after 40 output tokens a tool works for 1.5 s and returns 32 tokens, then after 90.
In JSON lines a list of such triples.
"""

from collections.abc import Iterable, Iterator
from math import isfinite

from traces.errors import TraceError
from traces.fields import MOST_SECONDS, MOST_TOKENS
from traces.rates import check_seed
from traces.request import Request, ToolCall
from traces.triples import Triples


def _fault(calls: tuple[ToolCall, ...], _: int, output_tokens: int) -> str:
    """Calls are in order, before the last token, and of lengths that can be."""
    after = 0
    for call in calls:
        lasts = isfinite(call.duration_s) and 0.0 <= call.duration_s <= MOST_SECONDS
        if not (after < call.after_tokens < output_tokens and lasts and 0 <= call.returned_tokens <= MOST_TOKENS):
            return f"is not in order, reaches beyond the request's {output_tokens} output tokens or is negative"
        after = call.after_tokens
    return ""


TOOL_CALLS = Triples(
    "tool_calls", ToolCall._make, (int, float, int), "tool calls",
    "write AFTER_TOKENS:SECONDS:RETURNED_TOKENS;... as in 40:1.5:32;90:0.3:8",
    "write [[AFTER_TOKENS, SECONDS, RETURNED_TOKENS], ...]", _fault,
)  # fmt: skip


def with_tool_calls(
    requests: Iterable[Request], mean_calls: float, mean_s: float, mean_returned: float, seed: int = 0
) -> Iterator[Request]:
    """Draw calls for requests: Poisson-many at random output tokens, exponential durations and lengths of answers.

    A request of n output tokens makes n - 1 calls at most. Ids of answers (`output_hash_ids`) are left out where there
    are calls. Raises `TraceError` at once where a mean is out of range.
    """
    for name, mean in (("tool-calls", mean_calls), ("tool-call-s", mean_s), ("tool-call-tokens", mean_returned)):
        if not (isfinite(mean) and 0.0 <= mean <= MOST_TOKENS):
            raise TraceError(f"{name} {mean} is out of range; give a mean of 0 or more")
    check_seed(seed)
    return _drawn(requests, mean_calls, mean_s, mean_returned, seed)


def _drawn(
    requests: Iterable[Request], mean_calls: float, mean_s: float, mean_returned: float, seed: int
) -> Iterator[Request]:
    import numpy as np  # noqa: PLC0415 - slow to import, and conversions do not need it

    random = np.random.default_rng([seed, 2])
    for request in requests:
        most = request.output_tokens - 1
        count = min(int(random.poisson(mean_calls)), most)
        if not count:
            yield request
            continue
        after = sorted((random.choice(most, count, replace=False) + 1).tolist())
        durations_s = random.exponential(mean_s, count).round(6).tolist()
        returned = random.exponential(mean_returned, count).round().astype(int).tolist()
        calls = tuple(map(ToolCall, after, durations_s, returned))
        yield request._replace(calls=calls, output_hash_ids=())
