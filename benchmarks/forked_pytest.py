"""pytest in a fork that has its third-party modules already: a run over a few tests starts in well under a second."""

import contextlib
import importlib
import math
import os
import resource
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

HEAVY = (
    "hypothesis.strategies", "numpy", "scipy.optimize", "pandas", "matplotlib.pyplot", "msgspec", "simpy", "joblib",
    "rich.progress", "pyarrow.parquet", "torch", "aiohttp.web", "jinja2", "plotly.graph_objects", "tokenizers",
)  # fmt: skip
"""What tests import and no fault can be in."""
MOST_BYTES = 8 << 30
"""Of memory for a run: a fault may have a loop that never ends."""
POLL_S = 0.01
WALL = 10.0
"""A busy machine is so many times slower than a processor alone."""
ENDS = {0: "passed", 5: "none", -signal.SIGXCPU: "late", -signal.SIGKILL: "late"}
"""By exit status."""


def preload() -> None:
    """Import what every fork needs, of what there is."""
    for name in HEAVY:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def become_quiet(tree: Path) -> None:
    """A fork's output goes nowhere, its imports come from a tree, its memory has a limit."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    os.chdir(tree)
    os.environ |= {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    sys.path.insert(0, str(tree))


def processor_s() -> float:
    """Of this process and of those that it started and that have ended."""
    return sum(os.times()[:4])


def end(child: int) -> None:
    """A fork and all that it has started are killed."""
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    # It may not have its group yet.
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def run(tree: Path, files: list[str], plugin: object, limit_s: float, *flags: str) -> str:
    """Test files of a tree in a fork: "passed", "failed", "none" (no test was chosen) or "late" (and then killed).

    `limit_s` are a processor's; on the wall's clock it may take `WALL` times as long.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setpgrp()
            become_quiet(tree)
            most_s = math.ceil(limit_s + processor_s())
            resource.setrlimit(resource.RLIMIT_CPU, (most_s, most_s + 1))
            status = pytest.main(["-q", "-p", "no:cacheprovider", *flags, *files], plugins=[plugin])
        finally:
            os._exit(status)
    ends_s = time.monotonic() + WALL * limit_s
    try:
        while time.monotonic() < ends_s:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                child = 0
                return ENDS.get(os.waitstatus_to_exitcode(status), "failed")
            time.sleep(POLL_S)
        return "late"
    finally:
        if child:
            end(child)
