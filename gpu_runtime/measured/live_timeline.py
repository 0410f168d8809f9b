"""What torch itself did in a live run, on the time axis of our lanes: `torch.profiler` for the first iterations."""

import tempfile
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile, record_function

PROFILED_ITERATIONS = 30
"""Iterations that are profiled: each leaves up to ten thousand events, of a kilobyte each while they are read."""
CATEGORIES = frozenset({"cpu_op", "user_annotation", "cuda_runtime", "kernel", "gpu_memcpy", "gpu_memset"})
FIRST_PID = 100
"""Our own lanes are process 1."""
ZERO = "kvtwin: clock starts"
WARNING = (
    f"--timeline profiled the first {PROFILED_ITERATIONS} iterations with torch.profiler: they took longer, and ending "
    "the profile then held the run up, so times are longer than without --timeline"
)


class Profiler:
    """Profiles a run from the moment its clock starts."""

    def __init__(self, device: torch.device) -> None:
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._iterations_left = PROFILED_ITERATIONS
        self._started = self._running = False

    def start(self, start_clock: Callable[[], None]) -> None:
        """Begin, and start the run's clock within a range that the profile shows."""
        self._profile.start()
        self._started = self._running = True
        # The first range pays for lazy set-up.
        for _ in range(2):
            with record_function(ZERO):
                start_clock()

    def step(self) -> None:
        """An iteration is over; after the last one profiled the profiler stops."""
        self._iterations_left -= 1
        if self._iterations_left == 0:
            self._stop()

    def _stop(self) -> None:
        if self._running:
            self._running = False
            self._profile.stop()

    def events(self) -> list[dict[str, Any]]:
        """What was seen, as Chrome trace events in microseconds of the run's clock; nothing more is profiled."""
        if not self._started:
            # The run ended before its clock started: torch has nothing to export.
            return []
        self._stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            return on_our_clock(msgspec.json.decode(path.read_bytes())["traceEvents"])


def on_our_clock(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events of a profile that show work, from the start of our clock on, in processes that are not ours.

    Args:
        found: events as torch exports them, one of them named `ZERO`.
    """
    zero_us = max((event["ts"] for event in found if event.get("name") == ZERO and event.get("ph") == "X"), default=inf)
    work = [event for event in found if event.get("ph") == "X" and event.get("cat") in CATEGORIES]
    work = [event for event in work if event["ts"] >= zero_us and event["name"] != ZERO]
    # Torch names every process after the program, and tells them apart (CPU, GPU 0) by their labels.
    labels = {event["pid"]: event["args"]["labels"] for event in found if event.get("name") == "process_labels"}
    pids = {pid: FIRST_PID + i for i, pid in enumerate(dict.fromkeys(event["pid"] for event in work))}
    events: list[dict[str, Any]] = []
    for event in found:
        if event.get("ph") == "M" and event.get("name") in ("process_name", "thread_name") and event["pid"] in pids:
            name = event["args"]["name"]
            if event["name"] == "process_name":
                name = f"torch.profiler, first {PROFILED_ITERATIONS} iterations: {labels.get(event['pid'], name)}"
            kept = {key: event[key] for key in ("ph", "tid", "name")}
            events.append({**kept, "pid": pids[event["pid"]], "args": {"name": name}})
    for event in work:
        moved = {key: event[key] for key in ("ph", "cat", "name", "tid", "dur")}
        events.append({**moved, "pid": pids[event["pid"]], "ts": event["ts"] - zero_us})
    return events
