"""How far measured servers like the one of a run were off: `accuracy.csv`, and the intervals that follow from it.

A line of the file is a row that others measured, as `validation/accuracy_rows.py` simulated it: simulated over
measured, a column a metric, beside what the server was like. None of them was fitted to. Rows are taken that are like
the run in as much of `Kind` as they can be, and are of `LEAST` configurations at least: servers of a model in a format,
of an engine's release, on so many GPUs. What has to be alike first is the GPU, or the format: the wider interval of the
two is taken. Each counts as one, however many rows it has: rows of one configuration err together. The interval is the
simulated value over and times a factor, within which `SHARE` of these rows lie, the run counted as one more
configuration that lies outside (split conformal prediction by groups). Where these rows are of several kinds in what
comes next, `SHARE` of each kind's lie within it, too.
`validation/accuracy_coverage.py` leaves out configuration by configuration, and counts.
"""

import csv
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from math import exp, inf, log
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from msgspec import UNSET

from sim.results.load import mean_decoding, overload
from sim.results.schema import Result
from sim.results.sections import Accuracy, ErrorInterval
from sim.run.prepare import Setup
from sim.specs.expert_layout import ALL_GATHER

ROWS_FILE = Path(__file__).with_name("accuracy.csv")
METRICS = (
    *(f"{statistic}_{latency}_ms" for latency in ("ttft", "tpot", "e2el") for statistic in ("mean", "median", "p99")),
    "output_throughput",
)
"""What intervals are given of, as results name it, and a column each."""
SHARE = 0.8
LEAST = 6
"""Configurations. With four, the factor would be the worst row's."""
POLICY = "vllm-v1"
ENGINES = ("vllm-v1", "vllm-v1-async", "vllm-0.12-top-p")
"""Engine profiles that rows were simulated with."""
FEW, MANY = 8.0, 64.0
"""Requests that decode at once: fewer than the one are few, from the other on they are many."""


class Kind(NamedTuple):
    """What makes servers alike."""

    layers: str
    """`dense`, or `experts`: with routed experts."""
    gpu: str
    weights: str
    """Format of the weights that are quantised, or `16 bits`."""
    parallelism: str
    """`one GPU`, `group` (tensor-parallel), or `ranks` (data-parallel)."""
    load: str
    """Whether few, some or many requests decode at once in an engine."""


ORDERS = ((0, 1, 2, 3, 4), (0, 2, 1, 3, 4))
"""Places in `Kind`, what matters most first: kernels are a GPU's, and a format's."""


class Row(NamedTuple):
    """A measured row: the server that it is of, what that was like, and simulated over measured by metric."""

    server: str
    num_gpus: int
    kind: Kind
    ratios: dict[str, float]

    @property
    def configuration(self) -> tuple[str, int]:
        """What errs together."""
        return self.server, self.num_gpus


class Error(NamedTuple):
    """By which factor rows are off, where `SHARE` of them are less; their median; and which rows they are."""

    factor: float
    median_ratio: float
    rows: int
    configurations: int
    alike: str


def kind_of(setup: Setup, decoding: float) -> Kind:
    """What a run is like in which `decoding` requests of an engine were past their first token, on average."""
    parallelism = "group" if setup.tp > 1 else "one GPU"
    return Kind(
        "experts" if setup.model.moe else "dense",
        setup.hardware.name,
        setup.model.quantization or "16 bits",
        "ranks" if setup.scenario.data_parallel_size else parallelism,
        load_of(decoding),
    )


def load_of(decoding: float) -> str:
    """`few`, `some` or `many` requests that decode at once."""
    return "few" if decoding < FEW else "many" if decoding >= MANY else "some"


@cache
def measured_rows() -> tuple[Row, ...]:
    """The rows of the file."""
    with ROWS_FILE.open(encoding="utf-8", newline="") as file:
        return tuple(_row(line) for line in csv.DictReader(file))


@cache
def _measured_gpus() -> frozenset[str]:
    """Of the rows: runs on other GPUs need nothing else of the file, and most begin and end within 0.3 s."""
    with ROWS_FILE.open(encoding="utf-8", newline="") as file:
        names, *lines = csv.reader(file)
    return frozenset(map(itemgetter(names.index("gpu")), lines))


def _row(line: dict[str, str]) -> Row:
    layers, gpu, weights, parallelism = (line[name] for name in Kind._fields[:-1])
    kind = Kind(layers, gpu, weights, parallelism, load_of(float(line["decoding"])))
    return Row(line["server"], int(line["num_gpus"]), kind, {name: float(line[name]) for name in METRICS if line[name]})


def nearest_error(rows: Iterable[Row], kind: Kind, metric: str) -> Error | None:
    """The error of the rows that are most like `kind`, the wider of both orders; None where fewer than `LEAST` are."""
    known = [row for row in rows if metric in row.ratios]
    found = [_nearest(known, kind, metric, order) for order in ORDERS]
    return max((error for error in found if error), key=lambda error: error.factor, default=None)


def _nearest(known: Sequence[Row], kind: Kind, metric: str, order: tuple[int, ...]) -> Error | None:
    def first(of: Kind, depth: int) -> tuple[str, ...]:
        return tuple(of[place] for place in order[:depth])

    for depth in range(len(kind), 0, -1):
        like = [row for row in known if first(row.kind, depth) == first(kind, depth)]
        found = _logs(like, metric)
        if len(found) >= LEAST:
            # One more configuration, the run's own, might be off by anything.
            off, alike = _quantile([*map(_sizes, found), [inf]], SHARE), ", ".join(first(kind, depth))
            # The run may be as any of the kinds are that these rows are of.
            for place in order[depth : depth + 1]:
                for one in sorted({row.kind[place] for row in like}):
                    those = _logs((row for row in like if row.kind[place] == one), metric)
                    if (of_one := _quantile([*map(_sizes, those)], SHARE)) > off:
                        off, alike = of_one, f"{', '.join(first(kind, depth))}; as far off as {one}"
            return Error(exp(off), exp(_quantile(found, 0.5)), len(like), len(found), alike)
    return None


def _logs(rows: Iterable[Row], metric: str) -> list[list[float]]:
    """Logarithms of simulated over measured, by configuration."""
    groups: dict[tuple[str, int], list[float]] = defaultdict(list)
    for row in rows:
        groups[row.configuration].append(log(row.ratios[metric]))
    return list(groups.values())


def _sizes(logs: list[float]) -> list[float]:
    return [abs(one) for one in logs]


def _quantile(groups: Sequence[Sequence[float]], share: float) -> float:
    """The least value that `share` of all do not exceed, where each group has the same weight."""
    weighted = sorted((value, 1 / len(group) / len(groups)) for group in groups for value in group)
    below = 0.0
    for value, weight in weighted:
        below += weight
        if below >= share - 1e-9:
            return value
    return weighted[-1][0]


@cache
def _error(kind: Kind, metric: str) -> Error | None:
    return nearest_error(measured_rows(), kind, metric)


def accuracy_of(setup: Setup, result: Result) -> Accuracy:
    """The intervals of a simulated run's metrics, and why there are none of the run or of some."""
    reason = _unlike(setup)
    if reason is not None:
        return Accuracy(share=SHARE, intervals={}, unknown=reason)
    kind = kind_of(setup, (mean_decoding(result) or 0.0) / len(result.engines or (None,)))
    metrics, unknown = METRICS, UNSET
    if reason := _hangs_on_more(setup, result):
        metrics, unknown = tuple(name for name in METRICS if "tpot" in name), f"TTFT and end to end: {reason}"
    elif setup.scenario.max_concurrency is None:
        # Tokens/s are the traffic's, not the engine's.
        metrics = METRICS[:-1]
    intervals: dict[str, ErrorInterval] = {}
    for metric in metrics:
        value: float | None = getattr(result, metric)
        error = _error(kind, metric)
        if value is not None and error is not None:
            intervals[metric] = ErrorInterval(
                low=value / error.factor,
                high=value * error.factor,
                median_ratio=1 / error.median_ratio,
                rows=error.rows,
                configurations=error.configurations,
                alike=error.alike,
            )
    return Accuracy(share=SHARE, intervals=intervals, unknown=unknown)


def _unlike(setup: Setup) -> str | None:
    """Why no measured row is like the run at all."""
    policy, engine = setup.policy, setup.engine_profile
    if policy.name != POLICY or policy.names != policy.composition or getattr(policy, "offloads", False):
        return f"too few measured rows of {setup.label}"
    if getattr(policy, "enable_lora", False):
        return "no measured rows of adapters"
    if policy.reads_images:
        return "no measured rows of images"
    if setup.hardware.name not in _measured_gpus():
        return f"no measured rows of {POLICY} on {setup.hardware.name}"
    if setup.model.gdn is not None or setup.scenario.sparse_attention is not None:
        return "no measured rows of linear or sparse attention"
    if setup.profile.status != "imported" or engine is None or engine.name not in ENGINES:
        return "measured rows were compared with shipped constants alone"
    if setup.decode is not None or setup.scenario.autoscale is not None:
        return "no measured rows of pools or autoscaling"
    if setup.pp > 1:
        return "no measured rows of pipelines"
    if setup.experts is not None and setup.experts.backend != ALL_GATHER:
        return "no measured rows of DeepEP"
    return None


def _hangs_on_more(setup: Setup, result: Result) -> str | None:
    """Why requests wait for more than the engines of the measured rows made them wait for."""
    if len(result.engines or ()) > (setup.scenario.data_parallel_size or 1):
        return "measured rows are of single engines"
    return "the queue grew to the end" if overload(result) is not None else None
