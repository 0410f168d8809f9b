"""Measured factors of matrix products: by hand, and where they do not count."""

import pytest
from msgspec import structs

from sim.bounds.step_price import step_prices
from sim.cost.profile import KERNEL_NAMES, load_profile
from sim.cost.roofline import RooflineCost
from sim.engine.plan import IterationPlan
from sim.specs.hardware import load_hardware
from sim.specs.models import load_model

CURVE = [(16, 0.5), (256, 0.8), (257, 1.6), (512, 1.2)]
HARDWARE = load_hardware("a100-80g")
PROFILE = load_profile("a100-80g-imported")


def cost_of(points, model="llama-3.1-8b", **other) -> RooflineCost:
    return RooflineCost(load_model(model), HARDWARE, structs.replace(PROFILE, linear_factors=points, **other), 1)


def between_s(cost: RooflineCost, tokens: int) -> float:
    return max(cost.elementwise_least_s, tokens * cost.elementwise_s_per_token)


@pytest.mark.parametrize(
    ("tokens", "factor"), [(1, 0.5), (16, 0.5), (136, 0.65), (256, 0.8), (257, 1.6), (512, 1.2), (9000, 1.2)]
)
def test_products_take_their_factor_of_the_ridge(tokens, factor):
    with_factors, plain = cost_of(CURVE), cost_of(None)
    ridge_s = plain.linear_s(tokens) - between_s(plain, tokens)
    assert with_factors.linear_s(tokens) == pytest.approx(factor * ridge_s + between_s(plain, tokens))
    more_s = (factor - 1) * ridge_s
    first_s, slope_s = plain.decode_run(tokens, 100 * tokens)
    assert with_factors.decode_run(tokens, 100 * tokens) == (pytest.approx(first_s + more_s), slope_s)
    assert with_factors.prefill_s(tokens) == pytest.approx(plain.prefill_s(tokens) + more_s)


def test_a_mixture_whose_experts_are_not_priced_apart_has_none():
    constants = PROFILE.without(KERNEL_NAMES).constants
    with_factors, plain = (cost_of(points, "deepseek-v2-lite", constants=constants) for points in (CURVE, None))
    assert with_factors.linear_s(300) == plain.linear_s(300)


def test_fp8_products_have_their_own_or_else_those_of_16_bits():
    model = load_model("llama-3.1-8b").with_quantization("fp8")

    def linear_s(**factors):
        profile = structs.replace(load_profile("h100-derived"), **factors)
        cost = RooflineCost(model, load_hardware("h100"), profile, 1)
        return cost.linear_s(256) - between_s(cost, 256)

    bare_s = linear_s()
    assert linear_s(linear_factors=CURVE) == pytest.approx(0.8 * bare_s)
    assert linear_s(linear_factors=CURVE, fp8_linear_factors=[(1, 1.5)]) == pytest.approx(1.5 * bare_s)
    assert linear_s(fp8_linear_factors=[(1, 1.5)]) == pytest.approx(1.5 * bare_s)


def test_a_factor_for_all_sizes_scales_bounds_as_a_whole():
    plan = IterationPlan()
    plan.prefill_tokens = 50_000
    halved, plain = (max(p.least_s(plan, 0.0) for p in step_prices(cost_of(c), 16, 1000)) for c in ([(1, 0.5)], None))
    between = 50_000 * cost_of(None).elementwise_s_per_token
    assert halved - between == pytest.approx((plain - between) / 2, rel=1e-6)
