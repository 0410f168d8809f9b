"""DeepEP's dispatch and combine: rows counted by hand, kernels as published, and what vLLM and SGLang do with them."""

import pytest

from sim.cost.all2all import DeepEP, buffer_bytes, met, timed
from sim.cost.spread_experts import SpreadExpertsCost
from sim.errors import UserError
from sim.options.policies import parse_policy
from sim.options.scenario import Scenario
from sim.run.prepare import Setup, prepare
from sim.specs.expert_layout import HIGH_THROUGHPUT, LOW_LATENCY, ExpertLayout
from sim.specs.models import load_model

AUTO = "sglang:enable-dp-attention=true,moe-a2a-backend=deepep"


def deepep(backend: str, gpus: int, model="deepseek-v3", tp=1) -> DeepEP:
    return DeepEP(backend, load_model(model), "h100", ExpertLayout(tp, gpus // tp, expert_parallel=True))


def setup_of(policy="vllm-v1", backend: str | None = None, **options) -> Setup:
    asked = {"workload": "fixed", "model": "qwen3-30b-a3b", "gpu": "h100", "data_parallel_size": 8}
    asked |= {"enable_expert_parallel": True, "all2all_backend": backend} | options
    return prepare(Scenario(**asked), policy, parse_policy(policy, {})[1])


def spread_cost(setup: Setup) -> SpreadExpertsCost:
    assert isinstance(setup.cost, SpreadExpertsCost)
    return setup.cost


@pytest.mark.parametrize(
    ("backend", "gpus", "tokens", "measured_us"),
    [
        (LOW_LATENCY, 8, 16, 15.62 + 20.53),
        (LOW_LATENCY, 8, 128, 36.72 + 66.98),
        (LOW_LATENCY, 16, 128, 102.1 + 186.2),
        (LOW_LATENCY, 64, 256, 301.1 + 579.5),
        (HIGH_THROUGHPUT, 8, 1024, 157.8 + 307.2),
        (HIGH_THROUGHPUT, 32, 4096, 1860.5 + 3633.7),
    ],
)
def test_a_layer_of_deepseek_costs_what_aiconfigurator_measured(backend, gpus, tokens, measured_us):
    assert 1e6 * deepep(backend, gpus).seconds(tokens) == pytest.approx(measured_us, rel=0.12)


@pytest.mark.parametrize(("gpus", "measured_us"), [(16, 118 + 195), (32, 155 + 273), (64, 173 + 314)])
def test_between_nodes_deepeps_own_table_says_the_same_to_which_nothing_was_fitted(gpus, measured_us):
    """128 tokens, on H800: their RDMA is H100's."""
    assert 1e6 * deepep(LOW_LATENCY, gpus).seconds(128) == pytest.approx(measured_us, rel=0.12)


def test_rows_by_hand():
    # Of six pairs two are of one GPU.
    assert met(2, 4, 2) == pytest.approx(2 * 4 / 6 + 1 * 2 / 6)
    assert met(4, 4, 1) == 1
    low, high = deepep(LOW_LATENCY, 8), deepep(HIGH_THROUGHPUT, 8)
    assert low.rows_per_token == 8
    assert high.rows_per_token == pytest.approx(8 * (1 - (7 / 8) ** 8), rel=0.01)
    # A hidden state in FP8, a scale for each 128 elements, a header.
    assert (low.dispatch_bytes, low.combine_bytes) == (7168 + 56 * 4 + 16, 2 * 7168)
    # In 16 bits, and of 2,880 elements as of 3,072.
    assert deepep(HIGH_THROUGHPUT, 8, "gpt-oss-120b").dispatch_bytes == 2 * 3072
    # Half of the rows stay on a node of two.
    assert deepep(LOW_LATENCY, 16).rows_per_token == 4
    kernel = timed()["h100"].deepep_low_latency["1"].dispatch
    by_hand_s = kernel.launch_s + 256 * kernel.s_per_expert + 7408 * kernel.s_per_row_byte
    assert kernel.seconds(0, 7408, 256) == pytest.approx(by_hand_s)
    assert kernel.seconds(1000, 7408, 256) - by_hand_s == pytest.approx(
        1000 * (kernel.s_per_row + 7408 / kernel.bytes_per_s)
    )


def test_gpus_of_a_rank_share_its_tokens():
    assert deepep(LOW_LATENCY, 8, tp=4).seconds(13) == deepep(LOW_LATENCY, 8).seconds(4)


def test_buffers_by_hand():
    model, layout = load_model("deepseek-v3"), ExpertLayout(1, 8, expert_parallel=True, backend=LOW_LATENCY)
    assert buffer_bytes(model, layout, 256) == 4 * 256 * 256 * (2 * 7168 + 56 * 4)
    assert buffer_bytes(model, ExpertLayout(1, 16, backend=HIGH_THROUGHPUT), 8192) == 2 << 30


def test_vllms_defaults_with_buffers_for_every_token():
    usual, low = setup_of(), setup_of(backend=LOW_LATENCY)
    assert (usual.limits.max_num_batched_tokens, low.limits.max_num_batched_tokens) == (8192, 256)
    assert low.limits.max_num_seqs == 256
    few, many = (setup_of(backend=LOW_LATENCY, max_num_batched_tokens=n, max_num_seqs=256).limits for n in (256, 2048))
    taken = (few.num_gpu_blocks - many.num_gpu_blocks) * few.block_bytes
    assert taken > 4 * 128 * (2048 - 256) * 2 * 2048


def test_steps_take_the_kernels_of_their_kind():
    """SGLang's mode auto: low latency where all ranks decode."""
    setup = setup_of(AUTO)
    assert setup.experts is not None
    assert (setup.experts.backend, setup.experts.prefill_backend) == (LOW_LATENCY, HIGH_THROUGHPUT)
    cost, layers = spread_cost(setup), load_model("qwen3-30b-a3b").num_layers
    low, high = (DeepEP(name, setup.model, "h100", setup.experts) for name in (LOW_LATENCY, HIGH_THROUGHPUT))
    both = [cost.spread_s(8 * 64, 64, prefills=prefills) for prefills in (False, True)]
    assert both[1] - both[0] == pytest.approx(layers * (high.seconds(64) - low.seconds(64)))
    assert cost.experts_s(64) == both[0]


def test_high_throughput_has_no_graphs():
    """vLLM turns CUDA graphs off: decodes last as long as their launches."""
    assert spread_cost(setup_of(backend=HIGH_THROUGHPUT)).captured_decodes == 0
    assert spread_cost(setup_of(backend=LOW_LATENCY)).captured_decodes == spread_cost(setup_of()).captured_decodes > 0
    assert spread_cost(setup_of(f"{AUTO},deepep-mode=normal")).captured_decodes == 0


@pytest.mark.parametrize(
    ("backend", "options", "words"),
    [
        ("pplx", {}, "vLLM has removed it"),
        ("nixl_ep", {}, "not yet measured"),
        ("nccl", {}, "vLLM has none of that name"),
        (LOW_LATENCY, {"gpu": "a100-80g"}, "on a100-80g it is not yet measured"),
        (LOW_LATENCY, {"data_parallel_size": 24}, "not on 24 GPUs"),
        (HIGH_THROUGHPUT, {"data_parallel_size": 64}, "on 1, 2, 4 node"),
        (LOW_LATENCY, {"data_parallel_size": 6}, "6 GPUs do not divide the 128 experts"),
        (LOW_LATENCY, {"policy": AUTO}, "give --sglang-moe-a2a-backend"),
        (None, {"policy": AUTO, "data_parallel_size": 1}, "give --data-parallel-size of 2 or more"),
    ],
)
def test_what_has_no_price_is_refused(backend, options, words):
    with pytest.raises(UserError, match=words):
        setup_of(**{"backend": backend} | options)
