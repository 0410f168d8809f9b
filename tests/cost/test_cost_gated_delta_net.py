"""Layers that keep a state: their price, the size of their memory, which systems refuse them."""

import pytest
from msgspec import structs

from calib.gdn import GdnSample, GdnTerms, predict_gdn_s
from sim.cost.gated_delta_net import delta_net_price
from sim.cost.profile import GDN_UNITS, load_profile
from sim.cost.roofline import RooflineCost
from sim.engine.limits import StateLimits
from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence
from sim.errors import UserError
from sim.options.policies import parse_policy
from sim.options.scenario import Scenario
from sim.run.prepare import Setup, prepare
from sim.specs.hardware import load_hardware
from sim.specs.memory import state_block_size
from sim.specs.model_spec import ModelSpec
from sim.specs.models import load_model
from traces.request import Request

HARDWARE = load_hardware("h200")
PROFILE = load_profile("h200-imported")
MODEL = load_model("qwen3.5-35b-a3b")


def cost_of(model: ModelSpec = MODEL, profile=PROFILE, tp: int = 1) -> RooflineCost:
    return RooflineCost(model, HARDWARE, profile, tp)


def setup(policy: str = "vllm-v1", **options) -> Setup:
    scenario = Scenario(**{"model": "qwen3.5-35b-a3b", "gpu": "h200", "workload": "fixed", "num_prompts": 4} | options)
    return prepare(scenario, *parse_policy(policy, {}))


# -- prices ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize(
    ("phase", "batch", "tokens"),
    [*(("decode", batch, 1) for batch in (1, 7, 300)),
     *(("prefill", *shape) for shape in ((1, 1), (1, 9000), (5, 300), (40, 2000)))],
)  # fmt: skip
def test_the_simulator_prices_what_the_fit_explains(tp, phase, batch, tokens):
    price, constants = cost_of(tp=tp).delta_net, PROFILE.gdn
    assert price and constants
    sample = GdnSample(
        phase=phase, num_key_heads=16 // tp, num_value_heads=32 // tp, batch=batch, new_tokens=tokens, latency_s=1.0
    )
    (layer_s,) = predict_gdn_s(constants, GdnTerms.of([sample]))
    found_s = price.decode_s(batch) if phase == "decode" else price.prefill_s([tokens] * batch)
    assert found_s == pytest.approx(30 * layer_s)


def test_the_longest_chunk_counts_where_heads_are_few():
    price = cost_of(tp=8).delta_net
    assert price
    alone_s, beside_s = price.prefill_s([4000]), price.prefill_s([4000, 10])
    assert beside_s - alone_s == pytest.approx(10 * price.conv_s_per_token)
    assert price.prefill_s([]) == price.decode_s(0) == 0.0


def test_an_iteration_pays_for_decodes_and_prompts_of_states():
    cost, plan = cost_of(), IterationPlan()
    assert cost.delta_net
    for number, tokens in enumerate((500, 70)):
        plan.add_chunk(Sequence(Request(number, 0.0, tokens, 5)), tokens, "admitted")
    plan.num_decodes, plan.decode_context_tokens = 9, 9000
    seconds = cost.iteration_s(plan)
    states_s = cost.delta_net.decode_s(9) + cost.delta_net.prefill_s([500, 70])
    cost.delta_net = None
    assert seconds - cost.iteration_s(plan) == pytest.approx(states_s)
    whole, without = cost_of(), cost_of()
    without.delta_net = None
    assert whole.delta_net
    # What a decode costs beside its context does not depend on the context.
    assert whole.decode_run(9, 5000)[0] - without.decode_run(9, 5000)[0] == pytest.approx(whole.delta_net.decode_s(9))
    assert whole.decode_run(9, 5000)[1] == without.decode_run(9, 5000)[1]
    assert whole.prefill_s(777) - without.prefill_s(777) == pytest.approx(whole.delta_net.prefill_s([777]))


def test_attention_is_that_of_the_layers_that_attend():
    """Ten of forty, each token's KV in them 2,048 bytes."""
    cost = cost_of()
    assert cost.full_s_per_token == pytest.approx(10 * 2048 / PROFILE.value("kv_bytes_per_s"))
    flops = 4 * 10 * 16 * 256
    assert cost.attention_s_per_pair == pytest.approx(flops / PROFILE.value("attention_flops_per_s"))


def test_profiles_without_such_constants_refuse_the_model_and_price_others():
    without = PROFILE.without(GDN_UNITS)
    with pytest.raises(UserError, match=r"has no constants of Gated DeltaNet .* 30 layers of qwen3.5-35b-a3b"):
        cost_of(profile=without)
    other = load_model("llama-3.1-8b")
    assert cost_of(other, without).decode_run(9, 5000) == cost_of(other).decode_run(9, 5000)
    assert delta_net_price(other, without, 1) is None


def test_heads_of_another_size_are_refused():
    assert MODEL.gdn
    with pytest.raises(UserError, match=r"timed with heads of 128 elements, and those of .* have 64 and 128"):
        cost_of(structs.replace(MODEL, gdn=structs.replace(MODEL.gdn, key_head_dim=64)))


def test_mamba2_reads_states_and_computes_chunks_by_formula():
    """No constants of such kernels: 64 heads of 64 with states of 128, chunks of 256 tokens, in 36 layers."""
    model = load_model("granite-4.0-h-micro")
    price, gdn = delta_net_price(model, PROFILE, 1), model.gdn
    assert price and gdn
    bandwidth, flops = PROFILE.value("hbm_bytes_per_s"), PROFILE.value("flops_per_s")
    state, inputs = 64 * 64 * 128 * 2, 3 * (4096 + 2 * 128) * 2
    token = 3 * 4352 * 2 + 4096 * 2
    assert price.decode_s(10) == pytest.approx(36 * 10 * (2 * (state + inputs) + token) / bandwidth)
    assert gdn.scan_flops_per_token() == 64 * (2 * 256 * 64 + 4 * 128 * 64) + 2 * 256 * 128
    scanned_s = gdn.scan_flops_per_token() / flops + 2 * 4352 * 2 / bandwidth
    assert price.prefill_s((700, 300)) == pytest.approx(36 * 1000 * scanned_s)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_blocks_are_as_large_as_a_state():
    """2,146,304 bytes of state are 1,048 tokens of 2,048 bytes; with kernels of chunks of 64 the next multiple."""
    assert MODEL.gdn and MODEL.gdn.page_bytes(2.0) == 2_146_304
    assert state_block_size(MODEL, 1, 16, within_chunks=False) == 1056
    assert state_block_size(MODEL, 1, 16, within_chunks=True) == 1088
    assert state_block_size(MODEL, 1, 96, within_chunks=True) == 1152
    # Eight GPUs hold a KV head each, four of them the same.
    assert state_block_size(MODEL, 8, 16, within_chunks=False) == 272
    assert state_block_size(load_model("llama-3.1-8b"), 1, 16, within_chunks=True) == 16


def test_a_block_that_a_public_log_shows():
    """vLLM's pull request 37467, of a model with four KV heads: 528 tokens, 0.76 % padding."""
    model = structs.replace(MODEL, num_kv_heads=4)
    assert model.gdn and state_block_size(model, 1, 16, within_chunks=False) == 528
    padding = 528 * model.kv_bytes_per_token_layer() / model.gdn.page_bytes(2.0) - 1
    assert padding == pytest.approx(0.0076, abs=5e-5)


def test_pools_hold_groups_of_ten_layers():
    """Thirty layers with a state are three groups, ten that attend one."""
    found = setup()
    assert found.limits.block_size == 1088
    assert found.limits.states == StateLimits(1, 3, exports_within_chunks=True)
    assert found.limits.block_bytes == 1088 * 2048 * 40
    off = setup(enable_prefix_caching=False)
    assert (off.limits.block_size, off.limits.block_bytes) == (1056, 1056 * 2048 * 40)
    assert setup(kv_cache_dtype="fp8").limits.block_size == 2112
