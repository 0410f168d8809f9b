"""Splitwise's mixed pool: what turns mixed by hand-worked loads, and whole runs in which none waits for ever."""

from random import Random

import pytest
from clock_small import FLAT, ROWS, assert_whole, drawn, jumped_and_stepped
from clusters import simulate_pools
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.testing import limits, linear_machine, requests
from sim.systems.splitwise import Splitwise
from sim.topology.mixed_pool import MixedPools
from traces.request import Request


class View:
    def __init__(self, waiting_tokens: int = 0, tokens_in_flight: int = 0) -> None:
        self.waiting_tokens, self.tokens_in_flight = waiting_tokens, tokens_in_flight
        self.num_in_flight = int(tokens_in_flight > 0)
        self.num_waiting = int(waiting_tokens > 0)
        self.running_until_s = 0.0


def test_prompts_go_to_the_shortest_queue_and_tokens_to_the_emptiest_machine():
    moved: list[int] = []
    pools = MixedPools(2, [1000] * 4, 100, moved.append)

    def route(number: int, tokens: int, *views: View) -> tuple[int, int]:
        place = pools.route(Request(number, 0.0, tokens, 5), views)
        return place, pools.targets[number]

    assert route(0, 60, View(50), View(30), View(tokens_in_flight=9), View(tokens_in_flight=5)) == (1, 3)
    # What was promised to a machine is taken: 5 + 60 there.
    assert route(1, 60, View(), View(), View(tokens_in_flight=9), View(tokens_in_flight=5)) == (0, 2)
    assert not moved
    # 50 + 60 and 70 + 60 are more than 100 tokens: the token machine with the shortest queue turns mixed. It keeps what
    # it computes, as it has the most room.
    views = [View(50), View(70), View(tokens_in_flight=400), View(tokens_in_flight=500)]
    assert route(2, 60, *views) == (2, 2)
    assert (moved, pools.mixed) == ([2], [2])
    # It is in the mixed pool, and next where the prompt pool is too busy; tokens go to the token pool first.
    assert route(3, 60, *views) == (2, 3)
    # A long prompt where none waits is not too long.
    assert route(4, 5000, View(), *views[1:])[0] == 0


def test_a_prompt_machine_turns_mixed_where_no_token_machine_has_room_and_goes_home_when_idle():
    moved: list[int] = []
    pools = MixedPools(1, [1000] * 2, 100, moved.append)
    full = View(tokens_in_flight=990)
    pools.route(Request(0, 0.0, 60, 5), [View(), full])
    assert (pools.targets[0], moved) == (0, [0])
    # Without a prompt pool left the token machine would turn mixed; idle again, the machine is a prompt machine.
    pools.ended(Request(0, 0.0, 60, 5))
    assert pools.route(Request(1, 0.0, 60, 5), [View(), View(tokens_in_flight=10)]) == 0
    assert (pools.targets, pools.mixed) == ({1: 1}, [])


@pytest.mark.parametrize("jump", [True, False])
def test_a_token_machine_computes_prompts_under_pressure(jump):
    # One prompt of 64 tokens a step; the third finds 64 waiting, which is too many with its own. The token machine then
    # computes it from 0.05 on, and keeps it, as it has the most room.
    rows = requests((0.0, 64, 30), (0.01, 64, 2), (0.05, 64, 2))
    policy = Splitwise(mixed_pool=True, max_pending_tokens=100)
    small = limits(100, tokens=64, max_model_len=64)
    outcome = simulate_pools(policy, rows, small, machine=linear_machine(**FLAT), jump=jump)
    assert_whole(outcome, rows)
    assert outcome.by_id()[2].first_token_s == pytest.approx(0.15)
    assert outcome.places()[0] == 1
    assert sum(m.engine.scheduler.counters.policy["turned_mixed"] for m in outcome.members) >= 1


@pytest.mark.parametrize("seed", [308, 561])
def test_machines_full_of_what_each_is_to_have_of_the_other_take_it_back(seed):
    """While the other one is in the middle of a jump, too."""
    rng, at_s, rows = Random(seed), 0.0, []
    for _ in range(rng.randint(5, 40)):
        at_s += rng.choice([0, 0, 0.001, 0.02, 0.1])
        rows.append((at_s, rng.randint(1, 150), rng.randint(1, 40)))
    policy = Splitwise(mixed_pool=True, max_pending_tokens=rng.choice([1, 60, 200]), layer_wise=rng.random() < 0.5)
    limit, decode_limit = (
        limits(rng.randint(10, 24), 0, max_model_len=256, seqs=rng.choice([1, 3, 256]), tokens=512) for _ in range(2)
    )
    prefill, decode, speed = rng.randint(1, 3), rng.randint(1, 3), rng.choice([10.0, 300.0, 1e9])
    one, _ = jumped_and_stepped(
        lambda source, jump: simulate_pools(
            policy, source, limit, prefill=prefill, decode=decode, decode_limit=decode_limit, bytes_per_s=speed,
            jump=jump,
        ),
        requests(*rows),
    )  # fmt: skip
    assert sum(member.engine.scheduler.counters.policy["taken_back"] for member in one.members)


@pytest.mark.parametrize("pending", [1, 60, 400])
@settings(max_examples=25, deadline=None)
@given(
    rows=ROWS,
    pools=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    blocks=st.tuples(st.integers(10, 24), st.integers(10, 24)),
    seats=st.sampled_from([1, 3, 256]),
    speed=st.sampled_from([10.0, 300.0, 1e9]),
    layer_wise=st.booleans(),
    blocking=st.booleans(),
    most=st.sampled_from([None, 3]),
)
def test_jumping_changes_nothing_and_no_request_is_lost(
    pending, rows, pools, blocks, seats, speed, layer_wise, blocking, most
):
    arrivals = drawn(rows)
    policy = Splitwise(mixed_pool=True, max_pending_tokens=pending, layer_wise=layer_wise, blocking_pull=blocking)
    limit, decode_limit = (limits(count, 0, max_model_len=256, seqs=seats, tokens=512) for count in blocks)
    jumped_and_stepped(
        lambda source, jump: simulate_pools(
            policy, source, limit, prefill=pools[0], decode=pools[1], decode_limit=decode_limit, bytes_per_s=speed,
            jump=jump,
        ),
        arrivals,
        most,
    )  # fmt: skip
