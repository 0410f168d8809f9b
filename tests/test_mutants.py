"""`benchmarks/mutants.py`: a fault is one node of a file and no more; tests are told that notice it from others."""

import ast
import importlib
import json
import os
import subprocess
import sys
from difflib import SequenceMatcher
from pathlib import Path

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


def drawn(draw: "st.DrawFn") -> int:
    return draw(1) + 1
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


def test_a_fault_is_in_one_line(mutants, small):
    plain = ast.unparse(ast.parse(SOURCE)).splitlines()
    for fault in mutants.faults_of("sim/half.py"):
        found = ast.unparse(mutants.faulty(fault, SOURCE)).splitlines()
        changed = [op for op in SequenceMatcher(None, plain, found).get_opcodes() if op[0] != "equal"]
        assert [(i2 - i1, j2 - j1) for _, i1, i2, j1, j2 in changed] == [(1, 1)], fault


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
    told = child.communicate()[0]
    assert child.returncode == 0
    rows = [json.loads(line) for line in (root / "found.jsonl").read_text().splitlines()]
    assert {row["by"] for row in rows if row["end"] == "caught"} == {"tests/test_half.py::test_half"}
    # The default is not asked for.
    assert [row["fault"].partition(": ")[2] for row in rows if row["end"] == "missed"] == ["5 -> 6"]
    assert told.splitlines()[-1] == "3 faults drawn from 10 with seed 1: 2 caught, 1 missed"
    assert (root / "sim/half.py").read_text() == (tmp_path / "cache/tree-0/sim/half.py").read_text() == SOURCE


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
