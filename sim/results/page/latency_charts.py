"""How long requests waited: distributions of TTFT and TPOT, and TTFT by arrival."""

from collections.abc import Callable, Sequence

import numpy as np

from sim.results.figures.data import FigureRun, Floats, time_unit
from sim.results.figures.style import seconds_text, wants_log
from sim.results.metrics import Goodput
from sim.results.page.chart import Chart, Json, rounded

POINTS = 1000
"""Of a curve at most."""
DOTS = 1500
"""Requests shown one by one at most."""
MOST_ROOM = 2.0
"""An SLO further from the longest latency than this factor would leave the curves no room on a linear axis."""


def distributions(runs: Sequence[FigureRun]) -> list[Chart]:
    """Shares of the requests with TTFT and TPOT up to each value, beside the SLOs."""
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
                "x": rounded(values[kept] / unit_s, 6),
                "y": rounded((kept + 1) / values.size * 100.0, 3),
                "hovertemplate": f"%{{y:.1f}} % within %{{x:.3~g}} {unit}",
            }
        )
    axis: Json = {"title": {"text": f"{title}, {unit}"}}
    kept_s = [values for *_, values in shown] + ([] if slo_s is None else [np.array([slo_s])])
    least_s, most_s = min(float(v[0]) for v in kept_s), max(float(v[-1]) for v in kept_s)
    if least_s > 0.0 and (wants_log(kept_s) or most_s > MOST_ROOM * longest_s):
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


def arrivals(runs: Sequence[FigureRun]) -> Chart | None:
    """TTFT over the time of arrival: whether a queue grows. None where no run has arrivals."""
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
                "x": rounded(x[some]),
                "y": rounded(run.ttft_s[some], 6),
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
                "x": rounded(((edges[1:] + edges[:-1]) / 2)[count > 0]),
                "y": rounded(mean, 6),
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
