"""What the machine did over time: memory, the GPU and PCIe, and of several engines each one."""

from collections.abc import Sequence

import numpy as np
from msgspec import UNSET

from sim.results.figures.data import FigureRun, clock
from sim.results.figures.lanes import LANES, busy_shares
from sim.results.figures.memory import memory_panels, step_functions, stretches
from sim.results.figures.style import percent_text
from sim.results.page.chart import TIME_BINS, Chart, Json, line, over_time
from sim.results.report import NONE


def memory(runs: Sequence[FigureRun]) -> list[Chart]:
    """The panels of the memory figure, each a chart."""
    if all(run.series is None for run in runs):
        return []
    unit_s, unit, end = clock(runs)
    edges = np.linspace(0.0, end, TIME_BINS + 1)
    found = []
    for number, panel in enumerate(memory_panels(runs)):
        title = panel.title.partition(":")[0]
        data, rows = [], []
        for place, run, time, values, last in step_functions(runs, panel, unit_s):
            x, mean, _, high = stretches(time, values, last, edges)
            data.append(line(place, run.label, x, mean, "%{y:.3~g}", shape="hvh"))
            rows.append([run.label, panel.text(float(np.average(mean))), panel.text(float(high.max(initial=0.0)))])
        layout = {
            "xaxis": over_time(unit, end),
            "yaxis": {"title": {"text": panel.axis}, "rangemode": "tozero"},
            "height": 260,
        }
        caption = "Means over stretches of time; peaks may be higher."
        columns = [title, "mean", "peak"]
        found.append(Chart(f"memory{number}", title, caption, data, layout, columns, rows))
    return found


def lanes(runs: Sequence[FigureRun]) -> Chart | None:
    """How busy the GPU and each direction of PCIe are; None without time series."""
    shown = [(i, run, run.series) for i, run in enumerate(runs) if run.series is not None]
    if not shown:
        return None
    unit_s, unit, end = clock(runs)
    edges = np.linspace(0.0, end, TIME_BINS // 2 + 1)
    data: list[Json] = []
    rows = []
    dashes = dict(zip(LANES, ("solid", "dash", "dot"), strict=True))
    for place, run, series in shown:
        cells = [run.label]
        for name, title in LANES.items():
            shares = busy_shares(run, series, name, title, edges * unit_s)
            makespan_s = run.result.makespan_s
            busy_s = run.result.lanes.by_name()[title].busy_s
            cells.append(percent_text(min(1.0, busy_s / makespan_s)) if makespan_s else NONE)
            if not shares.any():
                continue
            middles = (edges[1:] + edges[:-1]) / 2
            drawn = line(place, f"{run.label}: {title}", middles, shares * 100.0, "%{y:.3~g} %", 3)
            drawn["line"] = {"color": f"@p{place}", "dash": dashes[name], "width": 2}
            data.append(drawn)
        rows.append(cells)
    layout = {
        "xaxis": over_time(unit, end),
        "yaxis": {"title": {"text": "busy, % of the time"}, "range": [0, 102]},
        "height": 300,
    }
    caption = "How busy the GPU and each direction of PCIe are. A lane that is never used is not drawn."
    return Chart("lanes", "GPU and PCIe", caption, data, layout, ["busy", *LANES.values()], rows)


def engines(runs: Sequence[FigureRun]) -> Chart | None:
    """How busy each of several engines is; None where every run has one."""
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
