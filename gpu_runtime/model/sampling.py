"""Which token comes next where a request asks for more than the likeliest one.

A token is drawn with one number, which depends on the request's seed and on the token's position alone: so it is the
same in whatever batch, and after whatever preemption, the request is computed. Probabilities are summed by token id,
not by rank, so that roundings which differ from batch to batch move the borders between tokens, but swap none.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from gpu_runtime.device_stream import to_device
from gpu_runtime.model.decoder import Scores
from gpu_runtime.tokens.splitmix import BITS, GAMMA, mix

GREEDY_BELOW, LEAST_TEMPERATURE = 1e-5, 1e-2
"""Below the one a temperature is 0, below the other it is that one, as in vLLM (`_SAMPLING_EPS`, `_MAX_TEMP`)."""
BYTES_PER_LOGIT = 48
"""Of the tensors that `_draw` has at a time: sorted with their ranks, masked, and twice in double precision."""
WORK_BYTES = 128 * 2**20
"""What drawing takes of the device at most, but for a single row of a vocabulary that needs more."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How a request's tokens are chosen; names, meaning and order of the filters are vLLM's.

    Attributes:
        temperature: divides logits; 0: the likeliest token, and nothing else counts.
        top_p: of the likeliest tokens as many as together have this probability.
        top_k: the likeliest tokens, so many; 0 or -1: all.
        min_p: tokens that have at least this share of the likeliest one's probability.
        seed: of the draws; None: the request is given one.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature < GREEDY_BELOW


GREEDY = Sampling(temperature=0.0)


def choose(scores: Scores, samplings: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    """The next token of each row, [rows]: `scores.likeliest`, where what is drawn replaces it. Logits of rows that draw
    nothing are not read.

    Args:
        scores: of the tokens that come next.
        samplings: of each row; those that draw have a seed.
        positions: of those tokens in their sequences, whose lengths these are until then.
    """
    logits, chosen = scores
    drawn = [row for row, sampling in enumerate(samplings) if not sampling.is_greedy]
    size = max(1, WORK_BYTES // (BYTES_PER_LOGIT * logits.shape[1]))
    for start in range(0, len(drawn), size):
        few = drawn[start : start + size]
        rows = to_device(few, logits.device)
        chosen[rows] = _draw(logits[rows], [samplings[row] for row in few], [positions[row] for row in few])
    return chosen


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """A number of [0, 1) for each seed and position, [rows]: SplitMix64's, in steps of 2^-32."""
    start = mix(np.array([seed % BITS for seed in seeds], dtype=np.uint64))
    numbers = mix(start + (np.array(positions, dtype=np.uint64) + np.uint64(1)) * GAMMA)
    return (numbers >> np.uint64(32)).astype(np.float64) / 2**32


def _draw(logits: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    """[rows], each drawn from those of its tokens that are left by min_p, then top_k, then top_p of what is left."""
    device, size = logits.device, logits.shape[1]
    scaled = logits.float() / _column([max(s.temperature, LEAST_TEMPERATURE) for s in samplings], device)
    if any(s.min_p > 0 for s in samplings):
        share = _column([s.min_p for s in samplings], device).log()
        scaled = scaled.masked_fill(scaled < scaled.amax(dim=1, keepdim=True) + share, -torch.inf)
    if any(0 < s.top_k < size or s.top_p < 1 for s in samplings):
        ranked = scaled.sort(dim=1, descending=True).values
        most = to_device([min(s.top_k, size) if s.top_k > 0 else size for s in samplings], device)[:, None]
        # Equals of the last one stay: which of them comes first is an accident.
        ranked = ranked.masked_fill(ranked < ranked.gather(1, most - 1), -torch.inf)
        before = ranked.softmax(dim=1, dtype=torch.float64).cumsum(dim=1).roll(1, dims=1)
        before[:, 0] = 0.0
        # Rows that keep all do so whatever the sum's rounding.
        reach = _column([s.top_p if s.top_p < 1 else 2.0 for s in samplings], device)
        kept = ((before < reach) & ranked.isfinite()).sum(dim=1, keepdim=True).clamp(min=1)
        scaled = scaled.masked_fill(scaled < ranked.gather(1, kept - 1), -torch.inf)
    reached = scaled.softmax(dim=1, dtype=torch.float64).cumsum(dim=1)
    seeds = [s.seed for s in samplings if s.seed is not None]
    if len(seeds) < len(samplings):
        raise ValueError("a request whose tokens are drawn has no seed")
    aim = to_device(uniforms(seeds, positions), device)[:, None] * reached[:, -1:]
    return torch.searchsorted(reached, aim, right=True).squeeze(1)


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return to_device(np.array(values, dtype=np.float32), device)[:, None]
