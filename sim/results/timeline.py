"""`timeline.json.gz`: a run as a Chrome trace, which Perfetto opens."""

import gzip
from pathlib import Path
from typing import IO

import msgspec

from sim.files import write_atomically
from sim.simulate import Run

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
    """Chrome trace events: lanes as threads, requests as async spans (queue, prefill, decode), pools as counters."""
    events: list[TraceEvent] = [_named(0, "process_name", f"kvtwin {run.setup.label}")]
    for thread, lane in enumerate((run.lanes.compute, run.lanes.h2d, run.lanes.d2h), start=1):
        events.append(_named(thread, "thread_name", lane.name))
        for start_s, end_s, label in lane.intervals or ():
            event: TraceEvent = {"ph": "X", "pid": 1, "tid": thread, "name": label, "ts": start_s * 1e6}
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


def _named(thread: int, kind: str, name: str) -> TraceEvent:
    return {"ph": "M", "pid": 1, "tid": thread, "name": kind, "args": {"name": name}}
