"""`kvtwin`: the command line, and what `kvtwin.api` offers in Python; nothing heavy is imported before it is needed."""

import gc
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from sim.errors import UserError
from sim.version import VERSION as __version__

if TYPE_CHECKING:
    from kvtwin.api import (
        ComparisonResult,
        MapResult,
        PlanResult,
        Policy,
        Result,
        RunResult,
        Scenario,
        SweepResult,
        TuneResult,
        compare,
        load_result,
        plan,
        profile_errors,
        profile_table,
        regime_map,
        simulate,
        sweep,
        tune,
    )

__all__ = [
    "ComparisonResult",
    "MapResult",
    "PlanResult",
    "Policy",
    "Result",
    "RunResult",
    "Scenario",
    "SweepResult",
    "TuneResult",
    "UserError",
    "__version__",
    "compare",
    "load_result",
    "main",
    "plan",
    "profile_errors",
    "profile_table",
    "regime_map",
    "simulate",
    "sweep",
    "tune",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """The names of `kvtwin.api`: importing it takes as long as pandas does, which `kvtwin run` does without."""
    if name in __all__:
        return getattr(import_module("kvtwin.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 2 for bad input, 130 or 143 when interrupted."""
    # A simulation makes many objects and few cycles, and so do imports: looking after every 700 of them is waste.
    gc.set_threshold(1_000_000, 50, 50)
    try:
        # An interrupt while modules load is answered as one later on.
        from kvtwin.command_line import run_command  # noqa: PLC0415

        return run_command(argv)
    except KeyboardInterrupt:
        print("kvtwin: interrupted", file=sys.stderr)
        return 130
