"""States of all KV on the GPU, and of ended turns (HCache over turns): what a turn leaves, the next is made from.

Each GPU block has a block of states on the host, from the pass that begins to write it until another does. A turn that
ends leaves those of its blocks to the host's cache, under their keys: nothing is copied. Blocks brought back have the
states that they were made from.
"""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np

from gpu_runtime.kv.block_ids import BlockIds
from gpu_runtime.kv.replay.held import BlockCopy
from gpu_runtime.kv.replay.hosted_blocks import HostedBlocks
from gpu_runtime.kv.replay.placement import Placement
from gpu_runtime.kv.replay.prefix_blocks import Span
from gpu_runtime.kv.replay.state_placement import StateRestore
from sim.engine.changes import Direction, Load, Restore, Store
from sim.engine.sequence import Sequence
from sim.errors import InvariantError

NONE = -1


class StateBlocks:
    """Which state block each GPU block has. A key of the host's cache is one more user of it.

    Args:
        num_gpu: GPU blocks.
        num_kept: of ended turns, at most; where there is room for none, GPU blocks have none either.
    """

    def __init__(self, num_gpu: int, num_kept: int) -> None:
        self.ids = BlockIds(num_gpu + num_kept if num_kept else 0)
        self.of = np.full(num_gpu, NONE)
        """By GPU block [num_gpu]; `NONE` where it was never written."""
        self.lost: set[int] = set()
        """State blocks that a copy failed to fill."""

    def renew(self, blocks: list[int]) -> None:
        """GPU blocks are about to be written from their first token on: each has a state block of its own."""
        self._let_go(blocks)
        self.of[blocks] = found = self.ids.allocate(len(blocks))
        self.lost.difference_update(found)

    def share(self, blocks: list[int], states: Seq[int]) -> None:
        """GPU blocks have these states, too."""
        self.ids.share(states)
        self._let_go(blocks)
        self.of[blocks] = states

    def _let_go(self, blocks: list[int]) -> None:
        self.ids.free(state for state in self.of[blocks].tolist() if state != NONE)

    def check(self, kept: Iterable[int]) -> None:
        """InvariantError unless GPU blocks and the host's cache, which has `kept`, are all that use them."""
        self.ids.check()
        users = Counter(state for state in self.of.tolist() if state != NONE)
        users.update(kept)
        for state in range(self.ids.num_blocks):
            if users[state] != self.ids.num_users(state):
                raise InvariantError(f"state block {state} has {self.ids.num_users(state)} users, not {users[state]}")


class KeptStates(HostedBlocks):
    """`HostedBlocks` of states, which turns leave where they are.

    Args:
        states: of the GPU's blocks.
    """

    def __init__(self, states: StateBlocks) -> None:
        super().__init__(states.ids)
        self._states = states

    def leave(self, store: Store, blocks: list[int]) -> None:
        """What GPU `blocks` have is kept under keys, too."""
        found = self._states.of[blocks].tolist()
        self._name(store, found)
        self._states.ids.share(found)
        self.lose(key for key, state in zip(store.keys, found, strict=True) if state in self._states.lost)

    def load(self, load: Load, ids: list[int]) -> list[int]:
        lost = super().load(load, ids)
        # Empty ones stand among the others.
        source = tuple(self._of(key) for key in load.keys)
        self.loading[load.seq] = BlockCopy(load.seq, (0,), Direction.H2D, source, tuple(ids))
        return lost


class TurnPlacement(Placement):
    """`Placement` of whole blocks that have states on the host.

    Args:
        gpu: ids of blocks of KV.
        num_kept: state blocks of ended turns, at most.
    """

    def __init__(self, gpu: BlockIds, num_kept: int, block_tokens: int) -> None:
        self.states = StateBlocks(gpu.num_blocks, num_kept)
        self.kept = KeptStates(self.states)
        super().__init__(gpu, self.states.ids, num_groups=1, block_tokens=block_tokens, hosted=self.kept)

    def _store(self, store: Store) -> None:
        ids = self.held[store.seq].gpu[0]
        self.kept.leave(store, [ids[place] for place in store.places])
        self._lose_unwritten(store)

    def _restore(self, restore: Restore) -> StateRestore:
        seq = restore.seq
        load, ids = self.kept.loading.pop(seq), self.held[restore.seq].gpu[0]
        self.states.share(list(load.target), load.source)
        before = tuple(ids[: ids.index(load.target[0])])
        return StateRestore(seq, restore.kv_groups, Direction.H2D, load.source, load.target, restore, before)

    @property
    def num_idle_hosted(self) -> int:
        return self.host.num_blocks - self.host.num_free - self.kept.num_blocks

    def check(self) -> None:
        super().check()
        self.states.check(self.kept.ids())

    def states_of(self, spans: Iterable[Span]) -> dict[Sequence, Seq[int]]:
        """As `StatePlacement.states_of`: those of all blocks that these tokens and the ones before them fill."""
        written: list[tuple[Sequence, list[int]]] = []
        if not self.host.num_blocks:
            return {}
        begun: dict[int, None] = {}
        for seq, first, end in spans:
            ids = self.held[seq].gpu[0][: self.blocks_for(end)]
            begun.update(dict.fromkeys(ids[self.blocks_for(first) :]))
            written.append((seq, ids))
        # Sequences that share what was never computed may write it at once: once each.
        self.states.renew(list(begun))
        return {seq: self.states.of[ids].tolist() for seq, ids in written}

    def lose(self, spans: Iterable[Span]) -> None:
        """What these spans were to leave on the host is not there."""
        for seq, first, end in spans:
            ids = self.held[seq].gpu[0][first // self.block_tokens : self.blocks_for(end)]
            self.states.lost.update(self.states.of[ids].tolist())
