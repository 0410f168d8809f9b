"""`LinearPrice`: what an iteration takes at least, as a linear function of what is in it. `step_prices` has several.

What an iteration's layers take depends on its tokens alone, whatever they are of. Of a slope, the highest straight line
below that is b N + min over n of (f(n) - b n), whatever f is; several slopes come near f wherever it bends, and any mix
of their prices is valid, too. What a decode iteration costs however small it is (weights, launches, host) is `fixed_s`;
how it is shared is for the reader to say.
"""

from collections.abc import Callable, Sequence
from itertools import product
from math import inf
from typing import NamedTuple

import numpy as np

from sim.cost.forms import LinearCost, PaperCost
from sim.cost.model import CostModel
from sim.cost.roofline import RooflineCost
from sim.cost.table import TableCost
from sim.engine.plan import IterationPlan

MOST_TOKENS, MOST_SAMPLED = 8192, 2048
"""From one before these on what layers, and LM head and sampler, take is convex."""
BENDS, HEAD_BENDS = tuple(round(2 ** (k / 3)) for k in range(9, 34)), (64, 256, 1024)
"""From each to twice as many a line's slope is measured."""


class LinearPrice(NamedTuple):
    """Seconds that an iteration takes at least; `fixed_s` where any sequence decodes in it.

    Contexts count the token being fed. `context_s` is a token that only its own sequence reads, `shared_s` one that
    others in the iteration may read with it, `window_s` one within a sliding window.
    """

    prompt_token_s: float
    """Attention left out, which is a prompt's own whatever is beside it."""
    chunk_s: float
    decode_s: float
    context_s: float
    shared_s: float
    window_s: float
    fixed_s: float
    by_blocks: bool = False
    """Whether `fixed_s` holds for shares by blocks of the pool alone: only as much of it as the pool is full."""

    def least_s(self, plan: IterationPlan, attention_s: float) -> float:
        """Of a plan whose prompts attend for `attention_s`: never more than it is priced."""
        window = plan.decode_window.tokens if plan.decode_window is not None else plan.decode_context_tokens
        shared = plan.decode_shared_tokens
        return (
            self.prompt_token_s * plan.prefill_tokens
            + attention_s
            + self.chunk_s * len(plan.chunks)
            + self.decode_s * plan.num_decodes
            + self.context_s * (plan.decode_context_tokens - shared)
            + self.shared_s * shared
            + self.window_s * window
            + (self.fixed_s if plan.num_decodes else 0.0)
        )


def step_prices(cost: CostModel, block_size: int, num_blocks: int) -> list[LinearPrice]:
    """Linear prices that no iteration of this cost model goes below; none where its form is not known to have any."""
    if isinstance(cost, (TableCost, PaperCost)):
        return []
    if isinstance(cost, LinearCost):
        return [_linear(cost)]
    if not isinstance(cost, RooflineCost):
        return []
    prices = _roofline(cost)
    return prices + _beside_prompts(cost, prices, block_size, num_blocks)


def _host(cost: CostModel) -> tuple[float, float]:
    """Host time that adds to every iteration: its base, and for each sequence."""
    return (0.0, 0.0) if cost.host is None or cost.host.hidden else (cost.host.base_s, cost.host.s_per_sequence)


def _linear(cost: LinearCost) -> LinearPrice:
    base_s, sequence_s = _host(cost)
    window = cost.window_share
    # Chunks of one token have the least squares. With a prompt beside them decodes pay p0 + p1, not d0.
    token_s = cost.p1 + cost.p2
    context_s = cost.d2 * cost.context_share
    fixed_s = base_s + min(cost.d0, cost.p0)
    return LinearPrice(token_s, sequence_s, cost.d1 + sequence_s, context_s, 0.0, cost.d2 * window, fixed_s)


def _roofline(cost: RooflineCost) -> list[LinearPrice]:
    base_s, sequence_s = _host(cost)
    found = []
    # Padding that not all decodes pay is left out.
    context_s, padding_s = cost.full_s_per_token, cost.kv_padding_s if cost.most_padded == inf else 0.0
    if cost.tile_tokens and cost.attention_exponent > 1.0:
        # Beside a prompt tiles are computed while KV is read: the longer counts, and the shorter is always due.
        tile_s = cost.tile_tokens * cost.attention_s_per_pair
        context_s, padding_s = min(context_s, tile_s), min(padding_s, tile_s * cost.tile_padding_tokens)
    # From the last of the measured factors on, it stays.
    most = max([MOST_TOKENS, *(int(tokens) + 1 for tokens, _ in cost.factor_points)])
    layers, head = lines_below(cost.linear_s, most, BENDS), lines_below(cost.head_s, MOST_SAMPLED, HEAD_BENDS)
    for (layers_s, token_s), (head_s, sample_s), (reduce_s, reduced_s) in product(
        layers, head, cost.least_all_reduces()
    ):
        fixed_s = layers_s + head_s + reduce_s + cost.overhead_s + base_s
        state_s = state_token_s = 0.0
        if cost.delta_net:
            state_s, state_token_s = cost.delta_net.decode_s_per_sequence, cost.delta_net.least_s_per_token
            fixed_s += cost.delta_net.decode_launch_s
        found.append(
            LinearPrice(
                # Layers that see a prompt's last token only may see none of these.
                token_s * (1.0 - cost.last_token_share) + reduced_s + state_token_s,
                sequence_s,
                token_s + reduced_s + sample_s + padding_s + sequence_s + state_s,
                context_s,
                max(0.0, context_s - cost.unread_s_per_token),
                cost.window_s_per_token,
                fixed_s,
            )
        )
    return found


def _beside_prompts(
    cost: RooflineCost, prices: list[LinearPrice], block_size: int, num_blocks: int
) -> list[LinearPrice]:
    """Prices with one line for prompts' tokens and another for the rest, where decodes beside a prompt cost more.

    One kernel for both computes a tile of rows for each decode, which takes `tile_s` a token of its context longer than
    the price says. An iteration without prompts takes at least price a; with prompts it takes b and the tiles. Let the
    tokens be b's and the fixed time a's, F_a s / B with s of B blocks held. With F_a <= F_b + tile_s block_size B, the
    tiles of s blocks make up for what b's fixed time lacks, but for what the last block of each decode may not hold:
    that is taken off its own price.
    """
    tile_s = cost.tile_tokens * cost.attention_s_per_pair
    if cost.attention_exponent > 1.0:
        tile_s -= prices[0].context_s
    if tile_s <= 0.0:
        return []
    found = []
    most_s = tile_s * block_size * num_blocks
    for a in prices:
        b = max((b for b in prices if a.fixed_s <= b.fixed_s + most_s), key=lambda b: b.prompt_token_s)
        decode_s = max(0.0, min(a.decode_s, b.decode_s - tile_s * block_size))
        found.append(a._replace(prompt_token_s=b.prompt_token_s, decode_s=decode_s, by_blocks=True))
    return found


def lines_below(seconds: Callable[[int], float], most: int, bends: Sequence[int]) -> list[tuple[float, float]]:
    """Straight lines that `seconds` of 1, 2, ... tokens never go below: s in all and for each token, none negative.

    Up to `most` tokens it may bend as it likes; from one before on, it has to be convex. Bends: half of them at most.
    """
    tokens = np.arange(1, most + 1)
    values = np.array([seconds(count) for count in tokens.tolist()])
    # No line is steeper than what comes beyond `most`.
    last = float(values[-1] - values[-2])
    rises = [float(values[2 * bend - 1] - values[bend - 1]) / bend for bend in bends]
    slopes = sorted({min(max(0.0, rise), last) for rise in [0.0, *rises, last]})
    lines = [(float((values - slope * tokens).min()), slope) for slope in slopes]
    through_zero = 0.0, min(last, float((values / tokens).min()))
    return [through_zero, *(line for line in lines if line[0] > 0.0)]
