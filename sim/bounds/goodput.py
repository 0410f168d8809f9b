"""The most goodput that any scheduler could reach on a trace, clairvoyant ones included, with a certificate.

Every iteration takes at least what a `LinearPrice` says, so that each request has a least work. A request that meets
its SLOs has its prompt computed within [a, a + TTFT] and its last token by a + TTFT + TPOT (o - 1). With the time cut
into bins, a price y >= 0 for a second of each bin bounds how many can:

    sum of y_t length_t + sum over requests of max(0, 1 - prefill_i min y - decode_i min y)

with the least y of the bins where its prefill, and where its decode may be. This holds for any y (weak duality), so
the solver that finds good ones (HiGHS) need not be trusted. Bins are longer than TTFTs, and a share of a request is
none: instead of all whose terms are positive, the best of those whose prompts fit their windows one after another are
summed (`most_in_time`: the bins alone are relaxed). The run lasts until the last has arrived and had its own
iterations, and until the work of all is done: goodput is at most that count over the longer of the two. That holds for
runs that serve every request that fits. Prompts that an engine refuses count neither way: of `max_model_len`
tokens or more in vLLM v1, of more in vLLM 0.5.5 without chunks.

A sequence that decodes holds blocks or streams them from the host, and a seat. Where its last token must come soon
after its first, what it adds to short iterations counts more (`Work.paced_s`), and where few others may be served
beside it, it pays for more of an iteration's fixed time (`seats`). That is so of good requests alone, and the duration
does not know of it. Not covered: restoring from hidden states, decoding several tokens at a time, and tokens that come
out of computing again where most of the context is cached.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix, csr_matrix

from sim.bounds.first_tokens import most_in_time, positive
from sim.bounds.step_price import step_prices
from sim.bounds.work import Floats, Ints, least_within, least_work, paced, priced, seats
from sim.cost.model import CostModel
from sim.engine.limits import Limits
from traces.request import Request
from traces.slos import SLOs

BINS = 80
LEAST_BIN_S = 0.5
SHARES = (0.0, 0.5, 1.0)
"""Of the solver's prices, that are tried."""
SAMPLE = 400
"""Requests, evenly spaced, that the mix of prices is chosen by; the bound is over all."""
TIE_S = 1e-6
"""Times of a run that differ by less count as equal."""


class GoodputBound(NamedTuple):
    """What no scheduler exceeds."""

    good_requests: float
    """Requests that meet their SLOs."""
    least_duration_s: float
    """From the first arrival to the last token."""

    @property
    def goodput(self) -> float:
        """Good requests a second."""
        return self.good_requests / self.least_duration_s if self.least_duration_s > 0.0 else float("inf")


def goodput_bound(
    requests: Sequence[Request], limits: Limits, cost: CostModel, slo: SLOs, num_engines: int = 1
) -> GoodputBound | None:
    """The bound for engines of these limits and prices; None where prices have no linear ones, or no SLO is given."""
    prices = step_prices(cost, limits.block_size, limits.num_gpu_blocks)
    slos = [slo if request.slos is None else request.slos for request in requests]
    if not prices or not requests or all(one == SLOs() for one in slos):
        return None
    work, may_fail = least_work(requests, limits, cost)
    most_tokens = np.inf if limits.enable_chunked_prefill else limits.max_model_len
    if limits.stops_at_max_model_len:
        most_tokens = limits.max_model_len - 1
    served = np.array([request.prompt_tokens <= most_tokens for request in requests])
    prefills, decodes = priced(work, prices, limits, cost, limits.max_num_seqs)
    arrivals = np.array([request.arrival_s for request in requests])
    outputs = np.array([request.output_tokens for request in requests])
    first, last = deadlines(arrivals, outputs, slos)
    span_s = 0.0
    if not may_fail.all():
        # Its tokens come one after another, each in an iteration of its own.
        alone_s = np.max([work.prefill_s(p) + work.decode_s(p, 0.0, 1.0) for p in prices if not p.by_blocks], axis=0)
        span_s = float((arrivals + alone_s)[~may_fail].max() - arrivals.min())
    # Without deadlines, all of them one after another.
    allowed_s = min(float(np.median(last - arrivals)), float(np.ptp(arrivals) + (prefills + decodes).max(axis=1).sum()))
    least_s = max(span_s, float((prefills + decodes)[~may_fail].sum(axis=0).max()) / num_engines)
    good = 0.0
    if served.any():
        prefills, decodes = priced(work, prices, limits, cost, seats(work, limits, arrivals, last))
        paced_prefills, paced_decodes = paced(work, prices, limits, decode_spans(outputs, slos))
        all_prefills, all_decodes = np.hstack([prefills, paced_prefills]), np.hstack([decodes, paced_decodes])
        mix = _best_mix(all_prefills, all_decodes, num_engines * max(span_s, allowed_s))
        prefill_s, decode_s = all_prefills @ mix, all_decodes @ mix
        # The price by which prompts take longest, whatever is beside them.
        prompt_s = prefills[:, prefills[served].sum(axis=0).argmax()] / num_engines
        windows = arrivals[served], first[served], last[served]
        good = _most_good(*windows, prefill_s[served], decode_s[served], prompt_s[served], num_engines)
    return GoodputBound(good, least_s)


def decode_spans(outputs: Ints, slos: Sequence[SLOs]) -> Floats:
    """Time from each request's first token to its last, at most, s."""
    allowed_s = np.array([[np.inf if one_s is None else one_s for one_s in slo] for slo in slos])
    _, tpot_s, e2el_s = allowed_s.T
    return np.minimum(tpot_s * np.maximum(1, outputs - 1), e2el_s) + TIE_S


def deadlines(arrivals: Floats, outputs: Ints, slos: Sequence[SLOs]) -> tuple[Floats, Floats]:
    """When the first and the last token of each request must have come, s."""
    allowed_s = np.array([[np.inf if one_s is None else one_s for one_s in slo] for slo in slos])
    ttft_s, tpot_s, e2el_s = allowed_s.T
    first = arrivals + ttft_s
    # Infinite times nothing: a request of one token has no TPOT.
    last = first + np.where(outputs > 1, tpot_s, 0.0) * np.maximum(1.0, outputs - 1.0)
    last = np.minimum(last, arrivals + e2el_s)
    return np.minimum(first, last) + TIE_S, last + TIE_S


# -- prices of time --------------------------------------------------------------------------------------------------


def _best_mix(prefills: Floats, decodes: Floats, span_s: float) -> Floats:
    """The mix of prices that allows the least, were all time one bin: min span Y + sum of max(0, 1 - Y mix work)."""
    chosen = np.unique(np.linspace(0, len(prefills) - 1, min(SAMPLE, len(prefills))).astype(int))
    work = (prefills + decodes)[chosen]
    num_requests, num_prices = work.shape
    span_s *= num_requests / len(prefills)
    found = linprog(
        np.concatenate([np.full(num_prices, span_s), np.ones(num_requests)]),
        A_ub=csr_matrix(np.hstack([-work, -np.eye(num_requests)])),
        b_ub=-np.ones(num_requests),
        method="highs",
    )
    mix = np.zeros(num_prices) if found.x is None else np.maximum(0.0, found.x[:num_prices])
    if mix.sum() <= 0.0:
        # Time is no limit: by the price that sees the most work.
        mix[work.sum(axis=0).argmax()] = 1.0
    return mix / mix.sum()


def _most_good(
    arrivals: Floats,
    first: Floats,
    last: Floats,
    prefill_s: Floats,
    decode_s: Floats,
    prompt_s: Floats,
    num_engines: int,
) -> float:
    """How many can meet their deadlines, at most."""
    begin_s = float(arrivals.min())
    # Work behind the last deadline counts for no request; without deadlines any time will do.
    end_s = min(float(last.max()), begin_s + float(np.ptp(arrivals)) + float((prefill_s + decode_s).sum()) + 1.0)
    num_bins = max(1, min(BINS, int((end_s - begin_s) / LEAST_BIN_S)))
    edges = np.linspace(begin_s, end_s, num_bins + 1)
    lengths = num_engines * np.diff(edges)

    def bin_of(times: Floats) -> Ints:
        return np.clip(np.searchsorted(edges, times, side="right") - 1, 0, num_bins - 1)

    windows = bin_of(arrivals), bin_of(first), bin_of(last)
    prices = _solved(*windows, prefill_s, decode_s, lengths)

    def most(values: Floats) -> float:
        return most_in_time(arrivals, first, prompt_s, values)

    # The solver knows of bins alone: where first tokens bind, lower prices of bins prove more.
    return min(certified(share * prices, *windows, prefill_s, decode_s, lengths, most) for share in SHARES)


def certified(
    prices: Floats,
    begin: Ints,
    first: Ints,
    last: Ints,
    prefill_s: Floats,
    decode_s: Floats,
    lengths: Floats,
    most: Callable[[Floats], float] = positive,
) -> float:
    """The bound that prices of a second of each bin prove, whatever they are as long as none is negative.

    `begin`, `first`, `last`: bins of arrival, of the first token's deadline and the last token's. `most`: the greatest
    sum of values, an element a request, of those that can be good together.
    """
    prices = np.maximum(0.0, prices)
    paid = prefill_s * least_within(prices, begin, first) + decode_s * least_within(prices, begin, last)
    return float(prices @ lengths) + most(1.0 - paid)


def _solved(begin: Ints, first: Ints, last: Ints, prefill_s: Floats, decode_s: Floats, lengths: Floats) -> Floats:
    """Prices of bins, by the LP whose dual they are: how much of each request is done where.

    Requests alike in their bins are one. Columns are shares of a request: good, prefilled in a bin, decoded in a bin.
    """
    keys, group = np.unique(np.stack([begin, first, last]), axis=1, return_inverse=True)
    group = group.ravel()
    num, num_bins, num_groups = len(group), len(lengths), keys.shape[1]
    rows, columns, values = [], [], []
    next_column = num
    for place, (low, high) in enumerate(((keys[0], keys[1]), (keys[0], keys[2]))):
        counts = high - low + 1
        owner = np.repeat(np.arange(num_groups), counts)
        bins = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(low, counts)
        column = next_column + np.arange(len(owner))
        next_column += len(owner)
        # Seconds of a group in a bin fill the bin, and make up what the group's good requests need.
        rows += [bins, num_bins + place * num_groups + owner]
        columns += [column, column]
        values += [np.ones(len(owner)), -np.ones(len(owner))]
    for place, seconds in enumerate((prefill_s, decode_s)):
        rows.append(num_bins + place * num_groups + group)
        columns.append(np.arange(num))
        values.append(seconds)
    matrix = coo_matrix((np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))))
    upper = np.concatenate([np.ones(num), np.full(next_column - num, np.inf)])
    found = linprog(
        np.concatenate([-np.ones(num), np.zeros(next_column - num)]),
        A_ub=matrix.tocsr(),
        b_ub=np.concatenate([lengths, np.zeros(2 * num_groups)]),
        bounds=np.stack([np.zeros(next_column), upper], axis=1),
        method="highs",
    )
    return np.zeros(num_bins) if found.x is None else -found.ineqlin.marginals[:num_bins]
