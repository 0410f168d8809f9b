"""`kvtwin`: the command line, and what `kvtwin.api` offers in Python; nothing heavy is imported before it is needed."""

import gc
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from sim.version import VERSION as __version__  # noqa: F401

if TYPE_CHECKING:
    from kvtwin.api import *  # noqa: F403


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """The names of `kvtwin.api`: importing it takes as long as pandas does, which `kvtwin run` does without."""
    if name == "__all__":
        return ["__version__", "main", *import_module("kvtwin.api").__all__]
    if not name.startswith("_") and name in (api := import_module("kvtwin.api")).__all__:
        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})


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
