"""`Direct`: a prefilled sequence decodes, with nothing in between."""

from typing import ClassVar

from sim.engine.sequence import Sequence
from sim.parts.base import Stage


class Direct(Stage):
    """Prefilled sequences join the decode batch."""

    name: ClassVar[str] = "direct"

    def enter(self, seq: Sequence, *, first: bool = False) -> None:
        self.scheduler.join(seq, first=first)
