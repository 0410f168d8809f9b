"""Robust relative least squares with standard errors: one routine for every fit here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares
from scipy.special import stdtrit

from calib.samples import MADS

Array = NDArray[np.float64]

FIRST_SCALE = 0.05
"""Relative error beyond which a point counts less, before the points' own scatter is known."""
CAUCHY = 2.385
"""Standard deviations at which Cauchy's loss turns: 95 % of least squares' efficiency on normal errors."""
LEAST_SCALE = 1e-4
CHI_SQUARED = 10.8
"""One degree of freedom exceeds it by chance once in a thousand times."""
LEAST_SLOPE = 1e-6
"""Root mean square of d log(prediction) / d variable below which the points say nothing of the variable."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of a fit: a start, limits, and whether it is searched on a logarithmic scale."""

    start: float
    least: float = 0.0
    most: float = np.inf
    log: bool = True


@dataclass(frozen=True)
class Estimate:
    """A fitted value, its standard error and 95 % interval.

    The error is None where the value stands at a limit, infinite where the points say nothing about it.
    """

    value: float
    stderr: float | None
    low: float
    high: float

    @property
    def at_limit(self) -> bool:
        """Whether the data pushed the value to the edge of what it may be."""
        return self.stderr is None

    @property
    def told(self) -> bool:
        """Whether the points tell a positive value: known better than by its own size."""
        return bool(np.isfinite(self.value)) and (self.stderr is None or self.stderr < self.value)


@dataclass(frozen=True)
class Fit:
    """Estimates by name, and the relative scatter (robust standard deviation of log errors) they leave.

    `errors`: log(predicted / measured), shape (points,), of `fit_relative`.
    """

    estimates: dict[str, Estimate]
    scatter: float
    errors: Array = field(default_factory=lambda: np.empty(0))

    @property
    def values(self) -> dict[str, float]:
        """The fitted values by name."""
        return {name: estimate.value for name, estimate in self.estimates.items()}

    def explains_more_than(self, simpler: "Fit") -> bool:
        """Whether one constant more explains the same points better than chance does once in a thousand times.

        By the ratio of likelihoods under Cauchy's loss, which is that of normal errors but for outliers.
        """
        scale = max(CAUCHY * self.scatter, LEAST_SCALE)
        before, after = (np.log1p((fit.errors / scale) ** 2).sum() for fit in (simpler, self))
        return bool(CAUCHY**2 * (before - after) > CHI_SQUARED)


# The search may try rates beyond any number, from where it turns back.
@np.errstate(over="ignore", divide="ignore", invalid="ignore")
def fit_relative(
    predict: Callable[[Mapping[str, float]], Array], measured: Array, parameters: Mapping[str, Parameter]
) -> Fit:
    """Parameters that minimise Cauchy's loss of log(predicted / measured).

    Logarithms weight a microsecond as a second, which is what makes a joint fit over shapes possible (unweighted least
    squares sees only the longest). Outliers of timings are slow ones, all on one side: Cauchy's loss lets go of them,
    where soft L1, which finds the start, would still lean. Standard errors are the sandwich estimator's.

    Args:
        predict: seconds per point, shape (points,), from parameter values by name.
        measured: seconds, shape (points,), all positive.
        parameters: what to find; a linear one must have a finite positive `start`, its scale.
    """
    names = list(parameters)
    log_measured = np.log(measured)

    def values(x: Array) -> dict[str, float]:
        pairs = zip(names, x, strict=True)
        return {n: float(np.exp(v) if parameters[n].log else v * parameters[n].start) for n, v in pairs}

    def residuals(x: Array) -> Array:
        return np.log(predict(values(x))) - log_measured

    def scaled(parameter: Parameter, value: float) -> float:
        if parameter.log:
            return float(np.log(value))
        return value / parameter.start

    x = np.array([scaled(p, p.start) for p in parameters.values()])
    low = np.array([scaled(p, p.least) for p in parameters.values()])
    high = np.array([scaled(p, p.most) for p in parameters.values()])
    scale = FIRST_SCALE
    for loss in ("soft_l1", "cauchy", "cauchy"):
        found = least_squares(residuals, x, bounds=(low, high), loss=loss, f_scale=scale, x_scale="jac")
        x = found.x
        errors = residuals(x)
        scatter = float(MADS * np.median(np.abs(errors - np.median(errors))))
        scale = max(CAUCHY * scatter, LEAST_SCALE)
    free = (x - low > 1e-6) & (high - x > 1e-6)
    deviations = _sandwich(_jacobian(residuals, x), errors, scale, free)
    return Fit(estimates_of(parameters, x, deviations, len(measured) - len(names), values), scatter, errors)


def mape(predicted: Array, measured: Array) -> float:
    """Mean absolute relative error."""
    return float(np.mean(np.abs(predicted / measured - 1)))


def _jacobian(residuals: Callable[[Array], Array], x: Array) -> Array:
    """Central differences: the solver's own Jacobian is scaled by the loss."""
    columns = []
    for i in range(len(x)):
        step = np.zeros_like(x)
        step[i] = 1e-5 * max(1.0, abs(x[i]))
        columns.append((residuals(x + step) - residuals(x - step)) / (2 * step[i]))
    return np.array(columns).T


def _sandwich(jacobian: Array, errors: Array, scale: float, free: NDArray[np.bool_]) -> Array:
    """Standard deviations of the searched variables; NaN for those at a limit, infinite for those that do nothing."""
    deviations = np.full(len(free), np.nan)
    slopes = np.sqrt(np.mean(jacobian**2, axis=0))
    idle = free & ~((slopes >= LEAST_SLOPE) & np.isfinite(slopes))
    deviations[idle] = np.inf
    free = free & ~idle
    jacobian = jacobian[:, free]
    z = (errors / scale) ** 2
    influence, curvature = errors / (1 + z), (1 - z) / (1 + z) ** 2
    bread = np.linalg.pinv(jacobian.T @ (curvature[:, None] * jacobian))
    # A point with leverage pulls the fit towards itself and hides its own error (the correction known as HC3).
    leverage = np.einsum("ij,jk,ik->i", jacobian, np.linalg.pinv(jacobian.T @ jacobian), jacobian)
    influence = influence / np.maximum(1 - leverage, 1e-3)
    meat = jacobian.T @ (influence[:, None] ** 2 * jacobian)
    covariance = bread @ meat @ bread
    deviations[free] = np.sqrt(np.maximum(np.diag(covariance), 0.0))
    return deviations


@np.errstate(over="ignore", invalid="ignore")
def estimates_of(
    parameters: Mapping[str, Parameter],
    x: Array,
    deviations: Array,
    freedom: int,
    values: Callable[[Array], dict[str, float]],
) -> dict[str, Estimate]:
    """Estimates of searched variables.

    Args:
        x, deviations: shapes (parameters,); a deviation is NaN at a limit, infinite where nothing is said.
        freedom: degrees of it that points leave; one at least is taken.
        values: of the parameters, from variables.
    """
    wide = float(stdtrit(max(freedom, 1), 0.975))
    centre, low, high = values(x), values(x - wide * deviations), values(x + wide * deviations)
    found = {}
    for (name, parameter), deviation in zip(parameters.items(), deviations, strict=True):
        if np.isnan(deviation):
            nearer_least = abs(centre[name] - parameter.least) < abs(parameter.most - centre[name])
            limit = parameter.least if nearer_least else parameter.most
            found[name] = Estimate(limit, None, limit, limit)
            continue
        stderr = float(deviation) * (centre[name] if parameter.log else parameter.start)
        found[name] = Estimate(centre[name], stderr, max(low[name], parameter.least), min(high[name], parameter.most))
    return found
