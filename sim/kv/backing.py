"""`Backing`: what stands behind the GPU's cached blocks: the host, a disk, states, other engines, vLLM's connector.

It is a rule over `PrefixMemory`, not a memory: it says what of a prompt can be had beyond what the GPU has cached, has
it fetched, and may keep the blocks of a sequence that gives them back until they are copied. Its hooks into a step are
those of all parts (`sim.parts.base`), and come before the memory's; what it `needs` is asked for, too. A name in
`memory=` may stand for one: its `build` makes the memory.
"""

from typing import ClassVar

from sim.engine.changes import Move
from sim.engine.sequence import Sequence
from sim.kv.gaps import Places
from sim.kv.index.prefix_index import Keys
from sim.kv.memory import MemoryKind
from sim.kv.paged import PagedMemory
from sim.kv.prefix import PrefixMemory

NOWHERE = range(0)


class Backing(MemoryKind):
    """Defaults: nothing can be had, and nothing is kept. Of the sequences it is told, the memory knows the same."""

    can_cache_prefixes: ClassVar[bool] = True
    shares: ClassVar[bool] = True
    """Whether blocks on the GPU are hit as well, those of others and a sequence's own."""
    blocks: PrefixMemory
    """What it is behind; set as that is made."""

    def keys_of(self, seq: Sequence) -> Keys:
        """Names of the blocks of a sequence, from the first on. Each is of a block's content, wherever it stands; equal
        KV is behind equal names of all blocks up to it."""
        return self.blocks.keys.of(seq.request)

    def name_blocks(self, seq: Sequence, keys: Keys) -> Keys:
        """The next blocks of `seq` are full of what these keys say: their names."""
        return keys

    def tell_blocks(self) -> None:
        """From now on plans say what is fetched, saved and dropped (`Memory.tell_blocks`)."""

    def look_up(self, seq: Sequence) -> None:
        """`seq`, which waits, is about to be asked about."""

    def found(self, seq: Sequence, first: int) -> Places:
        """Places of the blocks that `seq` fetches when it starts, where it hits `first` blocks on the GPU."""
        return NOWHERE

    def taken(self, seq: Sequence, found: Places) -> None:
        """`seq` has its blocks: fetch what was `found`. It counts as computed."""

    def received(self, seq: Sequence) -> None:
        """`seq` comes from another engine."""

    def keeps(self, seq: Sequence) -> bool:
        """`seq` gives its blocks back. True: it does so later, or has done so (`PrefixMemory.give_back`)."""
        return False

    def forget(self, seq: Sequence) -> None:
        """`seq`, which holds nothing, will not come back."""

    def transfer_done(self, move: Move) -> None:
        """A copy has ended, one of the memory's own by default."""
        PagedMemory.transfer_done(self.blocks, move)

    @property
    def num_cached_on_host(self) -> int:
        """Host blocks of cached content."""
        return 0
