"""Options as fields of dataclasses: their types, and their values from the command line or a file."""

from contextlib import suppress
from dataclasses import Field, fields
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from sim.errors import UserError


def flag(name: str) -> str:
    """The command-line spelling of a field."""
    return "--" + name.replace("_", "-")


@cache
def option_fields(owner: type) -> tuple[tuple[Field[Any], Any], ...]:
    """Fields of an options dataclass with their resolved types."""
    hints = get_type_hints(owner)
    return tuple((f, hints[f.name]) for f in fields(owner))


def base_type(hint: Any) -> Any:  # noqa: ANN401
    """`int | None` -> `int`; other types as they are."""
    members = [member for member in get_args(hint) if member is not type(None)]
    if get_origin(hint) is Literal or len(members) != 1:
        literal = [member for member in members if get_origin(member) is Literal]
        return literal[0] if literal else hint
    return members[0]


def convert(name: str, text: Any, hint: Any) -> Any:  # noqa: ANN401
    """A value from the command line or a TOML file, as the type its option has; `name` is for the message."""
    kind = base_type(hint)
    try:
        if get_origin(kind) is Literal:
            if text not in get_args(kind):
                raise ValueError
            return text
        if kind is bool:
            return _boolean(text)
        if kind in (int, float):
            return _number(text, kind)
        if get_origin(kind) is tuple:
            words = text.split() if isinstance(text, str) else text
            if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
                raise TypeError
            return tuple(words)
        if not isinstance(text, str) or "\0" in text:
            raise TypeError
        return text
    except (TypeError, ValueError, OverflowError):
        choices = " or ".join(map(str, get_args(kind))) if get_origin(kind) is Literal else ""
        raise UserError(f"{name}: {text!r} is not {choices or WANTED.get(kind, 'a list of words')}") from None


WANTED = {
    int: "a whole number (of 64 bits)",
    float: "a number",
    bool: "true or false",
    str: "text in quotes, without NUL",
}


def _boolean(text: Any) -> bool:  # noqa: ANN401
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    if isinstance(text, bool):
        return text
    if str(text).lower() not in words:
        raise ValueError
    return words[str(text).lower()]


def _number(text: Any, kind: type) -> int | float:  # noqa: ANN401
    if isinstance(text, bool):
        raise ValueError
    if kind is float:
        number = float(text)
        if number != number:
            raise ValueError
        return number
    whole: int | None = None
    if not isinstance(text, float):
        # Read as written: a float would lose digits beyond 2**53.
        with suppress(ValueError):
            whole = int(text)
    if whole is None:
        whole = int(float(text))
        if whole != float(text):
            raise ValueError
    if not -(1 << 63) <= whole < 1 << 63:
        raise OverflowError
    return whole
