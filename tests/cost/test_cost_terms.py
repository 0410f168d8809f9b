"""Terms of the roofline that some models and profiles have: jumps are as steps, bounds below, a faster GPU scales them.

What each term adds is worked out in a file of its own.
"""

import json
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from kvtwin.testing import conformance, limits, requests
from kvtwin.testing.conformance import limits_of
from kvtwin.testing.engines import roofline_machine
from sim.bounds.step_price import LinearPrice, step_prices
from sim.cost.changed_profile import changed
from sim.cost.profile import (
    EXPERT_QUANTIZATIONS,
    EXPERT_UNITS,
    GDN_UNITS,
    LATENT_UNITS,
    Profile,
    expert_names,
    load_profile,
    read_profile,
)
from sim.cost.roofline import RooflineCost
from sim.engine.plan import IterationPlan, Origin
from sim.engine.sequence import Sequence
from sim.errors import UserError
from sim.specs.hardware import load_hardware
from sim.specs.models import load_model
from sim.systems import POLICIES
from traces.request import Request

H100, H200, A100, B200, RTX = (
    load_profile(f"{gpu}-imported") for gpu in ("h100", "h200", "a100-80g", "b200", "rtx-4090")
)
SLOTS = RTX.constants | {"attention_slots": structs.replace(RTX.constants["attention_slots"], value=16.0)}
TERMS = {
    "experts": ("qwen3-30b-a3b", H100),
    "fp8 experts": ("minimax-m2.5", H100),
    "mxfp4 experts": ("gpt-oss-20b", H100),
    "nvfp4 experts": ("minimax-m2.5-nvfp4", B200),
    "int4 experts": ("kimi-k2.5", H100),
    "latents": ("deepseek-v2-lite", H100),
    "states": ("qwen3.5-35b-a3b", H200),
    "factors": ("llama-3.1-8b", structs.replace(A100, linear_factors=[(16, 0.5), (256, 0.8), (257, 1.6), (512, 1.2)])),
    # Few slots: then contexts of small batches are not split, and the longest decides.
    "unlike contexts": ("llama-3.1-8b", structs.replace(RTX, constants=SLOTS)),
}


@cache
def cost_of(name: str, tp: int = 1, change: str = "") -> RooflineCost:
    model, profile = TERMS[name]
    profile = changed(profile, change) if change else profile
    return RooflineCost(load_model(model), load_hardware(profile.gpu), profile, tp)


@pytest.mark.parametrize(
    ("name", "policy", "blocks"),
    [
        ("experts", "vllm-v1", 150), ("experts", "layerkv", 150), ("latents", "vllm-recompute", 150),
        ("factors", "sarathi", 150), ("factors", "layerkv", 150), ("unlike contexts", "vllm-v1", 150),
        ("unlike contexts", "vllm-swap", 60), ("unlike contexts", "layerkv", 60), ("unlike contexts", "adaptive", 150),
    ],
)  # fmt: skip
def test_jumps_are_as_steps(name, policy, blocks):
    machine = replace(roofline_machine(TERMS[name][1].gpu, 1.0), cost=cost_of(name))
    arrivals = requests(*[(0.02 * i, 40 + 37 * i % 500, 5 + 11 * i) for i in range(40)])
    limit = limits_of(POLICIES[policy](), limits(gpu=blocks), 16, None)
    conformance.check_jumps(POLICIES[policy](), conformance.Workload(arrivals, limit, machine))


@cache
def prices_of(name: str, tp: int) -> list[LinearPrice]:
    return step_prices(cost_of(name, tp), 16, 1000)


@pytest.mark.parametrize("name", TERMS)
@settings(max_examples=30, deadline=None)
@given(tp=st.sampled_from([1, 8]), prompt=st.integers(0, 6000), decodes=st.integers(0, 300))
def test_bounds_stay_below(name, tp, prompt, decodes):
    cost, plan = cost_of(name, tp), IterationPlan()
    if not prompt + decodes:
        return
    if prompt:
        plan.add_chunk(Sequence(Request(0, 0.0, prompt, 5)), prompt, Origin.ADMITTED)
    plan.num_decodes, plan.decode_context_tokens = decodes, 100 * decodes
    if decodes > 1 and cost.follows_longest:
        plan.decode_longest_tokens = 150
    least_s = max(price.least_s(plan, 0.0) for price in prices_of(name, tp))
    assert least_s <= 1.0000001 * cost.iteration_s(plan)
    # And not by far: what experts take at the least is in it.
    if prompt > 3000 and name.endswith("experts"):
        assert least_s > 0.5 * (cost.linear_s(prompt + decodes) + cost.overhead_s)


@pytest.mark.parametrize("name", TERMS)
def test_a_gpu_twice_as_fast_takes_half_as_long(name):
    twice, once = cost_of(name, change="gpu_speed=2"), cost_of(name)
    assert twice.decode_run(9, 5000)[0] == pytest.approx(once.decode_run(9, 5000)[0] / 2)
    assert twice.prefill_s(777) == pytest.approx(once.prefill_s(777) / 2)


@pytest.mark.parametrize(
    ("profile", "names", "lacks"),
    [
        (H200, [*GDN_UNITS], "gdn_prefill_heads"),
        (H100, [*LATENT_UNITS], "latent_padding_tokens"),
        *(
            (B200 if kind == "nvfp4" else H100, [*expert_names(kind).values()], expert_names(kind)[constant])
            for kind, constant in zip(EXPERT_QUANTIZATIONS, EXPERT_UNITS, strict=True)
        ),
    ],
    ids=["states", "latents", *(f"{kind} experts" for kind in EXPERT_QUANTIZATIONS)],
)
def test_a_profile_has_all_constants_of_a_term_or_none(tmp_path, profile: Profile, names, lacks):
    data = json.loads(profile.to_json())
    del data["constants"][lacks]
    path = tmp_path / "p.json"
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match=f"constants.{lacks} is missing"):
        read_profile(path)
    for name in names:
        data["constants"].pop(name, None)
    path.write_text(json.dumps(data))
    assert read_profile(path).constants.keys() == profile.constants.keys() - set(names)
