"""Where the time went: the parts of the mean latency, and which limit bound when."""

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import UNSET

from sim.results.figures.data import FigureRun, Floats, clock
from sim.results.figures.style import percent_text, seconds_text
from sim.results.page.chart import TIME_BINS, Chart, Json, over_time, rounded
from sim.results.report import LATENCY_PARTS
from sim.results.time_use import LIMITS

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


def time_parts(runs: Sequence[FigureRun]) -> Chart | None:
    """Parts of the mean end-to-end latency; None where no run has them."""
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


def limits(runs: Sequence[FigureRun]) -> Chart | None:
    """Shares of the time in which each limit bound; None without time series."""
    kept = [(run, run.series) for run in runs if run.series is not None and "bound_memory_s" in run.series]
    if not kept:
        return None
    shown = [run for run, _ in kept]
    unit_s, unit, end = clock(shown)
    edges = np.linspace(0.0, end, TIME_BINS + 1)
    width = edges[1] - edges[0]
    shares = [_bound_shares(run.result.makespan_s, series, edges * unit_s) for run, series in kept]
    data: list[Json] = []
    layout: Json = {"barmode": "stack", "bargap": 0, "height": 130 + 150 * len(shown)}
    layout["xaxis"] = over_time(unit, end) | {"anchor": _axis("y", len(shown) - 1)}
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
                    "x": rounded((edges[1:] + edges[:-1]) / 2),
                    "y": rounded(shares[row][name] * 100.0, 2),
                    "width": float(width),
                    "yaxis": _axis("y", row),
                    "marker": {"color": f"@l{place}", "line": {"width": 0}},
                    "hovertemplate": f"{WAITS[name]}: %{{y:.1f}} %<extra>{_plain(shown[row].label)}</extra>",
                }
            )
    kinds = [name for name in WAITS if any(found[name].max() > 1e-4 for found in shares)]
    rows = [
        [WAITS[name], *(percent_text(_share_of_run(run.result.makespan_s, series, name)) for run, series in kept)]
        for name in kinds
    ]
    caption = (
        "While a request waits to start: what keeps it from starting. Else what iterations wait for. Share of the time."
    )
    return Chart("limits", "Which limit bound when", caption, data, layout, ["", *(run.label for run in shown)], rows)


def _axis(name: str, row: int) -> str:
    return name if not row else f"{name}{row + 1}"


def _plain(text: str) -> str:
    """Text that Plotly shows verbatim: it knows some HTML."""
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _bound_shares(makespan_s: float, series: Mapping[str, Floats], edges_s: Floats) -> dict[str, Floats]:
    """Share of each bin of time in which each limit bound, and in which nothing ran."""
    time_s = series["time_s"]
    last_s = max(makespan_s, float(time_s[-1]))
    found: dict[str, Floats] = {}
    for name in LIMITS:
        # A total holds the iteration that begins at its time: at that time it is the one before's.
        values = series[f"bound_{name}_s"]
        totals_s = np.r_[0.0, values[:-1], values[-1]]
        found[name] = np.diff(np.interp(edges_s, np.r_[time_s, last_s], totals_s)) / np.diff(edges_s)
    found["idle"] = np.clip(1.0 - sum(found.values(), np.zeros(len(edges_s) - 1)), 0.0, 1.0)
    return found


def _share_of_run(makespan_s: float, series: Mapping[str, Floats], name: str) -> float:
    last = {limit: float(series[f"bound_{limit}_s"][-1]) for limit in LIMITS}
    makespan_s = makespan_s or 1.0
    return max(0.0, makespan_s - sum(last.values())) / makespan_s if name == "idle" else last[name] / makespan_s
