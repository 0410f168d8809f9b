"""SGLang's pool of states, by numbers worked by hand; its decisions are `tests/oracle`'s."""

from dataclasses import replace
from random import Random

import pytest

from kvtwin.testing import limits, linear_machine, simulate
from kvtwin.testing.engines import build_engine
from sim.engine.limits import StateLimits
from sim.errors import UserError
from sim.options.policies import parse_policy
from sim.options.scenario import Scenario
from sim.run.prepare import prepare
from sim.specs.memory import StatePool
from sim.systems.base import EngineLimits
from sim.systems.sglang.marked_tree import MarkedNode, StateTree
from sim.systems.sglang.preset import Sglang
from sim.systems.sglang.tree import TreeSettings
from traces.request import Request

ENGINE = EngineLimits(8, 2048, True)
QWEN_STATE_BYTES = 30 * (32 * 128 * 128 * 4 + 3 * (2 * 16 * 128 + 32 * 128) * 2)
"""Of Qwen 3.5's 30 layers of Gated DeltaNet: 32 heads of 128 x 128 in 32 bits, 3 inputs of a convolution in 16."""
QWEN_TOKEN_BYTES = 10 * 2 * 2 * 256 * 2
"""Of its 10 layers that attend: keys and values of 2 heads of 256 elements, in 16 bits."""


def limits_of(asked, **more):
    return prepare(
        Scenario(model="qwen3.5-35b-a3b", gpu="h200", max_model_len=4096, **more), *parse_policy(asked, {})
    ).limits


def small(num_states, *, chunk=16, page=1):
    """A pool of 1,000 tokens, and one of states that are had where 16 tokens, or `chunk`, end."""
    states = StateLimits(own_slots=num_states, chunk_tokens=chunk)
    found = limits(gpu=1000 // page, host=0, block_size=page, chunked=True)
    return replace(found, states=states, enable_prefix_caching=True)


def hits(asked, num_states, *prompts, output_tokens=2, **more):
    """Tokens that each request hits, one after another; a prompt is its blocks of 16 tokens."""
    trace = [
        Request(i, 10.0 * i, 16 * len(ids), output_tokens, hash_ids=tuple(ids), hash_block_tokens=16)
        for i, ids in enumerate(prompts)
    ]
    found = simulate(parse_policy(asked, {})[1], trace, small(num_states, **more), checked=True)
    return [seq.num_cached_tokens for seq in sorted(found.ended, key=lambda seq: seq.request.request_id)]


def test_memory_is_shared_by_the_ratio_and_a_slot_of_padding():
    found = limits_of("sglang:mamba-full-memory-ratio=0.5")
    assert found.states is not None and found.states.own_slots is not None
    states = found.states.own_slots + 1
    both = states * QWEN_STATE_BYTES + found.num_gpu_blocks * QWEN_TOKEN_BYTES
    assert states == int((both + QWEN_TOKEN_BYTES) / 3 // QWEN_STATE_BYTES)


def test_so_many_states_as_are_asked_for_and_what_they_allow_to_run():
    more, fewer = limits_of("sglang:max-mamba-cache-size=200"), limits_of("sglang:max-mamba-cache-size=100")
    assert more.states == StateLimits(own_slots=200, own_bytes=QWEN_STATE_BYTES)
    assert fewer.states == StateLimits(own_slots=100, own_bytes=QWEN_STATE_BYTES)
    saved = (fewer.num_gpu_blocks - more.num_gpu_blocks) * QWEN_TOKEN_BYTES
    assert saved == pytest.approx(100 * QWEN_STATE_BYTES, abs=QWEN_TOKEN_BYTES)
    # Each takes one, has one in the tree, hands one over, and tracks two.
    assert (more.max_num_seqs, fewer.max_num_seqs) == (40, 20)


def test_seats_asked_for_that_states_do_not_allow_are_said():
    asked = Scenario(model="qwen3.5-35b-a3b", gpu="h200", max_model_len=4096, max_num_seqs=64)
    setup = prepare(asked, *parse_policy("sglang:max-mamba-cache-size=50", {}))
    assert any("a request may take 5: 10 run at most, not 64" in warning for warning in setup.warnings)


@pytest.mark.parametrize(
    ("asked", "pool"),
    [
        ({"max_mamba_cache_size": 30}, StatePool(5, num_states=30)),
        ({"max_mamba_cache_size": 30, "disable_overlap_schedule": True}, StatePool(3, num_states=30)),
        ({"max_mamba_cache_size": 30, "enable_dp_attention": True}, StatePool(5, num_states=15)),
        ({"disable_overlap_schedule": True, "mamba_radix_cache_strategy": "extra_buffer"}, StatePool(4, 0.9 / 1.9)),
    ],
)
def test_states_of_a_request_by_strategy_and_of_a_pool_by_ranks(asked, pool):
    assert Sglang(**asked).state_pool(1, ENGINE, cached=True, ranks=2) == pool


def test_without_a_cache_a_request_takes_one_state():
    asked = Sglang(disable_radix_cache=True, max_running_requests=8)
    assert asked.state_pool(1, ENGINE, cached=False, ranks=1) == StatePool(1, num_states=8)


@pytest.mark.parametrize(
    ("asked", "page", "match"),
    [
        ("mamba-radix-cache-strategy=no_buffer", 1, "no_buffer goes with disable-overlap-schedule"),
        ("mamba-track-interval=100", 16, "mamba-track-interval: 100 is no multiple of a page of 16; take 112"),
        ("enable-hierarchical-cache=true,hicache-storage-backend=file,hicache-storage-space=1", 1, "storage-space"),
        ("mamba-track-interval=48", 48, "48 and the 64 tokens of a chunk"),
    ],
)
def test_what_sglang_does_not_have_is_refused(asked, page, match):
    policy = parse_policy(f"sglang:{asked}", {})[1]
    with pytest.raises(UserError, match=match):
        build_engine(policy, small(30, chunk=64, page=page), linear_machine(), lambda seq: None)


def test_a_prefix_is_hit_where_the_tree_has_a_state():
    # Of 48 tokens the tree has the state at 48. A prompt that parts at 32 hits nothing, but leaves a state there.
    asked = "sglang:mamba-track-interval=1024"
    assert hits(asked, 40, [1, 2, 3], [1, 2, 4, 5], [1, 2, 6]) == [0, 0, 32]


def test_without_tracking_states_are_where_prompts_and_requests_end():
    # One state is where the prompt ends, another a token before the whole does.
    asked = "sglang:disable-overlap-schedule=true"
    assert hits(asked, 40, [1, 2], [1, 2, 3], [1, 2, 3, 4]) == [0, 32, 48]


@pytest.mark.parametrize("seed", range(3))
def test_states_are_a_list_of_prompts_of_which_the_one_read_first_goes(seed):
    """What the tree makes of paths, splits and leaves, the last read last; what a sequence holds stays."""
    dice = Random(seed)
    tree = StateTree(TreeSettings("lru", 0, 0, "write_through", 1), 1)
    known: list[tuple[int, ...]] = []
    held, since = tree.root, 0
    for _ in range(300):
        what = dice.choice(("insert", "insert", "insert", "match", "hold", "evict"))
        prompt = tuple(dice.choices((1, 2), k=dice.randint(0, 6)))
        best = max((one for one in known if prompt[: len(one)] == one), key=len, default=())
        if what == "evict":
            gone = [one for one in known if one != tree.keys_of(held)][: len(prompt)]
            pages = tree.num_idle
            assert tree.evict_marks(len(prompt)) == pages - tree.num_idle
            known = [one for one in known if one not in gone]
        elif what == "insert" and prompt:
            tree.insert(prompt, len(prompt), held=0, counted=0)
            best = prompt
        else:
            match = tree.match(prompt, len(prompt))
            assert (match.pages, tree.keys_of(match.node)) == (len(best), best)
            if what == "hold":
                tree.unlock(held, since)
                held, since = match.node, tree.lock(match.node)
        if best and what != "evict":
            known = [*(one for one in known if one != best), best]
        marked = [node for node in tree.nodes() if isinstance(node, MarkedNode) and node.is_marked]
        assert {tree.keys_of(node) for node in marked} == set(known)
        counted = len(known), len({*known} - {tree.keys_of(held)})
        assert tree.recounted() == (tree.num_marked, tree.num_marked_idle) == counted
