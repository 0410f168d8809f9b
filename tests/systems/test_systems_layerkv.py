"""LayerKV's decisions on cases worked by hand; those of crowded engines are pinned (`pinned_engines.py`)."""

from math import inf
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtwin.testing import build_engine, limits, linear_machine, requests, roofline_machine, simulate
from kvtwin.testing.conformance import Workload, check_jumps, run
from sim.cost.profile import load_profile
from sim.engine.predictor import CLASSES, BucketPredictor
from sim.engine.scheduler import Scheduler
from sim.engine.sequence import Sequence
from sim.specs.hardware import load_hardware
from sim.specs.models import load_model
from sim.systems.layerkv.equations import Equations
from sim.systems.layerkv.layer_blocks import LayerBlocks
from sim.systems.layerkv.preset import LayerKV
from sim.systems.layerkv.slack_book import SlackBook
from sim.systems.vllm055 import VllmRecompute
from traces.request import Request


def l20_equations(model: str = "llama-2-7b", tp: int = 1, *, printed: bool = False) -> Equations:
    return Equations(roofline_machine("l20", 1.0, model=load_model(model), tp=tp).deployment, 16, printed=printed)


# -- equations -------------------------------------------------------------------------------------------------------


def test_equation_3_corrected_and_printed() -> None:
    """Llama-2-7B, s = 16,384, L20: alpha s (2P + 2 L h s) / peak; the printed form has no L."""
    alpha = load_profile(None, load_hardware("l20")).value("alpha")
    s, params, peak = 16384, 6_738_415_616, 119.5e12
    assert l20_equations().prefill_s(s) == pytest.approx(alpha * s * (2 * params + 2 * 32 * 4096 * s) / peak)
    assert l20_equations(printed=True).prefill_s(s) == pytest.approx(alpha * s * (2 * params + 2 * 4096 * s) / peak)


def test_equation_4_corrected_counts_kv_heads_and_shared_links() -> None:
    """Yi-34B on two L20s that share one link: 8 KV heads of 128, split over 2 GPUs, the link halved for each."""
    profile = load_profile(None, load_hardware("l20"))
    s, layers = 1000, 10
    link = profile.value("d2h_bytes_per_s")
    moved = s * layers * 2 * 8 * 128 * 2
    launches = 2 * layers * profile.value("copy_launch_s")
    corrected = l20_equations("yi-34b-200k", 2)
    assert corrected.offload_s(s, layers) == pytest.approx(profile.value("beta") * moved / link + launches)
    all_heads = s * layers * 2 * 56 * 128 * 2
    printed = l20_equations("yi-34b-200k", 2, printed=True)
    assert printed.offload_s(s, layers) == pytest.approx(profile.value("beta") * all_heads / link)


@pytest.mark.parametrize("tokens", [512, 2048, 16384])
@pytest.mark.parametrize(("model", "tp"), [("llama-2-7b", 1), ("yi-34b-200k", 2), ("llama-3.1-70b", 4)])
def test_no_layer_need_stay_in_any_of_the_papers_setups(model: str, tp: int, tokens: int) -> None:
    assert l20_equations(model, tp).minimum_layers(tokens) == 0


@pytest.mark.parametrize(("swap_s_per_block", "kept"), [(1.6, 4), (0.4 * 64 / 1000, 2)])
def test_layers_stay_where_the_link_is_too_slow(swap_s_per_block: float, kept: int) -> None:
    """A prompt of 1,000 tokens takes 1 s. 25 s a layer: nothing hides, all four stay; 0.4 s a layer: two hide."""
    machine = linear_machine(64.0, prefill=(0.0, 1e-3, 0.0), swap_s_per_block=swap_s_per_block)
    assert Equations(machine.deployment, 16, printed=False).minimum_layers(1000) == kept


# -- Algorithm 1 -----------------------------------------------------------------------------------------------------


def decoding(lower: int, generated: int, first_s: float, output: int = 100) -> Sequence:
    seq = Sequence(Request(0, 0.0, 10, output))
    seq.predicted_lower_tokens = lower
    seq.num_generated = generated
    seq.first_token_s = first_s
    seq.finish_step = output - generated
    return seq


def by_equation_1(seq: Sequence, now_s: float, tpot_s: float, slo_s: float) -> float:
    past = seq.num_generated - 1
    future = max(1, seq.predicted_lower_tokens - 1 - past)
    return slo_s * (past + future) - ((now_s - seq.first_token_s) + tpot_s * future)


def test_slack_of_one_request_by_hand() -> None:
    """21 tokens since 1.0 s, at least 41 in all, TPOT now 0.05 s, SLO 0.2 s, at 3.0 s: 0.2*40 - (2 + 0.05*20) = 5."""
    book = SlackBook(0.2, drop_irrecoverable=True)
    book.update(decoding(41, 21, 1.0), decoding=True)
    assert book.least_s(0.0, 3.0, 0.05, 0) == pytest.approx(5.0)
    # Ten steps on, the same request has ten tokens more to its name.
    assert book.least_s(0.0, 3.5, 0.05, 10) == pytest.approx(0.2 * 40 - (2.5 + 0.05 * 10))


@pytest.mark.parametrize("drop", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_a_book_of_hundreds_has_the_least_slack_of_each(drop: bool, seed: int) -> None:
    """Look after look, while requests come, go and stop decoding: most of them are looked at now and then alone."""
    book, dice = SlackBook(0.2, drop_irrecoverable=drop), Random(seed)
    here: dict[Sequence, tuple[bool, int]] = {}
    now_s, tpot_s, step, least = 4.0, 0.05, 0, set[float]()
    for number in range(900):
        seq = decoding(dice.randint(1, 90), dice.randint(1, 99), now_s - dice.uniform(0.0, 8.0))
        changed = [seq] if number % 5 else [seq, dice.choice([seq, *here])]
        for one in changed:
            runs, since = here.get(one, (False, step))
            one.num_generated += (step - since) * runs
            one.finish_step = step + one.output_tokens - one.num_generated
            here[one] = not runs, step
            book.update(one, decoding=not runs)
        if number % 3 == 2:
            gone = dice.choice(list(here))
            del here[gone]
            book.remove(gone)
            book.remove(gone)
        now_s, step = now_s + dice.choice((0.0, 0.03, 0.3)), step + dice.choice((0, 0, 1, 2))
        tpot_s = dice.choice((0.02, 0.15)) if number % 20 == 0 else tpot_s * dice.choice((1.0, 0.97, 1.02))
        slacks_s = []
        for one, (runs, since) in here.items():
            one.num_generated += (step - since) * runs
            slacks_s.append(by_equation_1(one, now_s, tpot_s, 0.2))
            one.num_generated -= (step - since) * runs
        least_s = min((slack_s for slack_s in slacks_s if not drop or slack_s >= 0.0), default=inf)
        least.add(least_s)
        assert book.least_s(1.0, now_s, tpot_s, step) == pytest.approx(least_s)
        # Those nearest to blocking are remembered.
        assert book.is_blocked(1.0, now_s, tpot_s, step) == (least_s <= 1.0)
        assert not book.is_blocked(least_s - 0.001, now_s, tpot_s, step)
    assert len(here) == 600
    assert len(least) > 100


slacks = st.lists(
    st.tuples(st.integers(1, 90), st.integers(1, 90), st.floats(0, 20), st.booleans()), min_size=0, max_size=30
)


@given(slacks, st.floats(0, 30), st.floats(0.01, 0.3), st.booleans(), st.floats(0, 5))
def test_the_book_is_the_minimum_of_equation_1(
    rows: list[tuple[int, int, float, bool]], now_s: float, tpot_s: float, drop: bool, prefill_s: float
) -> None:
    book = SlackBook(0.2, drop_irrecoverable=drop)
    expected = inf
    for lower, generated, first_s, in_batch in rows:
        seq = decoding(lower, generated, first_s)
        book.update(seq, decoding=in_batch)
        slack_s = by_equation_1(seq, now_s, tpot_s, 0.2)
        if slack_s >= 0 or not drop:
            expected = min(expected, slack_s)
    least_s = book.least_s(prefill_s, now_s, tpot_s, 0)
    assert least_s == pytest.approx(expected, abs=1e-9)
    # A witness proves a block; it may miss one only if there is none.
    if least_s < prefill_s - 1e-9:
        assert book.is_blocked(prefill_s, now_s, tpot_s, 0)
    if least_s > prefill_s + 1e-9:
        assert not book.is_blocked(prefill_s, now_s, tpot_s, 0)


def test_what_outlived_its_bound_blocks_with_one_token_to_go() -> None:
    """21 tokens since 1.0 s, where 5 were sure: 1/4 s (20 + 1) - (2 + 1/16) = 51/16 s at 3.0 s; a slack met counts."""
    book = SlackBook(0.25, drop_irrecoverable=True)
    book.update(decoding(5, 21, 1.0), decoding=True)
    assert book.least_s(3.25, 3.0, 0.0625, 0) == 3.1875
    assert [book.is_blocked(prefill_s, 3.0, 0.0625, 0) for prefill_s in (3.25, 3.1875, 3.125)] == [True, True, False]
    # At 6.1875 s it is just in time; later it is late whatever happens.
    assert book.least_s(0.0, 6.1875, 0.0625, 0) == 0.0
    assert [book.is_blocked(0.0, now_s, 0.0625, 0) for now_s in (6.1875, 6.25)] == [True, False]
    assert book.least_s(0.0, 6.25, 0.0625, 0) == inf


def test_prefills_wait_while_a_decoding_request_has_no_slack() -> None:
    """SLO 25 ms a token at about 20 ms a step leaves 0.1 s over 20 tokens; a prefill of 0.5 s must wait its turn."""
    machine = linear_machine(64.0, prefill=(0.0, 1e-3, 0.0), decode=(0.02, 0.0, 0.0), swap_s_per_block=0.0)
    arrivals = requests((0.0, 10, 21), (0.1, 500, 2))
    tight = simulate(LayerKV(tpot_slo_ms=25.0), arrivals, limits(block_bytes=64.0), machine=machine).by_id()
    assert tight[1].first_scheduled_s == pytest.approx(tight[0].finish_s)
    loose = simulate(LayerKV(tpot_slo_ms=60.0), arrivals, limits(block_bytes=64.0), machine=machine).by_id()
    assert loose[1].first_scheduled_s < 0.15
    blind = simulate(
        LayerKV(tpot_slo_ms=25.0, slo_aware=False), arrivals, limits(block_bytes=64.0), machine=machine
    ).by_id()
    assert blind[1].first_scheduled_s < 0.15


# -- placement, promotion, forecast ----------------------------------------------------------------------------------


def scheduler(gpu: int, options: LayerKV, layers: int = 4) -> Scheduler:
    limit = limits(gpu=gpu, block_bytes=16.0 * layers)
    machine = linear_machine(
        limit.block_bytes, layers=layers, prefill=(0.0, 1e-3, 0.0), decode=(0.02, 0.0, 0.0), swap_s_per_block=1e-6
    )
    return build_engine(options, limit, machine, lambda seq: None).scheduler


def prompt(blocks: int) -> Sequence:
    return Sequence(Request(0, 0.0, 16 * blocks, 10))


def test_with_memory_to_spare_layerkv_decides_as_vllm_does() -> None:
    arrivals = requests(*[(0.05 * i, 40 + i, 30) for i in range(40)])
    ours = simulate(LayerKV(), arrivals, limits(gpu=1000))
    vllms = simulate(VllmRecompute(), arrivals, limits(gpu=1000))
    assert {i: s.finish_s for i, s in ours.by_id().items()} == {i: s.finish_s for i, s in vllms.by_id().items()}
    assert ours.lanes.d2h.busy_s == 0.0


def test_a_prompt_that_does_not_fit_leaves_its_layers_on_the_host_instead_of_waiting() -> None:
    """Ten blocks; the first request holds nine. vLLM lets the second wait, LayerKV prefills it at once and parks it."""
    arrivals = requests((0.0, 130, 12), (0.01, 30, 4))
    limit = limits(gpu=10)
    vllms = simulate(VllmRecompute(), arrivals, limit).by_id()
    outcome = simulate(LayerKV(), arrivals, limit)
    ours = outcome.by_id()
    assert vllms[1].first_token_s > vllms[0].finish_s
    assert ours[1].first_token_s < ours[0].finish_s
    assert ours[1].finish_s > ours[0].finish_s
    assert outcome.scheduler.counters.policy["parked"] == 1
    assert outcome.scheduler.counters.policy["promoted"] == 1


def test_as_many_layers_stay_as_memory_has_to_spare() -> None:
    """Ten whole blocks of four layers = 40; a prompt of three blocks, with 1 % and one block's growth kept free."""
    memory = scheduler(10, LayerKV()).memory
    assert isinstance(memory, LayerBlocks)
    assert memory.layers_to_keep(prompt(3), 0) == 4
    memory.gpu.allocate(27)
    # 13 left: 13 - 0 (1 % of 40 is 0) - 4 (one sequence's growth) = 9 = 3 layers of 3 blocks; one more in the buffer.
    assert memory.layers_to_keep(prompt(3), 0) == 3
    memory.gpu.allocate(7)
    # 6 left: two layers' buffer of three blocks each fit, nothing stays.
    assert memory.layers_to_keep(prompt(3), 0) == 0
    memory.gpu.allocate(1)
    assert memory.layers_to_keep(prompt(3), 0) is None


def test_streaming_pays_the_link_every_step() -> None:
    """Prompts take 5 ms, decodes 20, a layer's block 1. Two layers of two blocks stay on the host, and never come back.

    The second prompt is computed from 25 ms to 30; the next step goes without it, as its layers are yet on their way.
    Its three decodes read four blocks and write two: 5 + 1 + 0.5 ms for one layer, then 5 for each of the other three.
    """
    machine = linear_machine(prefill=(0.005, 0.0, 0.0), decode=(0.02, 0.0, 0.0), swap_s_per_block=0.004)
    arrivals = requests((0.0, 130, 12), (0.01, 30, 4))
    outcome = simulate(LayerKV(decode="stream"), arrivals, limits(gpu=12), machine=machine)
    first, second = (outcome.by_id()[i] for i in (0, 1))
    assert (first.first_token_s, second.first_token_s) == pytest.approx((0.005, 0.030))
    assert second.finish_s == pytest.approx(0.050 + 3 * 0.0215)
    assert first.finish_s == pytest.approx(0.1145 + 6 * 0.020)
    assert outcome.lanes.h2d.busy_s == pytest.approx(3 * 0.004)
    assert outcome.lanes.d2h.busy_s == pytest.approx(0.004 + 3 * 0.002)
    counters = {name: count for name, count in outcome.scheduler.counters.policy.items() if count}
    assert counters == {
        "parked": 1, "prefills_offloaded": 1, "offloaded_at_prefill_layer_blocks": 4, "streamed_sequences": 1
    }  # fmt: skip


def test_nothing_forecasts_with_one_that_was_dropped_since() -> None:
    """Two stream, the forecast is short; then the host has no block for either, and one of them is dropped.

    What is left suffices: the two iterations to come are not short, be they one event or two.
    """
    limit = limits(gpu=12, host=3, tokens=16, seqs=3, max_model_len=64, chunked=True)
    workload = Workload(requests((0.0, 135, 27), (0.0, 27, 26)), limit, linear_machine(layers=3))
    policy = LayerKV(decode="stream")
    found = run(policy, workload).scheduler.counters
    assert (found.swap_space_exhausted, found.policy["forecast_shortages"]) == (1, 9)
    check_jumps(policy, workload)


def test_bucket_predictor_is_right_as_often_as_it_says() -> None:
    predictor = BucketPredictor(0.85, seed=3)
    bounds = [*CLASSES, 10**9]
    right = 0
    lengths = np.random.default_rng(0).integers(1, 3000, 20_000).tolist()
    for i, length in enumerate(lengths):
        lower, median = predictor.predict(Request(i, 0.0, 1, length))
        upper = bounds[bounds.index(lower) + 1]
        right += lower <= length < upper
        assert lower <= median
    assert right / len(lengths) == pytest.approx(0.85, abs=0.01)
    assert predictor.predict(Request(7, 0.0, 1, 500)) == predictor.predict(Request(7, 9.0, 5, 500))


def test_a_half_done_prompt_keeps_its_place_when_one_before_it_is_offloaded() -> None:
    """Chunked prefill: prompts 0 and 1 complete beside the first chunk of 2, then the forecast parks 1."""
    arrivals = requests((0.0, 8, 20), (0.0, 45, 20), (0.0, 102, 20), (0.0, 34, 20), (0.0, 60, 20))
    limit = limits(gpu=21, host=1000, tokens=64, seqs=8, max_model_len=256, chunked=True)
    outcome = simulate(LayerKV(equations="paper"), arrivals, limit)
    assert outcome.scheduler.counters.policy["offloaded_by_forecast_layer_blocks"] > 0
    assert len(outcome.ended) == 5
