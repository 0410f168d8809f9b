"""`contradictions`: where a result file says two things that cannot both be so, as one that was edited may."""

from collections.abc import Iterator
from math import isclose, nan

from msgspec import UNSET

from sim.results.metrics import LATENCIES
from sim.results.schema import Result

ROUNDED = 1e-6
"""Relative difference of two sums of the same figures, in another order."""


def contradictions(result: Result) -> Iterator[str]:
    """Each one, such as `mean_e2el_ms is 0 and completed 5`."""
    done, duration_s = result.completed, result.duration
    if result.num_prompts != done + result.ignored:
        yield f"num_prompts is {result.num_prompts}, completed {done} and ignored {result.ignored}"
    for name, rate, count in (
        ("request_throughput", result.request_throughput, done),
        ("output_throughput", result.output_throughput, result.total_output_tokens),
    ):
        if not isclose(rate * duration_s, count, rel_tol=ROUNDED, abs_tol=ROUNDED) and duration_s > 0.0:
            yield f"{name} is {rate:g} and duration {duration_s:g}, of {count:,}"
    for latency in (*LATENCIES, "queue"):
        values = {name: getattr(result, f"{name}_{latency}_ms") for name in ("mean", "p50", "p90", "p95", "p99")}
        known = [value for value in values.values() if value is not None]
        if len(known) not in (0, len(values)):
            yield f"some of {latency}'s statistics are null and some are not"
        elif known[1:] != sorted(known[1:]):
            yield f"percentiles of {latency} are out of order: {known[1:]}"
        elif known and latency != "itl" and not done:
            yield f"mean_{latency}_ms is {known[0]:g} and completed 0"
    if done and not (result.mean_e2el_ms or nan) >= (result.mean_ttft_ms or 0.0) > 0.0:
        yield f"mean_e2el_ms is {result.mean_e2el_ms}, mean_ttft_ms {result.mean_ttft_ms} and completed {done}"
    if result.latencies is not UNSET and result.errors is not UNSET and done:
        latencies = [value for value, error in zip(result.latencies, result.errors, strict=True) if not error]
        mean_ms = 1e3 * sum(latencies) / max(1, len(latencies))
        if len(latencies) != done:
            yield f"completed is {done}, and {len(latencies)} requests have no error"
        elif not isclose(mean_ms, result.mean_e2el_ms or nan, rel_tol=ROUNDED):
            yield f"mean_e2el_ms is {result.mean_e2el_ms}, and latencies have a mean of {mean_ms:g} ms"
