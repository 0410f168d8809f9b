"""Synthetic workloads by name, as streams: five million requests cost no more memory than five.

Draws come from numpy in chunks; arrivals and lengths have generators of their own, so a seed gives the same lengths at
any rate. The same name, options and seed give the same requests.
"""

from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from itertools import islice
from math import isfinite

import numpy as np

from traces.arrivals import CHUNK, Clock, SteadyClock, bursts, ramp, unit_chunks
from traces.documents import with_documents
from traces.errors import TraceError
from traces.lengths import IntArray, load_model, uniform_lengths
from traces.rates import MOST, check_count, check_rate, check_seed
from traces.request import Request
from traces.rows import Columns, requests_of
from traces.sessions import SessionShape, sessions
from traces.workloads import OPTIONS, WORKLOADS

__all__ = ["WORKLOADS", "generate"]

_MODELS = {"azure-conv-2023": "azure-conv-2023", "sharegpt": "sharegpt", "ramp": "sharegpt", "burst": "sharegpt"}


def generate(
    name: str,
    *,
    num_prompts: int,
    request_rate: float | None = None,
    burstiness: float = 1.0,
    seed: int = 0,
    input_len: int | None = None,
    output_len: int | None = None,
    **more: float | None,
) -> Iterator[Request]:
    """Yield `num_prompts` requests of the workload `name` (see `WORKLOADS`), the first at time 0.

    - `request_rate`: requests per second; None is the workload's own rate (`azure-conv-2023`: 5.53, the trace's), else
      1. Infinity puts all requests at 0 (`fixed`, `uniform`, `documents`, `azure-conv-2023`,
      `sharegpt`).
    - `burstiness`: gamma shape of the intervals, 1 for Poisson, their CV being burstiness ** -0.5. Where
      `azure-conv-2023` runs at its own rate, 1 (the default) stands for its own burstiness of 0.835, a CV of 1.09.
    - `input_len`, `output_len`: tokens; they replace the lengths of a fitted workload, and are the mean elsewhere.
    - further options by workload: `range_ratio` (uniform, sessions, documents), `end_rate` (ramp), `burst_factor`,
      `burst_period` and `burst_duration` in s (burst), `turns`, `think_time` in s, `shared_prefix`, `prefix_groups`,
      `max_context`, `hash_block_tokens` (sessions; see `traces.sessions.SessionShape`), `documents`, `document_len`,
      `corpus`, `skew`, `hash_block_tokens` (documents; see `traces.documents`).

    Raises `TraceError` at once for an unknown name or option, or a value out of range.
    """
    if name not in WORKLOADS:
        close = get_close_matches(name, WORKLOADS, cutoff=0.4)
        hint = f"did you mean {close[0]!r}?" if close else f"give one of {', '.join(WORKLOADS)}"
        raise TraceError(f"workload {name!r} is unknown; {hint}")
    for field, value in (("num_prompts", num_prompts), ("input_len", input_len), ("output_len", output_len)):
        if value is not None:
            check_count(field, value)
    check_seed(seed)
    options = _options(name, more)
    model = load_model(_MODELS[name]) if name in _MODELS else None
    # The fitted arrivals belong to the fitted workload itself, not to the ramps and bursts that borrow its lengths.
    own = model if name == "azure-conv-2023" else None
    if request_rate is None:
        request_rate = own.rate_per_s if own and own.rate_per_s else 1.0
        burstiness = own.burstiness if own and burstiness == 1.0 else burstiness
    check_rate(request_rate, burstiness)
    if name == "sessions":
        if not isfinite(request_rate):
            raise TraceError(f"request rate {request_rate} is no rate for sessions; give requests per second")
        shape = SessionShape.of(options, input_len or 128, output_len or 256)
        return islice(sessions(shape, request_rate, burstiness, seed), num_prompts)
    clock = _clock(name, request_rate, burstiness, num_prompts, options)
    if model is not None:
        lengths = _modelled(model.lengths.sample, seed, input_len, output_len)
    else:
        own_tokens = 64 if name == "documents" else 512
        lengths = _around(input_len or own_tokens, output_len or 128, options.get("range_ratio", 0.0), seed)
    requests = islice(_requests(clock, burstiness, seed, lengths), num_prompts)
    return with_documents(requests, options, seed) if name == "documents" else requests


def _options(name: str, more: Mapping[str, float | None]) -> dict[str, float]:
    known = OPTIONS.get(name, {})
    for option in more:
        if option not in known:
            close = get_close_matches(option, known, cutoff=0.5)
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise TraceError(
                f"workload {name!r} has no option {option!r}; {f'did you mean {close[0]!r}?' if close else takes}"
            )
    merged = {**known, **{option: value for option, value in more.items() if value is not None}}
    return {option: value for option, value in merged.items() if value is not None}


def _clock(name: str, rate: float, burstiness: float, requests: int, options: Mapping[str, float]) -> Clock:
    if name == "ramp":
        return ramp(rate, options.get("end_rate", min(4.0 * rate, MOST)), requests)
    if name == "burst":
        return bursts(rate, options["burst_factor"], options["burst_period"], options["burst_duration"])
    return SteadyClock(rate)


LengthChunks = Iterator[tuple[IntArray, IntArray]]


def _modelled(
    sample: Callable[[np.random.Generator, int], tuple[IntArray, IntArray]],
    seed: int,
    input_len: int | None,
    output_len: int | None,
) -> LengthChunks:
    random = np.random.default_rng([seed, 1])
    while True:
        prompts, outputs = sample(random, CHUNK)
        if input_len is not None:
            prompts = np.full(CHUNK, input_len)
        if output_len is not None:
            outputs = np.full(CHUNK, output_len)
        yield prompts, outputs


def _around(input_len: int, output_len: int, ratio: float, seed: int) -> LengthChunks:
    if not 0 <= ratio <= 1:
        raise TraceError(f"range ratio {ratio} is out of range; give 0 (fixed) to 1 (from 1 token to twice the length)")
    return _uniform(input_len, output_len, ratio, np.random.default_rng([seed, 1]))


def _uniform(input_len: int, output_len: int, ratio: float, random: np.random.Generator) -> LengthChunks:
    while True:
        prompts, outputs = (uniform_lengths(random, mean, ratio, CHUNK) for mean in (input_len, output_len))
        yield prompts, outputs


def _requests(clock: Clock, burstiness: float, seed: int, lengths: LengthChunks) -> Iterator[Request]:
    first = 0
    for expected, (prompts, outputs) in zip(unit_chunks(burstiness, seed), lengths, strict=False):
        yield from requests_of(Columns(clock(expected).tolist(), prompts.tolist(), outputs.tolist()), first)
        first += CHUNK
