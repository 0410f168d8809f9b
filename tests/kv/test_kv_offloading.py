"""vLLM's OffloadingConnector in small: times worked by hand, what gives way on the host, fences, and prices."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvtwin
from kvtwin.testing import limits, linear_machine, simulate
from kvtwin.testing.engines import Outcome, roofline_machine
from sim.engine.plan import IterationPlan, Origin, PrefillChunk
from sim.engine.sequence import Sequence
from sim.kv.index.block_chain import BlockChain, NamedChain
from sim.kv.tiers import host_cache
from sim.kv.tiers.host_cache import HostCache
from sim.kv.tiers.replacement import Access
from sim.kv.tiers.storage import Storage
from sim.kv.tiers.worth import Worth
from sim.options.policies import parse_policy
from sim.options.scenario import Scenario
from sim.run.prepare import prepare
from sim.run.simulate import build_run, execute_all
from sim.specs.models import load_model
from sim.systems.vllm_v1 import VllmV1
from traces.request import Request

MACHINE = linear_machine(prefill=(0.0, 1e-3, 0.0), decode=(1e-3, 0.0, 0.0))
"""A millisecond a prompt token, or a step of decodes."""


def named(request_id: int, arrival_s: float, ids: tuple[int, ...], output: int = 1) -> Request:
    return Request(request_id, arrival_s, 16 * len(ids), output, "", ids, 16)


def run(*arrivals: Request, gpu: int = 6, caching: bool = True, jump: bool = True, **options: object) -> Outcome:
    limit = replace(limits(gpu=gpu, max_model_len=97, tokens=200), enable_prefix_caching=caching)
    options = {"cpu_chunks": 100, "load_s_per_block": 0.005, "store_s_per_block": 0.01, **options}
    return simulate(VllmV1(**options), arrivals, limit, machine=MACHINE, jump=jump)


def first_tokens(outcome: Outcome) -> list[float]:
    seqs = outcome.by_id()
    return [seqs[key].first_token_s for key in sorted(seqs)]


# -- times -----------------------------------------------------------------------------------------------------------

A, B, C = named(0, 0.0, (1, 2, 3, 4)), named(1, 1.0, (5, 6, 7, 8, 9, 10)), named(2, 2.0, (1, 2, 3, 4))


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("jump", [True, False])
def test_what_left_the_gpu_is_loaded_from_the_host(caching, jump, ahead):
    """A takes 64 ms, B takes all six blocks for 96 ms; C finds A's four blocks on the host: 20 ms, and one token."""
    outcome = run(A, B, C, caching=caching, jump=jump, async_scheduling=ahead)
    assert first_tokens(outcome) == pytest.approx([0.064, 1.096, 2.021], abs=1e-12)
    tier = outcome.scheduler.counters.tiers["host"]
    assert (tier.hit_tokens, tier.num_loads, tier.stored_blocks, tier.evicted_blocks) == (63, 1, 4 + 6, 0)
    assert (tier.saved_s, tier.lost_s) == (pytest.approx(0.063 - 0.020), 0.0)
    assert outcome.by_id()[2].num_cached_tokens == 63


@pytest.mark.parametrize(
    ("rest", "seqs", "output", "chunks"),
    [
        (32, 256, 1, [[(4, 32)], [(2, 32)], [(3, 32)]]),
        (31, 256, 1, [[(4, 32)], [(2, 31), (3, 1)], [(3, 30)]]),
        (8, 1, 4, [[(4, 32)], [(2, 8)], [], [], [], [(3, 8)]]),
    ],
    ids=["none left of the budget", "one token left", "one seat"],
)
def test_loaded_prompts_start_as_far_as_budget_and_seats_go(rest, seqs, output, chunks):
    """While 4 computes 32 tokens, 64 of prompts 2 and 3 are loaded; `rest` are left of each. A step has 32."""
    loads = [
        named(number, 2.0, (*held, *range(10 * number, 10 * number + 4)), answer)._replace(prompt_tokens=64 + rest)
        for number, held, answer in ((2, A.hash_ids, output), (3, (5, 6, 7, 8), 1))
    ]
    arrivals = A, named(1, 0.5, (5, 6, 7, 8)), *loads, Request(4, 2.019, 32, 1)
    policy = VllmV1(cpu_chunks=100, load_s_per_block=0.005, store_s_per_block=0.01, async_scheduling=False)
    limit = limits(gpu=40, max_model_len=128, tokens=32, seqs=seqs, chunked=True)
    outcome = simulate(policy, arrivals, replace(limit, enable_prefix_caching=False), machine=MACHINE, jump=False)
    steps = [plan for plan, start_s, _ in outcome.plans if start_s > 2.0 and (plan.chunks or plan.num_decodes)]
    assert [[(chunk.seq.request.request_id, chunk.num_new) for chunk in plan.chunks] for plan in steps] == chunks


def test_vllm_loads_at_any_price_and_the_run_says_what_that_cost():
    """C waits 200 ms for what would be computed in 63."""
    outcome = run(A, B, C, load_s_per_block=0.05)
    assert first_tokens(outcome)[2] == pytest.approx(2.201, abs=1e-12)
    tier = outcome.scheduler.counters.tiers["host"]
    assert (tier.saved_s, tier.lost_s) == (0.0, pytest.approx(0.200 - 0.063))


def test_what_takes_blocks_whose_store_is_under_way_waits_for_it():
    """A's store begins at 64 ms and ends at 104; B comes at 70 ms and needs its blocks."""
    outcome = run(A, B._replace(arrival_s=0.07))
    assert first_tokens(outcome)[1] == pytest.approx(0.104 + 0.096, abs=1e-12)
    # Two blocks are enough for it: those that A has not used.
    outcome = run(A, named(1, 0.07, (5, 6)))
    assert first_tokens(outcome)[1] == pytest.approx(0.070 + 0.032, abs=1e-12)


@pytest.mark.parametrize("jump", [True, False])
@pytest.mark.parametrize(("ahead", "first_s"), [(False, 1.034), (True, 1.037)])
def test_scheduled_ahead_a_load_begins_and_is_seen_later(ahead, first_s, jump):
    """The GPU has lost A's blocks; D decodes from 1016 ms on, a millisecond a step; C comes during that from 1020.

    Serial: the step from 1021 to 1022 sees C, whose 10 ms begin when it ends. That from 1032 hears of their end and
    C computes its last token in that from 1033. Ahead: all is decided a step before it begins, so C's load begins with
    1023; the step decided at 1033 is over at 1035, and C computes in what is decided then, from 1036 on.
    """
    d, c = named(3, 1.0, (30,), output=40), C._replace(request_id=4, arrival_s=1.0205)
    fillers = named(1, 0.3, (5, 6, 7, 8, 9, 10)), named(2, 0.6, (11, 12, 13, 14))
    outcome = run(A, *fillers, d, c, gpu=8, load_s_per_block=0.0025, async_scheduling=ahead, jump=jump)
    assert outcome.scheduler.counters.tiers["host"].num_loads == 1
    assert outcome.by_id()[3].first_token_s == pytest.approx(1.016, abs=1e-12)
    assert outcome.by_id()[4].first_token_s == pytest.approx(first_s, abs=1e-12)


def test_what_finds_its_prefix_being_stored_waits_for_that():
    """C comes at 80 ms, when the GPU has lost A's blocks to B but for two, and the host is being given them."""
    late = C._replace(arrival_s=0.08)
    outcome = run(A, named(1, 0.07, (5, 6, 7, 8)), late, store_s_per_block=0.1)
    # B takes A's last two blocks and waits for A's store until 464 ms; C may be looked up when it is seen, at 528.
    assert first_tokens(outcome)[1] == pytest.approx(0.464 + 0.064, abs=1e-12)
    assert outcome.by_id()[2].num_cached_tokens == 63
    assert outcome.scheduler.counters.tiers["host"].num_loads == 1


def test_a_decode_takes_no_block_that_its_load_has_brought():
    """Blocks of one token. 0's 22 are on the host; 1 and 2 say the same and load seven each, 2 when 1 has computed two.

    At 17 and 15 tokens the 32 blocks are full. 2 goes, with 16 tokens known, and loads all; it computes the last.
    """
    ids = tuple(range(23))
    talks = [Request(i, now_s, 7, 16, "", ids[:7], 1, ids[7:]) for i, now_s in enumerate((0.0, 1.0, 1.0))]
    policy = VllmV1(cpu_chunks=100, load_s_per_block=1e-4, store_s_per_block=0.0, offload_outputs=True,
                    async_scheduling=False)  # fmt: skip
    limit = limits(gpu=32, max_model_len=24, tokens=64, block_size=1)
    outcome = simulate(policy, talks, limit, machine=MACHINE)
    assert outcome.scheduler.counters.preemptions == 1
    tier = outcome.scheduler.counters.tiers["host"]
    assert (tier.stored_blocks, tier.num_loads, tier.hit_tokens) == (22, 3, 6 + 6 + 15)


# -- files behind the host -------------------------------------------------------------------------------------------


def disk_hits(*, shared: bool) -> list[int]:
    """Tokens that each of two replicas brings from files: the second is sent what the first has computed before."""
    requests = [named(0, 0.0, tuple(range(8))), named(1, 1.0, (90, 91)), named(2, 2.0, (92, 93))]
    requests.append(named(3, 3.0, tuple(range(8))))
    policy = f"vllm-v1:cpu-chunks=8,storage-space=inf,storage-shared={str(shared).lower()}"
    scenario = Scenario(
        workload="fixed", model="llama-3.1-8b", gpu="h100", replicas=2, router="round-robin",
        num_gpu_blocks_override=20, max_model_len=200,
    )  # fmt: skip
    setup = prepare(scenario, policy, parse_policy(policy, {})[1])
    ended = execute_all(build_run(setup, requests))
    return [parts.scheduler.counters.tiers["disk"].hit_tokens for parts in ended.engines]


def test_replicas_that_share_files_hit_what_another_has_written():
    assert disk_hits(shared=True) == [0, 8 * 16]
    assert disk_hits(shared=False) == [0, 0]


def test_where_there_is_no_room_the_longest_unused_file_gives_way():
    storage = Storage(2, BlockChain(1))
    assert storage.write([1, 2]) == 0
    storage.read([1])
    assert storage.write([3]) == 1
    assert [key in storage for key in (1, 2, 3)] == [True, False, True]


# -- what has it -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 4])
def test_a_size_in_gib_is_that_of_all_gpus_together(tp):
    """16 tokens of Llama 3.1 8B are 32 layers x 2 x 8 heads x 128 x 2 bytes x 16 = 2 MiB, on however many GPUs."""
    scenario = kvtwin.Scenario(workload="fixed", num_prompts=1, model="llama-3.1-8b", gpu="h100", tp=tp)
    (host,) = kvtwin.simulate(scenario, "vllm-v1:kv-offloading-size=10").result.tiers
    assert host.num_blocks == 5120


# -- the host's cache ------------------------------------------------------------------------------------------------


def stored(cache: HostCache, keys: tuple[int, ...], *, ends: bool = True) -> Access:
    access = Access(keys)
    taken = cache.offer(access, range(len(keys)))
    assert taken is not None
    cache.written(keys[place] for place in taken)
    if ends:
        cache.finish(access)
    return access


def test_of_many_offers_the_last_are_counted(monkeypatch):
    """Three keys' offers are counted: the longest not offered is forgotten, none of those just offered."""
    monkeypatch.setattr(host_cache, "MOST_OFFERED", 3)
    cache = HostCache(9, store_threshold=2)
    assert [cache.offer(Access(keys), range(len(keys))) for keys in ((1, 2, 3), (3, 4))] == [[], [0]]
    # 1 has made room for 4; 5, 6 and 7 for all that were counted; 8 found no more room.
    assert sorted(cache.keys()) == [2, 3, 3, 4]
    assert cache.offer(Access((5, 6, 7, 8)), range(4)) == []
    assert sorted(cache.keys()) == [3, 5, 6, 7]
    assert cache.offer(Access((8, 7)), range(2)) == [1]
    assert cache.offer(Access((8, 2)), range(2)) == [0]


def test_arc_keeps_what_is_used_again_from_one_long_scan():
    """Keys 1 and 2 are read once more; a scan of ten new chunks takes them from an LRU of four, and not from ARC."""
    for policy, kept in (("lru", False), ("arc", True)):
        cache = HostCache(4, policy)
        stored(cache, (1, 2))
        again = Access((1, 2))
        cache.read(again, range(2))
        cache.done_reading((1, 2))
        cache.finish(again)
        for key in range(10, 20):
            stored(cache, (key,))
        assert all(cache.get(key) for key in (1, 2)) is kept


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=5, unique=True), max_size=30), st.sampled_from([1, 4])
)
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_chunks_are_neither_lost_nor_made(policy, offers, num_chunks):
    cache = HostCache(num_chunks, policy)
    for keys in offers:
        access = Access(tuple(keys))
        if (taken := cache.offer(access, range(len(keys)))) is not None:
            cache.written(keys[place] for place in taken)
        cache.finish(access)
        assert cache.num_free + cache.num_idle == num_chunks
        assert sum(cache.get(key) is not None for key in range(1, 13)) == cache.num_idle


# -- keys and fences -------------------------------------------------------------------------------------------------


def test_keys_name_a_block_and_all_before_it():
    chain = BlockChain(16)
    keys = [
        chain.of(Sequence(named(i, 0.0, ids, output=40))) for i, ids in enumerate([(1, 2, 3), (1, 2, 4), (4, 2, 3)])
    ]
    assert keys[0][:2] == keys[1][:2]
    assert len({key for row in keys for key in row}) == sum(map(len, keys)) - 2
    assert [len(row) for row in keys] == [5, 5, 5]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(0, 3)), max_size=30))
def test_a_chain_forgets_what_nothing_uses_and_no_more(prompts):
    """A prefix in use keeps its keys, and so do those before it; no key ever stands for two prefixes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sim.kv.index.block_chain.FEWEST_LINKS", 0)
        check_forgetting(prompts)


def check_forgetting(prompts: list[tuple[list[int], int]]) -> None:
    chain, meaning, kept = NamedChain(16), dict[int, tuple[int, ...]](), dict[tuple[int, ...], int]()
    for ids, num_used in prompts:
        for end, key in enumerate(chain.of(named(0, 0.0, tuple(ids))), 1):
            prefix = tuple(ids[:end])
            assert meaning.setdefault(key, prefix) == prefix
            assert kept.setdefault(prefix, key) == key
        used = list(kept)[-num_used:] if num_used else []
        in_use = [kept[prefix] for prefix in used]
        chain.forget(lambda in_use=in_use: in_use)
        if len(chain) < len(kept):
            kept = {prefix[:end]: kept[prefix[:end]] for prefix in used for end in range(1, len(prefix) + 1)}
        assert len(chain) == len(kept)


# -- prices ----------------------------------------------------------------------------------------------------------


def test_what_is_computed_again_is_priced_as_the_plans_that_compute_it():
    """A roofline counts tokens, pairs, squares and the last prompt's logits: of two spans, and chunk by chunk."""
    machine = roofline_machine("l20", 16 * 131072.0, model=load_model("llama-3.1-8b"))
    worth = Worth(machine.cost, limits(tokens=4000), machine.model.num_layers, load_s_per_block=0.001)
    plan = IterationPlan()
    # From 0 to 3,200 and from 6,400 to 10,000.
    plan.prefill_tokens, plan.prefill_squares = 3200 + 3600, 3200**2 + 3600**2
    plan.prefill_pairs = 3200 * 3201 // 2 + sum(range(6401, 10_001))
    plan.num_sampled_prefills = 1
    seq = Sequence(Request(0, 0.0, 10_000, 1))
    plan.chunks = tuple(
        PrefillChunk(seq, end - begin, begin, Origin.ADMITTED) for begin, end in ((0, 3200), (6400, 10_000))
    )
    spans = (0, 3200), (6400, 10_000)
    assert worth.spans_s(spans) == machine.cost.iteration_s(plan)
    # 32 layers: the first one's copy, and then whichever takes longer.
    assert worth.spans_s(spans, 9000) == pytest.approx(9.0 + machine.cost.iteration_s(plan) / 32)
    assert worth.spans_s(spans, 10) == pytest.approx(0.010 / 32 + machine.cost.iteration_s(plan))

    chunks = []
    for begin, end in ((1000, 5000), (5000, 9000), (9000, 10_000)):
        seq.num_computed = begin
        plan = IterationPlan()
        plan.add_chunk(seq, end - begin, Origin.CONTINUED)
        assert plan.num_sampled_prefills == (end == 10_000)
        chunks.append(machine.cost.iteration_s(plan))
    assert worth.computed_s(seq, 1000) == pytest.approx(sum(chunks), rel=1e-12)
    streamed_s = 0.002 / 32 + chunks[0]
    assert worth.streamed_s(seq, 1000, 2) == pytest.approx(streamed_s + chunks[1] + chunks[2], rel=1e-12)
    # Of what is computed wholly the last token is computed again.
    assert worth.computed_s(seq, 10_000) > 0.0


def test_what_a_prefix_is_worth_is_what_the_clock_would_have_spent():
    """100 tokens in chunks of 40: 40, 40 and 20; from 64 on 36. 3 chunks of 10 ms, 1 ms a token, 10 us a square."""
    machine = linear_machine(prefill=(0.01, 1e-3, 1e-5), swap_s_per_block=3e-4)
    worth = Worth(machine.cost, limits(tokens=40), machine.model.num_layers)
    seq = Sequence(Request(0, 0.0, 100, 1))
    whole_s = 3 * 0.01 + 0.1 + 1e-5 * (40**2 + 40**2 + 20**2)
    rest_s = 0.01 + 0.036 + 1e-5 * 36**2
    assert worth.recompute_s(seq, 0, 64) == pytest.approx(whole_s - rest_s)
    assert worth.load_s(4) == pytest.approx(4 * 3e-4)


def served(model, gpu, **options):
    scenario = kvtwin.Scenario(
        workload="sessions", num_prompts=150, request_rate=6.0, model=model, gpu=gpu, num_gpu_blocks_override=1500,
        max_model_len=4096, profile=f"{gpu}-imported:pcie_bytes_per_s=25e9", **options,
    )  # fmt: skip
    return kvtwin.simulate(scenario, "vllm-v1:kv-offloading-size=60").result


@pytest.mark.parametrize(("model", "gpu"), [("llama-3.1-8b", "a100-80g"), ("llama-3.1-8b", "h100")])
def test_no_hit_on_the_host_is_slower_than_recomputing(model, gpu):
    (host,) = served(model, gpu).tiers
    assert host.hit_tokens > 1000
    assert host.lost_s == 0.0 < host.saved_s


def test_where_it_does_not_pay_that_is_said():
    """A tiny model on a fast GPU computes its 114 kB a token sooner than the link brings them, if graphs launch it."""
    (host,) = served("qwen3-0.6b", "h100", max_cudagraph_capture_size=8192).tiers
    assert host.hit_tokens > 1000
    assert host.saved_s < host.lost_s
