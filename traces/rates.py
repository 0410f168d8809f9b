"""Rates, counts and seeds: what is a valid one."""

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


def check_count(what: str, value: int) -> None:
    """Raise `TraceError` unless a number of requests, or of one's tokens, is one that can be counted through."""
    if value < 1:
        raise TraceError(f"{what} {value} is too small; give 1 or more")
    check_between(what, value, "give fewer", 1)


def check_seed(seed: int) -> None:
    """Raise `TraceError` unless random numbers can be drawn from a seed."""
    if seed < 0:
        raise TraceError(f"seed {seed} is negative; give 0 or more")
