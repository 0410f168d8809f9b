"""`LinearPrice`: what an iteration takes at least, as a linear function of what is in it. `step_prices` has several.

The roofline is convex in what it counts, so each of its tangents lies below it: with (c^p + m^p)^(1/p) >= a c + b m
wherever a^q + b^q <= 1, 1/p + 1/q = 1. Many tangents together come as near as one likes; any mix of them is valid, too.
Where products have measured factors, each tangent is scaled to stay below them. What a decode iteration costs however
small it is (weights, launches, host) is `fixed_s`; how it is shared is for the reader to say.
"""

from itertools import pairwise, product
from math import cos, inf, pi, sin
from typing import NamedTuple

from sim.cost.forms import LinearCost, PaperCost
from sim.cost.model import CostModel, ridge
from sim.cost.roofline import RooflineCost
from sim.cost.table import TableCost
from sim.engine.plan import IterationPlan

LINEAR_TANGENTS = 13
HEAD_TANGENTS = 4
EXPERT_TANGENTS = 5


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
    prices = _tangents(cost)
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


def _tangents(cost: RooflineCost) -> list[LinearPrice]:
    base_s, sequence_s = _host(cost)
    found = []
    # Padding that not all decodes pay is left out.
    context_s, padding_s = cost.full_s_per_token, cost.kv_padding_s if cost.most_padded == inf else 0.0
    if cost.tile_tokens and cost.attention_exponent > 1.0:
        # Beside a prompt tiles are computed while KV is read: the longer counts, and the shorter is always due.
        tile_s = cost.tile_tokens * cost.attention_s_per_pair
        context_s, padding_s = min(context_s, tile_s), min(padding_s, tile_s * cost.tile_padding_tokens)
    linear, head = tangents(cost.linear_exponent, LINEAR_TANGENTS), tangents(cost.exponent, HEAD_TANGENTS)
    if cost.factor_points:
        shares = [_share_below(cost, *tangent) for tangent in linear]
        linear = [(share * c, share * m) for share, (c, m) in zip(shares, linear, strict=True)]
    experts = [(0.0, 0.0)]
    if cost.expert_layers:
        # At p = 1 they are all the same.
        experts = sorted(set(tangents(cost.expert_exponent, EXPERT_TANGENTS)))
    for (linear_c, linear_m), (head_c, head_m), (expert_c, expert_m), growing, (reduce_s, reduced_s) in product(
        linear, head, experts, (0.0, 1.0), cost.least_all_reduces()
    ):
        elementwise_s = growing * cost.elementwise_s_per_token
        token_s = linear_c * cost.linear_s_per_token + linear_m * cost.activations_s_per_token + elementwise_s
        token_s += cost.added_s_per_token + expert_c * cost.expert_s_per_token + cost.expert_activation_s_per_token
        # Of the experts, what one token meets.
        weights_s = cost.linear_weights_s - cost.routed_weights_s * cost.idle_share
        fixed_s = expert_m * cost.expert_weights_s * (1.0 - cost.idle_share) + cost.expert_least_s
        fixed_s += linear_m * weights_s + (1.0 - growing) * cost.elementwise_least_s + cost.overhead_s + base_s
        fixed_s += head_m * cost.head_weights_s + reduce_s
        state_s = state_token_s = 0.0
        if cost.delta_net:
            state_s, state_token_s = cost.delta_net.decode_s_per_sequence, cost.delta_net.least_s_per_token
            fixed_s += cost.delta_net.decode_launch_s
        head_s = head_c * cost.head_s_per_sample + head_m * cost.logits_s_per_sample + cost.sampling_s_per_sample
        found.append(
            LinearPrice(
                # Layers that see a prompt's last token only may see none of these.
                token_s * (1.0 - cost.last_token_share) + reduced_s + state_token_s,
                sequence_s,
                token_s + reduced_s + head_s + padding_s + sequence_s + state_s,
                context_s,
                max(0.0, context_s - cost.unread_s_per_token),
                cost.window_s_per_token,
                fixed_s,
            )
        )
    return found


def _share_below(cost: RooflineCost, compute: float, memory: float) -> float:
    """Share of a tangent of the ridge that the products' price, its factors included, never falls below.

    Ridge over tangent falls up to where they touch, and rises after. Factors lie between those of the points about.
    """
    p, sizes, factors = cost.linear_exponent, *zip(*cost.factor_points, strict=True)
    if not 1.0 < p < inf:
        # Its tangents are never above such a ridge.
        return min(factors)
    touch = inf
    if memory > 0.0:
        ratio = (compute / memory) ** (1.0 / (p - 1.0))
        slope = cost.linear_s_per_token - ratio * cost.activations_s_per_token
        touch = ratio * cost.linear_weights_s / slope if slope > 0.0 else inf

    def over(tokens: float) -> float:
        if tokens == inf:
            return 1.0
        compute_s = tokens * cost.linear_s_per_token
        memory_s = cost.linear_weights_s + tokens * cost.activations_s_per_token
        return ridge(compute_s, memory_s, p) / (compute * compute_s + memory * memory_s)

    ends, known = [1.0, *sizes, inf], [factors[0], *factors, factors[-1]]
    return min(
        min(pair) * over(min(max(touch, low), high))
        for (low, high), pair in zip(pairwise(ends), pairwise(known), strict=True)
    )


def _beside_prompts(
    cost: RooflineCost, prices: list[LinearPrice], block_size: int, num_blocks: int
) -> list[LinearPrice]:
    """Prices with one tangent for prompts' tokens and another for the rest, where decodes beside a prompt cost more.

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


def tangents(exponent: float, count: int) -> list[tuple[float, float]]:
    """(a, b) with ridge(c, m) >= a c + b m for all c, m >= 0: `count` slopes from memory alone to computing alone."""
    if exponent == inf:
        return [(i / (count - 1), 1 - i / (count - 1)) for i in range(count)]
    found = []
    for i in range(count):
        angle = pi / 2 * i / (count - 1)
        x, y = max(0.0, sin(angle)), max(0.0, cos(angle))
        # The gradient of the ridge along the ray c : m = x : y.
        length = (x**exponent + y**exponent) ** (1.0 / exponent)
        found.append(((x / length) ** (exponent - 1.0), (y / length) ** (exponent - 1.0)))
    return found
