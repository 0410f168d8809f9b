"""What a finished run and a comparison say in text: the terminal's summary, `comparison.json` and `comparison.md`.

Every number comes from the result dicts (`sim.result.assemble`), and so does every sentence: it says what the numbers
prove. TTFT is queueing plus prefill by definition, so its causes can be named; what only goes together is told so.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

import msgspec

from sim.files import make_folder, write_atomically
from sim.result import RESULT_FILE, SERIES_FILE, TIMELINE_FILE

Result = dict[str, Any]

WIDTH = 80
"""Columns of the printed reports: a terminal's least."""
SAME = 0.01
"""Relative differences up to this are called the same in sentences."""
FIGURES = {
    "ttft_tpot.png": "Distributions of TTFT and TPOT",
    "queueing.png": "Why TTFT is what it is: queueing and prefill",
    "memory.png": "KV memory and queues over time",
    "lanes.png": "GPU compute and PCIe over time",
}
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


# -- one run -----------------------------------------------------------------------------------------------------------


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
    lines = [_rule(f"kvtwin: {labels([result])[0]}, simulated", "=")]
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


# -- comparison --------------------------------------------------------------------------------------------------------


def print_comparison(results: list[Result], folder: Path) -> None:
    """Print metrics side by side with ratios to the first policy, then what differs in words; at most 80 columns."""
    print("\n".join(comparison_lines(results, folder)))


def comparison_lines(results: list[Result], folder: Path) -> list[str]:
    """The lines of `print_comparison`."""
    if not results:
        return ["no policy was run"]
    lines = [deployment(results[0]), f"constants: {', '.join(_distinct(constants(r) for r in results))}", ""]
    rows = table(results)
    name_width = max(len(row.name) for row in rows)
    columns = [_column(rows, i, label) for i, label in enumerate(labels(results))]
    for start, end in _groups([len(column[-1]) for column in columns], WIDTH - name_width):
        shown = columns[start:end]
        height = max(len(column) for column in shown)
        names = [""] * (height - len(rows)) + [row.name for row in rows]
        for i, name in enumerate(names):
            cells = (column[i - height] if i - height >= -len(column) else " " * len(column[-1]) for column in shown)
            lines.append("  ".join((f"{name:<{name_width}}", *cells)).rstrip())
        lines.append("")
    if len(results) > 1:
        lines += ["(x) ratio to the first policy; * best where they differ", ""]
    for sentence in sentences(results):
        # wrap() breaks at spaces but not at no-break spaces: a number keeps its unit.
        bound = re.sub(r"(?<=\d) (?=(%|ms|s)(\W|$))", "\xa0", sentence)
        broken = wrap(bound, WIDTH, break_on_hyphens=False, break_long_words=False)
        lines += [*(line.replace("\xa0", " ") for line in broken), ""]
    return [*lines, f"Results, comparison.md and figures are in {folder}"]


def _column(rows: list["Row"], index: int, label: str) -> list[str]:
    """One policy's column: its label in as many lines as it takes, then a cell a row, all of one width."""
    cells = [row.cells[index] for row in rows]
    value_width = max(len(cell.value) for cell in cells)
    ratio_width = max(len(cell.ratio) for cell in cells)
    lines = [f"{c.value:>{value_width}} {c.ratio:>{ratio_width}} {'*' if c.best else ' '}" for c in cells]
    # A label may widen its column to 28 characters; a longer one takes several lines, broken between its options.
    widest = max(map(len, re.split("(?<=[:,])", label)))
    width = max(len(lines[0]), min(28, widest + 2))
    return [f"{line + '  ':>{width}}" for line in _break(label, width - 2)] + [f"{line:>{width}}" for line in lines]


def labels(results: Sequence[Result]) -> list[str]:
    """The policies' labels, in order."""
    return [str(result.get("policy") or f"run {i + 1}") for i, result in enumerate(results)]


def _distinct(words: Iterator[str]) -> list[str]:
    return list(dict.fromkeys(words))


def _groups(widths: list[int], room: int) -> Iterator[tuple[int, int]]:
    """Ranges of columns that fit into `room`, each at least one column."""
    start, used = 0, 0
    for i, width in enumerate(widths):
        if i > start and used + width + 2 > room:
            yield start, i
            start, used = i, 0
        used += width + 2
    yield start, len(widths)


def _break(label: str, width: int) -> list[str]:
    """A label in lines of at most `width`, broken after `:` and `,` where that is enough."""
    spaced = label.replace(":", ": ").replace(",", ", ")
    return [line.replace(": ", ":").replace(", ", ",") for line in wrap(spaced, width)] or [""]


@dataclass(frozen=True)
class Cell:
    """A value as printed, its ratio to the first policy's in parentheses (or nothing), whether it is the best."""

    value: str
    ratio: str
    best: bool


@dataclass(frozen=True)
class Row:
    """One metric over all policies."""

    name: str
    cells: list[Cell]


def table(results: Sequence[Result]) -> list[Row]:
    """Rows of the comparison; metrics that no policy has are left out."""
    values = [metric_values(result) for result in results]
    rows = []
    for metric in METRICS:
        numbers = [found[metric.key] for found in values]
        if all(number is None for number in numbers):
            continue
        texts = [metric.text(number) for number in numbers]
        best = _best(metric, numbers, texts)
        factors = [None, *(ratio(number, numbers[0]) for number in numbers[1:])]
        told = ["" if factor is None else f"({_factor(factor)})" for factor in factors]
        rows.append(Row(metric.name, [Cell(text, word, text in best) for text, word in zip(texts, told, strict=True)]))
    return rows


def _best(metric: Metric, numbers: Sequence[float | None], texts: Sequence[str]) -> set[str]:
    """Texts of the best values; none where all print alike or neither direction is better."""
    known = [(number, text) for number, text in zip(numbers, texts, strict=True) if number is not None]
    if metric.less_is_better is None or len({text for _, text in known}) < 2:
        return set()
    return {(min if metric.less_is_better else max)(known)[1]}


def _factor(factor: float) -> str:
    return f"{factor:.2f}x" if 0.095 <= factor < 100.0 else f"{factor:.2g}x" if factor < 0.095 else f"{factor:,.0f}x"


# -- what differs, in words --------------------------------------------------------------------------------------------


def sentences(results: Sequence[Result]) -> list[str]:
    """What the numbers say of each policy beside the first, a paragraph each."""
    if len(results) < 2:
        return []
    paragraphs = []
    for other, name in zip(results[1:], labels(results)[1:], strict=True):
        found = list(_differences(results[0], other, labels(results)[0], name))
        paragraphs.append(" ".join(found))
    return paragraphs


def _differences(base: Result, other: Result, a: str, b: str) -> Iterator[str]:
    for result, name in ((base, a), (other, b)):
        if not result.get("complete", True):
            yield f"{name} ended early, so its figures cover only the requests that ended."
    counts = base.get("completed"), other.get("completed")
    if counts[0] != counts[1]:
        yield f"{a} completes {counts[0]} requests and {b} {counts[1]}, so their means are over different requests."
    if not counts[0] or not counts[1]:
        if counts[0] == counts[1]:
            yield f"Neither {a} nor {b} completes a request."
        return
    keys = [metric.key for metric in METRICS if metric.key.endswith("_ms")] + ["output_throughput", "request_goodput"]
    if all(_same(base.get(key), other.get(key)) for key in keys):
        yield f"{b} and {a} do not differ: every latency, queueing and throughput is the same within {SAME * 100:g} %."
        return
    for sentence in (_ttft, _tpot, _overall):
        yield from sentence(base, other, a, b)


def _same(a: float | None, b: float | None) -> bool:
    return a == b or (a is not None and b is not None and abs(b - a) <= SAME * abs(a))


def _verb(a: float, b: float) -> str:
    return "falls" if b < a else "rises"


def _ttft(base: Result, other: Result, a: str, b: str) -> Iterator[str]:
    first, second = base.get("mean_ttft_ms"), other.get("mean_ttft_ms")
    if first is None or second is None:
        return
    text = f"With {b} instead of {a}, mean TTFT {_change(first, second)}"
    wait, other_wait = base.get("mean_queue_ms"), other.get("mean_queue_ms")
    if wait is not None and other_wait is not None and not _same(first, second):
        prefill = (second - other_wait) - (first - wait)
        text += (
            f": requests wait {_time(other_wait)} in the queue on average ({_percent(queue_share(other))} of TTFT) "
            f"instead of {_time(wait)} ({_percent(queue_share(base))}). "
            f"Queueing {_by(other_wait - wait)}, prefill {_by(prefill)}"
        )
    yield text + "."
    yield from _tail("TTFT", base, other)


def _change(first_ms: float, second_ms: float) -> str:
    """`falls from 32.2 s to 157 ms (0.0049x)`, or that it stays."""
    if _same(first_ms, second_ms):
        return f"is the same within {SAME * 100:g} % ({_time(second_ms)}, was {_time(first_ms)})"
    factor = ratio(second_ms, first_ms)
    told = "" if factor is None else f" ({_factor(factor)})"
    return f"{_verb(first_ms, second_ms)} from {_time(first_ms)} to {_time(second_ms)}{told}"


def _by(change_ms: float) -> str:
    return f"{_verb(0.0, change_ms)} by {_time(abs(change_ms))}" if change_ms else "stays"


def _tpot(base: Result, other: Result, a: str, b: str) -> Iterator[str]:
    first, second = base.get("mean_tpot_ms"), other.get("mean_tpot_ms")
    if first is None or second is None:
        return
    text = f"Mean TPOT {_change(first, second)}"
    past, other_past = mean_decoding(base), mean_decoding(other)
    if past is not None and other_past is not None and not _same(first, second) and not _same(past, other_past):
        text += f", with {other_past:.3g} instead of {past:.3g} requests past their first token at a time"
    yield text + "."
    yield from _tail("TPOT", base, other)
    parked = (other.get("counters") or {}).get("parked") or 0
    if parked:
        again = "once" if parked == 1 else f"{parked:,.0f} times"
        yield f"After a prefill a request had to wait for room for all its layers on the GPU {again}, part of its TPOT."
    preemptions = base.get("num_preemptions"), other.get("num_preemptions")
    if preemptions[0] != preemptions[1] and None not in preemptions:
        yield f"Preemptions: {preemptions[1]:,} instead of {preemptions[0]:,}."


def _tail(name: str, base: Result, other: Result) -> Iterator[str]:
    """A P99 that does not follow the mean deserves to be said."""
    mean, other_mean = (result.get(f"mean_{name.lower()}_ms") for result in (base, other))
    tail, other_tail = (result.get(f"p99_{name.lower()}_ms") for result in (base, other))
    if mean is None or other_mean is None or tail is None or other_tail is None or _same(tail, other_tail):
        return
    if _same(mean, other_mean) or _verb(mean, other_mean) != _verb(tail, other_tail):
        yield f"But P99 {name} {_change(tail, other_tail)}."


def _overall(base: Result, other: Result, a: str, b: str) -> Iterator[str]:
    first, second = base.get("mean_e2el_ms"), other.get("mean_e2el_ms")
    if first is not None and second is not None and not _same(first, second):
        yield f"End to end a request takes {_time(second)} instead of {_time(first)} on average."
    first, second = base.get("output_throughput"), other.get("output_throughput")
    if first and second and not _same(first, second):
        yield f"Output throughput {_verb(first, second)} from {first:,.0f} to {second:,.0f} tokens/s."
    first, second = base.get("goodput_attainment"), other.get("goodput_attainment")
    if first is not None and second is not None:
        was = "as before" if _percent(first) == _percent(second) else f"instead of {_percent(first)}"
        yield f"The SLOs are met by {_percent(second)} of the requests, {was}."


def _time(milliseconds: float | None) -> str:
    """A time with three digits, ms below 1 s."""
    if milliseconds is None:
        return NONE
    if milliseconds < 999.5:
        return f"{milliseconds:.3g} ms"
    return f"{milliseconds / 1e3:.3g} s" if milliseconds < 999_500 else f"{milliseconds / 1e3:,.0f} s"


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{share * 100:.3g} %"


# -- files -------------------------------------------------------------------------------------------------------------


def write_comparison(folder: Path, results: list[Result]) -> Path:
    """Write `comparison.json` and `comparison.md` into `folder`; returns the latter's path."""
    make_folder(folder, "--out")
    values = [metric_values(result) for result in results]
    data = {
        "baseline": labels(results)[0] if results else None,
        "policies": labels(results),
        "metrics": dict(zip(labels(results), values, strict=True)),
        "ratios_to_baseline": {
            name: {key: ratio(value, values[0][key]) for key, value in found.items()}
            for name, found in zip(labels(results), values, strict=True)
        },
        "sentences": sentences(results),
        "profiles": {name: r.get("profile") for name, r in zip(labels(results), results, strict=True)},
    }
    encoded = msgspec.json.format(msgspec.json.encode(data), indent=2)
    write_atomically(folder / "comparison.json", lambda file: file.write(encoded + b"\n"))
    path = folder / "comparison.md"
    page = "\n".join(markdown_lines(results)) + "\n"
    write_atomically(path, lambda file: file.write(page.encode()))
    return path


def markdown_lines(results: list[Result]) -> list[str]:
    """The page `comparison.md`: sentences, table, figures, and where the times come from."""
    if not results:
        return ["# Comparison", "", "No policy was run."]
    names = [f"`{_cell(name)}`" for name in labels(results)]
    lines = [f"# {' against '.join(names) if len(names) < 3 else f'{len(names)} policies'}", "", deployment(results[0])]
    lines += ["", *(line for sentence in sentences(results) for line in (sentence, ""))]
    lines += [f"| | {' | '.join(names)} |", "|:--|" + "--:|" * len(results)]
    lines += [f"| {row.name} | {' | '.join(_markdown(cell) for cell in row.cells)} |" for row in table(results)]
    lines += ["", "In parentheses: ratio to the first policy. Bold: the best, where they differ.", ""]
    for file, caption in FIGURES.items():
        lines += [f"## {caption}", "", f"![{caption}](figures/{file})", ""]
    lines += ["## Where the times come from", "", "The times are simulated, from these fitted constants:", ""]
    for name, result in zip(names, results, strict=True):
        sha256 = str((result.get("profile") or {}).get("sha256") or "")[:12]
        lines.append(f"- {name}: {constants(result)}" + (f", sha256 `{sha256}`" if sha256 else ""))
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _markdown(cell: Cell) -> str:
    text = f"{cell.value} {cell.ratio}".strip()
    return f"**{text}**" if cell.best else text
