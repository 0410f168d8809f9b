"""`NAME:option=value,...`, what some flags take: read into the dataclass of options that `NAME` stands for."""

from collections.abc import Mapping
from dataclasses import MISSING, Field, field, fields
from typing import Any, TypeVar, get_args

from sim.errors import UserError

Options = TypeVar("Options")


def number(most: float, default: Any = MISSING, help: str = "", *, least: float = 0, above: bool = False) -> Any:  # noqa: ANN401
    """A field from `least` (with `above`: from more than that) to `most`; without a default it has to be given."""
    return field(default=default, metadata={"help": help, "least": least, "most": most, "above": above})


def read_named(flag: str, what: str, text: str, kinds: Mapping[str, type[Options]]) -> Options:
    """The options that `text` says of one of `kinds`, each of which is a `what`.

    Fields are numbers made with `number`, or `Literal` words.

    Raises:
        UserError: no such name or option, a value that an option cannot have, or one missing that has no default.
    """
    name, _, rest = text.partition(":")
    where = f"{flag} {text}"
    if name not in kinds:
        raise UserError(f"{where}: {name!r} is no {what}; give one of {', '.join(kinds)}")
    known = {f.name.replace("_", "-"): f for f in fields(kinds[name])}  # pyright: ignore[reportArgumentType]
    values: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        option, _, value = part.partition("=")
        if option not in known:
            raise UserError(f"{where}: {name} has no option {option!r}; it has {', '.join(known)}")
        f = known[option]
        values[f.name] = _value(f"{where}: {option}={value}", value, f)
    for option, f in known.items():
        if f.default is MISSING and f.name not in values:
            told = f" ({f.metadata['help']})" * bool(f.metadata["help"])
            raise UserError(f"{where}: {name} needs {option}={'N' if f.type is int else 'X'}{told}: give it")
    return kinds[name](**values)


def _value(where: str, value: str, f: Field[Any]) -> str | float:
    if words := [word for word in get_args(f.type) if isinstance(word, str)]:
        if value not in words:
            raise UserError(f"{where} is not {' or '.join(words)}; give one of them")
        return value
    least, most, above = (f.metadata[name] for name in ("least", "most", "above"))
    try:
        found = int(value) if f.type is int else float(value)
    except ValueError:
        found = least - 1
    if not least <= found <= most or (above and found == least):
        number = "whole number" if f.type is int else "number"
        span = f"above {least:g} and at most" if above else f"from {least:g} to"
        raise UserError(f"{where} is no {number} {span} {most:.10g}; give one")
    return found
