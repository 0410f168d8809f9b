"""Copies and all-reduces: the cost of asking and the rate are told apart, or the samples are refused by name."""

import msgspec
import numpy as np
import pytest
from calib_small import A100, BASE, HARDWARE, RING, copies, noise, planted, shapes, timed
from measure_small import GPU

from calib.copies import (
    all_reduce_points,
    all_reduce_s,
    copy_s,
    fault_of_copies,
    fit_all_reduce,
    fit_copies,
    fit_host_memcpy,
    plain_copies,
)
from calib.fit import fit_profile
from calib.measure.plan import make_plan
from calib.samples import Sample
from sim.cost.profile import Constant, load_profile
from sim.cost.roofline import RooflineCost
from sim.engine.changes import Direction
from sim.errors import UserError
from sim.specs.models import load_model

LINK = {
    "copy_lone_s": 7e-6,
    "copy_setup_s": 5e-6,
    "copy_launch_s": 2.5e-6,
    "h2d_bytes_per_s": 2.5e10,
    "d2h_bytes_per_s": 2.2e10,
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
    untimed = [Sample(op="all_reduce", latency_s=1.0, tp=g, num_bytes=n) for g, n in grid]
    return timed(untimed, seconds)


def test_a_copy_is_a_set_up_and_then_pieces_times_asking_or_bytes_over_the_rate():
    """Fewer than four pieces are asked for one by one, 8 us each; where that is not known they cost what others do."""
    samples = [
        Sample(op="h2d", latency_s=1.0, num_bytes=1e9, num_copies=4),
        Sample(op="d2h", latency_s=1.0, num_bytes=3e6),
        Sample(op="d2h", latency_s=1.0, num_bytes=3e4, num_copies=3),
        Sample(op="d2h", latency_s=1.0, num_bytes=3e6, num_copies=100),
    ]
    constants = {"copy_launch_s": 1e-5, "h2d_bytes_per_s": 2e10, "d2h_bytes_per_s": 1e10}
    assert copy_s(constants, samples).tolist() == pytest.approx([0.05, 0.0003, 3e-5, 0.001])
    costs = constants | {"copy_lone_s": 8e-6, "copy_setup_s": 2e-6}
    assert copy_s(costs, samples).tolist() == pytest.approx([0.050002, 0.000308, 2.4e-5, 0.001002])
    # As the simulator prices them.
    profile = load_profile("a100-80g-derived")
    found = {name: Constant(value, None, "s", "test") for name, value in costs.items()}
    profile = msgspec.structs.replace(profile, constants=profile.constants | found)
    cost = RooflineCost(load_model("llama-2-7b"), HARDWARE, profile, 1)
    for sample, expected in zip(samples, copy_s(costs, samples), strict=True):
        assert cost.copy_s(sample.num_bytes, sample.num_copies, Direction(sample.op)) == pytest.approx(expected)
    assert cost.copy_s(0.0, 0, Direction.D2H) == 0.0


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


def test_exact_samples_give_their_constants_back():
    """One direction alone those of that direction."""
    assert fit_copies(both_ways()).values == pytest.approx(LINK, rel=1e-4)
    of_one = {name: value for name, value in LINK.items() if name != "h2d_bytes_per_s"}
    assert fit_copies([s for s in both_ways() if s.op == "d2h"]).values == pytest.approx(of_one, rel=1e-4)
    in_host = fit_host_memcpy(copies("host_memcpy", launch_s=5e-7, bytes_per_s=8e9))
    assert in_host.values["host_memcpy_bytes_per_s"] == pytest.approx(8e9, rel=1e-4)
    assert fit_all_reduce(reductions()).values == pytest.approx(RING, rel=1e-4)


@pytest.mark.parametrize(("gpus", "has_launch"), [((4,), False), ((2, 4), True)])
def test_a_launch_is_told_from_latency_where_groups_of_two_sizes_were_measured(gpus, has_launch):
    assert ("allreduce_launch_s" in fit_all_reduce(reductions(gpus)).values) == has_launch


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
    assert fit_copies([*others, *alone]).values == pytest.approx(LINK, rel=1e-4)
    assert fit_copies(others) is None
    beside = [msgspec.structs.replace(s, latency_s=9 * s.latency_s, beside="h2d") for s in reductions()]
    assert fit_all_reduce([*beside, *reductions()]).values == pytest.approx(RING, rel=1e-4)


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
    report = fit_profile(
        [*planted(shapes(("llama-2-7b",))), *same], tmp_path, HARDWARE, BASE, name="x", status="measured", provenance={}
    )
    # What else was measured is kept.
    assert report.profile.value("flops_per_s") == pytest.approx(A100["flops_per_s"], rel=1e-3)
    assert "h2d_bytes_per_s" in report.carried and not any(name.startswith("copy") for name in report.estimates)
    assert report.profile.provenance["copies"].startswith(
        "not fitted, taken from the base: they do not tell h2d_bytes_per_s"
    )


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("lone_us", [2, 10, 20])
def test_the_grids_tell_a_fast_links_rate_from_what_asking_costs(quick, lone_us):
    """A lone copy's fixed cost was once taken for a lower rate: 0.73 of 55 GB/s by the quick grid."""
    true = LINK | {"copy_lone_s": lone_us * 1e-6, "h2d_bytes_per_s": 5.5e10, "d2h_bytes_per_s": 5.5e10}
    true["copy_launch_s"] = 0.7e-6
    plan = make_plan({}, GPU, quick=quick, element_bytes=2, ops=["h2d", "d2h"])
    points = [p for p in plan.points if p.memory == "pinned"]
    rng = np.random.default_rng(lone_us)
    exact = copy_s(true, [p.sample([1.0]) for p in points])
    samples = [p.sample((s * rng.normal(1.0, 0.01, 9)).tolist()) for p, s in zip(points, exact, strict=True)]
    fit = fit_copies(samples)
    assert not fault_of_copies(samples, fit)
    assert fit.values == pytest.approx(true, rel=0.15)
    assert fit.values["d2h_bytes_per_s"] == pytest.approx(5.5e10, rel=0.02)


def test_of_machines_that_timed_a_size_the_fastest_counts():
    reduces = [
        Sample(op="all_reduce", latency_s=s, tp=gpus, num_bytes=size)
        for gpus, size, s in ((4, 2e6, 3e-5), (2, 1e6, 2e-5), (2, 1e6, 1e-5), (2, 2e6, 4e-5))
    ]
    beside = Sample(op="all_reduce", latency_s=1e-6, tp=2, num_bytes=1e6, beside="d2h")
    assert all_reduce_points([*reduces, beside]) == {"2": [(1e6, 1e-5), (2e6, 4e-5)], "4": [(2e6, 3e-5)]}
    assert all_reduce_points([beside]) is None
