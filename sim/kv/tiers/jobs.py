"""`Job`: one copy of chunks between GPU and host, and `Offloaded`: what the connector knows of one request."""

from dataclasses import dataclass, field

from sim.engine.changes import Move
from sim.engine.sequence import Sequence
from sim.kv.tiers.replacement import Access


@dataclass(eq=False, slots=True)
class Offloaded:
    """One request. `keys` are those of its chunks, the last of which may yet have to be computed."""

    seq: Sequence
    access: Access
    num_offered: int = 0
    """Chunks, from the first on, that need not be offered any more."""
    jobs: dict["Job", None] = field(default_factory=dict)
    """Its copies under way: one load, or stores."""


@dataclass(eq=False, slots=True)
class Job:
    """A copy, or (without a `move`) one that may be wanted yet. `blocks` are places in the request's block table."""

    owner: Offloaded
    places: list[int]
    """Chunks."""
    blocks: list[range]
    move: Move | None = None
    reused: list[range] = field(default_factory=list)
    """Blocks handed out again before it was known whether they are stored."""

    @property
    def keys(self) -> list[int]:
        """Of the chunks."""
        keys = self.owner.access.keys
        return [keys[place] for place in self.places]

    @property
    def num_blocks(self) -> int:
        """Blocks copied."""
        return sum(map(len, self.blocks))

    def num_tokens(self, block_size: int) -> int:
        """Tokens copied."""
        return self.num_blocks * block_size

    def reads(self, blocks: range) -> bool:
        """Whether it copies any of these."""
        return any(own.start < blocks.stop and blocks.start < own.stop for own in self.blocks)


def ranges_of(places: list[int], blocks_per_chunk: int) -> list[range]:
    """The blocks of chunks in ascending order, those that follow one another together."""
    found: list[range] = []
    for place in places:
        begin, end = place * blocks_per_chunk, (place + 1) * blocks_per_chunk
        if found and found[-1].stop == begin:
            begin = found.pop().start
        found.append(range(begin, end))
    return found
