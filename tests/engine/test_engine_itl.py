"""Weighted gap statistics against numpy on the repeated values."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.engine.itl import GapCollector

runs = st.lists(
    st.tuples(st.floats(1e-4, 5), st.floats(0, 1e-3), st.integers(1, 20), st.integers(1, 30)), min_size=1, max_size=40
)


def repeated(found: list[tuple[float, float, int, int]]) -> list[float]:
    return [gap + slope * i for gap, slope, count, weight in found for i in range(count) for _ in range(weight)]


@given(runs)
def test_statistics_are_those_of_the_repeated_values(found: list[tuple[float, float, int, int]]) -> None:
    collector = GapCollector()
    for run in found:
        collector.add(*run)
    values = repeated(found)
    statistics = collector.statistics((0.0, 50.0, 90.0, 99.0, 100.0))
    assert statistics is not None and statistics.exact
    assert statistics.count == len(values)
    assert statistics.mean == pytest.approx(np.mean(values))
    assert statistics.std == pytest.approx(np.std(values), abs=1e-7)
    for percentile, value in statistics.percentiles.items():
        assert value == pytest.approx(np.percentile(values, percentile))


@given(runs)
def test_binned_percentiles_stay_within_their_bound(found: list[tuple[float, float, int, int]]) -> None:
    collector = GapCollector(max_runs=4)
    for run in found:
        collector.add(*run)
        collector.bound_memory()
    values = np.sort(repeated(found))
    statistics = collector.statistics((50.0, 99.0))
    assert statistics is not None
    assert statistics.exact == (len(found) < 4)
    assert statistics.count == len(values)
    assert statistics.mean == pytest.approx(values.mean())
    assert statistics.std == pytest.approx(values.std(), abs=1e-6)
    for percentile, value in statistics.percentiles.items():
        # Interpolation between two values may fall anywhere between their bins.
        rank = percentile / 100 * (len(values) - 1)
        low, high = values[int(rank)], values[min(int(rank) + 1, len(values) - 1)]
        assert low * (1 - 2e-4) <= value <= high * (1 + 2e-4)


@given(st.lists(st.tuples(st.floats(1e-4, 5), st.floats(-1e-6, 1e-4), st.integers(1, 300), st.just(1)), min_size=1))
def test_long_runs_count_as_their_gaps_one_by_one(found: list[tuple[float, float, int, int]]) -> None:
    """They are cut where a bin ends, and summed without looking at each gap; also where gaps get shorter."""
    runs, gaps = GapCollector(), GapCollector()
    for gap, slope, count, weight in found:
        runs.add(gap, slope, count, weight)
        for i in range(count):
            gaps.add(gap + slope * i, 0.0, 1, weight)
    ours, expected = (one.statistics((0.0, 50.0, 99.0, 100.0)) for one in (runs, gaps))
    assert ours is not None and expected is not None
    assert (ours.count, ours.mean) == (expected.count, pytest.approx(expected.mean))
    assert ours.std == pytest.approx(expected.std, abs=1e-7)
    assert ours.percentiles == pytest.approx(expected.percentiles)


def test_many_runs_are_counted_as_few_are() -> None:
    """Runs of one gap by numpy, past 131,072 runs; those of several gaps, and shorter or longer than all bins, too."""
    draw = np.random.default_rng(3)
    gaps = np.concatenate([draw.lognormal(-3, 1, 139_990), [0.0, 1e-10, 2e6] * 3, [0.05]])
    weights = draw.integers(1, 9, len(gaps))
    collector = GapCollector()
    for gap, weight in zip(gaps.tolist(), weights.tolist(), strict=True):
        collector.add(gap, 0.0, 1, weight)
    collector.add(0.04, 1e-4, 300, 500)
    collector.bound_memory()
    values = np.concatenate([np.repeat(gaps, weights), np.repeat(0.04 + 1e-4 * np.arange(300), 500)])
    statistics = collector.statistics((0.0, 10.0, 50.0, 99.0, 100.0))
    assert statistics is not None and statistics.exact and statistics.count == len(values)
    assert (statistics.mean, statistics.std) == (pytest.approx(values.mean()), pytest.approx(values.std()))
    for percentile, value in statistics.percentiles.items():
        assert value == pytest.approx(np.percentile(values, percentile))


def test_no_gaps_no_statistics() -> None:
    assert GapCollector().statistics((50.0,)) is None
