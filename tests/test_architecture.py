"""Which package may import which, where clocks and randomness may be, and what no tracked file may mention."""

import ast
import re
import subprocess
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "traces": set(),
    "sim": {"traces"},
    "gpu_runtime": {"sim", "traces"},
    "calib": {"gpu_runtime", "sim", "traces"},
    "kvtwin": {"calib", "gpu_runtime", "sim", "traces"},
}
"""The packages, from the bottom up, and what each may import beside itself."""
ONLY_IN = {
    "simpy": ("sim.clock", "sim.run.simulate", "kvtwin.testing"),
    "torch": ("gpu_runtime", "calib", "kvtwin.testing"),
}
TIMELESS = ("engine", "kv", "parts", "systems", "cost")
CLOCKS_AND_DICE = {"time", "datetime", "random", "secrets", "uuid"}
RUNS_DATA = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle"}
ONLY_WRITES = "kvtwin.testing.questions"
"""Compares what it has written, and loads nothing."""
RUNS_TEXT = {"eval", "exec", "__import__"}


def sources() -> dict[str, str]:
    """Every module of ours by its dotted name."""
    found = {}
    for package in MAY_IMPORT:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: path.read_text(encoding="utf-8") for name, path in found.items()}


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names that a module imports, wherever in it; `from a import b` gives `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def type_only(tree: ast.Module) -> set[str]:
    """Names imported for annotations alone (`if TYPE_CHECKING`): they close no cycle when modules are loaded."""
    guarded = (n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    return {name for node in guarded for name in imported(node)}


def within(name: str, modules: tuple[str, ...]) -> bool:
    return any(name == module or name.startswith(module + ".") for module in modules)


def faults(modules: dict[str, str]) -> list[str]:
    """What breaks the rules, one line each."""
    found: list[str] = []
    edges: dict[str, set[str]] = {}
    for name, text in modules.items():
        tree = ast.parse(text)
        package = name.partition(".")[0]
        names = set(imported(tree))
        for target in sorted(names):
            head = target.partition(".")[0]
            if head in MAY_IMPORT and head != package and head not in MAY_IMPORT[package]:
                found.append(f"{name} imports {target}: {package} may not import {head}")
            if head in ONLY_IN and not within(name, ONLY_IN[head]):
                found.append(f"{name} imports {target}: only {', '.join(ONLY_IN[head])} may")
            if head in RUNS_DATA and name != ONLY_WRITES:
                found.append(f"{name} imports {target}")
        loaded = names - type_only(tree)
        ours = {target if target in modules else target.rpartition(".")[0] for target in loaded}
        edges[name] = {target for target in ours if target in modules}
        found += _calls(name, tree)
        if within(name, tuple(f"sim.{module}" for module in TIMELESS)):
            found += _clocks_and_dice(name, tree, names)
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        found.append(f"import cycle: {' <- '.join(error.args[1])}")
    return found


def _calls(name: str, tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in RUNS_TEXT:
            yield f"{name} line {node.lineno}: calls {node.func.id}"


def _clocks_and_dice(name: str, tree: ast.AST, names: set[str]) -> Iterator[str]:
    for target in sorted(names):
        if target.partition(".")[0] in CLOCKS_AND_DICE or target.startswith("numpy.random"):
            yield f"{name} imports {target}: no clock and no randomness there"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("random", "urandom"):
            yield f"{name} line {node.lineno}: uses .{node.attr}"


def test_the_rules_of_imports_clocks_and_randomness_hold():
    assert faults(sources()) == []


def test_the_modules_that_the_rules_name_exist():
    modules = sources()
    assert set(MAY_IMPORT) <= set(modules)
    assert {f"sim.{module}" for module in TIMELESS} | {"sim.clock.instance", "sim.run.simulate"} <= set(modules)
    assert "simpy.core.Environment" in set(imported(ast.parse(modules["sim.clock.instance"])))
    assert len([name for name in modules if name.startswith("sim.systems.")]) >= 3


@pytest.mark.parametrize(
    ("modules", "fault"),
    [
        ({"traces.a": "import sim.errors"}, "traces.a imports sim.errors: traces may not import sim"),
        ({"sim.a": "from gpu_runtime.model import Model"}, "sim may not import gpu_runtime"),
        ({"sim.driver2": "from simpy import Environment"}, "only sim.clock, sim.run.simulate, kvtwin.testing may"),
        (
            {"sim.a": "try:\n    import torch\nexcept ImportError:\n    torch = None"},
            "only gpu_runtime, calib, kvtwin.testing may",
        ),
        ({"sim.a": "from sim import b", "sim.b": "from sim import c", "sim.c": "import sim.a"}, "import cycle"),
        ({"sim.engine.engine": "from time import monotonic"}, "sim.engine.engine imports time.monotonic: no clock"),
        ({"sim.cost.forms": "import numpy as np\nx = np.random.rand()"}, "sim.cost.forms line 2: uses .random"),
        ({"sim.engine.batch": "from numpy.random import default_rng"}, "no clock and no randomness"),
        ({"traces.a": "import pickle"}, "traces.a imports pickle"),
        ({"calib.a": "x = eval('1')"}, "calib.a line 1: calls eval"),
    ],
)
def test_a_module_that_breaks_a_rule_is_found(modules, fault):
    (found,) = faults(modules)
    assert fault in found


@pytest.mark.parametrize(
    "modules",
    [
        {"sim.a": "from traces.request import Request", "traces.request": "from collections import deque"},
        {"sim.clock.instance": "import simpy", "calib.a": "import torch, gpu_runtime, sim, traces"},
        {"sim.run.progress": "from time import monotonic", "traces.a": "import numpy as np\nnp.random.default_rng(0)"},
        {"gpu_runtime.a": "model.eval()"},
        {"sim.systems": "from sim.systems.vllm import A", "sim.systems.vllm": "from sim.systems.base import B"},
    ],
)
def test_a_module_that_keeps_the_rules_passes(modules):
    assert faults(modules) == []


# In pieces, so that this file passes its own test.
HOSTS = ("pypi" + ".org", "python" + "hosted.org", "npmjs" + ".org", "conda" + ".anaconda.org", "artifact" + "ory")
MACHINE_PATH = re.compile(r"(?<![\w.:/])/(?:" + "|".join(("work", "tmp", "home", "root", "mnt", "Users")) + r")/\w")


def machine_names(text: str) -> list[str]:
    """Package hosts and paths of one machine in a text."""
    return [host for host in HOSTS if host in text] + MACHINE_PATH.findall(text)


def test_no_tracked_file_names_a_package_host_or_a_path_of_one_machine():
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode:
        pytest.skip("not a git checkout")
    found = {}
    for name in filter(None, listing.stdout.split("\0")):
        path = ROOT / name
        if path.is_file() and not path.is_symlink():
            text = path.read_bytes().decode("utf-8", errors="replace")
            if names := machine_names(text):
                found[name] = names
    assert found == {}


@pytest.mark.parametrize(
    "text", ["--index-url https://" + HOSTS[0] + "/simple", "cd /" + "work/main", "'/" + "tmp/x'", "(/" + "home/me)"]
)
def test_a_text_of_one_machine_is_found(text):
    assert machine_names(text)
    assert not machine_names("https://example.com/work/main and the folder work/tmp/x")
