"""What the engine may know of output lengths in advance: LayerKV's length-class predictor (section 3.1).

A predictor maps a request to a lower bound and a median of its output length, tokens. It is a pure function of the
request and a seed, so a policy that uses it stays deterministic and the engine free of randomness.
"""

from bisect import bisect_right
from typing import Final, Literal, Protocol

from traces.request import Request

CLASSES: Final[tuple[int, ...]] = (1, 17, 33, 65, 129, 257, 513, 1025, 2049)
"""Lower bounds of the length classes, tokens."""


ACCURACY = 0.85
"""Probability that the predictor of classes names the right one, where nothing else is asked for."""


class LengthPredictor(Protocol):
    """Predicts output lengths."""

    def predict(self, request: Request) -> tuple[int, int]:
        """Lower bound and median of the output length in tokens; median 0 means no idea."""
        ...


class OraclePredictor:
    """Knows every output length: the upper bound of what prediction can give."""

    def predict(self, request: Request) -> tuple[int, int]:
        return request.output_tokens, request.output_tokens


class NoPredictor:
    """Knows nothing: every sequence may end at its next token, none is expected to."""

    def predict(self, request: Request) -> tuple[int, int]:
        return 1, 0


class BucketPredictor:
    """Names the right length class with probability `accuracy`, else one of the neighbouring classes."""

    def __init__(self, accuracy: float, seed: int) -> None:
        self.accuracy, self.seed = accuracy, seed

    def predict(self, request: Request) -> tuple[int, int]:
        classes = CLASSES
        index = max(0, bisect_right(classes, request.output_tokens) - 1)
        draw = _uniform(self.seed, request.request_id)
        if draw >= self.accuracy:
            step = 1 if (draw - self.accuracy) * 2 >= 1.0 - self.accuracy else -1
            if not 0 <= index + step < len(classes):
                step = -step
            index += step
        lower = classes[index]
        upper = classes[index + 1] - 1 if index + 1 < len(classes) else 2 * lower
        return lower, (lower + upper) // 2


def _uniform(seed: int, key: int) -> float:
    """A number in [0, 1) that depends on `seed` and `key` alone (splitmix64)."""
    x = (seed * 0x9E3779B97F4A7C15 + key + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    x = (x ^ x >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return ((x ^ x >> 31) >> 11) / (1 << 53)


def build_predictor(kind: Literal["oracle", "bucket", "none"], accuracy: float, seed: int) -> LengthPredictor:
    """The predictor of that name: `oracle`, `bucket` (with `accuracy`) or `none`."""
    if kind == "oracle":
        return OraclePredictor()
    if kind == "none":
        return NoPredictor()
    return BucketPredictor(accuracy, seed)
