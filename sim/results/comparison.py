"""Several policies side by side: the printed table, `comparison.json` and `comparison.md`."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap

import msgspec

from sim.files import make_folder, write_atomically
from sim.results.comparison_sentences import SAME, all_sentences, engine_sentences, factor_text, sentences
from sim.results.load import overload
from sim.results.report import (
    ATTAINED,
    METRICS,
    Metric,
    constants,
    deployment,
    engine_overhead,
    labels,
    metric_values,
    ratio,
    slo_shares,
)
from sim.results.schema import Bounds, Comparison, Result

WIDTH = 80
"""Columns of the printed reports: a terminal's least."""
FIGURES = {
    "ttft_tpot.png": "Distributions of TTFT and TPOT",
    "queueing.png": "Why TTFT is what it is: queueing and prefill",
    "memory.png": "KV memory and queues over time",
    "lanes.png": "GPU compute and PCIe over time",
}


def comparison_lines(
    results: list[Result], folder: Path, bounds: Bounds | None = None, *, figures: bool = True
) -> list[str]:
    """Metrics side by side with ratios to the first policy, then what differs in words; at most 80 columns."""
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
        lines.append("(x) ratio to the first policy; * best, or within 1 % of it, where they differ")
        if bounds is None or bounds.draws < 2:
            lines.append("of one draw of the traffic; --seeds 5 tells what is more than chance")
        lines.append("")
    for sentence in all_sentences(results, bounds):
        # wrap() breaks at spaces but not at no-break spaces: a number keeps its unit.
        bound = re.sub(r"(?<=\d) (?=(%|ms|s)(\W|$))", "\xa0", sentence)
        broken = wrap(bound, WIDTH, break_on_hyphens=False, break_long_words=False)
        lines += [*(line.replace("\xa0", " ") for line in broken), ""]
    return [*lines, f"Results{', comparison.md and figures' if figures else ' and comparison.md'} are in {folder}"]


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

    key: str
    name: str
    cells: list[Cell]


def table(results: Sequence[Result]) -> list[Row]:
    """Rows of the comparison; metrics that no policy has are left out. Below SLOs met, a row for each class of them."""
    values = [metric_values(result) for result in results]
    rows = []
    for metric in METRICS:
        numbers = [found[metric.key] for found in values]
        if all(number is None for number in numbers):
            continue
        rows.append(_table_row(metric, metric.name, numbers))
        if metric.key == ATTAINED:
            shares = [slo_shares(result) for result in results]
            classes = dict.fromkeys(slos for share in shares for slos in share)
            rows += [_table_row(metric, f"SLOs met: {slos} (%)", [one.get(slos) for one in shares]) for slos in classes]
    return rows


def _table_row(metric: Metric, name: str, numbers: Sequence[float | None]) -> Row:
    texts = [metric.text(number) for number in numbers]
    best = _best(metric, numbers, texts)
    # Beside what prints as nothing a factor says nothing.
    base = None if texts[0] == metric.text(0.0) else numbers[0]
    factors = [None, *(ratio(number, base) for number in numbers[1:])]
    told = ["" if factor is None else f"({factor_text(factor)})" for factor in factors]
    return Row(metric.key, name, [Cell(text, word, text in best) for text, word in zip(texts, told, strict=True)])


def _best(metric: Metric, numbers: Sequence[float | None], texts: Sequence[str]) -> set[str]:
    """Texts of the best value and of those like it (`SAME`); none where all are, or no direction is better."""
    known = [(number, text) for number, text in zip(numbers, texts, strict=True) if number is not None]
    if metric.less_is_better is None or not known:
        return set()
    best = (min if metric.less_is_better else max)(number for number, _ in known)
    alike = {text for number, text in known if abs(number - best) <= SAME * abs(best)}
    return alike if len(alike) < len({text for _, text in known}) else set()


def write_comparison(
    folder: Path, results: list[Result], bounds: Bounds | None = None, *, figures: bool = True
) -> Path:
    """Write `comparison.json` and `comparison.md` into `folder`; returns the latter's path."""
    make_folder(folder, "--out")
    names = labels(results)
    values = {name: metric_values(result) for name, result in zip(names, results, strict=True)}
    baseline = values[names[0]] if results else {}
    comparison = Comparison(
        baseline=names[0] if results else None,
        policies=names,
        metrics=values,
        ratios_to_baseline={
            name: {key: ratio(value, baseline[key]) for key, value in found.items()} for name, found in values.items()
        },
        overloaded=[result.policy for result in results if overload(result) is not None],
        sentences=[*engine_sentences(results), *sentences(results)],
        profiles={name: result.profile for name, result in zip(names, results, strict=True)},
        **msgspec.structs.asdict(bounds or Bounds()),
    )
    encoded = msgspec.json.format(msgspec.json.encode(comparison), indent=2)
    write_atomically(folder / "comparison.json", encoded + b"\n")
    path = folder / "comparison.md"
    write_atomically(path, "\n".join([*markdown_lines(results, bounds, figures=figures), ""]).encode())
    return path


def markdown_lines(results: list[Result], bounds: Bounds | None, *, figures: bool) -> list[str]:
    """The page `comparison.md`: sentences, table, figures if there are any, and where the times come from."""
    if not results:
        return ["# Comparison", "", "No policy was run."]
    names = [f"`{_cell(name)}`" for name in labels(results)]
    lines = [f"# {' against '.join(names) if len(names) < 3 else f'{len(names)} policies'}", "", deployment(results[0])]
    lines += ["", *(line for sentence in all_sentences(results, bounds) for line in (sentence, ""))]
    lines += [f"| | {' | '.join(names)} |", "|:--|" + "--:|" * len(results)]
    lines += [f"| {row.name} | {' | '.join(_markdown(cell) for cell in row.cells)} |" for row in table(results)]
    key = "In parentheses: ratio to the first policy. Bold: the best, or within 1 % of it, where they differ."
    lines += ["", key, ""]
    for file, caption in FIGURES.items() if figures else ():
        lines += [f"## {caption}", "", f"![{caption}](figures/{file})", ""]
    lines += ["## Where the times come from", "", "The times are simulated, from these fitted constants:", ""]
    for name, result in zip(names, results, strict=True):
        line = f"- {name}: {constants(result)}, sha256 `{result.profile.sha256[:12]}`"
        if used := result.engine_profile:
            line += f"; engine {engine_overhead(used)}, sha256 `{used.sha256[:12]}`"
        lines.append(line)
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _markdown(cell: Cell) -> str:
    text = f"{cell.value} {cell.ratio}".strip()
    return f"**{text}**" if cell.best else text
