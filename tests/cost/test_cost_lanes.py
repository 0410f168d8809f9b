"""Pipelines of layers and copies, against the recurrences they stand for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.cost.lanes import Lane, pipelined_s
from sim.engine.layers import offloaded_layers, retained_layers


def test_four_of_eight_layers_are_the_odd_ones() -> None:
    """LayerKV section 3.1.2."""
    assert retained_layers(8, 4) == (1, 3, 5, 7)
    assert offloaded_layers(8, 4) == (0, 2, 4, 6)


@given(st.integers(1, 80).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))))
def test_retained_layers_are_distinct_and_evenly_spread(sizes: tuple[int, int]) -> None:
    layers, kept = sizes
    retained = retained_layers(layers, kept)
    assert sorted(set(retained)) == list(retained)
    assert sorted((*retained, *offloaded_layers(layers, kept))) == list(range(layers))
    gaps = {after - before for before, after in zip((-1, *retained), retained, strict=False)}
    assert not gaps or max(gaps) - min(gaps) <= 1


def by_recurrence(compute: float, layers: int, copied: int, copy: float, wait: float, buffers: int) -> float:
    """Layer by layer: an offloaded layer waits for the copy `buffers` places before it."""
    off = offloaded_layers(layers, layers - copied)
    now, free, ends = 0.0, wait, []
    for layer in range(layers):
        if layer in off:
            k = len(ends)
            if k >= buffers:
                now = max(now, ends[k - buffers])
            now += compute / layers
            free = max(now, free) + copy
            ends.append(free)
        else:
            now += compute / layers
    return now


@given(
    st.integers(1, 80).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))),
    st.floats(0, 0.2), st.floats(0, 2), st.integers(1, 4),
)  # fmt: skip
def test_offload_behind_prefill_is_the_layer_recurrence(
    sizes: tuple[int, int], copy: float, wait: float, buffers: int
) -> None:
    layers, copied = sizes
    expected = by_recurrence(1.0, layers, copied, copy, wait, buffers)
    assert pipelined_s(1.0, layers, copied, copy, wait, buffers) == pytest.approx(expected, rel=1e-9)


def test_a_lane_serves_in_turn_and_counts_its_busy_time() -> None:
    lane = Lane("x", keep_intervals=True)
    assert lane.reserve(1.0, 2.0, "a") == 3.0
    assert lane.reserve(2.0, 1.0, "b") == 4.0
    assert lane.reserve(9.0, 0.5, "c") == 9.5
    assert lane.busy_s == 3.5
    assert lane.intervals is not None
    assert [(i.start_s, i.end_s) for i in lane.intervals] == [(1.0, 3.0), (3.0, 4.0), (9.0, 9.5)]
