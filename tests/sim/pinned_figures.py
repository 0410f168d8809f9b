"""Figures of studies, maps, papers and fits that no run has left, as they are pinned in `golden/figures.txt`.

    python tests/sim/pinned_figures.py      # writes golden/figures.txt anew

Their axes and values are drawn from those at which a picture changes: ends that span just enough for a logarithm, as
many values as have ticks, as many panels as fit, names as long as a line. A line has a digest of a picture.
"""

# Stand-ins have all of a study that is read.
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false

import random
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))

import msgspec
import numpy as np
import pandas as pd
from goldens import GOLDEN, digest, write
from matplotlib.figure import Figure
from pinned_commands import picture

from calib import figure
from calib.robust import Estimate
from calib.samples import Sample
from sim.cost.profile import UNITS, load_profile
from sim.results.report import METRICS
from sim.study import figures, regimes, reproduce_figure
from sim.study.axes import Study
from sim.study.regimes import Regimes
from sim.study.reproduce import Found, digits, fill_in, table
from sim.study.setup_files import Claim, PaperSetup, value_of

FIGURES = GOLDEN / "figures.txt"
STUDIES, MAPS, PAPERS, CLAIMS, FITS = 70, 14, 24, 150, 9
POLICIES = ["vllm-v1", "layerkv", *(f"ellm:{'o' * width}" for width in (54, 55, 56, 57)), "orca", "radix", "kvpr"]
NUMBERS = [[1.0, 4.0], [1.0, 3.99], [0.0, 2.0, 50.0], [2.0, 1.0, 8.0], [*range(1, 9)], [*range(1, 10)], [1, 1000],
           [1, 999, 7], [5e3, 1e6, 999_999], [3], [0.25, None, 0.5], [-4.0, 4.0], [1.0, 2.5, 10_000.0],
           [0.5, *range(1, 9), 2000.0]]  # fmt: skip
NAMED = [["a", "b"], ["b", "a", "c"], ["A", "a"], ["w" * 41, "w" * 42], ["a"], list("nmlkjihg")]
VALUES = [[1.0, 12.0], [1.0, 11.9], [0.0, 3.0, 1.0], [0.0], [0.5, 0.25], [-1.0, 5.0], [2.0, 2000.0, 1999.0],
          [30.0, 75.0, nan], [0.001, 1e6], [nan, 1.0, 12.5], [1500.0, 2500.0, 3.0], [0.0, -0.5]]  # fmt: skip


def drawn(found: Figure) -> str:
    """Its size, so that a change of that alone is seen, and a digest of all."""
    lines = picture(found)
    return f"{lines[0]}: {len(lines)} {digest(lines)}"


# -- studies -----------------------------------------------------------------------------------------------------------


def study_of(rng: random.Random) -> tuple[Any, Any, str]:
    """A study's axes, its table, and a metric; some axes go together, and of some places there is no row."""
    axes: dict[str, list[Any]] = {"request_rate": rng.choice(NUMBERS), "max_num_seqs": rng.choice(NUMBERS[:8])}
    axes |= {"router": rng.choice(NAMED), "policy": POLICIES[: rng.choice((1, 2, 2, 2, 7, 8))]}
    axes |= {"enable_prefix_caching": [True, False], "input_len": rng.choice(([100, 200], [100]))}
    names = rng.sample(list(axes), rng.choice((0, 1, 1, 2, 2, 2, 3, 3, 4)))
    rows = [dict(zip(names, row, strict=True)) for row in product(*(axes[name] for name in names))]
    rng.shuffle(rows)
    rows = rows[: rng.choice((len(rows), len(rows), 1 + len(rows) // 2))][:130]
    if names and rng.random() < 0.3:
        # Two go with one another, though not with what is drawn.
        for row in rows:
            row["tp"] = rng.choice((1, 2))
            row["gpu"] = {1: "l20", 2: "t4"}[row["tp"]]
        names += ["tp", "gpu"]
    metric, values = rng.choice(("mean_ttft_ms", "num_preemptions")), rng.choice(VALUES)
    lost = rng.choice(names) if names else None
    for row in rows:
        row[metric] = nan if lost and row[lost] == rows[0][lost] and len(rows) % 3 == 0 else rng.choice(values)
        row[f"{metric}_ci95"] = rng.choice((nan, 0.5, 1.0, 40.0)) if len(rows) % 2 else nan
    apart = rng.sample(names, rng.choice((0, 0, 0, 1, 2)) if len(names) > 1 else 0)
    return SimpleNamespace(axes=names, drawn=apart), pd.DataFrame(rows), metric


def studies() -> Iterator[str]:
    """Of each the picture; at last one for each metric that a table has."""
    for place in range(STUDIES):
        asked, found, metric = study_of(random.Random(f"figure {place}"))
        yield f"study {place} over {asked.axes} drawn {asked.drawn}: {drawn(figures.draw(asked, found, metric))}"
    for panels in (1, 3, 4, 12, 13):
        asked = SimpleNamespace(axes=["router", "request_rate"], drawn=[])
        rows = [(f"r{panel}", rate, 5.0 + panel) for panel in reversed(range(panels)) for rate in range(panels + 1)]
        found = pd.DataFrame(rows, columns=["router", "request_rate", "mean_ttft_ms"])
        yield f"{panels} panels: {drawn(figures.draw(asked, found, 'mean_ttft_ms'))}"
    rows = {"policy": ["orca"], **{metric.key: [None if place % 2 else 1.0] for place, metric in enumerate(METRICS)}}
    del rows[METRICS[2].key]
    with tempfile.TemporaryDirectory() as folder, patch.object(figures, "save_figure", lambda path, _: path.name):
        asked = Study("study.toml", {}, ("policy",), [], 1, {})
        yield repr(figures.write_figures(Path(folder) / "new", asked, pd.DataFrame(rows)))
        yield repr(sorted(path.name for path in Path(folder).iterdir()))
    for name in ("mean_ttft_ms", "max_num_seqs", "block_size", "swap_space", "profile_h2d_bytes_per_s"):
        yield f"{figures.shown(name)} | {figures.with_unit(name)}"
    yield repr([figures.axis_text(value) for value in (1.0, 2.5, 1234567.0, 12345678.0, 1234, "a", True)])


# -- maps --------------------------------------------------------------------------------------------------------------


def map_of(rng: random.Random) -> tuple[Regimes, pd.DataFrame]:
    """Few places or many, along numbers, names or both."""
    xs = [*range(1, rng.choice((2, 3, 4, 5, 6, 24)) + 1)]
    ys = rng.choice(([1, 2, 3], [3.0, 1.0, 4.0, 2.0], ["b", "a", 7, 3], [10**6, 999_999, 2.5e9, 1234.5, 0.1, 7]))
    panels = rng.choice(([None], ["a", "b"], ["z" * 31, "z" * 32, 1]))
    metric = rng.choice(("mean_ttft_ms", "request_goodput"))
    rows = [
        {"policy": policy, "input_len": x, "link_gbps": y, "router": panel, metric: rng.choice((nan, 1.0, 2.0, 1e3))}
        for policy in POLICIES[: rng.choice((2, 3))] for x in xs for y in ys for panel in panels if rng.random() < 0.9
    ]  # fmt: skip
    study = Study("study.toml", {}, ("policy", "input_len", "link_gbps"), [], 1, {})
    return Regimes(study, "input_len", "link_gbps", None if panels == [None] else "router", metric), pd.DataFrame(rows)


def maps() -> Iterator[str]:
    """Of each the picture, the words, and the table that is written."""
    for place in range(MAPS):
        asked, found = map_of(random.Random(f"drawn map {place}"))
        with tempfile.TemporaryDirectory() as folder, patch.object(regimes, "save_figure") as save:
            won = regimes.write(Path(folder), asked, found)
            written = (Path(folder) / "map.csv").read_text()
        (path, figure), _ = save.call_args
        yield f"map {place}: {path.name} {drawn(figure)} {digest(written)} {digest(list(regimes.lines(asked, won)))}"
    values: list[dict[str, float]] = [{"a": a, "b": b} for a in (0.0, 1.0, 100.0, nan) for b in (1.0, 1.01, 101.0, 0.0)]
    for one in [*values, {"a": 2.0}, {"a": nan}, {"a": 0.0}, {"a": 4.0, "b": 4.0, "c": 5.0}, {"a": 5.0, "b": 2.0}]:
        yield repr([one, *(regimes._cell(one, less) for less in (True, False))])
    for ratio in (1.0, 1.5, 2.0, 2.5, inf):
        yield repr(regimes._colour(regimes.Cell("b", ratio, {}), ["a", "b"]))
    yield repr([regimes._tick(value) for value in (1, 2.5, 999_999, 1e6, 5e9, "a$", True, 0.1234567)])


# -- papers ------------------------------------------------------------------------------------------------------------


def paper_of(rng: random.Random) -> Found:
    """Policies in some cases along x or as bars: spans at which scales change, names as long as a line."""
    x = rng.choice((None, "request_rate", "tp", "unnamed"))
    along = [] if x is None else rng.choice(([1, 4], [1.0, 3.9], [2], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6], [2000, 500]))
    cases: dict[str, dict[str, Any]] = {name: {} for name in rng.choice(((), ("one",), ("c" * 40, "c " * 21)))}
    labels = {f"label {i}": "orca" for i in range(rng.choice((1, 2, 3, 4, 5)))}
    metrics = rng.sample(("mean_ttft_ms", "p99_ttft_ms", "request_throughput", "unnamed_ms"), rng.choice((1, 2, 3)))
    title = " ".join(rng.choice(("a", "words", "longer words")) for _ in range(rng.choice((2, 12, 30))))
    setup = PaperSetup("Paper", "3", title, metrics, labels, {}, [], x, along, cases)
    chosen = {metric: rng.choice(SPANS) for metric in metrics}
    results = {
        (case, at, label): {"counters": {}} | {metric: rng.choice(chosen[metric]) for metric in metrics}
        for case in cases or [""] for at in setup.along(case) for label in labels if rng.random() < 0.9
    }  # fmt: skip
    return Found(setup, results, {})


SPANS = (
    (1.0, 30.0),
    (1.0, 30.1),
    (0.0, 9.0),
    (9999.0, 20.0),
    (10_000.0, 500.0),
    (1e5, 2.0),
    (0.0,),
    (0.5, 0.25, 700.0),
)
KINDS: tuple[Any, ...] = ("ratio", "most", "least", "difference", "capacity")


def claim_of(rng: random.Random, labels: list[str], metric: str) -> Claim:
    return Claim(
        "says", rng.choice((0.0, 0.5, 1.0, 1.05, 1.5, 2.0, 3.0, -1.0)), metric, rng.choice(labels),
        rng.choice((None, *labels)), rng.choice(KINDS), rng.choice(("ratio", "difference")), rng.choice(("max", "min")),
        rng.choice((None, None, 1, 2)), rng.choice((None, None, "one")), rng.choice((1.0, 2.0, 3.0)),
    )  # fmt: skip


def papers() -> Iterator[str]:
    """Of some the picture; of more what becomes of their claims."""
    for place in range(PAPERS):
        found = paper_of(random.Random(f"paper {place}"))
        yield f"paper {place}: {drawn(reproduce_figure.figure_of(found))}"
    setup, results = PaperSetup("", "", "", [], {}, {}, []), dict[Any, dict[str, Any]]()
    labels = ["ours", "theirs", "ours", "theirs", "nobody's"]
    for place in range(CLAIMS):
        rng = random.Random(f"claim {place}")
        claim = claim_of(rng, labels, metric := rng.choice(("p99_ttft_ms", "queueing")))
        setup = PaperSetup("A-paper", "7", "", [metric], {}, {}, [claim], "tp", [1, 2, 3])
        points = [(case, x, label) for case in ("one", "two") for x in (1, 2, 3) for label in labels[:2]]
        results = {
            point: {
                "p99_ttft_ms": rng.choice((0.0, 1.0, 2.0, 3.0, 2.1)), "mean_ttft_ms": 2.0, "counters": {},
                "mean_queue_ms": rng.choice((0.0, 1.0, 1.5)), "median_queue_ms": rng.choice((0.0, 2000.0, 2000.1)),
            }
            for point in points if rng.random() < 0.95
        }  # fmt: skip
        yield f"{claim}: {table([Found(setup, results, {})]).splitlines()[-1]}"
    yield repr(fill_in("a<!-- reproduce a -->b<!-- end -->c", [Found(setup, results, {})] * 2))
    yield repr([digits(value) for value in (0.0, 0.0009994, 0.001, 999.49, 999.5, -1234.5, 12.345)])
    held: dict[str, Any] = {
        "counters": {"held_block_layers": 3, "filled_token_layers": 9},
        "scenario": {"block_size": 4},
    }
    for counters in (held["counters"], {}, {"rebuilt_tokens": 3, "context_tokens": 2}):
        result = held | {"counters": counters, "goodput_attainment": 0.25, "duration": None}
        metrics = "uncached", "attainment", "violations", "duration", "fragmentation"
        yield repr([value_of(result, metric) for metric in metrics])


# -- fits --------------------------------------------------------------------------------------------------------------


def report_of(rng: random.Random) -> Any:
    """Of prompts, decodes and other operations: what was measured and predicted, and constants with intervals."""
    models = list("abcdefgh")[: rng.choice((1, 2, 3, 8))]
    batches = rng.sample(range(1, 40), rng.choice((1, 2, 4, 5, 6, 9)))
    samples: list[Sample] = []
    for model in models:
        common = {"latency_s": 1.0, "model": model, "num_layers": rng.choice((1, 2))}
        passes = [("layers", {"new_tokens": n}) for n in rng.sample(range(2, 99), 7)]
        passes += [("elementwise", {"new_tokens": n}) for n in rng.sample(range(2, 99), rng.choice((3, 7, 9)))]
        passes += [("layers", {"new_tokens": n, "batch_size": 3}) for n in (7, 50)]
        passes += [("layers", {"new_tokens": n, "context_tokens": 9}) for n in (7, 50)]
        passes += [
            ("layers", {"new_tokens": 1, "batch_size": b, "context_tokens": c})
            for b in batches for c in rng.sample(range(1, 999), rng.choice((2, 3)))
        ]  # fmt: skip
        rng.shuffle(passes)
        samples += [Sample(op=op, tp=rng.choice((1, 1, 1, 2)), **common, **shape) for op, shape in passes]
    measured = np.array([rng.uniform(1e-4, 1e-2) for _ in samples])
    errors = np.array([rng.choice((-0.3, -0.1, 0.0, 0.05, 0.1, 0.3)) for _ in samples])
    form = rng.choice(("roofline", "linear"))
    estimates = {
        name: Estimate(3.0 + i, rng.choice((None, 0.5, 0.5)), 2.5 + i * rng.random(), 4.0 + i * (1 + rng.random()))
        for i, name in enumerate(rng.sample([*UNITS[form]], 5))
    }  # fmt: skip
    return SimpleNamespace(
        samples=samples, measured_s=measured, predicted_s=measured * (1 + errors), errors=errors,
        estimates=estimates, profile=SimpleNamespace(name="mine", status="measured", form=form),
    )  # fmt: skip


def fits() -> Iterator[str]:
    """Fits to samples of one to eight models, and profiles side by side."""
    for place in range(FITS):
        report = report_of(random.Random(f"fit {place}"))
        yield f"fit {place} to {len(report.samples)} samples: {drawn(figure.draw_fit(report))}"
    shipped = [load_profile(name) for name in ("l20-derived", "h100-imported", "a100-80g-imported")]
    none = msgspec.structs.replace(shipped[1].constants["layer_overhead_s"], value=0.0)
    shipped.append(msgspec.structs.replace(shipped[1], constants=shipped[1].constants | {"layer_overhead_s": none}))
    for first, second in ((shipped[0], shipped[1]), (shipped[2], shipped[1]), (shipped[3], shipped[1])):
        for model in ("llama-2-7b", "qwen3-30b-a3b"):
            yield f"{first.name}, {second.name} on {model}: {drawn(figure.draw_diff(first, second, model))}"


PINNED = {"studies' figures": studies, "maps' figures": maps, "papers' figures": papers, "fits' figures": fits}


def main() -> None:
    write(FIGURES, PINNED)


if __name__ == "__main__":
    main()
