"""What tests of systems draw: every choice in its order, and the workload that is made of them by hand."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given

from kvtwin.testing import PREFILL, SWAP_S_PER_BLOCK, build_engine, conformance, conversations, limits, linear_machine
from sim.engine.engine import Engine
from sim.engine.sequence import Status
from sim.systems.vllm_v1 import VllmV1
from traces.request import Request

Rows = list[tuple[float, int, int]]
DECODES = "sampled_from(((0.02, 2e-05, 6e-07), (0.02, 2e-05, 2e-05), (0.015625, 0.0, 0.0)))"


class Told:
    """Stands in for `hypothesis.strategies`: what is drawn from, in words that are no release's own."""

    def __getattr__(self, name: str) -> Callable[..., "Words"]:
        return lambda *args, **named: Words(
            f"{name}({', '.join([*map(repr, args), *(f'{key}={value!r}' for key, value in named.items())])})"
        )


class Words(str):
    __slots__ = ()
    __repr__ = str.__str__


def drawn(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[Any, VllmV1], conformance.Workload], script: list[tuple[str, Any]]
) -> conformance.Workload:
    """What is made of these draws, each told by the beginning of what is drawn from."""
    for module in (conformance, conversations):
        monkeypatch.setattr(module, "st", Told())
    left = iter(script)

    def draw(one: Words) -> Any:
        told, value = next(left)
        assert one.startswith(told), one
        return value

    found = make(draw, VllmV1())
    assert list(left) == []
    return found


def test_a_workload_is_what_was_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = "sampled_from([None, None, Host(base_s=0.004, s_per_sequence=0.0001, hidden=False), "
    rows = f"one_of({conformance.rows!r}, {conformance.rows!r}, {conformance.bursts!r})"
    script = [
        ("sampled_from([1, 4, 16])", 4),
        ("sampled_from([64, 256])", 64),
        ("sampled_from([1, 3, 8, 256])", 8),
        ("integers(2, 40)", 5),
        ("sampled_from([0, 3, 20, 1000])", 3),
        ("sampled_from([None, 16, 64])", 16),
        (rows, [(0.5, 20, 9), (0.25, 33, 1), (0.0, 7, 6), (0.0, 30, 20)]),
        (DECODES, (0.5, 0.25, 0.125)),
        (f"{hosts}Host(base_s=0.004, s_per_sequence=0.0001, hidden=True), Host(base_s=0.0205,", None),
        ("booleans()", True),
        ("sampled_from([4, 16, 8])", 8),
        *zip(["integers(0, 2)", "sampled_from([0, 1, 3, 1000])", "booleans()"] * 4,
             [1, 3, True, 0, 3, True, 2, 0, False, 2, 1, True], strict=True),
    ]  # fmt: skip
    workload = drawn(monkeypatch, conformance.draw_workload, script)
    # Of 29 tokens in blocks of 8, the last of which the answer fills; whoever is of kind 0 has no names.
    assert workload.arrivals == [
        Request(0, 0.5, 20, 9, "", (100, 101, 102), 8, (1003,)),
        Request(1, 0.75, 33, 1),
        Request(2, 0.75, 7, 6, "", (3000,), 8),
        Request(3, 0.75, 30, 20, "", (200, 4001, 4002, 4003), 8, (4004, 4005, 4006)),
    ]
    limit = workload.limits
    assert (limit.num_gpu_blocks, limit.num_cpu_blocks, limit.block_size, limit.max_model_len) == (20, 12, 4, 64)
    assert (limit.max_num_seqs, limit.max_num_batched_tokens, limit.enable_prefix_caching) == (8, 16, True)
    constants = [constant.value for constant in workload.machine.profile.constants.values()]
    assert constants[:7] == [*PREFILL, 0.5, 0.25, 0.125, SWAP_S_PER_BLOCK]


@given(conformance.rows)
def test_rows_keep_their_limits(rows: Rows) -> None:
    assert 1 <= len(rows) <= 25
    for gap_s, prompt, output in rows:
        assert gap_s in (0.0, 0.001, 0.02, 0.3, 2.0) and 1 <= prompt <= 150 and 1 <= output <= 60


@given(conformance.bursts)
def test_bursts_keep_their_limits(rows: Rows) -> None:
    """Three to ten long requests at once, then three to twelve short ones."""
    long = [row for row in rows if row[1] >= 60]
    assert rows[: len(long)] == long and 3 <= len(long) <= 10 and 3 <= len(rows) - len(long) <= 12
    assert all(row[0] == 0.0 and row[1] <= 150 and 20 <= row[2] <= 60 for row in long)
    assert all(row[0] in (0.0, 0.05, 0.3) and row[1] <= 20 and row[2] <= 9 for row in rows[len(long) :])


@pytest.mark.parametrize(("seqs", "chunks"), [(1, "None, 16, 64"), (3, "None, 16, 64"), (256, "None, 256, 256")])
def test_a_budget_holds_every_seat(monkeypatch: pytest.MonkeyPatch, seqs: int, chunks: str) -> None:
    script = [
        ("sampled_from(", 16),
        ("sampled_from(", 256),
        ("sampled_from(", seqs),
        ("integers(", 2),
        ("sampled_from(", 0),
    ]
    script += [
        (f"sampled_from([{chunks}])", None),
        ("one_of(", []),
        ("sampled_from(", (0.5, 0.25, 0.125)),
        ("sampled_from(", None),
    ]
    workload = drawn(monkeypatch, conformance.draw_workload, [*script, ("booleans()", False)])
    assert (workload.limits.num_gpu_blocks, workload.limits.num_cpu_blocks, workload.arrivals) == (2, 0, [])


def test_a_conversation_is_what_was_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = (
        "lists(tuples(integers(0, 4), sampled_from([0.0, 0.001, 0.05, 0.3, 1.0]), "
        "integers(1, 60), integers(1, 50)), min_size=6, max_size=40)"
    )
    script = [
        (
            turns,
            [
                (0, 0.5, 20, 30),
                (1, 0.25, 5, 4),
                (0, 0.0, 10, 1),
                (2, 0.0, 9, 16),
                *[(3, 1.0, 60, 50)] * 5,
                (3, 0.0, 2, 3),
            ],
        ),
        ("integers(34, 60)", 40),
        ("sampled_from([0, 8, 25, 60, 1000])", 25),
        ("sampled_from([1, 3, 256])", 3),
        ("sampled_from([None, 64, 256])", 64),
        ("sampled_from([0.001, 0.0002])", 0.75),
        (DECODES, (0.5, 0.25, 0.125)),
        ("sampled_from([0.0001, 0.003, 0.05])", 0.375),
    ]
    workload = drawn(monkeypatch, conversations.draw_conversations, script)
    arrivals = workload.arrivals
    assert arrivals[:4] == [
        Request(0, 0.5, 20, 30, "talk 0", (7, 1001), 16, (1002, 1003)),
        Request(1, 0.75, 5, 4, "talk 1", (7,), 16),
        # 50 tokens were said: the fourth block is partly filled.
        Request(2, 0.75, 60, 1, "talk 0", (7, 1001, 1002, 1003), 16),
        Request(3, 0.75, 9, 16, "talk 2", (7,), 16, (3001,)),
    ]
    # Of 512 tokens a fifth turn would be beyond: the talk begins anew.
    assert [request[1:4] for request in arrivals[4:]] == [
        (1.75, 60, 50), (2.75, 170, 50), (3.75, 280, 50), (4.75, 390, 50), (5.75, 60, 50), (5.75, 112, 3),
    ]  # fmt: skip
    limit = workload.limits
    assert (limit.num_gpu_blocks, limit.num_cpu_blocks, limit.block_size, limit.max_model_len) == (40, 25, 16, 512)
    assert (limit.max_num_seqs, limit.max_num_batched_tokens) == (3, 64)
    constants = [constant.value for constant in workload.machine.profile.constants.values()]
    assert constants[:7] == [0.001, 0.75, 0.0, 0.5, 0.25, 0.125, 0.375]


def test_a_last_turn_may_fill_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = [(0, 0.0, 60, 50)] * 4 + [(0, 0.0, 60, 12), (0, 0.0, 1, 1)]
    script = [("lists(", turns), ("integers(", 40), *[("sampled_from(", value) for value in (0, 3, 64, 1e-3)]]
    script += [("sampled_from(", (0.5, 0.25, 0.125)), ("sampled_from(", 1e-4)]
    arrivals = drawn(monkeypatch, conversations.draw_conversations, script).arrivals
    assert [request.prompt_tokens for request in arrivals] == [60, 170, 280, 390, 500, 1]


def test_those_that_end_are_looked_for_in_a_crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 requests, some together and some apart, in 24 blocks; of every third all prompts begin alike."""
    found: list[conformance.Workload] = []

    class Enough(Exception):
        pass

    def run(policy: object, workload: conformance.Workload) -> None:
        found.append(workload)
        raise Enough

    monkeypatch.setattr(conformance, "run", run)
    with pytest.raises(Enough):
        conformance.check_forgotten(VllmV1())
    (workload,) = found
    arrivals, limit = workload.arrivals, workload.limits
    assert len(arrivals) == 40
    gaps = {round(b.arrival_s - a.arrival_s, 9) for a, b in pairwise(arrivals)}
    assert gaps == {0.0, 0.02, 0.3}
    assert all(1 <= request.prompt_tokens <= 150 and 1 <= request.output_tokens <= 60 for request in arrivals)
    # What Python's generator draws of seed 0; another range draws others.
    assert [request.prompt_tokens for request in arrivals[:5]] == [108, 131, 78, 150, 130]
    assert [request.output_tokens for request in arrivals[:5]] == [3, 32, 31, 58, 9]
    for request in arrivals:
        kind, blocks = request.request_id % 3, -(-request.prompt_tokens // 16)
        assert request.hash_block_tokens == 16
        assert request.hash_ids == (tuple(range(blocks)) if not kind else ())
    assert (limit.num_gpu_blocks, limit.num_cpu_blocks, limit.block_size, limit.max_model_len) == (24, 20, 16, 256)
    assert (limit.max_num_seqs, limit.max_num_batched_tokens, limit.enable_prefix_caching) == (8, 64, True)


@pytest.mark.parametrize("step", ["schedule", "transfer_done", "commit", "commit_ahead", "deliver"])
def test_a_status_that_cannot_be_is_found_at_every_step(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    engine = build_engine(VllmV1(), limits(), linear_machine(), [].append)
    seq = engine.add_request(Request(0, 0.0, 5, 3))
    given = {"schedule": (0.0,), "transfer_done": (None,), "deliver": ([],)}.get(step, (None, None))
    monkeypatch.setattr(Engine, step, lambda *_: None if step == "schedule" else [])
    getattr(engine, step)(*given)
    # Nothing leads back from the end.
    engine.statuses[seq] = Status.FINISHED  # type: ignore[attr-defined]
    with pytest.raises(AssertionError):
        getattr(engine, step)(*given)


def test_who_is_offered_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = (build_engine(VllmV1(), limits(), linear_machine(), [].append) for _ in range(2))
    seq = sender.add_request(Request(0, 0.0, 5, 3))
    monkeypatch.setattr(Engine, "offer", lambda *_: None)
    receiver.offer(seq)
    assert receiver.statuses == sender.statuses == {seq: Status.WAITING}  # type: ignore[attr-defined]
