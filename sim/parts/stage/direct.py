"""`Direct`: who is prefilled decodes, nothing in between."""

from sim.engine.sequence import Sequence
from sim.parts.base import Stage


class Direct(Stage):
    """Prefilled sequences join the decode batch."""

    def enter(self, seq: Sequence, *, first: bool = False) -> None:
        self.scheduler.join(seq, first=first)
