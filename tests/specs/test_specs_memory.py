"""KV pools: worked out by hand, near the reference values, as real engines printed them; layers of vLLM's stages."""

import kv_pools
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import UserError
from sim.specs.expert_layout import ExpertLayout
from sim.specs.hardware import load_hardware
from sim.specs.memory import OLDER, EngineMemory, activation_bytes, kv_cache_blocks, mxfp4_bytes
from sim.specs.models import built_in_models, load_model
from sim.specs.stages import partitioned

GIB = 2**30
# Models that an H200 holds alone and eight GPUs can share.
FITTING = [n for n in built_in_models() if load_model(n).num_heads % 8 == 0 and load_model(n).weight_bytes() < 100e9]


def pool(model, gpu, **options):
    defaults = {
        "tensor_parallel_size": 1, "gpu_memory_utilization": 0.9, "block_size": 16, "max_num_batched_tokens": 4096,
        "max_num_seqs": 256, "swap_space_bytes_per_gpu": 4 * GIB,
    }  # fmt: skip
    return kv_cache_blocks(load_model(model), load_hardware(gpu), **(defaults | options))


def test_a_pool_by_hand():
    size = pool("llama-2-7b", "l20")
    assert size.block_bytes == 16 * 524_288
    assert size.num_cpu_blocks == 512  # 4 GiB of 8 MiB
    activations = 4096 * (3 * 4096 + 3 * 11008) * 2
    sampler = 256 * 32000 * 38
    sampler += 2 * 4096 * 4096 * 2  # what went into the last norm and came out of it
    assert sampler > activations
    left = 0.9 * round(44.53 * GIB) - 2 * 6_738_415_616 - sampler - 0.1e9
    assert size.num_gpu_blocks == int(left / (16 * 524_288))


@pytest.mark.parametrize(
    ("model", "gpus", "tokens"),
    [("llama-2-7b", 1, 3364 * 16), ("yi-34b-200k", 2, 59_000), ("llama-3.1-70b", 4, 78_000)],
)
def test_pools_of_the_l20_testbed(model, gpus, tokens):
    # The reference allows a flat 1.5 GB a GPU beside the weights, of 48 GB.
    size = pool(model, "l20", tensor_parallel_size=gpus)
    assert size.num_gpu_blocks * 16 == pytest.approx(tokens, rel=0.09)


@pytest.mark.parametrize("row", kv_pools.rows(), ids=lambda row: " ".join(row.values()))
def test_pools_that_public_logs_show(row):
    """Pools of dense models within 1.5 %, of experts 4 %; or 0.4 GiB, where little is left beside the weights."""
    bound = 0.04 if load_model(row["model"]).moe else 0.015
    assert kv_pools.error(row) == pytest.approx(0.0, abs=max(bound, 0.4 / float(row["kv_gib"])))


def test_what_an_engine_takes_is_counted_where_it_is_taken():
    """On one GPU all but collectives; in a group these, and no more of them than before where there is no NVLink."""
    takes = EngineMemory(
        sampler_bytes_per_logit=100.0, runtime_bytes=1e9, collective_bytes=3e9, graph_bytes_per_layer=1e7
    )

    def taken(gpu, gpus):
        before, after = (pool("llama-2-7b", gpu, tensor_parallel_size=gpus, engine=e) for e in (OLDER, takes))
        return (before.num_gpu_blocks - after.num_gpu_blocks) * after.block_bytes

    by_hand = 256 * 32000 * (100 - 38) + 0.9e9 + 32e7
    assert taken("h100", 1) == pytest.approx(by_hand, abs=16 * 524_288)
    assert taken("h100", 2) == pytest.approx(by_hand + 2.6e9, abs=16 * 524_288)
    assert taken("l40s", 2) == pytest.approx(by_hand, abs=16 * 524_288)


@pytest.mark.parametrize(
    ("model", "gpu", "gib"),
    [("gpt-oss-20b", "h100", 13.47), ("gpt-oss-120b", "h100", 64.38), ("gpt-oss-120b", "a100-80g", 65.97)],
)
def test_mxfp4_weights_take_what_logs_say_that_loading_took(model, gpu, gib):
    """vLLM 0.11 and 0.14 with Triton's kernels; 0.10.1 with Marlin's, there on an H100 (issue 23278)."""
    spec, engine = load_model(model), EngineMemory(mxfp4_left_bytes=1 / 32)
    taken = spec.weight_bytes() + mxfp4_bytes(spec, load_hardware(gpu), ExpertLayout(), engine)
    # Tables of positions, biases in fp32 and scales in whole tiles are not counted.
    assert taken / GIB == pytest.approx(gib, abs=0.3)


@pytest.mark.parametrize(
    ("gpu", "layout", "factor"),
    [
        ("h100", ExpertLayout(1), 1),
        ("h100", ExpertLayout(4), 768 / 720),
        ("b200", ExpertLayout(4), 768 / 720 * 3072 / 2880),
        ("b200", ExpertLayout(2, 2, expert_parallel=True), 2944 / 2880 * 3072 / 2880),
    ],
)
def test_mxfp4_experts_are_padded_to_their_kernels_tiles(gpu, layout, factor):
    """Today's engine: 128 experts of 36 layers, three matrices of 2,880 squared each, 17 bytes per 32 weights."""
    taken = mxfp4_bytes(load_model("gpt-oss-120b"), load_hardware(gpu), layout, EngineMemory())
    assert taken == pytest.approx((factor - 1) * 36 * 128 * 3 * 2880**2 * 17 / 32 / layout.gpus)


def test_experts_and_latents_count_in_the_activations():
    dense, expert = (
        activation_bytes(load_model("opt-13b"), 1, 10),
        activation_bytes(load_model("deepseek-v2-lite"), 1, 10),
    )
    assert dense == 10 * 2 * (3 * 5120 + 2 * 20480)
    assert expert == 10 * 2 * (3 * 2048 + 6 * (3 * 1408 + 2048))


def test_weights_that_do_not_fit_are_refused_with_a_remedy():
    with pytest.raises(
        UserError, match=r"yi-34b-200k does not fit on l20 .*1: needs 69.6 GB per GPU .*tensor_parallel"
    ):
        pool("yi-34b-200k", "l20")
    with pytest.raises(UserError, match="lower --max-num-batched-tokens"):
        pool("llama-2-13b", "l20", max_num_batched_tokens=1_000_000)


def test_the_largest_stage_is_refused_with_its_own_weights():
    """DeepSeek-V3 has 673.2 GB of weights: 88.3 GB in eight of 61 layers."""
    with pytest.raises(UserError, match=r"needs 89\.\d GB per GPU \(88\.3 GB of weights\)"):
        pool("deepseek-v3", "a100-80g", stage_layers=(7, 7, 8, 8, 8, 8, 8, 7))


def test_the_stage_with_most_layers_says_how_many_blocks_there_are():
    """Of 32 layers 20 and 12 have the blocks of the 20: of each token 20/32 of the KV, beside 20/32 of the weights."""
    model, usable = load_model("llama-3.1-8b"), 0.9 * load_hardware("a100-80g").memory_bytes
    uneven, even = (pool("llama-3.1-8b", "a100-80g", stage_layers=layers) for layers in ((20, 12), (16, 16)))
    assert uneven.block_bytes == 16 * model.kv_bytes_per_token() * 20 / 32
    beside = usable - even.num_gpu_blocks * even.block_bytes - model.weight_bytes() / 2
    expected = (usable - beside - model.weight_bytes() * 20 / 32) / uneven.block_bytes
    assert uneven.num_gpu_blocks == pytest.approx(expected, abs=1.5)
    assert pool("llama-3.1-8b", "a100-80g", stage_layers=(12, 20)) == uneven


@pytest.mark.parametrize(("spare", "remedy"), [(0.0, "take a GPU with more memory"), (1e6, "lower --max-num-batched")])
def test_smaller_batches_help_only_where_weights_leave_room(spare, remedy):
    model, gpu = load_model("llama-2-7b"), load_hardware("l20")
    gpu = msgspec.structs.replace(gpu, memory_bytes=model.weight_bytes(1) + spare)
    options = {"block_size": 16, "max_num_batched_tokens": 2048, "max_num_seqs": 8, "swap_space_bytes_per_gpu": 0.0}
    with pytest.raises(UserError, match=remedy):
        kv_cache_blocks(model, gpu, tensor_parallel_size=1, gpu_memory_utilization=1.0, **options)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("gpu_memory_utilization", 1.5),
        ("block_size", 0),
        ("max_num_batched_tokens", -1),
        ("tensor_parallel_size", 3),
        ("swap_space_bytes_per_gpu", -1.0),
        ("swap_space_bytes_per_gpu", 3e12),
    ],
)
def test_options_out_of_range_are_refused_by_name(option, value):
    with pytest.raises(UserError, match=option):
        pool("llama-2-7b", "l20", **{option: value})


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(FITTING), st.sampled_from([1, 2, 4, 8]), st.integers(1, 32768), st.integers(1, 512))
def test_blocks_and_peak_never_exceed_the_share_of_memory(model, tp, tokens, seqs):
    gpu = load_hardware("h200")
    size = pool(model, "h200", tensor_parallel_size=tp, max_num_batched_tokens=tokens, max_num_seqs=seqs)
    used = size.num_gpu_blocks * size.block_bytes + load_model(model).weight_bytes(tp)
    assert used < 0.9 * gpu.memory_bytes
    more = pool(model, "h200", tensor_parallel_size=tp, max_num_batched_tokens=tokens + 1, max_num_seqs=seqs)
    assert more.num_gpu_blocks <= size.num_gpu_blocks


def test_swap_space_of_all_gpus_is_in_the_hosts_memory():
    host_bytes = load_hardware("h100").host_memory_bytes
    assert pool("llama-2-7b", "h100", tensor_parallel_size=4, swap_space_bytes_per_gpu=host_bytes / 4).num_cpu_blocks
    with pytest.raises(UserError, match=r"--swap-space .* times 4 GPUs must be 0 to the host's 2000 GB: choose less"):
        pool("llama-2-7b", "h100", tensor_parallel_size=4, swap_space_bytes_per_gpu=1.01 * host_bytes / 4)


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (32, 4, (8, 8, 8, 8)),
        (61, 2, (31, 30)),
        (61, 4, (15, 15, 16, 15)),
        (62, 4, (15, 16, 16, 15)),
        (63, 4, (16, 16, 16, 15)),
        (32, 1, (32,)),
    ],
)
def test_what_is_left_over_goes_to_the_middle(layers, stages, expected):
    """As `get_pp_indices` of vLLM 0.33 says of these."""
    assert partitioned(layers, stages) == expected


def test_a_partition_that_was_asked_for_counts():
    assert partitioned(61, 3, "20,21, 20") == (20, 21, 20)


@pytest.mark.parametrize(
    ("stages", "asked", "words"),
    [
        (2, "16,x", "--pp-layer-partition 16,x: is not layers of each stage"),
        (2, "32,0", "is not layers of each stage"),
        (2, "", "is not layers of each stage"),
        (2, "10,11,11", "3 stages of 32 layers in all; the model has 32 on 2"),
        (2, "16,17", "2 stages of 33 layers in all; the model has 32 on 2"),
        (40, None, "--pipeline-parallel-size 40: the model has 32 layers"),
    ],
)
def test_what_is_no_partition_is_refused(stages, asked, words):
    with pytest.raises(UserError, match=words):
        partitioned(32, stages, asked)
