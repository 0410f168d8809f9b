"""`--async-scheduling`: one engine, and several."""

import json
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin import main
from sim.errors import InvariantError
from sim.options.policies import parse_policy
from sim.options.scenario import Scenario
from sim.results.result import assemble
from sim.run.prepare import prepare
from sim.run.runs import Recording
from sim.run.simulate import build_run, execute
from sim.study.axes import read_study
from sim.systems.vllm_v1 import VllmV1
from traces.request import Request

BASE = ["run", "--workload", "fixed", "--num-prompts", "20", "--input-len", "40", "--output-len", "30", "--quiet"]


@pytest.mark.parametrize(
    "more",
    [["--replicas", "2"], ["--policy", "vllm-v1:stage=hand-over", "--prefill-replicas", "1", "--decode-replicas", "1"]],
)
def test_several_engines_hide_their_host_time_too(tmp_path, more):
    tpot_ms = {}
    more = [*more, "--link-gbps", "100"] if "--prefill-replicas" in more else more
    for flag in ("--async-scheduling", "--no-async-scheduling"):
        words = [*BASE, *more, flag, "--request-rate", "20", "--out", str(tmp_path / flag)]
        assert main(words) == 0
        result = json.loads((tmp_path / flag / "result.json").read_text())
        assert result["completed"] == 20
        tpot_ms[flag] = result["mean_tpot_ms"]
    assert tpot_ms["--async-scheduling"] < tpot_ms["--no-async-scheduling"]


def test_what_schedules_ahead_and_stands_still_is_an_error(monkeypatch):
    run = build_run(prepare(Scenario(workload="fixed"), "vllm-v1", VllmV1()), [Request(0, 0.5, 20, 3)])
    assert run.engines[0].engine.schedules_ahead
    monkeypatch.setattr(type(run.engines[0].engine), "schedule", lambda engine, now_s: None)
    with pytest.raises(InvariantError) as caught:
        execute(run)
    assert str(caught.value) == "the engine stands still at 0.500026 s with requests unfinished"


# -- left open -------------------------------------------------------------------------------------------------------

SMALL = Scenario(workload="fixed", num_prompts=12, input_len=40, output_len=20, request_rate=20.0)
LINEAR = {"form": "linear", "prefill": [0.01, 1e-5, 0.0], "decode": [0.02, 1e-5, 1e-7], "swap_s_per_block": 1e-3}


@pytest.fixture(scope="module")
def linear(tmp_path_factory):
    path = tmp_path_factory.mktemp("linear") / "linear.json"
    path.write_text(json.dumps(LINEAR))
    return str(path)


def chosen(policy="vllm-v1", **options):
    setup = prepare(replace(SMALL, **options), *parse_policy(policy, {}))
    return setup.policy.schedules_ahead, setup.engine_profile and setup.engine_profile.name


@given(
    lengths=st.lists(st.tuples(st.integers(1, 900), st.integers(1, 60)), min_size=1, max_size=12),
    rate=st.sampled_from([0.5, 8.0, 200.0]),
    blocks=st.sampled_from([60, 200, None]),
    seqs=st.sampled_from([2, 256]),
    is_linear=st.booleans(),
    jump=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_left_open_it_is_what_the_prices_can_hide(linear, lengths, rate, blocks, seqs, is_linear, jump):
    """With prices of a GPU as `--async-scheduling`, with linear ones as `--no-async-scheduling`: bit for bit."""
    scenario = replace(
        SMALL, num_gpu_blocks_override=blocks, max_model_len=960, max_num_seqs=seqs, max_num_batched_tokens=512,
        profile=linear if is_linear else None,
    )  # fmt: skip
    requests = [Request(i, i / rate, prompt, output) for i, (prompt, output) in enumerate(lengths)]

    def result(asked):
        setup = prepare(scenario, "vllm-v1", VllmV1(async_scheduling=asked))
        return assemble(execute(build_run(setup, requests, keep=Recording(detailed=True), jump=jump)))

    open_, same, other = (msgspec.json.encode(result(asked)) for asked in (None, not is_linear, is_linear))
    assert open_ == same != other


def test_it_is_decided_as_vllm_does(linear):
    assert chosen() == (True, "vllm-v1-async")
    # An engine that is named says how it schedules.
    assert chosen(engine_profile="vllm-v1") == (False, "vllm-v1")
    assert chosen(engine_profile="vllm-v1-async") == (True, "vllm-v1-async")
    assert chosen("vllm-v1:async-scheduling=false") == (False, "vllm-v1")
    # vLLM's platform for CPUs turns it off.
    assert chosen(gpu="cpu") == (False, "vllm-v1")
    # Nothing to hide.
    assert chosen(profile=linear) == (False, None)
    assert chosen(cost_form="paper") == (False, None)
    assert chosen("vllm-v1:async-scheduling=true", profile=linear) == (True, None)


def test_other_systems_with_those_batches_do_as_it_does():
    assert chosen("batchllm") == chosen("sarathi:batching=unified") == (True, "vllm-v1-async")
    assert chosen("sarathi:batching=unified,async-scheduling=false") == (False, "vllm-v1")
    assert chosen("adaptive") == (True, "vllm-v1-async")
    assert chosen("adaptive:async-scheduling=false") == (False, "vllm-v1")
    assert chosen("layerkv:batching=paced,order=triage,eviction=park,memory=paged,stage=direct")[0]
    assert chosen("vllm-v1:batching=sarathi") == chosen("sarathi") == (False, "vllm-v1-async")


def test_one_flag_is_for_all_that_have_it(tmp_path, capsys):
    words = [*BASE, "--no-async-scheduling", "--quiet"]
    for name in ("vllm-v1", "adaptive", "batchllm"):
        assert main([*words, "--policy", name, "--out", str(tmp_path / name)]) == 0
        result = json.loads((tmp_path / name / "result.json").read_text())
        assert result["scenario"]["policy_options"]["async_scheduling"] is False
    capsys.readouterr()
    assert main([*words, "--policy", "sarathi", "--out", str(tmp_path / "other")]) == 2
    assert "--async-scheduling: an option of vllm-v1, which --policy does not name" in capsys.readouterr().err
    study = {"async-scheduling": False, "policy": ["adaptive", "batchllm"], "model": "llama-2-7b", "gpu": "l20"}
    assert read_study({"workload": "fixed", **study, "sweep": {"grid": {"request-rate": [1, 2]}}}, "sweep", "s").points


def test_both_pools_are_scheduled_alike(linear):
    pools = {"prefill_replicas": 1, "decode_replicas": 1, "link_gbps": 100.0}
    for more, ahead in (({}, True), ({"decode_profile": linear}, False), ({"prefill_profile": linear}, False)):
        setup = prepare(replace(SMALL, **pools, **more), *parse_policy("vllm-v1:stage=hand-over", {}))
        assert setup.decode is not None
        assert [setup.policy.schedules_ahead, setup.decode.policy.schedules_ahead] == [ahead] * 2


def test_the_result_holds_what_was_decided(tmp_path):
    words = [*BASE, "--request-rate", "20", "--out", str(tmp_path)]
    for more, decided in ([], True), (["--engine-profile", "vllm-v1"], False):
        assert main([*words, *more]) == 0
        result = json.loads((tmp_path / "result.json").read_text())
        assert result["scenario"]["policy_options"]["async_scheduling"] is decided
        assert "async" not in (tmp_path / "scenario.toml").read_text()
