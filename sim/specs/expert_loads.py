"""`ExpertLoads`: how many tokens each GPU's experts get, and how many of these get any, where GPUs have whole experts.

Each of N tokens chooses k of E experts. An expert is chosen binomially, with k/E where all are alike; where they are
not, the i-th is as often as 1 / i^skew, at most by every token. GPUs have E/G experts each, in the order of their
numbers. Draws are a table by `seed` and N: the same question always has the same answer.
"""

import numpy as np
from numpy.typing import NDArray

from sim.specs.expert_layout import ExpertLayout

DRAWS = 32


class ExpertLoads:
    """Loads of a layout's GPUs."""

    def __init__(self, layout: ExpertLayout, num_experts: int, experts_per_token: int) -> None:
        weights = np.ones(num_experts)
        if layout.skew:
            # Which expert is the i-th.
            weights = (np.random.default_rng(layout.seed).permutation(num_experts) + 1.0) ** -layout.skew
        self.seed = layout.seed
        self.chosen = _shares(weights, experts_per_token)
        """How likely a token chooses each expert, shape (experts,)."""
        self._firsts = np.linspace(0, num_experts, layout.gpus + 1).astype(int)[:-1]

    def drawn(self, tokens: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows and experts met of each GPU in each draw, for the tokens of all ranks; shapes (draws, GPUs)."""
        random = np.random.default_rng((self.seed, tokens))
        rows = random.binomial(tokens, self.chosen, (DRAWS, len(self.chosen)))
        return np.add.reduceat(rows, self._firsts, axis=1), np.add.reduceat(rows > 0, self._firsts, axis=1)


def _shares(weights: NDArray[np.floating], experts_per_token: int) -> NDArray[np.floating]:
    """Weights as probabilities that sum up to the experts that a token chooses, none above one."""
    found = weights / weights.sum() * experts_per_token
    while (found > 1).any():
        sure = found >= 1
        found = np.where(sure, 1.0, found * (experts_per_token - sure.sum()) / found[~sure].sum())
    return found
