"""The metrics of a finished run, as every report names and writes them, and the terminal's summary of one run.

Every number comes from the `Result` (`sim.results.result.assemble`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import UNSET

from sim.results.load import mean_decoding, offered, overload
from sim.results.metrics import LATENCIES
from sim.results.result import RESULT_FILE, SERIES_FILE
from sim.results.schema import Result
from sim.results.sections import (
    Accuracy,
    ErrorInterval,
    ResolvedScenario,
    Scaling,
    UsedEngineProfile,
    UsedProfile,
)
from sim.results.timeline import TIMELINE_FILE

BESIDE = ("requests.parquet", "requests.csv", SERIES_FILE, TIMELINE_FILE, "figures")
"""What a run may have written next to its result."""
NONE = "-"


@dataclass(frozen=True)
class Metric:
    """A row of the comparison: key, name, whether less is better (None: neither), how it is written.

    The key is a field of `Result`, or what `metric_values` derives from several.
    """

    key: str
    name: str
    less_is_better: bool | None
    form: str = ",.1f"
    meaning: str = ""
    """What it is, where it is no field of `Result`."""

    def text(self, value: float | None) -> str:
        """The value as printed; `-` for None."""
        return NONE if value is None else format(value, self.form)


def _latencies() -> Iterator[Metric]:
    for name in LATENCIES:
        for statistic in ("mean", "median", "p99"):
            title = f"{statistic.replace('p99', 'P99').capitalize()} {name.upper()} (ms)"
            yield Metric(f"{statistic}_{name}_ms", title, True)


LATENCY_PARTS = {
    "prefill": "prefill",
    "decode": "decode",
    "recompute": "recompute",
    "copies": "waiting for PCIe",
    "engine": "engine's own time",
    "passed": "others computed",
    "preempted": "preempted, parked",
    "tool": "with tools",
}
"""Names of the parts of the mean latency that are not queueing (`LatencyParts`)."""
ATTAINED = "goodput_attainment_percent"
"""The metric that has rows for the classes of SLOs as well."""
METRICS = (
    Metric("completed", "Requests completed", False, ",.0f"),
    Metric("ignored", "Requests ignored", True, ",.0f"),
    Metric("duration", "Duration (s)", True, ",.2f"),
    Metric(
        "request_offered", "Requests offered (1/s)", None, ",.3f",
        "Requests that came, between the first and the last, requests/s. None: more than 100,000 requests.",
    ),
    Metric("request_throughput", "Requests served (1/s)", False, ",.3f"),
    Metric("output_throughput", "Output tokens (1/s)", False),
    Metric("total_token_throughput", "Total tokens (1/s)", False),
    Metric("request_goodput", "Goodput (requests/s)", False, ",.3f"),
    Metric(
        "goodput_of_arrivals", "Goodput of arrivals (1/s)", False, ",.3f",
        "`goodput_attainment` x requests offered: requests that met every SLO, a second of arrivals. What the last "
        "ones take does not count, as it does in `request_goodput`. None: no SLOs, or nothing known of the arrivals.",
    ),
    Metric(ATTAINED, "SLOs met (% of requests)", False, meaning="`goodput_attainment` x 100."),
    *_latencies(),
    *(
        Metric(
            f"mean_{part}_ms", f"E2EL: {name} (ms)", None,
            meaning=f"`{part}_s` of `latency_parts` x 1000. None: nothing was spent.",
        )
        for part, name in LATENCY_PARTS.items()
    ),
    Metric("mean_queue_ms", "Mean queueing (ms)", True),
    Metric("queue_share_percent", "Queueing / TTFT (%)", None, meaning="`mean_queue_ms` / `mean_ttft_ms` x 100."),
    Metric(
        "prefix_hit_percent", "Prompt tokens hit (%)", False,
        meaning="`prefix_hit_tokens` / `prefix_query_tokens` x 100. None: no prefixes are cached.",
    ),
    Metric("num_preemptions", "Preemptions", True, ",.0f"),
    Metric(
        "mean_decoding", "Mean requests past TTFT", None,
        meaning="Requests between their first and last token, averaged over the run: `completed` x (`mean_e2el_ms` - "
        "`mean_ttft_ms`) / `duration` (Little's law).",
    ),
    Metric(
        "host_memory_gib", "Host KV memory (GiB/GPU)", None,
        meaning="Host memory for KV that the policy was given, GiB per GPU; of a tier that keeps prefixes, its own.",
    ),
)  # fmt: skip
"""Rows of a comparison, in order."""
MEANINGS = {metric.key: metric.meaning or f"{metric.name}." for metric in METRICS}


def metric_values(result: Result) -> dict[str, float | None]:
    """The metrics of one result by key; None where the run has none."""
    attained, share, hits = result.goodput_attainment, queue_share(result), hit_share(result)
    came = offered(result)
    derived = {
        "goodput_of_arrivals": None if attained is None or came is None else attained * came,
        ATTAINED: None if attained is None else attained * 100.0,
        "queue_share_percent": None if share is None else share * 100.0,
        "mean_decoding": mean_decoding(result),
        "request_offered": came,
        "prefix_hit_percent": None if hits is None else hits * 100.0,
        "host_memory_gib": host_blocks(result) * _virtual_engines(result) * result.scenario.block_bytes / 2**30,
    }
    found = result.latency_parts
    for part in LATENCY_PARTS:
        seconds = None if found is UNSET else getattr(found, f"{part}_s")
        # What no request ever waited for is no row.
        derived[f"mean_{part}_ms"] = None if not seconds or abs(seconds) < 1e-7 else seconds * 1e3
    return {m.key: derived[m.key] if m.key in derived else number(result, m.key) for m in METRICS}


def slo_shares(result: Result) -> dict[str, float]:
    """Of the requests of each class of SLOs, those that meet them, %; none where a result tells no classes."""
    return {one.slos: one.good / one.num_prompts * 100.0 for one in result.slo_classes or []}


def number(result: Result, field: str) -> float | None:
    """The number in a field that is named by its text, as metrics are."""
    value: float | None = getattr(result, field)
    return value


OWN = "those of each request"
"""In the place of the SLOs of `--goodput`, where that is not given and requests have their own."""
OVERLOADED = "in the second half of the arrivals"


def overload_sentences(results: Sequence[Result]) -> list[str]:
    """Which policies did not keep up with what was offered, a sentence each."""
    found = [(result.policy, overload(result)) for result in results]
    return [f"{name} is overloaded, its queue grew to the end: {OVERLOADED} {load}." for name, load in found if load]


def queue_share(result: Result) -> float | None:
    """Share of the mean TTFT that is queueing; None without any TTFT."""
    return ratio(result.mean_queue_ms, result.mean_ttft_ms)


def hit_share(result: Result) -> float | None:
    """Share of the admitted prompts' tokens that were cached; None where no prefixes are."""
    return ratio(result.counters.prefix_hit_tokens, result.counters.prefix_query_tokens)


def host_blocks(result: Result) -> int:
    """Blocks of an engine's host memory: of the tier that keeps prefixes there, else of its swap space."""
    engines = max(1, len(result.engines or []))
    tier = next((use.num_blocks // engines for use in result.tiers or [] if use.tier == "host"), None)
    return result.scenario.num_cpu_blocks if tier is None else tier


def _virtual_engines(result: Result) -> int:
    """How many of the engines share a pipeline and its memory: as many as it has stages under vLLM 0.5, else one."""
    scenario, engines = result.scenario, result.engines or []
    if not (scenario.prefill_pipeline_parallel_size or scenario.pipeline_parallel_size) or not engines:
        return 1
    alike = sum(engine.role == engines[0].role for engine in engines)
    return max(1, alike // ((scenario.prefill_replicas or scenario.replicas or 1) * (scenario.data_parallel_size or 1)))


def ratio(value: float | None, base: float | None) -> float | None:
    """value / base; None where either is missing or the base is 0."""
    return None if value is None or base is None or base == 0 else value / base


def labels(results: Sequence[Result]) -> list[str]:
    """The policies' labels, in order."""
    return [result.policy for result in results]


def constants(result: Result) -> str:
    """Profile name and status in words: `l20-derived (derived, not measured)`."""
    return f"{result.profile.name} ({origin(result.profile)})"


def engine_overhead(used: UsedEngineProfile) -> str:
    """An engine profile's name, and whether anything of it is assumed."""
    return used.name + (", partly assumed" if used.assumed else ", from published times")


def origin(profile: UsedProfile) -> str:
    """A profile's status, and whether that is less than measured."""
    return profile.status if profile.status.startswith("measured") else f"{profile.status}, not measured"


def deployment(result: Result) -> str:
    """Model with what is quantised of it, GPU and traffic in words."""
    scenario = result.scenario
    gpus = f"{scenario.tp} x {scenario.gpu}" if scenario.tp > 1 else scenario.gpu
    gpus += " with expert parallelism" if scenario.enable_expert_parallel else ""
    weights = f" in {scenario.quantization}" if scenario.quantization else ""
    kv = f", KV in {scenario.kv_cache_dtype}," if scenario.kv_cache_dtype != "auto" else ""
    sparse = f", attention by {scenario.sparse_attention}," if scenario.sparse_attention else ""
    return f"{result.model_id}{weights}{kv}{sparse} on {cluster_text(result)}{gpus}, {traffic(scenario)}"


def cluster_text(result: Result) -> str:
    """Engines and router in words, with which what each runs on goes on; nothing where there is one."""
    if not result.engines:
        return ""
    scenario = result.scenario
    router = f" behind {scenario.router}" if scenario.router else ""
    if scenario.prefill_replicas:
        pools = f"{scenario.prefill_replicas} prefill and {scenario.decode_replicas} decode engines"
        return f"{pools}{router}, links of {scenario.link_gbps:g} Gbit/s, "
    if ranks := scenario.data_parallel_size:
        engines = len(result.engines) // ranks
        return (f"{engines} engines{router} of " if engines > 1 else "") + f"{ranks} data-parallel ranks, each on "
    return f"{len(result.engines)} engines{router}, each on "


def traffic(scenario: ResolvedScenario) -> str:
    """Workload or trace, and the rate if one was asked for."""
    name = scenario.workload or Path(scenario.trace or "traffic").name
    return name + (f" at {scenario.request_rate:g} requests/s" if scenario.request_rate else "")


LABEL_WIDTH = 34


def _row(name: str, value: str) -> str:
    return f"{name + ':':<{LABEL_WIDTH}}{value}"


def _rule(title: str, line: str) -> str:
    return f" {title} ".center(66, line)


def run_lines(result: Result, folder: Path) -> list[str]:
    """The summary of one run, as `vllm bench serve` has it, in at most 80 columns of plain text.

    Only paths and names may be longer: those are not cut.
    """
    clock = "executed live" if result.backend == "kvtwin-live" else "simulated"
    lines = [_rule(f"kvtwin: {labels([result])[0]}, {clock}", "=")]
    lines += [_row("Serving", deployment(result)), _row("Constants", constants(result))]
    if result.engine_profile:
        lines.append(_row("Engine overhead", engine_overhead(result.engine_profile)))
    is_server = result.backend != "kvtwin-live" and result.scenario.gpu != "cpu"
    if is_server and result.scenario.policy_options.get("async_scheduling") is False:
        # A prediction of a server of today differs by it.
        lines.append(_row("Scheduling", "serial; vLLM's default is --async-scheduling"))
    if result.machine is not UNSET:
        machine = result.machine
        lines.append(_row("Executed by", f"{machine.device}, {machine.dtype}, threads: {machine.threads}"))
    if not result.complete:
        lines.append(_row("Ended early", result.error or "interrupted"))
    values = metric_values(result)
    for metric in METRICS[:7]:
        lines.append(_row(metric.name, metric.text(values[metric.key])))
        if metric.key == "ignored" and result.rejected:
            lines.append(_row("  of them rejected", f"{result.rejected:,}"))
    if (found := overload(result)) is not None:
        lines += [_row("Overloaded", "the queue grew to the end:"), f"  {OVERLOADED}, {found}"]
    if result.request_goodput is not None:
        share = result.goodput_attainment
        met = "" if share is None else f" ({share * 100:.1f} % of requests meet their SLOs)"
        lines.append(_row("Goodput (requests/s)", f"{result.request_goodput:.3f}{met}"))
        if (of_arrivals := values["goodput_of_arrivals"]) is not None:
            lines.append(_row("Goodput of arrivals (1/s)", f"{of_arrivals:.3f}"))
        lines.append(_row("SLOs (ms)", " ".join(result.scenario.goodput) or OWN))
        shares = slo_shares(result)
        lines += [
            _row(f"  of {one.num_prompts:,}: {one.slos}", f"{shares[one.slos]:.1f} % meet them")
            for one in result.slo_classes or []
        ]
    lines += [_rule("Latency, ms", "-"), *_latency_lines(result)]
    lines += accuracy_lines(result)
    lines += [_rule("KV memory", "-"), *_memory_lines(result)]
    if result.engines:
        lines += [_rule("Engines", "-"), *_engine_lines(result)]
    if result.scaling:
        lines += [_rule("Autoscaling", "-"), *_scaling_lines(result.scaling)]
    lines += [_rule("Files", "-"), _row("Results", str(folder / RESULT_FILE))]
    beside = [name for name in BESIDE if (folder / name).exists()]
    lines += [_row("Beside it", " ".join(beside))] if beside else []
    return [*lines, "=" * 66]


def _latency_lines(result: Result) -> list[str]:
    statistics = ("mean", "median", "p99")
    rows: list[tuple[str, list[str]]] = [("", ["mean", "median", "P99"])]
    for key in ("ttft", "queue", "tpot", "itl", "e2el"):
        values = [number(result, f"{statistic}_{key}_ms") for statistic in statistics]
        rows.append(
            (LATENCIES.get(key, "  of it queueing"), [NONE if v is None else format(v, ",.2f") for v in values])
        )
    share = queue_share(result)
    width = max(13, *(len(cell) + 1 for _, cells in rows for cell in cells))
    lines = [f"{name:<26}" + "".join(f"{cell:>{width}}" for cell in cells) for name, cells in rows]
    return [*lines, _row("Queueing's share of mean TTFT", NONE if share is None else f"{share * 100:.1f} %")]


def accuracy_lines(result: Result) -> list[str]:
    """Where measured values are to be expected, and by which rows; a line where no row tells."""
    found = result.accuracy
    if found is UNSET:
        return []
    lines: list[str] = []
    if found.intervals:
        lines += [_rule(f"A server like it, {100 * found.share:.0f} % interval, ms", "-")]
        lines += [f"{'':<24}" + "".join(f"{name:>18}" for name in ("mean", "median", "P99"))]
        for latency in ("ttft", "tpot", "e2el"):
            those = [found.intervals.get(f"{statistic}_{latency}_ms") for statistic in ("mean", "median", "p99")]
            if any(those):
                cells = (f"{NONE if one is None else span(one):>18}" for one in those)
                lines.append(f"{LATENCIES[latency]:<24}{''.join(cells)}")
        if (one := found.intervals.get("output_throughput")) is not None:
            lines.append(_row("Output tokens (1/s)", span(one)))
    return [*lines, *accuracy_sentences(found)]


def accuracy_sentences(found: Accuracy) -> list[str]:
    """Which measured rows intervals are drawn from, where these lay, and of what there are none."""
    by_rows: dict[str, list[str]] = {}
    for key, one in found.intervals.items():
        words = key.removesuffix("_ms").replace("_", " ").replace("output throughput", "tokens/s")
        statistic = words.split()[0].replace("p99", "P99")
        by_rows.setdefault(f"{one.rows} rows, {one.configurations} configurations: {one.alike}", []).append(statistic)
    told = [f"By ({', '.join(dict.fromkeys(names))}) {rows}." for rows, names in by_rows.items()]
    means = {name: found.intervals.get(f"mean_{name}_ms") for name in ("ttft", "tpot", "e2el")}
    ratios = [f"{name.upper()} {one.median_ratio:.2f}" for name, one in means.items() if one is not None]
    told += [f"Their median, measured / simulated: mean {', '.join(ratios)}."] if ratios else []
    return told + ([f"No error interval: {found.unknown}."] if found.unknown else [])


def span(interval: ErrorInterval) -> str:
    """Both ends, three digits each."""
    return " to ".join(f"{end:,.0f}" if end >= 100.0 else f"{end:.3g}" for end in (interval.low, interval.high))


MOST_ENGINES = 16
"""Lines of the summary about single engines; more are in the result."""


def _engine_lines(result: Result) -> list[str]:
    lines = [f"{'':<12}{'requests':>12}{'iterations':>14}{'preemptions':>14}{'GPU busy':>14}"]
    for use in (result.engines or [])[:MOST_ENGINES]:
        share = ratio(use.lanes.compute.busy_s, result.makespan_s)
        busy = NONE if share is None else f"{min(1.0, share) * 100:.1f} %"
        name = f"{use.engine}" + ("" if use.role == "both" else f" {use.role}")
        counts = f"{use.num_prompts:>11,} {use.num_iterations:>13,} {use.num_preemptions:>13,}"
        lines.append(f"{name:<12} {counts}{busy:>14}")
    left = len(result.engines or []) - MOST_ENGINES
    return [*lines, f"and {left} more in result.json"] if left > 0 else lines


def _scaling_lines(scaling: Scaling) -> list[str]:
    return [
        _row("Replicas, mean and most", f"{scaling.mean_replicas:.2f}, {scaling.most_replicas}"),
        _row("Replicas started", f"{scaling.num_started}"),
        _row("GPU-seconds", f"{scaling.gpu_s:,.0f}"),
        _row("  of the most, all the time", f"{scaling.fixed_gpu_s:,.0f}"),
        _row("  idle, starting", f"{100 * scaling.idle_share:.1f} %, {100 * scaling.starting_share:.1f} %"),
    ]


def _memory_lines(result: Result) -> list[str]:
    scenario, counts = result.scenario, result.counters
    lines = []
    for name, blocks in (("GPU KV blocks", scenario.num_gpu_blocks), ("Host KV blocks", host_blocks(result))):
        size = f" ({blocks * scenario.block_bytes / 2**30:,.1f} GiB per GPU)" if blocks else ""
        lines.append(_row(name, f"{blocks:,}{size}"))
    lines.append(_row("Preemptions", f"{result.num_preemptions:,}"))
    if (hits := hit_share(result)) is not None:
        lines.append(_row("Prompt tokens hit", f"{counts.prefix_hit_tokens:,} ({hits * 100:.1f} %)"))
    for use in result.tiers or []:
        hits = counts.prefix_hit_tokens + counts.prefix_rehit_tokens
        share = f", {use.hit_tokens / hits * 100:.1f} % of all hits" if hits else ""
        lines.append(_row(f"Loaded from the {use.tier}", f"{use.hit_tokens:,} tokens{share}"))
        lines.append(_row("  by price saved, lost (s)", f"{use.saved_s:,.2f}, {use.lost_s:,.2f}"))
    if counts.swap_out_blocks or counts.swap_in_blocks:
        lines.append(_row("Blocks swapped out, in", f"{counts.swap_out_blocks:,}, {counts.swap_in_blocks:,}"))
    for name, lane in result.lanes.by_name().items():
        share = ratio(lane.busy_s, result.makespan_s)
        if share is not None:
            lines.append(_row(f"{name} busy", f"{min(1.0, share) * 100:.1f} % of the time"))
    return lines
