"""`named_numbers`: words `NAME:NUMBER` of an option, such as SLOs or weights."""

from collections.abc import Collection, Iterable
from math import nan

from sim.errors import UserError


def named_numbers(
    option: str, words: Iterable[str], names: Collection[str], number: str, most: float, *, may_be_zero: bool = False
) -> dict[str, float]:
    """The number of each name. `option` and `number` are what a refusal calls the option and its numbers.

    Raises:
        UserError: another name, a name given twice, no number, or one that is too large or not above 0.
    """
    found: dict[str, float] = {}
    for word in words:
        name, _, text = word.partition(":")
        try:
            value = float(text)
        except ValueError:
            value = nan
        if name not in names or not 0.0 <= value <= most or not (value or may_be_zero):
            bounds = f"from 0 to {most:g}" if may_be_zero else f"above 0, {most:g} at most"
            raise UserError(
                f"{option}: {word!r} is not NAME:{number} with NAME one of {', '.join(names)} and {number} {bounds}"
            )
        if name in found:
            raise UserError(f"{option}: {name} is given twice; name each once")
        found[name] = value
    return found
