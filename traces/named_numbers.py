"""`named_numbers`: words `NAME:NUMBER`, such as SLOs or weights."""

from collections.abc import Collection, Iterable
from math import nan


def named_numbers(
    words: Iterable[str], names: Collection[str], number: str, most: float, *, may_be_zero: bool = False
) -> dict[str, float]:
    """The number of each name; `number` is what a refusal calls them.

    Raises:
        ValueError: another name, a name given twice, no number, or one that is too large or not above 0.
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
            raise ValueError(f"{word!r} is not NAME:{number} with NAME one of {', '.join(names)} and {number} {bounds}")
        if name in found:
            raise ValueError(f"{name} is given twice; name each once")
        found[name] = value
    return found
