"""What is kept of a request that ended, and the statistics over all of them.

Names and definitions are those of `vllm bench serve`: TTFT is first token minus arrival, TPOT is (e2el - ttft) /
(n - 1) over requests of two tokens or more, goodput counts requests that meet every SLO given.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sim.engine.sequence import Sequence, Status
from sim.errors import UserError

PERCENTILES = (50.0, 90.0, 95.0, 99.0)
ARRAY_LIMIT = 100_000
"""Past this many requests, result.json leaves the per-request arrays to the streamed table."""
STD_PIECE = 1 << 16
SLO_NAMES = ("ttft", "tpot", "e2el")


class TableSink(Protocol):
    """Takes one row a request, in order of completion."""

    def write(self, row: tuple[object, ...]) -> None:
        """Append a row of `TABLE_COLUMNS`."""
        ...


TABLE_COLUMNS = (
    "request_id",
    "arrival_s",
    "prompt_tokens",
    "output_tokens",
    "queue_s",
    "ttft_s",
    "tpot_s",
    "e2el_s",
    "preemptions",
    "status",
)


@dataclass(frozen=True)
class Goodput:
    """SLOs of one request, s; None where not asked for. Written `ttft:500 tpot:50` (ms)."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2el_s: float | None = None

    @staticmethod
    def parse(words: list[str]) -> "Goodput":
        """Read `NAME:MILLISECONDS` words as `vllm bench serve --goodput` takes them."""
        found: dict[str, float] = {}
        for word in words:
            name, _, text = word.partition(":")
            try:
                milliseconds = float(text)
            except ValueError:
                milliseconds = -1.0
            if name not in SLO_NAMES or not 0.0 < milliseconds < float("inf"):
                raise UserError(f"--goodput: {word!r} is not NAME:MILLISECONDS with NAME one of {', '.join(SLO_NAMES)}")
            if f"{name}_s" in found:
                raise UserError(f"--goodput: {name} is given twice; name each SLO once")
            found[f"{name}_s"] = milliseconds / 1e3
        return Goodput(**found)

    def met(self, ttft_s: float, tpot_s: float, e2el_s: float) -> bool:
        """Whether a request with these times meets every SLO."""
        return (
            (self.ttft_s is None or ttft_s <= self.ttft_s)
            and (self.tpot_s is None or tpot_s <= self.tpot_s)
            and (self.e2el_s is None or e2el_s <= self.e2el_s)
        )


class PerRequest:
    """Arrays of the requests that ended, in order of their end."""

    def __init__(self) -> None:
        self.request_ids = array("q")
        self.arrival_s = array("d")
        self.prompt_tokens = array("q")
        self.output_tokens = array("q")
        self.queue_s = array("d")
        self.ttft_s = array("d")
        self.e2el_s = array("d")
        self.errors: dict[int, str] = {}


class RequestLog:
    """Counts, sums and the floats that exact percentiles need: 28 bytes a finished request.

    The per-request arrays of result.json are kept beside them up to `ARRAY_LIMIT` requests.
    """

    def __init__(self, table: TableSink | None = None, goodput: Goodput | None = None) -> None:
        self.table = table
        self.goodput = goodput
        self.completed = 0
        self.ignored = 0
        self.good = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.first_arrival_s = float("inf")
        self.last_finish_s = 0.0
        self.ttft_s = array("d")
        self.tpot_s = array("d")
        self.e2el_s = array("d")
        # Half precision would do for no percentile; single does for this one, which vLLM's names do not include.
        self.queue_s = array("f")
        self.per_request: PerRequest | None = PerRequest()

    @property
    def ended(self) -> int:
        """Requests completed or ignored."""
        return self.completed + self.ignored

    def end(self, seq: Sequence) -> None:
        """Take the figures of a sequence that ended."""
        request_id, arrival_s, prompt_tokens = seq.request[:3]
        if arrival_s < self.first_arrival_s:
            self.first_arrival_s = arrival_s
        if seq.status is Status.IGNORED or seq.error:
            self._ignore(seq)
            return
        finish_s, num_output = seq.finish_s, seq.num_generated
        ttft_s = seq.first_token_s - arrival_s
        e2el_s = finish_s - arrival_s
        queue_s = seq.first_scheduled_s - arrival_s
        tpot_s = 0.0
        if num_output > 1:
            tpot_s = (e2el_s - ttft_s) / (num_output - 1)
            self.tpot_s.append(tpot_s)
        self.completed += 1
        self.prompt_tokens += prompt_tokens
        self.output_tokens += num_output
        if finish_s > self.last_finish_s:
            self.last_finish_s = finish_s
        self.ttft_s.append(ttft_s)
        self.e2el_s.append(e2el_s)
        self.queue_s.append(queue_s)
        if self.goodput is not None and self.goodput.met(ttft_s, tpot_s, e2el_s):
            self.good += 1
        if self.per_request is not None:
            self._keep(request_id, arrival_s, prompt_tokens, num_output, queue_s, ttft_s, e2el_s)
        if self.table is not None:
            times = (queue_s, ttft_s, tpot_s, e2el_s)
            self.table.write(
                (request_id, arrival_s, prompt_tokens, num_output, *times, seq.num_preemptions, "completed")
            )

    def _ignore(self, seq: Sequence) -> None:
        request = seq.request
        self.ignored += 1
        if self.per_request is not None:
            self.per_request.errors[request.request_id] = seq.error
            self._keep(request.request_id, request.arrival_s, request.prompt_tokens, 0, 0.0, 0.0, 0.0)
        if self.table is not None:
            row = (request.request_id, request.arrival_s, request.prompt_tokens, 0, 0.0, 0.0, 0.0, 0.0)
            self.table.write((*row, seq.num_preemptions, "ignored"))

    def _keep(
        self, request_id: int, arrival_s: float, prompt: int, output: int, queue_s: float, ttft_s: float, e2el_s: float
    ) -> None:
        kept = self.per_request
        if kept is None:
            return
        if len(kept.request_ids) >= ARRAY_LIMIT:
            self.per_request = None
            return
        kept.request_ids.append(request_id)
        kept.arrival_s.append(arrival_s)
        kept.prompt_tokens.append(prompt)
        kept.output_tokens.append(output)
        kept.queue_s.append(queue_s)
        kept.ttft_s.append(ttft_s)
        kept.e2el_s.append(e2el_s)

    def statistics(self) -> dict[str, float | int | None]:
        """Throughputs and the statistics of TTFT, TPOT, E2EL (ms) and queueing under vLLM's names."""
        duration_s = max(0.0, self.last_finish_s - self.first_arrival_s) if self.completed else 0.0
        result: dict[str, float | int | None] = {
            "duration": duration_s,
            "completed": self.completed,
            "ignored": self.ignored,
            "total_input_tokens": self.prompt_tokens,
            "total_output_tokens": self.output_tokens,
            "request_throughput": _rate(self.completed, duration_s),
            "output_throughput": _rate(self.output_tokens, duration_s),
            "total_token_throughput": _rate(self.prompt_tokens + self.output_tokens, duration_s),
            "request_goodput": None if self.goodput is None else _rate(self.good, duration_s),
            "goodput_attainment": None if self.goodput is None or not self.ended else self.good / self.ended,
        }
        for name, values in (("ttft", self.ttft_s), ("tpot", self.tpot_s), ("e2el", self.e2el_s)):
            result.update(summary(np.frombuffer(values, dtype=np.float64) if values else None, name))
        result.update(summary(np.frombuffer(self.queue_s, dtype=np.float32) if self.queue_s else None, "queue"))
        return result


def _rate(count: int, duration_s: float) -> float:
    return count / duration_s if duration_s > 0.0 else 0.0


def summary(values_s: NDArray[np.floating] | None, name: str) -> dict[str, float | int | None]:
    """`mean_NAME_ms`, `median_`, `std_` and percentiles of values in s; sorts them in place; None without any."""
    keys = ["mean", "median", "std", *(f"p{p:g}" for p in PERCENTILES)]
    if values_s is None:
        return {f"{key}_{name}_ms": None for key in keys}
    values_s.sort()
    percentiles = [sorted_percentile(values_s, p) for p in PERCENTILES]
    mean = float(values_s.mean(dtype=np.float64))
    figures = [mean, percentiles[0], _std(values_s, mean), *percentiles]
    return {f"{key}_{name}_ms": figure * 1e3 for key, figure in zip(keys, figures, strict=True)}


def _std(values: NDArray[np.floating], mean: float) -> float:
    """Standard deviation, in pieces: a copy of five million values would be most of the run's memory."""
    total = 0.0
    for start in range(0, len(values), STD_PIECE):
        piece = values[start : start + STD_PIECE].astype(np.float64) - mean
        total += float(piece @ piece)
    return sqrt(total / len(values))


def sorted_percentile(values: NDArray[np.floating], percentile: float) -> float:
    """Percentile of sorted values by linear interpolation, as `numpy.percentile`."""
    rank = percentile / 100.0 * (len(values) - 1)
    low = int(rank)
    high = min(low + 1, len(values) - 1)
    return float(values[low]) + (float(values[high]) - float(values[low])) * (rank - low)


def ended_by_id(kept: PerRequest) -> Mapping[str, list[object]]:
    """The per-request arrays in order of the trace, under the names of `vllm bench serve --save-detailed` (s)."""
    order = np.argsort(np.frombuffer(kept.request_ids, dtype=np.int64), kind="stable").tolist()

    def ordered(values: array) -> list[object]:
        return [values[i] for i in order]

    return {
        "request_ids": ordered(kept.request_ids),
        "start_times": ordered(kept.arrival_s),
        "input_lens": ordered(kept.prompt_tokens),
        "output_lens": ordered(kept.output_tokens),
        "queue_times": ordered(kept.queue_s),
        "ttfts": ordered(kept.ttft_s),
        "latencies": ordered(kept.e2el_s),
        "errors": [kept.errors.get(kept.request_ids[i], "") for i in order],
    }
