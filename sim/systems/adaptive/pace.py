"""What iterations took, against what they were to take: `Pace` of the batch, `Correction` of prices, prompts `Beside`.

Sequences that decode get their tokens in time if iterations last P on average, prompts included, whatever prices say.
What one that was carried out left of P is saved, up to `MOST` times P and no more than short answers can lose at once;
what it took beyond is owed. Prompts get what is saved and what the next decodes leave. Only the size of the next chunk
rests on a price: where that is wrong, the time that the chunk took puts the next one right.

Which requests are to be kept does rest on prices. The first iteration after each arrival is priced again when it has
been carried out; what the last of them took over what they cost is the factor by which all prices are wrong.
"""

from collections import deque
from math import inf
from typing import Final

from sim.cost.model import CostModel
from sim.engine.plan import IterationPlan, StepTimes

MOST: Final = 8.0
"""Times P, that is saved at most. Chosen by trials."""
SAMPLES: Final = 100
LEAST_FACTOR: Final = 0.5
MOST_FACTOR: Final = 2.0
PIECES: Final = 10
"""Of which `Beside` is found, each as long as between two price limits."""
LEAST_BESIDE: Final = 0.05
DIGITS: Final = 2
"""Of the factor: what rounding changes in a duration must change no decision."""


class Pace:
    """Seconds saved for prompts."""

    def __init__(self) -> None:
        self.iteration_s = inf
        """What an iteration is to take (P); inf: there is no such time."""
        self.most_s = inf
        """What is saved at most."""
        self.saved_s = 0.0
        """What prompts may take beside what the next decodes leave of P; negative: owed."""

    def keep(self, iteration_s: float, most: float = MOST) -> None:
        """Iterations are to take so long from now on; `most`: iterations' time that a sequence can lose, at once."""
        self.iteration_s, self.most_s = iteration_s, min(MOST, most) * iteration_s
        self.saved_s = min(self.saved_s, self.most_s)

    def rest(self) -> None:
        """No sequence waited for a token: nothing is owed."""
        if self.iteration_s != inf:
            self.saved_s = self.most_s

    def carried_out(self, begin_s: float, times: StepTimes, *, decodes: bool) -> None:
        """Iterations that began at `begin_s`; without `decodes` those that decode waited."""
        if self.iteration_s == inf:
            return
        self._save((self.iteration_s if decodes else 0.0) - (times.first_end_s - begin_s))
        more = times.iterations - 1
        if more:
            # Each takes `slope_s` more than the one before: the first of them save, the others owe.
            left_s, slope_s = self.iteration_s - times.second_s, times.slope_s
            saving = more if slope_s <= 0.0 else min(more, max(0, int(left_s / slope_s) + 1))
            for begin, end in ((0, saving), (saving, more)):
                self._save((end - begin) * (left_s - slope_s * (begin + end - 1) / 2))

    def _save(self, seconds: float) -> None:
        self.saved_s = min(self.most_s, self.saved_s + seconds)


class Correction:
    """By how much iterations take longer than the prices say.

    Args:
        cost: the prices.
    """

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        # What iterations took and what they cost, s.
        self._taken_s: deque[float] = deque(maxlen=SAMPLES)
        self._priced_s: deque[float] = deque(maxlen=SAMPLES)

    def add(self, plan: IterationPlan, seconds: float) -> None:
        """The first iteration of `plan` took so long."""
        self._taken_s.append(seconds)
        self._priced_s.append(self._cost.iteration_s(plan))

    @property
    def factor(self) -> float:
        """Seconds taken for each of the price's; 1 as long as none is known."""
        priced_s = sum(self._priced_s)
        if priced_s <= 0.0:
            return 1.0
        return min(MOST_FACTOR, max(LEAST_FACTOR, round(sum(self._taken_s) / priced_s, DIGITS)))


class Beside:
    """What prompts take beside decodes, for each second of their price.

    A chunk beside decodes costs less than one that fills the device where an iteration waits for the weights anyway,
    and what is cached of a prompt costs nothing.
    """

    def __init__(self) -> None:
        self._pieces: deque[tuple[float, float]] = deque(maxlen=PIECES)
        self._taken_s = self._priced_s = 0.0

    def add(self, taken_s: float, priced_s: float) -> None:
        """An iteration's prompts took `taken_s`; those of them that it started cost `priced_s`."""
        self._taken_s += taken_s
        self._priced_s += priced_s

    def next_piece(self) -> None:
        """Of the last `PIECES` of these the factor is made."""
        self._pieces.append((self._taken_s, self._priced_s))
        self._taken_s = self._priced_s = 0.0

    @property
    def factor(self) -> float:
        """1 as long as none is known."""
        taken_s, priced_s = sum([taken_s for taken_s, _ in self._pieces]), sum([cost_s for _, cost_s in self._pieces])
        return min(1.0, max(LEAST_BESIDE, round(taken_s / priced_s, DIGITS))) if priced_s > 0.0 else 1.0
