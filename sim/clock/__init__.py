"""The virtual clock: arrivals, and the SimPy processes that drive one engine or a cluster of them.

SimPy's package looks its version up among all that is installed, a seventh of the CPU time in which a short run begins
and ends. It is therefore run when first asked for what is not in the modules that were imported of it.
"""

import sys
from importlib.util import find_spec, module_from_spec


def _run_when_asked(name: str) -> None:
    spec = None if name in sys.modules else find_spec(name)
    if spec is None or spec.loader is None:
        return
    package, loader = module_from_spec(spec), spec.loader

    def run(attribute: str) -> object:
        vars(package).pop("__getattr__")
        loader.exec_module(package)
        return getattr(package, attribute)

    vars(package)["__getattr__"] = run
    sys.modules[name] = package


_run_when_asked("simpy")
