"""HCache and KVPR by hand: how layers are split, what a restore and a step take, and what neither may show."""

from dataclasses import replace
from math import ceil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtwin.testing import conformance, limits, linear_machine, requests, roofline_machine, simulate
from kvtwin.testing.conformance import Workload
from sim.cost.lanes import restored_s, streamed_s
from sim.cost.model import LayerTimes, LayerWork
from sim.cost.restoring import LayerSplit, StateBytes, best_split, restore_times, state_share
from sim.engine.changes import D2H, H2D, Save, Unsave
from sim.engine.sequence import Sequence
from sim.options.policies import parse_policy
from sim.specs.models import load_model
from sim.systems.kvpr.hosted_layers import HostedLayers
from sim.systems.kvpr.partial_recompute import BlockSeconds
from traces.request import Request

KV_TOKEN, HIDDEN_TOKEN = 16_384, 8_192
"""Bytes of Llama-2-7B's keys and values, and hidden state, of a token and layer."""


def llama(name="llama-2-7b", gpu="l20", tp=1):
    model = load_model(name)
    block_bytes = 16 * model.kv_bytes_per_token(tp)
    machine = roofline_machine(gpu, block_bytes, model=model, tp=tp)
    return machine, StateBytes(model.hidden_bytes_per_token_layer, block_bytes / model.num_layers)


def seconds(machine, split, tokens, state):
    return restored_s(restore_times(machine.cost, split, tokens, -(-tokens // 16), state))


# -- HCache: the split -------------------------------------------------------------------------------------------------


def test_2048_tokens_of_llama_come_back_in_two_thirds_of_the_time_of_copies():
    machine, state = llama()
    split = best_split(machine.cost, 32, 2048, 16, state)
    mixed, copied, again = (
        seconds(machine, LayerSplit(*way), 2048, state) for way in (split, (0, 0, 32), (32, 0, 0))
    )  # fmt: skip
    # 32 layers x 2,048 tokens x 16 KiB at 25 GB/s.
    assert copied == pytest.approx(32 * 2048 * KV_TOKEN / 25e9)
    assert split.recomputed == 0
    assert 14 <= split.hidden <= 22
    assert 0.60 < mixed / copied < 0.80
    assert again > 5 * copied


class Priced:
    """What a layer of one token takes, s; copies take as long as they have bytes."""

    def __init__(self, recompute_s: float, project_s: float) -> None:
        self.recompute_s, self.project_s = recompute_s, project_s

    def num_copies(self, num_blocks: int, num_layers: int) -> int:
        return 1

    def layer_s(self, work: LayerWork) -> LayerTimes:
        compute_s = work.recompute_tokens * self.recompute_s + work.project_tokens * self.project_s
        return LayerTimes(work.num_layers, compute_s, work.h2d_bytes, 0.0)


@pytest.mark.parametrize(
    ("prices", "state", "layers", "split", "seconds"),
    [
        # L_H = 14 x 12 / (12 + 4 - 2) = 12: two layers compute for 24 s while twelve hidden states arrive in 48; the
        # last is projected in 2 more.
        (Priced(12.0, 2.0), StateBytes(4.0, 8.0), 14, (2, 12, 0), 50.0),
        # L_H = 12 x 2 / (2 + 3 - 1) = 6, projected in 1 + 18 s while the rest arrive in 6 + 12. Five and seven take as
        # long, 5 + 14, and copy more.
        (Priced(100.0, 3.0), StateBytes(1.0, 2.0), 12, (0, 5, 7), 19.0),
        # Grouped queries: four times the bytes.
        (Priced(100.0, 0.5), StateBytes(8.0, 2.0), 12, (0, 0, 12), 24.0),
    ],
)
def test_splits_by_hand(prices, state, layers, split, seconds):
    assert best_split(prices, layers, 1, 1, state) == split
    assert restored_s(restore_times(prices, LayerSplit(*split), 1, 1, state)) == pytest.approx(seconds)


def test_a_group_keeps_hidden_states_once_though_each_gpu_reads_them_whole():
    """13B on two A100: 10,240 bytes of a hidden state, and of KV a token, layer and GPU. Half of the former count."""
    machine, state = llama("llama-2-13b", "a100-80g", 2)
    assert state == (10_240, 16 * 10_240)
    limit = limits(host=1000, block_bytes=16 * machine.model.kv_bytes_per_token(2))
    memory = simulate(parse_policy("hcache", {})[1], requests((0.0, 90, 2)), limit, machine=machine).scheduler.memory
    assert memory.split == best_split(machine.cost, 40, 1024, 16, state)
    recomputed, hidden, copied = memory.split
    assert (recomputed, hidden > 0) == (40 - hidden - copied, memory.share < 1.0)
    assert memory.share == (hidden / 2 + copied) / 40
    assert memory.host.num_blocks == int(1000 / memory.share)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(1, 80), *(st.floats(1e-4, 1.0) for _ in range(3)), st.floats(1.0, 20.0)
)  # fmt: skip
def test_the_papers_closed_form_is_the_best_split_but_for_a_layer(layers, hidden_s, kv_s, project_s, times_recompute):
    """L_H = ceil(L IO_KV / (IO_KV + C_H - IO_H)) where projecting is slower than its copy; else with recomputation."""
    recompute_s = project_s * times_recompute
    classes = (
        LayerTimes(0, recompute_s, 0.0, 0.0), LayerTimes(0, project_s, hidden_s, 0.0), LayerTimes(0, 0.0, kv_s, 0.0),
    )  # fmt: skip

    def total(split):
        return restored_s(times._replace(num_layers=n) for times, n in zip(classes, split, strict=True))

    if hidden_s >= kv_s:
        return
    if project_s > hidden_s:
        closed = min(layers, -(-layers * kv_s // (kv_s + project_s - hidden_s)))
        candidates = [(0, n, layers - n) for n in range(layers + 1)]
    else:
        closed = min(layers, -(-layers * recompute_s // (recompute_s + hidden_s - project_s)))
        candidates = [(layers - n, n, 0) for n in range(layers + 1)]
    best = min(candidates, key=total)
    near = [split for split in candidates if abs(split[1] - closed) <= 1]
    # Filling and draining the pipeline costs a layer, which the closed form leaves out.
    slack_s = max(project_s, hidden_s, kv_s, recompute_s if project_s <= hidden_s else 0.0)
    assert min(map(total, near)) <= total(best) + slack_s


@pytest.mark.parametrize(("name", "tp"), [("llama-2-70b", 4), ("llama-3.1-8b", 1)])
def test_grouped_queries_make_hidden_states_the_larger_and_none_are_kept(name: str, tp: int):
    machine, state = llama(name, "a100-80g", tp)
    assert best_split(machine.cost, machine.model.num_layers, 1024, 16, state).hidden == 0


def test_the_host_has_room_for_more_tokens_by_what_is_not_saved():
    state = StateBytes(float(HIDDEN_TOKEN), 16.0 * KV_TOKEN)
    assert state_share(LayerSplit(0, 32, 0), 16, state) == 0.5
    assert state_share(LayerSplit(0, 16, 16), 16, state) == 0.75
    assert state_share(LayerSplit(8, 24, 0), 16, state) == 0.375


# -- HCache: in use ----------------------------------------------------------------------------------------------------

BLOCK_BYTES = 4 * 16 * KV_TOKEN
"""Of the tiny model's four layers."""


def slow_link(**more):
    """20 ms for a block of four layers' KV; 1 ms a token computed, of which a layer's projection is a 12th of a 4th."""
    return linear_machine(BLOCK_BYTES, prefill=(0.02, 0.001, 0.0), decode=(0.02, 0.001, 0.0), swap_s_per_block=0.02)


def test_a_victim_leaves_without_a_copy_and_returns_by_hidden_states():
    limit = limits(gpu=12, host=100, max_model_len=512, block_bytes=BLOCK_BYTES)
    rows = requests((0.0, 90, 60), (0.0, 90, 20))
    outcome = simulate(parse_policy("hcache", {})[1], rows, limit, machine=slow_link(), jump=False, record=True)
    swapped = simulate(parse_policy("vllm-swap", {})[1], rows, limit, machine=slow_link(), jump=False)
    assert outcome.scheduler.counters.preemptions == 1
    assert all(interval.label != "swap out" for interval in outcome.lanes.d2h.intervals or ())
    restored = [(plan, times.end_s - start_s) for plan, start_s, times in outcome.plans if plan.mixed_restores]
    (plan, took_s), *more = restored
    assert not more
    (restore,) = plan.mixed_restores
    assert restore.kv_groups == ()
    # Each has six of the twelve blocks, and vLLM 0.5.5 wants one more for each; the 91st token is to be fed.
    assert restore.num_tokens == 90
    # Backing the prompts' layers leaves what is kept of six blocks each.
    share = outcome.scheduler.memory.share
    assert share == len(restore.hidden_groups) / 8
    assert outcome.plans[0][0].behind_blocks == 2 * ceil(6 * share)
    tokens, num_hidden = restore.num_tokens, len(restore.hidden_groups)
    # Half of a block's 20 ms for its hidden states; a layer's projection of a token: a share of its millisecond.
    copy_s = tokens * 0.02 / 16 / 2 / 4
    model = slow_link().model
    project_s = tokens * 0.001 * model.kv_projection_flops_per_token_layer / model.linear_flops_per_token
    again_s = tokens * 0.001 / 4
    layers_s = [again_s] * (4 - num_hidden) + [project_s] * num_hidden
    at_s, arrived_s = 0.0, 0.0
    for computed_s, is_hidden in zip(layers_s, [False] * (4 - num_hidden) + [True] * num_hidden, strict=True):
        arrived_s += copy_s if is_hidden else 0.0
        at_s = max(at_s, arrived_s if is_hidden else 0.0) + computed_s
    assert took_s == pytest.approx(at_s + 0.02 + 0.001 * plan.num_decodes)
    finish_s = {name: max(seq.finish_s for seq in run.ended) for name, run in (("h", outcome), ("s", swapped))}
    assert finish_s["h"] < finish_s["s"]


def test_running_sequences_count_on_the_host_and_run_unsaved_where_it_is_full():
    machine = slow_link()
    limit = limits(gpu=100, host=6, max_model_len=512, block_bytes=BLOCK_BYTES)
    outcome = simulate(parse_policy("hcache", {})[1], requests((0.0, 90, 60), (0.0, 90, 60)), limit, machine=machine)
    memory = outcome.scheduler.memory
    # Six blocks of KV are twelve and more of hidden states: room for one and a half of the two.
    assert 12 <= memory.host.num_blocks < 20
    assert outcome.scheduler.counters.policy["unsaved"] == 1
    alone = simulate(parse_policy("hcache", {})[1], requests((0.0, 90, 60)), limit, machine=machine)
    assert "unsaved" not in alone.scheduler.counters.policy


def test_a_prompt_that_runs_unsaved_sends_nothing_out():
    limit = limits(gpu=100, host=1, max_model_len=512, block_bytes=BLOCK_BYTES)
    policy = parse_policy("hcache", {})[1]
    outcome = simulate(policy, requests((0.0, 90, 60)), limit, machine=slow_link(), record=True, jump=False)
    assert outcome.plans[0][0].behind_blocks == 0
    assert outcome.lanes.d2h.busy_s == 0.0


def test_with_grouped_queries_a_victim_is_swapped_in():
    machine, _ = llama("llama-3.1-8b", "a100-80g")
    limit = limits(gpu=12, host=100, max_model_len=512, block_bytes=16 * machine.model.kv_bytes_per_token())
    rows = requests((0.0, 90, 60), (0.0, 90, 20))
    outcome = simulate(parse_policy("hcache", {})[1], rows, limit, machine=machine, jump=False, record=True)
    assert sum(plan.swapped_in_blocks for plan, *_ in outcome.plans) == 6
    assert not any(plan.mixed_restores for plan, *_ in outcome.plans)


def test_what_was_placed_last_is_the_first_to_run_unsaved():
    limit = limits(gpu=100, host=6, max_model_len=512, block_bytes=BLOCK_BYTES)
    said = []

    def observe(scheduler):
        scheduler.memory.tell_blocks()
        return lambda plan, *_: said.extend(change for change in plan.changes if isinstance(change, Save | Unsave))

    rows = requests((0.0, 90, 60), (0.0, 90, 60))
    simulate(parse_policy("hcache", {})[1], rows, limit, machine=slow_link(), observe=observe)
    kinds = [(type(change), change.seq.request.request_id) for change in said]
    assert kinds == [(Save, 0), (Save, 1), (Unsave, 1)]


def turns(gap_s: float = 5.0):
    """A prompt of 256 tokens and its next turn, 64 tokens longer; between them others that fill the GPU."""
    first = tuple(range(16))
    rows = [Request(0, 0.0, 256, 2, "", first, 16)]
    rows += [Request(1, gap_s, 400, 30, "", tuple(range(100, 125)), 16)]
    rows += [Request(2, 2 * gap_s, 320, 2, "", (*first, *range(50, 54)), 16)]
    return rows


def test_the_next_turn_is_restored_sooner_than_it_is_computed_or_copied():
    # Projections and copies of hidden states as long: half of what copies of KV take.
    machine = linear_machine(
        BLOCK_BYTES, prefill=(0.02, 0.002, 0.0), decode=(0.02, 0.0, 0.0), swap_s_per_block=0.004
    )  # fmt: skip
    limit = limits(gpu=27, host=100, max_model_len=512, block_bytes=BLOCK_BYTES)
    limit = replace(limit, enable_prefix_caching=True)
    ttft = {}
    for text in ("vllm-recompute", "cachedattention", "hcache:keeps=turns"):
        outcome = simulate(parse_policy(text, {})[1], turns(), limit, machine=machine)
        last = outcome.by_id()[2]
        ttft[text] = last.first_token_s - last.request.arrival_s
        assert outcome.by_id()[0].first_token_s == pytest.approx(0.02 + 0.002 * 256)
    assert ttft["hcache:keeps=turns"] < 0.5 * ttft["vllm-recompute"]
    assert ttft["hcache:keeps=turns"] < ttft["cachedattention"] + 0.05


def test_a_turn_whose_states_take_longer_than_its_tokens_is_computed():
    machine = linear_machine(BLOCK_BYTES, prefill=(0.02, 0.002, 0.0), decode=(0.02, 0.0, 0.0), swap_s_per_block=0.4)
    limit = replace(limits(gpu=27, host=100, max_model_len=512, block_bytes=BLOCK_BYTES), enable_prefix_caching=True)
    outcome = simulate(
        parse_policy("hcache:keeps=turns", {})[1], turns(60.0), limit, machine=machine, record=True, jump=False
    )  # fmt: skip
    assert not any(plan.mixed_restores for plan, *_ in outcome.plans)
    last = outcome.by_id()[2]
    assert last.first_token_s - last.request.arrival_s == pytest.approx(0.02 + 0.002 * 320)


def kept_turns(host):
    """The turns above where so many blocks of KV have room on the host, copies at 4 ms a block; and their plans."""
    machine = linear_machine(BLOCK_BYTES, prefill=(0.02, 0.002, 0.0), decode=(0.02, 0.0, 0.0), swap_s_per_block=0.004)
    limit = replace(limits(gpu=27, host=host, max_model_len=512, block_bytes=BLOCK_BYTES), enable_prefix_caching=True)
    policy = parse_policy("hcache:keeps=turns", {})[1]
    outcome = simulate(policy, turns(), limit, machine=machine, record=True, jump=False)
    # Two layers' hidden states, half as many bytes as their KV, and two layers' KV: three quarters of a block's.
    assert outcome.scheduler.memory.backing.split == (0, 2, 2)
    return outcome, [plan for plan, *_ in outcome.plans]


def test_states_leave_behind_the_layers_of_prompts_and_not_when_a_turn_ends():
    outcome, plans = kept_turns(100)
    assert not any(plan.beside or plan.after for plan in plans)
    sent = [(chunk.seq.request.request_id, plan.behind_blocks) for plan in plans for chunk in plan.chunks]
    # Three quarters of 16 and 25 blocks, rounded up, and of the four by which the next turn is longer. Between them one
    # block at a time is computed again: the pool is too small for the second's answer.
    assert [sent[0], sent[1], sent[-1]] == [(0, 12), (1, 19), (2, 3)]
    assert set(sent[2:-1]) == {(1, 1)}
    assert outcome.lanes.d2h.busy_s == pytest.approx(0.004 * sum(blocks for _, blocks in sent))


@pytest.mark.parametrize(("host", "kept"), [(100, 133 - 27), (21, 1), (20, 0), (0, 0)])
def test_the_host_holds_states_of_all_that_the_gpu_holds_first(host, kept):
    outcome, plans = kept_turns(host)
    assert outcome.scheduler.memory.backing.cache.num_chunks == kept
    assert any(plan.behind for plan in plans) == bool(kept)


# -- KVPR ------------------------------------------------------------------------------------------------------------


def test_projected_blocks_by_hand():
    # Of ten blocks: four projected take 4 x (0.5 + 1.5) = 8, six copied take 6, after 2 of inputs: 8 in both cases.
    found = BlockSeconds(inputs_s=0.5, projection_s=1.5, kv_s=1.0, input_share=0.5)
    assert found.projected(10) == 4
    assert found.layer_s(10, 4) == 4 * 0.5 + 6.0
    assert BlockSeconds(1.0, 0.001, 1.0, 1.0).projected(10) == 0


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(0, 200), st.floats(0.01, 2.0), st.floats(0.001, 5.0), st.floats(0.01, 2.0)
)  # fmt: skip
def test_no_other_number_of_blocks_is_better(blocks, inputs_s, projection_s, kv_s):
    found = BlockSeconds(inputs_s, projection_s, kv_s, 0.5)
    least = min(found.layer_s(blocks, other) for other in range(blocks + 1))
    assert found.layer_s(blocks, found.projected(blocks)) <= least * (1 + 1e-12)


def four_of_2048(text, name, gpu, tp=1):
    """Four sequences of 2,048 tokens."""
    machine, _ = llama(name, gpu, tp)
    limit = limits(gpu=600, host=20_000, max_model_len=4096, block_bytes=16 * machine.model.kv_bytes_per_token(tp))
    rows = requests(*((0.0, 2048, 40) for _ in range(4)))
    return machine, simulate(parse_policy(text, {})[1], rows, limit, machine=machine, jump=False)


def step_s(text, name, gpu, tp=1):
    """A decode step of four."""
    _, outcome = four_of_2048(text, name, gpu, tp)
    steps = [times.end_s - start_s for plan, start_s, times in outcome.plans if plan.num_decodes == 4]
    return steps[len(steps) // 2], outcome.scheduler.counters.policy


@pytest.mark.parametrize(("name", "gpu", "least"), [("llama-2-7b", "l20", 1.2), ("llama-2-13b", "a100-80g", 1.4)])
def test_steps_are_shorter_than_with_all_kv_copied(name: str, gpu: str, least: float):
    took_s, counters = step_s("kvpr", name, gpu)
    model = load_model(name)
    copied_s = 4 * 2048 * model.kv_bytes_per_token() / 25e9
    assert least < copied_s / took_s < 2.0
    assert counters["projected_layer_blocks"] > 0


def test_a_steps_copies_and_projections_by_hand():
    """Llama-2-7B: of 32 layers, four sequences of 129 blocks; inputs of a token are half as many bytes as its KV."""
    machine, outcome = four_of_2048("kvpr", "llama-2-7b", "l20")
    # Backing the prompts: KV of 4 x 128 blocks in 32 layers, and the inputs.
    assert sum(plan.behind_blocks for plan, *_ in outcome.plans) == 4 * 128 * 32 * 3 // 2
    plan, start_s, times = next(each for each in outcome.plans if each[0].num_decodes == 4)
    (record,) = plan.streamed
    tally, steps = outcome.scheduler.counters.policy, [p.streamed[0] for p, *_ in outcome.plans if p.streamed]
    assert tally["projected_layer_blocks"] == sum(step.num_tokens // 16 * 32 for step in steps)
    assert tally["streamed_layer_blocks"] == sum(step.num_read for step in steps)
    # A block a layer and sequence with the new token's KV, and 32 x 4 tokens' inputs in blocks of 16.
    assert (record.num_groups, record.num_written, record.num_inputs) == (32, 128 + 4, 4)
    projected = record.num_tokens // 16
    assert record.num_tokens % 16 == 0 and projected > 50
    cached = sum(-(-seq.request.prompt_tokens // 16) for seq in outcome.ended)
    assert record.num_read == 32 * (cached - projected)
    cost = machine.cost
    kv_s = cost.copy_s(record.num_read * 16 * KV_TOKEN, record.num_read, H2D)
    inputs_s = cost.copy_s(32 * record.num_tokens * HIDDEN_TOKEN, 32, H2D)
    out_s = cost.copy_s(132 * 16 * KV_TOKEN, 132, D2H)
    compute_s = cost.iteration_s(plan) + 32 * cost.project_s(record.num_tokens)
    expected_s = streamed_s(compute_s, 32, kv_s + inputs_s, out_s, 0.0)
    assert times.end_s - start_s == pytest.approx(expected_s, rel=1e-6)


def test_a_step_without_inputs_is_charged_for_kv_alone():
    machine, outcome = four_of_2048("kvpr:partial-recompute=false", "llama-2-7b", "l20")
    plan, start_s, times = next(each for each in outcome.plans if each[0].num_decodes == 4)
    (record,) = plan.streamed
    assert (record.num_tokens, record.num_written) == (0, 128)
    kv_s = machine.cost.copy_s(record.num_read * 16 * KV_TOKEN, record.num_read, H2D)
    out_s = machine.cost.copy_s(128 * 16 * KV_TOKEN, 128, D2H)
    expected_s = streamed_s(machine.cost.iteration_s(plan), 32, kv_s, out_s, 0.0)
    assert times.end_s - start_s == pytest.approx(expected_s, rel=1e-9)


def test_with_grouped_queries_no_inputs_are_kept():
    _, outcome = four_of_2048("kvpr", "llama-3.1-8b", "a100-80g")
    assert sum(plan.behind_blocks for plan, *_ in outcome.plans) == 4 * 128 * 32
    record = next(plan.streamed[0] for plan, *_ in outcome.plans if plan.num_decodes == 4)
    assert record.num_written == 4 * 32


# -- what every system must keep to, where states are half the size of KV ----------------------------------------------


@pytest.mark.parametrize("text", ["hcache", "hcache:keeps=turns", "kvpr", "hcache:eviction=recompute"])
def test_they_keep_to_what_every_system_must_on_multi_head_attention(text: str):
    policy, used = parse_policy(text, {})[1], 0

    def one(workload: Workload) -> None:
        nonlocal used
        block_bytes = 4 * workload.limits.block_size * KV_TOKEN
        workload = replace(
            workload, limits=replace(workload.limits, block_bytes=block_bytes), machine=linear_machine(block_bytes)
        )
        outcome = conformance.run(policy, workload, record=True)
        conformance.check_ends(outcome, workload)
        conformance.check_gaps(outcome)
        conformance.check_jumps(policy, workload)
        used += sum(len(plan.mixed_restores) for plan, _, _ in outcome.plans)
        used += outcome.scheduler.counters.policy["projected_layer_blocks"]

    conformance.over_workloads(policy, one, examples=40, shrink=False)
    assert (used > 0) or text != "kvpr"


def test_many_restores_jump_as_they_step():
    limit = limits(gpu=30, host=100, max_model_len=512, block_bytes=BLOCK_BYTES)
    arrivals = requests(*((0.1 * i, 60 + 7 * i, 80) for i in range(8)))
    workload = Workload(arrivals, limit, slow_link())
    policy = parse_policy("hcache", {})[1]
    outcome = conformance.run(policy, workload)
    assert sum(len(plan.mixed_restores) for plan, _, _ in outcome.plans) >= 3
    conformance.check_ends(outcome, workload)
    conformance.check_jumps(policy, workload)


LAYERS, KEEP_FREE = 4, 1
SEQ = Sequence(requests((0.0, 17, 1))[0])
"""Two blocks, the second with one token."""


@pytest.mark.parametrize(
    ("gpu", "host", "fits"),
    [(8, 8, True), (7, 8, False), (8, 7, False), (9, 9, True)],
    ids=["just enough", "one less on the GPU", "one less on the host", "more"],
)
def test_a_prompt_needs_its_send_buffer_and_all_layers_on_the_host(gpu, host, fits):
    """On the GPU two layers of two blocks beside a block of each layer that is kept free; on the host four layers."""
    memory = HostedLayers(limits(gpu=100, host=100), LAYERS, lambda tokens: 0)
    memory.gpu.allocate(memory.gpu.free - gpu)
    memory.host.allocate(memory.host.free - host)
    assert memory.layers_to_keep(SEQ, KEEP_FREE) == (0 if fits else None)
    assert memory.ever_fits(SEQ, KEEP_FREE)


@pytest.mark.parametrize(("gpu", "host", "fits"), [(2, 2, True), (1, 2, False), (2, 1, False)])
def test_a_prompt_that_the_empty_tiers_cannot_hold_never_fits(gpu, host, fits):
    memory = HostedLayers(limits(gpu=gpu, host=host), LAYERS, lambda tokens: 0)
    assert memory.ever_fits(SEQ, KEEP_FREE) is fits


@pytest.mark.parametrize(("gpu", "fits"), [(3, True), (2, False)])
def test_what_is_kept_free_is_kept_of_every_layer(gpu, fits):
    """A block of the GPU is one of each layer: 12 hold two layers of two beside two of each of four, 8 do not."""
    assert HostedLayers(limits(gpu=gpu, host=8), LAYERS, lambda tokens: 0).ever_fits(SEQ, 2) is fits
