"""Pictures and words of measurements that were never made, from numbers given here."""

import random
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from pictures import picture
from pinned import L20, Table, rounded
from pinned_results import beside, result_of

from calib.figure import draw_fit
from calib.robust import Estimate
from calib.samples import Sample
from gpu_runtime.twin import against as beside_measured
from gpu_runtime.twin import agreement, iterations
from gpu_runtime.twin.against_figure import draw_against
from gpu_runtime.twin.agreement import Agreement
from gpu_runtime.twin.figure import draw_twin
from gpu_runtime.twin.iterations import KINDS, Decision, Iteration, Pair
from kvtwin.testing import requests
from sim.cost.profile import read_profile
from sim.run.served import Times
from sim.study.figures import draw
from sim.study.reproduce import Found
from sim.study.reproduce_figure import figure_of
from sim.study.setup_files import PaperSetup
from traces.served import ServedRun

SPREAD = np.array([0.0, 0.004, 0.3, 2.0, 0.7, 40.0, np.nan, 1.0])


def served() -> tuple[ServedRun, Times, Times]:
    """Times from 4 ms to 40 s, one of none and one that is not known; ours and theirs."""
    rows = requests(*((float(i), 10, 3) for i in range(len(SPREAD))))
    ours, theirs = (Times(SPREAD * x, SPREAD * 0.01 * x, SPREAD * 2 * x) for x in (1.0, 1.25))
    run = ServedRun(Path("run.json"), rows, SPREAD.tolist(), SPREAD.tolist(), [()] * len(SPREAD), 0)
    return run, ours, theirs


def measured_words() -> Iterator[str]:
    """What is said beside a measured run in which every token's time is known."""
    run, ours, _ = served()
    spread = np.nan_to_num(SPREAD, nan=11.0)
    theirs = Times(spread * 1.25, spread * 0.02, spread * np.linspace(1.0, 3.0, len(spread)))
    for failed, gaps_s in ((0, [(0.1, 0.0), (0.2, 0.3)] * 4), (3, [()] * 8)):
        run = ServedRun(run.path, run.requests, run.ttft_s, run.e2el_s, gaps_s, failed)
        found = beside_measured.measured_metrics(run, theirs)
        rows = [
            beside_measured.Compared(name, place and 0.9 * place, value, place and 0.3 * place)
            for place, (name, value) in enumerate(found.items())
        ]
        worst = beside_measured.worst(run, ours, theirs)
        facts = "vllm-v1", "serial scheduling", "l20", "run.json", 8, failed
        yield from beside_measured.markdown(beside_measured.Against(*facts, rows, worst)).splitlines()


def twin_words(place: int) -> Iterator[str]:
    """What is said of live runs that mostly decide as the twin does, some of them more slowly."""
    rng = random.Random(f"twin {place}")

    def iteration(number: int, factor: float, *, alike: bool) -> Iteration:
        ids = tuple(range(number % 7 + (0 if alike else 8)))
        chunks = ((number, 30 + number % 3, 4),) * (number % 5 == 0)
        decision = Decision(ids, chunks, (number % 2, 0, 3 * (number % 11 == 0)), (2,) * (number % 4 == 0))
        priced_s = None if number % 9 == 0 else 0.02 + 0.001 * (number % 6)
        duration_s = factor * (0.02 + 0.001 * (number % 6))
        return Iteration(decision, KINDS[number % 3], 50 * number, 0.03 * number, duration_s, priced_s)

    count = rng.choice((5, 70))
    simulated = [iteration(number, 1.0, alike=True) for number in range(count)]
    live = [
        [iteration(number, rng.choice((0.9, 1.0, 1.3)), alike=rng.random() < 0.9) for number in range(count + more)]
        for more in (0, 2)
    ]
    found, pairs = iterations.compare(simulated, live)
    result = result_of(rng)
    metrics = agreement.agreements(result, [beside(rng, result, "live") for _ in range(2)])
    slowness, judged = rng.choice(([0.98, 1.02], [0.9, 1.2, 1.0, 1.04])), agreement.verdict(metrics, found)
    said = agreement.Validation("layerkv", rng.choice((judged, judged, None)), slowness, place % 2, metrics, found)
    yield from agreement.markdown(said, 2).splitlines()
    yield from iterations.in_words(found, agreement.TOLERANCE).splitlines()
    with tempfile.NamedTemporaryFile() as file:
        iterations.write_csv(Path(file.name), pairs)
        yield from (str(rounded(line.split(","))) for line in Path(file.name).read_text().splitlines())


def against() -> Figure:
    """Beside a measured run."""
    return draw_against("vllm-v1", *served())


def twin(pairs: int = 40) -> Figure:
    """Two live runs beside the twin; of some iterations the twin has none."""

    def run(factor: float) -> SimpleNamespace:
        time_s = np.arange(6.0) * factor
        held = np.array([0.0, 3, 9, 12, 12, 0])
        series = {
            "time_s": time_s, "gpu_free_blocks": 12 - held, "gpu_allocated_blocks": held.cumsum(),
            "gpu_released_blocks": held.cumsum() - held,
        }  # fmt: skip
        return SimpleNamespace(series=series, ttft_s=SPREAD * factor, tpot_s=SPREAD[::-1] * factor / 9)

    def iteration(place: int, kind: str, duration_s: float) -> Iteration:
        return Iteration(Decision((place,), (), (0, 0, 0), ()), kind, 9 * place, float(place), duration_s)

    found = [Agreement("mean_ttft_ms", "Mean TTFT", "ms", 11.0, 10.0, 0.02, 0.1)]
    found.append(Agreement("p99_e2el_ms", "P99 E2EL", "ms", 7.0, 10.0, 0.3, -0.3))
    aligned = []
    for place in range(pairs):
        live = iteration(place, KINDS[place % 3], 0.01 + 0.02 * (place % 7))
        simulated = iteration(place, live.kind, live.duration_s * (0.9 + 0.005 * place)) if place % 5 else None
        aligned.append(Pair(place % 2, place, live, None if simulated is None else place, simulated))
    return draw_twin("layerkv", run(1.0), [run(1.1), run(0.8)], found, aligned)


def fit() -> Figure:
    """Two models, prompts, decodes and what is neither; one constant stands at its limit."""
    samples = []
    for model, layers in (("llama-2-7b", 32), ("qwen3-8b", 36)):
        common = {"model": model, "latency_s": 1.0, "num_layers": layers}
        samples += [Sample(op="layers", new_tokens=n, **common) for n in (16, 512, 64, 2048)]
        samples += [Sample(op="products", new_tokens=n, **common) for n in (32, 128)]
        samples += [
            Sample(op="layers", new_tokens=1, batch_size=batch, context_tokens=context, **common)
            for batch in (1, 2, 4, 8, 16, 32, 64)[: layers - 30]
            for context in (100, 3000, 900)
        ]
    measured_s = 1e-3 * (1 + np.arange(len(samples)) % 9)
    estimates = {
        "flops_per_s": Estimate(8e13, 1e12, 7.8e13, 8.4e13), "hbm_bytes_per_s": Estimate(7e11, 2e10, 6.6e11, 7.4e11),
        "layer_overhead_s": Estimate(0.0, None, 0.0, 0.0), "step_overhead_s": Estimate(5e-3, 1e-4, 4.8e-3, 5.3e-3),
    }  # fmt: skip
    report = SimpleNamespace(
        samples=samples, measured_s=measured_s, predicted_s=measured_s * (0.85 + 0.02 * (np.arange(len(samples)) % 13)),
        estimates=estimates, profile=read_profile(L20),
    )  # fmt: skip
    report.errors = report.predicted_s / report.measured_s - 1
    return draw_fit(report)  # pyright: ignore[reportArgumentType] - all of a report that the figure reads


def paper(*values: float) -> Figure:
    """A paper's figure over rates, or as bars: two policies in two cases, one point missing."""
    x = "request_rate" if values else None
    metrics = ["mean_ttft_ms", "request_throughput"]
    cases: dict[str, dict[str, object]] = {"short": {}, "long": {}}
    names = {"ours": "ellm", "theirs": "vllm-swap", "a third": "vllm-v1", "a fourth": "orca"}
    setup = PaperSetup("A paper", "7", "What it says", metrics, names, {}, [], x, list(values), cases)
    results = {
        (case, at, label): {
            "mean_ttft_ms": 30.0 * (1 + i) * (1 + j) ** 3 * (1 + (at or 0)) ** 2, "counters": {},
            "request_throughput": 0.4 + i - 0.1 * j,
        }
        for i, case in enumerate(cases) for j, label in enumerate(names) for at in (values or [None])
        if (i, j, at) != (1, 1, 8)
    }  # fmt: skip
    return figure_of(Found(setup, results, {}))


def study(axes: dict[str, list[object]], *, drawn: tuple[str, ...] = ()) -> Figure:
    """TTFT over the axes of a study: with intervals, one that was not measured, and one of none."""
    table = pd.DataFrame(list(product(*axes.values())), columns=list(axes))
    places = np.arange(len(table))
    table["mean_ttft_ms"] = np.where(places % 11 == 5, np.nan, 30.0 + 45.0 * places)
    table["mean_ttft_ms_ci95"] = np.where(places % 3, 20.0 + 2.0 * places, np.nan)
    asked = SimpleNamespace(axes=list(axes), drawn=list(drawn))
    return draw(asked, table, "mean_ttft_ms")  # pyright: ignore[reportArgumentType] - all of it that is read


POLICIES = ["vllm-recompute", "layerkv"]
STUDIES: dict[str, dict[str, list[object]]] = {
    "rates": {"policy": [*POLICIES], "request_rate": [0.5, 1.0, 2.0, 2.001]},
    "a wide axis": {"num_prompts": [10, 100, 9999], "policy": [*POLICIES], "tp": [1]},
    "a wider axis": {"link_gbps": [0.5, 499.0, 500.0], "policy": [*POLICIES]},
    "many values": {"request_rate": [float(i) for i in range(9)], "policy": ["layerkv"]},
    "names": {"policy": ["layerkv"], "router": ["round-robin", "least-loaded"]},
    "many panels": {"policy": [*POLICIES], "seed": [*range(7)], "enable_prefix_caching": [True, False],
                    "workload": ["sharegpt", "fixed"], "request_rate": [1.0, 2.0]},
}  # fmt: skip


DRAWINGS: dict[str, Callable[[], Figure]] = {
    "a measured run": against,
    "twins": twin,
    "twins that have nothing in common": lambda: twin(0),
    "a fit": fit,
    "a paper": lambda: paper(1, 2, 4, 8, 16, 32),
    "a paper's bars": paper,
    **{f"a study over {name}": partial(study, axes) for name, axes in STUDIES.items()},
    "drawn values": lambda: study(
        {"policy": [*POLICIES], "request_rate": [0.3, 0.7, 5.0], "seed": [1, 2]}, drawn=("request_rate", "seed")
    ),
}


def words(name: str) -> dict[str, list[str]]:
    """What is said."""
    return {"said": [*(measured_words() if name == "measured" else twin_words(int(name)))]}


TABLES = {
    "drawings": Table(list(DRAWINGS), lambda name: {"picture": picture(DRAWINGS[name]())}),
    "twins": Table(["measured", *map(str, range(8))], words),
}
