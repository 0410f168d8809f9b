"""What was asked and would do nothing, contradicts itself or cannot be is said: what never comes is not waited for."""

import json

import pytest

import kvtwin
from kvtwin import Scenario, UserError
from sim.options.policies import options_of
from sim.specs.models import load_model
from sim.systems import POLICIES

SMALL = Scenario(workload="fixed", num_prompts=3, input_len=20, output_len=3, gpu="l20")
POOLS = {"prefill_replicas": 1, "decode_replicas": 1, "link_gbps": 100.0}


def with_(**values):
    return Scenario(**{"workload": "fixed", "num_prompts": 3, "input_len": 20, "output_len": 3, "gpu": "l20", **values})


@pytest.mark.parametrize(
    ("policy", "told", "active"),
    [
        ("vllm-v1:store-threshold=3", "store-threshold=3 does nothing without kv-offloading-size", "cpu-chunks=4"),
        ("vllm-v1:spec-tokens=2", "spec-tokens=2 does nothing without spec-method",
         "spec-method=ngram,acceptance-rate=1"),
        ("vllm-v1:long-prefill-token-threshold-adaptive=true", "does nothing without long-prefill-token-threshold",
         "long-prefill-token-threshold=9"),
        ("radix:lpm-longest=5,schedule-policy=fcfs", "lpm-longest=5 does nothing without schedule-policy=lpm", None),
        ("cachedattention:disk-block-us=9,disk-space=0", "disk-block-us=9.0 does nothing without disk-space", None),
        ("mooncake:tbt-slo-ms=9", "tbt-slo-ms=9.0 does nothing without rejection=early or", "rejection=early"),
        ("splitwise:max-pending-tokens=9", "max-pending-tokens=9 does nothing without mixed-pool", "mixed-pool=true"),
        ("layerkv:predictor-accuracy=0.5", "predictor-accuracy=0.5 does nothing without predictor=bucket",
         "predictor=bucket"),
        ("layerkv:drop-irrecoverable=false,slo-aware=false", "does nothing without slo-aware", None),
        ("layerkv:tpot-slo-ms=50,slo-aware=false", "does nothing without slo-aware", None),
        ("ellm:threads=512,fused=false", "threads=512 does nothing without fused", None),
        ("adaptive:predictor-accuracy=0.5,predictor=none", "does nothing without predictor=bucket", None),
        ("sglang:hicache-ratio=3", "does nothing without enable-hierarchical-cache", "enable-hierarchical-cache=true"),
        ("sglang:disable-priority-preemption=true", "does nothing without enable-priority-scheduling",
         "enable-priority-scheduling=true"),
        ("sglang:mamba-track-interval=64", "mamba-track-interval=64 does nothing without a model whose layers keep a",
         None),
        ("sglang:swa-full-tokens-ratio=0.5", "does nothing without a model whose layers with a window have a pool",
         None),
    ],
)  # fmt: skip
def test_options_that_do_nothing_are_refused_and_others_are_not(policy, told, active):
    """A run with the option beside what it lacks is made, and one with that alone; so is one of the other options."""
    scenario = with_(**POOLS) if policy.startswith(("mooncake", "splitwise")) else SMALL
    with pytest.raises(UserError) as caught:
        kvtwin.simulate(scenario, policy)
    assert told in str(caught.value) and str(caught.value).endswith("; give that, or leave it out")
    name, _, options = policy.partition(":")
    others = options.partition(",")[2]
    for takes in filter(None, (f"{policy},{active}" if active else None, f"{name}:{others}")):
        assert not any("does nothing" in warning for warning in kvtwin.simulate(scenario, takes).result.warnings)


def test_every_option_that_acts_only_with_others_names_an_attribute_of_its_own_options():
    for kind in POLICIES.values():
        for option in options_of(kind):
            if (only := option.field.metadata.get("only")) is not None:
                assert isinstance(only.holds(kind(), load_model(SMALL.model)), bool), option.full_name


def test_where_one_of_several_runs_takes_an_option_the_others_leave_it(tmp_path, capsys):
    """As policies that are compared, as cells of a sweep and as candidates; where none does, nothing is run."""
    words = ["--workload", "fixed", "--num-prompts", "3", "--input-len", "20", "--output-len", "3", "--gpu", "l20"]
    words += ["--vllm-v1-store-threshold", "3"]
    two = ["vllm-v1", "vllm-v1:kv-offloading-size=1"]
    out = ["--out", str(tmp_path / "out"), "--quiet"]
    assert kvtwin.main(["compare", *words, "--policy", two[0], "--policy", two[1], *out]) == 0
    assert kvtwin.main(["compare", *words, "--policy", two[0], "--policy", "vllm-recompute", *out]) == 2
    assert "--policy vllm-v1: store-threshold=3 does nothing without kv-offloading-size" in capsys.readouterr().err
    study = vars(SMALL) | {"vllm-v1-store-threshold": 3}
    study = {name: value for name, value in study.items() if value not in (None, ())}
    axes = {"grid": {"kv-offloading-size": [0, 1]}}
    cells = kvtwin.sweep(study | {"sweep": axes}, tmp_path / "s", jobs=1).table
    without = {name: value for name, value in study.items() if name != "vllm-v1-store-threshold"}
    alone = kvtwin.sweep(without | {"sweep": axes}, tmp_path / "a", jobs=1).table
    assert cells["mean_ttft_ms"][0] == alone["mean_ttft_ms"][0], "as if left out"
    for section in ("sweep", "tune"):
        asked = {"slo": ["p99_ttft_ms:100"]} if section == "tune" else {}
        with pytest.raises(UserError, match="store-threshold=3 does nothing"):
            getattr(kvtwin, section)(study | {section: {"grid": {"max-num-seqs": [8]}} | asked}, tmp_path / "n", jobs=1)


def test_a_flag_and_a_policys_text_that_differ_are_refused(tmp_path, capsys):
    words = [
        "run", "--workload", "fixed", "--num-prompts", "3", "--gpu", "l20", "--out", str(tmp_path / "out"), "--quiet",
    ]  # fmt: skip
    words += ["--policy", "layerkv:threshold=0.1"]
    assert kvtwin.main([*words, "--layerkv-threshold", "0.2"]) == 2
    told = "--layerkv-threshold: 0.2 is what no policy has: --policy layerkv:threshold=0.1 says 0.1; give one of them"
    assert told in capsys.readouterr().err
    assert kvtwin.main([*words, "--layerkv-threshold", "0.10"]) == 0


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"mean_e2el_ms": 0}, "mean_e2el_ms is 0.0, mean_ttft_ms"),
        ({"mean_e2el_ms": 1e9}, "latencies have a mean of"),
        ({"completed": 2}, "num_prompts is 3, completed 2"),
        ({"completed": 2, "ignored": 1}, "request_throughput is"),
        ({"p90_ttft_ms": 0.0}, "percentiles of ttft are out of order"),
        ({"p99_itl_ms": None}, "some of itl's statistics are null"),
    ],
)
def test_a_result_that_contradicts_itself_is_refused(tmp_path, capsys, changes, told):
    words = ["--workload", "fixed", "--num-prompts", "3", "--input-len", "20", "--output-len", "3", "--gpu", "l20"]
    assert kvtwin.main(["run", *words, "--out", str(tmp_path), "--quiet"]) == 0
    path = tmp_path / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert kvtwin.main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"{path}: contradicts itself: " in error and told in error


def test_contexts_that_grow_past_the_limit_are_told():
    """vLLM v1 ends them there; vLLM 0.5.5's batching leaves lengths to the trace."""
    scenario = with_(output_len=40, max_model_len=50)
    (warning,) = kvtwin.simulate(scenario, "vllm-recompute").result.warnings
    assert warning.startswith("3 contexts grew past --max-model-len 50: output lengths are the trace's")
    assert not any("grew past" in told for told in kvtwin.simulate(scenario, "vllm-v1").result.warnings)
