"""`compare --seeds`: which differences are more than chance."""

from math import exp, sqrt

import msgspec
import pytest
from small_results import flags

from kvtwin import main
from sim.results.schema import OVER_DRAWS, Comparison
from sim.study import over_draws
from sim.study.intervals import of_ratio
from sim.study.points import Outcome

TRAFFIC = {"workload": "sharegpt", "num_prompts": 40, "request_rate": 20.0, "num_gpu_blocks_override": 200}
TRAFFIC |= {"max_model_len": 1024, "quiet": True}
POLICIES = ["--policy", "vllm-recompute", "layerkv"]


def compared(folder, *words, seed=1, status=0) -> Comparison:
    asked = [*POLICIES, *flags(**TRAFFIC, seed=seed), "--no-figures", *words, "--out", str(folder)]
    assert main(["compare", *asked]) == status
    return msgspec.json.decode((folder / "comparison.json").read_bytes(), type=Comparison)


def test_a_ratio_over_draws_by_hand():
    # Logarithms 0.1, 0.2, 0.3: mean 0.2, standard error 0.1 / sqrt(3), Student's t of two degrees 4.3027.
    found = of_ratio([exp(0.1), 2 * exp(0.2), exp(0.3)], [1.0, 2.0, 1.0])
    half = 4.302653 * 0.1 / sqrt(3)
    assert found == pytest.approx((exp(0.2), exp(0.2 - half), exp(0.2 + half)), rel=1e-6)


def test_each_draw_is_a_comparison_of_its_seed(tmp_path):
    found = compared(tmp_path / "all", "--seeds", "3")
    alone = [compared(tmp_path / str(seed), seed=seed) for seed in (1, 2, 3)]
    assert found.draws == 3 and found.metrics == alone[0].metrics
    for name in ("mean_ttft_ms", "p99_tpot_ms", "output_throughput"):
        first, other = ([one.metrics[label][name] for one in alone] for label in found.policies)
        spread = found.over_draws["layerkv"][name]
        assert (spread.ratio, spread.low, spread.high) == pytest.approx(of_ratio(other, first))
    # No SLOs, no share of them.
    assert found.over_draws["layerkv"].keys() == OVER_DRAWS.keys() - {"goodput_attainment"}
    assert "Over 3 draws of the traffic, layerkv beside vllm-recompute" in (tmp_path / "all/comparison.md").read_text()


def test_where_there_is_no_other_draw_nothing_runs(tmp_path, capsys):
    at_once = tmp_path / "t.csv"
    at_once.write_text("arrival_s,prompt_tokens,output_tokens\n" + "0,30,5\n" * 3)
    for words, told in (
        ([*POLICIES, *flags(**TRAFFIC), "--seeds", "1"], "1 tells nothing of chance"),
        (["--policy", "layerkv", *flags(**TRAFFIC), "--seeds", "2"], "one policy differs from none"),
        ([*POLICIES, "--trace", str(at_once), "--seeds", "3"], "requests that arrive at one moment are not resampled"),
    ):
        assert main(["compare", *words, "--out", str(tmp_path / "out")]) == 2
        assert f"--seeds: {told}" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_draw_that_fails_costs_no_results(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(over_draws, "outcomes", lambda tasks, _: iter([Outcome(tasks[1].key, error="lost")]))
    found = compared(tmp_path, "--seeds", "2")
    assert found.draws == 1 and not found.over_draws and found.metrics
    assert "--seeds: layerkv on draw 2: lost; the policies are compared on one draw" in capsys.readouterr().err
