"""Random faults in a copy of the tree: do the tests notice?

    python benchmarks/mutants.py [--count 436] [--seed 1] [--only PATH ...] [--tests PATH ...] [--jobs 1]
        [--out JOURNAL] [--cache FOLDER]

A fault is one operator, comparison, constant or condition changed, or one statement left out. It is drawn from all such
places of the packages. What executes its line is run over it: a few fast tests first, then the others, each file's
fastest before its slower ones, until one fails, takes far longer than without it, or `--seconds` are used. They run in
a fork of a process that has collected all tests (`collected`); only where an import executes the fault, in a new one.

What no test notices is missed or has no effect: a reader has to say which. Where tests were left out it is undecided.
Every fault is a line of the journal; a run that was interrupted goes on. Only copies in the cache folder are changed.
"""

import argparse
import ast
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import forked_pytest
import probes
import pytest
from collected import Change, Run, Server, fix_hypothesis
from line_tests import LineTests, file_of
from rich.progress import track

ROOT = Path(__file__).resolve().parents[1]
FAULTY = ("sim", "traces", "calib", "gpu_runtime", "kvtwin")
OTHERS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Div,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
"""What stands in for an operator."""
LARGE = 10_000
"""Numbers that are doubled; one is added to smaller ones."""
FIRST_S, FIRST_FILES = 5.0, 6
"""Of tests that run first: most faults need no others."""
WHOLE = "tests/pins/test_pins"
"""What compares whole results runs next: what the first few let pass it mostly notices."""
SLACK_S, SLACK = 10.0, 5.0
"""A run that takes longer than so many times its usual seconds, and these beside, does not end."""


class Fault(NamedTuple):
    """The `place`-th possible fault of a file."""

    path: str
    place: int
    line: int
    column: int
    text: str
    lines: range
    """Of its statement: without the statements inside, but for those of a function or class."""
    is_imported: bool
    """Whether its statement is executed when its module is imported."""
    names: tuple[str, ...] = ()
    """That such a statement gives."""

    @property
    def name(self) -> str:
        """Where and what."""
        return f"{self.path}:{self.line}:{self.column}: {self.text}"


def places(tree: ast.Module) -> Iterator[tuple[ast.AST, str, ast.AST]]:
    """Every node that a fault may replace, the field of its parent it stands in, and its parent."""
    skipped = {id(node) for node in ast.walk(tree) if says_nothing(node)}
    for parent in ast.walk(tree):
        if id(parent) in skipped:
            skipped |= {id(child) for child in ast.iter_child_nodes(parent)}
            continue
        for field, value in ast.iter_fields(parent):
            for node in value if isinstance(value, list) else (value,):
                if not isinstance(node, ast.AST):
                    continue
                if field in ("annotation", "returns") or id(node) in skipped:
                    skipped.add(id(node))
                elif replacement(node) is not None:
                    yield node, field, parent


def says_nothing(node: ast.AST) -> bool:
    """Whether no test can tell it from another: slots, exported names, what only a type checker reads; and draws.

    Of what tests draw (a function with hypothesis' `DrawFn`) one workload is as good as another.
    """
    match node:
        case ast.FunctionDef(args=ast.arguments(args=args)):
            return any(arg.annotation is not None and "DrawFn" in ast.unparse(arg.annotation) for arg in args)
        case ast.Assign(targets=[ast.Name("__slots__" | "__all__")]):
            return True
        case ast.Assign(value=ast.Call(func=ast.Name("TypeVar" | "ParamSpec" | "NewType"))):
            return True
        case ast.keyword(arg="slots" | "gc" | "frozen" | "kw_only" | "repr" | "strict"):
            return True
        case ast.If(test=ast.Name("TYPE_CHECKING")):
            return True
        case _:
            return False


def replacement(node: ast.AST) -> ast.AST | None:
    """What stands in for a node, or None where no fault is made of it."""
    match node:
        case ast.Constant(value=bool(value)):
            return ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            return ast.Constant(value + 1 if abs(value) < LARGE else 2 * value)
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


def statements(tree: ast.Module) -> dict[int, tuple[ast.stmt, bool]]:
    """By id of each node: the innermost statement around it, and whether an import executes that."""
    around: dict[int, tuple[ast.stmt, bool]] = {}

    def visit(node: ast.AST, statement: ast.stmt | None, is_imported: bool) -> None:
        statement = node if isinstance(node, ast.stmt) else statement
        if statement is not None:
            around[id(node)] = statement, is_imported
        for field, value in ast.iter_fields(node):
            inside = field == "body" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for child in value if isinstance(value, list) else (value,):
                if isinstance(child, ast.AST):
                    visit(child, statement, is_imported and not inside)

    visit(tree, None, True)
    return around


def names_of(statement: ast.stmt) -> tuple[str, ...]:
    """That a statement gives."""
    match statement:
        case ast.ClassDef():
            return (statement.name,)
        case ast.Assign() | ast.AnnAssign():
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            return tuple(node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name))
        case _:
            return ()


def faults_of(path: str) -> list[Fault]:
    """All of a file."""
    found, tree = [], ast.parse((ROOT / path).read_text())
    around = statements(tree)
    for place, (node, _, _) in enumerate(places(tree)):
        new = replacement(node)
        assert new is not None
        text = " -> ".join(" ".join(ast.unparse(ast.fix_missing_locations(n)).split())[:200] for n in (node, new))
        statement, is_imported = around[id(node)]
        lines = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            body = getattr(statement, "body", None)
            lines = range(lines.start, max(body[0].lineno, lines.start + 1)) if body else lines
        at = getattr(node, "lineno", statement.lineno), getattr(node, "col_offset", 0)
        found.append(Fault(path, place, *at, text, lines, is_imported, names_of(statement) if is_imported else ()))
    return found


def faulty(fault: Fault, text: str) -> ast.Module:
    """Its file with the fault; what stays has the lines that it had."""
    tree = ast.parse(text)
    for place, (node, field, parent) in enumerate(places(tree)):
        if place == fault.place:
            new, value = replacement(node), getattr(parent, field)
            assert new is not None
            ast.copy_location(new, node if hasattr(node, "lineno") else parent)
            setattr(parent, field, [new if item is node else item for item in value] if type(value) is list else new)
            break
    return ast.fix_missing_locations(tree)


# -- which tests -------------------------------------------------------------------------------------------------------


def tests_of(fault: Fault, known: LineTests, texts: dict[str, str]) -> list[str]:
    """Tests that execute a fault's statement, or lines with the names that it gives; each file's fastest first.

    A fault in what an import executes may be noticed by the pinned results.

    Where none does so in this process (kernels are interpreted in another) those of files named after the module, and
    those that execute anything of it or of modules that name it; else all. Files named after the module come first.
    """
    found = set() if fault.is_imported else known.tests_of(fault.path, [fault.line])
    found = found or known.tests_of(fault.path, fault.lines)
    if fault.names:
        is_named = re.compile(rf"\b({'|'.join(fault.names)})\b")
        for path, text in texts.items():
            lines = [i for i, line in enumerate(text.splitlines(), 1) if is_named.search(line)]
            if lines:
                found |= known.tests_of(path, lines)
    if not found:
        is_named = re.compile(rf"\b{Path(fault.path).stem}\b")
        users = [fault.path, *(path for path, text in texts.items() if is_named.search(text))]
        found = {test for test in known.seconds if is_after(test, fault.path)}.union(*map(known.tests_of, users))
        found = found or set(known.seconds)
    by_file: dict[str, list[str]] = defaultdict(list)
    module = Path(fault.path).stem.replace("_", "-")
    for test in sorted(found, key=lambda test: (module not in test.replace("_", "-"), known.seconds[test], test)):
        by_file[file_of(test)].append(test)
    ranked = [
        (not file.startswith(WHOLE), not is_after(file, fault.path), rank, known.seconds[test], test)
        for file, tests in by_file.items()
        for rank, test in enumerate(tests)
    ]
    return [test for *_, test in sorted(ranked)]


def is_after(test: str, path: str) -> bool:
    """Whether a test's file is named after a module: all its words are of the module's path."""
    words = Path(file_of(test)).stem.split("_")[1:]
    return bool(words) and set(words) <= set(re.split(r"\W|_", path))


def first_few(seconds: dict[str, float]) -> list[str]:
    """The fastest, of few files."""
    few, files, left_s = [], set(), FIRST_S
    for test in sorted(seconds, key=lambda test: (seconds[test], test)):
        left_s -= seconds[test]
        if left_s < 0.0 and (few or math.isinf(seconds[test])):
            break
        if len(files | {file_of(test)}) <= FIRST_FILES:
            files.add(file_of(test))
            few.append(test)
    return few


def within(tests: list[str], seconds: dict[str, float], most_s: float) -> list[str]:
    """As many of them, in their order, as fit."""
    fitting = []
    for test in tests:
        if seconds[test] <= most_s:
            most_s -= seconds[test]
            fitting.append(test)
    return fitting


# -- running -----------------------------------------------------------------------------------------------------------


class Chosen:
    """Runs some tests of the files that were collected, file by file, and notes the first that failed."""

    def __init__(self, tests: list[str], note: Path) -> None:
        files = {file: i for i, file in enumerate(dict.fromkeys(map(file_of, tests)))}
        self._order = {test: (files[file_of(test)], i) for i, test in enumerate(tests)}
        self._note = note
        self.files = list(files)

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        fix_hypothesis()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self._order), key=lambda item: self._order[item.nodeid]
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._note.write_text(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._note.write_text(f"{report.nodeid} (collection)")


def copy_tree(files: list[str], tree: Path) -> Path:
    """The working tree's files, with reference material beside them where there is any."""
    shutil.rmtree(tree, ignore_errors=True)
    for name in files:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    with suppress(FileExistsError):
        if (ROOT.parent / "shared").is_dir():
            (tree.parent / "shared").symlink_to((ROOT.parent / "shared").resolve())
    return tree


def try_out(
    fault: Fault, seconds: dict[str, float], known: LineTests, most_s: float, tree: Path, server: Server
) -> dict[str, object]:
    """Run tests, in their order, over a tree with the fault; a row of the journal."""
    tests, few = list(seconds), first_few(seconds)
    more = within([test for test in tests if test not in set(few)], seconds, most_s)
    whole = [test for test in more if test.startswith(WHOLE)]
    runs = [chosen for chosen in (few, whole, more[len(whole) :]) if chosen]
    row: dict[str, object] = {"fault": fault.name, "tests": len(tests), "left_out": len(tests) - len(few) - len(more)}
    target = tree / fault.path
    old = target.read_text()
    new = faulty(fault, old)
    target.write_text(ast.unparse(new))
    # Compiled files are told by the time of their source: no two faults of a file have the same.
    os.utime(target, (fault.place + 1, fault.place + 1))
    blocks = known.blocks(fault.path, [fault.line])
    is_early = fault.is_imported or not blocks
    try:
        for chosen in runs:
            limit_s = SLACK_S + SLACK * sum(seconds[test] for test in chosen)
            end, by = "cannot", ""
            if not is_early:
                change = Change(target, old, new, known.first[fault.path], blocks)
                end, told = server.ask(Run(chosen, limit_s, limit_s), change)
                by = told[-1].test if told else ""
            if end == "cannot":
                is_early = True
                note = tree.with_suffix(".note")
                note.write_text("")
                plugin = Chosen(chosen, note)
                end = forked_pytest.run(tree, plugin.files, plugin, limit_s, "-x")
                by = note.read_text()
            if end != "passed":
                return {**row, "end": "caught" if end == "failed" else end, "by": by}
    finally:
        shutil.copy2(ROOT / fault.path, target)
    return {**row, "end": "not executed" if not tests else "undecided" if row["left_out"] else "missed"}


# -- several at a time -------------------------------------------------------------------------------------------------


class Worker:
    """Of this process: a tree, and what has collected its tests."""

    tree: Path
    known: LineTests
    tests: list[str]
    server: Server | None = None

    @classmethod
    def start(cls, trees: "multiprocessing.SimpleQueue[Path]", known: LineTests, tests: list[str]) -> None:
        """Take a tree; end as told, with what was started."""
        cls.tree, cls.known, cls.tests = trees.get(), known, tests
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, cls.end)

    @classmethod
    def asked(cls) -> Server:
        """Started when it is needed."""
        if cls.server is None:
            cls.server = Server(cls.tree, cls.tests, probes.lay(cls.tree, list(cls.known.first)))
        return cls.server

    @classmethod
    def end(cls, *_: object) -> None:
        """With the server."""
        if cls.server is not None:
            cls.server.close()
        sys.exit(143)


def gather_here(test: str) -> None:
    """What a test file executes."""
    if not Worker.known.is_known(test, Worker.asked().tests):
        Worker.known.gather(test, Worker.asked())


def try_out_here(task: tuple[Fault, dict[str, float]], most_s: float) -> dict[str, object]:
    """`try_out` in this process's tree."""
    return try_out(*task, Worker.known, most_s, Worker.tree, Worker.asked())


def is_below(name: str, folders: list[str]) -> bool:
    """Whether a file is one of these, or in one."""
    return any(map(Path(name).is_relative_to, folders))


def main() -> None:
    """Draw, run, and say what was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=436, help="faults to draw (default: 436)")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (default: 1)")
    parser.add_argument("--only", nargs="+", default=["."], help="files and folders to draw from (default: all)")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="files and folders of tests (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--seconds", type=float, default=240.0, help="of tests for each fault (default: 240)")
    parser.add_argument("--slowest", type=float, default=60.0, help="seconds of a test; slower ones are left out (60)")
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"), help="the journal (default: mutants.jsonl)")
    cache = Path.home() / ".cache/kvtwin-mutants"
    parser.add_argument("--cache", type=Path, default=cache, help=f"folder for what tests execute (default: {cache})")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    files = [name for name in listed.split("\n") if name and (ROOT / name).is_file()]
    sources = [name for name in files if name.endswith(".py") and name.split("/")[0] in FAULTY]
    tests = [name for name in files if Path(name).match("test_*.py") and is_below(name, arguments.tests)]
    chosen = [name for name in sources if is_below(name, arguments.only)]
    faults = [fault for name in chosen for fault in faults_of(name)]
    drawn = random.Random(arguments.seed).sample(faults, min(arguments.count, len(faults)))
    known = LineTests(arguments.cache / "map", ROOT, sources, arguments.slowest)
    forked_pytest.preload()
    fork = multiprocessing.get_context("fork")
    trees = fork.SimpleQueue()
    for i in range(arguments.jobs):
        trees.put(copy_tree(files, arguments.cache.resolve() / f"tree-{i}"))
    # A fork of a process with threads may hang: the bar has none.
    bar = partial(track, auto_refresh=False)
    with fork.Pool(arguments.jobs, Worker.start, (trees, known, tests)) as pool:
        gathered = pool.imap_unordered(gather_here, tests)
        for _ in bar(gathered, "test files", total=len(tests)):
            pass
        known.load(tests)
        texts = {name: (ROOT / name).read_text() for name in sources}
        rows = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
        done = {row["fault"] for row in rows}
        waiting = [fault for fault in drawn if fault.name not in done]
        tasks = ((fault, {test: known.seconds[test] for test in tests_of(fault, known, texts)}) for fault in waiting)
        work = partial(try_out_here, most_s=arguments.seconds)
        for row in bar(pool.imap_unordered(work, tasks), "faults", total=len(waiting)):
            rows.append(row)
            with arguments.out.open("a") as journal:
                journal.write(json.dumps(row) + "\n")
    names = {fault.name for fault in drawn}
    rows = [row for row in rows if row["fault"] in names]
    for row in sorted(rows, key=lambda row: (row["end"], row["fault"])):
        if row["end"] not in ("caught", "late"):
            print(f"{row['end']}, {row['tests']} tests, {row['left_out']} left out: {row['fault']}")
    ends = Counter(row["end"] for row in rows)
    counts = ", ".join(f"{count} {end}" for end, count in ends.most_common())
    print(f"{len(rows)} faults drawn from {len(faults)} with seed {arguments.seed}: {counts}")


if __name__ == "__main__":
    main()
