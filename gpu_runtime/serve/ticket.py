"""`Ticket`: one accepted request, and what is said about it between the engine's thread and the event loop."""

import asyncio
from dataclasses import dataclass, field
from typing import NamedTuple

from gpu_runtime.model.sampling import GREEDY, Sampling
from sim.engine.sequence import Sequence
from traces.request import Request


class Token(NamedTuple):
    """One token of an answer; a stop token ends it and has no text."""

    token: int
    is_stop: bool


class End(NamedTuple):
    """The end of an answer: `stop` or `length`; or an error, with the HTTP status it would have as a whole answer."""

    reason: str
    error: str = ""
    status: int = 200


Events = asyncio.Queue[tuple[int, Token | End]]
"""Tokens and ends of the choices of one HTTP request, each with the choice's index."""


@dataclass(eq=False)
class Ticket:
    """One accepted request.

    Attributes:
        stop: token ids that end it once it has `min_tokens` tokens.
        sampling: how its tokens are chosen, with a seed.
        events: where its tokens and its end go, to the handler that answers; `index` says which choice they are of.
        last_s: when its last token came, or it was accepted; device clock.
    """

    request: Request
    prompt: list[int]
    stop: frozenset[int]
    min_tokens: int
    events: Events = field(default_factory=asyncio.Queue)
    index: int = 0
    sampling: Sampling = GREEDY
    last_s: float = 0.0
    answered: bool = False
    ended: bool = False
    seq: Sequence | None = None
    stopped: bool = False
    has_text: bool = False
    """Its text is complete: a stop string has come."""
