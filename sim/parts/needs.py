"""`Need`: what a part needs of the part of another kind, and the words with which it is refused otherwise."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from sim.errors import UserError
from sim.parts.catalogue import CATALOGUE

if TYPE_CHECKING:
    from sim.parts.base import Part


class Need(NamedTuple):
    """A part of some kind that bears one of `names`, `offers` something, or lacks something; any one of these will do.

    What a part offers is a class that it derives from (a capability), or a class attribute that is true.
    """

    kind: str
    because: str
    """What the part does that asks for it, as the end of a sentence that begins with the part."""
    names: tuple[str, ...] = ()
    offers: type | str | None = None
    lacks: type | str | None = None

    def is_met(self, name: str, part: object) -> bool:
        """Whether a part (or a class of them) of that name will do."""
        return (
            name in self.names
            or (self.offers is not None and _has(part, self.offers))
            or (self.lacks is not None and not _has(part, self.lacks))
        )

    def going(self) -> list[str]:
        """The names of the parts that will do, as far as their classes say."""
        # A part lacks something in every run only where the need asks for nothing else.
        positive = self._replace(lacks=None) if self.names or self.offers is not None else self
        return [name for name, kind in CATALOGUE[self.kind].items() if positive.is_met(name, kind)]


def _has(part: object, what: type | str) -> bool:
    if isinstance(what, str):
        return bool(getattr(part, what, False))
    return issubclass(part, what) if isinstance(part, type) else isinstance(part, what)


def check_needs(names: Mapping[str, str], parts: "Mapping[str, Part | type[Part]]") -> None:
    """UserError with the reason and what goes instead where a part lacks what another needs. Both go by kind.

    Of parts that are not built their classes are asked.
    """
    for kind, part in parts.items():
        behind = None if isinstance(part, type) else getattr(part, "backing", None)
        for need in part.needs if behind is None else (*part.needs, *behind.needs):
            other = names[need.kind]
            if not need.is_met(other, parts[need.kind]):
                *others, last = [f"{need.kind}={name}" for name in need.going()] or [f"another {need.kind}"]
                goes = f"{', '.join(others)} or {last}" if others else last
                raise UserError(f"{kind}={names[kind]} {need.because}: it goes with {goes}, not {need.kind}={other}")
