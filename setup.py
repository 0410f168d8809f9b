"""Compiles what a run spends its time in with mypyc, where `KVTWIN_MYPYC=1` asks for it (docs/speed.md).

The source is the same either way: this file is mypy's plugin, too, and says what mypyc has to know of classes. Where
nothing can be compiled, kvtwin is installed as it is, and the build says why; `kvtwin --version` tells them apart.
"""

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NEEDED = ["mypy==2.4.1", "msgspec>=0.19", "numpy>=1.26", "simpy>=4.1"]
"""The compiler, and packages whose types it reads."""
HOT = {
    "sim": "files",
    "sim/engine": "*",
    "sim/kv": "*",
    "sim/kv/index": "*",
    "sim/kv/tiers": "*",
    "sim/parts": "base",
    **dict.fromkeys((f"sim/parts/{kind}" for kind in ("admission", "batching", "eviction", "order", "stage")), "*"),
    "sim/systems/*": "*",
    "sim/cost": "forms host lanes launches model pricing rebuilding restoring roofline spread_experts table",
    "sim/clock": "arrivals instance tokeniser",
    "sim/results": "column metrics",
}
"""Modules by folder."""
INTERPRETED = (
    # Asked before a run begins.
    "__init__", "*options", "async_scheduling", "preset", "ellm/solver", "ellm/equations",
    # Classes that msgspec makes.
    "changes", "limits",
    # Classes of several bases with attributes, such bases, and what derives from them.
    "telling", "stage/hand_over", "stage/pull", "mixed", "nixl",
)  # fmt: skip
"""Those of them that stay as they are."""
TRAITS = ("sim.kv.memory.Swaps", "sim.kv.memory.ReturnsKV")
"""Classes without attributes, which stand beside another base."""

try:
    from mypy.nodes import ARG_NAMED, CallExpr, CastExpr, EllipsisExpr, MemberExpr, NameExpr
    from mypy.plugin import ClassDefContext, Plugin
    from mypy.types import AnyType, TypeOfAny
    from mypyc.build import mypycify
except ImportError:
    # Setuptools asks what building takes before that is there.
    Plugin, mypycify = object, None


class Subclassed(Plugin):
    """Any class of ours may be derived from by one that is not compiled: a test's, or another distribution's."""

    def get_customize_class_mro_hook(self, fullname: str) -> "Callable[[ClassDefContext], None] | None":
        """What is done with a class."""
        return decorate if fullname.startswith("sim.") else None


def decorate(context: "ClassDefContext") -> None:
    """As `mypyc_attr` and `trait` of `mypy_extensions` would, which the sources need not import."""
    cls = context.cls
    if any(info.fullname.startswith(("msgspec.", "enum.")) for info in cls.info.mro):
        return
    if any(isinstance(found, CallExpr) and isinstance(found.callee, MemberExpr) for found in cls.decorators):
        # Mypy comes by several times.
        return
    yes = NameExpr("True")
    yes.fullname = "builtins.True"
    cls.decorators.append(CallExpr(named("mypyc_attr"), [yes], [ARG_NAMED], ["allow_interpreted_subclasses"]))
    if cls.fullname in TRAITS:
        cls.decorators.append(named("trait"))


def named(name: str) -> "MemberExpr":
    """A name of `mypy_extensions` that mypy does not look up: an attribute of anything."""
    found = MemberExpr(CastExpr(EllipsisExpr(), AnyType(TypeOfAny.explicit)), name)
    found.fullname = f"mypy_extensions.{name}"
    return found


def plugin(version: str) -> type[Plugin]:
    """What mypy asks this file for."""
    return Subclassed


def hot_modules() -> list[str]:
    """Paths of the modules to compile."""
    return sorted(
        str(path)
        for folder, names in HOT.items()
        for name in names.split()
        for path in Path().glob(f"{folder}/{name}.py")
        if not any(path.match(f"{left_out}.py") for left_out in INTERPRETED)
    )


class BuildHot(build_ext):
    """Builds the hot modules, all of them or none."""

    def run(self) -> None:
        self._remove()
        try:
            if self.inplace or self.editable_mode:
                raise RuntimeError("it would outlive changes of the sources beside it; install without -e")
            if mypycify is None:
                raise RuntimeError(f"{NEEDED[0]} is not installed")
            self.distribution.ext_modules = mypycify(
                ["--config-file=pyproject.toml", *hot_modules()], multi_file=True, opt_level="2", debug_level="0"
            )
            self.initialize_options()
            self.finalize_options()
            super().run()
        except (Exception, SystemExit) as error:
            print(f"kvtwin: nothing is compiled: {error}", file=sys.stderr)
            self.distribution.ext_modules = self.extensions = []
            self._remove()

    def build_extensions(self) -> None:
        """As many files at once as there are processors."""
        compile_all = self.compiler.compile

        def compile_each(sources: list[str], **options: object) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                return [
                    made for found in pool.map(lambda file: compile_all([file], **options), sources) for made in found
                ]

        self.compiler.compile = compile_each
        if self.compiler.compiler_type == "unix":
            # Calls of one file into another need not go by names that other libraries could replace.
            for extension in self.extensions:
                extension.extra_compile_args = [*extension.extra_compile_args, "-fvisibility=hidden"]
        super().build_extensions()

    def _remove(self) -> None:
        """What was compiled is no more, here or by an earlier build of other modules."""
        for path in Path(self.build_lib).rglob("*.so"):
            path.unlink()


if __name__ == "__main__" and os.environ.get("KVTWIN_MYPYC") == "1":
    # Of the extensions, which are not known yet, one stands for all.
    setup(ext_modules=[Extension("sim.hot", [])], cmdclass={"build_ext": BuildHot}, setup_requires=NEEDED)
elif __name__ == "__main__":
    setup()
