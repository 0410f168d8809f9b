"""`frozen`: a dataclass that cannot be changed, whose methods all such classes share.

`dataclasses` writes, parses and compiles the source text of each class's own, which took a fifth of a start.
"""

from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar, dataclass_transform

Class = TypeVar("Class", bound=type)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(cls: Class) -> Class:
    """As `dataclass(frozen=True)`, of which either may be derived from the other; classes keep methods of their own."""
    for name, method in METHODS.items():
        if name not in vars(cls):
            setattr(cls, name, method)
    return dataclass(frozen=True, init=False, repr=False, eq=False)(cls)


def _init(self: Any, *values: object, **named: object) -> None:  # noqa: ANN401
    own = fields(self)
    places = [f.name for f in own if not f.kw_only]
    if len(values) > len(places) or not named.keys().isdisjoint(places[: len(values)]):
        raise TypeError(f"{type(self).__name__}: {len(values)} values by place, and {', '.join(named)} by name")
    given = dict(zip(places, values, strict=False)) | named
    for f in own:
        value = given.pop(f.name, f.default)
        if value is MISSING and f.default_factory is not MISSING:
            value = f.default_factory()
        if value is MISSING:
            raise TypeError(f"{type(self).__name__}: {f.name} is missing")
        object.__setattr__(self, f.name, value)
    if given:
        raise TypeError(f"{type(self).__name__} has no {', '.join(given)}")
    if hasattr(self, "__post_init__"):
        self.__post_init__()


def _repr(self: Any) -> str:  # noqa: ANN401
    shown = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.repr)
    return f"{type(self).__qualname__}({shown})"


def _values(self: Any) -> tuple[object, ...]:  # noqa: ANN401
    return tuple(getattr(self, f.name) for f in fields(self) if f.compare)


def _eq(self: object, other: object) -> bool:
    return _values(self) == _values(other) if type(other) is type(self) else NotImplemented


def _hash(self: object) -> int:
    return hash(_values(self))


class _Signature:
    """What `help` and completion show of such a class, made when they ask."""

    def __get__(self, one: object, kind: Any) -> object:  # noqa: ANN401
        from inspect import Parameter, Signature  # noqa: PLC0415 - slow to import

        shown = []
        for f in sorted(fields(kind), key=lambda f: f.kw_only is True):
            default = Parameter.empty if f.default is MISSING else f.default
            default = default if f.default_factory is MISSING else f.default_factory()
            how = Parameter.KEYWORD_ONLY if f.kw_only else Parameter.POSITIONAL_OR_KEYWORD
            shown.append(Parameter(f.name, how, default=default, annotation=f.type))
        return Signature(shown)


METHODS = {"__init__": _init, "__repr__": _repr, "__eq__": _eq, "__hash__": _hash, "__signature__": _Signature()}
