"""When repeating stops, and what repeats say."""

import pytest

from calib.measure.timing import Rule, repeat, stderr_of_median
from calib.samples import spread_s

BEGUN_S = 4096.0
"""What a clock says at first."""


class FakeClock:
    """Time that passes only while something executes."""

    def __init__(self, durations):
        self.now_s = BEGUN_S
        self.durations = iter(durations)
        self.executions = 0

    def once(self):
        self.executions += 1
        seconds = next(self.durations)
        self.now_s += seconds
        return seconds

    def now(self):
        return self.now_s


def run(durations, **rule):
    clock = FakeClock(durations)
    return repeat(clock.once, Rule(**rule), clock.now), clock


def test_short_repeats_that_agree_go_on_until_settled():
    repeats, _ = run([1 / 1024] * 1000, settled_s=0.0625, budget_s=10.0, warmups=0, warmup_s=0.0)
    assert len(repeats) == 64


def test_repeats_that_scatter_go_on_until_the_budget_is_spent():
    repeats, clock = run([1.0, 2.0] * 100, budget_s=30.0, warmups=0, warmup_s=0.0)
    assert len(repeats) == 20
    assert clock.now_s == BEGUN_S + 30.0


def test_repeats_that_scatter_less_stop_earlier():
    # Even over 10 %: the median of n is known to 5 % / sqrt(n), rounded up to whole ranks.
    repeats, _ = run([1.0 + 0.01 * (turn * 7 % 11) for turn in range(1000)], budget_s=1e9, warmups=0, warmup_s=0.0)
    assert 20 < len(repeats) < 60


def test_the_most_repeats_are_never_passed():
    repeats, _ = run([1e-6, 2e-6] * 1000, max_repeats=50, warmups=0, warmup_s=0.0)
    assert len(repeats) == 50


def test_warming_up_takes_its_time_and_is_not_counted():
    repeats, clock = run([0.25] * 40, warmups=1, warmup_s=1.0, budget_s=0.0)
    assert clock.executions == 4 + len(repeats) == 9


def test_a_hurried_rule_repeats_as_little_as_allowed():
    clock = FakeClock([1.0, 2.0] * 100)
    assert len(repeat(clock.once, Rule(warmup_s=50.0).hurried(), clock.now)) == 5
    assert clock.executions == 7


def test_one_wild_repeat_moves_the_spread_little():
    assert spread_s([1.0, 1.0, 1.0, 1.0, 100.0]) == 0.0
    assert spread_s([1.0, 2.0, 3.0, 4.0, 1000.0]) == pytest.approx(1.4826)


def test_the_median_of_few_repeats_is_hardly_known():
    assert stderr_of_median([1.0]) == float("inf")
    assert stderr_of_median([1.0, 4.0, 2.0, 3.0]) == 1.5


def test_the_median_of_two_is_known_to_half_their_distance_and_of_eleven_to_two_ranks():
    assert stderr_of_median([3.0, 1.0]) == 1.0
    # (10 -+ sqrt(11)) / 2 = 3.3 and 6.7, away from the middle to 3 and 7.
    assert stderr_of_median([float(value) for value in range(11)]) == 2.0


def test_few_repeats_do_only_beyond_the_patience():
    often = {"warmups": 0, "warmup_s": 0.0}
    assert len(run([0.5] * 10, budget_s=0.25, patience=6.0, **often)[0]) == 4
    assert len(run([0.5] * 10, budget_s=0.25, patience=2.0, **often)[0]) == 3
    # Ten times 0.3 s, by default.
    assert len(run([1.05] * 10, **often)[0]) == 3


def test_the_time_of_warming_up_is_not_of_the_budget():
    # Four executions of 6 s before; 1, 2, 1, 2 s after them.
    repeats, _ = run([1.0, 2.0] * 20, min_repeats=2, budget_s=6.0, warmups=4, warmup_s=0.0)
    assert repeats == [1.0, 2.0, 1.0, 2.0]
