"""The offline scheduler of the benchmarks: which requests it chooses, and that it is no better than the bound."""

from itertools import combinations

import numpy as np
import pytest
from adaptive_cells import Cell
from hypothesis import given
from hypothesis import strategies as st
from offline_cells import SHARES_OF_TIME, in_time, row

CELL = Cell("llama-2-7b", "l20", "uniform 3000 600", 1.0, 8.0, 1)


def fits(chosen, arrivals, due, seconds) -> bool:
    end_s = 0.0
    for i in chosen:
        end_s = max(end_s, arrivals[i]) + seconds[i]
        if end_s > due[i]:
            return False
    return True


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 8)), min_size=1, max_size=8))
def test_of_those_there_at_once_as_many_as_search_finds_are_in_time(rows):
    due, seconds = (np.array(column, float) for column in zip(*sorted(rows), strict=True))
    arrivals, everything = np.zeros(len(rows)), range(len(rows))
    found = sorted(in_time(list(everything), arrivals, due, seconds))
    assert fits(found, arrivals, due, seconds)
    assert len(found) == max(
        n for n in range(len(rows) + 1) if any(fits(c, arrivals, due, seconds) for c in combinations(everything, n))
    )


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), min_size=1, max_size=8), st.integers(1, 8))
def test_nothing_is_left_where_all_can_be_in_time(rows, slo):
    gaps, seconds = (np.array(column, float) for column in zip(*rows, strict=True))
    arrivals, everything = np.cumsum(gaps), list(range(len(rows)))
    if fits(everything, arrivals, arrivals + slo, seconds):
        assert sorted(in_time(everything, arrivals, arrivals + slo, seconds)) == everything


def test_it_serves_what_it_chose_within_the_bound():
    found = row(CELL, 40)
    assert found["share_of_time"] in SHARES_OF_TIME
    assert 0.5 < float(str(found["share_of_bound"])) <= 1.0
    assert float(str(found["attainment"])) * 40 == pytest.approx(int(str(found["chosen"])), abs=4)
