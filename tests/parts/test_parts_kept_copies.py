"""FastSwitch's reuse: what the host keeps of a sequence that came back, and when it gives way."""

import pytest

from kvtwin.testing import conformance, limits, linear_machine, requests, simulate
from sim.engine.changes import Move
from sim.errors import UserError
from sim.options.policies import parse_policy


def swaps(memory: str, *rows: tuple[float, int, int], host: int = 20) -> list[tuple[int, int, int]]:
    """Request, first and last token of each copy to the host: seven blocks of 16 tokens on the GPU."""
    moves: list[Move] = []
    policy = parse_policy(f"vllm-swap:memory={memory}", {})[1]
    simulate(
        policy, requests(*rows), limits(gpu=7, host=host),
        machine=linear_machine(prefill=(0.0, 1e-3, 0.0), decode=(1e-3, 0.0, 0.0)),
        observe=lambda scheduler: lambda plan, start_s, times: moves.extend(
            move for move in plan.changes if isinstance(move, Move)
        ),
    )  # fmt: skip
    return [(move.seq.request.request_id, move.first_token, move.end_token) for move in moves]


TWICE = (0.0, 16, 56), (0.0, 32, 8), (0.0, 16, 56)


def test_only_what_was_filled_since_is_copied_again():
    """2 leaves with a full block and a begun one. When it leaves again the host still has the full one."""
    assert swaps("paged", *TWICE) == [(2, 0, 32), (2, 0, 48)]
    assert swaps("kept-copies", *TWICE) == [(2, 0, 32), (2, 16, 48)]


def test_copies_of_those_that_run_give_way():
    """1 leaves with three blocks while 2 runs, of which the host has two. It has room for four: those two go."""
    rows = (0.0, 32, 56), (0.0, 16, 40), (0.0, 32, 56)
    assert swaps("kept-copies", *rows, host=4) == [(2, 0, 32), (2, 32, 48), (1, 0, 48)]


@pytest.mark.parametrize("text", ["vllm-swap:memory=kept-copies", "sarathi:memory=kept-copies,eviction=swap"])
def test_it_keeps_to_what_every_memory_must(text):
    conformance.check(parse_policy(text, {})[1], examples=25)


def test_where_nothing_is_swapped_it_is_refused():
    with pytest.raises(UserError, match="memory=kept-copies keeps what swaps leave on the host: it goes with eviction"):
        simulate(parse_policy("vllm-recompute:memory=kept-copies", {})[1], [], limits())
