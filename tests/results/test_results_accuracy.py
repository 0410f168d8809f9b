"""Intervals drawn from measured rows: by hand, on rows left out, and of runs that no measured row is like."""

from dataclasses import replace
from math import exp, isfinite, log

import pytest
from accuracy_coverage import coverage, left_out
from msgspec import UNSET
from small_results import finished
from vllm_closed_loop import SERVED

from sim.options.policies import parse_policy
from sim.options.scenario import Scenario
from sim.results.accuracy import LEAST, METRICS, Kind, Row, kind_of, measured_rows, nearest_error
from sim.results.report import accuracy_lines
from sim.results.result import assemble
from sim.run.prepare import prepare
from sim.specs.hardware import built_in_hardware

FEW_ROWS = 50
METRIC = "mean_ttft_ms"
HERE = Kind("dense", "h100", "16 bits", "group", "some")
SERVER = Scenario(
    workload="sharegpt", num_prompts=40, request_rate=4.0, model="llama-3.1-8b", gpu="h100", max_model_len=4096, seed=1
)


def rows_of(*logs, kind=HERE, server="server"):
    return [Row(f"{server}-{i}", 1, kind, {METRIC: exp(one)}) for i, one in enumerate(logs)]


def test_the_factor_is_the_conformal_quantile_by_hand():
    """Nine rows and the run make ten: 80 % of them is the eighth, 0.8."""
    rows = rows_of(0.1, -0.2, 0.3, -0.4, 0.5, -0.6, 0.7, -0.8, 0.9)
    error = nearest_error(rows, HERE, METRIC)
    assert error is not None
    assert error.factor == pytest.approx(exp(0.8))
    assert error.median_ratio == pytest.approx(exp(0.1))
    assert (error.rows, error.configurations) == (9, 9)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"tp": 2}, HERE),
        ({}, HERE._replace(parallelism="one GPU")),
        ({"tp": 2, "quantization": "fp8"}, HERE._replace(weights="fp8")),
        ({"model": "qwen3-30b-a3b", "data_parallel_size": 2}, HERE._replace(layers="experts", parallelism="ranks")),
    ],
)
def test_a_run_is_like_rows_of_its_layers_weights_and_layout(changes, kind):
    setup = prepare(replace(SERVER, **changes), *parse_policy("vllm-v1", {}))
    assert kind_of(setup, 20.0) == kind


def test_many_rows_of_one_configuration_weigh_as_one():
    rows = rows_of(*[0.1] * 9)
    crowd = rows + [row for row in rows_of(3.0) for _ in range(100)]
    error = nearest_error(
        [row._replace(server="crowd") if row.ratios[METRIC] > 2 else row for row in crowd], HERE, METRIC
    )
    assert error is not None
    assert log(error.factor) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("kind", "alike"),
    [
        (HERE, "dense, h100, 16 bits, group, some"),
        (HERE._replace(load="many"), "dense, h100, 16 bits, group"),
        (HERE._replace(parallelism="one GPU"), "dense, h100, 16 bits"),
        (HERE._replace(weights="fp8"), "dense, h100"),
        (HERE._replace(gpu="h200"), "dense"),
    ],
)
def test_what_is_unlike_leaves_the_rows_that_share_the_rest(kind, alike):
    error = nearest_error(rows_of(*[0.1] * LEAST), kind, METRIC)
    assert error is not None
    assert error.alike == alike


def test_the_factor_holds_for_each_kind_that_the_rows_are_of_by_hand():
    """Of 22 rows and the run 80 % are the nineteenth, 0.1; but the two on B200 are 0.7."""
    rows = rows_of(*[0.1] * 20) + rows_of(0.7, 0.7, kind=HERE._replace(gpu="b200"), server="other")
    error = nearest_error(rows, HERE._replace(gpu="h200"), METRIC)
    assert error is not None
    assert error.factor == pytest.approx(exp(0.7))
    assert error.alike == "dense; as far off as b200"


@pytest.mark.parametrize("rows", [rows_of(*[0.1] * (LEAST - 1)), rows_of(*[0.1] * 20, kind=HERE._replace(layers="x"))])
def test_too_few_like_configurations_give_no_interval(rows):
    assert nearest_error(rows, HERE, METRIC) is None


def test_shipped_rows_are_of_servers_that_the_script_knows_and_say_nothing_twice():
    """The file is made by `validation/accuracy_rows.py`; it is not edited by hand."""
    rows = measured_rows()
    found = {(row.server, row.kind.gpu) for row in rows}
    of_vllm = {name: served for name, served in SERVED.items() if not served.sglang}
    assert {(name, served.columns["system"].removesuffix("_sxm")) for name, served in of_vllm.items()} <= found
    assert {row.kind.gpu for row in rows} <= set(built_in_hardware())
    assert {row.kind.layers for row in rows} == {"dense", "experts"}
    for row in rows:
        assert set(row.ratios) <= set(METRICS)
        assert all(ratio > 0.0 and isfinite(ratio) for ratio in row.ratios.values())
        # Little's law, with as many clients on both sides.
        if "output_throughput" in row.ratios:
            assert row.ratios["output_throughput"] * row.ratios["mean_e2el_ms"] == pytest.approx(1.0, abs=2e-3)


@pytest.mark.parametrize("metric", ["mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms", "output_throughput"])
@pytest.mark.parametrize(
    "unit", [lambda row: row.configuration, lambda row: row.server], ids=["configuration", "server"]
)
def test_intervals_hold_on_what_was_left_out(metric, unit):
    """80 % is meant, of each GPU's dense rows and rows with experts: a percent or two less is chance."""
    found = left_out(measured_rows(), metric, unit)
    assert len(found) > 700
    assert coverage(found, metric) <= 0.93
    for group in {row.kind[:2] for row, _ in found}:
        some = [(row, error) for row, error in found if row.kind[:2] == group]
        assert len(some) < FEW_ROWS or coverage(some, metric) >= 0.78, group


def test_the_wider_of_rows_of_the_gpu_and_of_the_format_counts():
    """On its GPU 0.1, in its format 0.7; the first alone would know nothing of the format's kernels."""
    rows = rows_of(*[0.1] * 20, kind=HERE._replace(weights="int4"))
    rows += rows_of(*[0.7] * 20, kind=HERE._replace(gpu="b200"), server="other")
    error = nearest_error(rows, HERE, METRIC)
    assert error is not None
    assert (error.factor, error.alike) == (pytest.approx(exp(0.7)), "dense, 16 bits")


def test_a_run_like_measured_servers_has_its_metrics_within_their_intervals():
    result = assemble(finished("vllm-v1", options=SERVER))
    assert result.accuracy is not UNSET
    intervals = result.accuracy.intervals
    assert {"mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "mean_e2el_ms"} <= set(intervals)
    # Tokens/s are those of the traffic.
    assert "output_throughput" not in intervals
    for name, one in intervals.items():
        assert one.low < getattr(result, name) < one.high
        assert one.alike.startswith("dense")
    assert any("configurations: dense, h100" in line for line in accuracy_lines(result))
    assert max(map(len, accuracy_lines(result))) <= 80


@pytest.mark.parametrize(
    ("policy", "changes", "why"),
    [
        ("vllm-recompute", {}, "too few measured rows of vllm-recompute"),
        ("vllm-v1:order=lpm", {}, "too few measured rows of vllm-v1:order=lpm"),
        ("vllm-v1:kv-offloading-size=4", {}, "too few measured rows of vllm-v1:kv-offloading-size=4"),
        ("vllm-v1", {"gpu": "l40s"}, "no measured rows of vllm-v1 on l40s"),
        ("vllm-v1", {"sparse_attention": "streaming-llm:window=512"}, "sparse attention"),
        ("vllm-v1:enable-lora=on", {}, "no measured rows of adapters"),
        ("vllm-v1", {"pipeline_parallel_size": 2}, "no measured rows of pipelines"),
        ("vllm-v1:max-tokens-per-image=576", {}, "no measured rows of images"),
        ("vllm-v1", {"profile": "h100-derived"}, "shipped constants alone"),
        ("vllm-v1", {"autoscale": "hpa:target=4,max=2"}, "autoscaling"),
    ],
)
def test_a_run_that_no_measured_row_is_like_says_so_in_a_line(policy, changes, why):
    result = assemble(finished(policy, options=replace(SERVER, **changes)))
    assert result.accuracy is not UNSET
    assert result.accuracy.intervals == {}
    (line,) = accuracy_lines(result)
    assert why in line


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"replicas": 2}, "single engines"), ({"request_rate": 400.0, "num_prompts": 400}, "queue grew")],
)
def test_where_requests_wait_for_more_than_an_engine_tpot_alone_has_an_interval(changes, why):
    result = assemble(finished("vllm-v1", options=replace(SERVER, **changes)))
    assert result.accuracy is not UNSET
    assert set(result.accuracy.intervals) == {"mean_tpot_ms"}
    assert why in str(result.accuracy.unknown)
