"""Presets of kvtwin as scheduler classes of vLLM 0.33: `vllm serve MODEL --scheduler-cls kvtwin.vllm.Adaptive`.

`Adaptive` runs the preset of that name, `Preset` the one that is asked for. vLLM is imported when a class is asked for.

- `settings`: what `--additional-config` says, and what vLLM has decided already.
- `driver`: an engine of ours, told what happens in vLLM's.
- `blocks`: memory whose blocks are vLLM's.
- `scheduler`: vLLM's scheduler, which carries out what the engine plans.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from sim.errors import UserError
from sim.version import is_compiled

if TYPE_CHECKING:
    from kvtwin.vllm.scheduler import Adaptive, Preset

__all__ = ["Adaptive", "Preset"]

WANTED = "0.33"


def check_vllm() -> None:
    """UserError unless vLLM is there, in the version whose scheduler this is written for, and we are not compiled."""
    if is_compiled():
        # Compiled memory would not ask vLLM what is free.
        raise UserError("kvtwin.vllm: not with a compiled kvtwin; install it without KVTWIN_MYPYC")
    remedy = f"install vllm=={WANTED}.0 beside kvtwin"
    try:
        found = version("vllm")
    except PackageNotFoundError:
        raise UserError(f"kvtwin.vllm: vLLM is not installed; {remedy}") from None
    if found.split(".")[:2] != WANTED.split("."):
        raise UserError(f"kvtwin.vllm: vLLM {found} has another scheduler than {WANTED}; {remedy}")


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name in __all__:
        check_vllm()
        return getattr(import_module("kvtwin.vllm.scheduler"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
