"""The version, in one place; reading it from package metadata would cost every start 12 ms."""

from importlib.util import find_spec

VERSION = "0.21.0"


def is_compiled() -> bool:
    """Whether mypyc has compiled the modules that a run spends its time in (setup.py): all of them, or none."""
    spec = find_spec("sim.engine.scheduler")
    return spec is not None and spec.origin is not None and not spec.origin.endswith(".py")
