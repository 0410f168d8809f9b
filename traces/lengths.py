"""Parametric models of requests: two quantile functions joined by a Gaussian copula, and the arrivals' mean and CV.

A model is a small JSON file of `traces/models/`. A marginal is a list of (probability, tokens) knots; between knots the
logarithm of the tokens is linear in the normal score of the probability, which is exact for a log-normal and follows
any smooth shape with a few dozen knots. The scores of prompt and output are standard normals with correlation
`copula_correlation` (chosen so that the correlation of the token counts themselves is the trace's).

What is measured and what is assumed: `azure-conv-2023` is `fit` of the published trace, all of it measured. Of
`sharegpt` only the means (161 and 338 tokens), the range and vLLM's filter are published; its log-normal shapes, the
independence of the lengths and the Poisson arrivals are assumed. Each model file says so in `about`. Neither keeps the
order of the requests: draws are independent, so a trace's slow changes of load and of lengths are not in them.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.errors import TraceError
from traces.request import Request

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
MODELS = Path(__file__).parent / "models"
# Dense in the tails, where log-tokens bend most; the ends stand for the shortest and the longest request.
_TAIL = (0.0001, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.035)
KNOTS = (*_TAIL, *(round(0.025 * i, 3) for i in range(2, 39)), *(round(1 - p, 4) for p in reversed(_TAIL)))


def uniform_lengths(random: np.random.Generator, mean: int, ratio: float, count: int) -> IntArray:
    """Draw `count` lengths in tokens, uniform within 1 +- `ratio` of `mean`, each at least 1."""
    return random.integers(max(1, round(mean * (1 - ratio))), round(mean * (1 + ratio)), count, endpoint=True)


@dataclass(frozen=True, slots=True)
class LengthModel:
    """Joint distribution of prompt and output tokens; the scores are the knots' normal scores."""

    scores: FloatArray
    log_prompts: FloatArray
    log_outputs: FloatArray
    correlation: float

    def sample(self, random: np.random.Generator, count: int) -> tuple[IntArray, IntArray]:
        """Return `count` prompt and output lengths in tokens, each at least 1."""
        first, second = random.standard_normal((2, count))
        return self.at(first, self.correlation * first + (1 - self.correlation**2) ** 0.5 * second)

    def at(self, prompt_scores: FloatArray, output_scores: FloatArray) -> tuple[IntArray, IntArray]:
        """Return the lengths at given normal scores."""
        prompts = np.exp(np.interp(prompt_scores, self.scores, self.log_prompts))
        outputs = np.exp(np.interp(output_scores, self.scores, self.log_outputs))
        return np.maximum(np.rint(prompts), 1).astype(np.int64), np.maximum(np.rint(outputs), 1).astype(np.int64)


@dataclass(frozen=True, slots=True)
class WorkloadModel:
    """A shipped model: its lengths, and the rate (1/s) and burstiness of its arrivals where they are known."""

    lengths: LengthModel
    rate_per_s: float | None
    burstiness: float


def load_model(name: str) -> WorkloadModel:
    """Return the shipped model `name` (a file of `traces/models/`)."""
    values: dict[str, Any] = json.loads((MODELS / f"{name}.json").read_text(encoding="utf-8"))
    arrivals = values["arrivals"]
    rate = None if arrivals["mean_interval_s"] is None else 1.0 / arrivals["mean_interval_s"]
    lengths = length_model(
        values["probabilities"], values["prompt_tokens"], values["output_tokens"], values["copula_correlation"]
    )
    return WorkloadModel(lengths, rate, arrivals["cv"] ** -2)


def length_model(
    probabilities: Iterable[float], prompts: Iterable[float], outputs: Iterable[float], correlation: float
) -> LengthModel:
    """Build a model from its knots."""
    scores = np.array([NormalDist().inv_cdf(probability) for probability in probabilities])
    return LengthModel(scores, np.log(np.array(list(prompts))), np.log(np.array(list(outputs))), correlation)


def fit(requests: Iterable[Request]) -> dict[str, object]:
    """Fit a model to a trace: quantiles at `KNOTS`, the correlation of tokens by bisection, intervals' mean and CV.

    Holds the trace in memory. Returns the fields of a model file. Raises `TraceError` for fewer than 100 requests.
    """
    table = np.array([(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in requests])
    if len(table) < 100:
        raise TraceError(f"{len(table)} requests are too few to fit a model to; give 100 or more")
    arrivals, prompts, outputs = table.T
    # Percentiles of the sample, but at both ends its extremes: no request is longer than the longest.
    inner = np.clip((np.array(KNOTS) - KNOTS[0]) / (KNOTS[-1] - KNOTS[0]), 0.0, 1.0)
    levels = np.array([inner[0], *KNOTS[1:-1], inner[-1]])
    knots = [[round(float(q), 2) for q in np.quantile(column, levels)] for column in (prompts, outputs)]
    wanted = float(np.corrcoef(prompts, outputs)[0, 1])
    intervals = np.diff(arrivals)
    return {
        "probabilities": list(KNOTS),
        "prompt_tokens": knots[0],
        "output_tokens": knots[1],
        "copula_correlation": round(_copula_correlation(knots[0], knots[1], wanted), 4),
        "arrivals": {
            "mean_interval_s": round(float(intervals.mean()), 7),
            "cv": round(float(intervals.std() / intervals.mean()), 4),
        },
    }


def _copula_correlation(prompts: list[float], outputs: list[float], wanted: float) -> float:
    """Return the correlation of scores that gives the token counts the correlation `wanted`."""
    scores = np.random.default_rng(0).standard_normal((2, 200_000))
    low, high = -0.999, 0.999
    for _ in range(30):
        middle = (low + high) / 2
        model = length_model(KNOTS, prompts, outputs, middle)
        sample = model.at(scores[0], middle * scores[0] + (1 - middle**2) ** 0.5 * scores[1])
        low, high = (middle, high) if np.corrcoef(*sample)[0, 1] < wanted else (low, middle)
    return (low + high) / 2
