"""The offline scheduler of the benchmarks: whom it chooses, and that it is no better than the bound."""

import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from adaptive_cells import Cell, bound_of, with_bound
from offline_cells import SHARES_OF_TIME, in_time, row

CELL = Cell("llama-2-7b", "l20", "uniform 3000 600", 1.0, 8.0, 1)


def fits(chosen, arrivals, due, seconds) -> bool:
    end_s = 0.0
    for i in chosen:
        end_s = max(end_s, arrivals[i]) + seconds[i]
        if end_s > due[i]:
            return False
    return True


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), min_size=1, max_size=8), st.integers(1, 8))
def test_all_who_are_chosen_are_in_time_and_all_are_where_all_can_be(rows, slo):
    gaps, seconds = (np.array(column, float) for column in zip(*rows, strict=True))
    arrivals = np.cumsum(gaps)
    due, everybody = arrivals + slo, list(range(len(rows)))
    found = sorted(in_time(everybody, arrivals, due, seconds))
    assert fits(found, arrivals, due, seconds)
    assert len(found) <= max(
        n for n in range(len(rows) + 1) if any(fits(c, arrivals, due, seconds) for c in combinations(everybody, n))
    )
    if fits(everybody, arrivals, due, seconds):
        assert found == everybody


def test_the_longest_is_left():
    """Three at once, 2, 1 and 1 s, with two seconds: the two short ones; who came later still starts later."""
    zeros = np.zeros(3)
    assert in_time([0, 1, 2], zeros, zeros + 2.0, np.array([2.0, 1.0, 1.0])) == [1, 2]
    arrivals, seconds = np.array([0.0, 4.0, 4.5, 4.6]), np.array([5.0, 1.0, 1.0, 0.5])
    assert in_time([0, 1, 2, 3], arrivals, arrivals + np.array([9.0, 1.0, 1.5, 1.0]), seconds) == [1, 2]


def test_it_serves_whom_it_chose_within_the_bound():
    found = row(CELL, 40)
    assert found["share_of_time"] in SHARES_OF_TIME
    assert 0.5 < float(str(found["share_of_bound"])) <= 1.0
    assert float(str(found["attainment"])) * 40 == pytest.approx(int(str(found["chosen"])), abs=4)


def test_bounds_of_earlier_rows_are_found_anew():
    row = {name: str(value) for name, value in CELL._asdict().items()} | {"num_prompts": "40", "goodput": "0.5"}
    found = with_bound(row)
    assert float(found["bound"]) == pytest.approx(bound_of(CELL, 40), abs=1e-4)
    assert float(found["share_of_bound"]) == pytest.approx(0.5 / bound_of(CELL, 40), abs=1e-4)
