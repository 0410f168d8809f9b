"""Cost forms by hand, every shipped profile, and PCIe shared with all-reduces."""

from dataclasses import replace

import pytest
import simpy
from msgspec import UNSET, structs

from kvtwin.testing import build_engine, limits, requests, roofline_machine, simulate
from sim.clock.arrivals import Arrivals
from sim.clock.instance import Instance
from sim.cost.forms import LinearCost, PaperCost, build_cost
from sim.cost.model import LayerTimes, LayerWork
from sim.cost.pricing import Lanes, Pricer
from sim.cost.profile import (
    ROOFLINE_UNITS,
    Constant,
    FittedRange,
    Profile,
    linear_profile,
    load_profile,
    shipped_profiles,
)
from sim.cost.roofline import RooflineCost
from sim.engine.changes import Direction, Move, Tier
from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence
from sim.errors import InvariantError, UserError
from sim.options.scenario import Scenario
from sim.results.result import assemble
from sim.run.prepare import prepare
from sim.run.simulate import build_run, execute
from sim.run.traffic import traffic
from sim.specs.hardware import load_hardware
from sim.specs.models import load_model
from sim.systems import POLICIES
from sim.systems.layerkv.preset import LayerKV


def cost_of(kind: type[RooflineCost], model: str = "llama-2-7b", gpu: str = "l20", tp: int = 1) -> RooflineCost:
    spec, hardware = load_model(model), load_hardware(gpu)
    return kind(spec, hardware, load_profile(None, hardware), tp)


def test_paper_form_is_the_printed_equations() -> None:
    """LayerKV Eq. 3 for prefills; eLLM Eq. 3-4 for decodes: (24 h^2 L + 4 h L (s+1) + 2 h V s) / FLOPS, s+1 for s."""
    cost, h, layers, vocab, peak = cost_of(PaperCost), 4096, 32, 32000, 119.5e12
    alpha = load_profile(None, load_hardware("l20")).value("alpha")
    plan = IterationPlan()
    plan.prefill_tokens, plan.prefill_squares = 300, 200**2 + 100**2
    plan.num_decodes, plan.decode_context_tokens = 2, 1500
    prefill = alpha * (2 * 6_738_415_616 * 300 + 2 * h * (200**2 + 100**2)) / peak
    decode = (2 * 24 * h * h * layers + (4 * h * layers + 2 * h * vocab) * 1500) / peak
    assert cost.iteration_s(plan) == pytest.approx(prefill + decode)
    assert cost.prefill_s(300) == pytest.approx(alpha * (2 * 6_738_415_616 * 300 + 2 * h * 300**2) / peak)


def test_printed_equations_know_no_longest_context() -> None:
    model, gpu = load_model("llama-3.1-8b"), load_hardware("rtx-4090")
    given = model, gpu, load_profile(None, gpu), 1, 1.0
    assert build_cost(*given).follows_longest
    paper = build_cost(*given, "paper")
    assert not paper.follows_longest
    plan = IterationPlan()
    plan.num_decodes, plan.decode_context_tokens = 2, 900
    alike_s = paper.iteration_s(plan)
    plan.decode_longest_tokens = 899
    assert paper.iteration_s(plan) == alike_s


@pytest.mark.parametrize("form", ["roofline", "paper", "table"])
def test_a_linear_profile_gives_no_other_costs(form: str) -> None:
    profile = linear_profile("mine", (0.01, 1e-4, 0.0, 0.02, 1e-3, 0.0, 1e-4, 0.0), "tests")
    given = load_model("llama-2-7b"), load_hardware("l20"), profile, 1, 1.0
    with pytest.raises(UserError, match=f"^cost form '{form}' cannot come from profile 'mine' of form 'linear'$"):
        build_cost(*given, form)
    assert isinstance(build_cost(*given), LinearCost)


def test_a_form_that_is_not_known_is_refused() -> None:
    model, gpu = load_model("llama-2-7b"), load_hardware("l20")
    with pytest.raises(UserError, match="cost form: 'cubic' is not one of roofline, table, paper, linear"):
        build_cost(model, gpu, load_profile(None, gpu), 1, 1.0, "cubic")


def test_coefficients_without_a_model_price_no_single_layers() -> None:
    cost = LinearCost((0.01, 1e-4, 0.0), (0.02, 0.0, 0.0), 3e-3, 4096.0)
    with pytest.raises(InvariantError, match="cannot price projections"):
        cost.project_s(10)
    with pytest.raises(InvariantError, match="cannot price single layers"):
        cost.recompute_s(10)
    assert cost.all_reduce_s(10) == 0.0


@pytest.mark.parametrize("form", ["roofline", "paper", "linear"])
def test_what_computes_nothing_takes_no_time(form: str) -> None:
    """A step that only copies; one decode of no context takes some."""
    model, gpu = load_model("llama-2-7b"), load_hardware("l20")
    line = linear_profile("line", (0.01, 1e-4, 0.0, 0.02, 0.0, 0.0, 1e-3, 0.0), "a test")
    cost = build_cost(model, gpu, line if form == "linear" else load_profile(None, gpu), 1, 1.0, form)
    plan = IterationPlan()
    assert cost.iteration_s(plan) == 0.0
    plan.num_decodes = 1
    assert cost.iteration_s(plan) == cost.decode_run(1, 0)[0] > 0.0


def test_a_prompt_costs_by_its_square_and_a_prelude_by_its_tokens() -> None:
    """10 ms, 1 ms a token and 10 us a square; a prelude only where it is given."""
    cost = LinearCost((0.01, 1e-3, 1e-5), (0.02, 0.0, 2.0**-20), 3e-3, 4096.0)
    assert cost.prefill_s(100) == pytest.approx(0.01 + 0.1 + 0.1, rel=1e-12)
    # It was not said that layers have windows: what is read together is saved whole.
    assert cost.unread_s(1024) == 2.0**-10
    plan = IterationPlan()
    plan.prefill_tokens, plan.decode_context_tokens = 30, 34
    assert cost.prelude_s(plan) == 0.0
    cost.prelude_base_s = 0.25
    assert cost.prelude_s(plan) == 0.25
    cost.prelude_s_per_token = 2.0**-10
    assert cost.prelude_s(plan) == 0.25 + 0.0625


def test_a_layer_takes_of_each_lane_what_it_does_there() -> None:
    """Four layers of Llama-2 7B: 1 ms a token, 10 us a square; copies take 1 ms a piece and 2 ms a kB."""
    model = structs.replace(load_model("llama-2-7b"), num_layers=4)
    cost = LinearCost((0.0, 1e-3, 1e-5), (0.02, 0.0, 0.0), 3e-3, 1000.0, 1e-3, model)
    assert cost.layer_s(LayerWork(4, 0.5)) == LayerTimes(4, 0.5, 0.0, 0.0)
    assert cost.layer_s(LayerWork(4, 0.5, h2d_bytes=2000.0, h2d_copies=3)) == LayerTimes(
        4, 0.5, pytest.approx(7e-3), 0.0
    )
    assert cost.layer_s(LayerWork(2, 0.5, d2h_bytes=500.0, d2h_copies=1)) == LayerTimes(
        2, 0.5, 0.0, pytest.approx(2e-3)
    )
    again = cost.layer_s(LayerWork(1, 0.5, recompute_tokens=100))
    assert again == LayerTimes(1, pytest.approx(0.5 + (0.1 + 0.1) / 4), 0.0, 0.0)
    # Keys and values are 2 x 4,096^2 of 202 million weights of a layer.
    weights = 4 * 4096**2 + 3 * 4096 * 11008
    projected = cost.layer_s(LayerWork(1, 0.5, project_tokens=100))
    assert projected == LayerTimes(1, pytest.approx(0.5 + 0.1 * 2 * 4096**2 / (4 * weights)), 0.0, 0.0)


@pytest.mark.parametrize(
    ("model", "tiles"), [("llama-3.1-8b", True), ("gemma-3-27b", False), ("deepseek-v2-lite", False)]
)
def test_one_kernel_does_prompts_and_decodes_where_layers_are_alike(model: str, tiles: bool) -> None:
    """Layers with a window and latents have kernels of their own: tiles change none of their prices."""
    spec, hardware, profile = load_model(model), load_hardware("rtx-4090"), load_profile("rtx-4090-imported")
    assert profile.value("attention_tile_tokens") > 0
    tiled, plain = (
        RooflineCost(spec, hardware, found, 1) for found in (profile, profile.without({"attention_tile_tokens"}))
    )
    assert (tiled.tile_tokens > 0) == tiles
    plan = IterationPlan()
    plan.add_chunk(Sequence(requests((0.0, 200, 1))[0]), 100, None)  # type: ignore[arg-type]
    plan.num_decodes, plan.decode_context_tokens = 40, 40_000
    assert (tiled.iteration_s(plan) != plain.iteration_s(plan)) == tiles


def test_swapping_one_block_is_a_copy_a_layer_for_keys_and_for_values() -> None:
    cost = cost_of(RooflineCost)
    profile = load_profile(None, load_hardware("l20"))
    # Each of 131 kB: they are longer on their way than the next takes to be asked for.
    expected = 16 * 524288 / profile.value("d2h_bytes_per_s")
    assert expected > 64 * profile.value("copy_launch_s")
    for blocks in (1, 10):
        copy_s = cost.copy_s(blocks * 16 * 524288, cost.num_copies(blocks, 32), Direction.D2H)
        assert copy_s == pytest.approx(blocks * expected)


@pytest.mark.parametrize("name", shipped_profiles())
def test_every_shipped_profile_prices_runs(name: str) -> None:
    gpu = load_profile(name).gpu
    scenario = Scenario(
        workload="fixed", num_prompts=30, request_rate=20.0, input_len=100, output_len=20, gpu=gpu, profile=name,
        model="qwen3-0.6b", num_gpu_blocks_override=60, block_size=16, max_model_len=512, max_num_seqs=16,
    )  # fmt: skip
    for policy in ("vllm-v1", "layerkv"):
        setup = prepare(scenario, policy, POLICIES[policy]())
        run = execute(build_run(setup, traffic(scenario)))
        assert run.log.completed == 30
        assert setup.profile.name == name


def with_constants(profile: Profile, **values: float) -> Profile:
    """The profile with other values of some constants, those it lacks included."""
    found = {name: Constant(value, None, ROOFLINE_UNITS[name], "a test") for name, value in values.items()}
    return structs.replace(profile, constants=profile.constants | found)


def test_fp8_products_have_a_rate_and_a_ridge_of_their_own() -> None:
    """A prompt of 4,096 tokens of Llama-3.1 8B: weights of a byte, products at 1e15, heads and attention as before.

    A layer's inputs are 2 x 4,096 of the hidden state, 4,096 of attention and 14,336 of the MLP, three bytes each.
    """
    plain = load_model("llama-3.1-8b")
    model, hardware = plain.with_quantization("fp8"), load_hardware("h100")
    given = {"fp8_flops_per_s": 1e15, "fp8_roofline_exponent": 2.0, "fp8_quantize_bytes_per_s": 5e11}
    shipped = structs.replace(load_profile("h100-imported"), linear_factors=None, fp8_linear_factors=None)
    profile = with_constants(shipped, **given, fp8_layer_overhead_s=4e-5)
    cost, before = (RooflineCost(spec, hardware, profile, 1) for spec in (model, plain))
    compute_s = 4096 * model.linear_flops_per_token / 1e15
    moved = plain.linear_weight_bytes / 2 + 4096 * model.linear_activation_bytes_per_token()
    memory_s = moved / profile.value("hbm_bytes_per_s")
    between_s = 4096 * model.elementwise_bytes_per_token() / profile.value("elementwise_bytes_per_s")
    quantized_s = 4096 * 32 * 3 * (3 * 4096 + 14336) / 5e11
    assert cost.linear_s(4096) == pytest.approx((compute_s**2 + memory_s**2) ** 0.5 + quantized_s + between_s)
    assert cost.head_s(8) == before.head_s(8)
    overhead_s = 32 * (4e-5 - profile.value("layer_overhead_s"))
    beside_s = before.prefill_s(4096) - before.linear_s(4096) + overhead_s
    assert cost.prefill_s(4096) - cost.linear_s(4096) == pytest.approx(beside_s)
    assert cost.project_s(100) == pytest.approx(100 * model.kv_projection_flops_per_token_layer / 1e15)


def test_without_an_fp8_rate_products_are_priced_at_that_of_16_bits() -> None:
    model = load_model("llama-3.1-8b").with_quantization("fp8")
    bare = load_profile("h100-imported")
    kept = {name: constant for name, constant in bare.constants.items() if not name.startswith("fp8")}
    cost = RooflineCost(model, load_hardware("h100"), structs.replace(bare, constants=kept), 1)
    assert cost.linear_s_per_token == model.linear_flops_per_token / bare.value("flops_per_s")
    assert cost.linear_exponent == cost.exponent


FP8, DENSE = "no fp8_flops_per_s", "routed experts are priced as if"


@pytest.mark.parametrize(
    ("model", "gpu", "options", "words", "told"),
    [
        ("llama-3.1-8b", "h100", {"quantization": "fp8"}, FP8, False),
        ("llama-3.1-8b", "h100", {"quantization": "fp8", "profile": "h100-derived"}, FP8, True),
        # An A100 multiplies what it made 16 bits again: that rate is the right one.
        ("llama-3.1-8b", "a100-80g", {"quantization": "fp8"}, FP8, False),
        ("llama-3.1-8b", "h100", {"kv_cache_dtype": "fp8"}, "quantised KV", False),
        ("deepseek-v2-lite", "h100", {"kv_cache_dtype": "fp8"}, "knows no kernel for it", True),
        ("llama-3.1-8b", "a100-80g", {"kv_cache_dtype": "fp8_e5m2"}, "has no fp8_kv_bytes_per_s", True),
        ("qwen3-30b-a3b", "h100", {}, DENSE, False),
        ("qwen3-30b-a3b", "l20", {"tp": 8}, DENSE, True),
        ("llama-3.1-8b", "l20", {}, DENSE, False),
    ],
)
def test_a_run_says_what_its_profile_has_no_price_for(model, gpu, options, words, told):
    scenario = Scenario(workload="fixed", model=model, gpu=gpu, **options)
    warnings = prepare(scenario, "vllm-v1", POLICIES["vllm-v1"]()).warnings
    assert any(words in warning for warning in warnings) == told


def test_all_reduces_measured_are_interpolated_by_bytes() -> None:
    """Of 10, 20 and 100 us at 8, 16 and 64 KiB; a token of Llama-3.1 8B has 8 KiB. Two a layer."""
    points = [(8192.0, 1e-5), (16384.0, 2e-5), (65536.0, 1e-4)]
    profile = structs.replace(load_profile("h100-imported"), all_reduce={"2": points})
    model, hardware = load_model("llama-3.1-8b"), load_hardware("h100")
    two, four = (RooflineCost(model, hardware, profile, tp) for tp in (2, 4))
    expected = {1: 1e-5, 2: 2e-5, 5: 6e-5, 8: 1e-4, 24: 3e-4}
    assert {n: two.all_reduce_s(n) for n in expected} == pytest.approx({n: 64 * s for n, s in expected.items()})
    ring = RooflineCost(model, hardware, structs.replace(profile, all_reduce=None), 4)
    assert four.all_reduce_s(24) == ring.all_reduce_s(24) > 0
    assert RooflineCost(model, hardware, profile, 1).all_reduce_s(24) == 0.0


@pytest.mark.parametrize("gpu", ["a100-80g", "h100", "h200", "l40s"])
def test_straight_lines_below_all_reduces_touch_them(gpu: str) -> None:
    """Of an iteration that decodes: the launch of the least; of a long prompt: the best rate."""
    cost = cost_of(RooflineCost, "llama-3.1-8b", gpu, 2)
    assert cost.all_reduce is not None
    tokens = [1, 2, 3, 7, 50, 333, 2000, 8192, 40_000]
    lines = cost.least_all_reduces()
    for n in tokens:
        below = max(fixed_s + n * s_per_token for fixed_s, s_per_token in lines)
        assert 0.3 * cost.all_reduce_s(n) < below <= cost.all_reduce_s(n) * (1 + 1e-12)
    assert len(lines) == 2


def lanes_after(model: str, tp: int, unit_bytes: float) -> tuple[Lanes, float]:
    """One prefill of 2,000 tokens with every layer offloaded: its lanes and its duration, s."""
    spec = load_model(model)
    limit = limits(gpu=4000, host=4000, block_bytes=16 * spec.kv_bytes_per_token(tp))
    machine = roofline_machine("l20", limit.block_bytes, model=spec, tp=tp)
    ended: list[float] = []
    env, lanes = simpy.Environment(), Lanes()
    engine = build_engine(LayerKV(), limit, machine, lambda seq: ended.append(seq.first_token_s), checked=False)
    engine.scheduler.memory.layers_to_keep = lambda seq, keep_free: 0  # type: ignore[attr-defined]
    instance = Instance(
        env, engine, machine.cost, Arrivals(requests((0.0, 2000, 1))), lanes, layers=spec.num_layers,
        block_bytes=limit.block_bytes, copy_unit_bytes=unit_bytes,
    )  # fmt: skip
    env.run(until=env.process(instance.serve()))
    return lanes, ended[0]


def test_all_reduces_on_the_pcie_lane_stretch_copies_and_wait_for_units_on_their_way() -> None:
    """Yi-34B on two L20s: copies get the time all-reduces leave; each all-reduce may wait for half a unit."""
    cost = cost_of(RooflineCost, "yi-34b-200k", "l20", 2)
    plan = IterationPlan()
    plan.prefill_tokens, plan.prefill_pairs, plan.num_sampled_prefills = 2000, 2000 * 2001 // 2, 1
    alone_s, reduce_s = cost.iteration_s(plan), cost.all_reduce_s(2000)
    assert cost.all_reduce_on_pcie and reduce_s > 0
    num_bytes = 125 * 16 * load_model("yi-34b-200k").kv_bytes_per_token(2)
    copy_s = cost.copy_s(num_bytes, 2 * 60 * 125, Direction.D2H)
    for unit_bytes in (1 << 20, 1 << 16):
        lanes, seconds = lanes_after("yi-34b-200k", 2, unit_bytes)
        pieces = int(num_bytes / unit_bytes)
        share = cost.copy_s(num_bytes, pieces, Direction.D2H) / alone_s
        unit_s = cost.copy_s(unit_bytes, 1, Direction.D2H)
        assert seconds == pytest.approx(alone_s + 120 * share * unit_s / 2, rel=1e-12)
        assert lanes.d2h.busy_s == pytest.approx(copy_s * alone_s / (alone_s - reduce_s), rel=1e-12)
        # The last of 60 layers leaves when it is computed.
        assert lanes.d2h.free_s == pytest.approx(seconds + (lanes.d2h.busy_s - seconds) / 60, rel=1e-4)


def test_a_step_that_only_copies_shares_the_lane_with_nothing() -> None:
    """Prompts that leave no room for one another, on two L20s: some steps only start copies."""
    scenario = Scenario(
        workload="fixed", num_prompts=8, request_rate=1.0, input_len=4096, output_len=64, gpu="l20", tp=2,
        model="yi-34b-200k", num_gpu_blocks_override=300, max_model_len=8192,
    )  # fmt: skip
    run = execute(build_run(prepare(scenario, "layerkv", LayerKV()), traffic(scenario)))
    assert run.log.completed == 8
    assert run.engines[0].scheduler.counters.policy["promoted"] > 0


def test_offloading_every_layer_of_a_prefill_hides_behind_it_on_one_gpu() -> None:
    cost = cost_of(RooflineCost)
    plan = IterationPlan()
    plan.prefill_tokens, plan.prefill_pairs, plan.num_sampled_prefills = 2000, 2000 * 2001 // 2, 1
    lanes, seconds = lanes_after("llama-2-7b", 1, 1 << 20)
    assert seconds == pytest.approx(cost.iteration_s(plan))
    assert lanes.d2h.busy_s > 0


def test_swap_costs_the_step_that_swaps() -> None:
    """Two sequences that outgrow five blocks: the swap's copy comes before the step, on its own lane."""
    outcome = simulate(POLICIES["vllm-swap"](), requests((0.0, 30, 30), (0.0, 30, 30)), limits(gpu=5))
    counters = outcome.scheduler.counters
    assert counters.swap_out_blocks == counters.swap_in_blocks > 0
    assert outcome.lanes.d2h.busy_s == pytest.approx(counters.swap_out_blocks * 3e-4)
    assert outcome.lanes.h2d.busy_s == pytest.approx(counters.swap_in_blocks * 3e-4)


def test_a_prediction_beyond_the_fitted_range_is_marked_once() -> None:
    """Fitted up to 100 tokens, 4 sequences and 500 context tokens; a run that passes all three says so, once each."""
    profile = structs.replace(
        load_profile("a100-80g-imported"), range=FittedRange((16, 100), (1, 4), (16, 500)), name="narrow"
    )
    scenario = Scenario(
        workload="fixed", num_prompts=20, request_rate=float("inf"), input_len=150, output_len=30, gpu="a100-80g",
        model="qwen3-0.6b", num_gpu_blocks_override=200, max_model_len=512, max_num_seqs=8,
    )  # fmt: skip
    setup = prepare(scenario, "vllm", POLICIES["vllm-recompute"]())
    cost = build_cost(setup.model, setup.hardware, profile, 1, setup.limits.block_bytes)
    result = assemble(execute(build_run(replace(setup, profile=profile, cost=cost), traffic(scenario))))
    beyond = result.profile.beyond_range
    assert sorted(beyond) == ["batch", "context_tokens", "tokens"]
    assert beyond["batch"] == 8
    assert beyond["tokens"] >= 150
    assert beyond["context_tokens"] == 8 * (150 + 29), "the last iteration's of a jump"
    warned = [text for text in result.warnings if "narrow was fitted up to" in text]
    assert len(warned) == 3
    within = assemble(execute(build_run(setup, traffic(scenario))))
    assert within.profile.beyond_range is UNSET
    assert not [text for text in within.warnings if "extrapolated" in text]


def test_a_cpu_makes_its_copies_itself_one_after_the_other() -> None:
    """A launch of 1 ms a piece, 2 ms a block of 4 layers, 10 ms for the prompt, 20 ms for a decode."""
    cost = LinearCost((0.01, 0.0, 0.0), (0.02, 0.0, 0.0), 3e-3, 4096.0, 1e-3)
    cost.copies_beside_compute = False
    ended: list[tuple[float, Move]] = []
    lanes = Lanes()
    pricer = Pricer(
        cost, lanes, lambda end_s, move: ended.append((end_s, move)), layers=4, num_groups=4, block_bytes=4096.0
    )
    seq = Sequence(requests((0.0, 32, 8))[0])
    # Two layers of three blocks: 6 pieces and 6/4 blocks' worth of bytes, 6 + 3 ms.
    out = Move(seq, (0, 1), 0, 48, Tier.GPU, Tier.HOST, 6, 6, True)
    back = Move(seq, (3,), 0, 64, Tier.HOST, Tier.GPU, 4, 0, True)
    plan = IterationPlan()
    plan.num_decodes, plan.beside = 1, (out, back)
    times = pricer.step(plan, 1.0)
    assert ended == [(pytest.approx(1.009), out), (pytest.approx(1.015), back)]
    assert times.end_s == pytest.approx(1.035)
    assert (lanes.d2h.busy_s, lanes.h2d.busy_s) == (pytest.approx(0.009), pytest.approx(0.006))
