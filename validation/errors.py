"""`summary`: how far off simulated values are of measured ones, in a line."""

from collections.abc import Iterable
from statistics import median


def summary(name: str, errors: Iterable[float], of: str, target: float | None = None) -> str:
    """Median absolute error, median and range in percent of errors of `of` (rows, stages), as shares; whether the
    first is within `target`."""
    found = sorted(errors)
    middle = median(map(abs, found))
    verdict = "" if target is None else f" (target {100 * target:.0f} %: {'met' if middle <= target else 'missed'})"
    return (
        f"{name}: median absolute error {100 * middle:.1f} %{verdict}, median {100 * median(found):+.1f} %, "
        f"{100 * found[0]:+.0f} to {100 * found[-1]:+.0f} %, {len(found)} {of}"
    )
