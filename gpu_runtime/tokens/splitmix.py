"""SplitMix64 (Steele et al. 2014): a generator whose nth number needs none of those before it."""

import numpy as np

BITS = 1 << 64
GAMMA = np.uint64(0x9E3779B97F4A7C15)


def counts(size: int) -> np.ndarray:
    """[size] states of the generator that starts at 0; `mix` makes its numbers of them."""
    return np.arange(1, size + 1, dtype=np.uint64) * GAMMA


def mix(values: np.ndarray) -> np.ndarray:
    """The finaliser: every bit of a uint64 changes half of the result's."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
