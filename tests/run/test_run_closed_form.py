"""The simulator against results that a formula gives."""

from itertools import pairwise
from math import ceil, inf, nextafter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.testing import DECODE, PREFILL, limits, linear_machine, requests, roofline_machine, simulate
from sim.cost.forms import LinearCost, build_cost
from sim.cost.model import run_s, steps_until
from sim.cost.profile import load_profile
from sim.engine.changes import Direction
from sim.specs.hardware import load_hardware
from sim.specs.memory import kv_cache_blocks
from sim.specs.models import load_model
from sim.systems.vllm055 import VllmRecompute
from traces.generators import generate


def test_a_single_request_takes_its_prefill_and_one_decode_a_token() -> None:
    """Worked by hand: 100 tokens in, 5 out; the k-th decode sees a context of 100 + k tokens."""
    outcome = simulate(VllmRecompute(), requests((2.0, 100, 5)), limits())
    seq = outcome.ended[0]
    prefill = 0.005 + 4e-5 * 100 + 2e-9 * 100**2
    decodes = sum(0.02 + 2e-5 + 6e-7 * (100 + k) for k in range(1, 5))
    assert seq.first_token_s == pytest.approx(2.0 + prefill, abs=1e-12)
    assert seq.finish_s == pytest.approx(2.0 + prefill + decodes, abs=1e-12)
    assert outcome.instance.iterations == 5


def test_one_token_requests_one_at_a_time_queue_as_an_m_d_1() -> None:
    """Mean wait of an M/D/1 queue is rho s / (2 (1 - rho)) (Pollaczek-Khinchine)."""
    service_s, load = 0.05, 0.7
    arrivals = list(
        generate("fixed", num_prompts=20_000, request_rate=load / service_s, seed=5, input_len=10, output_len=1)
    )
    machine = linear_machine(prefill=(service_s, 0.0, 0.0), swap_s_per_block=0.0)
    # A budget of one prompt: the usual one would batch what waits.
    one_each = limits(seqs=1, max_model_len=10, tokens=10)
    outcome = simulate(VllmRecompute(), arrivals, one_each, machine=machine, checked=False)
    waited = np.array(outcome.log.queue_s)
    # Lindley's recursion: a request waits for what is left of the work before it.
    expected = [0.0]
    for before, after in pairwise(request.arrival_s for request in arrivals):
        expected.append(max(0.0, expected[-1] + service_s - (after - before)))
    np.testing.assert_allclose(waited, expected, rtol=1e-6, atol=1e-6)
    assert waited.mean() == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.06)


def test_a_saturated_gpu_gives_the_rooflines_throughput() -> None:
    """256 equal sequences in lockstep: token rate = batch / decode step, summed by hand from the roofline."""
    model, gpu = load_model("llama-2-7b"), load_hardware("h200")
    profile = load_profile(None, gpu)
    pool = kv_cache_blocks(
        model, gpu, tensor_parallel_size=1, gpu_memory_utilization=0.9, block_size=16, max_num_batched_tokens=32768,
        max_num_seqs=256, swap_space_bytes_per_gpu=0,
    )  # fmt: skip
    machine = roofline_machine("h200", pool.block_bytes, model=model)
    batch, prompt, output = 256, 128, 200
    limit = limits(gpu=pool.num_gpu_blocks, tokens=32768, block_bytes=pool.block_bytes)
    outcome = simulate(VllmRecompute(), requests(*[(0.0, prompt, output)] * batch), limit, machine=machine)
    value = profile.value
    flops, bandwidth = value("flops_per_s"), value("hbm_bytes_per_s")
    fixed = 32 * value("layer_overhead_s")
    p = value("roofline_exponent")
    compute, memory = batch * 2 * 4096 * 32000 / flops, (4096 + batch * (1 + 4096 / 32000)) * 32000 * 2 / bandwidth
    head = (compute**p + memory**p) ** (1 / p)
    # In and out of QKV, attention's output, gate and up, down: 3 h + 2 x 4 h / 2 + h + 3 f elements a token and layer.
    activations = 32 * (3 * 4096 + 4 * 4096 + 4096 + 3 * 11008) * 2
    memory = (model.linear_weight_bytes + batch * activations) / bandwidth
    linear = ((batch * model.linear_flops_per_token / flops) ** p + memory**p) ** (1 / p)
    linear *= dict(profile.linear_factors or [])[batch]
    # Two norms with their residual, rotary embedding, KV cache and activation: 8 h + 2 x 2 h + 4 h + 3 f elements.
    between = batch * 32 * (16 * 4096 + 3 * 11008) * 2 / value("elementwise_bytes_per_s")
    linear += max(between, 32 * value("elementwise_launch_s"))
    read_s, padding = 524288 * batch / value("kv_bytes_per_s"), value("kv_padding_tokens")
    decodes = sum(linear + head + fixed + read_s * (prompt + k + padding) for k in range(1, output))
    span = outcome.ended[0].finish_s - outcome.ended[0].first_token_s
    assert span == pytest.approx(decodes, rel=1e-9)
    assert outcome.instance.iterations == output


def test_prefill_cost_is_the_rooflines() -> None:
    """Llama-2-7B, 2,048 tokens on one A100: compute-bound, 2 x linear params x tokens plus causal attention."""
    model, gpu = load_model("llama-2-7b"), load_hardware("a100-80g")
    profile = load_profile(None, gpu)
    machine = roofline_machine("a100-80g", 16 * 524288, model=model)
    outcome = simulate(VllmRecompute(), requests((0.0, 2048, 1)), limits(gpu=200), machine=machine)
    value = profile.value
    expected = (
        2048 * 12.952e9 / value("flops_per_s")
        + 4 * 32 * 4096 * 2048 * 2049 / 2 / value("attention_flops_per_s")
        + 4096 * 32000 * 2 / value("hbm_bytes_per_s")
        + 2048 * 32 * (16 * 4096 + 3 * 11008) * 2 / value("elementwise_bytes_per_s")
        + value("step_overhead_s")
        + 32 * value("layer_overhead_s")
    )
    assert outcome.ended[0].first_token_s == pytest.approx(expected, rel=2e-3)


def test_a_tensor_parallel_group_divides_work_and_adds_all_reduce() -> None:
    model, gpu = load_model("llama-2-70b"), load_hardware("l20")
    profile = load_profile(None, gpu)
    four = build_cost(model, gpu, profile, 4, 1.0)
    eight = build_cost(model, gpu, profile, 8, 1.0)
    ring = 160 * 2 * 3 / 4 * 8192 * 2 / profile.value("allreduce_bytes_per_s")
    latency = 160 * 2 * 3 * profile.value("allreduce_latency_s")
    assert four.all_reduce_s(1000) == pytest.approx(1000 * ring + latency)
    assert four.all_reduce_on_pcie
    first, slope = four.decode_run(8, 8000)
    first8, slope8 = eight.decode_run(8, 8000)
    assert slope == pytest.approx(2 * slope8)
    assert first - four.all_reduce_s(8) > first8 - eight.all_reduce_s(8)


@pytest.mark.parametrize(("first_s", "slope_s"), [(0.02, 0.0), (0.02, 1e-6), (0.5, 0.01), (1e-4, 1e-12)])
def test_steps_until_is_the_first_boundary_at_or_after_the_target(first_s: float, slope_s: float) -> None:
    for target in (0.0, first_s, 1.7 * first_s, 10.3 * first_s, 999.9 * first_s):
        steps = steps_until(target, first_s, slope_s, 500)
        assert run_s(first_s, slope_s, steps) >= target or steps == 500
        assert steps == 1 or run_s(first_s, slope_s, steps - 1) < target


@settings(max_examples=300)
@given(
    first_s=st.sampled_from([1e-4, 0.02, 0.5]),
    slope_s=st.sampled_from([0.0, 1e-12, 1e-9, 1e-6, 0.01]),
    steps=st.integers(1, 499),
)
def test_an_end_that_is_the_target_counts_and_a_hair_before_it_does_not(
    first_s: float, slope_s: float, steps: int
) -> None:
    end_s = run_s(first_s, slope_s, steps)
    assert steps_until(end_s, first_s, slope_s, 500) == steps
    assert steps_until(nextafter(end_s, inf), first_s, slope_s, 500) == steps + 1
    assert steps_until(nextafter(end_s, inf), first_s, slope_s, steps) == steps
    assert steps_until(1.0, 0.0, 0.0, steps) == steps
    assert steps_until(0.0, 0.0, 0.0, steps) == 1


def test_linear_cost_matches_its_definition() -> None:
    cost = LinearCost(PREFILL, DECODE, 3e-4, 1.0)
    assert cost.decode_run(3, 100) == pytest.approx((0.02 + 3 * 2e-5 + 100 * 6e-7, 3 * 6e-7))
    assert cost.prefill_s(1000) == pytest.approx(0.005 + 0.04 + 0.002)
    blocks = ceil(70 / 16)
    assert cost.copy_s(blocks * 1.0, cost.num_copies(blocks, 32), Direction.D2H) == pytest.approx(5 * 3e-4)


def test_steps_end_with_the_most_however_far_the_target_is() -> None:
    for slope_s in (0.0, 0.5):
        assert [steps_until(100.0, 1.0, slope_s, most) for most in (1, 2, 3)] == [1, 2, 3]
        assert [steps_until(target_s, 1.0, slope_s, 9) for target_s in (-1.0, 0.0, 1.0)] == [1, 1, 1]
