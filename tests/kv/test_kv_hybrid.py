"""vLLM v1's hybrid KV cache manager: worked examples, look-ups against every length tried, conformance, scenarios.

`tests/oracle` holds its every decision to vLLM's own (`cases_v1/*-window*`).
"""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_kv_windowed import setup, windowed_workloads

from kvtwin.testing.conformance import Workload, check
from kvtwin.testing.engines import limits, simulate
from sim.engine.limits import WindowLimits
from sim.engine.sequence import Sequence
from sim.errors import UserError
from sim.kv.hybrid import HybridMemory
from sim.kv.index.block_cache import BlockCache, chained
from sim.options.policies import parse_policy
from sim.systems.vllm_v1 import VllmV1
from traces.request import Request

WINDOW = WindowLimits(33, 1, 2, 3)
"""A group that keeps all and two with a window of 33 tokens: a token reads its own and two blocks of 16 before it."""


def hits(*rows: tuple[float, int, int, tuple[int, ...]], gpu: int = 40, window: WindowLimits = WINDOW) -> list[int]:
    """Tokens hit by requests (arrival_s, prompt, output, hash_ids); all blocks are given back."""
    arrivals = [Request(i, *row[:3], "", row[3], 16) for i, row in enumerate(rows)]
    limit = replace(limits(gpu=gpu, window=window), enable_prefix_caching=True)
    outcome = simulate(VllmV1(), arrivals, limit)
    assert outcome.scheduler.gpu.free == outcome.scheduler.gpu.num_blocks
    found = outcome.by_id()
    return [found[i].num_cached_tokens for i in range(len(rows))]


def ids(stem: int, count: int, *others: int) -> tuple[int, ...]:
    return (*range(100 * stem, 100 * stem + count), *others)


def test_a_prompt_again_hits_all_but_its_last_block() -> None:
    """100 tokens are 6 full blocks; before the last token windowed groups keep blocks 4 and 5, and that is enough."""
    assert hits((0.0, 100, 5, ids(1, 7)), (9.0, 100, 5, ids(1, 7))) == [0, 96]


def test_a_prefix_is_hit_from_the_second_time_that_a_sequence_leaves_it() -> None:
    """80 of 200 tokens are shared. Windowed groups have nothing there until a prompt has parted from another there."""
    prompts = [(9.0 * i, 200, 5, ids(1, 5, *range(1000 * i, 1000 * i + 8))) for i in range(4)]
    assert hits(*prompts) == [0, 0, 80, 80]
    # A window longer than the prompt keeps all of it.
    assert hits(*prompts, window=WindowLimits(10_000, 1, 2, 700)) == [0, 80, 80, 80]


def test_the_next_turn_hits_the_last_prompt_and_not_its_answer() -> None:
    """A turn of 100 tokens, 60 of answer, and a next one: full groups have 9 blocks of it, windowed ones 4 and 5."""
    named = ids(1, 20)
    first = Request(0, 0.0, 100, 60, "", named[:7], 16, named[7:10])
    second = Request(1, 9.0, 250, 5, "", named[:16], 16)
    limit = replace(limits(gpu=40, window=WINDOW), enable_prefix_caching=True)
    found = simulate(VllmV1(), [first, second], limit).by_id()
    assert found[1].num_cached_tokens == 96


def test_models_whose_layers_all_have_the_window() -> None:
    """The last window of a prompt is all that it takes: blocks before it need not be there."""
    all_windowed = WindowLimits(33, 0, 1, 3)
    assert hits((0.0, 100, 5, ids(1, 7)), (9.0, 100, 5, ids(1, 7)), window=all_windowed) == [0, 96]


def test_what_leaves_the_window_is_free_by_hand() -> None:
    """A prompt of 100 tokens and 60 of output: blocks that hold n tokens, less those that the n-th does not read."""
    limit = replace(limits(gpu=40, window=WINDOW), enable_prefix_caching=True)
    used: list[int] = []

    def observe(scheduler):
        return lambda plan, start_s, times: used.append(scheduler.gpu.num_blocks - scheduler.gpu.free)

    simulate(VllmV1(), [Request(0, 0.0, 100, 60)], limit, jump=False, observe=observe)
    # The prompt's own step takes 7 blocks of each group. The 101st token reads tokens 69 to 101: not blocks 0 to 3.
    assert used[:2] == [3 * 7, 3 * 7 - 2 * 4]
    # The 113th begins an eighth block and reads no more than tokens 81 to 113: not block 4 either.
    assert used[12:14] == [3 * 7 - 2 * 4, 3 * 8 - 2 * 5]
    assert used[1:] == [3 * -(-n // 16) - 2 * ((n - 33) // 16) for n in range(101, 160)]


def test_blocks_kept_free_are_whole_ones() -> None:
    """40 blocks of three groups, of which a prompt of 100 tokens takes 7 each: 33 whole ones are left, not 99."""
    limit = replace(limits(gpu=40, window=WINDOW), enable_prefix_caching=True)
    memory, seq = HybridMemory(limit, schedules_ahead=False), Sequence(Request(0, 0.0, 100, 5))
    assert memory.gpu.num_blocks == 3 * 40
    assert memory.fits(seq, 33) and memory.ever_fits(seq, 33)
    assert not memory.fits(seq, 34) and not memory.ever_fits(seq, 34)


def test_evictions_take_what_was_never_cached_first_and_then_the_longest_idle() -> None:
    cache = BlockCache(2)
    first, second, twin = (cache.add(0, key) for key in ("a", "b", "a"))
    assert cache.find(0, "a") is first and cache.find(1, "a") is None
    assert cache.let_go(second) and cache.let_go(first) and cache.let_go(twin)
    cache.hold(second)
    assert cache.num_idle == 2
    cache.evict(1)
    assert cache.find(0, "a") is twin
    cache.evict(1)
    assert cache.find(0, "a") is None and cache.find(0, "b") is second
    assert cache.num_evicted == 2
    # Blocks that nothing finds any more give way in their turn, one by one.
    cache.let_go_own(3)
    assert cache.let_go(second) and cache.num_idle == 4
    cache.evict(2)
    assert cache.find(0, "b") is second and cache.num_idle == 2
    cache.evict(2)
    assert cache.find(0, "b") is None and not cache.num_idle


def test_keys_name_all_that_comes_before() -> None:
    one, other = list(chained((1, 2, 3))), list(chained((1, 9, 3)))
    assert one[0] == other[0] and one[1] != other[1] and one[2] != other[2]
    assert list(chained((12, 3))) != list(chained((1, 23)))


# -- look-ups, and everything else, on random workloads ----------------------------------------------------------------


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Windows and groups as they come, prefixes shared or not, cached or not."""
    workload = draw(windowed_workloads("vllm-v1", named=True))
    window = workload.limits.window
    assert window is not None
    window = msgspec.structs.replace(window, window_first=window.num_full > 0 and draw(st.booleans()))
    limit = replace(workload.limits, enable_prefix_caching=draw(st.booleans()), window=window)
    return Workload(workload.arrivals, limit, workload.machine)


class Checked(HybridMemory):
    """Compares each look-up with the longest of all lengths for which every group has what it takes."""

    def _look_up(self, table, limit):
        found = super()._look_up(table, limit)

        def has(groups, begin, end):
            return all(self.cache.find(g, table.key(i)) is not None for g in groups for i in range(begin, end))

        reads = self._hit_blocks
        lengths = [n for n in range(limit + 1) if has(self._full, 0, n) and has(self._windowed, max(0, n - reads), n)]
        # A window of one token reads none of the blocks before it; vLLM wants one of them all the same.
        if reads:
            assert found.num_blocks == max(lengths)
        return found

    def check(self, seqs: list[Sequence]) -> None:
        """A sequence that decodes holds what is computed then, less what its token does not read."""
        for seq in seqs:
            tokens = self.batch.num_tokens_of(seq)
            begin = max(0, tokens - self._window) // self.block_size
            groups = len(self._full), len(self._windowed)
            end = -(-tokens // self.block_size)
            assert self.held_blocks(seq) == groups[0] * end + groups[1] * (end - begin)


@pytest.mark.parametrize("name", ["vllm-v1", "vllm-v1:async-scheduling=true", "vllm-v1:scheduling-policy=priority"])
def test_windowed_models_keep_to_the_conformance_suite(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block is recounted after every step, every look-up tried; jumped and stepped runs are equal."""
    monkeypatch.setattr("sim.kv.hybrid.HybridMemory", Checked)
    check(parse_policy(name, {})[1], examples=40, among=workloads(), memory=Checked)


def test_decodes_hold_their_window_and_what_is_before_it_in_full_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.kv.hybrid.HybridMemory", Checked)
    looks = 0

    @settings(max_examples=60, deadline=None, database=None, suppress_health_check=(HealthCheck.too_slow,))
    @given(workload=workloads())
    def one(workload: Workload) -> None:
        def observe(scheduler):
            def look(plan, start_s, times):
                nonlocal looks
                scheduler.memory.check(plan.decodes)
                looks += plan.num_decodes

            return look

        simulate(VllmV1(), workload.arrivals, workload.limits, machine=workload.machine, jump=False, observe=observe)

    one()
    assert looks > 100


# -- scenarios ---------------------------------------------------------------------------------------------------------


def test_prefixes_of_windowed_models_are_cached_by_default_under_vllm_v1() -> None:
    assert setup("vllm-v1").limits.enable_prefix_caching
    assert not setup("vllm-v1", enable_prefix_caching=False).limits.enable_prefix_caching
    # All layers of Mistral-7B-v0.1 have the window.
    assert setup("vllm-v1", model="mistral-7b-v0.1", gpu="a100-80g").limits.enable_prefix_caching
    with pytest.raises(UserError, match=r"--enable-prefix-caching: gemma-3-27b has layers.*--policy vllm-v1"):
        setup("vllm-recompute", enable_prefix_caching=True)
    assert not setup("vllm-v1:batching=sarathi").limits.enable_prefix_caching
