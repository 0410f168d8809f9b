"""When repeating stops, and what repeats say."""

from itertools import cycle

import pytest

from calib.measure.timing import Rule, repeat, stderr_of_median
from calib.samples import spread_s


class FakeClock:
    """Time that passes only while something executes."""

    def __init__(self, durations):
        self.now_s = 4096.0
        self.durations = durations
        self.executions = 0

    def once(self):
        self.executions += 1
        seconds = next(self.durations)
        self.now_s += seconds
        return seconds

    def now(self):
        return self.now_s


COLD = {"warmups": 0, "warmup_s": 0.0}
STOPS = {
    "short ones that agree go on until settled": ([1 / 1024], {"settled_s": 0.0625, "budget_s": 10.0, **COLD}, 64),
    "what scatters goes on until the budget is spent": ([1.0, 2.0], {"budget_s": 30.0, **COLD}, 20),
    "the most repeats are never passed": ([1e-6, 2e-6], {"max_repeats": 50, **COLD}, 50),
    "few do beyond the patience": ([0.5], {"budget_s": 0.25, "patience": 2.0, **COLD}, 3),
    "and not within it": ([0.5], {"budget_s": 0.25, "patience": 6.0, **COLD}, 4),
    "by default it is ten times 0.3 s": ([1.05], COLD, 3),
    # Four executions of 6 s before; 1, 2, 1, 2 s after them.
    "warming up is not of the budget": ([1.0, 2.0], {**COLD, "min_repeats": 2, "budget_s": 6.0, "warmups": 4}, 4),
    "nor is it counted": ([0.25], {"warmups": 1, "warmup_s": 1.0, "budget_s": 0.0}, 5),
}  # fmt: skip
"""What an execution takes, again and again; the rule, and how many repeats there are."""


@pytest.mark.parametrize("case", STOPS)
def test_when_repeating_stops(case):
    durations, rule, count = STOPS[case]
    clock = FakeClock(cycle(durations))
    assert len(repeat(clock.once, Rule(**rule), clock.now)) == count
    assert clock.executions == count + (4 if rule.get("warmups") else 0)


def test_repeats_that_scatter_less_stop_earlier():
    """Even over 10 %: the median of n is known to 5 % / sqrt(n), rounded up to whole ranks."""
    clock = FakeClock(cycle(1.0 + 0.01 * (turn * 7 % 11) for turn in range(11)))
    assert 20 < len(repeat(clock.once, Rule(budget_s=1e9, **COLD), clock.now)) < 60


def test_a_hurried_rule_repeats_as_little_as_allowed():
    clock = FakeClock(cycle([1.0, 2.0]))
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
