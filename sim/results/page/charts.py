"""The page's figures, as Plotly takes them: traces and axes as plain data, and the same numbers as a small table.

Colours are names that the page resolves for light and dark: `@p0` the first policy, `@c0` the first kind of time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec import UNSET

from sim.results.figures.data import FigureRun, Floats, clock, has_series, time_unit
from sim.results.figures.lanes import LANES, busy_shares
from sim.results.figures.memory import memory_panels, stretches
from sim.results.figures.style import percent_text, seconds_text, wants_log
from sim.results.metrics import Goodput
from sim.results.report import LATENCY_PARTS, NONE
from sim.results.time_use import LIMITS

Json = dict[str, Any]
POINTS = 1000
DOTS = 1500
TIME_BINS = 120
MOST_ROOM = 2.0
"""An SLO further from the longest latency than this factor would leave the curves no room on a linear axis."""
WAITS = {
    "memory": "waiting for KV memory",
    "seats": "waiting for a seat (max-num-seqs)",
    "tokens": "waiting for the token budget",
    "slo": "waiting for others' SLOs",
    "policy": "waiting by the policy's rules",
    "copies": "PCIe copies",
    "engine": "engine's own time",
    "compute": "computation",
    "idle": "idle",
}
"""What limits are called."""


@dataclass(frozen=True)
class Chart:
    """A figure: what it shows, how to read it, Plotly's data and layout, and a table with its main numbers."""

    name: str
    title: str
    caption: str
    data: list[Json]
    layout: Json
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)


def charts(runs: Sequence[FigureRun]) -> list[Chart]:
    """All figures that the runs have data for."""
    drawn = [_time_parts(runs), _limits(runs), *_distributions(runs), _arrivals(runs), *_memory(runs), _lanes(runs)]
    drawn.append(_engines(runs))
    return [chart for chart in drawn if chart is not None]


def _labels(runs: Sequence[FigureRun]) -> list[str]:
    return [run.label for run in runs]


# -- where the time went -----------------------------------------------------------------------------------------------


def _time_parts(runs: Sequence[FigureRun]) -> Chart | None:
    names = {"queue": "queueing", **LATENCY_PARTS}
    known = [(i, run, run.result.latency_parts) for i, run in enumerate(runs)]
    told = [(run, parts) for _, run, parts in known if parts is not UNSET]
    if not told:
        return None
    data, rows = [], []
    for place, (part, name) in enumerate(names.items()):
        seconds = [getattr(parts, f"{part}_s") or 0.0 for _, parts in told]
        if max(seconds) < 1e-7:
            continue
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": [_folded(run.label) for run, _ in told],
                "x": [round(s, 6) for s in seconds],
                "marker": {"color": f"@c{place}"},
                "hovertemplate": f"{name}: %{{x:.3f}} s<extra>%{{y}}</extra>",
            }
        )
        rows.append([name, *(seconds_text(max(0.0, s)) for s in seconds)])
    rows.append(["end to end", *(seconds_text((run.result.mean_e2el_ms or 0.0) / 1e3) for run, _ in told)])
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "mean end-to-end latency, s"}, "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "automargin": True},
        "height": 150 + 62 * len(told),
    }
    caption = (
        "Mean seconds of a completed request, from arrival to last token; the parts add up. An iteration's seconds "
        "count for every request in it. “Others computed”: in the batch, while an iteration computed other requests."
    )
    return Chart("parts", "Where the time went", caption, data, layout, ["", *(run.label for run, _ in told)], rows)


def _folded(label: str) -> str:
    """A label in lines of at most some 24 characters, broken between its options."""
    return label.replace(":", ":<br>").replace(",", ",<br>")


def _limits(runs: Sequence[FigureRun]) -> Chart | None:
    shown = [run for run in runs if has_series(run) and run.series is not None and "bound_memory_s" in run.series]
    if not shown:
        return None
    unit_s, unit, end = clock(shown)
    edges = np.linspace(0.0, end, TIME_BINS + 1)
    width = edges[1] - edges[0]
    shares = [_bound_shares(run, edges * unit_s) for run in shown]
    data: list[Json] = []
    layout: Json = {"barmode": "stack", "bargap": 0, "height": 130 + 150 * len(shown)}
    layout["xaxis"] = {"title": {"text": f"time, {unit}"}, "range": [0, end], "anchor": _axis("y", len(shown) - 1)}
    layout["annotations"] = []
    for row, run in enumerate(shown):
        bottom = (len(shown) - 1 - row) / len(shown)
        domain = [bottom, bottom + (1.0 if len(shown) == 1 else 0.78 / len(shown))]
        layout[_axis("yaxis", row)] = {"domain": domain, "range": [0, 100], "ticksuffix": " %", "nticks": 3}
        text = {"text": f"<b>{_plain(run.label)}</b>", "xref": "paper", "yref": "paper", "x": 0, "y": domain[1]}
        layout["annotations"].append({**text, "yanchor": "bottom", "xanchor": "left", "showarrow": False})
    for place, name in enumerate(WAITS):
        used = [row for row in range(len(shown)) if shares[row][name].max() > 1e-4]
        for row in used:
            data.append(
                {
                    "type": "bar",
                    "name": WAITS[name],
                    "legendgroup": name,
                    "showlegend": row == used[0],
                    "x": _rounded((edges[1:] + edges[:-1]) / 2),
                    "y": _rounded(shares[row][name] * 100.0, 2),
                    "width": float(width),
                    "yaxis": _axis("y", row),
                    "marker": {"color": f"@l{place}", "line": {"width": 0}},
                    "hovertemplate": f"{WAITS[name]}: %{{y:.1f}} %<extra>{_plain(shown[row].label)}</extra>",
                }
            )
    kinds = [name for name in WAITS if any(found[name].max() > 1e-4 for found in shares)]
    rows = [[WAITS[name], *(percent_text(_share_of_run(run, name)) for run in shown)] for name in kinds]
    caption = (
        "While a request waits to start: what keeps it from starting. Else what iterations wait for. Share of the time."
    )
    return Chart("limits", "Which limit bound when", caption, data, layout, ["", *_labels(shown)], rows)


def _axis(name: str, row: int) -> str:
    return name if not row else f"{name}{row + 1}"


def _plain(text: str) -> str:
    """Text that Plotly shows verbatim: it knows some HTML."""
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _bound_shares(run: FigureRun, edges_s: Floats) -> dict[str, Floats]:
    """Share of each bin of time in which each limit bound, and in which nothing ran."""
    if run.series is None:
        return {}
    time_s = run.series["time_s"]
    last_s = max(run.result.makespan_s, float(time_s[-1]))
    found: dict[str, Floats] = {}
    for name in LIMITS:
        # A total holds the iteration that begins at its time: at that time it is the one before's.
        values = run.series[f"bound_{name}_s"]
        totals_s = np.r_[0.0, values[:-1], values[-1]]
        found[name] = np.diff(np.interp(edges_s, np.r_[time_s, last_s], totals_s)) / np.diff(edges_s)
    found["idle"] = np.clip(1.0 - sum(found.values(), np.zeros(len(edges_s) - 1)), 0.0, 1.0)
    return found


def _share_of_run(run: FigureRun, name: str) -> float:
    if run.series is None:
        return 0.0
    last = {limit: float(run.series[f"bound_{limit}_s"][-1]) for limit in LIMITS}
    makespan_s = run.result.makespan_s or 1.0
    return max(0.0, makespan_s - sum(last.values())) / makespan_s if name == "idle" else last[name] / makespan_s


# -- latencies ---------------------------------------------------------------------------------------------------------


def _distributions(runs: Sequence[FigureRun]) -> list[Chart]:
    slo = Goodput.parse(runs[0].result.scenario.goodput)
    return [
        chart
        for chart in (
            _cdf("ttft", "Time to first token", runs, lambda run: run.ttft_s, slo.ttft_s),
            _cdf("tpot", "Time per output token", runs, lambda run: run.tpot_s, slo.tpot_s),
        )
        if chart is not None
    ]


def _cdf(
    name: str, title: str, runs: Sequence[FigureRun], of: Callable[[FigureRun], Floats], slo_s: float | None
) -> Chart | None:
    shown = [(i, run.label, np.sort(of(run))) for i, run in enumerate(runs) if of(run).size]
    if not shown:
        return None
    longest_s = max(float(values[-1]) for *_, values in shown)
    unit_s, unit = (1.0, "s") if longest_s >= 1.0 else (1e-3, "ms")
    data = []
    for place, label, values in shown:
        kept = np.unique(np.linspace(0, values.size - 1, min(values.size, POINTS)).astype(int))
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": label,
                "meta": place,
                "line": {"shape": "hv", "color": f"@p{place}", "width": 2},
                "x": _rounded(values[kept] / unit_s, 6),
                "y": _rounded((kept + 1) / values.size * 100.0, 3),
                "hovertemplate": f"%{{y:.1f}} % within %{{x:.3~g}} {unit}",
            }
        )
    axis: Json = {"title": {"text": f"{title}, {unit}"}}
    kept_s = [values for *_, values in shown] + ([] if slo_s is None else [np.array([slo_s])])
    if wants_log(kept_s) or (slo_s is not None and slo_s > MOST_ROOM * longest_s):
        least_s, most_s = min(float(v[0]) for v in kept_s), max(float(v[-1]) for v in kept_s)
        axis |= _log_axis(least_s / unit_s, most_s / unit_s)
    layout: Json = {"xaxis": axis, "yaxis": {"title": {"text": "requests, %"}, "range": [0, 101]}, "height": 330}
    if slo_s is not None:
        at = slo_s / unit_s
        line = {"color": "@ink", "dash": "dash", "width": 1.2}
        layout["shapes"] = [{"type": "line", "x0": at, "x1": at, "yref": "paper", "y0": 0, "y1": 1, "line": line}]
        where = float(np.log10(at)) if axis.get("type") == "log" else at
        note = {"x": where, "yref": "paper", "y": 1, "yanchor": "bottom", "showarrow": False}
        layout["annotations"] = [{**note, "text": f"SLO {seconds_text(slo_s)}"}]
    statistics = {"mean": np.mean, "median": np.median}
    statistics |= {f"P{p}": (lambda values, p=p: np.percentile(values, p)) for p in (90, 95, 99)}
    rows = [[what, *(seconds_text(float(take(values))) for *_, values in shown)] for what, take in statistics.items()]
    caption = f"Share of the requests with a {name.upper()} up to each value: further left is better."
    return Chart(name, title, caption, data, layout, ["", *(label for _, label, _ in shown)], rows)


def _log_axis(low: float, high: float) -> Json:
    """A logarithmic axis whose ticks are plain numbers: 1, 2, 5, or powers of ten where it is long."""
    steps = (1, 2, 5) if high / low < 2e3 else (1,)
    decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    ticks = [tick for tick in ticks if low / 1.5 <= tick <= high * 1.5]
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def _arrivals(runs: Sequence[FigureRun]) -> Chart | None:
    shown = [(i, run, run.arrival_s) for i, run in enumerate(runs) if run.arrival_s is not None and run.arrival_s.size]
    if not shown:
        return None
    end_s = max(float(arrival_s.max()) for *_, arrival_s in shown)
    unit_s, unit = time_unit(end_s)
    edges = np.linspace(0.0, max(end_s, 1e-3) / unit_s, 41)
    data: list[Json] = []
    means = []
    for place, run, arrival_s in shown:
        x = arrival_s / unit_s
        some = np.unique(np.linspace(0, x.size - 1, min(x.size, DOTS)).astype(int))
        colour = f"@p{place}"
        dots: Json = {"type": "scatter", "mode": "markers", "showlegend": False, "meta": place}
        data.append(
            dots
            | {
                "x": _rounded(x[some]),
                "y": _rounded(run.ttft_s[some], 6),
                "marker": {"color": colour, "size": 3, "opacity": 0.35},
                "hoverinfo": "skip",
            }
        )
        which = np.clip(np.searchsorted(edges, x, side="right") - 1, 0, len(edges) - 2)
        count = np.bincount(which, minlength=len(edges) - 1)
        mean = np.bincount(which, weights=run.ttft_s, minlength=len(edges) - 1)[count > 0] / count[count > 0]
        means.append((run.label, mean))
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": run.label,
                "meta": place,
                "x": _rounded(((edges[1:] + edges[:-1]) / 2)[count > 0]),
                "y": _rounded(mean, 6),
                "line": {"color": colour, "width": 2.5},
                "hovertemplate": "mean TTFT %{y:.3~g} s",
            }
        )
    axis: Json = {"title": {"text": "TTFT, s"}, "rangemode": "tozero"}
    longest_s = max(float(run.ttft_s.max()) for _, run, _ in shown)
    if wants_log([np.sort(run.ttft_s) for _, run, _ in shown]):
        axis |= _log_axis(min(float(run.ttft_s.min()) for _, run, _ in shown), longest_s)
    layout = {"xaxis": {"title": {"text": f"arrival, {unit}"}}, "yaxis": axis, "height": 330}
    rows = [[label, seconds_text(float(mean[0])), seconds_text(float(mean[-1]))] for label, mean in means]
    caption = "Dots are requests, lines their means. A line that climbs to the right is a queue that grows."
    columns = ["mean TTFT", "first to arrive", "last to arrive"]
    return Chart("arrivals", "TTFT by arrival", caption, data, layout, columns, rows)


# -- over time ---------------------------------------------------------------------------------------------------------


def _memory(runs: Sequence[FigureRun]) -> list[Chart]:
    if not any(has_series(run) for run in runs):
        return []
    unit_s, unit, end = clock(runs)
    edges = np.linspace(0.0, end, TIME_BINS + 1)
    found = []
    for number, panel in enumerate(memory_panels(runs)):
        title = panel.title.partition(":")[0]
        data, rows = [], []
        for place, (run, steps) in enumerate(zip(runs, panel.steps, strict=True)):
            if steps is None:
                continue
            time, values = steps[0] / unit_s, steps[1]
            last = max(run.result.makespan_s / unit_s, float(time[-1]))
            x, mean, _, high = stretches(time, values, last, edges)
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": run.label,
                    "meta": place,
                    "x": _rounded(x),
                    "y": _rounded(mean, 4),
                    "line": {"color": f"@p{place}", "width": 2, "shape": "hvh"},
                    "hovertemplate": "%{y:.3~g}",
                }
            )
            rows.append([run.label, panel.text(float(np.average(mean))), panel.text(float(high.max(initial=0.0)))])
        layout = {
            "xaxis": {"title": {"text": f"time, {unit}"}, "range": [0, end]},
            "yaxis": {"title": {"text": panel.axis}, "rangemode": "tozero"},
            "height": 260,
        }
        caption = "Means over stretches of time; peaks may be higher."
        columns = [title, "mean", "peak"]
        found.append(Chart(f"memory{number}", title, caption, data, layout, columns, rows))
    return found


def _lanes(runs: Sequence[FigureRun]) -> Chart | None:
    shown = [(i, run) for i, run in enumerate(runs) if has_series(run)]
    if not shown:
        return None
    unit_s, unit, end = clock(runs)
    edges = np.linspace(0.0, end, TIME_BINS // 2 + 1)
    data: list[Json] = []
    rows = []
    dashes = dict(zip(LANES, ("solid", "dash", "dot"), strict=True))
    for place, run in shown:
        cells = [run.label]
        for name, title in LANES.items():
            shares = busy_shares(run, name, title, edges * unit_s)
            makespan_s = run.result.makespan_s
            busy_s = run.result.lanes.by_name()[title].busy_s
            cells.append(percent_text(min(1.0, busy_s / makespan_s)) if makespan_s else NONE)
            if not shares.any():
                continue
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": f"{run.label}: {title}",
                    "meta": place,
                    "x": _rounded((edges[1:] + edges[:-1]) / 2),
                    "y": _rounded(shares * 100.0, 3),
                    "line": {"color": f"@p{place}", "dash": dashes[name], "width": 2},
                    "hovertemplate": "%{y:.3~g} %",
                }
            )
        rows.append(cells)
    layout = {
        "xaxis": {"title": {"text": f"time, {unit}"}, "range": [0, end]},
        "yaxis": {"title": {"text": "busy, % of the time"}, "range": [0, 102]},
        "height": 300,
    }
    caption = "How busy the GPU and each direction of PCIe are. A lane that is never used is not drawn."
    return Chart("lanes", "GPU and PCIe", caption, data, layout, ["busy", *LANES.values()], rows)


def _engines(runs: Sequence[FigureRun]) -> Chart | None:
    data: list[Json] = []
    rows = []
    for place, run in enumerate(runs):
        if run.result.engines is UNSET:
            continue
        makespan_s = run.result.makespan_s or 1.0
        names, shares = [], []
        for engine in run.result.engines:
            names.append(f"{engine.engine} {engine.role}" if engine.role != "both" else f"{engine.engine}")
            shares.append(min(1.0, engine.lanes.compute.busy_s / makespan_s))
            links = (engine.links if engine.links is not UNSET else {}).values()
            link = percent_text(max(lane.busy_s for lane in links) / makespan_s) if links else NONE
            cells = [engine.gpu if engine.tp == 1 else f"{engine.tp} {engine.gpu}", f"{engine.num_prompts:,}"]
            cells += [f"{engine.num_gpu_blocks:,}", f"{engine.num_preemptions:,}", percent_text(shares[-1]), link]
            rows.append([f"{run.label}: {names[-1]}", *cells])
        data.append(
            {
                "type": "bar",
                "name": run.label,
                "meta": place,
                "x": names,
                "y": [round(share * 100.0, 3) for share in shares],
                "marker": {"color": f"@p{place}"},
                "hovertemplate": "engine %{x}: %{y:.3~g} %",
            }
        )
    if not data:
        return None
    layout = {
        "barmode": "group",
        "xaxis": {"title": {"text": "engine"}, "type": "category"},
        "yaxis": {"title": {"text": "GPU busy, % of the time"}, "range": [0, 102]},
        "height": 260,
    }
    caption = "How busy each engine's GPUs are. Unlike bars: the router, or one pool, is what holds the others up."
    columns = ["engine", "GPU", "requests", "KV blocks", "preemptions", "GPU busy", "busier link"]
    return Chart("engines", "Engines", caption, data, layout, columns, rows)


def _rounded(values: Floats, digits: int = 4) -> list[float]:
    return np.round(values, digits).tolist()
