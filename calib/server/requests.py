"""The whole run simulated with one set of constants after another, until every request takes as long as it did."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from calib.robust import Array, Fit, Parameter, estimates_of
from calib.samples import MADS
from calib.server.constants import FRONT_END, HOST, with_constants
from sim.run.prepare import Setup
from sim.run.served import Times, measured_times, simulated_times
from traces.served import ServedRun

LOSS_SCALE = 2.0
"""Standard deviations beyond which a request counts less: one decision taken otherwise moves single requests far."""
LEAST_SCATTER = 0.005
"""Relative scatter below which TTFT or TPOT is not believed to be known."""
BOXES = (0.3, 0.15)
"""Half the width of the box about the constants in which points are drawn, relative, round by round."""
FINER_BOXES = (0.1, 0.05, 0.025, 0.0125)
"""Of the rounds after those, again and again as long as any lessens the loss."""
MOST_FINER = 4
LAST_BOX, LAST_ROUNDS = 0.1, 5
"""Of the last rounds, how far they differ from one another and their median from the best is part of the interval."""
HOST_SHARE = 0.3
"""Of TPOT: the unit in which host time is looked for; of TTFT, of the front end's time."""
MEDIAN_VARIANCE = 1.57
"""Variance of a median over that of the mean, of normal values."""
MOST_REPEATS = 6
"""Rounds more in a box at whose edge the minimum lies."""
POINTS_A_CONSTANT = 10
LEAST_CURVATURE = 1e-4
"""Least curvature of the loss, of scaled variables: below it constants are not told apart."""
LEAST_PART = 0.1
AT_LIMIT = 1e-4
EDGE = 0.99
BLOCKS = 10
"""Runs of consecutive requests that stand for independent ones: neighbours share batches and queues."""
SEED = 0


def fit_requests(setup: Setup, served: ServedRun, known: int, parameters: Mapping[str, Parameter]) -> Fit:
    """Constants that minimise the soft-L1 loss of log(simulated / measured) over TTFT and TPOT of requests.

    All requests are simulated, since they share the engine; the measured times of the first `known` are looked at.
    TTFT and TPOT each count by their own scatter, since TTFT depends on where in an iteration a request arrives.
    Intervals are those of a sandwich estimator with blocks of consecutive requests as its independent units.
    """
    names, measured = list(parameters), measured_times(served)
    starts = [parameter.start for parameter in parameters.values()]
    parameters = {name: _scaled(name, parameter, measured) for name, parameter in parameters.items()}
    x = np.array([0.0 if p.log else start / p.start for p, start in zip(parameters.values(), starts, strict=True)])
    several = np.isfinite(measured.tpot_s[:known]) & (measured.tpot_s[:known] > 0.0)
    ids: NDArray[np.int64] = np.concatenate([np.arange(known), np.arange(known)[several]])

    def values(x: Array) -> dict[str, float]:
        pairs = zip(names, x, strict=True)
        return {n: float(parameters[n].start * (np.exp(v) if parameters[n].log else v)) for n, v in pairs}

    def residuals(x: Array) -> Array:
        found = simulated_times(with_constants(setup, values(x)), served)
        ttft = np.log(found.ttft_s / measured.ttft_s)[:known]
        tpot = np.log(np.maximum(found.tpot_s[:known][several], 1e-9) / measured.tpot_s[:known][several])
        return np.concatenate([ttft, tpot])

    low, high = _limits(parameters)
    groups = [slice(known), slice(known, None)]

    draw = np.random.default_rng(SEED)

    def look(box: float) -> tuple[_Surface, Array]:
        """The surface about the best so far, and the best in the box."""
        found = _Surface.through(residuals, x, box, low, high, draw).by_scatter(groups)
        return found, x + found.step(np.maximum(low - x, -box), np.minimum(high - x, box))

    repeats = MOST_REPEATS
    for box in BOXES:
        x, before = look(box)[1], x
        while repeats and np.abs(x - before).max() > EDGE * box:
            x, before, repeats = look(box)[1], x, repeats - 1
    best = residuals(x)

    def is_better(tried: Array) -> bool:
        """Whether these variables lessen the loss; then they are the best so far."""
        nonlocal x, best
        found = residuals(tried)
        if _loss(found, best, groups) >= _loss(best, best, groups):
            return False
        x, best = tried, found
        return True

    for _ in range(MOST_FINER):
        improved = [is_better(look(box)[1]) for box in FINER_BOXES]
        if not any(improved):
            break
    last = [look(LAST_BOX) for _ in range(LAST_ROUNDS)]
    middle = np.median([found for _, found in last], axis=0)
    is_better(middle)
    free = (x - low > AT_LIMIT) & (high - x > AT_LIMIT)
    blocks = ids * BLOCKS // known
    variances = [surface.deviations(blocks, free) ** 2 for surface, _ in last]
    rounds = MEDIAN_VARIANCE * np.var([found for _, found in last], axis=0, ddof=1) / LAST_ROUNDS
    deviations = np.sqrt(np.median(variances, axis=0) + rounds + (x - middle) ** 2)
    errors = residuals(x)
    scatter = float(MADS * np.median(np.abs(errors - np.median(errors))))
    return Fit(estimates_of(parameters, x, deviations, BLOCKS - 1, values), scatter)


@dataclass(frozen=True)
class _Surface:
    """Residuals as planes through many points about a centre.

    Decisions jump: between two points a residual has no slope worth the name, over many it has, known to within the
    scatter of the jumps. Squares of slopes are corrected for that scatter, else jumps would pass for information.

    Attributes:
        centre: residuals at the centre, shape (residuals,).
        slopes: shape (residuals, variables).
        noise: variance of the jumps, shape (residuals,).
        spread: covariance of slopes for jumps of variance 1, shape (variables, variables).
    """

    centre: Array
    slopes: Array
    noise: Array
    spread: Array

    @staticmethod
    def through(
        residuals: Callable[[Array], Array], x: Array, box: float, low: Array, high: Array, draw: np.random.Generator
    ) -> "_Surface":
        """The planes through points in a box about `x`."""
        count, k = POINTS_A_CONSTANT * len(x), len(x)
        points = np.clip(x + draw.uniform(-box, box, (count, k)), low, high)
        found = np.array([residuals(point) for point in points])
        design = np.column_stack([np.ones(count), points - x])
        coefficients = np.linalg.lstsq(design, found, rcond=None)[0]
        noise = ((found - design @ coefficients) ** 2).sum(axis=0) / (count - k - 1)
        spread = np.linalg.inv(design.T @ design)[1:, 1:]
        return _Surface(*(np.asarray(a, np.float64) for a in (coefficients[0], coefficients[1:].T, noise, spread)))

    def by_scatter(self, groups: Sequence[slice]) -> "_Surface":
        """The same in units of the scatter of each group of residuals, jumps included."""
        unit = np.ones(len(self.centre))
        for group in groups:
            errors = self.centre[group]
            variance = (MADS * np.median(np.abs(errors))) ** 2 + np.median(self.noise[group]) if errors.size else 1.0
            unit[group] = max(float(np.sqrt(variance)), LEAST_SCATTER)
        return _Surface(self.centre / unit, self.slopes / unit[:, None], self.noise / unit**2, self.spread)

    @property
    def influence(self) -> tuple[Array, Array]:
        """First derivative of the loss, and its weight, of each residual; shape (residuals,)."""
        root = np.sqrt(1 + (self.centre / LOSS_SCALE) ** 2)
        return self.centre / root, 1 / root

    def hessian(self) -> Array:
        """Curvature of the loss, corrected for jumps, shape (variables, variables)."""
        _, weight = self.influence
        return self.slopes.T @ (weight[:, None] * self.slopes) - float(weight @ self.noise) * self.spread

    def step(self, least: Array, most: Array) -> Array:
        """The step within these limits to the least loss, shape (variables,)."""
        sizes, directions = np.linalg.eigh(self.hessian())
        hessian = (directions * np.maximum(sizes, LEAST_CURVATURE**2 * sizes[-1])) @ directions.T
        gradient = self.slopes.T @ self.influence[0]

        def loss(d: Array) -> tuple[float, Array]:
            return float(d @ hessian @ d / 2 + gradient @ d), hessian @ d + gradient

        limits = [*zip(least, most, strict=True)]
        found = minimize(loss, np.clip(np.zeros(len(least)), least, most), jac=True, bounds=limits, method="L-BFGS-B")
        return found.x

    def deviations(self, blocks: NDArray[np.int64], free: NDArray[np.bool_]) -> Array:
        """Standard deviations; infinite where the run does not tell, NaN of a variable at a limit."""
        found, hessian = np.where(free, np.inf, np.nan), self.hessian()
        # What changes nothing beyond the jumps is open alone: the others' are as if it were given.
        bent = free & (np.diag(hessian) > 0.0)
        if not bent.any():
            return found
        slopes, (influence, _) = self.slopes[:, bent], self.influence
        hessian = hessian[np.ix_(bent, bent)]
        scale = np.sqrt(np.diag(hessian))
        sizes, directions = np.linalg.eigh(hessian / np.outer(scale, scale))
        told = sizes > LEAST_CURVATURE
        inverse = (directions[:, told] / sizes[told]) @ directions[:, told].T / np.outer(scale, scale)
        scores = np.array([influence[blocks == b] @ slopes[blocks == b] for b in range(BLOCKS)])
        scores -= scores.mean(axis=0)
        covariance = inverse @ (scores.T @ scores) @ inverse * BLOCKS / (BLOCKS - 1)
        # A direction that is not told leaves every constant open that has a part in it.
        is_open = (np.abs(directions[:, ~told]) > LEAST_PART).any(axis=1)
        found[bent] = np.where(is_open, np.inf, np.sqrt(np.maximum(np.diag(covariance), 0.0)))
        return found


def _scaled(name: str, parameter: Parameter, measured: Times) -> Parameter:
    """Host and front end in units of what they may be of an iteration, a TTFT: else boxes creep along valleys."""
    part_of = {HOST: measured.tpot_s[np.isfinite(measured.tpot_s)], FRONT_END: measured.ttft_s}
    if name not in part_of or not part_of[name].size:
        return parameter
    return replace(parameter, start=max(parameter.start, HOST_SHARE * float(np.median(part_of[name]))))


def _loss(errors: Array, scale: Array, groups: Sequence[slice]) -> float:
    """The loss of residuals in units of the scatter of each group of other ones."""
    total = 0.0
    for group in groups:
        if errors[group].size:
            unit = LOSS_SCALE * max(MADS * float(np.median(np.abs(scale[group]))), LEAST_SCATTER)
            total += float(np.sum(np.sqrt(1 + (errors[group] / unit) ** 2) - 1))
    return total


def _limits(parameters: Mapping[str, Parameter]) -> tuple[Array, Array]:
    """Least and most of the searched variables: logarithms of, or shares of, what each starts at."""

    def scaled(parameter: Parameter, value: float) -> float:
        share = value / parameter.start
        return float(np.log(share)) if parameter.log else share

    return (
        np.array([scaled(p, p.least) for p in parameters.values()]),
        np.array([scaled(p, p.most) for p in parameters.values()]),
    )
