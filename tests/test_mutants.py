"""`benchmarks/mutants.py`: a fault is one node of a file and no more; tests are told that notice it from others."""

import ast
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from difflib import SequenceMatcher
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def mutants():
    """Scripts import what stands beside them."""
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("mutants")
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture
def probes(mutants):
    return mutants.probes


SOURCE = '''"""Half of a number and one more."""

LIMIT: int = 3
__all__ = ["half"]


def half(n: int = 5) -> float:
    """Of at most three."""
    if not n or n > LIMIT:
        raise ValueError(n)
    n += 1
    return n / 2
'''
TEST = """
import pytest
from sim.half import half


def test_half():
    assert half(3) == 2
    with pytest.raises(ValueError):
        half({refused})
"""


def lay(root: Path, source: str = SOURCE, test: str = TEST.format(refused=4)) -> None:
    """A tree of one module, its test, and the scripts."""
    for name, text in {"sim/half.py": source, "sim/__init__.py": "", "tests/test_half.py": test}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "benchmarks").mkdir()
    for script in ("mutants", "line_tests", "forked_pytest", "collected", "probes"):
        (root / f"benchmarks/{script}.py").write_text((BENCHMARKS / f"{script}.py").read_text())
    for command in (("init", "-q"), ("add", ".")):
        subprocess.run(["git", *command], cwd=root, check=True)


@pytest.fixture
def small(mutants, tmp_path, monkeypatch):
    root = tmp_path / "root"
    lay(root)
    monkeypatch.setattr(mutants, "ROOT", root)
    return root


def test_every_fault_by_hand(mutants, small):
    texts = {(fault.line, fault.text) for fault in mutants.faults_of("sim/half.py")}
    assert texts == {
        (3, "3 -> 4"), (7, "5 -> 6"), (9, "not n or n > LIMIT -> not n and n > LIMIT"), (9, "not n -> n"),
        (9, "n > LIMIT -> n >= LIMIT"), (10, "raise ValueError(n) -> pass"), (11, "n += 1 -> n -= 1"), (11, "1 -> 2"),
        (12, "n / 2 -> n * 2"), (12, "2 -> 3"),
    }  # fmt: skip


@pytest.mark.parametrize(("number", "fault"), [(0, 1), (9999, 10_000), (96e6, 192e6), (10_000, 20_000)])
def test_large_numbers_are_doubled(mutants, number, fault):
    assert mutants.replacement(ast.Constant(number)).value == fault


def test_a_fault_is_in_one_line(mutants, small):
    plain = ast.unparse(ast.parse(SOURCE)).splitlines()
    for fault in mutants.faults_of("sim/half.py"):
        found = ast.unparse(mutants.faulty(fault, SOURCE)).splitlines()
        changed = [op for op in SequenceMatcher(None, plain, found).get_opcodes() if op[0] != "equal"]
        assert [(i2 - i1, j2 - j1) for _, i1, i2, j1, j2 in changed] == [(1, 1)], fault


def test_lines_and_names_that_a_fault_is_looked_up_by(mutants, small):
    """A default is a fault of the whole function; a constant of the module is one of whoever names it."""
    by_line = {fault.line: fault for fault in mutants.faults_of("sim/half.py")}
    assert {line: (list(fault.lines), fault.is_imported, fault.names) for line, fault in by_line.items()} == {
        3: ([3], True, ("LIMIT",)), 7: ([*range(7, 13)], True, ()), 9: ([9], False, ()), 10: ([10], False, ()),
        11: ([11], False, ()), 12: ([12], False, ()),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("executed", "tests"),
    [
        ({"sim/half.py": ["a::1"]}, ["a::1"]),
        ({"sim/user.py": ["b::1"], "sim/other.py": ["c::1"]}, ["b::1"]),
        ({"sim/other.py": ["c::1"]}, ["b::1", "a::1", "c::1"]),
        ({"sim/user.py": ["b::1"], "sim/other.py": ["c::1"]}, ["tests/test_sim_half.py::1", "b::1"]),
    ],
    ids=["it", "a user", "neither", "a test of its name"],
)
def test_a_module_of_constants_is_tried_by_its_users_tests_else_by_all(mutants, small, executed, tests):
    """`LIMIT` stands in no function, and nobody else names it."""
    limit = next(fault for fault in mutants.faults_of("sim/half.py") if fault.line == 3)
    texts = {"sim/half.py": "LIMIT = 3", "sim/user.py": "from sim import half", "sim/other.py": "half_of = 2"}

    def tests_of(path: str, lines: object = None) -> set[str]:
        return set(executed.get(path, ()) if lines is None else ())

    seconds = {"a::1": 2.0, "b::1": 1.0, "c::1": 3.0} | {test: 9.0 for test in tests if "half" in test}
    known = SimpleNamespace(seconds=seconds, tests_of=tests_of)
    found = mutants.tests_of(limit, known, texts)
    assert sorted(found) == sorted(tests) and found[0] == tests[0]


def run(root: Path, *more: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "benchmarks/mutants.py", "--cache", str(root.parent / "cache"), "--out", "found.jsonl", *more],
        cwd=root, stdout=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip


def test_faults_are_decided_and_the_tree_is_whole_again(tmp_path):
    root = tmp_path / "root"
    lay(root)
    (root / "sim/other.py").write_text("LIMIT = 3\n")
    subprocess.run(["git", "add", "."], cwd=root, check=True)
    child = run(root, "--count", "3", "--only", "sim/half.py")
    told = child.communicate(timeout=300)[0]
    assert child.returncode == 0
    rows = [json.loads(line) for line in (root / "found.jsonl").read_text().splitlines()]
    assert {row["by"] for row in rows if row["end"] == "caught"} == {"tests/test_half.py::test_half"}
    # Nobody asks for the default.
    assert [row["fault"].partition(": ")[2] for row in rows if row["end"] == "missed"] == ["5 -> 6"]
    assert told.splitlines()[-1] == "3 faults drawn from 10 with seed 1: 2 caught, 1 missed"
    assert (root / "sim/half.py").read_text() == (tmp_path / "cache/tree-0/sim/half.py").read_text() == SOURCE


def test_tests_whose_parameters_have_changed_are_recorded_anew(tmp_path):
    """They stand beside the test file, whose text is as it was."""
    root = tmp_path / "root"
    lay(
        root,
        test=TEST.format(refused=4).replace(
            "def test_half():", "@pytest.mark.parametrize('n', CASES)\ndef test_half(n):"
        ),
    )
    test = root / "tests/test_half.py"
    test.write_text(f"from cases import CASES\n{test.read_text()}")
    for name in ("one", "other"):
        (root / "tests/cases.py").write_text(f"CASES = [{name!r}]\n")
        subprocess.run(["git", "add", "."], cwd=root, check=True)
        told = run(root, "--seed", "1", "--out", f"{name}.jsonl").communicate(timeout=300)[0]
        assert "9 caught" in told.splitlines()[-1], name


COUNTING = """
from pathlib import Path
Path({note!r}).open("a").write("imported ")
from sim.half import half


def test_half():
    assert half(3) == 2
"""


def test_faults_in_functions_need_no_import(tmp_path):
    """Ten faults, of which two stand where an import executes them: three imports in all."""
    note = tmp_path / "note"
    lay(tmp_path / "root", test=COUNTING.format(note=str(note)))
    child = run(tmp_path / "root")
    told = child.communicate(timeout=300)[0]
    # What `half` refuses is not tested, nor its limit and its default.
    assert told.splitlines()[-1] == "10 faults drawn from 10 with seed 1: 6 caught, 4 missed"
    assert note.read_text().split() == ["imported"] * 3


def test_blocks_end_where_they_may_be_left(probes):
    text = """
def f(n):
    '''Words.'''
    a = 1
    if n:
        return a
    b = [
        2,
    ]
    return b
"""
    prober = probes.blocks_of(text)
    assert prober.owner == {4: 0, 5: 0, 6: 1, 7: 2, 8: 2, 9: 2, 10: 2}
    assert prober.count == 3


def test_blocks_that_ran(probes, tmp_path, monkeypatch):
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/halved.py").write_text(SOURCE)
    place = probes.lay(tmp_path / "tree", ["halved.py"])
    monkeypatch.syspath_prepend(str(tmp_path / "tree"))
    monkeypatch.setattr(sys, "meta_path", sys.meta_path.copy())
    hits = probes.install(str(place))
    half = importlib.import_module("halved").half
    assert hits[:3] == bytes(3)
    assert half(3) == 2
    assert hits[:3] == bytes([1, 0, 1])
    with pytest.raises(ValueError):
        half(4)
    assert hits[:3] == bytes([1, 1, 1])


def test_kept_code_is_of_its_own_path(probes, tmp_path):
    """A cache that was copied once gave code of another tree, into which no fault was put: 67 of 428 were "missed"."""
    paths = [tmp_path / name / "halved.py" for name in ("one", "other")]
    for path in paths:
        path.parent.mkdir()
        path.write_text(SOURCE)
        loader = probes.Loader("halved", str(path))
        loader.folder, loader.digest = tmp_path, probes.sha256(SOURCE.encode()).hexdigest()
        for _ in "new", "kept":
            assert loader.get_code("halved").co_filename == str(path)
    assert len([path for path in tmp_path.iterdir() if path.is_file()]) == 2


WAITING = """
import os, time
from pathlib import Path
from sim.half import half


def test_half():
    Path({note!r}).write_text(str(os.getpid()))
    time.sleep(600 * (half(3) != 2))
"""


def test_told_to_end_it_leaves_no_process(tmp_path):
    """`half` with a fault does not end: the process is at work when it is told."""
    note = tmp_path / "note"
    lay(tmp_path / "root", test=WAITING.format(note=str(note)))
    child = run(tmp_path / "root")
    pids: set[str] = set()
    # One process without a fault, and then one for each.
    while len(pids) < 2 and child.poll() is None:
        pids |= {note.read_text()} - {""} if note.exists() else set()
        time.sleep(0.02)
    time.sleep(0.5)
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=60)
    assert child.returncode == 143
    assert not Path(f"/proc/{note.read_text()}").exists()
