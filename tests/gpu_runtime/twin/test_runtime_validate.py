"""Pools that fit the machine, the twin's verdict, and `kvtwin validate` from end to end."""

import csv
import json
import signal
from dataclasses import replace
from statistics import median
from types import SimpleNamespace

import msgspec
import psutil
import pytest
from runtime_variants import policy_of
from small_results import small_result

import kvtwin
from gpu_runtime.instance import LiveInstance
from gpu_runtime.live import LiveOptions
from gpu_runtime.machine.live_memory import fit_to_machine
from gpu_runtime.twin import probe
from gpu_runtime.twin.agreement import Validation, agreements, markdown, verdict
from gpu_runtime.twin.iterations import IterationAgreement, KindAgreement
from kvtwin.testing.live import small_decoder
from sim.errors import UserError
from sim.files import folder_name
from sim.options.scenario import Scenario
from sim.parts.options import GIB
from sim.run.files import carry_out
from sim.run.prepare import prepare
from sim.systems import POLICIES
from traces.request import Request
from traces.writers import write_trace

SCENARIO = Scenario(model="qwen3-0.6b", gpu="cpu", workload="fixed", input_len=9, output_len=9, dtype="float32")
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 101,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def free_bytes(monkeypatch):
    def set_to(value):
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=value))

    return set_to


def test_default_pools_take_a_quarter_of_the_free_memory_each(free_bytes):
    free_bytes(4 * GIB)
    layerkv = POLICIES["layerkv"]()
    before = prepare(SCENARIO, "", layerkv).limits
    limits = prepare(fit_to_machine(SCENARIO, layerkv, "cpu"), "", layerkv).limits
    assert before.num_cpu_blocks * before.block_bytes > 4 * GIB
    for blocks in (limits.num_cpu_blocks, limits.num_gpu_blocks):
        assert GIB - limits.block_bytes < blocks * limits.block_bytes <= GIB
    on_cuda = prepare(fit_to_machine(SCENARIO, layerkv, "cuda"), "", layerkv).limits
    assert (on_cuda.num_cpu_blocks, on_cuda.num_gpu_blocks) == (limits.num_cpu_blocks, before.num_gpu_blocks)


def test_turns_whose_states_have_no_room_on_the_host_are_refused(free_bytes):
    free_bytes(400 * GIB)
    policy = policy_of("hcache:keeps=turns")
    few = replace(SCENARIO, num_gpu_blocks_override=100)
    assert fit_to_machine(replace(few, num_cpu_blocks_override=300), policy, "cpu").num_gpu_blocks_override == 100
    with pytest.raises(UserError, match="100 blocks leave no host memory to ended turns: raise --swap-space"):
        fit_to_machine(replace(few, num_cpu_blocks_override=30), policy, "cpu")


def test_pools_that_were_asked_for_are_refused_where_they_do_not_fit(free_bytes):
    free_bytes(4 * GIB)
    policy = POLICIES["vllm-swap"]()
    few = replace(SCENARIO, num_gpu_blocks_override=10)
    assert fit_to_machine(replace(few, swap_space=3.9), policy, "cpu").swap_space == 3.9
    with pytest.raises(UserError, match=r"5\.0 GiB asked for, 4\.0 GiB are free: lower --swap-space"):
        fit_to_machine(replace(few, swap_space=5.0), policy, "cpu")
    with pytest.raises(UserError, match="num-gpu-blocks-override"):
        fit_to_machine(replace(SCENARIO, num_gpu_blocks_override=10**6), policy, "cpu")
    free_bytes(1000)
    with pytest.raises(UserError, match="no block"):
        fit_to_machine(SCENARIO, policy, "cpu")


def run(ttft, tpot=10.0):
    return small_result(mean_ttft_ms=ttft, p99_ttft_ms=ttft, mean_tpot_ms=tpot, request_throughput=5.0)


def priced(**errors):
    """Live iterations by kind, 20 of each, and the median error of their prices."""
    rows = [KindAgreement(kind, 20, 1.0 + error, 1.0, error, abs(error)) for kind, error in errors.items()]
    return IterationAgreement(0, 20 * len(rows), 0, [], rows, [])


NONE = priced()


def test_an_error_within_a_tenth_agrees_however_uneven_the_live_runs_are():
    steady = [run(100.0), run(101.0), run(99.0)]
    assert verdict(agreements(run(109.0), steady), NONE)
    assert not verdict(agreements(run(111.0), steady), NONE)
    assert not verdict(agreements(run(100.0, tpot=8.9), steady), NONE)
    uneven = [run(100.0), run(110.0), run(90.0)]
    assert verdict(agreements(run(109.0), uneven), NONE)
    # Twice their spread would have excused it.
    assert not verdict(found := agreements(run(130.0), uneven), NONE)
    said = "Live runs differ by more than 5%: mean TTFT (+30%, spread 20%)"
    assert said in report(found, [1.0] * 6)
    assert "Live runs differ" not in report(agreements(run(111.0), steady), [1.0] * 6)
    assert not verdict(agreements(small_result(), steady), NONE)


def test_metrics_that_agree_excuse_no_iterations():
    found = agreements(run(100.0), [run(100.0)] * 2)
    assert verdict(found, priced(decode=0.1, prefill=-0.1))
    assert not verdict(found, priced(decode=0.11, prefill=0.0))
    assert not verdict(found, priced(decode=0.0, prefill=-0.11))
    # A median of few says nothing, and `all` is judged by its kinds.
    few = priced(decode=0.5)
    few.prices[0] = msgspec.structs.replace(few.prices[0], aligned=19)
    assert verdict(found, few)
    assert verdict(found, priced(all=0.5))


def report(found, slowness, disturbed=0, agrees=True):
    runs = len(slowness) // 2
    return markdown(Validation("x", agrees, slowness, disturbed, found, NONE), runs)


def validate(tmp_path, *flags, **config_fields):
    """`kvtwin validate` of a starved tiny model on a shipped profile; its status and folder."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG | config_fields))
    out = tmp_path / "out"
    status = kvtwin.main(
        ["validate", "--device", "cpu", "--model", str(config), "--gpu", "cpu", "--workload", "fixed", "--input-len",
         "12", "--output-len", "6", "--request-rate", "200", "--num-prompts", "12", "--num-gpu-blocks-override", "9",
         "--max-model-len", "64", "--swap-space", "0.01", "--max-num-seqs", "8", "--out", str(out), *flags]
    )  # fmt: skip
    return status, out


@pytest.mark.parametrize(
    ("flags", "after", "executed"),
    [
        ([], [1.0, 1.3, 1.05], 3),
        # The second run is disturbed, and so is the third, before which the machine was not itself.
        (["--max-drift", "0.1"], [1.0, 1.3, 1.05, 1.05, 1.05], 5),
        (["--max-drift", "0.1"], [1.2] * 15, 15),
    ],
)
def test_disturbed_runs_are_run_again(tmp_path, capsys, monkeypatch, flags, after, executed):
    warm_up, before = 9.0, 1.0
    slowness = iter([warm_up, before, *after])
    monkeypatch.setattr("gpu_runtime.twin.probe.machine_slowness", lambda *_: next(slowness))
    status, out = validate(tmp_path, "--policy", "vllm-recompute", "--runs", "3", *flags)
    assert list(slowness) == [] and len(after) == executed
    text = (out / "validation.md").read_text()
    if min(after) > 1.1:
        assert "**Not judged**: around 15 of 15 live runs" in text
        assert status == 1
    else:
        assert (out / "vllm-recompute" / "live-3" / "result.json").exists()
        assert ("1.00 to 1.30 times" if not flags else "1.00 to 1.05 times what the profile says (2 more") in text


def test_a_slow_machine_is_one_that_takes_longer_than_its_profile_says(monkeypatch):
    """Ten seconds for what should take four."""
    run = SimpleNamespace(log=SimpleNamespace(duration_s=10.0), interrupted=False)
    monkeypatch.setattr(probe, "perform", lambda *_: run)
    monkeypatch.setattr(probe, "execute_all", lambda _: SimpleNamespace(log=SimpleNamespace(duration_s=4.0)))
    assert probe.machine_slowness(Scenario(gpu="cpu"), small_decoder(), LiveOptions("cpu")) == 2.5
    run.interrupted = True
    with pytest.raises(KeyboardInterrupt):
        probe.machine_slowness(Scenario(gpu="cpu"), small_decoder(), LiveOptions("cpu"))


def test_validate_runs_both_and_leaves_what_it_compared(tmp_path, capsys):
    status, out = validate(tmp_path, "--policy", "vllm-swap", "--policy", "layerkv", "--runs", "2")
    # An uncalibrated profile: whether it agrees is chance, that it says so is not.
    text = (out / "validation.md").read_text()
    assert status == (1 if "does not agree" in text else 0)
    assert capsys.readouterr().out.startswith(text)
    for policy in ("vllm-swap", "layerkv"):
        assert f"## {policy}" in text
        results = [
            json.loads((out / policy / part / "result.json").read_text()) for part in ("simulated", "live-1", "live-2")
        ]
        assert [r["backend"] for r in results] == ["kvtwin-sim", "kvtwin-live", "kvtwin-live"]
        assert [r["completed"] for r in results] == [12, 12, 12]
        assert len({(r["scenario"]["num_gpu_blocks"], r["scenario"]["num_cpu_blocks"]) for r in results}) == 1
        assert (out / policy / "twin.png").stat().st_size > 10_000
        check_iterations(out, policy, [r["num_iterations"] for r in results])


def test_validate_executes_ellm_with_tokens_uncached(tmp_path):
    policy = "ellm:layer-order=contiguous,layers-per-block=2,tpot-slo-ms=1e6"
    # 12 to 32 tokens each in blocks of four: what two need grows into what three did.
    more = "--block-size", "4", "--num-gpu-blocks-override", "20", "--output-len", "20"
    _, out = validate(tmp_path, "--policy", policy, "--runs", "1", *more, num_hidden_layers=16)
    place = out / folder_name(policy)
    results = [json.loads((place / part / "result.json").read_text()) for part in ("simulated", "live-1")]
    for result in results:
        assert result["completed"] == 12
        assert result["counters"]["rebuilding_iterations"] > 0
    check_iterations(out, policy, [result["num_iterations"] for result in results])


def check_iterations(out, policy, counts):
    """Every iteration that computes is in the table, and what is told of them all is what the table says."""
    with (out / folder_name(policy) / "iterations.csv").open() as file:
        table = list(csv.DictReader(file))
    (found,) = (row for row in json.loads((out / "validation.json").read_text()) if row["policy"] == policy)
    told = found["iterations"]
    assert told["live"] == len(table)
    aligned = [row for row in table if row["simulated_iteration"]]
    assert told["aligned"] == len(aligned) > 0
    for number, count in enumerate(counts[1:], start=1):
        run = [row for row in table if row["live_run"] == str(number)]
        # LayerKV has plans that only copy.
        assert 0 < len(run) <= count
        assert policy == "layerkv" or len(run) == count
        starts_s = [float(row["start_s"]) for row in run]
        assert starts_s == sorted(starts_s)
        # The first prompt to come is decided upon alone on both clocks.
        assert (run[0]["kind"], run[0]["simulated_iteration"]) == ("prefill", "1")
    for row in told["kinds"]:
        mine = [r for r in aligned if row["kind"] in (r["kind"], "all")]
        assert row["aligned"] == len(mine)
        assert row["measured_s"] == pytest.approx(sum(float(r["measured_s"]) for r in mine))
        errors = [float(r["simulated_s"]) / float(r["measured_s"]) - 1 for r in mine]
        assert row["median_error"] == pytest.approx(median(errors))
    assert sum(row["aligned"] for row in told["prices"] if row["kind"] != "all") == len(table)
    for row in told["prices"]:
        errors = [float(r["priced_s"]) / float(r["measured_s"]) - 1 for r in table if row["kind"] in (r["kind"], "all")]
        assert row["median_error"] == pytest.approx(median(errors))
    assert f"decision of {len(aligned)} of {len(table)} live iterations" in (out / "validation.md").read_text()


@pytest.mark.parametrize(
    ("command", "flags", "refusal"),
    [
        ("live", ["--policy", "vllm-recompute:admission=slack", "--num-gpu-blocks-override", "100000000"], "lower"),
        ("validate", ["--policy", "vllm-recompute", "--input-len", "100", "--output-len", "99"], "has 128 positions"),
    ],
)
def test_what_is_refused_late_leaves_earlier_results_alone(tmp_path, capsys, command, flags, refusal):
    config, out = tmp_path / "config.json", tmp_path / "out"
    config.write_text(json.dumps(CONFIG))
    out.mkdir()
    (out / "result.json").write_text("of an earlier run")
    more = ["--policy", "vllm-swap"] if command == "validate" else []
    words = [command, "--device", "cpu", "--model", str(config), "--workload", "fixed", "--num-prompts", "2"]
    assert kvtwin.main([*words, *more, *flags, "--out", str(out)]) == 2
    assert refusal in capsys.readouterr().err
    assert [path.read_text() for path in out.iterdir()] == ["of an earlier run"]


REFUSED = """
live --policy vllm-swap --policy layerkv | live takes one --policy, 2 given
live --policy vllm-v1 --pipeline-parallel-size 2 | --pipeline-parallel-size: 2 stages; the
live --policy vllm-v1 --quantization fp8 | --quantization fp8: the live runtime computes
live --policy vllm-v1 --sparse-attention double-sparsity | the live runtime attends to the whole
live --policy vllm-v1 --engine-profile vllm-v1 | the live runtime's engine is kvtwin; leave
live --policy vllm-v1:kv-offloading-size=1 | --kv-offloading-size: runs on a device
live --policy vllm-v1:spec-method=mtp,spec-tokens=2,acceptance-rate=0.5 | computes no second model's drafts
live --policy vllm-v1:max-tokens-per-image=24 | no device computes an encoder
live --policy memserve | hands sequences over to other engines; the live runtime serves from one: simulate
live --policy vllm-v1:memory=mempool | memory=mempool: no device sends blocks
live --policy vllm-swap --tp 2 | --tp 2: vllm-swap has eviction=swap, and copies of KV end at other times
live --policy vllm-v1 --tp 2 --device cuda | --device cuda:
live --policy vllm-v1 --attention-backend flashinfer | flashinfer: does not run on --device cpu
validate --policy vllm-v1 --runs 0 | --runs: 0 is less than 1: give how often to run live
validate --policy vllm-v1 --against x.json | both are given; give one
"""


@pytest.mark.parametrize("row", REFUSED.strip().split("\n"))
def test_what_a_live_run_cannot_be_asked_for_is_refused(tmp_path, capsys, row):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    asked, refusal = row.split(" | ")
    command, *words = asked.split()
    usual = f"--device cpu --model {config} --workload fixed --input-len 9 --output-len 9 --out {tmp_path / 'out'}"
    assert kvtwin.main([command, *usual.split(), *words]) == 2
    assert refusal in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


BLOCKS_HIT = (2 + 5) * 16
"""All but the block that the turn before did not fill: 2 and 5 of 3 and 6 blocks, in each conversation."""
TOKENS_HIT = 47 + 95
"""All that the turns before said, of 48 and 96 tokens, but the last token, whose KV was never computed."""


@pytest.mark.parametrize(
    ("policy", "hit"), [("vllm-v1", BLOCKS_HIT), ("cachedattention:disk-space=0", BLOCKS_HIT), ("radix", TOKENS_HIT)]
)
def test_a_live_run_hits_what_a_simulated_one_does(tmp_path, capsys, policy, hit):
    """Two conversations; a turn waits for the answer before, and begins with all that was said."""
    config, trace, ids = tmp_path / "config.json", tmp_path / "turns.csv", iter(range(100, 200))
    config.write_text(json.dumps(CONFIG | {"max_position_embeddings": 256}))
    rows, said = [], {"a": [], "b": []}
    for turn in range(3):
        for session, known in said.items():
            known += [next(ids) for _ in range(2)]
            prompt = len(known)
            # Blocks of 16 tokens, the last of the prompt half-filled by the answer, which fills one more.
            known += [next(ids)]
            row = 0.1 * turn, prompt * 16 - 8, 24, session, tuple(known[:prompt]), 16, tuple(known[prompt:])
            rows.append(Request(len(rows), *row))
    write_trace(rows, trace)
    hits = []
    for command in (["run"], ["live", "--device", "cpu"]):
        out = tmp_path / command[0]
        words = ["--model", str(config), "--gpu", "cpu", "--trace", str(trace), "--closed-sessions", "--policy", policy]
        words += ["--enable-prefix-caching", "--num-gpu-blocks-override", str(64 * (1 if hit == BLOCKS_HIT else 16))]
        words += ["--swap-space", "0", "--seed", "3", "--out", str(out)]
        assert kvtwin.main([*command, *words]) == 0, capsys.readouterr().err
        result = json.loads((out / "result.json").read_text())
        assert result["completed"] == 6
        hits.append(result["counters"]["prefix_hit_tokens"])
    assert hits == [2 * hit] * 2


def test_a_rate_that_a_device_does_not_read_is_said(tmp_path, capsys):
    config, out = tmp_path / "config.json", tmp_path / "out"
    config.write_text(json.dumps(CONFIG))
    words = ["live", "--device", "cpu", "--model", str(config), "--workload", "fixed", "--num-prompts", "1"]
    words += ["--input-len", "8", "--output-len", "4", "--num-gpu-blocks-override", "64", "--swap-space", "0"]
    words += ["--out", str(out)]
    told = []
    for rate in ("", ",acceptance-rate=0.5"):
        assert kvtwin.main([*words, "--policy", f"vllm-v1:spec-method=ngram,spec-tokens=2{rate}"]) == 0, (
            capsys.readouterr()
        )
        told.append(["acceptance rates" in line for line in json.loads((out / "result.json").read_text())["warnings"]])
    assert any(told[1]) and not any(told[0])


@pytest.mark.parametrize(("command", "package"), [("live", "torch"), ("validate", "psutil"), ("serve", "torch")])
def test_a_package_that_is_missing_is_named_with_its_extra(command, package, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("gpu_runtime.cli.find_spec", lambda name: None if name == package else object())
    flags = ["--device", "cpu", "--policy", "layerkv", "--out", str(tmp_path)]
    assert kvtwin.main([command, *flags]) == 2
    assert f"{package} is not installed: pip install 'kvtwin[gpu]'" in capsys.readouterr().err


@pytest.mark.parametrize("ends", [{"interrupted": True}, {"error": "a bad row"}])
def test_a_simulation_that_ends_early_ends_the_command(tmp_path, capsys, monkeypatch, ends):
    """Not a live run of it all after half a simulation."""

    def half(*facts, **named):
        run, result = carry_out(*facts, **named)
        for name, value in ends.items():
            setattr(run, name, value)
        return run, result

    monkeypatch.setattr("gpu_runtime.twin.validate.carry_out", half)
    status, out = validate(tmp_path, "--policy", "layerkv")
    assert status == (130 if "interrupted" in ends else 2)
    assert (out / "layerkv" / "simulated" / "result.json").exists()
    assert not (out / "layerkv" / "live-1").exists()


@pytest.mark.parametrize(("command", "place"), [("live", ""), ("validate", "layerkv/live-1")])
def test_sigterm_leaves_what_is_finished(tmp_path, monkeypatch, command, place):
    config, out, end, ended = tmp_path / "config.json", tmp_path / "out", LiveInstance._end, []
    config.write_text(json.dumps(CONFIG))

    def terminated_after_three(self, seq):
        end(self, seq)
        ended.append(seq)
        if len(ended) == 3:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(LiveInstance, "_end", terminated_after_three)
    monkeypatch.setattr("gpu_runtime.twin.probe.machine_slowness", lambda *_: 1.0)
    words = ["--device", "cpu", "--model", str(config), "--gpu", "cpu", "--workload", "fixed", "--input-len", "12"]
    words += ["--output-len", "6", "--request-rate", "50", "--num-prompts", "100", "--swap-space", "0.01"]
    words += ["--max-model-len", "64", "--num-gpu-blocks-override", "90", "--policy", "layerkv", "--quiet"]
    assert kvtwin.main([command, *words, "--out", str(out)]) == 143
    result = json.loads((out / place / "result.json").read_text())
    assert (result["complete"], result["completed"]) == (False, 3)
