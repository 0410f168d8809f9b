"""What matrix products take over their roofline, by tokens.

Kernels chosen by the rows of a product, rows that do not fill their tiles and clocks that fall under load show at the
same numbers of tokens in all models. A smooth ridge cannot have them.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from calib.robust import Array, Fit, Parameter, fit_relative
from sim.cost.kernels import Point

LEANS = 0.05
"""Bias of a region, or error of a phase left out, from which factors are worth their freedom: below it the roofline
alone says enough."""


def factors_at(points: Sequence[Point] | None, tokens: Array) -> Array:
    """Factors of samples of so many tokens, shape (samples,): between points on a straight line; 1 without points."""
    if not points:
        return np.ones_like(tokens)
    sizes, factors = zip(*points, strict=True)
    return np.interp(tokens, sizes, factors)


def fit_factors(
    predict: Callable[[Mapping[str, float], Array], Array],
    tokens: Array,
    measured_s: Array,
    parameters: Mapping[str, Parameter] | None = None,
) -> tuple[Fit, list[Point]]:
    """A factor for every size sampled, and constants with them, by Cauchy's loss of log(predicted / measured).

    One sample of each size that says 1 is added: where others say little, the roofline stays as it is.

    Args:
        predict: seconds of the samples, from constants by name and the factors of their products.
        tokens: rows of the products; samples with 0 tell nothing.
        measured_s: medians; all of shape (samples,).
        parameters: constants to find at once with the factors; by default none.

    Returns:
        The constants, and (tokens, factor) rising.
    """
    sizes = np.unique(tokens[tokens > 0])
    names = [str(int(size)) for size in sizes]

    def predicted(values: Mapping[str, float]) -> Array:
        factors = np.array([values[name] for name in names])
        return np.concatenate([predict(values, np.interp(tokens, sizes, factors)), factors])

    if not names:
        return Fit({}, 0.0), []
    known = np.concatenate([measured_s, np.ones(len(sizes))])
    found = fit_relative(predicted, known, {**(parameters or {}), **dict.fromkeys(names, Parameter(1.0, 0.2, 5.0))})
    points = [(int(name), round(found.values[name], 4)) for name in names]
    constants = {name: estimate for name, estimate in found.estimates.items() if name not in names}
    return Fit(constants, found.scatter), points
