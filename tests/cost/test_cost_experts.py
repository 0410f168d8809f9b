"""Routed experts priced by constants of their own: what they add, what falls away."""

import pytest
from msgspec import structs

from calib.experts import WEIGHT_BYTES, ExpertSample, ExpertTerms, predict_expert_s
from sim.cost.profile import EXPERT_NAMES, EXPERT_QUANTIZATIONS, EXPERT_UNITS, Profile, expert_names, load_profile
from sim.cost.roofline import RooflineCost
from sim.specs.hardware import load_hardware
from sim.specs.model_spec import ModelSpec
from sim.specs.models import load_model

HARDWARE = load_hardware("h100")
PROFILE, B200 = load_profile("h100-imported"), load_profile("b200-imported")
TYPES = {
    "": "qwen3-30b-a3b",
    "fp8": "minimax-m2.5",
    "nvfp4": "minimax-m2.5-nvfp4",
    "mxfp4": "gpt-oss-20b",
    "int4": "kimi-k2.5",
}


def profile_of(quantization: str) -> Profile:
    """One with constants of that type of weights: Blackwell alone multiplies NVFP4."""
    return B200 if quantization == "nvfp4" else PROFILE


def cost_of(model: str | ModelSpec, profile: Profile = PROFILE, tp: int = 1) -> RooflineCost:
    return RooflineCost(load_model(model) if isinstance(model, str) else model, HARDWARE, profile, tp)


@pytest.mark.parametrize(("quantization", "name"), TYPES.items())
def test_models_have_experts_of_the_types_of_weights_that_were_timed(quantization, name):
    model = load_model(name)
    assert model.expert_quantization == quantization
    # Kimi's shared expert, one of 385, keeps 16 bits.
    assert model.expert_dtype_bytes == pytest.approx(WEIGHT_BYTES[quantization], rel=0.01 if model.mla else 1e-12)


@pytest.mark.parametrize("quantization", EXPERT_QUANTIZATIONS)
@pytest.mark.parametrize(("tp", "tokens"), [(1, 1), (4, 7), (1, 9000)])
def test_the_simulator_prices_what_the_fit_explains(quantization, tp, tokens):
    model = structs.replace(load_model(TYPES[quantization]), expert_dtype_bytes=WEIGHT_BYTES[quantization])
    profile = profile_of(quantization)
    moe = model.moe
    assert moe
    sample = ExpertSample(
        quantization=quantization, tokens=tokens, hidden_size=model.hidden_size, tp=tp, gated=1, routing="random",
        intermediate_size=moe.moe_intermediate_size, experts_per_token=moe.experts_per_token,
        num_experts=moe.num_experts, latency_s=1.0,
        experts_met=moe.num_experts * (1 - (1 - moe.experts_per_token / moe.num_experts) ** tokens),
    )  # fmt: skip
    constants = {name: profile.value(own) for name, own in expert_names(quantization).items()}
    (layer_s,) = predict_expert_s(constants, ExpertTerms.of([sample]))
    assert cost_of(model, profile, tp).experts_s(tokens) == pytest.approx(moe.num_moe_layers * layer_s)


def test_one_token_by_hand():
    given = dict(zip(EXPERT_UNITS, (1e15, 2e12, 1.0, 4e12, 1e-5), strict=True))
    constants = {n: structs.replace(c, value=given.get(n, c.value)) for n, c in PROFILE.constants.items()}
    model = load_model("qwen3-30b-a3b")
    weights = 48 * 8 * 3 * 2048 * 768
    moved_bytes = 48 * 8 * (3 * 2048 + 6 * 768) * 2
    expected_s = 2 * weights / 1e15 + 2 * weights / 2e12 + moved_bytes / 4e12 + 48 * 1e-5
    assert cost_of(model, structs.replace(PROFILE, constants=constants)).experts_s(1) == pytest.approx(expected_s)


@pytest.mark.parametrize("name", [TYPES[kind] for kind in ("", "fp8", "mxfp4")])
def test_the_rest_is_that_of_a_model_whose_experts_are_gone(name):
    """Factors of the dense products count, and neither quantising nor activating experts is paid twice."""
    model = load_model(name)
    rest = model.without_routed_experts()
    bare = cost_of(structs.replace(model, moe=None, intermediate_size=0, mlp_bias=False))
    cost = cost_of(model)
    assert cost.factors
    for tokens in (1, 40, 5000):
        priced_s = cost.linear_s(tokens) - cost.experts_s(tokens)
        # The router is all that is left of the MLP.
        assert 0.98 * bare.linear_s(tokens) < priced_s < 1.3 * bare.linear_s(tokens)
    assert rest.linear_flops_per_token == model.linear_flops_per_token - model.routed_flops_per_token
    routed_bytes = model.linear_weight_bytes - model.linear_weight_bytes_read(0)
    assert model.routed_weight_bytes == pytest.approx(routed_bytes)
    assert rest.linear_weight_bytes == pytest.approx(model.linear_weight_bytes - routed_bytes)


def test_a_layer_of_experts_launches_its_products_once():
    """Of four products and attention two products are the experts', and one the router's in their place."""
    cost = cost_of("qwen3-30b-a3b")
    assert cost.overhead_s == pytest.approx(48 * 0.8 * PROFILE.value("layer_overhead_s"))
    fp8 = cost_of("minimax-m2.5")
    share = load_model("minimax-m2.5").without_routed_experts().quantised_flops_share
    more_s = share * (PROFILE.value("fp8_layer_overhead_s") - PROFILE.value("layer_overhead_s"))
    assert fp8.overhead_s == pytest.approx(62 * (0.8 * PROFILE.value("layer_overhead_s") + more_s / 2))
    # With shared experts it has all of them.
    shared = cost_of("deepseek-v2-lite")
    launch_s = PROFILE.value("layer_overhead_s") + PROFILE.value("latent_launch_s")
    assert shared.overhead_s == pytest.approx(27 * launch_s)


def test_a_router_in_32_bits_is_whole_on_each_gpu():
    """MiniMax's: 3,072 times 256 weights in each of 62 layers, not in 16 bits and not a fourth of them."""
    model = load_model("minimax-m2.5")
    assert model.moe
    short = structs.replace(model, moe=structs.replace(model.moe, fp32_router=False))
    more_s = 2 * 62 * 3072 * 256 * (1 / 40e12 - 1 / (4 * PROFILE.value("flops_per_s")))
    found_s = cost_of(model, tp=4).linear_s(1000) - cost_of(short, tp=4).linear_s(1000)
    assert found_s == pytest.approx(1000 * more_s)


MODEL = load_model(TYPES[""])


@pytest.mark.parametrize(
    ("model", "profile"),
    [
        (MODEL, PROFILE.without(EXPERT_NAMES)),
        (structs.replace(MODEL, expert_dtype_bytes=1.02), PROFILE),
        (structs.replace(MODEL, expert_dtype_bytes=1.5, quantization="fp8"), PROFILE),
    ],
    ids=["no constants", "int8", "half fp8"],
)
def test_where_no_such_experts_were_timed_they_are_linear_layers(model, profile):
    cost = cost_of(model, profile)
    assert not cost.expert_layers
    least_s = model.linear_weight_bytes_read(8) / profile.value("hbm_bytes_per_s")
    assert least_s < cost.linear_s(8) < 2 * least_s
