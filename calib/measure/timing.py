"""How often to repeat an execution, and what its repeats say: medians, robust spread, a stopping rule."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, sqrt
from statistics import median
from time import perf_counter


@dataclass(frozen=True)
class Rule:
    """When to stop repeating.

    Attributes:
        min_repeats: at least so many ...
        few_repeats: ... except where these have taken `patience` times the budget.
        max_repeats: at most so many.
        budget_s: stop once so much time has passed, ...
        precision: ... or once the median's standard error is below this share of it, ...
        settled_s: ... but not before so much time has passed: a few repeats may agree by chance.
        steady_s: a GPU executes without a pause for so long before: a power limit acts on averages of a tenth of a
            second, and a served GPU has met it.
        warmups: executions before the first that counts, ...
        warmup_s: ... and more until so much time has passed.
    """

    min_repeats: int = 5
    few_repeats: int = 3
    max_repeats: int = 1000
    budget_s: float = 0.3
    patience: float = 10.0
    precision: float = 0.01
    settled_s: float = 0.02
    steady_s: float = 0.3
    warmups: int = 2
    warmup_s: float = 0.01

    def hurried(self) -> "Rule":
        """The least that this rule allows, for when time runs out."""
        return replace(self, budget_s=0.0, warmup_s=0.0, steady_s=0.0)

    def is_enough(self, repeats_s: Sequence[float], spent_s: float) -> bool:
        """Whether to stop after these repeats, which took `spent_s` with all around them."""
        count = len(repeats_s)
        if count >= self.max_repeats:
            return True
        if count < self.min_repeats:
            return count >= self.few_repeats and spent_s > self.patience * self.budget_s > 0
        if spent_s >= self.budget_s:
            return True
        return spent_s >= self.settled_s and stderr_of_median(repeats_s) < self.precision * median(repeats_s)


def stderr_of_median(repeats_s: Sequence[float]) -> float:
    """Standard error of the repeats' median, s: half the distance of the values sqrt(n) / 2 ranks to either side.

    Whatever the distribution, the ranks below the median are binomial with deviation sqrt(n) / 2 (Conover 1999, sec.
    3.2). Unlike what follows from a deviation, this sees repeats that jump between two values.
    """
    ordered, count = sorted(repeats_s), len(repeats_s)
    if count < 2:
        return float("inf")
    low = max(0, floor((count - 1 - sqrt(count)) / 2))
    high = min(count - 1, ceil((count - 1 + sqrt(count)) / 2))
    return (ordered[high] - ordered[low]) / 2


def repeat(once: Callable[[], float], rule: Rule, now: Callable[[], float] = perf_counter) -> list[float]:
    """Execute until the rule is satisfied.

    Args:
        once: executes once, returns seconds.
        rule: when to stop.
        now: a clock in seconds.

    Returns: seconds of every execution after the warm-up, in order.
    """
    begun = now()
    warmups = 0
    while warmups < rule.warmups or (now() - begun < rule.warmup_s and warmups < rule.max_repeats):
        once()
        warmups += 1
    begun = now()
    repeats_s: list[float] = []
    while not rule.is_enough(repeats_s, now() - begun):
        repeats_s.append(once())
    return repeats_s
