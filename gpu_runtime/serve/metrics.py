"""`/metrics`: counters, gauges and histograms in Prometheus' text format."""

from bisect import bisect_left
from collections import defaultdict
from typing import NamedTuple

TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
"""Upper bounds of the histograms' buckets, s; those of TTFT are vLLM's up to 80 s."""


class EngineState(NamedTuple):
    """The requests and blocks of the engine, seen between two iterations. Blocks are the policy's pool units."""

    running: int = 0
    waiting: int = 0
    swapped: int = 0
    gpu_blocks_free: int = 0
    host_blocks_free: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


HELP = {
    "running": "Requests admitted and not ended, swapped or parked.",
    "waiting": "Requests that wait for admission.",
    "swapped": "Requests with KV blocks on the host that do not decode (swapped or parked).",
    "gpu_blocks_free": "Free GPU KV blocks, in the policy's pool units.",
    "host_blocks_free": "Free host KV blocks, in the policy's pool units.",
    "preemptions": "Preemptions by swap or recomputation.",
}
PREFIX_HELP = {
    "prefix_queries": "Prefix cache queries, in terms of number of queried tokens.",
    "prefix_hits": "Prefix cache hits, in terms of number of cached tokens.",
}
"""vLLM's own metrics, under its names."""


class Histogram:
    """Counts by bucket, their sum and number."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str) -> list[str]:
        """The series of one histogram."""
        total, lines = 0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self._sum}", f"{name}_count {total}"]


class Metrics:
    """What one server counts; written and read by the event loop's thread alone."""

    def __init__(self) -> None:
        self.accepted = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.ended: defaultdict[str, int] = defaultdict(int)
        self.errors: defaultdict[int, int] = defaultdict(int)
        self.ttft_s = Histogram(TTFT_S)
        self.itl_s = Histogram(ITL_S)

    def text(self, state: EngineState, queued: int) -> str:
        """The page, given the state of the engine and how many requests wait for their first token."""
        lines: list[str] = []

        def family(name: str, kind: str, text: str, *series: str) -> None:
            lines.extend((f"# HELP kvtwin_{name} {text}", f"# TYPE kvtwin_{name} {kind}", *series))

        def single(name: str, kind: str, text: str, value: float) -> None:
            family(name, kind, text, f"kvtwin_{name} {value}")

        for field, text in PREFIX_HELP.items():
            name, value = f"vllm:prefix_cache_{field.removeprefix('prefix_')}_total", getattr(state, field)
            lines.extend((f"# HELP {name} {text}", f"# TYPE {name} counter", f"{name} {value}"))
        for field in HELP:
            value, counter = getattr(state, field), field == "preemptions"
            name = field if "blocks" in field else f"requests_{field}"
            single(f"{field}_total" if counter else name, "counter" if counter else "gauge", HELP[field], value)
        single("requests_queued", "gauge", "Accepted requests without a first token (bounded by --max-queue).", queued)
        single("requests_accepted_total", "counter", "Requests accepted.", self.accepted)
        ended = [f'kvtwin_requests_total{{outcome="{outcome}"}} {n}' for outcome, n in sorted(self.ended.items())]
        family("requests_total", "counter", "Accepted requests that ended, by outcome.", *ended)
        errors = [f'kvtwin_error_answers_total{{status="{status}"}} {n}' for status, n in sorted(self.errors.items())]
        family("error_answers_total", "counter", "Answers that were errors, by status.", *errors)
        single("prompt_tokens_total", "counter", "Prompt tokens of accepted requests.", self.prompt_tokens)
        single("generation_tokens_total", "counter", "Output tokens.", self.output_tokens)
        for name, text, histogram in (
            ("time_to_first_token_seconds", "Acceptance to first token.", self.ttft_s),
            ("inter_token_latency_seconds", "Token to next token of one request.", self.itl_s),
        ):
            family(name, "histogram", text, *histogram.lines(f"kvtwin_{name}"))
        return "\n".join(lines) + "\n"
