"""`Work`: what requests need at least of an engine's time, and what it costs at given prices."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.bounds.step_price import LinearPrice
from sim.cost.model import CostModel
from sim.cost.roofline import RooflineCost
from sim.engine.changes import Direction
from sim.engine.limits import Limits
from traces.request import Request

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Work(NamedTuple):
    """What requests need at least, an element each: seconds by themselves, and what shares `LinearPrice.fixed_s`."""

    prompt_tokens: Floats
    attention_s: Floats
    decodes: Floats
    context_tokens: Floats
    shared_tokens: Floats
    window_tokens: Floats
    blocks: Floats
    """Summed over the decodes, those alone that no other request may share."""
    first_context: Floats
    last_context: Floats
    """Of the first and the last decode, tokens."""
    first_window: Floats
    last_window: Floats
    """Of these, within the sliding window."""

    def prefill_s(self, price: LinearPrice) -> Floats:
        """Least work of the prompts, s."""
        return price.prompt_token_s * self.prompt_tokens + self.attention_s + price.chunk_s

    def decode_s(self, price: LinearPrice, block_share: float, seat_share: float | Floats) -> Floats:
        """Least work of the decodes, s: a block held costs `block_share` of the fixed time, a seat `seat_share`."""
        return (
            (price.decode_s + seat_share * price.fixed_s) * self.decodes
            + price.context_s * (self.context_tokens - self.shared_tokens)
            + price.shared_s * self.shared_tokens
            + price.window_s * self.window_tokens
            + block_share * price.fixed_s * self.blocks
        )

    def paced_s(self, price: LinearPrice, allowed_s: Floats) -> Floats:
        """Least work of the decodes, s, where the last token comes within `allowed_s` of the first.

        In an iteration of L seconds all decodes add L - F at most to its fixed time F. So x L / (L - F) can be charged
        for one that adds x, and never more than L in all. A request's d decodes are in iterations of their own, whose
        u = L - F sum up to U = allowed - d F at most. By Cauchy and Schwarz, the sum of x F / u >= F (sum of root
        x)^2 / U. Each root is at least its chord between the first decode's and the last's.

        A sequence that is computed again gets its token in an iteration that samples: that takes F as well.
        """
        decodes = np.maximum(1.0, self.decodes)
        shared_s = (price.shared_s - price.context_s) * self.shared_tokens / decodes
        least, most = (
            np.sqrt(price.decode_s + price.context_s * context + shared_s + price.window_s * window)
            for context, window in (
                (self.first_context, self.first_window), (self.last_context, self.last_window),
            )
        )  # fmt: skip
        added_s = self.decode_s(price, 0.0, 0.0)
        roots = (added_s + self.decodes * least * most) / np.maximum(1e-30, least + most)
        # A request that adds more than there is cannot be good; what it adds is right for any.
        left_s = np.maximum(np.maximum(1e-30, added_s), allowed_s - self.decodes * price.fixed_s)
        return added_s + price.fixed_s * roots**2 / left_s


def least_work(requests: Sequence[Request], limits: Limits, cost: CostModel) -> tuple[Work, NDArray[np.bool_]]:
    """What each request needs at least, and which might be refused at once, so that none need wait for them.

    Blocks that stand in several requests may be computed by another, and read together.
    """
    size = limits.block_size
    prompts = np.array([request.prompt_tokens for request in requests])
    outputs = np.array([request.output_tokens for request in requests])
    shared = _shared_tokens(requests)
    # Some engines end a sequence at the longest context.
    decodes = np.maximum(1, np.minimum(outputs, limits.max_model_len - prompts)) - 1
    may_fail = (prompts >= limits.max_model_len) | (-(-(prompts + outputs) // size) + 1 >= limits.num_gpu_blocks)
    cached = np.minimum(shared, prompts - 1)
    contexts = _sum_to(prompts + decodes) - _sum_to(prompts)
    blocks = _blocks_to(prompts + decodes, size) - _blocks_to(prompts, size) - decodes * (shared // size)
    if (kept := limits.kept_of_prompt) is not None:
        # No less than if each token were the first after a recomputation.
        if kept.budget is not None:
            contexts = _window_to(prompts + decodes, kept.budget) - _window_to(prompts, kept.budget)
        else:
            contexts = ((contexts - decodes) * (1 - kept.dropped_share)).astype(np.int64)
        blocks = np.zeros_like(blocks)
    window = contexts
    if limits.window is not None:
        tokens = limits.window.tokens
        window = _window_to(prompts + decodes, tokens) - _window_to(prompts, tokens)
        blocks = np.zeros_like(blocks)
    if limits.states is not None:
        # Layers that attend may have more of the pool than their share of a whole block.
        blocks = np.zeros_like(blocks)
    first, last = prompts + np.minimum(decodes, 1), prompts + decodes
    most = np.iinfo(np.int64).max if limits.window is None else limits.window.tokens
    work = Work(
        *(
            column.astype(float)
            for column in (
                prompts - cached,
                _attention_s(cached, prompts - cached, cost),
                decodes,
                contexts,
                decodes * shared,
                window,
                np.maximum(0, blocks),
                first,
                last,
                np.minimum(first, most),
                np.minimum(last, most),
            )
        )
    )
    return work, may_fail


def _shared_tokens(requests: Sequence[Request]) -> Ints:
    """Prompt tokens of each whose blocks stand in other requests, too, wherever: some hit more than prefixes."""
    seen = Counter(ident for request in requests for ident in {*request.hash_ids, *request.output_hash_ids})
    found = np.zeros(len(requests), dtype=np.int64)
    for i, request in enumerate(requests):
        if request.hash_ids:
            blocks = sum(seen[ident] > 1 for ident in request.hash_ids)
            found[i] = min(blocks * request.hash_block_tokens, request.prompt_tokens)
    return found


def _sum_to(n: Ints) -> Ints:
    return n * (n + 1) // 2


def _blocks_to(n: Ints, size: int) -> Ints:
    """Blocks of contexts of 1 to n tokens, in all."""
    whole, rest = np.divmod(n, size)
    return size * _sum_to(whole) + rest * (whole + 1)


def _window_to(n: Ints, window: int) -> Ints:
    short = np.minimum(n, window)
    return _sum_to(short) + (n - short) * window


def _attention_s(cached: Ints, new: Ints, cost: CostModel) -> Floats:
    """Prompts' attention by itself, s; forms that have none price none."""
    if not isinstance(cost, RooflineCost):
        return np.zeros(len(new))
    pairs, all_pairs = np.zeros(len(new)), _sum_to(cached + new) - _sum_to(cached)
    for layers in cost.kv.layers:
        if layers.last_token_only:
            pairs += layers.num_layers * (cached + new)
        elif (window := layers.prompt_window) is not None:
            pairs += layers.num_layers * (_window_to(cached + new, window) - _window_to(cached, window))
        else:
            pairs += layers.num_layers * all_pairs
    return cost.attention_s_per_pair / cost.attention_layers * pairs + cost.index_s_per_pair * all_pairs


def seats(work: Work, limits: Limits, begin: Floats, end: Floats) -> Floats:
    """Decodes of good requests in any iteration that each request decodes in, its own included, at most.

    A good request is served from `begin` to `end`, s. Those that decode in an iteration are all served when it ends, so
    there are no more than these times that overlap then; where the most do, one of them begins.

    `max_num_seqs` where layers keep states: what these add to the fixed time is a decode's alone, and a token may come
    out of computing a sequence again.
    """
    most = np.full(len(begin), float(limits.max_num_seqs))
    decoding = work.decodes > 0.0
    if limits.states is not None or not decoding.any():
        return most
    begins, ends = np.sort(begin[decoding]), np.sort(end[decoding])
    overlap = np.searchsorted(begins, begins, side="right") - np.searchsorted(ends, begins, side="left")
    first, beyond = np.searchsorted(begins, begin[decoding]), np.searchsorted(begins, end[decoding], side="right")
    most[decoding] = np.minimum(limits.max_num_seqs, -least_within(-overlap.astype(float), first, beyond - 1))
    return most


def least_within(values: Floats, begin: Ints, end: Ints) -> Floats:
    """The least of `values[begin]` to `values[end]`, for each pair: of two spans of 2^k that cover it."""
    tables = [values]
    while 2 ** len(tables) <= len(values):
        step = 2 ** (len(tables) - 1)
        tables.append(np.minimum(tables[-1][:-step], tables[-1][step:]))
    level = np.log2(end - begin + 1).astype(int)
    found = np.empty(len(begin))
    for k, table in enumerate(tables):
        here = level == k
        found[here] = np.minimum(table[begin[here]], table[end[here] - 2**k + 1])
    return found


def paced(work: Work, prices: list[LinearPrice], limits: Limits, allowed_s: Floats) -> tuple[Floats, Floats]:
    """As `priced`, of requests that have all their tokens within `allowed_s` of the first.

    None where layers keep states: what these add to the fixed time is a decode's alone.
    """
    chosen = [price for price in prices if not price.by_blocks] if limits.states is None else []
    num = len(allowed_s)
    prefills, decodes = (
        np.array(columns).reshape(len(chosen), num).T
        for columns in ([work.prefill_s(p) for p in chosen], [work.paced_s(p, allowed_s) for p in chosen])
    )
    return prefills, decodes


def priced(
    work: Work, prices: list[LinearPrice], limits: Limits, cost: CostModel, seats: float | Floats
) -> tuple[Floats, Floats]:
    """Least prefill and decode seconds, a row a request, a column a price and a way to share its fixed time.

    A decode pays for one of the `seats` that an iteration has at most, or for the blocks that its request holds.

    In an iteration the blocks held are at most those of the pool, and those that it streams from the host, which takes
    as long as the link says. With T >= X + F and T >= h (s - B), s blocks, h seconds a block:
    T >= u X + (1 - u) h s for u = h B / (F + h B).
    """
    prefills, decodes = [], []
    per_block_s = cost.copy_s(limits.block_bytes * 2.0**20, 0, Direction.H2D) / 2.0**20
    for price in prices:
        if not price.by_blocks:
            prefills.append(work.prefill_s(price))
            decodes.append(work.decode_s(price, 0.0, 1.0 / seats))
        pool_s = per_block_s * limits.num_gpu_blocks
        if work.blocks.any() and pool_s > 0.0:
            weight = pool_s / (price.fixed_s + pool_s)
            prefills.append(weight * work.prefill_s(price))
            decodes.append(weight * work.decode_s(price, 1.0 / limits.num_gpu_blocks, 0.0))
    return np.array(prefills).T, np.array(decodes).T
