"""`result.json` and what lies beside it: a superset of what `vllm bench serve --save-result` writes."""

import gzip
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from sim.files import write_atomically
from sim.results.metrics import PERCENTILES, ended_by_id
from sim.results.series import Series
from sim.simulate import Run, Setup
from sim.version import VERSION

RESULT_FILE = "result.json"
SERIES_FILE = "series.csv"
TIMELINE_FILE = "timeline.json.gz"


def assemble(run: Run) -> dict[str, Any]:
    """The result as plain data, in a fixed order: equal scenarios and seeds give equal bytes."""
    setup, scheduler = run.setup, run.scheduler
    counters = scheduler.counters
    result: dict[str, Any] = {
        "backend": run.backend,
        "model_id": setup.model.name,
        "policy": setup.label,
        "num_prompts": run.log.ended,
        "request_rate": setup.scenario.request_rate,
        "complete": not (run.interrupted or run.error),
    }
    if run.error:
        result["error"] = run.error
    result |= run.log.statistics()
    result |= _gap_statistics(run)
    result |= {
        "makespan_s": run.log.last_finish_s,
        "num_iterations": run.instance.iterations,
        "num_preemptions": counters.preemptions,
        "counters": {
            "swap_out_blocks": counters.swap_out_blocks,
            "swap_in_blocks": counters.swap_in_blocks,
            "swap_space_exhausted": counters.swap_space_exhausted,
            "ignored": dict(sorted(counters.ignored.items())),
            **dict(sorted(counters.policy.items())),
        },
        "lanes": {lane.name: {"busy_s": lane.busy_s} for lane in (run.lanes.compute, run.lanes.h2d, run.lanes.d2h)},
        "warnings": [*setup.warnings, *_warnings(run)],
        "scenario": _scenario(setup),
        "profile": {
            "name": setup.profile.name,
            "status": setup.profile.status,
            "sha256": setup.profile.content_hash,
            **({"beyond_range": setup.cost.beyond} if setup.cost.beyond else {}),
        },
        "versions": {"kvtwin": VERSION},
    }
    if run.machine is not None:
        result["machine"] = run.machine
    if run.log.per_request is None:
        result["per_request"] = "more than 100000 requests: the arrays are in the per-request table"
    else:
        arrays = ended_by_id(run.log.per_request)
        result |= arrays
        if run.detailed is not None:
            result["itls"] = [_gaps(run.detailed.get(int(i), [])) for i in arrays["request_ids"]]  # type: ignore[call-overload]
    return result


def _gaps(times_s: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(times_s)]


def _gap_statistics(run: Run) -> dict[str, Any]:
    found = run.gaps.statistics(PERCENTILES)
    keys = ["mean", "median", "std", *(f"p{p:g}" for p in PERCENTILES)]
    if found is None:
        return {f"{key}_itl_ms": None for key in keys} | {"itl_percentiles": "exact"}
    percentiles = [found.percentiles[p] for p in PERCENTILES]
    figures = [found.mean, percentiles[0], found.std, *percentiles]
    values: dict[str, Any] = {f"{key}_itl_ms": figure * 1e3 for key, figure in zip(keys, figures, strict=True)}
    values["itl_percentiles"] = "exact" if found.exact else "from bins, within 0.01 %"
    return values


def _warnings(run: Run) -> list[str]:
    counters, warnings = run.scheduler.counters, []
    if counters.swap_space_exhausted:
        warnings.append(
            f"host KV blocks ran out {counters.swap_space_exhausted} times and the victims were recomputed "
            "(vLLM 0.5.5 aborts there); raise --swap-space"
        )
    warnings += _beyond_range(run.setup)
    for reason, count in sorted(counters.ignored.items()):
        warnings.append(f"{count} requests ignored: {reason}")
    return warnings


def _beyond_range(setup: Setup) -> list[str]:
    """One warning for each quantity that was priced beyond what the constants were fitted on."""
    seen = setup.profile.range
    return [
        f"iterations of up to {most:,.0f} {name.replace('_', ' ')} were predicted, but {setup.profile.name} was fitted "
        f"up to {getattr(seen, name)[1]:,.0f}: those times are extrapolated"
        for name, most in sorted(setup.cost.beyond.items())
    ]


def _scenario(setup: Setup) -> dict[str, Any]:
    limits = setup.limits
    return {
        **setup.scenario.as_dict(),
        "policy": setup.policy.name,
        "policy_options": {f.name: getattr(setup.policy, f.name) for f in fields(setup.policy)},
        "num_gpu_blocks": limits.num_gpu_blocks,
        "num_cpu_blocks": limits.num_cpu_blocks,
        "block_bytes": limits.block_bytes,
        "max_model_len": limits.max_model_len,
        "enable_chunked_prefill": limits.enable_chunked_prefill,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
    }


def write_result(folder: Path, result: dict[str, Any]) -> Path:
    """Write `result.json`; numbers that do not exist are null, and an infinite request rate is "inf", as vLLM's."""
    path = folder / RESULT_FILE
    if result["request_rate"] == float("inf"):
        result = {**result, "request_rate": "inf", "scenario": {**result["scenario"], "request_rate": "inf"}}
    encoded = msgspec.json.encode(result)
    write_atomically(path, lambda file: file.write(encoded + b"\n"))
    return path


def write_series(folder: Path, series: Series) -> None:
    """Write the time series as CSV."""
    header = ",".join(series.columns)
    rows = np.column_stack([np.frombuffer(column, dtype=np.float64) for column in series.columns.values()])
    write_atomically(
        folder / SERIES_FILE,
        lambda file: np.savetxt(file, rows, delimiter=",", header=header, comments="", fmt="%.9g"),
    )


def write_timeline(folder: Path, run: Run) -> None:
    """Write the lanes, requests, free blocks and others' events as a Chrome trace, which Perfetto opens."""

    def write(file: IO[bytes]) -> None:
        with gzip.GzipFile(fileobj=file, mode="wb", mtime=0) as zipped:
            events = [*timeline_events(run), *run.trace_events]
            zipped.write(msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": events}))

    write_atomically(folder / TIMELINE_FILE, write)


def timeline_events(run: Run) -> list[dict[str, Any]]:
    """Chrome trace events: lanes as threads, requests as async spans (queue, prefill, decode), pools as counters."""
    events: list[dict[str, Any]] = [_named(0, "process_name", f"kvtwin {run.setup.label}")]
    for thread, lane in enumerate((run.lanes.compute, run.lanes.h2d, run.lanes.d2h), start=1):
        events.append(_named(thread, "thread_name", lane.name))
        for start_s, end_s, label in lane.intervals or ():
            event = {"ph": "X", "pid": 1, "tid": thread, "name": label, "ts": start_s * 1e6}
            events.append(event | {"dur": (end_s - start_s) * 1e6})
    kept = run.log.per_request
    if kept is not None:
        for i, request_id in enumerate(kept.request_ids):
            if request_id in kept.errors:
                continue
            arrival_s = kept.arrival_s[i]
            marks = (arrival_s, arrival_s + kept.queue_s[i], arrival_s + kept.ttft_s[i], arrival_s + kept.e2el_s[i])
            for name, start_s, end_s in zip(("queue", "prefill", "decode"), marks, marks[1:], strict=False):
                common = {"pid": 1, "cat": "request", "id": request_id, "name": name}
                events.append({"ph": "b", "ts": start_s * 1e6, **common})
                events.append({"ph": "e", "ts": end_s * 1e6, **common})
    if run.series is not None:
        columns = run.series.columns
        for i, time_s in enumerate(columns["time_s"]):
            for name in ("gpu_free_blocks", "num_decoding", "num_waiting", "num_swapped"):
                events.append({"ph": "C", "pid": 1, "name": name, "ts": time_s * 1e6, "args": {name: columns[name][i]}})
    return events


def _named(thread: int, kind: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": thread, "name": kind, "args": {"name": name}}
