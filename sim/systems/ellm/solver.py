"""The best batch size b and uncached ratio r of a step (eLLM Eq. 1 and 5), exactly.

Sequences are served in order, so that a batch of b is the first b of them. What is kept on the GPU,

    sum of s (1 - r) + m r W <= M        (tokens; m: the scratch of an uncached token, of which there are r W)

is linear in r, and T(b, r) rises with r: for each b the least r that memory allows is best, a closed form. The best of
all b is then a minimum over a vector: of those that fit whole (r = 0) whatever the configuration, of the larger ones
one for each configuration, as far as T(b, 0) keeps to the budget.
"""

from collections.abc import Sequence as Seq
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.systems.ellm.equations import CONFIGURATIONS, Configuration, Floats, StepCosts


class Memory(NamedTuple):
    """Room for KV, in tokens of all layers. The defaults are the paper's: no host bound, nothing lost in blocks.

    `scratch` is M_o by configuration, tokens' worth for each uncached one, and `hosted` what of each lies on the host
    (None: the layers that are swapped).
    """

    gpu_tokens: float
    scratch: tuple[float, ...]
    host_tokens: float = np.inf
    hosted: tuple[float, ...] | None = None
    lost_tokens: int = 0
    """Of each sequence that has some uncached, what whole tokens and blocks lose: a block's."""
    least_ratio: float = 0.0
    most_ratio: float = 1.0
    """Of tokens that are uncached in any case, and that may be."""
    by_longest: bool = False
    """Whether M_o takes all sequences to be as long as the longest, as printed; else by their own lengths."""


class Batch:
    """Sequences in the order in which they are served, as sums over the first b of them.

    Args:
        lengths: tokens of each, the one being fed included.
        block_tokens: of a block; where it is 1 nothing is lost.
    """

    def __init__(self, lengths: Seq[int] | Floats, block_tokens: int = 1) -> None:
        values = np.asarray(lengths, dtype=np.float64)
        self.seqs = np.arange(1.0, len(values) + 1.0)
        self.tokens = np.cumsum(values)
        self.lengths = values
        self.stored = self.tokens
        if block_tokens > 1:
            self.stored = np.cumsum(np.ceil(values / block_tokens)) * block_tokens

    @cached_property
    def squares(self) -> Floats:
        """Squared tokens of the first b, summed."""
        return np.cumsum(self.lengths * self.lengths)

    @cached_property
    def longest(self) -> Floats:
        """Most tokens of the first b."""
        return np.maximum.accumulate(self.lengths)

    def sizes(self, first: int, last: int) -> "Batch":
        """The same sums, for batches of `first` + 1 to `last` sequences only."""
        found = object.__new__(Batch)
        for name in ("seqs", "tokens", "lengths", "stored", "squares", "longest"):
            setattr(found, name, getattr(self, name)[first:last])
        return found


class Choice(NamedTuple):
    """What a step is to do."""

    batch_size: int
    ratio: float
    configuration: Configuration
    step_s: float
    """T(b, r)."""

    @property
    def s_per_token(self) -> float:
        """T / b, what Eq. 5 minimises."""
        return self.step_s / self.batch_size


def least_ratios(batch: Batch, memory: Memory) -> Floats:
    """The least feasible r for each configuration (rows) and batch size; above 1 or infinite where there is none."""
    scratch = np.array(memory.scratch)[:, None]
    lost = memory.lost_tokens * batch.seqs * (1.0 + scratch)
    excess = batch.stored + lost - memory.gpu_tokens
    freed = batch.tokens - scratch * (batch.seqs * batch.longest if memory.by_longest else batch.tokens)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(freed > 0.0, excess / freed, np.inf)
    least = memory.least_ratio
    enough = excess - least * freed <= 0.0 if least else batch.stored <= memory.gpu_tokens
    return np.where(enough, least, np.maximum(ratios, least))


def feasible_ratios(
    batch: Batch, memory: Memory, configurations: tuple[Configuration, ...] = CONFIGURATIONS
) -> tuple[Floats, NDArray[np.bool_]]:
    """`least_ratios`, and where these are feasible: not above the most, and with room for them on the host."""
    ratios = least_ratios(batch, memory)
    hosted = np.array(memory.hosted or [1.0 - c.recomputed_share for c in configurations])[:, None]
    # What is on its way back is held beside, by any configuration.
    copied = hosted * ratios * batch.tokens + (ratios > 0.0) * memory.lost_tokens * batch.seqs * hosted.max()
    return ratios, (ratios <= memory.most_ratio) & (copied <= memory.host_tokens)


def best(
    times: StepCosts,
    batch: Batch,
    memory: Memory,
    budget_s: float,
    *,
    least: int = 1,
    configurations: tuple[Configuration, ...] = CONFIGURATIONS,
    all_recomputed: bool = False,
    largest: bool = False,
    fused: bool = True,
    overlapped: bool = True,
) -> Choice | None:
    """The b >= `least`, r and configuration with the least T/b, or (`largest`) with the largest b, and its least T.

    Args:
        times, batch, memory: what T is made of, the sequences, and the room.
        budget_s: that T may take, SLO - WT_max (Eq. 1).
        configurations: to choose from, as many as `memory.scratch` has.
        all_recomputed: whether T takes all layers to be computed again, as Eq. 4 does.
        fused, overlapped: as for `StepCosts.step_s`.

    Returns:
        None where no b >= `least` is feasible. Of equal ones the smallest b.
    """
    # T(b, 0) rises with b. Sizes up to `whole` need nothing uncached.
    cached_s = times.cached_s(batch.seqs, batch.tokens)
    end = int(np.searchsorted(cached_s, budget_s, side="right"))
    whole = 0 if memory.least_ratio else min(end, int(np.searchsorted(batch.stored, memory.gpu_tokens, side="right")))
    found = None
    first = max(least - 1, 0)
    if first < whole:
        place = whole - 1 if largest else first + int(np.argmin(cached_s[first:whole] / batch.seqs[first:whole]))
        found = Choice(place + 1, 0.0, configurations[0], float(cached_s[place]))
    first = max(first, whole)
    if first >= end:
        return found
    batch = batch.sizes(first, end)
    ratios, feasible = feasible_ratios(batch, memory, configurations)
    again = np.array([[c.recomputed_share] for c in configurations])
    ratios = np.where(feasible, ratios, 0.0)
    shares = (0.0, 1.0) if all_recomputed else (1.0 - again, again)
    sums = batch.seqs, batch.tokens, batch.squares
    step_s = times.step_s(*sums, ratios, shares, fused=fused, overlapped=overlapped)
    feasible &= step_s <= budget_s
    value = np.where(feasible, step_s if largest else step_s / batch.seqs, np.inf)
    if largest:
        places = np.flatnonzero(feasible.any(axis=0))
        if not len(places):
            return found
        place = int(places[-1])
        row = int(np.argmin(value[:, place]))
    else:
        row, place = divmod(int(np.argmin(value)), value.shape[1])
        if not feasible[row, place] or (found and found.s_per_token <= value[row, place]):
            return found
    return Choice(first + place + 1, float(ratios[row, place]), configurations[row], float(step_s[row, place]))


def least_bubble(
    times: StepCosts, tokens: float, squares: float, ratio: float, configurations: tuple[Configuration, ...]
) -> int:
    """Place of the configuration whose window has the least difference of Eq. 6 and 7 (section 4.3.1)."""
    return int(np.argmin([times.bubble(tokens, squares, ratio, c) for c in configurations]))
