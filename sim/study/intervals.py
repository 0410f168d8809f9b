"""What several draws of like traffic say: an interval for another draw, and whether two candidates can be told apart.

Values are those of loads or rates, above 0; spreads are those of their logarithms.
"""

from collections.abc import Sequence
from math import exp, inf, log, sqrt

CONFIDENCE = 0.95


def of_another_draw(values: Sequence[float], precision: float) -> tuple[float, float]:
    """Where the value of another like draw lies with 95 %: a prediction interval of the logarithm, by Student's t.

    Args:
        values: one of each draw. Of one draw, or where one has none above 0, all that is known is (0, inf).
        precision: share up to which what was found may lie below what is true, as a search ends.
    """
    count = len(values)
    if count < 2 or not min(values) > 0:
        return 0.0, inf
    from scipy.special import stdtrit  # noqa: PLC0415 - slow to import

    logs = [log(value) for value in values]
    mean = sum(logs) / count
    deviation = sqrt(sum((one - mean) ** 2 for one in logs) / (count - 1))
    half = float(stdtrit(count - 1, 0.5 + CONFIDENCE / 2)) * deviation * sqrt(1 + 1 / count) + precision / 2
    return exp(mean - half), exp(mean + half + precision)


def apart(values: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """By how much the first are above the others, draw by draw: mean of the logarithms' differences, standard error.

    Draws that only one of the two has are left out. Of one draw the error is 0: nothing is known of it.
    """
    differences = [log(a / b) for a, b in zip(values, others, strict=False)]
    count, mean = len(differences), sum(differences) / len(differences)
    error = sqrt(sum((one - mean) ** 2 for one in differences) / (count - 1) / count) if count > 1 else 0.0
    return mean, error


def of_ratio(values: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """The mean ratio of the first to the others, draw by draw, and where it lies with 95 %: Student's t on logarithms.

    Both of at least two draws, and above 0.
    """
    from scipy.special import stdtrit  # noqa: PLC0415 - slow to import

    mean, error = apart(values, others)
    half = float(stdtrit(len(values) - 1, 0.5 + CONFIDENCE / 2)) * error
    return exp(mean), exp(mean - half), exp(mean + half)


def geometric_mean(values: Sequence[float]) -> float:
    """0 where one of them is 0; of equal values just that."""
    first = values[0]
    return first * exp(sum(log(value / first) for value in values) / len(values)) if min(values) > 0 else 0.0
