"""Layers with a sliding window: counts against members, memory with rings, prices by hand, and jumps against steps."""

import json
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtwin.testing.conformance import DECODES, Workload, check, draw_workload, with_prefix
from kvtwin.testing.engines import PREFILL, limits, linear_machine, requests, roofline_machine, simulate, tiny_model
from sim.bounds.work import least_work
from sim.cost.forms import LinearCost
from sim.engine.batch import DecodeBatch
from sim.engine.itl import GapCollector
from sim.engine.limits import WindowLimits
from sim.engine.plan import IterationPlan, Origin, StepTimes, WindowTokens
from sim.engine.sequence import Sequence
from sim.engine.windowed_batch import WindowedBatch
from sim.errors import UserError
from sim.options.policies import parse_policy
from sim.options.scenario import build_scenario
from sim.run.prepare import prepare
from sim.run.simulate import build_run
from sim.specs.kv_format import KVLayers
from sim.systems.vllm055 import VllmRecompute
from traces.request import Request


def windowed_model(full: int = 2, window: int = 20, windowed: int = 2):
    """Four layers by default, two of them with a window of 20 tokens."""
    layers = (
        KVLayers(num_layers=full, num_stored=full),
        KVLayers(num_layers=windowed, num_stored=windowed, window=window),
    )
    return msgspec.structs.replace(tiny_model(full + windowed), kv_layers=tuple(c for c in layers if c.num_layers))


def member(batch: DecodeBatch, request_id: int, prompt: int, output: int) -> Sequence:
    seq = Sequence(Request(request_id, 0.0, prompt, output))
    seq.num_tokens, seq.num_generated, seq.last_token_s = prompt + 1, 1, 0.0
    batch.add(seq)
    return seq


# -- the batch -----------------------------------------------------------------------------------------------------


def test_what_windows_read_by_hand() -> None:
    """Contexts 4, 9 and 30 under a window of 10, a ring of 3 blocks of 4: 12 tokens, a block begins after 4, 8 ..."""
    batch = WindowedBatch(4, GapCollector(), WindowLimits(10, 1, 1, 3))
    seqs = [member(batch, i, prompt, 40) for i, prompt in enumerate((3, 8, 29))]
    assert batch.windowed == WindowTokens(4 + 9 + 10, 2)
    # 9 -> 10 is linear, 10 -> 11 is not: two iterations.
    assert batch.steps_to_finish() == 2
    assert [batch.blocks_needed(n) for n in (1, 2, 4)] == [1, 2, 3]
    assert [batch.ring_blocks_needed(n) for n in (1, 2)] == [1, 2]
    batch.advance(StepTimes(2, 1.0, 0.5, 0.0, 1.5, 2))
    # Contexts 6, 11, 32.
    assert batch.windowed == WindowTokens(6 + 10 + 10, 1)
    assert [batch.ring_grows(seq) for seq in seqs] == [True, True, False]
    # The second one's ring is full with 12 tokens cached, at a context of 13.
    assert batch.steps_to_finish() == 2
    batch.remove(seqs[0])
    assert batch.windowed == WindowTokens(20, 0)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(2, 40)), min_size=1, max_size=8),
    st.integers(1, 30),
    st.integers(1, 6),
    st.integers(1, 5),
    st.data(),
)
def test_counts_are_those_of_the_members(
    prompts: list[tuple[int, int]], window: int, block_size: int, ring: int, data: st.DataObject
) -> None:
    """After any jumps, departures, arrivals and iterations that leave some out."""
    batch = WindowedBatch(block_size, GapCollector(), WindowLimits(window, 1, 1, ring))
    waiting = list(enumerate(prompts))
    while waiting or batch.members:
        if waiting and (not batch.members or data.draw(st.booleans())):
            index, (prompt, output) = waiting.pop()
            member(batch, index, prompt, output)
        steps = data.draw(st.integers(1, batch.steps_to_finish()))
        for n in range(1, steps + 1):
            cached = [batch.num_tokens_of(seq) - 1 for seq in batch.members]
            begun = sum(
                min(ring, -(-(tokens + n) // block_size)) - min(ring, -(-tokens // block_size)) for tokens in cached
            )
            assert batch.ring_blocks_needed(n) == begun
        before, step = batch.windowed, batch.step
        contexts = [batch.num_tokens_of(seq) for seq in batch.members]
        for i in range(steps):
            # Linear all along the jump.
            assert before.tokens + i * before.num_growing == sum(min(window, tokens + i) for tokens in contexts)
        if data.draw(st.booleans()):
            batch.advance(StepTimes(steps, 1.0, 0.5, 0.0, 1.5, steps))
            assert batch.step == step + steps
        else:
            chosen = [seq for seq in batch.members if data.draw(st.booleans())]
            batch.advance_some(chosen, 1.0)
        for seq in list(batch.members):
            if data.draw(st.integers(0, 9)) == 0:
                batch.remove(seq)
        read = [min(window, batch.num_tokens_of(seq)) for seq in batch.members]
        assert batch.windowed == (sum(read), sum(tokens < window for tokens in read))


# -- prices --------------------------------------------------------------------------------------------------------


def test_decodes_pay_for_what_windows_hold() -> None:
    """Half the layers read the window: of a context token's seconds, half are for those."""
    model = windowed_model()
    plain, uneven = (roofline_machine("a100-80g", 1.0, model=m).cost for m in (tiny_model(4), model))
    for window in (WindowTokens(1000, 5), WindowTokens(400, 2)):
        first, slope = uneven.decode_run(8, 1000, window)
        base, per_token = plain.decode_run(8, 0)[0], plain.decode_run(1, 0)[1]
        assert first == pytest.approx(base + per_token * (1000 + window.tokens) / 2)
        assert slope == pytest.approx(per_token * (8 + window.num_growing) / 2)
    # Where it is not said what is in the windows, all is.
    assert uneven.decode_run(8, 1000) == pytest.approx(plain.decode_run(8, 1000))
    linear = LinearCost((0.0, 0.0, 0.0), (0.0, 0.0, 1e-3), 1.0, 1.0, model=model)
    assert linear.decode_run(8, 1000, WindowTokens(400, 2)) == pytest.approx((1.4 / 2, 0.01 / 2))


def test_prompts_pay_for_the_pairs_that_they_see() -> None:
    """30 new tokens after 10: full layers see 30 x 10 + 465 pairs, windows of 20 see 11 + ... + 20 and then 20 each."""
    uneven = roofline_machine("a100-80g", 1.0, model=windowed_model()).cost
    plain = roofline_machine("a100-80g", 1.0, model=tiny_model(4)).cost
    seq = Sequence(Request(0, 0.0, 40, 5))
    seq.num_computed = 10
    plan = IterationPlan()
    plan.add_chunk(seq, 30, Origin.CONTINUED)
    full, seen = 30 * 10 + 465, sum(range(11, 21)) + 20 * 20
    per_pair = plain.attention_s_per_pair / 4
    saved = plain.iteration_s(plan) - uneven.iteration_s(plan)
    assert saved == pytest.approx(2 * per_pair * (full - seen))
    assert plain.prefill_s(40) - uneven.prefill_s(40) == pytest.approx(2 * per_pair * (820 - 210 - 20 * 20))


def test_half_of_yoco_computes_for_the_last_token_only() -> None:
    """A prompt of many tokens takes about half the linear time, and attention over the context once for the others."""
    layers = (
        KVLayers(num_layers=2, num_stored=2, window=20),
        KVLayers(num_layers=2, num_stored=1, last_token_only=True),
    )
    model = msgspec.structs.replace(tiny_model(4), kv_layers=layers)
    cost = roofline_machine("a100-80g", 1.0, model=model).cost
    share, pairs_s = model.last_token_share, cost.attention_s_per_pair / 4
    expected = (1 - share) * cost.linear_s(4000) + share * cost.linear_s(1)
    expected += 2 * pairs_s * (210 + 3980 * 20) + 2 * pairs_s * 4000
    assert cost.prefill_s(4000) == pytest.approx(expected + cost.overhead_s + cost.head_s(1))
    # Half of a prompt asks for no token, and its attention sees the window alone; the other half asks for one.
    for computed, num_sampled in ((0, 0), (2000, 1)):
        seq = Sequence(Request(0, 0.0, 4000, 5))
        seq.num_computed = computed
        plan = IterationPlan()
        plan.add_chunk(seq, 2000, Origin.CONTINUED)
        seen = 2000 * 20 if computed else 210 + 1980 * 20
        expected = (1 - share) * cost.linear_s(2000) + 2 * pairs_s * seen + cost.overhead_s
        if num_sampled:
            expected += share * cost.linear_s(1) + 2 * pairs_s * 4000 + cost.head_s(1)
        assert cost.iteration_s(plan) == pytest.approx(expected)
    # One token is no prompt: halves add up to the whole.
    read_s = cost.full_s_per_token + cost.window_s_per_token
    expected = cost.linear_s(1) + cost.head_s(1) + cost.overhead_s + read_s + cost.kv_padding_s
    assert cost.decode_run(1, 1, WindowTokens(1, 1))[0] == pytest.approx(expected)


def test_a_bound_counts_the_same_pairs_of_prompts() -> None:
    """210 of the first 20 tokens and 20 a token from there; what reads with its last token reads all once."""
    layers = (
        KVLayers(num_layers=1, num_stored=1, window=20),
        KVLayers(num_layers=2, num_stored=1, last_token_only=True),
        KVLayers(num_layers=1, num_stored=1),
    )
    cost = roofline_machine("a100-80g", 1.0, model=msgspec.structs.replace(tiny_model(4), kv_layers=layers)).cost
    work, _ = least_work(requests((0.0, 4000, 1), (0.0, 10, 1)), limits(gpu=1000, max_model_len=8192), cost)
    pair_s = cost.attention_s_per_pair / 4
    for found_s, tokens, windowed in zip(work.attention_s, (4000, 10), (210 + 3980 * 20, 55), strict=True):
        assert found_s == pytest.approx(pair_s * (windowed + 2 * tokens + tokens * (tokens + 1) // 2))
        assert found_s == pytest.approx(cost._attention_s(0, tokens, is_sampled=True))


# -- memory --------------------------------------------------------------------------------------------------------

HYBRID = WindowLimits(20, 1, 2, 2)
"""A group that keeps all and two with rings of two blocks, blocks of 16 tokens."""


def test_rings_hold_two_blocks_by_hand() -> None:
    """A prompt of 100 tokens has 7 blocks: 7 + 2 x 2 pool blocks. Its 60 decodes take three more, of full layers."""
    machine = replace(linear_machine(), model=windowed_model(1, 20, 2))
    used: list[int] = []
    outcome = simulate(
        VllmRecompute(), requests((0.0, 100, 61)), limits(gpu=10, host=10, window=HYBRID), machine=machine, jump=False,
        observe=lambda scheduler: lambda *_: used.append(scheduler.gpu.num_blocks - scheduler.gpu.free),
    )  # fmt: skip
    assert outcome.scheduler.gpu.num_blocks == 30
    assert max(used) == 10 + 2 * 2
    assert outcome.ended[0].num_generated == 61


@st.composite
def windowed_workloads(draw: st.DrawFn, name: str, *, rings: bool = True, named: bool = False) -> Workload:
    """Crowds under layers with rings, or under memory that keeps everything and lets layers read a window; some of them
    `named` as beginning alike."""
    found = draw_workload(draw, parse_policy(name, {})[1])
    size = draw(st.sampled_from([found.limits.block_size, 16, 8])) if named else 0
    arrivals = [with_prefix(request, size, draw) if named else request for request in found.arrivals]
    window, full = draw(st.integers(1, 100)), draw(st.sampled_from([0, 1, 2])) if rings else 1
    groups = WindowLimits(window, full, draw(st.integers(1, 3)), -(-window // found.limits.block_size))
    limit = replace(found.limits, window=groups if rings else WindowLimits(window), enable_prefix_caching=False)
    model = windowed_model(full, window, 2)
    cost = LinearCost(PREFILL, draw(st.sampled_from(DECODES[:2])), 3e-4, limit.block_bytes, model=model)
    return Workload(arrivals, limit, replace(found.machine, model=model, cost=cost))


@pytest.mark.parametrize("name", ["vllm-recompute", "vllm-swap", "sarathi", "fastgen"])
def test_rings_keep_to_the_conformance_suite(name: str) -> None:
    """Every block is recounted after every step; jumped and stepped runs are equal."""
    check(parse_policy(name, {})[1], examples=40, among=windowed_workloads(name))


@pytest.mark.parametrize("name", ["layerkv", "layerkv:decode=stream", "fastserve", "orca", "fastertransformer"])
def test_other_memories_keep_everything_and_read_windows(name: str) -> None:
    check(parse_policy(name, {})[1], examples=30, among=windowed_workloads(name, rings=False))


def test_a_window_beyond_every_context_changes_nothing() -> None:
    """Neither times nor preemptions: full layers and rings that are never full."""
    arrivals = requests(*((0.01 * i, 20 + 7 * i, 10 + 3 * i) for i in range(12)))
    plain = simulate(parse_policy("vllm-swap", {})[1], arrivals, limits(gpu=20))
    groups = WindowLimits(10_000, 1, 0, 700)
    windowed = simulate(parse_policy("vllm-swap", {})[1], arrivals, limits(gpu=20, window=groups))
    one, other = plain.by_id(), windowed.by_id()
    assert [one[i].finish_s for i in range(12)] == [other[i].finish_s for i in range(12)]
    assert plain.scheduler.counters == windowed.scheduler.counters
    assert plain.scheduler.counters.preemptions > 0


# -- scenarios -----------------------------------------------------------------------------------------------------


LLAMA_ON_L20 = {"model": "llama-2-7b", "gpu": "l20", "max_model_len": 4096}
INT4_BYTES = 2 * 32 * 32 * 72
"""Of a token: keys and values of 32 layers and heads, 128 elements and their scales in 72 bytes."""


def setup(policy: str = "vllm-recompute", **options):
    values = {"workload": "sharegpt", "model": "gemma-3-27b", "gpu": "h100", "max_model_len": 16_384} | options
    return prepare(build_scenario(values), policy, parse_policy(policy, {})[1])


def test_pools_of_a_model_with_windows() -> None:
    """Gemma-3-27B: 7 groups of 10 layers (52 windows in six of them), 16 tokens, 8,192 bytes a token and layer."""
    hybrid, whole = setup(), setup(disable_hybrid_kv_cache_manager=True)
    assert hybrid.limits.window == WindowLimits(1024, 1, 6, 64, window_first=True)
    assert hybrid.limits.block_bytes == 16 * 70 * 2 * 16 * 128 * 2
    assert whole.limits.window == WindowLimits(1024)
    assert whole.limits.block_bytes == 16 * 62 * 2 * 16 * 128 * 2
    # Policies that keep layers apart, or pause sequences, keep everything.
    assert setup("layerkv").limits.window == WindowLimits(1024)
    # All layers of Mistral have the window: its ring needs no hybrid manager.
    mistral = setup(model="mistral-7b-v0.1", disable_hybrid_kv_cache_manager=True)
    assert mistral.limits.window == WindowLimits(4096, 0, 1, 256, window_first=True)
    assert setup(model="llama-3.1-8b").limits.window is None


def test_a_type_of_half_the_bytes_doubles_the_pool() -> None:
    auto, fp8, int4 = (setup(**LLAMA_ON_L20, kv_cache_dtype=name) for name in ("auto", "fp8", "int4"))
    assert auto.limits.block_bytes == 2 * fp8.limits.block_bytes == 16 * 524_288
    assert int4.limits.block_bytes == 16 * INT4_BYTES
    assert fp8.limits.num_gpu_blocks in (2 * auto.limits.num_gpu_blocks, 2 * auto.limits.num_gpu_blocks + 1)


@pytest.mark.parametrize(("dtype", "read_bytes", "ops"), [("fp8", 262_144, 2), ("int4", INT4_BYTES, 4)])
def test_dequantisation_by_hand(dtype: str, read_bytes: int, ops: int) -> None:
    """Two vector operations for each of 262,144 elements, four if packed, at a sixteenth of the tensor cores' rate."""
    found = setup(**LLAMA_ON_L20, kv_cache_dtype=dtype)
    value, p = found.profile.value, found.profile.value("roofline_exponent")
    read_s, compute_s = read_bytes / value("kv_bytes_per_s"), ops * 262_144 / (value("flops_per_s") / 16)
    assert found.cost.decode_run(1, 1)[1] == pytest.approx((read_s**p + compute_s**p) ** (1 / p))


def test_latent_decodes_by_hand() -> None:
    """DeepSeek-V2-Lite on an A100: 1,152 bytes and 16 x 2,176 FLOPs for each token and layer, 27 layers."""
    found = setup(model="deepseek-v2-lite", gpu="a100-80g", max_model_len=4096)
    value, p = found.profile.value, found.profile.value("roofline_exponent")
    read_s, compute_s = 27 * 1152 / value("kv_bytes_per_s"), 27 * 16 * 2176 / value("attention_flops_per_s")
    assert found.cost.decode_run(1, 1)[1] == pytest.approx((read_s**p + compute_s**p) ** (1 / p))
    # On an H100 its kernels were timed, which compute tiles of 64 heads.
    timed = setup(model="deepseek-v2-lite", gpu="h100", max_model_len=4096)
    value, p = timed.profile.value, timed.profile.value("roofline_exponent")
    read_s, compute_s = 27 * 1152 / value("kv_bytes_per_s"), 27 * 64 * 2176 / value("latent_decode_flops_per_s")
    assert timed.cost.decode_run(1, 1)[1] == pytest.approx((read_s**p + compute_s**p) ** (1 / p))
    # A latent is one piece of a layer, not keys and values.
    assert found.cost.num_copies(3, 27) == 3 * 27


def test_layers_that_share_their_kv_have_it_once_and_not_apart(tmp_path) -> None:
    config = {
        "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8,
        "num_key_value_heads": 8, "intermediate_size": 96, "vocab_size": 100, "max_position_embeddings": 512,
        "use_cla": True, "cla_share_factor": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    shared = {"model": str(tmp_path), "max_model_len": 512, "num_gpu_blocks_override": 10}
    assert setup(**shared).limits.block_bytes == 16 * 2 * 2 * 64 * 2
    with pytest.raises(UserError, match=r"memory=layers keeps each layer's KV apart.*use memory=paged"):
        build_run(setup("layerkv", **shared), [])
