"""Questions change nothing: a checked engine asks them twice, and compares all that its scheduler leads to.

A question is a property of a part, a method that `sim.parts.base` or `sim.kv.memory` calls one
(`CONTRACT`), or one that is named as a question or an amount (`NAMED`): `is_urgent`, `num_waiting`, `laxity_s`.
Iterators are not read. What only remembers an answer, and is named in `memoized` of its class, is not compared.

Asked twice is every `EVERY`-th question of an engine, whichever it is, and where there is much state fewer: it is
written out twice, and each question that is asked pays for `BYTES` of it.
"""

import pickle
import re
from collections.abc import Callable, Iterator
from enum import Enum
from functools import cache
from io import BytesIO
from types import BuiltinFunctionType, CodeType, EllipsisType, FunctionType, GeneratorType, ModuleType
from typing import Any

from sim.engine.decisions import DecisionLog
from sim.engine.scheduler import Scheduler
from traces.request import Request

EVERY = 61
"""A prime: what a step asks has many periods."""
BYTES = 128
CONTRACT = (
    "admits", "cached_tokens", "delays", "fits", "fits_received", "head", "headroom", "held_blocks", "in_order",
    "outgrew_gpu", "recount", "refusal", "repeats", "room",
)  # fmt: skip
NAMED = re.compile(r"_*(blocks|can|ever|has|is|longest|may|most|must|needs|next|num|steps|wants)_\w+|\w+_s")
WHOLE = (type, Enum, Request, DecisionLog, FunctionType, BuiltinFunctionType, GeneratorType, ModuleType, CodeType)
OTHERS = ("sim.clock.", "sim.cost.", "sim.engine.itl", "sim.engine.limits", "sim.results.", "sim.specs.", "simpy.")
"""Classes, and modules of classes, of which it counts which object it is: constants, and what no part asks."""


class _Writer(pickle.Pickler):
    """As bytes, all that an object leads to: the same bytes for the same objects in the same state."""

    def reducer_override(self, obj: Any) -> Any:  # noqa: ANN401
        left_out = _LEFT_OUT.get(type(obj))
        if left_out is None:
            left_out = _LEFT_OUT[type(obj)] = _left_out(type(obj))
        if left_out == () or obj is _number:
            return NotImplemented
        if left_out is ...:
            return _number, (id(obj),)
        make, args, state, *items = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return make, args, _without(state, left_out), *items


_LEFT_OUT: dict[type, "tuple[str, ...] | EllipsisType"] = {}


def _number(of_object: int) -> int:
    return of_object


def _left_out(kind: type) -> "tuple[str, ...] | EllipsisType":
    """Names of the attributes that are not written; Ellipsis: none is."""
    if issubclass(kind, (*WHOLE, Asker)) or kind.__module__.startswith(OTHERS):
        return ...
    return tuple(name for base in kind.__mro__ for name in vars(base).get("memoized", ()))


def _without(state: Any, names: tuple[str, ...]) -> Any:  # noqa: ANN401
    """Attributes of an object, those in slots beside those in its dictionary."""
    if isinstance(state, tuple):
        return tuple(_without(part, names) for part in state)
    return state and {name: value for name, value in state.items() if name not in names}


def state_of(root: object) -> bytes:
    """All that `root` leads to, to be compared with what it led to before."""
    file = BytesIO()
    _Writer(file, pickle.HIGHEST_PROTOCOL).dump(root)
    return file.getvalue()


def questions_of(kind: type) -> dict[str, Callable[..., Any] | property]:
    """The questions that objects of a class are asked, by name."""
    found: dict[str, Callable[..., Any] | property] = {}
    for base in reversed(kind.__mro__):
        for name, held in vars(base).items():
            is_named = name in CONTRACT or NAMED.fullmatch(name)
            if isinstance(held, property) or (isinstance(held, FunctionType) and is_named):
                found[name] = held
    return found


def ask_twice(scheduler: Scheduler) -> None:
    """From now on questions to the parts of a scheduler are asked twice: AssertionError if that changes anything."""
    asker = Asker(scheduler)
    for part in scheduler.parts:
        part.__class__ = _twice(type(part))
        vars(part)["asker"] = asker


class Asker:
    """Counts the questions about a scheduler, and says when one is asked twice."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        # Engines of one workload ask much the same.
        self.num_asked = scheduler.gpu.num_blocks % EVERY
        self.due, self.is_busy = EVERY, False

    def compare(self, name: str, question: Callable[[], Any]) -> Any:  # noqa: ANN401
        """The answer to a question that is asked twice."""
        self.is_busy = True
        try:
            before = state_of(self.scheduler)
            answer = question()
            after = state_of(self.scheduler)
            assert before == after, f"{name} is a question, and changes what it asks about"
            if not isinstance(answer, Iterator):
                again = question()
                assert state_of(again) == state_of(answer), f"{name} is {answer}, and {again} when asked again"
        finally:
            self.is_busy = False
        self.due = self.num_asked + max(EVERY, len(after) // BYTES)
        return answer


@cache
def _twice(kind: type) -> type:
    """A class whose objects are asked twice: one for all engines, since new classes are slow."""
    body: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    for name, held in questions_of(kind).items():
        body[name] = property(_asked(kind, name), held.fset) if isinstance(held, property) else _asked(kind, name)
    return type(kind)(kind.__name__, (kind,), body)


def _asked(kind: type, name: str) -> Callable[..., Any]:
    label = f"{kind.__name__}.{name}"

    def ask(part: Any, *args: Any, **named: Any) -> Any:  # noqa: ANN401
        # Looked up each time: a test may have put another in its place for a while.
        held = getattr(kind, name)
        question: Any = held.fget if isinstance(held, property) else held
        asker = part.asker
        if asker.is_busy:
            return question(part, *args, **named)
        asker.num_asked += 1
        if asker.num_asked < asker.due:
            return question(part, *args, **named)
        return asker.compare(label, lambda: question(part, *args, **named))

    return ask
