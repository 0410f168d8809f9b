"""Which blocks have the states of sequences that run (HCache): blocks of the host beside those on the GPU."""

from collections import abc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gpu_runtime.kv.block_ids import BlockIds
from gpu_runtime.kv.replay.held import BlockCopy
from gpu_runtime.kv.replay.placement import Placement
from gpu_runtime.kv.replay.prefix_blocks import Span
from sim.engine.changes import Direction, Move, Restore, Save, Unsave
from sim.engine.sequence import Sequence
from sim.errors import InvariantError


@dataclass(frozen=True)
class StateRestore(BlockCopy):
    """KV of the GPU blocks `target` comes back from the states in `source`, each layer in its way.

    The sequence's blocks `before` them have KV.
    """

    restore: Restore
    before: tuple[int, ...] = ()


class StatePlacement(Placement):
    """`Placement` of whole blocks whose sequences' states, if saved, have host blocks beside those on the GPU.

    Args:
        gpu, host: ids of blocks of KV, and of states.
    """

    def __init__(self, gpu: BlockIds, host: BlockIds, block_tokens: int) -> None:
        super().__init__(gpu, host, num_groups=1, block_tokens=block_tokens)
        self.states: dict[Sequence, list[int]] = {}
        """Host blocks of those whose states are saved."""

    def _note_states(self, change: Save | Unsave) -> None:
        seq = change.seq
        if isinstance(change, Save):
            self.states[seq] = self.host.allocate(len(self.held[seq].gpu[0]))
        else:
            self.host.free(self.states.pop(seq))

    def _release(self, seq: Sequence) -> None:
        super()._release(seq)
        self.host.free(self.states.pop(seq, ()))

    def _grown(self, seq: Sequence, blocks: int) -> None:
        states = self.states.get(seq)
        if states is not None and len(states) < blocks:
            states += self.host.allocate(blocks - len(states))

    def _move_at_once(self, move: Move) -> BlockCopy:
        """Everything about it has been saved: its GPU blocks are free."""
        seq, held = move.seq, self.held[move.seq]
        if move.is_reported or move.direction is not Direction.D2H or seq not in self.states:
            raise InvariantError(f"{seq}: {move} is not that of a sequence whose states are saved")
        self.gpu.free(held.gpu.pop(0))
        held.version += 1
        return BlockCopy(seq, move.groups, move.direction, (), ())

    def _restore(self, restore: Restore) -> BlockCopy:
        seq, held = restore.seq, self.held[restore.seq]
        states = self.states[seq]
        held.gpu[0] = self.gpu.allocate(len(states))
        held.version += 1
        return StateRestore(seq, restore.kv_groups, Direction.H2D, tuple(states), tuple(held.gpu[0]), restore)

    def states_of(self, spans: Iterable[Span]) -> dict[Sequence, abc.Sequence[int]]:
        """State blocks, in order, of sequences that are to compute tokens [first, end), if these are saved."""
        return {seq: self.states[seq] for seq, _, _ in spans if seq in self.states}

    def _host_lists(self) -> Iterator[abc.Sequence[int]]:
        yield from super()._host_lists()
        yield from self.states.values()
