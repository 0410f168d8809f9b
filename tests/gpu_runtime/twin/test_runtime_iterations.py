"""Iteration against iteration: exact where the times of the real clock's device are planted."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pretended import pretend
from runtime_variants import policy_of

from gpu_runtime.twin.iterations import (
    COLUMNS,
    Decision,
    Iteration,
    IterationLog,
    compare,
    in_words,
    judged_kinds,
    plan_prices,
    write_csv,
)
from kvtwin.testing import build_engine, limits, linear_machine, requests, simulate
from kvtwin.testing.conformance import limits_of
from kvtwin.testing.engines import DECODE, PREFILL

FASTER_PREFILLS, SLOWER_DECODES = 0.8, 1.25


def machine(prefill=1.0, decode=1.0, block_bytes=1.0):
    return linear_machine(block_bytes, prefill=[prefill * s for s in PREFILL], decode=[decode * s for s in DECODE])


def both(policy, rows, limit, executing, *, jump=True):
    """The iterations of a simulated run, and those of a run that is executed by another machine."""
    engine = build_engine(policy, limit, executing, lambda seq: None)
    twin = SimpleNamespace(cost=machine().cost, model=executing.model, limits=limit)
    there, here = IterationLog(), IterationLog(plan_prices(twin, engine.scheduler.memory.num_groups))
    simulate(policy, requests(*rows), limit, machine=machine(), jump=jump, observe=lambda _: there.observe)
    pretend(engine, requests(*rows), executing, here.observe)
    return there.iterations, here.iterations


def test_planted_times_are_found():
    """Requests of one instant are decided alike whatever they take: prefills at 0.8 of the price, decodes at 1.25."""
    policy = policy_of("vllm-recompute")
    limit = limits_of(policy, limits(100, 0, max_model_len=512), 8, None)
    alike, pairs = compare(*_runs(policy, [(0.0, 40 + i, 10) for i in range(12)], limit))
    by_kind = {row.kind: row for row in alike.kinds}
    assert alike.aligned == alike.live == alike.simulated == len(pairs)
    assert alike.differences == []
    assert by_kind["prefill"].median_error == pytest.approx(1 / FASTER_PREFILLS - 1)
    assert by_kind["prefill"].p95_error == pytest.approx(1 / FASTER_PREFILLS - 1)
    assert by_kind["decode"].median_error == pytest.approx(1 / SLOWER_DECODES - 1)
    assert by_kind["decode"].p95_error == pytest.approx(1 - 1 / SLOWER_DECODES)
    for row in alike.kinds[:-1]:
        assert row.simulated_s / row.measured_s - 1 == pytest.approx(row.median_error)
    assert sum(row.aligned for row in alike.kinds[:-1]) == by_kind["all"].aligned == alike.aligned
    # What is priced is what the twin took, too.
    for priced, row in zip(alike.prices, alike.kinds, strict=True):
        assert (priced.kind, priced.aligned) == (row.kind, row.aligned)
        for field in ("simulated_s", "measured_s", "median_error", "p95_error"):
            assert getattr(priced, field) == pytest.approx(getattr(row, field))
    assert [row.kind for row in judged_kinds(alike)] == [row.kind for row in alike.kinds[:-1] if row.aligned >= 20]
    text = in_words(alike, 0.1)
    assert f"the decision of {alike.live} of {alike.live} live iterations (100%)" in text
    assert "**Off by more than 10% in the median**: decode (-20%), prefill (+25%)" in text
    assert "first differ" not in text


def _runs(policy, rows, limit):
    simulated, live = both(policy, rows, limit, machine(FASTER_PREFILLS, SLOWER_DECODES))
    return simulated, [live]


@pytest.mark.parametrize("variant", ["vllm-recompute", "vllm-swap", "layerkv", "sarathi"])
@settings(max_examples=15, deadline=None)
@given(
    rows=st.lists(st.tuples(st.floats(0.0, 3.0), st.integers(1, 200), st.integers(1, 60)), min_size=1, max_size=15),
    gpu=st.integers(20, 60),
    jump=st.booleans(),
)
def test_the_same_machine_takes_the_same_iterations(variant, rows, gpu, jump):
    """Jumps are taken apart: each of their iterations has its own time."""
    policy = policy_of(variant)
    limit = limits_of(policy, limits(gpu, 100, max_model_len=512), 8, 64)
    simulated, live = both(policy, sorted(rows), limit, machine(block_bytes=limit.block_bytes), jump=jump)
    alike, pairs = compare(simulated, [live, live])
    assert alike.simulated == len(live)
    assert alike.aligned == alike.live == 2 * len(live)
    assert alike.differences == []
    for pair in pairs:
        assert pair.simulated.start_s == pytest.approx(pair.live.start_s, abs=1e-6)
        assert pair.simulated.duration_s == pytest.approx(pair.live.duration_s, abs=1e-7)
        assert pair.simulated.context_tokens == pair.live.context_tokens


def test_prices_say_what_is_off_where_no_decision_is_common():
    """A machine that prefills faster and decodes slower drifts away from its twin; its own plans tell by how much."""
    policy = policy_of("vllm-recompute")
    limit = limits_of(policy, limits(100, 0, max_model_len=512), 8, None)
    rows = [(0.013 * i, 40 + 3 * i, 30) for i in range(40)]
    simulated, live = both(policy, rows, limit, machine(FASTER_PREFILLS, SLOWER_DECODES))
    found, _ = compare(simulated, [live])
    assert found.aligned < found.live
    by_kind = {row.kind: row for row in found.prices}
    assert by_kind["all"].aligned == found.live == len(live)
    for kind, factor in (("prefill", FASTER_PREFILLS), ("decode", SLOWER_DECODES)):
        assert by_kind[kind].aligned >= 20
        assert by_kind[kind].median_error == pytest.approx(1 / factor - 1)
        assert by_kind[kind].p95_error == pytest.approx(abs(1 / factor - 1))
    assert {row.kind for row in judged_kinds(found)} == {"prefill", "decode"}


def iteration(duration_s, *decodes, prefill=(), start_s=0.0):
    kind = "decode" if not prefill else "mixed" if decodes else "prefill"
    return Iteration(Decision(decodes, prefill, (0, 0, 0), ()), kind, 10 * len(decodes), start_s, duration_s)


def test_the_nth_of_a_decision_is_beside_the_nth(tmp_path):
    """By hand: request 2 starts two iterations later in the twin, which therefore decodes 1 alone twice more."""
    begin = (2, 30, 0)
    live = [iteration(4.0, 1), iteration(8.0, prefill=(begin,)), iteration(5.0, 1, 2), iteration(10.0, 1, 2)]
    live[-1] = live[-1]._replace(priced_s=9.0)
    twin = [iteration(3.0, 1), iteration(6.0, 1), iteration(6.0, 1), iteration(6.0, prefill=(begin,))]
    twin += [iteration(7.5, 1, 2)]
    alike, pairs = compare(twin, [live])
    assert [(pair.live_place, pair.simulated_place) for pair in pairs] == [(0, 0), (1, 3), (2, 4), (3, None)]
    assert [pair.error for pair in pairs] == [-0.25, -0.25, 0.5, None]
    assert (alike.simulated, alike.live, alike.aligned) == (5, 4, 3)
    decode, prefill, every = alike.kinds
    assert (decode.kind, decode.aligned, decode.simulated_s, decode.measured_s) == ("decode", 2, 10.5, 9.0)
    assert decode.median_error == pytest.approx(0.125)
    assert decode.p95_error == pytest.approx(0.25 + 0.95 * 0.25)
    assert (prefill.kind, prefill.median_error, every.kind, every.aligned) == ("prefill", -0.25, "all", 3)
    (difference,) = alike.differences
    assert (difference.live_run, difference.iteration) == (1, 2)
    assert difference.live == "1 of 30 prompt tokens (requests 2 here alone)"
    assert difference.simulated == "1 decoding (requests 1 here alone)"
    text = in_words(alike, 0.1)
    assert "the decision of 3 of 4 live iterations (75%)" in text
    assert "Decisions first differ at iteration 2 of live run 1" in text
    write_csv(tmp_path / "iterations.csv", pairs)
    assert (tmp_path / "iterations.csv").read_text().splitlines() == [
        ",".join(COLUMNS),
        "1,1,1,decode,1,0,10,10,0.0,4.0,3.0,-0.25,",
        "1,2,4,prefill,0,30,0,0,0.0,8.0,6.0,-0.25,",
        "1,3,5,decode,2,0,20,20,0.0,5.0,7.5,0.5,",
        "1,4,,decode,2,0,20,,0.0,10.0,,,9.0",
    ]


def test_a_run_that_goes_on_differs_where_the_other_ends():
    short, long = [iteration(1.0, 1)], [iteration(1.0, 1), iteration(1.0, 1)]
    alike, _ = compare(short, [short, long])
    (difference,) = alike.differences
    assert (difference.live_run, difference.iteration, difference.simulated) == (2, 2, "nothing more")
    alike, _ = compare(long, [[]])
    assert (alike.live, alike.aligned, alike.kinds) == (0, 0, [])
    assert "0 of 0 live iterations (0%)" in in_words(alike, 0.1)


def test_copies_are_part_of_a_decision():
    plain, swapped = iteration(1.0, 1), iteration(1.0, 1)
    swapped = swapped._replace(decision=swapped.decision._replace(copied_blocks=(0, 3, 0)))
    alike, _ = compare([plain], [[swapped]])
    assert alike.aligned == 0
    assert alike.differences[0].live == "1 decoding and 3 blocks copied"
