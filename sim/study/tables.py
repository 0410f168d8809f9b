"""The runs of a study as tables: a row a run, means with confidence intervals a row a point, `summary.json`."""

import json
from collections.abc import Sequence
from math import isfinite, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sim.files import write_atomically
from sim.study.axes import Study
from sim.study.intervals import CONFIDENCE
from sim.study.sweep import Place, told_where

Frame = Any
"""A pandas data frame: its own annotations are too wide to be checked against."""
TABLES = ("table", "means")
SUMMARY_FILE = "summary.json"
LANES = {"gpu_busy": "GPU compute", "h2d_busy": "PCIe host to device", "d2h_busy": "PCIe device to host"}
"""Columns with the share of the run in which a lane worked."""
BESIDE = ("seed", "num_gpus", "error", "key")
"""Columns of the table that are neither axes nor metrics."""


def tidy(study: Study, places: Sequence[Place]) -> Frame:
    """A row for each run: its axes' values, seed, GPUs, every number of result.json, and why it failed if it did."""
    rows = []
    for place in places:
        axes = {name: plain(place.point[name]) for name in study.axes}
        beside = {"seed": place.options.get("seed", 0), "num_gpus": place.num_gpus, "error": place.outcome.error}
        rows.append({**numbers(place), **beside, "key": place.outcome.key, **axes})
    found = pd.DataFrame(rows)
    first = [*study.axes, *(name for name in BESIDE[:2] if name not in study.axes)]
    return found[[*first, *metrics_of(study, found), *BESIDE[2:]]]


def numbers(place: Place) -> dict[str, float | None]:
    """The metrics of a run by their names in result.json, and the shares in which its lanes worked."""
    result = place.outcome.result
    if result is None:
        return {}
    found: dict[str, float | None] = {
        name: value
        for name, value in result.items()
        if name != "request_rate" and isinstance(value, int | float | None) and not isinstance(value, bool)
    }
    makespan_s = result["makespan_s"]
    for name, lane in LANES.items():
        found[name] = min(1.0, result["lanes"][lane]["busy_s"] / makespan_s) if makespan_s else None
    return found


def plain(value: object) -> object:
    """A point's value as a cell of a table."""
    return " ".join(value) if isinstance(value, tuple) else value


def metrics_of(study: Study, table: Frame) -> list[str]:
    """The table's columns that are metrics."""
    return [name for name in table.columns if name not in (*study.axes, *BESIDE)]


def means(study: Study, table: Frame) -> Frame:
    """A row for each point: `runs` that ended, and of every metric the mean over them and `METRIC_ci95`.

    The interval is half its width, by Student's t over the repeats; NaN of fewer than two runs.
    """
    metrics = metrics_of(study, table)
    rows = []
    for start in range(0, len(table), study.repeats):
        runs = table.iloc[start : start + study.repeats]
        ended = runs[runs["error"].isna()]
        values = np.asarray(ended[metrics], dtype=float)
        count = len(values)
        row: dict[str, Any] = {name: runs.iloc[0][name] for name in study.axes}
        row |= {"num_gpus": runs.iloc[0]["num_gpus"], "runs": count}
        for name, column in zip(metrics, values.T, strict=True):
            row[name] = column.mean() if count else np.nan
            row[f"{name}_ci95"] = half_width(column)
        rows.append(row)
    return pd.DataFrame(rows)


def half_width(values: np.ndarray) -> float:
    """Half the width of the interval in which the mean lies at `CONFIDENCE`, by Student's t; NaN of one value."""
    count = len(values)
    if count < 2:
        return float("nan")
    from scipy.special import stdtrit  # noqa: PLC0415 - slow to import, and only repeats need it

    return float(stdtrit(count - 1, 0.5 + CONFIDENCE / 2) * values.std(ddof=1) / sqrt(count))


def summary(study: Study, places: Sequence[Place]) -> list[dict[str, Any]]:
    """The runs that ended as `vllm bench sweep` keeps them: flat, with vLLM's names of options and metrics."""
    rows = []
    for place in places:
        result = place.outcome.result
        if result is None:
            continue
        scenario = result["scenario"]
        stages = scenario.get("pipeline_parallel_size", 1)
        row = {name: plain(value) for name, value in place.point.items()}
        row |= {name: value for name, value in result.items() if not isinstance(value, dict | list)}
        row |= {
            "policy": result["policy"],
            "tensor_parallel_size": scenario["tp"],
            "pipeline_parallel_size": stages,
            "data_parallel_size": place.num_gpus / (scenario["tp"] * stages),
            "run_number": place.repeat,
        }
        # What is missing must not be there as null: vLLM's plots would take it for a number.
        row = {name: _json(value) for name, value in row.items() if value is not None}
        if scenario.get("max_concurrency"):
            row["max_concurrency"] = scenario["max_concurrency"]
        rows.append(row)
    return rows


def _json(value: object) -> object:
    return value if not isinstance(value, float) or isfinite(value) else str(value)


def write_tables(folder: Path, study: Study, places: Sequence[Place], kind: str) -> Frame:
    """Write table, means and summary into `folder`, the tables as `csv` or `parquet`; returns the table."""
    table = tidy(study, places)
    with told_where(folder, "every point is kept: make room and give the same command again"):
        for name, frame in zip(TABLES, (table, means(study, table)), strict=True):
            _write(folder / f"{name}.{kind}", frame)
        text = json.dumps(summary(study, places), indent=1).encode() + b"\n"
        write_atomically(folder / SUMMARY_FILE, text)
    return table


def _write(path: Path, frame: Frame) -> None:
    if path.suffix == ".parquet":
        write_atomically(path, lambda file: frame.to_parquet(file, index=False))
    else:
        write_atomically(path, frame.to_csv(index=False).encode())
