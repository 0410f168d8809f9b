"""The metrics of a finished run, as every report names and writes them, and the terminal's summary of one run.

Every number comes from the result dict (`sim.results.result.assemble`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.results.result import RESULT_FILE, SERIES_FILE, TIMELINE_FILE

Result = dict[str, Any]
BESIDE = ("requests.parquet", "requests.csv", SERIES_FILE, TIMELINE_FILE, "figures")
"""What a run may have written next to its result."""
NONE = "-"


@dataclass(frozen=True)
class Metric:
    """A row of the comparison: key in the result, name, whether less is better (None: neither), how it is written."""

    key: str
    name: str
    less_is_better: bool | None
    form: str = ",.1f"

    def text(self, value: float | None) -> str:
        """The value as printed; `-` for None."""
        return NONE if value is None else format(value, self.form)


def _latencies() -> Iterator[Metric]:
    for name in ("ttft", "tpot", "itl", "e2el"):
        for statistic in ("mean", "median", "p99"):
            title = f"{statistic.replace('p99', 'P99').capitalize()} {name.upper()} (ms)"
            yield Metric(f"{statistic}_{name}_ms", title, True)


METRICS = (
    Metric("completed", "Requests completed", False, ",.0f"),
    Metric("ignored", "Requests ignored", True, ",.0f"),
    Metric("duration", "Duration (s)", True, ",.2f"),
    Metric("request_throughput", "Requests (1/s)", False, ",.3f"),
    Metric("output_throughput", "Output tokens (1/s)", False),
    Metric("total_token_throughput", "Total tokens (1/s)", False),
    Metric("request_goodput", "Goodput (requests/s)", False, ",.3f"),
    Metric("goodput_attainment_percent", "SLOs met (% of requests)", False),
    *_latencies(),
    Metric("mean_queue_ms", "Mean queueing (ms)", True),
    Metric("queue_share_percent", "Queueing / TTFT (%)", None),
    Metric("num_preemptions", "Preemptions", True, ",.0f"),
    Metric("mean_decoding", "Mean requests past TTFT", None),
)
"""Rows of a comparison, in order. `mean_decoding` counts requests between their first and last token (Little's law)."""


def metric_values(result: Result) -> dict[str, float | None]:
    """The metrics of one result by key; None where the run has none."""
    values: dict[str, float | None] = {metric.key: result.get(metric.key) for metric in METRICS}
    attained = result.get("goodput_attainment")
    values["goodput_attainment_percent"] = None if attained is None else attained * 100.0
    share = queue_share(result)
    values["queue_share_percent"] = None if share is None else share * 100.0
    values["mean_decoding"] = mean_decoding(result)
    return values


def queue_share(result: Result) -> float | None:
    """Share of the mean TTFT that is queueing; None without any TTFT."""
    return ratio(result.get("mean_queue_ms"), result.get("mean_ttft_ms"))


def mean_decoding(result: Result) -> float | None:
    """Requests between first and last token, averaged over the run: their rate times their stay (Little's law)."""
    e2el_ms, ttft_ms, duration_s = (result.get(key) for key in ("mean_e2el_ms", "mean_ttft_ms", "duration"))
    if e2el_ms is None or ttft_ms is None or not duration_s:
        return None
    return result.get("completed", 0) * (e2el_ms - ttft_ms) / 1e3 / duration_s


def ratio(value: float | None, base: float | None) -> float | None:
    """value / base; None where either is missing or the base is 0."""
    return None if value is None or base is None or base == 0 else value / base


def labels(results: Sequence[Result]) -> list[str]:
    """The policies' labels, in order."""
    return [str(result.get("policy") or f"run {i + 1}") for i, result in enumerate(results)]


def constants(result: Result) -> str:
    """Profile name and status in words: `l20-derived (derived, not measured)`."""
    profile = result.get("profile") or {}
    status = str(profile.get("status") or "of unknown status")
    return f"{profile.get('name') or 'unknown'} ({status if status == 'measured' else f'{status}, not measured'})"


def deployment(result: Result) -> str:
    """Model, GPU and traffic in words."""
    scenario = result.get("scenario") or {}
    tp, rate = scenario.get("tp") or 1, result.get("request_rate")
    traffic = scenario.get("workload") or Path(scenario.get("trace") or "traffic").name
    gpus = f"{tp} x {scenario.get('gpu') or 'GPU'}" if tp > 1 else str(scenario.get("gpu") or "GPU")
    at_rate = f" at {rate:g} requests/s" if rate else ""
    return f"{result.get('model_id') or 'model'} on {gpus}, {traffic}{at_rate}"


def print_run(result: Result, folder: Path) -> None:
    """Print the summary of one run, as `vllm bench serve` does, in at most 80 columns of plain text.

    Only paths and names may be longer: those are not cut.
    """
    print("\n".join(run_lines(result, folder)))


LABEL_WIDTH = 34


def _row(name: str, value: str) -> str:
    return f"{name + ':':<{LABEL_WIDTH}}{value}"


def _rule(title: str, line: str) -> str:
    return f" {title} ".center(66, line)


def run_lines(result: Result, folder: Path) -> list[str]:
    """The lines of `print_run`."""
    clock = "executed live" if result.get("backend") == "kvtwin-live" else "simulated"
    lines = [_rule(f"kvtwin: {labels([result])[0]}, {clock}", "=")]
    lines += [_row("Serving", deployment(result)), _row("Constants", constants(result))]
    if not result.get("complete", True):
        lines.append(_row("Ended early", str(result.get("error") or "interrupted")))
    for metric in METRICS[:6]:
        lines.append(_row(metric.name, metric.text(result.get(metric.key))))
    slos = (result.get("scenario") or {}).get("goodput")
    if result.get("request_goodput") is not None:
        share = result.get("goodput_attainment")
        met = "" if share is None else f" ({share * 100:.1f} % of requests meet their SLOs)"
        lines.append(_row("Goodput (requests/s)", f"{result['request_goodput']:.3f}{met}"))
        lines.append(_row("SLOs (ms)", " ".join(map(str, slos or []))))
    lines += [_rule("Latency, ms", "-"), *_latency_lines(result)]
    lines += [_rule("KV memory", "-"), *_memory_lines(result)]
    lines += [_rule("Files", "-"), _row("Results", str(folder / RESULT_FILE))]
    beside = [name for name in BESIDE if (folder / name).exists()]
    lines += [_row("Beside it", " ".join(beside))] if beside else []
    return [*lines, "=" * 66]


def _latency_lines(result: Result) -> list[str]:
    statistics = ("mean", "median", "p99")
    lines = [" " * 26 + "".join(f"{name:>13}" for name in ("mean", "median", "P99"))]
    for key, name in (
        ("ttft", "Time to first token"),
        ("queue", "  of it queueing"),
        ("tpot", "Time per output token"),
        ("itl", "Inter-token latency"),
        ("e2el", "End to end"),
    ):
        values = [result.get(f"{statistic}_{key}_ms") for statistic in statistics]
        lines.append(f"{name:<26}" + "".join(f"{NONE if v is None else format(v, ',.2f'):>13}" for v in values))
    share = queue_share(result)
    return [*lines, _row("Queueing's share of mean TTFT", NONE if share is None else f"{share * 100:.1f} %")]


def _memory_lines(result: Result) -> list[str]:
    scenario, counters = result.get("scenario") or {}, result.get("counters") or {}
    lines = []
    for name, key in (("GPU KV blocks", "num_gpu_blocks"), ("Host KV blocks", "num_cpu_blocks")):
        blocks, block_bytes = scenario.get(key), scenario.get("block_bytes")
        size = f" ({blocks * block_bytes / 2**30:,.1f} GiB per GPU)" if blocks and block_bytes else ""
        lines.append(_row(name, NONE if blocks is None else f"{blocks:,}{size}"))
    preemptions = result.get("num_preemptions")
    lines.append(_row("Preemptions", NONE if preemptions is None else f"{preemptions:,}"))
    out, back = counters.get("swap_out_blocks") or 0, counters.get("swap_in_blocks") or 0
    if out or back:
        lines.append(_row("Blocks swapped out, in", f"{out:,}, {back:,}"))
    makespan_s = result.get("makespan_s")
    for lane, figures in (result.get("lanes") or {}).items():
        share = ratio((figures or {}).get("busy_s"), makespan_s)
        if share is not None:
            lines.append(_row(f"{lane} busy", f"{min(1.0, share) * 100:.1f} % of the time"))
    return lines
