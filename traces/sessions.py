"""Conversations of several turns whose prompts share prefixes: the workload that prefix caches are for.

A session opens with one of the shared system prompts; each turn's prompt is everything said before it (its earlier
prompts and answers) and some new input. Hash ids name the blocks of the prompt, output hash ids those that the answer
fills after them: a full block keeps its id in every later turn, prompt or answer. The last block, partly filled, has an
id of its own. The blocks that lie wholly in a system prompt are the same for all sessions of its group.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from typing import Any

import numpy as np

from traces.arrivals import unit_times
from traces.errors import TraceError
from traces.lengths import uniform_lengths
from traces.rates import check_between
from traces.request import Request

_DRAWS = 1024


@dataclass(frozen=True, slots=True)
class SessionShape:
    """What sessions look like; lengths in tokens, times in seconds.

    `turns` is the mean of a geometric number of turns; the next turn comes an exponential `think_time_s` on average
    after the one before it arrived (how long the answer takes is the simulator's to say, so it is not in the trace).
    New input and output are uniform within 1 +- `range_ratio` of their means. A session ends early where its next
    request would exceed `max_context_tokens`.
    """

    turns: float
    think_time_s: float
    shared_prefix_tokens: int
    prefix_groups: int
    input_tokens: int
    output_tokens: int
    range_ratio: float
    max_context_tokens: int
    hash_block_tokens: int

    @classmethod
    def of(cls, options: Mapping[str, float], input_len: int, output_len: int) -> "SessionShape":
        """Build a shape from the options of `traces.generators.generate`, or raise `TraceError`."""
        least = {"turns": 1, "shared_prefix": 0, "prefix_groups": 1, "hash_block_tokens": 1, "max_context": 2}
        for name, smallest in least.items():
            check_between(name, options[name], "correct it", smallest)
        check_between("think_time", options["think_time"], "give seconds between turns")
        check_between("range_ratio", options["range_ratio"], "0 is one length", 0, 1)
        ratio = options["range_ratio"]
        longest = options["shared_prefix"] + round(input_len * (1 + ratio)) + round(output_len * (1 + ratio))
        if longest > options["max_context"]:
            raise TraceError(
                f"max_context {options['max_context']:g} is too small; a first turn takes up to {longest:g} tokens"
            )
        return cls(
            turns=options["turns"],
            think_time_s=options["think_time"],
            shared_prefix_tokens=int(options["shared_prefix"]),
            prefix_groups=int(options["prefix_groups"]),
            input_tokens=input_len,
            output_tokens=output_len,
            range_ratio=ratio,
            max_context_tokens=int(options["max_context"]),
            hash_block_tokens=int(options["hash_block_tokens"]),
        )


@dataclass(slots=True)
class _Session:
    name: str
    turns_left: int
    context_tokens: int  # all that was said: the shared prefix, inputs and answers
    blocks: list[int] = field(default_factory=list)  # ids of the context's full blocks


class _Draws:
    """Random numbers one at a time, drawn from numpy a chunk at a time; each kind has a generator of its own."""

    def __init__(self, shape: SessionShape, seed: int) -> None:
        inputs, outputs, turns, groups, thinks = (np.random.default_rng([seed, kind]) for kind in range(1, 6))
        self.inputs = _endless(partial(uniform_lengths, inputs, shape.input_tokens, shape.range_ratio, _DRAWS))
        self.outputs = _endless(partial(uniform_lengths, outputs, shape.output_tokens, shape.range_ratio, _DRAWS))
        self.turns = _endless(partial(turns.geometric, 1.0 / shape.turns, _DRAWS))
        self.groups = _endless(partial(groups.integers, 0, shape.prefix_groups, _DRAWS))
        self.thinks = _endless(partial(thinks.exponential, shape.think_time_s, _DRAWS))


def _endless(draw: Callable[[], np.ndarray]) -> Iterator[Any]:
    while True:
        yield from draw().tolist()


def sessions(shape: SessionShape, rate_per_s: float, burstiness: float, seed: int) -> Iterator[Request]:
    """Yield the turns of sessions without end, in order of arrival, `rate_per_s` of them a second in the long run.

    Sessions start as a gamma process of `burstiness`; holds the sessions under way and nothing else. The first minutes
    have fewer requests than the rate says, as the sessions of the past are missing.
    """
    draws = _Draws(shape, seed)
    session_rate = rate_per_s / shape.turns
    starts = (time / session_rate for time in unit_times(burstiness, seed))
    fresh_ids = count(shape.prefix_groups * (shape.shared_prefix_tokens // shape.hash_block_tokens))
    waiting: list[tuple[float, int, _Session]] = []  # next turns; the number breaks ties before sessions are compared
    start = next(starts)
    opened = 0
    for request_id in count():
        if not waiting or start <= waiting[0][0]:
            heapq.heappush(waiting, (start, opened, _open(shape, opened, draws)))
            start, opened = next(starts), opened + 1
        arrival_s, number, session = heapq.heappop(waiting)
        request = _turn(shape, session, request_id, arrival_s, draws, fresh_ids)
        yield request
        session.turns_left -= 1
        room = shape.max_context_tokens - session.context_tokens
        if session.turns_left and room >= (shape.input_tokens + shape.output_tokens) * (1 + shape.range_ratio) + 1:
            heapq.heappush(waiting, (arrival_s + next(draws.thinks), number, session))


def _open(shape: SessionShape, number: int, draws: _Draws) -> _Session:
    shared_blocks = shape.shared_prefix_tokens // shape.hash_block_tokens
    first = next(draws.groups) * shared_blocks
    blocks = list(range(first, first + shared_blocks))
    return _Session(f"s{number}", next(draws.turns), shape.shared_prefix_tokens, blocks)


def _turn(
    shape: SessionShape, session: _Session, request_id: int, arrival_s: float, draws: _Draws, fresh_ids: Iterator[int]
) -> Request:
    prompt = session.context_tokens + next(draws.inputs)
    output = next(draws.outputs)
    session.context_tokens = prompt + output
    block = shape.hash_block_tokens
    full, rest = divmod(session.context_tokens, block)
    session.blocks.extend(islice(fresh_ids, full - len(session.blocks)))
    ids = (*session.blocks, next(fresh_ids)) if rest else tuple(session.blocks)
    own = -(-prompt // block)  # blocks of the prompt; the answer may begin in the last of them
    return Request(request_id, arrival_s, prompt, output, session.name, ids[:own], block, ids[own:])
