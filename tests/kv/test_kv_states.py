"""Memory of layers that keep a state: worked examples, conformance on random workloads, jumps as steps.

`tests/oracle` holds its every decision to vLLM's own (`cases_v1/*-state*`).
"""

from dataclasses import replace

import pytest
from hypothesis import strategies as st
from test_kv_windowed import windowed_workloads

from kvtwin.testing.conformance import Workload, check
from kvtwin.testing.engines import limits, simulate
from sim.engine.limits import Limits, StateLimits
from sim.kv.states import StateMemory
from sim.options.policies import parse_policy
from sim.systems.vllm_v1 import VllmV1
from traces.request import Request

STATES = StateLimits(1, 2, exports_within_chunks=False)
"""A group that keeps all and two that keep a state."""


def limit_of(*, cached: bool = True, states: StateLimits = STATES, tokens: int = 2048, gpu: int = 40) -> Limits:
    return replace(limits(gpu=gpu, tokens=tokens), enable_prefix_caching=cached, states=states)


def used_and_chunks(limit: Limits, *arrivals: Request) -> tuple[list[int], list[list[int]]]:
    """Pool blocks in use, and tokens of chunks, of each iteration; all blocks are given back."""
    used: list[int] = []
    chunks: list[list[int]] = []

    def observe(scheduler):
        def look(plan, start_s, times):
            used.append(scheduler.gpu.num_blocks - scheduler.gpu.free)
            chunks.append([chunk.num_new for chunk in plan.chunks])

        return look

    outcome = simulate(VllmV1(), list(arrivals), limit, jump=False, observe=observe)
    assert outcome.scheduler.gpu.free == outcome.scheduler.gpu.num_blocks
    return used, chunks


def hits(limit: Limits, *rows: tuple[float, int, int, tuple[int, ...]]) -> list[int]:
    """Tokens hit by requests (arrival_s, prompt, output, hash_ids)."""
    found = simulate(VllmV1(), [Request(i, *row[:3], "", row[3], 16) for i, row in enumerate(rows)], limit).by_id()
    return [found[i].num_cached_tokens for i in range(len(rows))]


def ids(stem: int, count: int, *others: int) -> tuple[int, ...]:
    return (*range(100 * stem, 100 * stem + count), *others)


def test_without_prefix_caching_a_state_lasts_a_request() -> None:
    used, chunks = used_and_chunks(limit_of(cached=False), Request(0, 0.0, 100, 60))
    assert chunks[:2] == [[100], []]
    assert used == [2 + -(-n // 16) for n in (100, *range(101, 160))]


def test_a_prompt_stops_where_its_state_is_cached() -> None:
    """100 tokens: the state after 96 is cached, and given back when the step after has its own."""
    used, chunks = used_and_chunks(limit_of(), Request(0, 0.0, 100, 40))
    assert chunks[:3] == [[96], [4], []]
    # The block of 97 to 112 is taken beside the last; the first decode gives that one back.
    assert used[:3] == [6 + 2, 7 + 2 * 2, 7 + 2]
    # The 113th token begins a block, and so a state; the 114th gives back the one before.
    assert used[13:17] == [7 + 2, 8 + 2 * 2, 8 + 2, 8 + 2]


def test_kernels_that_write_states_out_need_no_stop() -> None:
    exporting = limit_of(states=StateLimits(1, 2, exports_within_chunks=True))
    used, chunks = used_and_chunks(exporting, Request(0, 0.0, 100, 40))
    assert chunks[:2] == [[100], []]
    assert used[:2] == [7 + 2 * 2, 7 + 2]


def test_chunks_end_where_blocks_do_or_within_long_blocks() -> None:
    assert used_and_chunks(limit_of(tokens=40), Request(0, 0.0, 100, 2))[1][:4] == [[32], [32], [32], [4]]
    assert used_and_chunks(limit_of(tokens=10), Request(0, 0.0, 40, 2))[1][:6] == [[10], [6], [10], [6], [8], []]


@pytest.mark.parametrize("exports", [False, True])
def test_a_prompt_again_hits_the_state_before_its_last_token(exports: bool) -> None:
    limit = limit_of(states=StateLimits(1, 2, exports_within_chunks=exports))
    assert hits(limit, (0.0, 100, 5, ids(1, 7)), (9.0, 100, 5, ids(1, 7))) == [0, 96]
    # A prompt of whole blocks computes its last one again.
    assert hits(limit, (0.0, 96, 5, ids(1, 6)), (9.0, 96, 5, ids(1, 6))) == [0, 80]


def test_a_prefix_is_hit_from_the_second_time_that_a_sequence_leaves_it() -> None:
    prompts = [(9.0 * i, 200, 5, ids(1, 5, *range(1000 * i, 1000 * i + 8))) for i in range(4)]
    assert hits(limit_of(), *prompts) == [0, 0, 80, 80]


def test_nothing_hits_a_state_in_the_step_that_computes_it() -> None:
    """Equal prompts at once: the second waits for the next step, and hits then."""
    twins = [(0.0, 100, 5, ids(1, 7))] * 2
    assert hits(limit_of(), *twins) == [0, 96]
    arrivals = [Request(i, *row[:3], "", row[3], 16) for i, row in enumerate(twins)]
    assert used_and_chunks(limit_of(), *arrivals)[1][:3] == [[96], [4, 4], []]


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Groups of states as they come, prefixes shared or not, cached or not."""
    workload = draw(windowed_workloads("vllm-v1", named=True))
    window = workload.limits.window
    assert window is not None
    states = StateLimits(max(1, window.num_full), window.num_window + draw(st.integers(0, 1)), draw(st.booleans()))
    limit = replace(workload.limits, enable_prefix_caching=draw(st.booleans()), window=None, states=states)
    return Workload(workload.arrivals, limit, workload.machine)


@pytest.mark.parametrize("name", ["vllm-v1", "vllm-v1:async-scheduling=true", "vllm-v1:scheduling-policy=priority"])
def test_models_with_states_keep_to_the_conformance_suite(name: str) -> None:
    """Every block is recounted after every step; jumped and stepped runs are equal."""
    check(parse_policy(name, {})[1], examples=40, among=workloads(), memory=StateMemory)
