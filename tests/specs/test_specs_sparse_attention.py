"""Attention to a part of the context: what is read and kept by hand, prices and pools of it, and what is refused."""

from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvtwin.testing.conformance import Workload, check, limits_of, rows
from kvtwin.testing.engines import Machine, linear_machine, requests, simulate, tiny_model
from sim.bounds.work import least_work
from sim.cost.forms import LinearCost
from sim.cost.roofline import RooflineCost
from sim.engine.limits import WindowLimits
from sim.engine.plan import WindowTokens
from sim.errors import UserError
from sim.options.policies import parse_policy
from sim.options.scenario import build_scenario
from sim.run.prepare import Setup, prepare
from sim.specs.models import load_model
from sim.specs.sparse_attention import parse_sparse_attention, with_sparse_attention
from sim.study.serve_commands import serve_commands

LLAMA = load_model("llama-2-7b")
LAYER_BYTES = 16_384
"""Of Llama-2-7B, a token and layer: 2 x 32 heads x 128 elements x 2 bytes."""
KEPT = ("quest:budget=40", "quest:budget=7,page=4,dense-layers=0", "clusterkv:budget=30", "double-sparsity")
FORGOTTEN = ("streaming-llm:window=40,sinks=1", "h2o:budget=24", "pyramidinfer:share=0.4", "minicache")
HOSTED = ("infinigen", "double-sparsity:dense-layers=2")
COMPRESSED = ("snapkv:budget=20", "kvpress:compression-ratio=0.7")
"""Prompts, when they have been computed."""


def setup(method: str, policy: str = "vllm-recompute", **options) -> Setup:
    values = {"workload": "sharegpt", "model": "llama-2-7b", "sparse_attention": method} | options
    return prepare(build_scenario(values), policy, parse_policy(policy, {})[1])


def tokens_read(method: str, context: int) -> float:
    """By a decode in all layers, over the model's layers."""
    kv = with_sparse_attention(LLAMA, parse_sparse_attention(method)).kv_format()
    return (kv.context_reads * context + kv.num_window_readers * min(context, kv.window or 0)) / LLAMA.num_layers


@pytest.mark.parametrize(
    ("method", "context", "expected"),
    [
        # Section 3.3 of the paper: 64K tokens in pages of 16, of which 4K tokens are read: an eighth.
        ("quest:budget=4096,dense-layers=0", 65_536, 65_536 / 8),
        # Two of 32 layers read all.
        ("quest:budget=4096", 65_536, (2 * 65_536 + 30 * 8192) / 32),
        ("quest:budget=4096,dense-layers=0", 1600, 1700),
        ("streaming-llm:window=2044", 2000, 2000),
        ("streaming-llm:window=2044", 1_000_000, 2048),
        ("h2o:budget=512", 4096, 512),
        ("pyramidinfer:share=0.46", 1000, 460),
        # 400 clusters of 80 tokens, of each a mean key: half a token's KV.
        ("clusterkv:budget=1024,dense-layers=0", 32_000, 1024 + 200),
        # A sixteenth of the tokens; labels of a sixteenth of the keys' channels, in 4 of 16 bits: 1/128.
        ("double-sparsity", 12_800, 800 + 100),
        # A fifth of the tokens, and a tenth of their KV as a fifth of the keys' channels; the first layer reads all.
        ("infinigen", 3200, (3200 + 31 * (640 + 320)) / 32),
        ("double-sparsity:share=0.25,channels=0.5,label-bits=16", 1000, 250 + 250),
    ],
)
def test_tokens_read_of_a_context(method, context, expected):
    assert tokens_read(method, context) == pytest.approx(expected)


def test_memory_that_forgets_is_smaller_and_memory_with_an_index_larger():
    """A block of 16 tokens and 32 layers is 8 MiB; one more token a page of 16 for 30 of the layers."""
    assert setup("quest:budget=512").limits.block_bytes == 16 * LAYER_BYTES * (32 + 30 / 16)
    assert setup("quest:budget=512").limits.window == WindowLimits(512)
    assert setup("double-sparsity").limits.block_bytes == 16 * LAYER_BYTES * 32 * (1 + 1 / 128)
    assert setup("double-sparsity").limits.window is None
    for policy in ("vllm-recompute", "vllm-v1"):
        limits = setup("streaming-llm:window=100", policy).limits
        assert limits.block_bytes == 16 * LAYER_BYTES * 32
        # 104 tokens are 7 blocks.
        assert limits.window == WindowLimits(104, 0, 1, 7, window_first=True, chosen=True)
        assert not limits.enable_prefix_caching
    assert setup("quest:budget=512", "vllm-v1").limits.enable_prefix_caching


def test_a_block_is_smaller_where_each_token_is_kept_by_some_layers():
    """PyramidInfer's Llama-2-13B holds 46 % of the KV: 54 % less."""
    kept = setup("pyramidinfer:share=0.46").limits
    assert kept.block_bytes == pytest.approx(0.46 * 16 * LAYER_BYTES * 32)
    assert kept.window is None


def test_merged_layers_keep_one_direction_of_two():
    """MiniCache's appendix: b r (s + n) (3.1 h + 2) bytes where 4 b r h (s + n) were, all of which is read.

    Of 13 layers from the 7th on six merge, and the last one stays.
    """
    limits = setup("minicache").limits
    assert limits.block_bytes == pytest.approx(16 * 32 * (3.1 * 4096 + 2))
    assert not limits.enable_prefix_caching
    assert tokens_read("minicache", 1000) == 1000
    small = with_sparse_attention(structs.replace(LLAMA, num_layers=13), parse_sparse_attention("minicache:retained=0"))
    assert [(kind.num_layers, kind.kept_share) for kind in small.kv_classes] == [(7, 1.0), (6, 0.5 + 4 / LAYER_BYTES)]
    with pytest.raises(UserError, match="memory=layers"):
        setup("minicache", "layerkv")


@pytest.mark.parametrize(
    ("method", "prompt", "kept"),
    [
        ("snapkv:budget=1024", 1000, 1000),
        ("snapkv:budget=1024", 16_384, 1024),
        # As KVPress computes it: int(100 x (1 - 0.9)) is 9.
        ("kvpress:compression-ratio=0.9", 100, 9),
        ("kvpress:compression-ratio=0.5", 1001, 500),
        ("kvpress:compression-ratio=0.9", 5, 1),
    ],
)
def test_tokens_kept_of_a_prompt(method, prompt, kept):
    limits = setup(method).limits
    assert limits.kept_of_prompt is not None
    assert limits.kept_of_prompt.tokens(prompt) == kept
    assert limits.window is None
    assert not setup(method, "vllm-v1").limits.enable_prefix_caching


def test_a_compressed_prompt_is_a_shorter_one_from_its_first_token_on():
    """100 tokens in 7 blocks of 16; 20 of them and the answer's first in 2; at its last, 60 + 20 - 1 tokens in 5."""
    found = setup("snapkv:budget=20", num_gpu_blocks_override=20, max_model_len=256)
    plain = linear_machine(found.limits.block_bytes)
    machine = Machine(found.model, plain.cost, plain.profile, plain.hardware)
    seen = []

    def observe(scheduler):
        return lambda plan, *_: seen.append((20 - scheduler.gpu.free, plan.decode_context_tokens))

    simulate(found.policy, requests((0.0, 100, 60)), found.limits, machine=machine, jump=False, observe=observe)
    assert seen[:2] == [(7, 0), (2, 21)]
    assert seen[-1] == (5, 79)


def test_decodes_pay_for_what_they_read():
    """Of 8 decodes with 1,000 tokens, of which 700 are within budgets of 100 and 3 grow below them."""
    kv_bytes_per_s = setup("double-sparsity").profile.value("kv_bytes_per_s")
    token_s = 32 * LAYER_BYTES / kv_bytes_per_s
    for dense in (0, 2):
        cost = setup(f"quest:budget=100,dense-layers={dense}").cost
        first_s, slope_s = cost.decode_run(8, 1000, WindowTokens(700, 3))
        share, within = (dense + (32 - dense) / 16) / 32, (32 - dense) / 32
        assert slope_s == pytest.approx(token_s * (8 * share + 3 * within))
        base_s = cost.decode_run(8, 0, WindowTokens(0, 0))[0]
        assert first_s - base_s == pytest.approx(token_s * (1000 * share + 700 * within))
    assert setup("double-sparsity").cost.decode_run(8, 1000)[1] == pytest.approx(8 * token_s * (1 / 16 + 1 / 128))


def test_linear_prices_know_what_is_read():
    """Seconds a token of all four layers: a quarter of the context in each, and the window in all."""
    model = with_sparse_attention(tiny_model(4), parse_sparse_attention("quest:budget=9,page=4,dense-layers=0"))
    cost = LinearCost((0, 0, 0), (0, 0, 8e-6), 1e-3, 1.0, model=model)
    assert cost.decode_run(2, 100, WindowTokens(18, 1)) == pytest.approx((8e-6 * (25 + 18), 8e-6 * (0.5 + 1)))
    assert cost.unread_s(100) == pytest.approx(8e-6 * 25)


@pytest.mark.parametrize(
    ("method", "pairs"),
    # Of 100 tokens: all 5,050 pairs, or 1 + ... + 20, then 20 each.
    [("quest:budget=20", 5050), ("h2o:budget=20", 5050), ("streaming-llm:window=16", 210 + 80 * 20)],
)
def test_prompts_pay_for_the_pairs_that_they_see_and_bounds_count_as_many(method, pairs):
    cost = setup(method).cost
    assert isinstance(cost, RooflineCost)
    seconds = cost.attention_s_per_pair * pairs
    assert cost._attention_s(0, 100, is_sampled=True) == pytest.approx(seconds)
    work, _ = least_work(requests((0.0, 100, 1)), setup(method).limits, cost)
    assert work.attention_s[0] == pytest.approx(seconds)


@st.composite
def workloads(draw: st.DrawFn, policy: str, methods: tuple[str, ...]) -> Workload:
    """Pools and linear prices as a run has them, of a model of four layers."""
    options = {"num_gpu_blocks_override": draw(st.integers(12, 60)), "max_model_len": 256, "swap_space": 1.0}
    found = setup(draw(st.sampled_from(methods)), policy, **options)
    seqs = draw(st.sampled_from([1, 3, 8]))
    limit = replace(found.limits, num_cpu_blocks=draw(st.sampled_from([3, 1000])))
    limit = limits_of(found.policy, limit, seqs, draw(st.sampled_from([None, max(seqs, 24)])))
    plain = linear_machine(limit.block_bytes)
    decode = draw(st.sampled_from([(0.02, 2e-5, 6e-7), (0.02, 2e-5, 2e-5)]))
    cost = draw(
        st.sampled_from([found.cost, LinearCost((5e-3, 4e-5, 0), decode, 3e-4, limit.block_bytes, model=found.model)])
    )
    now_s, arrivals = 0.0, []
    for gap_s, prompt, output in draw(rows):
        now_s += gap_s
        arrivals.append((now_s, prompt, output))
    return Workload(requests(*arrivals), limit, Machine(found.model, cost, plain.profile, plain.hardware))


@pytest.mark.parametrize("policy", ["vllm-recompute", "vllm-swap", "vllm-v1", "fastserve", "adaptive"])
def test_memory_that_keeps_all_keeps_to_what_every_system_must(policy):
    """Jumped runs equal stepped ones, whether a decode reads a share or up to a budget."""
    check(parse_policy(policy, {})[1], examples=15, among=workloads(policy, KEPT))


@pytest.mark.parametrize("policy", ["vllm-recompute", "vllm-swap"])
def test_memory_that_forgets_keeps_to_it_too(policy):
    check(parse_policy(policy, {})[1], examples=20, among=workloads(policy, FORGOTTEN))


@pytest.mark.parametrize("policy", ["vllm-v1", "sarathi"])
def test_so_it_does_where_prompts_are_split(policy):
    check(parse_policy(policy, {})[1], examples=20, among=workloads(policy, FORGOTTEN[:1]))


@pytest.mark.parametrize("policy", ["vllm-recompute", "vllm-swap", "vllm-v1", "sarathi", "infercept"])
def test_compressed_prompts_keep_to_it_in_chunks_or_whole_and_computed_again(policy):
    check(parse_policy(policy, {})[1], examples=20, among=workloads(policy, COMPRESSED))


@pytest.mark.parametrize("method", COMPRESSED)
def test_no_bound_counts_tokens_that_are_not_read(method):
    """Of a prompt of 100 tokens and 21 generated; a decode has no less than the budget, or 30 % of what came before."""
    found = setup(method)
    work, _ = least_work(requests((0.0, 100, 21)), found.limits, found.cost)
    assert work.context_tokens[0] == {"snapkv:budget=20": 20 * 20}.get(method, int(sum(range(100, 120)) * 0.3))
    assert not work.blocks[0]


def test_kv_that_is_selected_on_the_host_keeps_to_it():
    policy = "kvpr:partial-recompute=false"
    check(parse_policy(policy, {})[1], examples=15, among=workloads(policy, HOSTED))


def test_a_decode_fetches_what_it_attends_to_and_the_index_stays_on_the_gpu():
    """Of 100 tokens, 7 blocks: InfiniGen's first layer reads all, 31 layers a fifth, by a tenth more as index.

    A block has KV of 32 layers and index of 3.1; the host holds as much as half of the GPU's pool has index for.
    """
    found = setup("infinigen", "kvpr:partial-recompute=false", num_gpu_blocks_override=200, max_model_len=256)
    plain, pools, seen = linear_machine(found.limits.block_bytes), {}, []
    machine = Machine(found.model, plain.cost, plain.profile, plain.hardware)

    def observe(scheduler):
        pools.update(gpu=scheduler.gpu.num_blocks, host=scheduler.host.num_blocks)
        return lambda plan, *_: seen.extend(plan.streamed)

    simulate(found.policy, requests((0.0, 100, 3)), found.limits, machine=machine, jump=False, observe=observe)
    index, fetched = 3.1 / 35.1, (1 + 31 / 5) / 35.1
    host = int(100 / index)
    assert pools == {"gpu": 32 * (200 - ceil(host * index)), "host": 32 * host}
    assert [(record.num_groups, record.num_read) for record in seen] == [(32, 32 * ceil(7 * fetched))] * 2


@given(st.sampled_from([*KEPT, *FORGOTTEN]), st.integers(1, 2000))
def test_no_method_reads_more_than_its_index_beside_the_context(method, context):
    kv = with_sparse_attention(LLAMA, parse_sparse_attention(method)).kv_format()
    most = 1 + max(layers.index_share for layers in kv.layers)
    assert 0 < tokens_read(method, context) <= most * context + 1e-9


def test_no_command_starts_a_server_that_attends_so():
    options = {"model": "llama-2-7b", "policy": "vllm-v1", "sparse_attention": "double-sparsity"}
    assert serve_commands(options)[0].startswith("# no server of today runs vllm-v1 with --sparse-attention double")
