"""Shared blocks by id: plans alone must say which ids hold what, whatever is shared, evicted and preempted."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_variants import TREES, policy_of

from gpu_runtime.kv.block_ids import BlockIds
from gpu_runtime.kv.replay.placement import Placement
from kvtwin.testing.conformance import limits_of
from kvtwin.testing.engines import limits, simulate
from sim.engine.changes import Evict, Hit, Keep, Place
from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence
from sim.errors import InvariantError
from sim.kv.index.block_keys import BlockKeys
from traces.request import Request

PRIORITY = "vllm-v1:scheduling-policy=priority"
PRIORITY_TREE = f"{PRIORITY},memory=radix"
CACHING = ["vllm-v1", PRIORITY, "vllm-recompute", "sarathi", "fastgen"]


class Followed:
    """Carries plans out on ids, and writes down what each block holds.

    The content of a block is the keys from the prompt's beginning to it, or its sequence and place where it has none.
    """

    def __init__(self, scheduler):
        self.scheduler = scheduler
        limits, memory = scheduler.limits, scheduler.memory
        self.gpu = BlockIds(memory.gpu.num_blocks)
        self.placement = Placement(self.gpu, BlockIds(1), num_groups=1, block_tokens=limits.block_size)
        self.keys = BlockKeys(limits.block_size)
        self.holds, self.versions = {}, {}
        self.num_shared = self.num_in_flight = self.num_early = 0
        memory.tell_blocks()

    def content(self, seq, place):
        keys = self.keys.of(seq.request) if seq.request.hash_ids else ()
        return keys[: place + 1] if place < len(keys) else (seq.request.request_id, place)

    def observe(self, plan, start_s, times):
        placement, size = self.placement, self.placement.block_tokens
        hits = [change for change in plan.changes if isinstance(change, Hit)]
        self.num_shared += sum(hit.num_blocks for hit in hits)
        placement.replay(plan, lambda seq: None)
        spans = [(c.seq, c.num_cached, c.num_cached + c.num_new) for c in plan.chunks]
        lengths = [self.scheduler.batch.num_tokens_of(seq) for seq in plan.decodes]
        spans += [(seq, tokens - 1, tokens) for seq, tokens in zip(plan.decodes, lengths, strict=True)]
        placement.grow((seq, end) for seq, _, end in spans)
        for hit in hits:
            held = placement.held.get(hit.seq)
            ids = held.gpu[0][hit.first_block : hit.first_block + hit.num_blocks] if held is not None else []
            self.num_in_flight += len(placement.cached.unwritten.intersection(ids))
        planned, spans = spans, placement.prefixes.to_compute(spans)
        self.num_early += spans != planned
        # All of a layer's KV is written before its attention reads any.
        for seq, first, end in spans:
            for place in range(first // size, placement.blocks_for(end)):
                self.holds[placement.held[seq].gpu[0][place]] = self.content(seq, place)
        placement.prefixes.computed(spans)
        for seq, _, end in spans:
            ids = placement.held[seq].gpu[0][: placement.blocks_for(end)]
            assert [self.holds[i] for i in ids] == [self.content(seq, place) for place in range(len(ids))], seq
        self.check()
        self.check_versions()

    def check_versions(self):
        """A version says which blocks a sequence has: rows of a block table are kept by it."""
        for seq, held in self.placement.held.items():
            if self.versions.setdefault(seq, (held, {}))[0] is not held:
                self.versions[seq] = held, {}
            ids = list(held.gpu[0])
            assert self.versions[seq][1].setdefault(held.version, ids) == ids, seq

    def check(self):
        """Users counted list by list; what is held is what the scheduler counts."""
        placement = self.placement
        users = Counter(i for held in placement.held.values() for i in held.gpu[0])
        cached = Counter(i for ids in placement.cached.lists() for i in ids)
        assert max(cached.values(), default=1) == 1
        assert all(self.gpu.num_users(i) == (users + cached)[i] for i in range(self.gpu.num_blocks))
        pool = self.scheduler.gpu
        assert len(users) == pool.num_blocks - pool.free
        if tree := getattr(self.scheduler.memory, "tree", None):
            # What no sequence holds is what the tree says.
            assert placement.cached.num_blocks == tree.num_idle
        placement.check()
        self.gpu.check()


def alike(number, arrival_s, output, kind, common, own, answer_named):
    """A request whose prompt begins with `common` blocks of its kind; its answer has names as well, or has none."""
    prompt = 4 * common + own
    last = prompt + output if answer_named else prompt
    ids = tuple(kind * 100 + i if i < common else (number + 1) * 1000 + i for i in range(-(-last // 4)))
    first = -(-prompt // 4)
    return Request(number, arrival_s, prompt, output, "", ids[:first], 4, ids[first:], number * 7 % 3)


ALIKE = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.0, 0.0, 0.05, 0.3]), st.integers(1, 30), st.integers(1, 2), st.integers(0, 9),
        st.integers(1, 12), st.booleans(),
    ),
    min_size=4, max_size=20,
)  # fmt: skip


def arrivals_of(rows):
    """Requests that come after the gaps of the rows."""
    now_s, found = 0.0, []
    for number, (gap_s, *row) in enumerate(rows):
        now_s += gap_s
        found.append(alike(number, now_s, *row))
    return found


@pytest.mark.parametrize("variant", [*CACHING, *TREES, PRIORITY_TREE])
def test_every_block_holds_what_its_sequences_hit_there(variant, monkeypatch):
    policy, followed, borrowed, right = policy_of(variant), [], [], BlockIds.repay

    def repay(self):
        numbers = right(self)
        borrowed.extend(numbers)
        return numbers

    monkeypatch.setattr(BlockIds, "repay", repay)

    def observe(scheduler):
        followed.append(Followed(scheduler))
        return followed[-1].observe

    @settings(max_examples=40, deadline=None, derandomize=True, database=None)
    @given(rows=ALIKE, gpu=st.integers(18, 60), seqs=st.sampled_from([2, 4, 8]), chunked=st.booleans())
    def follow(rows, gpu, seqs, chunked):
        limit = limits_of(policy, limits(gpu, 0, block_size=4, max_model_len=72), seqs, 16 if chunked else None)
        limit = replace(limit, enable_prefix_caching=True)
        simulate(policy, arrivals_of(rows), limit, jump=False, observe=observe)

    follow()
    assert sum(one.scheduler.counters.prefix_hit_tokens for one in followed) > 300
    if variant not in CACHING:
        assert sum(one.scheduler.memory.tree.num_evicted for one in followed) > 30
        # Where chunks go with their last user, nothing is evicted late.
        assert bool(borrowed) == (variant != "chunkattention")
        return
    assert sum(one.num_shared for one in followed) > 300
    assert (sum(one.num_in_flight for one in followed) > 30) == variant.startswith("vllm-v1")
    assert sum(one.scheduler.memory.num_evicted for one in followed) > 300
    assert sum(one.scheduler.counters.prefix_rehit_tokens for one in followed) > 300
    # Only a victim of urgency may have been scheduled in the same step: its blocks are cached, and were never computed.
    assert variant == PRIORITY or not any(one.num_early for one in followed)


# -- facts one by one ------------------------------------------------------------------------------------------------


class Facts:
    """A placement whose sequences and runs go by names."""

    def __init__(self, blocks=8, host=1):
        self.gpu, self.host = BlockIds(blocks), BlockIds(host)
        self.placement = Placement(self.gpu, self.host, num_groups=1, block_tokens=4)
        self.seqs, self.settled = {}, []

    def seq(self, name):
        return self.seqs.setdefault(name, Sequence(Request(len(self.seqs), 0.0, 18, 5)))

    def replay(self, *changes):
        plan = IterationPlan()
        plan.changes = changes
        self.placement.replay(plan, self.settled.append)
        self.placement.check()

    def ids(self, name):
        return self.placement.held[self.seq(name)].gpu[0]


@pytest.fixture
def facts():
    found = Facts()
    a = found.seq("a")
    found.replay(Place(a, (0,), 3, 0))
    found.placement.prefixes.computed([(a, 0, 12)])
    return found


def test_what_is_hit_before_it_is_computed_is_computed_by_what_needs_it(facts):
    """`a` grows by two blocks in the same plan in which `b` hits them."""
    a, b = facts.seq("a"), facts.seq("b")
    facts.replay(Keep(a, 0, 5, "run"), Hit(b, 0, 5, "run"), Place(b, (0,), 6, 0))
    placement, both = facts.placement, [(a, 12, 20), (b, 20, 24)]
    placement.grow((seq, end) for seq, _, end in both)
    assert facts.ids("a") == facts.ids("b")[:5]
    # Together `a` writes them; alone `b` has to.
    assert placement.prefixes.to_compute(both) == both
    assert placement.prefixes.to_compute([(b, 20, 24)]) == [(b, 12, 24)]
    # One that failed has written nothing that it goes on from.
    placement.prefixes.computed([(a, 20, 21)])
    assert placement.prefixes.to_compute([(b, 20, 24)]) == [(b, 12, 24)]
    placement.prefixes.computed([(b, 12, 24)])
    assert placement.prefixes.to_compute([(b, 24, 25)]) == [(b, 24, 25)]
    assert not placement.cached.unwritten


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda a, b: [Hit(b, 0, 1, "run")], "is not there"),
        (lambda a, b: [Keep(a, 0, 2, "run"), Hit(b, 0, 1, "run")], "1 are hit"),
        (lambda a, b: [Evict("run", 0)], "is not there"),
    ],
)
def test_facts_that_cannot_be_are_refused(facts, changes, message):
    with pytest.raises(InvariantError, match=message):
        facts.replay(*changes(facts.seq("a"), facts.seq("b")))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.randoms(use_true_random=False)), max_size=40))
def test_shared_blocks_come_free_with_their_last_user(steps):
    ids, users = BlockIds(9), Counter()
    for kind, dice in steps:
        held = sorted(+users)
        some = dice.sample(held, min(2, len(held)))
        if kind == 0 and ids.num_free:
            users.update(ids.allocate(1))
        elif kind == 1:
            ids.share(some)
            users.update(some)
        elif kind == 2:
            ids.free(some)
            users.subtract(some)
        ids.check()
        assert ids.num_free == 9 - len(+users)
        assert all(ids.num_users(i) == users[i] for i in range(9))
    with pytest.raises(InvariantError, match="not allocated"):
        ids.share([9])
