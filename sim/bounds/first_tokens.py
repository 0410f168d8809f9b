"""How many can have their first token in time: prompts take time, one after another, and a share of one is none.

Deadlines come in the order of arrivals, so requests that can be served in time can be served first come, first served.
The best choice is found by dynamic programming over the requests and the time at which the prompts chosen so far end.
"""

import numpy as np

from sim.bounds.work import Floats

STEPS = 4096
"""Into which the time from arrival to deadline is cut; arrivals and prompts are rounded down to whole ones."""


def positive(values: Floats) -> float:
    """The greatest sum of values, if any may be chosen together."""
    return float(np.maximum(0.0, values).sum())


def most_in_time(arrivals: Floats, deadlines: Floats, prompt_s: Floats, values: Floats) -> float:
    """The greatest sum of `values` of requests whose prompts can be computed between arrival and deadline (s).

    Never too little: rounding starts them earlier and makes them shorter. Any may be chosen if a deadline is infinite.
    """
    if not np.isfinite(deadlines).all():
        return positive(values)
    order = np.argsort(arrivals, kind="stable")
    step_s, begin_s = float((deadlines - arrivals).max()) / STEPS, float(arrivals.min())
    starts, ends, lengths = (
        np.floor(times[order] / step_s).astype(int) for times in (arrivals - begin_s, deadlines - begin_s, prompt_s)
    )
    # most[k]: of the requests so far, with all that are chosen computed within k steps from the last arrival.
    most, now = np.zeros(int((ends - starts).max()) + 1), 0
    for start, length, value in zip(starts.tolist(), lengths.tolist(), values[order].tolist(), strict=True):
        passed, now = min(start - now, len(most) - 1), start
        if passed:
            most[:-passed] = most[passed:]
            most[-passed:] = most[-1]
        if value > 0.0 and length < len(most):
            most[length:] = np.maximum(most[length:], most[: len(most) - length] + value)
    return float(most[-1])
