"""Arrival rates: what is a valid one."""

from math import isfinite

from traces.errors import TraceError


def check_rate(rate_per_s: float, burstiness: float) -> None:
    """Raise `TraceError` unless both are positive and the burstiness is finite."""
    if not rate_per_s > 0:
        raise TraceError(f"request rate {rate_per_s} is not positive; give requests per second, or inf for all at once")
    if not (burstiness > 0 and isfinite(burstiness)):
        raise TraceError(f"burstiness {burstiness} is not a positive number; 1 is Poisson, below 1 burstier")
