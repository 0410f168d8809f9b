"""A few of the cases of `validation/reliability.py`, and that a broken promise is noticed."""

import sys
from pathlib import Path
from random import Random

import bad_input
import pytest
from bad_input import KINDS, Bench, Fault, counted, try_cases


@pytest.mark.parametrize("kind", KINDS)
def test_bad_input_kills_and_full_disks_break_no_promise(kind):
    if kind == "HTTP":
        pytest.importorskip("aiohttp")
    counts, faults = counted(try_cases(kind, seed=1, cases=4 if kind in ("kills", "two writers", "full disks") else 25))
    assert not faults
    assert counts.total() in (4, 25)


@pytest.mark.parametrize("broken", ["raises", "clears", "accepts", "exits", "mumbles"])
def test_each_broken_promise_is_a_fault(tmp_path, monkeypatch, broken):
    bench = Bench(tmp_path)

    def main(words):
        if broken == "raises":
            raise KeyError(3)
        if broken == "clears":
            print("kvtwin: refused", file=sys.stderr)
            (bench.out / "result.json").unlink()
            return 2
        return {"accepts": 0, "exits": 5, "mumbles": 2}[broken]

    monkeypatch.setattr("kvtwin.main", main)
    found = bench.judge(["run"], nonsense=broken == "accepts")
    assert isinstance(found, Fault)
    whats = {
        "raises": "traceback",
        "clears": "lost",
        "accepts": "accepted nonsense",
        "exits": "status",
        "mumbles": "words",
    }
    assert found.what == whats[broken]


def test_a_command_that_hangs_is_a_fault(tmp_path, monkeypatch):
    bench = Bench(tmp_path)
    monkeypatch.setattr(bad_input, "MOST_S", 0.05)
    monkeypatch.setattr("kvtwin.main", lambda words: [None for _ in iter(int, 1)])
    found = bench.judge(["run"])
    assert isinstance(found, Fault) and found.what == "hang"


def test_the_same_seed_draws_the_same_cases(tmp_path, monkeypatch):
    bench, seen = Bench(tmp_path), []
    monkeypatch.setattr(
        "kvtwin.main", lambda words: seen.append([word for word in words if Path(word) != tmp_path]) or 2
    )
    for _ in range(2):
        bad_input.options(bench, Random("options 3 4"))
    assert seen[0] == seen[1]
