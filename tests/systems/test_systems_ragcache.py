"""RAGCache: what gives way on the host, and which request is next."""

from dataclasses import replace

import pytest
from conversations import conversations
from hypothesis import given, settings
from hypothesis import strategies as st
from test_systems_cacheblend import draw_passages
from test_systems_cachedattention import turn

from kvtwin.testing import conformance, limits, linear_machine, simulate
from sim.kv.tiers.host_cache import HostCache
from sim.kv.tiers.replacement import Access
from sim.options.policies import parse_policy
from sim.systems.ragcache.preset import RagCache
from traces.generators import generate


def put(cache: HostCache, keys: tuple[int, ...], cost_s: float = 1.0) -> bool:
    """A request computes all of `keys` that are not there, and stores them; whether there was room."""
    access = Access(keys)
    access.cost_s = cost_s
    taken = cache.offer(access, range(len(keys)))
    cache.finish(access)
    if taken is not None:
        cache.written([keys[place] for place in taken])
    return taken is not None


def use(cache: HostCache, keys: tuple[int, ...]) -> None:
    access = Access(keys)
    cache.read(access, range(len(keys)))
    cache.done_reading(keys)
    cache.finish(access)


def held(cache: HostCache) -> set[int]:
    return set(cache.keys())


def test_the_least_use_times_cost_goes_leaves_first_and_the_clock_ages_the_rest():
    """Worked by hand: the clock is 0, then 2, then 3."""
    cache = HostCache(3, "pgdsf")
    assert put(cache, (1, 2), cost_s=2.0) and put(cache, (3,), cost_s=3.0)
    # 1 and 2 are worth 0 + 1 x 2, 3 is worth 3. Of the former only 2 is a leaf.
    assert put(cache, (4,), cost_s=1.5)
    assert held(cache) == {1, 3, 4}
    # 4 is worth 2 + 1 x 1.5 by now. A use of 1: 2 + 2 x 2. So 3 is the least.
    use(cache, (1,))
    assert put(cache, (5,), cost_s=0.25)
    assert held(cache) == {1, 4, 5}
    # 5 is worth 3 + 0.25, less than 4, which is 3.5.
    assert put(cache, (6,), cost_s=9.0)
    assert held(cache) == {1, 4, 6}


def test_what_is_offered_does_not_give_way_for_itself():
    """All that is there is a part of it: no room, and nothing changes."""
    cache = HostCache(2, "pgdsf")
    assert put(cache, (1, 2))
    assert not put(cache, (1, 2, 3))
    assert held(cache) == {1, 2}
    assert put(cache, (4,)) and held(cache) == {1, 4}


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=4), st.integers(1, 9)), max_size=40))
def test_the_tree_is_closed_under_prefixes_and_never_too_large(prompts):
    cache, known = HostCache(6, "pgdsf"), dict[tuple[int, ...], int]()
    for passages, cost_s in prompts:
        prefixes = [tuple(passages[: i + 1]) for i in range(len(passages))]
        keys = tuple(known.setdefault(prefix, len(known) + 1) for prefix in prefixes)
        assert put(cache, keys, cost_s)
        names = {key: prefix for prefix, key in known.items()}
        assert all(known[names[key][:-1]] in held(cache) for key in held(cache) if len(names[key]) > 1)
        assert len(held(cache)) == 6 - cache.num_free and set(keys) <= held(cache)


def starts(window: int) -> list[int]:
    """Requests by start: the first has a seat, the second shares nothing, the others the first's three blocks."""
    rows = [turn(0, 0.0, (1, 2, 3, 4)), turn(1, 0.01, (5, 6))] + [
        turn(i, 0.01 + i / 100, (1, 2, 3, 10 + i)) for i in range(2, 5)
    ]
    machine = linear_machine(prefill=(0.0, 1e-3, 0.0), decode=(1e-3, 0.0, 0.0))
    limit = replace(limits(gpu=100, host=100, seqs=1), enable_prefix_caching=True)
    ended = simulate(RagCache(reorder_window=window), rows, limit, machine=machine).ended
    return [seq.request.request_id for seq in sorted(ended, key=lambda seq: seq.first_scheduled_s)]


@pytest.mark.parametrize(("window", "order"), [(0, [0, 1, 2, 3, 4]), (2, [0, 2, 3, 1, 4]), (32, [0, 2, 3, 4, 1])])
def test_the_most_reused_comes_first_but_none_is_overtaken_by_more_than_the_window(window, order):
    assert starts(window) == order


@pytest.mark.parametrize("draw", [conversations, st.composite(draw_passages)])
@pytest.mark.parametrize("text", ["ragcache:reorder-window=3", "vllm-v1:memory=tiered,replacement=pgdsf"])
def test_it_keeps_to_what_every_system_must(text, draw):
    policy = parse_policy(text, {})[1]
    conformance.check(policy, examples=20, among=draw(policy))


def test_popular_passages_are_hit_more_often_than_by_the_longest_unused():
    """The claim behind the rule: with room on the host for a fraction of what is asked for, uses tell more than age."""
    passages = {"documents": 2, "document_len": 64, "corpus": 60, "skew": 1.2}
    asked = list(
        generate("documents", num_prompts=600, request_rate=2.0, input_len=16, output_len=4, seed=3, **passages)
    )
    limit = replace(limits(gpu=40, host=200, max_model_len=512), enable_prefix_caching=True)
    hits = {
        kind: simulate(RagCache(replacement=kind), asked, limit, checked=False).scheduler.counters.prefix_hit_tokens
        for kind in ("lru", "pgdsf")
    }
    assert hits["pgdsf"] > 1.05 * hits["lru"]
