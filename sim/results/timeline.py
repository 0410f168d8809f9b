"""`timeline.json.gz`: a run as a Chrome trace, which Perfetto opens: what each engine did, when and why."""

import gzip
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.cost.host import TIE_S
from sim.errors import UserError
from sim.files import write_atomically
from sim.results.journal import Journal, Step
from sim.results.time_use import LIMIT_NAMES
from sim.run.runs import EngineParts, Run

TIMELINE_FILE = "timeline.json.gz"
TraceEvent = dict[str, object]
Array = NDArray[np.float64]
LIVE_PIDS = 50
"""Processes of live runs follow this one, so that a simulated and a live timeline can be shown together."""
ITERATIONS = 0
"""Thread of an engine's iterations."""
BLOCKS = "gpu_free_blocks"


class _Timeline(msgspec.Struct):
    traceEvents: list[TraceEvent]


def write_timeline(folder: Path, run: Run) -> None:
    """Write iterations, lanes, requests, free blocks and others' events as a Chrome trace, which Perfetto opens."""
    _write(folder / TIMELINE_FILE, [*timeline_events(run), *run.trace_events])


def merge_timelines(path: Path, folders: Iterable[Path]) -> None:
    """Write the timelines in some folders as one, their processes side by side."""
    _write(path, [event for folder in folders for event in read_timeline(folder / TIMELINE_FILE)])


def read_timeline(path: Path) -> list[TraceEvent]:
    """The events of a timeline file; UserError where it is none."""
    try:
        with gzip.open(path) as file:
            return msgspec.json.decode(file.read(), type=_Timeline).traceEvents
    except (OSError, EOFError, zlib.error, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a timeline ({error}); run it again with --timeline") from error


def iterations_of(events: Iterable[TraceEvent]) -> dict[object, list[dict[str, Any]]]:
    """The slices of iterations by engine, each engine's in order of time."""
    found: dict[object, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event["tid"] == ITERATIONS and "args" in event:
            found[event["pid"]].append(event)
    for slices in found.values():
        slices.sort(key=itemgetter("ts"))
    return found


@dataclass(frozen=True)
class Steps:
    """An engine's iterations in order; arrays of shape (slices,). Moments are asked for in arrays of any shape.

    Attributes:
        start_s, end_s: begin and end.
        limit: what kept the next request from starting.
        decodes: sequences that decode. iterations: like ones that stand as one.
    """

    start_s: Array
    end_s: Array
    limit: NDArray[np.str_]
    decodes: Array
    iterations: Array

    @staticmethod
    def of(slices: Sequence[dict[str, Any]]) -> "Steps":
        """Of slices as `iterations_of` gives them."""
        start_s = np.array([step["ts"] for step in slices]) / 1e6
        end_s = start_s + np.array([step["dur"] for step in slices]) / 1e6
        columns = ([step["args"][name] for step in slices] for name in ("limit", "decodes", "iterations"))
        limit, decodes, iterations = columns
        return Steps(start_s, end_s, np.array(limit), np.array(decodes, float), np.array(iterations, float))

    def at(self, moment_s: Array) -> NDArray[np.int64]:
        """Places of the iterations that had begun before these moments and ended after them; -1 where none did."""
        place = np.searchsorted(self.start_s, moment_s - TIE_S) - 1
        return np.where((place >= 0) & (self.end_s[place] > moment_s), place, -1)

    def looks_from_s(self, moment_s: Array) -> Array:
        """From when on the engine may schedule what came at these moments: the iteration that ran then ended.

        Of several that stand as one, all are taken to have lasted as long.
        """
        place = self.at(moment_s)
        start_s, end_s = self.start_s[place], self.end_s[place]
        each_s = np.where(place >= 0, (end_s - start_s) / self.iterations[place], 1.0)
        ended_s = np.minimum(end_s, start_s + np.ceil((moment_s - start_s) / each_s) * each_s)
        return np.where(place >= 0, ended_s, moment_s)

    def bound_s(self, begin_s: Array, end_s: Array) -> dict[str, Array]:
        """Seconds between two moments by what kept the next request from starting."""
        return {limit: self.seconds(begin_s, end_s, self.limit == limit) for limit in sorted(set(self.limit.tolist()))}

    def seconds(self, begin_s: Array, end_s: Array, weights: NDArray[Any]) -> Array:
        """Seconds between two moments that iterations took, each times its weight."""
        at_s = np.column_stack([self.start_s, self.end_s]).ravel()
        lasted = (self.end_s - self.start_s) * weights
        passed = np.column_stack([np.cumsum(lasted) - lasted, np.cumsum(lasted)]).ravel()
        return np.maximum(0.0, np.interp(end_s, at_s, passed) - np.interp(begin_s, at_s, passed))


def request_spans(events: Iterable[TraceEvent]) -> Iterator[tuple[object, str, float, float]]:
    """Phases of requests as (id, name, begin, end), s, in order of their ends."""
    begins: dict[tuple[object, str], float] = {}
    for event in events:
        if event.get("cat") == "request" and event["ph"] in ("b", "e"):
            ident, name, at_s = event["id"], str(event["name"]), float(str(event["ts"])) / 1e6
            if event["ph"] == "b":
                begins[ident, name] = at_s
            else:
                yield ident, name, begins.pop((ident, name)), at_s


def _write(path: Path, events: Sequence[TraceEvent]) -> None:
    def write(file: IO[bytes]) -> None:
        with gzip.GzipFile(fileobj=file, mode="wb", mtime=0) as zipped:
            zipped.write(msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": events}))

    write_atomically(path, write)


def timeline_events(run: Run) -> list[TraceEvent]:
    """Chrome trace events: a process an engine, iterations and lanes as threads, requests as async spans (queue,
    prefill, decode, and what interrupted them), arrows from iteration to iteration of a request, pools as counters.
    Requests stand with the first engine."""
    events: list[TraceEvent] = []
    live = run.backend == "kvtwin-live"
    first = 1 + LIVE_PIDS * live
    for pid, parts in enumerate(run.engines, start=first):
        which = f" engine {pid - first}" if len(run.engines) > 1 else ""
        events += _lane_events(parts, pid, f"{'live ' if live else ''}{parts.setup.label}{which}")
        if parts.journal is not None:
            events += _step_events(parts.journal, pid)
    events += _request_events(run, first)
    for pid, parts in enumerate(run.engines, start=first):
        events += _pool_events(parts, pid)
    return events


def _lane_events(parts: EngineParts, pid: int, name: str) -> Iterator[TraceEvent]:
    yield _named(pid, ITERATIONS, "process_name", f"kvtwin {name}")
    lanes = parts.lanes
    host = (lanes.host,) if lanes.host.intervals else ()
    for thread, lane in enumerate((lanes.compute, lanes.h2d, lanes.d2h, *lanes.links.values(), *host), start=1):
        yield _named(pid, thread, "thread_name", lane.name)
        for start_s, end_s, label in lane.intervals or ():
            event: TraceEvent = {"ph": "X", "pid": pid, "tid": thread, "name": label, "ts": start_s * 1e6}
            yield event | {"dur": (end_s - start_s) * 1e6}


def _step_events(journal: Journal, pid: int) -> Iterator[TraceEvent]:
    """A slice an iteration, and arrows between those at which a request began a phase."""
    yield _named(pid, ITERATIONS, "thread_name", "Iterations")
    for step in journal.steps:
        slice_: TraceEvent = {"ph": "X", "pid": pid, "tid": ITERATIONS, "name": step_name(step)}
        yield slice_ | {
            "ts": step.start_s * 1e6,
            "dur": (step.end_s - step.start_s) * 1e6,
            "args": {
                "iterations": step.iterations,
                "decodes": step.num_decodes,
                "prefills": step.num_prefills,
                "tokens": step.prefill_tokens + step.num_decodes,
                "context": step.context_tokens,
                "admitted": step.admitted,
                "waiting": step.num_waiting,
                "limit": step.limit or "none",
                "why": why(step),
            },
        }
    for request_id, phases in journal.phases.items():
        # Only phases in an iteration have a slice to start from.
        marks = [begin_s for begin_s, name in phases if name in ("prefill", "decode", "recompute")]
        for place, begin_s in enumerate(marks if len(marks) > 1 else ()):
            kind = "s" if not place else "f" if place == len(marks) - 1 else "t"
            arrow: TraceEvent = {"ph": kind, "pid": pid, "tid": ITERATIONS, "cat": "request", "name": "request"}
            yield arrow | {"id": request_id, "ts": begin_s * 1e6, **({"bp": "e"} if kind == "f" else {})}


def step_name(step: Step) -> str:
    """`decode x37 (96 requests)`."""
    count = step.num_decodes + step.num_prefills
    times = f" x{step.iterations}" if step.iterations > 1 else ""
    return f"{step.kind}{times} ({count} request{'s' if count != 1 else ''})"


def why(step: Step) -> str:
    """How many were admitted and how many were not, and why: `admitted 3: slack 41 ms; 12 wait: KV memory`."""
    found = []
    if step.admitted:
        found.append(f"admitted {len(step.admitted)}")
    if step.num_waiting:
        found.append(f"{step.num_waiting} wait: {LIMIT_NAMES[step.limit or 'policy']}")
    elif step.limit is not None:
        found.append(f"requests are away: {LIMIT_NAMES[step.limit]}")
    if step.reason and found:
        found[0] += f" ({step.reason})" if not step.admitted else f": {step.reason}"
    return "; ".join([*found, f"{step.free_blocks:.0f} blocks free"])


def _request_events(run: Run, pid: int) -> Iterator[TraceEvent]:
    journals = [parts.journal for parts in run.engines if parts.journal is not None]
    for row in run.log.requests or ():
        if row.error:
            continue
        # On the engine's clock, as the lanes.
        seen_s = row.arrival_s - run.log.front_end_s
        marks = (row.arrival_s, seen_s + row.queue_s, seen_s + row.ttft_s, seen_s + row.e2el_s)
        for name, start_s, end_s in zip(("queue", "prefill", "decode"), marks, marks[1:], strict=False):
            yield from _span(pid, row.request_id, name, start_s, end_s)
        for journal in journals:
            phases = [*journal.phases.get(row.request_id, ()), (marks[-1], "")]
            for (start_s, name), (end_s, _) in pairwise(phases):
                if name not in ("prefill", "decode"):
                    yield from _span(pid, row.request_id, name, start_s, max(start_s, end_s))


def _span(pid: int, request_id: int, name: str, start_s: float, end_s: float) -> Iterator[TraceEvent]:
    common = {"pid": pid, "cat": "request", "id": request_id, "name": name}
    yield {"ph": "b", "ts": start_s * 1e6, **common}
    yield {"ph": "e", "ts": end_s * 1e6, **common}


def _pool_events(parts: EngineParts, pid: int) -> Iterator[TraceEvent]:
    if parts.series is None:
        return
    columns, unit = parts.series.columns, parts.scheduler.memory.unit
    for i, time_s in enumerate(columns["time_s"]):
        for name in (BLOCKS, "num_decoding", "num_waiting", "num_swapped"):
            # Whole blocks, of all layers, as tables have them.
            value = columns[name][i] / unit if name == BLOCKS else columns[name][i]
            yield {"ph": "C", "pid": pid, "name": name, "ts": time_s * 1e6, "args": {name: value}}


def _named(pid: int, thread: int, kind: str, name: str) -> TraceEvent:
    return {"ph": "M", "pid": pid, "tid": thread, "name": kind, "args": {"name": name}}
