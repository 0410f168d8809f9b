"""How long requests waited: distributions of TTFT and TPOT, and TTFT by arrival."""

from collections.abc import Sequence

import numpy as np

from sim.results.figures import requests
from sim.results.figures.data import FigureRun, spread
from sim.results.figures.style import seconds_text, wants_log
from sim.results.page.chart import Chart, Json, line, rounded

POINTS = 1000
"""Of a curve at most."""
DOTS = 1500
"""Requests shown one by one at most."""
MOST_ROOM = 2.0
"""An SLO further from the longest latency than this factor would leave the curves no room on a linear axis."""


def distributions(runs: Sequence[FigureRun]) -> list[Chart]:
    """Shares of the requests with TTFT and TPOT up to each value, beside the SLOs."""
    return [_cdf(runs, shown) for shown in requests.distributions(runs) if shown.found]


def _cdf(runs: Sequence[FigureRun], shown: requests.Distribution) -> Chart:
    unit_s, unit = shown.unit
    kept = [
        (i, run.label, values) for i, (run, values) in enumerate(zip(runs, shown.values_s, strict=True)) if values.size
    ]
    data = []
    for place, label, values in kept:
        x, share = requests.curve(values, POINTS)
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": label,
                "meta": place,
                "line": {"shape": "hv", "color": f"@p{place}", "width": 2},
                "x": rounded(x / unit_s, 6),
                "y": rounded(share, 3),
                "hovertemplate": f"%{{y:.1f}} % within %{{x:.3~g}} {unit}",
            }
        )
    axis: Json = {"title": {"text": f"{shown.title}, {unit}"}}
    least_s, most_s = min(float(v[0]) for v in shown.marked), max(float(v[-1]) for v in shown.marked)
    longest_s = max(float(v[-1]) for v in shown.found)
    if least_s > 0.0 and (wants_log(shown.marked) or most_s > MOST_ROOM * longest_s):
        axis |= _log_axis(least_s / unit_s, most_s / unit_s)
    layout: Json = {"xaxis": axis, "yaxis": {"title": {"text": "requests, %"}, "range": [0, 101]}, "height": 330}
    if shown.slo_s is not None:
        at = shown.slo_s / unit_s
        dashed = {"color": "@ink", "dash": "dash", "width": 1.2}
        layout["shapes"] = [{"type": "line", "x0": at, "x1": at, "yref": "paper", "y0": 0, "y1": 1, "line": dashed}]
        where = float(np.log10(at)) if axis.get("type") == "log" else at
        note = {"x": where, "yref": "paper", "y": 1, "yanchor": "bottom", "showarrow": False}
        layout["annotations"] = [{**note, "text": f"SLO {seconds_text(shown.slo_s)}"}]
    statistics = {"mean": np.mean, "median": np.median}
    statistics |= {f"P{p}": (lambda values, p=p: np.percentile(values, p)) for p in (90, 95, 99)}
    rows = [[what, *(seconds_text(float(take(values))) for *_, values in kept)] for what, take in statistics.items()]
    caption = f"Share of the requests with a {shown.name.upper()} up to each value: further left is better."
    return Chart(shown.name, shown.title, caption, data, layout, ["", *(label for _, label, _ in kept)], rows)


def _log_axis(low: float, high: float) -> Json:
    """A logarithmic axis whose ticks are plain numbers: 1, 2, 5, or powers of ten where it is long."""
    steps = (1, 2, 5) if high / low < 2e3 else (1,)
    decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    ticks = [tick for tick in ticks if low / 1.5 <= tick <= high * 1.5]
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def arrivals(runs: Sequence[FigureRun]) -> Chart | None:
    """TTFT over the time of arrival: whether a queue grows. None where no run has arrivals."""
    came = requests.arrivals(runs)
    if not came.runs:
        return None
    data: list[Json] = []
    rows = []
    for place, run, x in came.runs:
        some = spread(x.size, DOTS)
        dots: Json = {"type": "scatter", "mode": "markers", "showlegend": False, "meta": place}
        marker = {"color": f"@p{place}", "size": 3, "opacity": 0.35}
        dots |= {"x": rounded(x[some]), "y": rounded(run.ttft_s[some], 6), "marker": marker, "hoverinfo": "skip"}
        data.append(dots)
        mean = came.means(x, run.ttft_s)
        has = np.isfinite(mean)
        data.append(line(place, run.label, came.middles[has], mean[has], "mean TTFT %{y:.3~g} s", 6, width=2.5))
        rows.append([run.label, *(seconds_text(float(mean[has][end])) for end in (0, -1))])
    axis: Json = {"title": {"text": "TTFT, s"}, "rangemode": "tozero"}
    ordered = [np.sort(run.ttft_s) for _, run, _ in came.runs]
    if wants_log(ordered):
        axis |= _log_axis(min(float(v[0]) for v in ordered), max(float(v[-1]) for v in ordered))
    layout = {"xaxis": {"title": {"text": f"arrival, {came.unit}"}}, "yaxis": axis, "height": 330}
    caption = "Dots are requests, lines their means. A line that climbs to the right is a queue that grows."
    columns = ["mean TTFT", "first to arrive", "last to arrive"]
    return Chart("arrivals", "TTFT by arrival", caption, data, layout, columns, rows)
