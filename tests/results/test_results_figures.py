"""The figures: files that are really pictures, whatever the runs hold, and the numbers that are drawn."""

import warnings

import numpy as np
import pandas as pd
import pytest
from matplotlib.image import imread
from small_results import lanes, scenario, small_result

import sim.results.figures.style
from sim.results.figures import FIGURES, FigureRun, write_figures
from sim.results.figures.data import held, waiting
from sim.results.figures.lanes import busy_shares
from sim.results.figures.memory import host_in_use_gib
from sim.results.series import COLUMNS

NAMES = ["ttft_tpot.png", "queueing.png", "memory.png", "lanes.png"]


def result_of(ttft_s=(), queue_s=(), **changes):
    means = {}
    if len(ttft_s):
        means = {"mean_ttft_ms": float(np.mean(ttft_s)) * 1e3, "mean_queue_ms": float(np.mean(queue_s)) * 1e3}
    pools = scenario(goodput=["ttft:500", "tpot:50"], num_gpu_blocks=100, num_cpu_blocks=50, block_bytes=2**30)
    return small_result(**(means | {"scenario": pools, "makespan_s": 40.0} | changes))


def series_of(rows, **columns):
    values = {name: np.zeros(rows) for name in COLUMNS} | {"time_s": np.arange(rows, dtype=float)}
    values |= {"gpu_free_blocks": np.full(rows, 100.0), "host_free_blocks": np.full(rows, 50.0)}
    return values | {name: np.asarray(column, dtype=float) for name, column in columns.items()}


def figure_run(label="p", ttft_s=(), tpot_s=(), queue_s=(), arrival_s=None, series=None, **changes):
    ttft, tpot, queue = (np.asarray(values, dtype=float) for values in (ttft_s, tpot_s, queue_s))
    arrival = np.asarray(arrival_s, dtype=float) if arrival_s is not None else None
    return FigureRun(label, result_of(ttft, queue, **changes), series, ttft, tpot, queue, arrival)


def busy_run(label, seed=0, size=200):
    """A run with a growing queue, a filling pool and lanes in use."""
    draw = np.random.default_rng(seed)
    arrival_s = np.sort(draw.uniform(0, 30, size))
    queue_s = arrival_s * draw.uniform(0, 1, size)
    series = series_of(
        300,
        time_s=np.linspace(0, 39, 300),
        num_decoding=draw.integers(0, 20, 300),
        num_waiting=draw.integers(0, 20, 300),
        num_swapped=draw.integers(0, 3, 300),
        gpu_free_blocks=np.linspace(100, 0, 300),
        gpu_allocated_blocks=np.linspace(0, 100, 300),
        host_free_blocks=np.linspace(50, 20, 300),
        compute_busy_s=np.linspace(0, 39, 300),
        d2h_busy_s=np.linspace(0, 3, 300),
    )
    return figure_run(
        label, queue_s + draw.uniform(0.02, 0.1, size), draw.uniform(0.02, 0.2, size), queue_s, arrival_s, series
    )


def drawn(folder, runs):
    """Draw with warnings as errors; the pictures' arrays by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        paths = write_figures(folder / "figures", runs)
    assert [path.name for path in paths] == NAMES
    assert sorted(path.name for path in (folder / "figures").iterdir()) == sorted(NAMES)
    return {path.name: imread(path) for path in paths}


def test_two_runs_give_four_pictures_of_the_right_size(tmp_path):
    pictures = drawn(tmp_path, [busy_run("vllm-recompute"), busy_run("layerkv", seed=1)])
    for picture in pictures.values():
        assert picture.shape[1] == 12 * 160  # 12 inches at 160 dpi
        assert picture.shape[0] > 700
        assert len(np.unique(picture[..., 0])) > 20


ONE_REQUEST = pd.DataFrame(
    {
        "status": ["completed"], "output_tokens": [9], "arrival_s": [0.0], "queue_s": [0.1], "ttft_s": [0.5],
        "tpot_s": [0.1],
    }
)  # fmt: skip
DEGENERATE = {
    "no completed request": [figure_run()],
    "empty series": [FigureRun.of_tables(result_of([0.5], [0.1]), ONE_REQUEST, pd.DataFrame(series_of(0)))],
    "all zero": [
        figure_run(
            ttft_s=[0.0] * 3, tpot_s=[0.0] * 3, queue_s=[0.0] * 3, arrival_s=[0.0] * 3, makespan_s=0.0,
            series=series_of(3, time_s=[0, 0, 0], gpu_free_blocks=[0, 0, 0], host_free_blocks=[0, 0, 0]),
        )
    ],
    "distributions only": [
        FigureRun(
            "p", result_of([1.0, 9.0], [0.5, 5.0]), None,
            ttft_s=np.array([1.0, 9.0]), tpot_s=np.array([0.1]), queue_s=np.array([0.5, 5.0]),
        )
    ],
    "odd names": [
        busy_run(f"layerkv:slo_aware=false,drop_irrecoverable=false,horizon_steps={i},$x_{{$ 数", seed=i)
        for i in range(2)
    ],
}  # fmt: skip


@pytest.mark.parametrize("case", DEGENERATE)
def test_degenerate_runs_are_drawn_without_warnings(tmp_path, monkeypatch, case):
    # What is looked at is whether they draw, and small ones draw faster.
    monkeypatch.setattr(sim.results.figures.style, "DPI", 40)
    drawn(tmp_path, DEGENERATE[case])


def test_host_memory_counts_whole_blocks_of_layer_groups():
    # 3,200 units on the GPU are 100 blocks, so a block is 32 units; of 50 host blocks 1,600 - 1,280 units are in use.
    series = series_of(2, gpu_free_blocks=[3200, 0], gpu_allocated_blocks=[0, 3200], host_free_blocks=[1600, 1280])
    assert host_in_use_gib(figure_run(series=series)).tolist() == [0.0, 10.0]


def test_lane_is_busy_when_iterations_ran_and_later_where_booked_ahead():
    # Iterations start at 0, 2 and 4 s; their totals are 2, 2 (nothing ran from 2 to 4) and, at the end (6 s), 5.
    series = series_of(3, time_s=[0, 2, 4], compute_busy_s=[2, 2, 3], h2d_busy_s=[6, 6, 6])
    run = figure_run(series=series, makespan_s=6.0, lanes=lanes(compute=3.0))
    edges_s = np.array([0.0, 2.0, 4.0, 6.0])
    assert busy_shares(run, run.series, "compute_busy_s", "GPU compute", edges_s).tolist() == [1.0, 0.0, 0.5]
    # Six seconds of copies booked in the first two fill all six.
    assert busy_shares(run, run.series, "h2d_busy_s", "PCIe host to device", edges_s).tolist() == [1.0, 1.0, 1.0]


def test_requests_wait_from_arrival_to_first_scheduled_whatever_the_samples_say():
    # Two wait from 1 s, one of them until 2 s and one until 4 s, when a third comes that is scheduled at once.
    run = figure_run(ttft_s=[2, 4, 1], queue_s=[1, 3, 0], arrival_s=[1, 1, 4], series=series_of(5))
    times_s, number = waiting(run)
    assert (times_s.tolist(), number.tolist()) == ([1, 2, 4], [2, 1, 0])
    titles = [ax.get_title(loc="left") for ax in FIGURES["memory.png"]([run]).axes]
    assert "Requests waiting for their prefill: peak 2" in titles
    long = figure_run(series=series_of(2, num_waiting=[0, 7]))
    assert waiting(long)[1].tolist() == [0, 7]
    assert waiting(figure_run()) is None


def test_every_lane_is_said_to_be_used_or_not_by_the_policy_that_uses_it():
    used = figure_run("b", series=series_of(3, d2h_busy_s=[0, 1, 2]), lanes=lanes(d2h=2.0))
    axes = FIGURES["lanes.png"]([figure_run("a", series=series_of(3)), used]).axes
    found = [ax.get_title(loc="left") for ax in axes[:2]]
    assert found == ["GPU compute (never used: PCIe host to device)", "PCIe device to host"]
    assert [ax.get_title(loc="right").replace("\xa0", " ") for ax in axes] == [
        "never used", "never used", "never used", "busy 5 % of the time",
    ]  # fmt: skip
    # Policies are named at the right, where no scale is.
    assert [(ax.yaxis.get_label_position(), ax.get_ylabel()) for ax in axes[1::2]] == [("right", "a"), ("right", "b")]


@pytest.mark.parametrize(("ttft_ms", "unit"), [(999.9, "ms"), (1000.0, "s")])
def test_bars_of_a_second_or_more_are_in_seconds(ttft_ms, unit):
    run = figure_run(mean_ttft_ms=ttft_ms, mean_queue_ms=400.0)
    bars = FIGURES["queueing.png"]([run]).axes[0]
    assert bars.get_xlabel() == f"mean TTFT, {unit}"
    assert sum(patch.get_width() for patch in bars.patches) == pytest.approx(ttft_ms / (1e3 if unit == "s" else 1.0))


def test_a_column_is_held_from_sample_to_sample_and_pools_are_free_before_the_first():
    """The first iteration, at 1 s, has taken 3 GPU blocks and given 1 back: 10 were free before, 8 after it."""
    engine = {name: np.array([0.0, 0.0]) for name in COLUMNS} | {
        "time_s": np.array([1.0, 2.0]), "gpu_free_blocks": np.array([8.0, 4.0]),
        "host_free_blocks": np.array([5.0, 6.0]), "gpu_allocated_blocks": np.array([3.0, 7.0]),
        "gpu_released_blocks": np.array([1.0, 2.0]),
        "num_decoding": np.array([2.0, 3.0]),
    }  # fmt: skip
    times = np.array([0.5, 1.0, 1.5, 2.0, 9.0])
    assert held(engine, "gpu_free_blocks", times).tolist() == [10.0, 8.0, 8.0, 4.0, 4.0]
    assert held(engine, "host_free_blocks", times).tolist() == [5.0, 5.0, 5.0, 6.0, 6.0]
    assert held(engine, "num_decoding", times).tolist() == [0.0, 2.0, 2.0, 3.0, 3.0]
    nothing = {name: np.empty(0) for name in engine}
    assert held(nothing, "num_decoding", times).tolist() == [0.0] * 5
