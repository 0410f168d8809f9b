"""`Transfers`: copies beside and behind the computation, from their start until the engine has heard of their end."""

from collections.abc import Sequence as Seq

from gpu_runtime.kv.copies import KVCopies
from gpu_runtime.kv.copy_engine import CopyHandle
from gpu_runtime.kv.replay.held import BlockCopy, Transfer
from gpu_runtime.kv.replay.placement import Placement
from sim.engine.changes import Move
from sim.engine.sequence import Sequence


class Transfers:
    """What is under way. `placement` says which blocks that are, `copies` starts and awaits it."""

    def __init__(self, placement: Placement, copies: KVCopies) -> None:
        self._placement, self._copies = placement, copies
        self._under_way: list[tuple[Transfer, Seq[CopyHandle]]] = []

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def any_ended(self) -> bool:
        """Whether `take_ended` would return anything."""
        return any(_ended(handles) for _, handles in self._under_way)

    def begin(self, move: Move) -> BlockCopy:
        """Start a copy beside the computation."""
        transfer, copy = self._placement.begin(move)
        self._under_way.append((transfer, [self._copies.start(copy)]))
        if transfer.is_lost:
            # Its blocks belong to another sequence already.
            self.wait(move.seq)
        return copy

    def begin_behind(self, move: Move, handles: Seq[CopyHandle]) -> None:
        """The copies behind a prefill have been started; without any they are over."""
        self._under_way.append((self._placement.begin_behind(move), handles))

    def take_ended(self) -> list[Move]:
        """Those that have ended since this was last asked, in order."""
        ended: list[Move] = []
        for entry in list(self._under_way):
            transfer, handles = entry
            if _ended(handles):
                self._await(transfer, handles)
                self._under_way.remove(entry)
                self._placement.end(transfer)
                ended.append(transfer.move)
        return ended

    def wait(self, seq: Sequence) -> None:
        """Wait for every copy of a sequence; their ends are still to be taken."""
        for transfer, handles in self._under_way:
            if transfer.move.seq is seq:
                self._await(transfer, handles)

    def _await(self, transfer: Transfer, handles: Seq[CopyHandle]) -> None:
        """Wait for one; where it fills the host's cache and fails, its sequence may go on."""
        if not transfer.stored:
            self._copies.wait(transfer.move.seq, handles)
        elif not self._copies.went_well(handles):
            self._placement.hosted.lose(transfer.stored)


def _ended(handles: Seq[CopyHandle]) -> bool:
    return all(handle.done() for handle in handles)
