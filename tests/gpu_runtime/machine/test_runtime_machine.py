"""What a machine holds and how it computes: weights and pools that fit, its name and threads, its fastest kernels."""

import json
from argparse import Namespace
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
import torch
from runtime_variants import policy_of

import kvtwin
from gpu_runtime.cli import name_gpu
from gpu_runtime.kv.stored import stored_dtype
from gpu_runtime.live import LiveOptions, check_device, check_gpus, describe_machine, load_decoder
from gpu_runtime.machine import fastest_kernels, live_memory, threads
from gpu_runtime.machine.fastest_kernels import fastest
from gpu_runtime.machine.live_memory import CGROUP, check_weights, fit_to_machine, free_bytes, held_bytes, working_bytes
from gpu_runtime.machine.scheduling import scheduled
from gpu_runtime.model.config import DecoderConfig, Experts
from gpu_runtime.model.kernels import Kernels
from gpu_runtime.model.weights import RandomWeights
from kvtwin.testing import build_engine, linear_machine
from kvtwin.testing.live import SMALL, build_device, small_decoder, tight_limits
from sim.errors import InvariantError, UserError
from sim.options.scenario import Scenario
from sim.parts.options import GIB
from sim.run.prepare import prepare
from sim.specs.models import load_model
from sim.systems import POLICIES

SHAPES = [
    SMALL,
    msgspec.structs.replace(SMALL, qkv_bias=True, num_layers=1),
    msgspec.structs.replace(SMALL, qk_norm=True, tie_word_embeddings=True),
]


@pytest.mark.parametrize("config", SHAPES)
def test_weights_are_counted_one_by_one(config):
    weights = RandomWeights(config, "cpu", torch.float32, 0)
    parts = [weights.layer(i) for i in range(config.num_layers)] + [weights.ends()]
    tensors = {id(part): part for held in parts for part in vars(held).values() if part is not None}
    assert config.num_weights == sum(tensor.numel() for tensor in tensors.values())


@pytest.mark.parametrize("model", ["llama-2-7b", "qwen3-0.6b"])
def test_they_are_those_that_the_simulator_counts(model):
    spec = load_model(model)
    assert DecoderConfig.from_spec(spec).num_weights * 2 == spec.weight_bytes()


def test_a_model_that_does_not_fit_is_refused_before_it_is_there(monkeypatch):
    config = DecoderConfig.from_spec(load_model("llama-2-7b"))
    needed = 6_738_415_616 * 4
    monkeypatch.setattr(live_memory, "free_bytes", lambda device: needed)
    check_weights(config, torch.float32, "cpu")
    monkeypatch.setattr(live_memory, "free_bytes", lambda device: needed - 1)
    monkeypatch.setattr(RandomWeights, "layer", lambda *_: pytest.fail("weights were made"))
    why = (
        rf"--model llama-2-7b: its weights take {needed} bytes \(25.1 GiB\) as float32, {needed - 1} bytes .* are free"
    )
    with pytest.raises(UserError, match=why):
        load_decoder("llama-2-7b", "float32", LiveOptions("cpu"))
    check_weights(config, torch.float16, "cpu")


@pytest.mark.parametrize("command", ["live", "serve"])
def test_every_command_refuses_it(command, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(live_memory, "free_bytes", lambda device: GIB)
    words = ["--device", "cpu", "--policy", "vllm-v1", "--out", str(tmp_path)]
    words += ["--port", "0"] if command == "serve" else ["--workload", "fixed", "--input-len", "9", "--output-len", "9"]
    assert kvtwin.main([command, *words]) == 2
    assert "--model llama-2-7b: its weights take" in capsys.readouterr().err


def test_a_container_s_limit_counts(tmp_path, monkeypatch):
    whole = free_bytes("cpu")
    monkeypatch.setattr(live_memory, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert free_bytes("cpu") == 3000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_bytes("cpu") > 3000
    assert CGROUP.is_absolute() and whole > 0


SCENARIO = Scenario(
    model="qwen3-0.6b", gpu="l20", workload="fixed", input_len=9, output_len=9, swap_space=0.0, engine_profile="kvtwin"
)


def on_cuda(monkeypatch, free, scenario=SCENARIO, policy="vllm-v1"):
    """Fit to a device that has so many bytes free."""
    monkeypatch.setattr(live_memory, "free_bytes", lambda device: free if device == "cuda" else 64 * GIB)
    return fit_to_machine(scenario, POLICIES[policy](), "cuda", small_decoder())


def test_a_gpu_that_has_less_free_gets_a_smaller_pool(monkeypatch):
    limits = prepare(SCENARIO, "", POLICIES["vllm-v1"]()).limits
    working = working_bytes(SMALL, torch.float32, limits, graphs=True) + held_bytes(limits, 1)
    whole = limits.num_gpu_blocks * limits.block_bytes + working
    # As many as the simulator counts, beside what computes and a twentieth that is not counted.
    assert on_cuda(monkeypatch, whole / 0.95 + 1) == SCENARIO
    assert on_cuda(monkeypatch, (working + 100.5 * limits.block_bytes) / 0.95).num_gpu_blocks_override == 100
    # A number that is given is kept, as long as there is room.
    asked = replace(SCENARIO, num_gpu_blocks_override=100)
    assert on_cuda(monkeypatch, working + 100.5 * limits.block_bytes, asked) == asked
    asked = replace(SCENARIO, num_gpu_blocks_override=200)
    with pytest.raises(UserError, match=r"KV blocks of \d+ bytes and \d+ bytes to compute with, \d+ bytes"):
        on_cuda(monkeypatch, int(working + 100.5 * limits.block_bytes), asked)
    with pytest.raises(UserError, match="are free: lower"):
        on_cuda(monkeypatch, working)


def test_layers_that_pass_through_take_room_as_well(monkeypatch):
    few = replace(SCENARIO, num_cpu_blocks_override=50)
    limits = prepare(few, "", POLICIES["layerkv"]()).limits
    free = working_bytes(SMALL, torch.float32, limits, graphs=True) + 100.5 * limits.block_bytes
    free += held_bytes(limits, prepare(few, "", POLICIES["layerkv"]()).model.num_layers)
    assert on_cuda(monkeypatch, free / 0.95, few, "layerkv").num_gpu_blocks_override == 100
    streams = fit_to_machine(few, POLICIES["layerkv"](decode="stream"), "cuda", small_decoder())
    assert streams.num_gpu_blocks_override == 50


def test_computing_takes_what_its_largest_pass_does():
    """Four tokens a pass and two sequences, by hand: 3 h + 2 (q + kv) a token, V a sequence, K and V of one context."""
    limits = SimpleNamespace(max_num_seqs=2, max_num_batched_tokens=4, max_model_len=8)
    elements = 4 * (3 * 48 + 2 * 128) + 2 * 101 + 2 * 8 * 32
    assert working_bytes(SMALL, torch.float32, limits, graphs=False) == 4 * elements
    decodes, pieces = 2 * (3 * 48 + 2 * 128 + 48 + 2 * 101), 4 * (3 * 48 + 2 * 128 + 48 + 96 + (96 + 2 * 32))
    assert working_bytes(SMALL, torch.float16, limits, graphs=True) == 2 * (elements + decodes + pieces)
    # Three experts of 40 columns: gate, up, product and their inputs and outputs of each; elsewhere one at a time.
    mixed = msgspec.structs.replace(SMALL, experts=Experts(5, 3, 40, renormalised=True, named_as_mixtral=False))
    more = 3 * (3 * 40 + 2 * 48) - 2 * 128
    assert working_bytes(mixed, torch.float32, limits, graphs=False) == 4 * elements
    assert working_bytes(mixed, torch.float16, limits, graphs=True) == 2 * (elements + decodes + pieces + 10 * more)


@pytest.mark.parametrize(
    ("device", "flag", "file", "named"),
    [
        ("cpu", None, None, "cpu"),
        ("cpu", None, 'gpu = "l20"', None),
        ("cuda", None, None, "h200"),
        ("cuda", "l20", None, "l20"),
    ],
)
def test_a_machine_is_called_what_it_is(tmp_path, monkeypatch, device, flag, file, named):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    path = tmp_path / "scenario.toml"
    path.write_text(file or "")
    arguments = Namespace(gpu=flag, scenario=path if file else None)
    name_gpu(arguments, device)
    assert arguments.gpu == named


def test_a_device_that_cannot_be_used_says_why(monkeypatch):
    def no_memory():
        raise RuntimeError(why)

    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UserError, match=r"torch \S+ is a build without CUDA: install another, or use --device cpu"):
        check_device("cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "mem_get_info", no_memory)
    for why in (
        "The NVIDIA driver on your system is too old (found version 11040).",
        "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCUDA kernel errors might be reported elsewhere",
    ):
        with pytest.raises(UserError) as caught:
            check_device("cuda")
        first = why.splitlines()[0].rstrip(".")
        assert str(caught.value) == f"--device cuda: {first}; mend that, or use --device cpu"


def test_more_ranks_than_there_are_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_gpus(2, "cuda")
    check_gpus(3, "cpu")
    with pytest.raises(UserError, match="--tp 3: 2 CUDA devices are here: give as many at most"):
        check_gpus(3, "cuda")


@pytest.mark.parametrize(
    ("name", "capability", "found"),
    [
        ("bfloat16", (7, 5), "needs compute capability 8.0, the device has 7.5: use auto or fp8_e5m2"),
        ("fp8", (8, 6), "needs compute capability 8.9, the device has 8.6: use auto or fp8_e5m2"),
        ("fp8", (8, 9), torch.float8_e4m3fn),
        ("fp8_e5m2", (7, 0), torch.float8_e5m2),
        ("int8", (9, 0), "is not computed by the runtime: use auto, bfloat16, fp8 or fp8_e5m2"),
    ],
)
def test_kv_is_stored_as_the_device_can(monkeypatch, name, capability, found):
    """A CPU stores whatever the runtime does."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if isinstance(found, torch.dtype):
        assert stored_dtype(name, torch.float32, "cuda") == stored_dtype(name, torch.float32, "cpu") == found
    else:
        with pytest.raises(UserError) as caught:
            stored_dtype(name, torch.float32, "cuda")
        assert str(caught.value) == f"--kv-cache-dtype: {name} {found}"


@pytest.mark.parametrize(
    ("variant", "device", "engine", "ahead"),
    [
        ("vllm-v1", "cuda", "kvtwin", True),
        ("vllm-v1", "cpu", "kvtwin", False),
        ("vllm-v1:async-scheduling=true", "cpu", "kvtwin", True),
        ("vllm-v1:async-scheduling=false", "cuda", "kvtwin", False),
        ("vllm-v1", "cuda", "vllm-v1", False),
        ("vllm-v1", "cuda", None, False),
        ("vllm-v1:memory=radix", "cuda", "kvtwin", False),
        ("adaptive", "cuda", "kvtwin", False),
        ("vllm-recompute", "cuda", "kvtwin", False),
    ],
)
def test_steps_are_scheduled_ahead_where_vllm_does_and_nothing_is_copied(variant, device, engine, ahead):
    scenario = replace(SCENARIO, gpu="h100", engine_profile=engine)
    found, policy = scheduled(scenario, policy_of(variant), device)
    assert policy.schedules_ahead is ahead
    assert found.engine_profile == ("kvtwin-async" if ahead else engine)


def test_what_waits_for_copies_cannot_be_scheduled_ahead():
    with pytest.raises(UserError, match="--async-scheduling: adaptive has batching=paced, and a device cannot"):
        scheduled(SCENARIO, policy_of("adaptive:async-scheduling=true"), "cpu")


def test_pools_have_groups_of_as_many_layers():
    policy = POLICIES["layerkv"]()
    limit = tight_limits(policy)
    scheduler = build_engine(policy, limit, linear_machine(limit.block_bytes, layers=4), print).scheduler
    with pytest.raises(ValueError, match="3 layers of small in 4 equal groups"):
        build_device(scheduler, decoder=small_decoder(3))
    policy = POLICIES["layerkv"](decode="stream")
    scheduler = build_engine(policy, limit, linear_machine(limit.block_bytes, layers=4), print).scheduler
    device = build_device(scheduler)
    device.memory.check()
    device.memory.scratch.allocate(2)
    with pytest.raises(InvariantError, match="2 scratch blocks were not given back"):
        device.memory.check()
    device.close()


@pytest.fixture
def threads_kept(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.delenv(threads.SETTING, raising=False)
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: range(6), raising=False)
    yield
    torch.set_num_threads(before)


def test_threads_that_are_set_are_kept(threads_kept, monkeypatch):
    monkeypatch.setenv(threads.SETTING, "1")
    monkeypatch.setattr(threads, "_median_s", lambda *_: pytest.fail("measured"))
    before = torch.get_num_threads()
    threads.use_fastest_threads(SMALL, torch.float32)
    assert torch.get_num_threads() == before


class Timed(Kernels):
    """Takes a made-up time for each batch, on a made-up clock; of decodes, of a prompt, of both."""

    clock_s = 0.0

    def __init__(self, *seconds):
        self._seconds = seconds

    def attend(self, query, pool, layer, batch, new):
        kind = 0 if batch.max_query_len == 1 else 1 if len(batch.num_new) == 1 else 2
        Timed.clock_s += self._seconds[kind]
        return torch.zeros_like(query)


@pytest.fixture
def decoder(monkeypatch):
    monkeypatch.setattr(fastest_kernels, "perf_counter", lambda: Timed.clock_s)
    yield small_decoder()
    small_decoder().compute_with(Kernels())


@pytest.mark.parametrize(
    ("other", "chosen"),
    [
        ((1.0, 2.0, 4.0), "ours"),
        ((0.99, 1.98, 3.96), "ours"),
        ((0.5, 2.0, 4.0), "theirs"),
        ((0.5, 4.0, 4.0), "ours"),
        ((0.25, 4.0, 4.0), "theirs"),
    ],
    ids=["tie", "chance", "faster", "even", "faster on the whole"],
)
def test_the_fastest_on_the_whole_computes_and_a_tie_changes_nothing(other, chosen, decoder):
    both = {"ours": Timed(1.0, 2.0, 4.0), "theirs": Timed(*other)}
    assert fastest(decoder, both) is both[chosen]


def test_ranks_take_what_the_first_one_found_fastest(decoder, monkeypatch):
    """A rank's own measurement may go the other way, and its tokens would be other kernels'."""
    first = {1.0: [1.0, 2.0, 4.0], 0.5: [2.0, 4.0, 8.0]}
    monkeypatch.setattr(decoder, "group", SimpleNamespace(of_first=lambda found: first[found[0]]))
    both = {"ours": Timed(1.0, 2.0, 4.0), "theirs": Timed(0.5, 1.0, 2.0)}
    assert fastest(decoder, both) is both["ours"]


def test_the_choice_says_by_how_much(decoder):
    """By hand: half the time of one batch of three, and the same of the others, is 0.5^(1/3), or 1 / 1.26."""
    found = fastest(decoder, {"ours": Timed(1.0, 2.0, 4.0), "theirs": Timed(0.5, 2.0, 4.0)})
    assert found.why == "chosen by a measurement: ours took 1.26 times as long"


def test_on_a_cpu_there_is_one_and_the_result_says_so(tmp_path):
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 1}
    more = {"intermediate_size": 80, "vocab_size": 101, "max_position_embeddings": 64, "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(sizes | more))
    decoder = load_decoder(str(tmp_path), "float32", LiveOptions("cpu", attention_backend="fastest"))
    assert describe_machine(decoder).attention == "torch (no others here)"
