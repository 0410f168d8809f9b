"""What sequences hold of the pools, by block id, and the copies between these."""

from dataclasses import dataclass, field

from sim.engine.changes import Direction, Move
from sim.engine.sequence import Sequence
from sim.errors import InvariantError


@dataclass(frozen=True)
class BlockCopy:
    """A copy of a sequence's blocks between the tiers, id by id."""

    seq: Sequence
    groups: tuple[int, ...]
    direction: Direction
    source: tuple[int, ...]
    target: tuple[int, ...]


@dataclass
class Held:
    """What one sequence holds: ids by group on each tier; `slots` are the send buffer of a prefill, a list each."""

    gpu: dict[int, list[int]] = field(default_factory=dict)
    host: dict[int, list[int]] = field(default_factory=dict)
    slots: list[list[int]] = field(default_factory=list)
    version: int = 0
    """Goes up whenever `gpu` or `host` changes."""
    room: int = 0
    room_of: int = -1
    """Tokens that its blocks have room for, as of that version."""
    num_written: int = 0
    """Tokens whose KV is there, from the first on; kept where prefixes are cached."""
    ahead: set[int] = field(default_factory=set)
    """Places of blocks beyond these whose KV is there, too."""


class Holders(dict[Sequence, Held]):
    """What each sequence holds; InvariantError for one that holds nothing."""

    def __missing__(self, seq: Sequence) -> Held:
        raise InvariantError(f"{seq} holds no blocks")


@dataclass(eq=False)
class Transfer:
    """A copy beside or behind the computation whose end the engine is to hear of.

    `leaving` are GPU blocks that it reads and no sequence holds any more: free when it ends. `arriving` are GPU blocks
    of each group that it writes: the sequence's when it ends. `stored` are keys of the host's cache that it fills.
    """

    move: Move
    held: Held
    leaving: list[int] = field(default_factory=list)
    arriving: dict[int, list[int]] = field(default_factory=dict)
    stored: tuple[int, ...] = ()
    is_lost: bool = False
    """Whether what it reads is given up already, so that it has to end before the computation."""
