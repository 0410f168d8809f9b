"""`benchmarks/mutants.py`: a fault is one node of a file and no more; tests are told that notice it from others."""

import ast
import importlib.util
import subprocess
import sys
from difflib import SequenceMatcher
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location("mutants", Path(__file__).parents[1] / "benchmarks/mutants.py")
mutants = importlib.util.module_from_spec(spec)
sys.modules["mutants"] = mutants
spec.loader.exec_module(mutants)

SOURCE = '''"""Half of a number and one more."""

LIMIT: int = 3


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


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A tree of one module and its test."""
    (tmp_path / "sim").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "sim/half.py").write_text(SOURCE)
    (tmp_path / "tests/test_half.py").write_text(TEST.format(refused=4))
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    return tmp_path


def test_every_fault_by_hand(small):
    texts = {(fault.line, fault.text) for fault in mutants.faults_of("sim/half.py")}
    assert texts == {
        (3, "3 -> 4"), (6, "5 -> 6"), (8, "not n or n > LIMIT -> not n and n > LIMIT"), (8, "not n -> n"),
        (8, "n > LIMIT -> n >= LIMIT"), (9, "raise ValueError(n) -> pass"), (10, "n += 1 -> n -= 1"), (10, "1 -> 2"),
        (11, "n / 2 -> n * 2"), (11, "2 -> 3"),
    }  # fmt: skip


def test_a_fault_is_in_one_line(small):
    plain = ast.unparse(ast.parse(SOURCE)).splitlines()
    for fault in mutants.faults_of("sim/half.py"):
        found = mutants.faulty(fault, SOURCE).splitlines()
        changed = [op for op in SequenceMatcher(None, plain, found).get_opcodes() if op[0] != "equal"]
        assert [(i2 - i1, j2 - j1) for _, i1, i2, j1, j2 in changed] == [(1, 1)], fault


def test_what_the_test_notices_is_caught_and_the_tree_is_whole_again(small, tmp_path_factory):
    files = ["sim/half.py", "tests/test_half.py"]
    nearest = mutants.nearest_tests(files)
    assert nearest["sim/half.py"] == ["tests/test_half.py"]
    tree = mutants.copy_tree(files, tmp_path_factory.mktemp("copy"))
    runner = mutants.Runner(tree, 60.0)
    faults = {fault.text: fault for fault in mutants.faults_of("sim/half.py")}
    ends = {text: runner.try_out(faults[text], nearest["sim/half.py"], 1) for text in ("n / 2 -> n * 2", "3 -> 4")}
    assert ends == dict.fromkeys(ends, ("tests/test_half.py (failed)", 1, []))
    # Nobody asks for the default.
    assert runner.try_out(faults["5 -> 6"], nearest["sim/half.py"], 1) == (None, 1, [])
    assert (tree / "sim/half.py").read_text() == SOURCE


def test_a_test_that_fails_without_a_fault_notices_none(small, tmp_path_factory):
    (small / "tests/test_half.py").write_text(TEST.format(refused=3))
    files = ["sim/half.py", "tests/test_half.py"]
    runner = mutants.Runner(mutants.copy_tree(files, tmp_path_factory.mktemp("copy")), 60.0)
    assert runner.try_out(mutants.faults_of("sim/half.py")[0], ["tests/test_half.py"], 1) == (
        None,
        0,
        ["tests/test_half.py"],
    )


def test_presets_that_are_imported_by_name_have_nearest_tests():
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=mutants.ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    files = [name for name in listed.stdout.split() if name.split("/")[0] in mutants.PACKAGES]
    nearest = mutants.nearest_tests(files)
    assert "tests/parts/test_parts_pricing.py" in nearest["sim/cost/pricing.py"][:2]
    assert all(nearest[name] for name in files)
