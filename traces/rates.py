"""Rates and the numbers beside them: what is a valid one."""

from math import inf

from traces.errors import TraceError

LEAST, MOST = 1e-9, 1e9


def check_between(what: str, value: float, remedy: str, least: float = LEAST, most: float = MOST) -> None:
    """Raise `TraceError` unless a value lies between two, both included; by default, those that traffic has."""
    if not value > 0 and least > 0:
        raise TraceError(f"{what} {value} is not positive; {remedy}")
    if not least <= value <= most:
        raise TraceError(f"{what} {value} is not between {least:g} and {most:g}; {remedy}")


def check_rate(rate_per_s: float, burstiness: float) -> None:
    """Raise `TraceError` unless both are numbers that traffic has; a rate may be infinite."""
    if rate_per_s != inf:
        check_between("request rate", rate_per_s, "give requests per second, or inf for all at once")
    check_between("burstiness", burstiness, "1 is Poisson, below 1 burstier", least=1e-4)
