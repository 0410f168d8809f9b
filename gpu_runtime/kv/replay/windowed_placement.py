"""`WindowedPlacement`: block ids where layers with a window give back what has left it (`sim.kv.hybrid`)."""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq

from gpu_runtime.kv.block_ids import BlockIds
from gpu_runtime.kv.replay.held import Held
from gpu_runtime.kv.replay.placement import Placement
from sim.engine.changes import Place
from sim.engine.limits import WindowLimits
from sim.engine.sequence import Sequence
from sim.errors import InvariantError

LEFT = -1
"""Stands where a block was: attention reads nothing there."""


class WindowedPlacement(Placement):
    """Every block is of one group of layers. Windowed groups come last.

    A sequence's list of a group has an entry for each block since its beginning, so that places are positions.
    """

    def __init__(self, gpu: BlockIds, host: BlockIds, window: WindowLimits, block_tokens: int) -> None:
        num_groups = window.num_full + window.num_window
        super().__init__(gpu, host, num_groups=num_groups, block_tokens=block_tokens)
        self._window, self._windowed = window.tokens, range(window.num_full, num_groups)
        self._begins: dict[Sequence, int] = {}
        """How many blocks of a windowed group a sequence has left."""

    def leave(self, computed: Iterable[tuple[Sequence, int]]) -> None:
        """Give back the blocks that sequences no longer read, whose next token stands at these positions."""
        for seq, position in computed:
            begin = max(0, position - self._window + 1) // self.block_tokens
            if begin <= self._begins[seq]:
                continue
            held = self.held[seq]
            for group in self._windowed:
                ids = held.gpu[group]
                self.gpu.free(ids[self._begins[seq] : begin])
                ids[self._begins[seq] : begin] = [LEFT] * (begin - self._begins[seq])
            held.version += 1
            self._begins[seq] = begin

    def _place(self, place: Place) -> None:
        # How many it takes of each group follows from what it computes: `grow`.
        if place.seq in self.held:
            raise InvariantError(f"{place.seq} is given blocks and holds some already")
        self.held[place.seq] = Held(gpu={group: [] for group in range(self.num_groups)})
        self._begins[place.seq] = 0

    def _release(self, seq: Sequence) -> None:
        held = self.held[seq]
        held.gpu = {group: _there(ids) for group, ids in held.gpu.items()}
        del self._begins[seq]
        super()._release(seq)

    def _gpu_lists(self) -> Iterator[Seq[int]]:
        return map(_there, super()._gpu_lists())


def _there(ids: Seq[int]) -> list[int]:
    return [block for block in ids if block != LEFT]
