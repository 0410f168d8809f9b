"""`timeline.json.gz`: a run as a Chrome trace, which Perfetto opens."""

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from sim.files import write_atomically
from sim.runs import EngineParts, Run

TIMELINE_FILE = "timeline.json.gz"
TraceEvent = dict[str, object]


def write_timeline(folder: Path, run: Run) -> None:
    """Write the lanes, requests, free blocks and others' events as a Chrome trace, which Perfetto opens."""

    def write(file: IO[bytes]) -> None:
        with gzip.GzipFile(fileobj=file, mode="wb", mtime=0) as zipped:
            events = [*timeline_events(run), *run.trace_events]
            zipped.write(msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": events}))

    write_atomically(folder / TIMELINE_FILE, write)


def timeline_events(run: Run) -> list[TraceEvent]:
    """Chrome trace events: a process an engine, lanes as threads, requests as async spans (queue, prefill, decode),
    pools as counters. Requests stand with the first engine."""
    events: list[TraceEvent] = []
    for pid, parts in enumerate(run.engines, start=1):
        events += _lane_events(parts, pid, f" engine {pid - 1}" if len(run.engines) > 1 else "")
    events += _request_events(run)
    for pid, parts in enumerate(run.engines, start=1):
        events += _pool_events(parts, pid)
    return events


def _lane_events(parts: EngineParts, pid: int, which: str) -> Iterator[TraceEvent]:
    yield _named(pid, 0, "process_name", f"kvtwin {parts.setup.label}{which}")
    lanes = parts.lanes
    others = (lane for lane in (lanes.host, lanes.disk_read, lanes.disk_write) if lane.intervals)
    for thread, lane in enumerate((lanes.compute, lanes.h2d, lanes.d2h, *lanes.links.values(), *others), start=1):
        yield _named(pid, thread, "thread_name", lane.name)
        for start_s, end_s, label in lane.intervals or ():
            event: TraceEvent = {"ph": "X", "pid": pid, "tid": thread, "name": label, "ts": start_s * 1e6}
            yield event | {"dur": (end_s - start_s) * 1e6}


def _request_events(run: Run) -> Iterator[TraceEvent]:
    for row in run.log.requests or ():
        if row.error:
            continue
        # On the engine's clock, as the lanes.
        seen_s = row.arrival_s - run.log.front_end_s
        marks = (row.arrival_s, seen_s + row.queue_s, seen_s + row.ttft_s, seen_s + row.e2el_s)
        for name, start_s, end_s in zip(("queue", "prefill", "decode"), marks, marks[1:], strict=False):
            common = {"pid": 1, "cat": "request", "id": row.request_id, "name": name}
            yield {"ph": "b", "ts": start_s * 1e6, **common}
            yield {"ph": "e", "ts": end_s * 1e6, **common}


def _pool_events(parts: EngineParts, pid: int) -> Iterator[TraceEvent]:
    if parts.series is None:
        return
    columns = parts.series.columns
    for i, time_s in enumerate(columns["time_s"]):
        for name in ("gpu_free_blocks", "num_decoding", "num_waiting", "num_swapped"):
            yield {"ph": "C", "pid": pid, "name": name, "ts": time_s * 1e6, "args": {name: columns[name][i]}}


def _named(pid: int, thread: int, kind: str, name: str) -> TraceEvent:
    return {"ph": "M", "pid": pid, "tid": thread, "name": kind, "args": {"name": name}}
