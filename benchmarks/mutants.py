"""Random faults in a copy of the tree: do the nearest tests notice?

    python benchmarks/mutants.py [--count 100] [--seed 0] [--files 8] [--out mutants.jsonl]

A fault is one operator, comparison, constant or condition changed, or one statement left out. It is drawn from all such
places of sim/, traces/, calib/ and gpu_runtime/. The test files nearest to its module run over it, one after the other,
until one fails or takes far longer than without it. Near is who imports the module over few others and is called alike.

What these do not notice is missed, or has no effect, or is noticed by a test farther off: a reader has to say which.
Every fault is a line of the journal; a run that was interrupted goes on. Only the copy is changed.
"""

import argparse
import ast
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rich.progress import track

ROOT = Path(__file__).resolve().parents[1]
FAULTY = ("sim", "traces", "calib", "gpu_runtime")
PACKAGES = (*FAULTY, "kvtwin", "tests")
OTHERS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Div,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
"""What stands in for an operator."""
FAR = 10
"""Steps to what a test does not import."""
MOST_BYTES = 8 << 30
"""Of memory for a test run: a fault may have a loop that never ends."""


class Fault(NamedTuple):
    """The `place`-th possible fault of a file."""

    path: str
    place: int
    line: int
    column: int
    text: str

    @property
    def name(self) -> str:
        """Where and what."""
        return f"{self.path}:{self.line}:{self.column}: {self.text}"


def places(tree: ast.Module) -> Iterator[tuple[ast.AST, str, ast.AST]]:
    """Every node that a fault may replace, the field of its parent it stands in, and its parent."""
    skipped: set[int] = set()
    for parent in ast.walk(tree):
        if id(parent) in skipped:
            skipped |= {id(child) for child in ast.iter_child_nodes(parent)}
            continue
        for field, value in ast.iter_fields(parent):
            for node in value if isinstance(value, list) else (value,):
                if not isinstance(node, ast.AST):
                    continue
                # Annotations say nothing when the program runs.
                if field in ("annotation", "returns"):
                    skipped.add(id(node))
                elif replacement(node) is not None:
                    yield node, field, parent


def replacement(node: ast.AST) -> ast.AST | None:
    """What stands in for a node, or None where no fault is made of it."""
    match node:
        case ast.Constant(value=bool(value)):
            return ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            return ast.Constant(value + 1)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.Compare(left=left, ops=[op, *ops], comparators=right) if type(op) in OTHERS:
            return ast.Compare(left, [OTHERS[type(op)](), *ops], right)
        case ast.BoolOp(op=op, values=values):
            return ast.BoolOp(OTHERS[type(op)](), values)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OTHERS:
            return ast.BinOp(left, OTHERS[type(op)](), right)
        case ast.AugAssign(target=target, op=op, value=value) if type(op) in OTHERS:
            return ast.AugAssign(target, OTHERS[type(op)](), value)
        case ast.Expr(value=ast.Call()) | ast.Assign() | ast.Continue() | ast.Break() | ast.Raise():
            return ast.Pass()
        case _:
            return None


def faults_of(path: str) -> list[Fault]:
    """All of a file."""
    found = []
    for place, (node, _, _) in enumerate(places(ast.parse((ROOT / path).read_text()))):
        new = replacement(node)
        assert new is not None
        text = " -> ".join(" ".join(ast.unparse(ast.fix_missing_locations(n)).split())[:200] for n in (node, new))
        found.append(Fault(path, place, getattr(node, "lineno", 0), getattr(node, "col_offset", 0), text))
    return found


def faulty(fault: Fault, text: str) -> str:
    """The text of its file with the fault."""
    tree = ast.parse(text)
    for place, (node, field, parent) in enumerate(places(tree)):
        if place == fault.place:
            new, value = replacement(node), getattr(parent, field)
            setattr(parent, field, [new if item is node else item for item in value] if type(value) is list else new)
            break
    return ast.unparse(ast.fix_missing_locations(tree))


# -- the nearest tests -------------------------------------------------------------------------------------------------


def module_of(path: str) -> str:
    """Its dotted name; test files import each other by the last part alone."""
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return name.rsplit(".", 1)[-1] if name.startswith("tests.") else name


def imports_of(path: str, modules: dict[str, str]) -> set[str]:
    """Files that a file imports, names of modules and of what they hold alike."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {modules[name] for name in names if name in modules}


def words_of(path: str) -> set[str]:
    """Of a path, but for those that say nothing."""
    return {word.rstrip("s") for word in re.split(r"[/_.]", path)} - {"py", "test", "sim", "init", ""}


def nearest_tests(files: list[str]) -> dict[str, list[str]]:
    """Test files for each other file, the nearest first."""
    modules = {module_of(path): path for path in files}
    imported = {path: imports_of(path, modules) for path in files}
    away: dict[str, list[tuple[int, str]]] = {path: [] for path in files}
    for test in files:
        if not Path(test).name.startswith("test_"):
            continue
        steps, queue = {test: 0}, deque([test])
        while queue:
            path = queue.popleft()
            for other in imported[path] - steps.keys():
                steps[other] = steps[path] + 1
                queue.append(other)
        for path in files:
            # Presets are imported by name, when they are asked for.
            near = 2 * len(words_of(path) & words_of(test))
            away[path].append((steps.get(path, FAR) - near, test))
    return {path: [test for _, test in sorted(tests)] for path, tests in away.items()}


# -- running -----------------------------------------------------------------------------------------------------------


def copy_tree(files: list[str], folder: Path) -> Path:
    """The working tree's files in a folder, with reference material beside it where there is any."""
    tree = folder / "tree"
    for name in files:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    if (ROOT.parent / "shared").is_dir():
        (folder / "shared").symlink_to(ROOT.parent / "shared")
    return tree


def end_of(tree: Path, test: str, limit_s: float) -> str:
    """How a test file ends: "passed", "failed" or "late"."""
    # Files change within a second: compiled ones would be taken for theirs.
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test],
        cwd=tree, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES)),
    )  # fmt: skip
    try:
        # 5: no test was collected, as where torch is absent.
        return "passed" if child.wait(limit_s) in (0, 5) else "failed"
    except subprocess.TimeoutExpired:
        return "late"
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


class Runner:
    """Runs test files over a copy of the tree, and knows how long they take without a fault."""

    def __init__(self, tree: Path, most_s: float) -> None:
        self.tree, self.most_s = tree, most_s
        self._usual_s: dict[str, float | None] = {}

    def usual_s(self, test: str) -> float | None:
        """Seconds without a fault; None where the file fails, or takes too long."""
        if test not in self._usual_s:
            began_s = time.monotonic()
            is_good = end_of(self.tree, test, self.most_s) == "passed"
            self._usual_s[test] = time.monotonic() - began_s if is_good else None
        return self._usual_s[test]

    def try_out(self, fault: Fault, tests: list[str], most: int) -> tuple[str | None, int, list[str]]:
        """Which of the nearest `most` test files noticed the fault, how many ran, and which nearer ones cannot tell."""
        ran, left_out = 0, []
        for test in tests:
            usual_s = self.usual_s(test)
            if usual_s is None:
                left_out.append(test)
                continue
            target = self.tree / fault.path
            text = target.read_text()
            target.write_text(faulty(fault, text))
            try:
                end = end_of(self.tree, test, 20 + 4 * usual_s)
            finally:
                target.write_text(text)
            ran += 1
            if end != "passed":
                return f"{test} ({end})", ran, left_out
            if ran == most:
                break
        return None, ran, left_out


def main() -> None:
    """Draw, run, and say what was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="faults to draw (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: 0)")
    parser.add_argument("--files", type=int, default=8, help="nearest test files to run over each (default: 8)")
    parser.add_argument(
        "--most-seconds", type=float, default=300.0, help="slower test files are left out (default: 300)"
    )
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"), help="the journal (default: mutants.jsonl)")
    arguments = parser.parse_args()
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split(
        "\n"
    )
    files = [name for name in listed if name and (ROOT / name).is_file()]
    sources = [name for name in files if name.endswith(".py") and name.split("/")[0] in PACKAGES]
    faults = [fault for name in sources if name.split("/")[0] in FAULTY for fault in faults_of(name)]
    drawn = random.Random(arguments.seed).sample(faults, min(arguments.count, len(faults)))
    nearest = nearest_tests(sources)
    lines = arguments.out.read_text().splitlines() if arguments.out.exists() else []
    known = {row["fault"]: row for row in map(json.loads, lines)}
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(copy_tree(files, Path(folder)), arguments.most_seconds)
        for fault in track(drawn, "faults"):
            if fault.name not in known:
                by, ran, left_out = runner.try_out(fault, nearest[fault.path], arguments.files)
                known[fault.name] = {"fault": fault.name, "caught_by": by, "files": ran, "left_out": left_out}
                with arguments.out.open("a") as journal:
                    journal.write(json.dumps(known[fault.name]) + "\n")
    rows = [known[fault.name] for fault in drawn]
    missed = [row for row in rows if row["caught_by"] is None]
    for row in missed:
        unasked = f" ({', '.join(row['left_out'])}: slow, or failing without it)" if row["left_out"] else ""
        print(f"missed by {row['files']} test files, or without effect: {row['fault']}{unasked}")
    print(
        f"{len(rows) - len(missed)} of {len(rows)} faults caught, drawn from {len(faults)} with seed {arguments.seed}"
    )


if __name__ == "__main__":
    main()
