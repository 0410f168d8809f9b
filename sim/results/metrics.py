"""What is kept of a request that ended, and the statistics over all of them.

Names and definitions are those of `vllm bench serve`: TTFT is first token minus arrival, TPOT is (e2el - ttft) /
(n - 1) over requests of two tokens or more, goodput counts requests that meet every SLO given. The time that tools take
for a request (`ToolCall`) is in its end-to-end latency alone, not in TPOT and ITL, nor in what SLOs are held against.
"""

from array import array
from collections import Counter
from collections.abc import Sequence as Values
from math import sqrt
from operator import add
from typing import Any, NamedTuple, Protocol

from sim.cost.host import TIE_S
from sim.engine.itl import GapStatistics
from sim.engine.sequence import IGNORED, Sequence
from sim.results.column import FEW, Column, in_order
from sim.results.goodput import Goodput
from traces.slos import SLOs

PERCENTILES = (50.0, 90.0, 95.0, 99.0)
ARRAY_LIMIT = 100_000
"""Past this many requests, result.json leaves the per-request arrays to the streamed table."""
LATENCIES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "itl": "Inter-token latency",
    "e2el": "End to end",
}
"""Latencies by their names in results' fields, in words."""


class TableSink(Protocol):
    """Takes one row a request, in order of completion."""

    def write(self, row: tuple[object, ...]) -> None:
        """Append a row of `TABLE_COLUMNS`."""
        ...


TABLE_COLUMNS = {
    "request_id": "Place in the trace, from 0.",
    "arrival_s": "Arrival, s.",
    "prompt_tokens": "Prompt tokens.",
    "output_tokens": "Output tokens.",
    "queue_s": "First scheduled minus arrival, s.",
    "ttft_s": "First token minus arrival, s.",
    "tpot_s": "(last token - first token) / (tokens - 1), s; 0 of a request of one token, which statistics leave out.",
    "e2el_s": "Last token minus arrival, s.",
    "preemptions": "Times the request was preempted.",
    "status": "`completed` or `ignored`.",
}
"""Columns of the per-request table, and what they are."""
ENGINE_COLUMNS = {
    "engine": "Place of the engine where the request ended, from 0.",
    "prefill_engine": "Where some engines prefill for others: the one that prefilled it.",
}
"""What follows them where a run has several engines; the second only where some prefill for others."""


class Attained(NamedTuple):
    """How many requests of some SLOs ended, and how many of them met these."""

    ended: int
    good: int


NONE_ATTAINED = Attained(0, 0)


class EndedRequest(NamedTuple):
    """One request of the per-request arrays of result.json; its times are 0 if it was not completed."""

    request_id: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    queue_s: float
    ttft_s: float
    e2el_s: float
    error: str
    """Empty if it was completed."""


class RequestLog:
    """Counts, sums and what exact percentiles and the most in flight need: 36 bytes a request that completed, in
    temporary files from `FEW` on. Half precision would do for no percentile; single does for queueing, which
    vLLM's names do not include.

    The rows of the table are kept beside them up to `ARRAY_LIMIT` requests.
    """

    def __init__(
        self, table: TableSink | None = None, goodput: Goodput | None = None, front_end_s: float = 0.0
    ) -> None:
        """`front_end_s` passes between a client and the engine, there and back: the engine's clock is that much behind
        the clients'."""
        self.table = table
        self.goodput = goodput
        self.front_end_s = front_end_s
        self.sent_s: dict[int, float] = {}
        """When requests were sent that the tokeniser has handed over since, by id."""
        self.completed = 0
        self.ignored = 0
        self.num_broken_off = 0
        """Of those ignored, the ones that had been scheduled before."""
        self.good = 0
        """Requests completed that met every SLO they have."""
        self.tool_s = 0.0
        """With tools, of requests completed."""
        self.by_slos: dict[SLOs, Attained] = {}
        """Of requests that have SLOs of their own."""
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.first_arrival_s = float("inf")
        self.last_finish_s = 0.0
        self._arrival_s, self._ttft_s, self._tpot_s, self._e2el_s = (Column("d") for _ in range(4))
        self._queue_s = Column("f")
        self._spills_at = FEW
        self.rows: list[tuple[Any, ...]] | None = []
        """Those of the table, in order of their end; None past `ARRAY_LIMIT`."""
        self.errors: dict[int, str] = {}
        """Of requests that were not completed, by id."""
        self.longest_tokens = 0
        """Of a context that completed."""
        self.ended_at: Counter[int] = Counter()
        """Requests that ended at each of several engines."""

    @property
    def arrival_s(self) -> "array[float]":
        """Of the requests that completed, in order of their end, as the times below."""
        return self._arrival_s.whole()

    @property
    def queue_s(self) -> "array[float]":
        """From arrival until first scheduled."""
        return self._queue_s.whole()

    @property
    def ttft_s(self) -> "array[float]":
        """From arrival to the first token."""
        return self._ttft_s.whole()

    @property
    def tpot_s(self) -> "array[float]":
        """Per output token after the first, of requests of two tokens or more."""
        return self._tpot_s.whole()

    @property
    def e2el_s(self) -> "array[float]":
        """From arrival to the last token."""
        return self._e2el_s.whole()

    @property
    def ended(self) -> int:
        """Requests completed or ignored."""
        return self.completed + self.ignored

    def end(self, seq: Sequence, where: tuple[int, ...] = ()) -> None:
        """Take the figures of a sequence that ended; `where` are the values of `ENGINE_COLUMNS`."""
        request = seq.request
        request_id, arrival_s, prompt_tokens = request[0], request[1], request[2]
        if self.sent_s:
            arrival_s = self.sent_s.pop(request_id, arrival_s)
        if where:
            self.ended_at[where[0]] += 1
        if arrival_s < self.first_arrival_s:
            self.first_arrival_s = arrival_s
        if seq.status is IGNORED or seq.error:
            self._ignore(seq, arrival_s, where)
            return
        front_end_s, num_output = self.front_end_s, seq.num_generated
        finish_s = seq.finish_s + front_end_s
        ttft_s = seq.first_token_s - arrival_s + front_end_s
        e2el_s = finish_s - arrival_s
        queue_s = seq.first_scheduled_s - arrival_s + front_end_s
        tpot_s = 0.0
        if num_output > 1:
            # A tool's time is not the engine's.
            tpot_s = (e2el_s - ttft_s - seq.tool_s) / (num_output - 1)
            self.tool_s += seq.tool_s
            self._tpot_s.recent.append(tpot_s)
        self.completed += 1
        self.prompt_tokens += prompt_tokens
        self.output_tokens += num_output
        if finish_s > self.last_finish_s:
            self.last_finish_s = finish_s
        self._arrival_s.recent.append(arrival_s)
        self._ttft_s.recent.append(ttft_s)
        self._e2el_s.recent.append(e2el_s)
        self._queue_s.recent.append(queue_s)
        if self.completed >= self._spills_at:
            columns = (self._arrival_s, self._ttft_s, self._tpot_s, self._e2el_s, self._queue_s)
            for column in columns:
                column.spill()
            self._spills_at += FEW
        own = seq.request.slos
        slos = self.goodput if own is None else own
        good = slos is None or slos.met(ttft_s, tpot_s, e2el_s - seq.tool_s)
        self.good += good
        if own is not None:
            self._count_own(own, good=good)
        if prompt_tokens + num_output > self.longest_tokens:
            self.longest_tokens = prompt_tokens + num_output
        num = seq.num_preemptions
        row = request_id, arrival_s, prompt_tokens, num_output, queue_s, ttft_s, tpot_s, e2el_s, num, "completed"
        self._keep(row + where if where else row)

    def _ignore(self, seq: Sequence, arrival_s: float, where: tuple[int, ...]) -> None:
        request = seq.request
        self.ignored += 1
        self.num_broken_off += seq.first_scheduled_s >= 0.0
        if request.slos is not None:
            self._count_own(request.slos, good=False)
        self.errors[request.request_id] = seq.error
        times = (0.0, 0.0, 0.0, 0.0)
        row = (request.request_id, arrival_s, request.prompt_tokens, 0, *times, seq.num_preemptions, "ignored", *where)
        self._keep(row)

    def _count_own(self, slos: SLOs, *, good: bool) -> None:
        ended, met = self.by_slos.get(slos, NONE_ATTAINED)
        self.by_slos[slos] = Attained(ended + 1, met + good)

    @property
    def has_slos(self) -> bool:
        """Whether any request has SLOs, of its own or those of `--goodput`."""
        return self.goodput is not None or bool(self.by_slos)

    def _keep(self, row: tuple[Any, ...]) -> None:
        if self.table is not None:
            self.table.write(row)
        if self.rows is not None:
            self.rows.append(row)
            if len(self.rows) > ARRAY_LIMIT:
                self.rows = None

    @property
    def requests(self) -> list[EndedRequest] | None:
        """In order of their end; None past `ARRAY_LIMIT`."""
        if self.rows is None:
            return None
        return [EndedRequest._make((*row[:6], row[7], self.errors.get(row[0], ""))) for row in self.rows]

    @property
    def duration_s(self) -> float:
        """First arrival to last token of what completed, s."""
        return max(0.0, self.last_finish_s - self.first_arrival_s) if self.completed else 0.0

    def rate(self, count: int) -> float:
        """`count` a second of the duration; 0 without one."""
        duration_s = self.duration_s
        return count / duration_s if duration_s > 0.0 else 0.0

    def max_concurrent_requests(self) -> int:
        """Most of those completed that were in flight at once, from arrival up to their last token (as vLLM counts)."""
        arrivals, ends = self.arrival_s, self.e2el_s
        for begin in range(0, len(ends), FEW):
            piece = slice(begin, begin + FEW)
            ends[piece] = array("d", map(add, arrivals[piece], ends[piece]))
        ends_s, most, gone = in_order(ends), min(1, self.completed), 0
        for came, arrival_s in enumerate(in_order(arrivals), 1):
            # A request that ends as another arrives is gone: at one boundary, which sums round differently.
            while gone < came and ends_s[gone] <= arrival_s + TIE_S:
                gone += 1
            if came - gone > most:
                most = came - gone
        return most

    def latencies(self) -> dict[str, float | None]:
        """The statistics of TTFT, TPOT, E2EL and queueing under vLLM's names (ms)."""
        # One after the other: each is as long as the run.
        found = summary(self.ttft_s, "ttft")
        found.update(summary(self.tpot_s, "tpot"))
        found.update(summary(self.e2el_s, "e2el"))
        found.update(summary(self.queue_s, "queue"))
        return found


def gap_statistics(found: GapStatistics | None) -> dict[str, float | None]:
    """The statistics of the inter-token latency under vLLM's names (ms); `found` at `PERCENTILES`."""
    if found is None:
        return dict.fromkeys(names("itl"))
    percentiles = [found.percentiles[p] for p in PERCENTILES]
    return _named("itl", [found.mean, percentiles[0], found.std, *percentiles])


def names(latency: str) -> list[str]:
    """`mean_LATENCY_ms`, `median_`, `std_` and the percentiles."""
    return [f"{statistic}_{latency}_ms" for statistic in ("mean", "median", "std", *(f"p{p:g}" for p in PERCENTILES))]


def _named(latency: str, figures_s: list[float]) -> dict[str, float | None]:
    return {name: figure * 1e3 for name, figure in zip(names(latency), figures_s, strict=True)}


def summary(values: "array[float]", name: str) -> dict[str, float | None]:
    """Statistics of values in s, by `names`; None without any. May sort them."""
    if not values:
        return dict.fromkeys(names(name))
    values_s = in_order(values)
    percentiles = [sorted_percentile(values_s, p) for p in PERCENTILES]
    mean, squares = sum(values_s) / len(values_s), 0.0
    for value_s in values_s:
        squares += (value_s - mean) * (value_s - mean)
    return _named(name, [mean, percentiles[0], sqrt(squares / len(values_s)), *percentiles])


def sorted_percentile(values: Values[float], percentile: float) -> float:
    """Percentile of sorted values by linear interpolation, as `numpy.percentile`."""
    rank = percentile / 100.0 * (len(values) - 1)
    low = int(rank)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (rank - low)
