"""Mooncake: the store, the conductor's choice by hand-worked numbers, and whole runs."""

from math import inf

import pytest
from clock_small import GAPS_S, jumped_and_stepped
from clusters import simulate_pools
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.testing import limits, linear_machine
from sim.engine.sequence import Status
from sim.options.policies import parse_policy
from sim.systems.mooncake.preset import Mooncake
from sim.systems.mooncake.stored import StoredMemory
from sim.topology.conductor import Conductor, Estimates, Rules
from sim.topology.routers import REJECT
from sim.topology.store import GlobalStore
from traces.request import Request

# -- the store -------------------------------------------------------------------------------------------------------


def test_a_store_knows_how_much_of_a_prefix_each_node_has():
    store = GlobalStore(2, 64)
    store.add(0, store.path((1, 2, 3)), 16)
    store.add(1, store.path((1, 9)), 16)
    assert store.lengths(store.path((1, 2, 4)), 0.0) == [2, 1]
    # An id means its prefix.
    assert store.lengths(store.path((2, 3)), 0.0) == [0, 0]
    assert store.lengths(store.path((3,)), 0.0) == [0, 0]
    store.add_at(5.0, 1, store.path((1, 2, 3)), 16)
    assert store.lengths(store.path((1, 2, 3)), 4.9) == [3, 1]
    assert store.lengths(store.path((1, 2, 3)), 5.0) == [3, 3]


def test_tails_give_way_before_heads_and_the_longest_unused_first():
    store = GlobalStore(1, 64)
    first, other = store.path((1, 2, 3)), store.path((7, 8))
    store.add(0, first, 16)
    store.add(0, other, 16)
    assert (store.lengths(first, 0.0), store.num_evicted) == ([2], 1)
    store.add(0, first[:1], 16)
    store.add(0, store.path((5, 6)), 16)
    # 1 was used again: 2 and 8 are gone.
    assert (store.lengths(first, 0.0), store.lengths(other, 0.0), store.num_evicted) == ([1], [1], 3)
    # What is longer than a node's memory is kept from its beginning.
    store.add(0, store.path(tuple(range(20, 30))), 16)
    assert store.lengths(store.path(tuple(range(20, 30))), 0.0) == [4]


# -- the conductor ---------------------------------------------------------------------------------------------------


class View:
    def __init__(self, num_waiting: int = 0, running_until_s: float = 0.0, in_flight: int = 0, tokens: int = 0) -> None:
        self.num_waiting, self.running_until_s = num_waiting, running_until_s
        self.num_in_flight, self.tokens_in_flight, self.waiting_tokens = in_flight, tokens, 0


def conductor(store: GlobalStore, decoders: list[View], **rules):
    """A prompt takes 1 ms a token that is computed, a decode 1 ms a sequence, a transfer 0.1 ms a token.

    What decodes has room for 1,000 tokens.
    """
    usual = {"threshold": 1.0, "rejection": "none", "ttft_slo_s": 1.0, "tbt_slo_s": 0.01, "decode_s": 2.0}
    told: dict[str, list[tuple]] = {"moved": [], "granted": []}

    def transfer(source: int, target: int, tokens: int, now_s: float) -> float:
        told["moved"].append((source, target, tokens))
        return now_s + 1e-4 * tokens

    estimates = Estimates(
        prefill_s=lambda request, loaded: 1e-3 * (request.prompt_tokens - loaded),
        decode_s=lambda num, tokens: 1e-3 * num if tokens <= 1000 else inf,
        transfer_s=lambda source, target, tokens, now_s: 1e-4 * tokens,
    )
    grant = lambda place, request, tokens: told["granted"].append((place, request.request_id, tokens))  # noqa: E731
    built = Conductor(
        store, Rules(**{**usual, **rules}, block_size=16), estimates, decoders, transfer=transfer, grant=grant
    )
    return built, told


def prompt(number: int, *ids: int, at_s: float = 0.0) -> Request:
    return Request(number, at_s, 16 * len(ids), 5, "", ids, 16)


def test_the_first_token_is_expected_soonest_where_queue_transfer_and_prefill_are_shortest():
    store = GlobalStore(2, 1 << 20)
    found, told = conductor(store, [View()])
    store.add(0, store.path((1, 2, 3, 4)), 16)
    # 80 tokens of which node 0 has 64: 16 ms there after what waits, and as many elsewhere after 6.4 ms of transfer.
    assert found.route(prompt(0, 1, 2, 3, 4, 5), [View(), View()]) == 0
    assert (found.ready_s, told["moved"], told["granted"]) == (0.0, [], [(0, 0, 64)])
    # Request 0 waits (16 ms) at node 0: 6.4 + 16 ms at node 1 are less than 16 + 16.
    assert found.route(prompt(1, 1, 2, 3, 4, 6), [View(num_waiting=1), View()]) == 1
    assert (found.ready_s, told["moved"]) == (pytest.approx(0.0064), [(0, 1, 64)])
    # The prefix stays there, once it has come.
    moved = store.path((1, 2, 3, 4))
    assert [store.lengths(moved, at_s) for at_s in (0.0, found.ready_s)] == [[4, 0], [4, 4]]
    # It has begun and takes 10 ms more: 10 + 16 against a queue of 16 + 16, no transfer by now.
    views = [View(running_until_s=0.04), View(num_waiting=1)]
    assert found.route(prompt(2, 1, 2, 3, 4, 7, at_s=0.03), views) == 0
    assert found.ready_s == 0.03 and told["granted"][-1] == (0, 2, 64)
    # The last token is computed in any case, and engines load whole blocks.
    store.add(1, store.path((1, 2)), 16)
    assert found.route(prompt(3, 1, 2, at_s=0.03), [View(num_waiting=9), View()]) == 1
    assert told["granted"][-1] == (1, 3, 16)
    assert found.route(Request(4, 0.03, 17, 5, "", (1, 2), 16), [View(num_waiting=9), View()]) == 1
    assert told["granted"][-1] == (1, 4, 16)


def test_what_has_a_prefix_needs_no_transfer_and_what_has_not_waits_for_one():
    store = GlobalStore(2, 1 << 20)
    store.add(1, store.path((1, 2, 3, 4)), 16)
    found, told = conductor(store, [View()])
    # 6.4 ms of transfer and 16 ms at node 0; at node 1 the iteration under way ends 5 ms from now: 21 ms.
    assert found.route(prompt(0, 1, 2, 3, 4, 5), [View(), View(running_until_s=0.005)]) == 1
    assert told["moved"] == []


def test_what_is_used_again_stays_longest():
    """Of a node with room for four blocks: the first prefix is found again, so that a third displaces the second."""
    store = GlobalStore(1, 64)
    found, _ = conductor(store, [View()])
    for ids in ((1, 2), (3, 4)):
        store.add(0, store.path(ids), 16)
    assert found.route(prompt(0, 1, 2, 9), [View()]) == 0
    store.add(0, store.path((5, 6)), 16)
    assert [store.lengths(store.path(ids), 0.0) for ids in ((1, 2), (3, 4), (5, 6))] == [[2], [0], [2]]


def test_a_prefix_is_moved_if_another_node_has_more_than_so_many_times_as_much():
    store = GlobalStore(2, 1 << 20)
    store.add(0, store.path((1, 2, 3, 4)), 16)
    store.add(1, store.path((1, 2)), 16)
    for threshold, moved in ((1.9, [(0, 1, 64)]), (2.0, [])):
        found, told = conductor(store, [View()], threshold=threshold)
        assert found.route(prompt(0, 1, 2, 3, 4, 5), [View(running_until_s=9.0), View()]) == 1
        assert told["moved"] == moved
        assert told["granted"] == [(1, 0, 64 if moved else 32)]
    # Node 0 keeps what it has itself, whatever comes after it was looked at.
    found, told = conductor(store, [View()], threshold=2.0)
    assert found.route(prompt(0, 1, 2, 3, 4, 5), [View(), View(running_until_s=9.0)]) == 0
    assert (told["moved"], told["granted"]) == ([], [(0, 0, 64)])


def test_what_would_break_an_slo_is_turned_away():
    late, _ = conductor(GlobalStore(1, 1 << 20), [View()], rejection="early")
    assert late.route(prompt(0, *range(62)), [View()]) == 0
    assert late.route(prompt(1, *range(63)), [View()]) == REJECT
    assert "first token" in late.reason
    # Every decode engine has ten sequences, and the eleventh takes 11 ms.
    for loads, chosen in (((10, 10), REJECT), ((10, 9), 0)):
        busy, _ = conductor(GlobalStore(1, 1 << 20), [View(in_flight=num) for num in loads], rejection="early")
        assert busy.route(prompt(0, 1), [View()]) == chosen
        assert busy.reason == ("rejected: tokens would come too slowly" if chosen == REJECT else busy.reason)
    # A first token that comes as late as it may is in time, and a context that fills the room is none too many.
    just, _ = conductor(GlobalStore(1, 1 << 20), [View(tokens=8)], rejection="early", ttft_slo_s=1e-3 * 992)
    assert just.route(prompt(0, *range(62)), [View()]) == 0
    full, _ = conductor(GlobalStore(1, 1 << 20), [View(tokens=9)], rejection="early")
    assert full.route(prompt(0, *range(62)), [View()]) == REJECT


def test_the_load_that_counts_is_that_of_the_time_when_the_prefill_ends():
    # What decodes now does not matter; ten that begin within two seconds do, until they have ended.
    found, _ = conductor(GlobalStore(1, 1 << 20), [View(in_flight=50)], rejection="predicted")
    routes = [found.route(prompt(i, 1, at_s=0.1 * i), [View()]) for i in range(12)]
    assert routes == [0] * 10 + [REJECT] * 2
    assert found.route(prompt(12, 1, at_s=2.05), [View()]) == 0
    # Those that had ended by then are forgotten: none of before 0.034 s is left.
    assert len(found._decodes) == 10


def prompts_of(tokens: int, *arrivals_s: float) -> list[Request]:
    return [Request(0, at_s, tokens, 5, "", (), 16) for at_s in arrivals_s]


def predicted(decoders: int) -> Conductor:
    found, _ = conductor(GlobalStore(1, 1 << 20), [View()] * decoders, rejection="predicted", ttft_slo_s=9.0)
    return found


def test_a_request_decodes_from_the_end_of_its_prefill_for_as_long_as_all_do():
    """Ten prompts of 100 tokens at 0 s decode from 0.1 s to 2.1 s."""
    late, long = 2.0 + 1e-3 * 100, 2.1 - 1e-3 * 700
    for tokens, at_s, chosen in (
        (100, 0.0, REJECT), (16, 0.05, 0), (16, 0.09, REJECT), (100, 2.0 - 1e-9, REJECT), (100, 2.0, 0),
        (16, late - 0.02, REJECT), (16, late, 0), (700, long + 1e-9, 0), (600, long, REJECT),
    ):  # fmt: skip
        found = predicted(1)
        for request in prompts_of(100, *[0.0] * 10):
            assert found.route(request, [View()]) == 0
        assert found.route(*prompts_of(tokens, at_s), [View()]) == chosen, (tokens, at_s)


def test_decode_engines_share_the_predicted_load_evenly():
    # Nineteen of two engines are nine each, and the tenth takes 10 ms.
    found = predicted(2)
    routes = [found.route(request, [View()]) for request in prompts_of(16, *[0.0] * 21)]
    assert routes == [0] * 20 + [REJECT]
    # 333 and 800 tokens are 566 each, with room for 434 more.
    for tokens, chosen in ((434, 0), (435, REJECT)):
        found = predicted(2)
        for before in (333, 800):
            assert found.route(*prompts_of(before, 0.0), [View()]) == 0
        assert found.route(*prompts_of(tokens, 0.5), [View()]) == chosen


# -- whole runs ------------------------------------------------------------------------------------------------------

FLAT = {"prefill": (0.1, 0.01, 0.0), "decode": (0.1, 0.0, 0.0)}


@pytest.mark.parametrize("jump", [True, False])
def test_a_prompt_is_computed_from_where_the_store_ends(jump):
    # 0: 48 tokens, 0.58 s. 1 has 32 of them in common: 0.26 s, and its 2 blocks come in beside that. The third goes to
    # the other engine, which is idle, after its two blocks have been copied there (0.02 s at 100 bytes/s).
    shared = [
        Request(0, 0.0, 48, 2, "", (1, 2, 3), 16),
        Request(1, 1.0, 48, 2, "", (1, 2, 4), 16),
        Request(2, 1.0, 48, 2, "", (1, 2, 5), 16),
    ]
    outcome = simulate_pools(
        Mooncake(), shared, limits(), prefill=2, bytes_per_s=100.0, machine=linear_machine(**FLAT), jump=jump
    )
    seqs = outcome.by_id()
    assert seqs[0].first_token_s == pytest.approx(0.58)
    assert [seqs[i].num_cached_tokens for i in range(3)] == [0, 32, 32]
    assert seqs[1].first_token_s == pytest.approx(1.26, abs=2e-3)
    assert seqs[2].first_token_s == pytest.approx(1.28, abs=2e-3)
    assert outcome.members[0].lanes.h2d.busy_s == pytest.approx(2 * 3e-4)
    (interval, *_) = outcome.members[1].lanes.links["link in"].intervals or ()
    assert interval == (1.0, pytest.approx(1.02), "prefix")


def test_layers_wait_for_what_a_slow_host_link_brings():
    # 2 blocks at 1 s each: 2 s for four layers, of which the last one's 0.05 s of computing come after.
    rows = [Request(0, 0.0, 48, 2, "", (1, 2, 3), 16), Request(1, 1.0, 48, 2, "", (1, 2, 4), 16)]
    machine = linear_machine(prefill=(0.2, 0.0, 0.0), decode=(0.1, 0.0, 0.0), swap_s_per_block=1.0)
    seqs = simulate_pools(Mooncake(), rows, limits(), machine=machine).by_id()
    assert seqs[1].first_token_s == pytest.approx(1.0 + 2.0 + 0.05)


ROWS = st.lists(st.tuples(GAPS_S, st.integers(1, 150), st.integers(1, 40), st.integers(0, 3)), min_size=1, max_size=25)


@pytest.mark.parametrize(
    "policy",
    [
        "mooncake",
        "mooncake:balancing-threshold=3,layer-wise=false",
        "mooncake:rejection=early,ttft-slo-ms=200,tbt-slo-ms=25",
        "mooncake:rejection=predicted,ttft-slo-ms=100,tbt-slo-ms=25,predicted-decode-s=0.5",
        "sarathi:stage=hand-over,memory=stored",
    ],
)
@settings(max_examples=20, deadline=None)
@given(
    rows=ROWS,
    pools=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    blocks=st.tuples(st.integers(10, 24), st.integers(6, 24)),
    host=st.sampled_from([0, 5, 40]),
    speed=st.sampled_from([10.0, 300.0, 1e9]),
    most=st.sampled_from([None, 3]),
)
def test_jumping_changes_nothing_and_no_request_is_lost(policy, rows, pools, blocks, host, speed, most):
    at_s, arrivals = 0.0, []
    for number, (gap_s, tokens, output, kind) in enumerate(rows):
        at_s += gap_s
        ids = tuple((100 * kind if i < 4 else 1000 * (number + 1)) + i for i in range(-(-tokens // 16)))
        arrivals.append(Request(number, at_s, tokens, output, "", ids, 16))
    policy_ = parse_policy(policy, {})[1]
    chunked = policy.startswith("sarathi")
    limit, decode_limit = (limits(count, host, max_model_len=256, chunked=chunked, tokens=512) for count in blocks)
    outcomes = jumped_and_stepped(
        lambda source, jump: simulate_pools(
            policy_, source, limit, prefill=pools[0], decode=pools[1], decode_limit=decode_limit, bytes_per_s=speed,
            jump=jump,
        ),
        arrivals,
        most,
    )  # fmt: skip
    for outcome in outcomes:
        for member in outcome.members:
            memory = member.engine.scheduler.memory
            assert isinstance(memory, StoredMemory)
            assert not memory.granted
            assert member.tokens_in_flight == 0
    for seq, _ in outcomes[0].ended:
        if "rejected" in seq.error:
            assert seq.status is Status.IGNORED
            assert "rejection" in policy
