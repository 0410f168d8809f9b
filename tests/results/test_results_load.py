"""Offered against served, and which engines are overloaded: figures by hand, and runs below and above capacity."""

import numpy as np
import pytest
from small_results import finished, scenario, small_result

from sim.options.scenario import Scenario
from sim.results.comparison import comparison_lines
from sim.results.load import offered, overload
from sim.results.report import metric_values, run_lines
from sim.results.result import assemble


def result_of(arrival_s, queue_s, e2el_s, **changes):
    arrays = {"start_times": arrival_s, "queue_times": queue_s, "latencies": e2el_s}
    found = {name: np.broadcast_to(np.asarray(v, float), len(arrival_s)).tolist() for name, v in arrays.items()}
    return small_result(**({"errors": [""] * len(arrival_s)} | found | changes))


EVENLY_S = np.arange(1001) / 10.0
"""Ten a second for 100 s."""


def test_rate_offered_is_between_the_first_and_the_last():
    assert offered(result_of(EVENLY_S + 5.0, 0, 1)) == pytest.approx(10.0)
    assert offered(result_of([4.0, 0.0], 0, 1)) == 0.25
    assert offered(result_of([0.0], 0, 1)) is offered(result_of([1.0, 1.0], 0, 1)) is offered(small_result()) is None


def test_an_engine_that_ends_eight_while_ten_come_is_overloaded():
    # A request of t ends at 1.25 t + 1 s: from 50 to 100 s those that came between 39.2 and 79.2 s.
    late = result_of(EVENLY_S, 0, EVENLY_S / 4.0 + 1.0)
    found = overload(late)
    assert found.arrived_per_s == 10.0
    assert found.ended_per_s == 8.0
    assert str(found) == "10 requests/s came and 8 ended"


def test_constant_latency_is_no_overload_however_long():
    for e2el_s in (0.5, 24.0, 60.0, 1000.0):
        assert overload(result_of(EVENLY_S, 0, e2el_s)) is None


def test_a_few_long_answers_are_no_overload():
    """Nine of ten end at once; the tenth stays for longer than the arrivals last, so that only more of them come."""
    assert overload(result_of(np.arange(10_001) / 100.0, 0, np.where(np.arange(10_001) % 10, 1.0, 900.0))) is None


def test_a_growing_queue_is_one_even_where_nothing_has_ended():
    assert overload(result_of(EVENLY_S, EVENLY_S, EVENLY_S + 1000.0)).ended_per_s == 0.0


def test_chance_is_not_called_overload():
    draw = np.random.default_rng(0)
    for _ in range(50):
        arrival_s = np.cumsum(draw.exponential(0.1, 1000))
        assert overload(result_of(arrival_s, draw.exponential(0.2, 1000), draw.exponential(3.0, 1000))) is None


def test_what_was_not_kept_or_ignored_tells_nothing():
    assert overload(small_result()) is None
    assert overload(result_of(EVENLY_S, EVENLY_S, EVENLY_S, errors=["ignored: x"] * 1001)) is None
    assert overload(result_of([3.0, 3.0], 1, 1)) is None


SECONDS = np.arange(33.0)
"""One a second from 0 to 32 s. Sixteen come after the middle, and noise is 3 sqrt(16) = 12; a quarter lasts 8 s."""


def those(chosen, chosen_s, other_s=0.0):
    """Seconds of those that are chosen, and of all others."""
    return np.where(chosen, chosen_s, other_s)


@pytest.mark.parametrize(("num", "grows"), [(12, False), (13, True)])
def test_a_queue_grows_by_more_than_three_deviations(num, grows):
    """Of the sixteen so many are in the queue at the end of the arrivals, or in the engine."""
    late = 32 - num < SECONDS
    # The first nine stay for a quarter: what has not ended tells nothing.
    waiting = overload(result_of(SECONDS, those(late, 99.0), those(late, 99.0, 8.0)))
    unended = overload(result_of(SECONDS, 0.0, those(late, 99.0)))
    assert (waiting is not None, unended is not None) == (grows, grows)
    if grows:
        assert (unended.arrived_per_s, unended.ended_per_s) == (1.0, 3 / 16)
        # After 8 s each: those that came at 9 to 19 s.
        assert waiting.ended_per_s == 11 / 16
    # A queue that stays as long grows no more than the arrivals do.
    assert overload(result_of(SECONDS, 15.0, 23.0)) is None


def test_what_has_not_ended_counts_where_the_first_stay_for_less_than_a_quarter():
    """On average of those that came in the first quarter, its end included: queues are left out."""
    late = SECONDS > 16
    first = SECONDS <= 8
    for stay_s, grows in ((7.99, True), (8.0, False), (8.01, False)):
        e2el_s = those(late, 99.0) + those(first, stay_s + 0.25)
        assert (overload(result_of(SECONDS, those(first, 0.25), e2el_s)) is not None) == grows
    # 9 x 8 s of the one that comes at 8 s alone.
    for stay_s, grows in ((71.9, True), (72.0, False)):
        e2el_s = those(late, 99.0) + those(SECONDS == 8, stay_s)
        assert (overload(result_of(SECONDS, 0.0, e2el_s)) is not None) == grows


def test_ends_count_from_the_middle_to_the_last_arrival():
    """Three of the late end in time; a fourth with the last arrival, or one of the early ones in the second half."""
    e2el_s = those(SECONDS > 19, 99.0)
    assert overload(result_of(SECONDS, 0.0, e2el_s)).ended_per_s == 3 / 16
    for came_s, at_s, counts in (
        (20, 32.0, True),
        (20, 32.1, False),
        (1, 16.0, False),
        (1, 16.1, True),
        (1, 32.0, True),
    ):
        found = overload(result_of(SECONDS, 0.0, those(came_s == SECONDS, at_s - came_s, e2el_s)))
        assert (found is None) == counts
    # The one that comes in the middle is not late.
    assert overload(result_of(SECONDS, 0.0, those(SECONDS > 16, 99.0))).arrived_per_s == 1.0


@pytest.mark.parametrize(("rate", "overloaded"), [(2.0, False), (20.0, True)])
def test_runs_below_and_above_what_their_memory_holds(rate, overloaded):
    options = Scenario(
        workload="fixed", input_len=256, output_len=64, num_prompts=300, request_rate=rate, num_gpu_blocks_override=120,
        num_cpu_blocks_override=60, max_model_len=1024,
    )  # fmt: skip
    for policy in ("vllm-recompute", "vllm-v1"):
        assert (overload(assemble(finished(policy, options=options))) is not None) == overloaded


def test_reports_say_what_is_overloaded_and_what_memory_each_was_given(tmp_path):
    steady = result_of(EVENLY_S, 0, 1.0, policy="a", scenario=scenario(num_cpu_blocks=1024))
    late = result_of(EVENLY_S, 0, EVENLY_S / 4.0 + 1.0, policy="b", scenario=scenario(num_cpu_blocks=512))
    lines = comparison_lines([steady, late], tmp_path)
    assert next(line.split() for line in lines if line.startswith("Host KV memory"))[4:] == ["8.0", "4.0", "(0.50x)"]
    assert [line for line in lines if "overloaded" in line] == [
        "b is overloaded, its queue grew to the end: in the second half of the arrivals"
    ]
    assert any("Overloaded" in line for line in run_lines(late, tmp_path))
    assert not any("Overloaded" in line for line in run_lines(steady, tmp_path))
    assert metric_values(late)["request_offered"] == pytest.approx(10.0)


def test_goodput_of_arrivals_leaves_out_what_the_last_ones_take():
    late = result_of(EVENLY_S, 0, 60.0, goodput_attainment=0.25, request_goodput=0.5)
    # By hand: a quarter of 10 requests/s, though the run took longer than they came.
    assert metric_values(late)["goodput_of_arrivals"] == pytest.approx(2.5)
    assert metric_values(result_of(EVENLY_S, 0, 60.0))["goodput_of_arrivals"] is None
