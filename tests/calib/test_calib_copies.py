"""Copies and all-reduces: the cost of asking and the rate are told apart, or the samples are refused by name."""

import msgspec
import numpy as np
import pytest
from calib_small import BASE, HARDWARE, copies, noise, planted, shapes, timed

from calib.copies import (
    all_reduce_points,
    all_reduce_s,
    copy_s,
    fit_all_reduce,
    fit_copies,
    fit_host_memcpy,
    plain_copies,
)
from calib.fit import fit_profile
from calib.samples import Sample
from sim.errors import UserError

LINK = {"copy_launch_s": 2.5e-6, "h2d_bytes_per_s": 2.5e10, "d2h_bytes_per_s": 2.2e10}
RING = {
    "allreduce_bytes_per_s": 9e10,
    "allreduce_latency_s": 4e-6,
    "allreduce_chunk_s": 3e-6,
    "allreduce_launch_s": 6e-6,
}


def both_ways():
    return [
        sample
        for op in ("h2d", "d2h")
        for sample in copies(op, launch_s=LINK["copy_launch_s"], bytes_per_s=LINK[f"{op}_bytes_per_s"])
    ]


def reductions(gpus=(2, 4, 8), sizes=tuple(8192.0 * 4**i for i in range(8))):
    grid = [(g, n) for g in gpus for n in sizes]
    seconds = all_reduce_s(RING, np.array([n for _, n in grid]), np.array([float(g) for g, _ in grid]))
    return [
        Sample(op="all_reduce", latency_s=t, tp=g, num_bytes=n)
        for (g, n), t in zip(grid, seconds.tolist(), strict=True)
    ]


def test_a_copy_is_pieces_times_asking_or_bytes_over_the_rate():
    samples = [
        Sample(op="h2d", latency_s=1.0, num_bytes=1e9, num_copies=4),
        Sample(op="d2h", latency_s=1.0, num_bytes=3e6),
        Sample(op="d2h", latency_s=1.0, num_bytes=3e6, num_copies=100),
    ]
    constants = {"copy_launch_s": 1e-5, "h2d_bytes_per_s": 2e10, "d2h_bytes_per_s": 1e10}
    assert copy_s(constants, samples).tolist() == pytest.approx([0.05, 0.0003, 0.001])


def test_an_all_reduce_is_a_ring():
    """2 (G-1) steps of 5 us and 2 (G-1)/G of the bytes over 10 GB/s, for G = 1, 2, 4; 8 MB on each."""
    constants = {"allreduce_latency_s": 5e-6, "allreduce_bytes_per_s": 1e10}
    found = all_reduce_s(constants, np.full(3, 8e6), np.array([1.0, 2.0, 4.0]))
    assert found.tolist() == pytest.approx([0.0, 10e-6 + 800e-6, 30e-6 + 1200e-6])


def test_an_all_reduce_is_a_pipeline_of_chunks_of_the_best_size():
    """400 us of moving in chunks that cost 1 us: 20 of them, which cost 20 us and as much for filling the pipeline."""
    constants = {"allreduce_latency_s": 0.0, "allreduce_bytes_per_s": 1e10, "allreduce_chunk_s": 1e-6}
    launched = all_reduce_s({**constants, "allreduce_launch_s": 7e-6}, np.full(2, 4e6), np.array([1.0, 2.0]))
    assert launched.tolist() == pytest.approx([0.0, 447e-6])


def test_exact_copies_give_their_constants_back():
    fit = fit_copies(both_ways())
    assert fit is not None
    assert fit.values == pytest.approx(LINK, rel=1e-4)


def test_one_direction_alone_gives_the_rate_of_that_direction():
    fit = fit_copies([s for s in both_ways() if s.op == "d2h"])
    assert fit is not None
    assert fit.values == pytest.approx({n: LINK[n] for n in ("copy_launch_s", "d2h_bytes_per_s")}, rel=1e-4)


def test_exact_copies_in_host_memory_give_their_rate_back():
    fit = fit_host_memcpy(copies("host_memcpy", launch_s=5e-7, bytes_per_s=8e9))
    assert fit is not None
    assert fit.values["host_memcpy_bytes_per_s"] == pytest.approx(8e9, rel=1e-4)


def test_exact_all_reduces_give_their_constants_back():
    fit = fit_all_reduce(reductions())
    assert fit is not None
    assert fit.values == pytest.approx(RING, rel=1e-4)


@pytest.mark.parametrize(("gpus", "has_launch"), [((4,), False), ((2, 4), True)])
def test_a_launch_is_told_from_latency_where_groups_of_two_sizes_were_measured(gpus, has_launch):
    fit = fit_all_reduce(reductions(gpus))
    assert fit is not None
    assert ("allreduce_launch_s" in fit.values) == has_launch


@pytest.mark.parametrize(
    ("fit", "samples", "true"), [(fit_copies, both_ways(), LINK), (fit_all_reduce, reductions(), RING)]
)
def test_intervals_cover_planted_constants(fit, samples, true):
    """40 sets with noise and outliers: 95 % is meant, and 33 hits are four standard deviations below that."""
    rng, seen = np.random.default_rng(0), dict.fromkeys(true, 0)
    exact = np.array([s.latency_s for s in samples])
    for _ in range(40):
        found = fit(timed(samples, exact * noise(rng, len(samples))))
        for name, value in true.items():
            seen[name] += found.estimates[name].low <= value <= found.estimates[name].high
    assert min(seen.values()) >= 33, seen


def test_copies_that_cost_nothing_to_ask_for_stand_at_zero():
    fit = fit_copies(copies("h2d", launch_s=-1e-8, bytes_per_s=2e10, sizes=[1e6, 1e7, 1e8]))
    assert fit is not None
    launch = fit.estimates["copy_launch_s"]
    assert (launch.value, launch.stderr) == (0.0, None)


def test_copies_beside_others_and_of_pageable_memory_are_not_fitted():
    alone = both_ways()
    others = [
        msgspec.structs.replace(s, latency_s=5 * s.latency_s, **change)
        for s in alone
        for change in ({"beside": "layers"}, {"memory": "pageable"})
    ]
    assert plain_copies([*others, *alone], "h2d") == [s for s in alone if s.op == "h2d"]
    fit = fit_copies([*others, *alone])
    assert fit is not None
    assert fit.values == pytest.approx(LINK, rel=1e-4)
    assert fit_copies(others) is None
    beside = [msgspec.structs.replace(s, latency_s=9 * s.latency_s, beside="h2d") for s in reductions()]
    found = fit_all_reduce([*beside, *reductions()])
    assert found is not None
    assert found.values == pytest.approx(RING, rel=1e-4)


@pytest.mark.parametrize("fit", [fit_copies, fit_host_memcpy, fit_all_reduce])
def test_nothing_measured_is_no_fit(fit):
    assert fit([]) is None
    assert fit(planted(shapes(("llama-2-7b",)))) is None


@pytest.mark.parametrize(
    ("op", "sizes", "have"),
    [
        # sizes of a piece, how many, least and most
        ("h2d", [1e6], "1 sizes, from 1e+06 to 1e+06"),
        ("d2h", [1e4, 1e8], "2 sizes, from 10000 to 1e+08"),
        ("host_memcpy", [1e6], "1 sizes, from 1e+06 to 1e+06"),
        ("all_reduce", [1e6, 4e6, 1.5e7], "3 sizes, from 1e+06 to 1.5e+07"),
    ],
)
def test_sizes_that_cannot_part_asking_from_moving_are_refused_by_name(op, sizes, have):
    fit = {"host_memcpy": fit_host_memcpy, "all_reduce": fit_all_reduce}.get(op, fit_copies)
    samples = [
        # Enough of the other direction does not help this one.
        *copies("h2d" if op == "d2h" else "d2h", launch_s=1e-6, bytes_per_s=1e10),
        *(Sample(op=op, latency_s=1e-3, tp=2, num_bytes=size) for size in sizes),
    ]
    with pytest.raises(UserError) as caught:
        fit(samples)
    assert str(caught.value) == (
        f"samples: op {op!r} has {have} bytes a piece: measure at least 3 sizes spanning a factor of 16, "
        "or leave the op out"
    )


def test_copies_that_only_ask_tell_no_rate(tmp_path):
    """Ten microseconds whatever the size: the rate could be anything, so no profile holds one."""
    same = [Sample(op="h2d", latency_s=1e-5, num_bytes=64.0 * 4**i) for i in range(6)]
    with pytest.raises(UserError, match="do not tell h2d_bytes_per_s"):
        fit_profile([*planted(shapes()), *same], tmp_path, HARDWARE, BASE, name="x", status="measured", provenance={})


def test_of_machines_that_timed_a_size_the_fastest_counts():
    reduces = [
        Sample(op="all_reduce", latency_s=s, tp=gpus, num_bytes=size)
        for gpus, size, s in ((4, 2e6, 3e-5), (2, 1e6, 2e-5), (2, 1e6, 1e-5), (2, 2e6, 4e-5))
    ]
    beside = Sample(op="all_reduce", latency_s=1e-6, tp=2, num_bytes=1e6, beside="d2h")
    assert all_reduce_points([*reduces, beside]) == {"2": [(1e6, 1e-5), (2e6, 4e-5)], "4": [(2e6, 3e-5)]}
    assert all_reduce_points([beside]) is None
