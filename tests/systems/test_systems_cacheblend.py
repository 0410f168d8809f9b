"""CacheBlend and Prompt Cache: passages hit wherever they stand, what of them is computed again, and what it takes."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import strategies as st
from test_systems_cachedattention import turn

from kvtwin.testing import conformance, limits, linear_machine, simulate
from kvtwin.testing.conformance import DECODES, Workload, limits_of
from kvtwin.testing.engines import Outcome
from sim.kv.documents import DocumentTier
from sim.options.policies import parse_policy
from sim.systems.base import Policy
from sim.systems.cacheblend import CacheBlend
from sim.systems.promptcache import PromptCache
from traces.generators import generate
from traces.request import Request

BLOCK = 16
PASSAGES = turn(0, 0.0, (1, 2, 3, 4))
ELSEWHERE = turn(1, 1.0, (9, 3, 4, 1, 10))
"""Three of those, at other places and in another order, between two blocks of its own."""


def run(*arrivals: Request, policy: Policy, copy_s: float = 3e-4, host: int = 100, jump: bool = True) -> Outcome:
    """Six blocks of 16 tokens on the GPU, four layers, a millisecond a token."""
    machine = linear_machine(prefill=(0.0, 1e-3, 0.0), decode=(1e-3, 0.0, 0.0), swap_s_per_block=copy_s)
    return simulate(policy, arrivals, limits(gpu=6, host=host, max_model_len=97), machine=machine, jump=jump)


@pytest.mark.parametrize("jump", [True, False])
@pytest.mark.parametrize(
    ("policy", "spans"),
    [
        (PromptCache(), [(0, 16), (64, 80)]),
        # All in the first of four layers and half in the others: 0.625 of three blocks is one, the second: 4's.
        (CacheBlend(recompute_share=0.5), [(0, 16), (32, 48), (64, 80)]),
    ],
)
def test_passages_are_hit_where_no_prefix_is(policy, spans, jump):
    outcome = run(PASSAGES, ELSEWHERE, policy=policy, jump=jump)
    plan = next(plan for plan, _, _ in outcome.plans if plan.chunks and plan.chunks[0].seq.request is ELSEWHERE)
    assert [(chunk.num_cached, chunk.num_cached + chunk.num_new) for chunk in plan.chunks] == spans
    assert plan.prefill_pairs == sum(sum(range(begin + 1, end + 1)) for begin, end in spans)
    assert plan.prefill_squares == sum((end - begin) ** 2 for begin, end in spans)
    # Three blocks are loaded whatever is computed again: of 0.9 ms the first layer's quarter shows.
    num_computed = sum(end - begin for begin, end in spans)
    assert outcome.by_id()[1].first_token_s == pytest.approx(1.0 + 1e-3 * num_computed + 0.9e-3 / 4)
    assert outcome.by_id()[1].num_cached_tokens == 80 - num_computed
    assert outcome.scheduler.counters.policy["blended_tokens"] == 48 - (80 - num_computed)
    assert outcome.scheduler.counters.tiers["host"].hit_tokens == 80 - num_computed


def test_pieces_of_a_prompt_count_where_others_end_at_once():
    """One step: a request's last token, the only one of another, and 38 of 48 tokens of a third, in three pieces."""
    beside = Request(2, 1.0, 1, 2), Request(3, 1.0005, 1, 1), ELSEWHERE._replace(arrival_s=1.0005)
    limit = limits(gpu=8, host=100, max_model_len=97, tokens=40, chunked=True)
    policy = parse_policy("cacheblend:batching=unified,recompute-share=0.5", {})[1]
    outcome = simulate(policy, (PASSAGES, *beside), limit, machine=linear_machine())
    steps = [[(c.num_cached, c.num_new) for c in p.chunks if c.seq.request is beside[2]] for p, _, _ in outcome.plans]
    assert [step for step in steps if step] == [[(0, 16), (32, 16), (64, 6)], [(70, 10)]]


def test_the_papers_share_is_fifteen_percent_and_the_first_layer():
    """Of 1,000 blocks hit, 32 layers: 0.15 + 0.85 / 32 = 0.1766 of them are computed again."""
    machine = linear_machine(layers=32)
    policy = CacheBlend()
    memory = policy.parts(replace(limits(), enable_prefix_caching=True), machine.deployment).memory
    assert isinstance(memory.backing, DocumentTier)
    kept = memory.backing._kept(tuple(range(1000)))
    assert 1000 - len(kept) == 176
    # Evenly: between any two of them there are five or six blocks.
    again = sorted(set(range(1000)).difference(kept))
    assert {b - a for a, b in pairwise(again)} == {5, 6}


def test_loads_that_are_slower_than_computing_are_not_made():
    """80 tokens are 80 ms; three blocks of 40 ms each are not worth 48 of them."""
    outcome = run(PASSAGES, ELSEWHERE, policy=PromptCache(), copy_s=0.04)
    assert outcome.by_id()[1].first_token_s == pytest.approx(1.080)
    assert outcome.scheduler.counters.tiers["host"].num_loads == 0


def test_a_passage_that_stands_twice_is_kept_once_and_hit_twice():
    outcome = run(turn(0, 0.0, (1, 2, 1, 3)), turn(1, 1.0, (1, 9, 1, 10)), policy=PromptCache())
    assert outcome.scheduler.counters.tiers["host"].stored_blocks == 3 + 2
    assert outcome.by_id()[1].num_cached_tokens == 32


def test_blocks_larger_than_what_the_trace_names_are_hit_by_content():
    """Blocks of 16 over ids of 24 tokens: the second block of passage 1 has half of what follows in it."""
    named = [Request(i, float(i), 72, 1, "", ids, 24) for i, ids in enumerate([(1, 2, 3), (4, 5, 1), (1, 2, 6)])]
    outcome = run(*named, policy=PromptCache())
    # 4's and 5's blocks are new, and passage 1 begins at 48, a block's beginning: one block of it is hit.
    assert outcome.by_id()[1].num_cached_tokens == 16
    # 48 tokens of 1 and 2: three blocks.
    assert outcome.by_id()[2].num_cached_tokens == 48


def draw_passages(draw: st.DrawFn, policy: Policy) -> Workload:
    """Prompts of a few passages in any order, some twice, in pools that cannot hold them."""
    rows = draw(
        st.lists(
            st.tuples(
                st.sampled_from([0.0, 0.001, 0.05, 0.3, 1.0]),
                st.lists(st.integers(0, 4), max_size=5),
                st.integers(1, 40),
                st.integers(1, 50),
            ),
            min_size=4,
            max_size=25,
        )
    )
    found, now_s = [], 0.0
    for gap_s, passages, asked, answered in rows:
        now_s += gap_s
        ids = [10 * passage + i for passage in passages for i in range(3)]
        prompt = len(ids) * BLOCK + asked
        ids += range(1000 * (len(found) + 1), 1000 * (len(found) + 1) + asked // BLOCK)
        found.append(Request(len(found), now_s, prompt, answered, "", tuple(ids), BLOCK if ids else 0))
    limit = limits(
        gpu=draw(st.integers(22, 60)), host=draw(st.sampled_from([0, 4, 9, 1000])),
        block_size=draw(st.sampled_from([BLOCK, 4])), max_model_len=512,
    )  # fmt: skip
    limit = limits_of(policy, limit, draw(st.sampled_from([1, 3, 256])), draw(st.sampled_from([None, 64, 256])))
    machine = linear_machine(
        limit.block_bytes, prefill=(0.001, draw(st.sampled_from([1e-3, 2e-4])), 0.0),
        decode=draw(st.sampled_from(DECODES)), swap_s_per_block=draw(st.sampled_from([1e-4, 3e-3, 0.05])),
    )  # fmt: skip
    return Workload(found, replace(limit, enable_prefix_caching=True), machine)


TEXTS = ["cacheblend:recompute-share=0.4", "promptcache", "vllm-v1:memory=documents,async-scheduling=true"]


@pytest.mark.parametrize("text", [*TEXTS, "sarathi:memory=documents"])
def test_passages_keep_to_what_every_system_must(text):
    policy = parse_policy(text, {})[1]
    conformance.check(policy, examples=25, among=st.composite(draw_passages)(policy))


def test_retrieved_passages_are_answered_sooner_than_prefixes_alone_allow():
    """What it is for: the corpus fits the host, and no two prompts begin alike for long."""
    passages = {"documents": 4, "document_len": 160, "corpus": 20}
    asked = list(generate("documents", num_prompts=120, output_len=8, **passages))
    limit = limits(gpu=2000, host=5000, max_model_len=2048)
    machine = linear_machine(layers=32, prefill=(0.0, 4e-4, 0.0))
    ttft = {}
    for text in ("promptcache", "cacheblend", "cachedattention", "vllm-recompute"):
        policy = parse_policy(text, {})[1]
        kept = replace(limit, enable_prefix_caching=policy.default_prefix_caching)
        ttft[text] = simulate(policy, asked, kept, machine=machine, checked=False).log.latencies()["mean_ttft_ms"]
    assert ttft["promptcache"] < ttft["cacheblend"] < 0.6 * ttft["cachedattention"]
    assert ttft["cachedattention"] < ttft["vllm-recompute"]
