"""`KVCopies`: copies of sequences' blocks between the pools of a device. One that fails ends its sequence alone."""

from collections.abc import Callable, Iterable, Iterator

import torch

from gpu_runtime.kv.copy_engine import CopyEngine, CopyFailed, CopyHandle
from gpu_runtime.kv.pool import KVPool
from gpu_runtime.kv.replay.held import BlockCopy
from sim.engine.changes import Direction
from sim.engine.sequence import Sequence


class KVCopies:
    """Starts copies, and waits for them.

    Args:
        engine: makes them.
        gpu, host: the pools between which blocks move.
        fail: hears of each sequence whose KV a failed copy has lost, and why.
    """

    def __init__(self, engine: CopyEngine, gpu: KVPool, host: KVPool, fail: Callable[[Sequence, str], None]) -> None:
        self._engine, self._gpu, self._host, self.fail = engine, gpu, host, fail
        # Has nothing but waits: what is submitted on it follows another copy, and the computation goes on.
        self._order = torch.cuda.Stream(gpu.device) if gpu.device.type == "cuda" else None

    def start(self, *copies: BlockCopy) -> CopyHandle:
        """Start copies of one direction as one, which follows what is queued on the current stream."""
        direction = copies[0].direction
        pools = (self._gpu, self._host) if direction is Direction.D2H else (self._host, self._gpu)
        source = [block for copy in copies for block in copy.source]
        target = [block for copy in copies for block in copy.target]
        return self._engine.copy_blocks(pools[0], source, pools[1], target, direction)

    def start_by_layer(self, *copies: BlockCopy) -> list[CopyHandle]:
        """Start copies to the GPU of blocks of all layers: one for each layer, in order."""
        source = [block for copy in copies for block in copy.source]
        target = [block for copy in copies for block in copy.target]
        return [
            self._engine.copy_layer(self._host, source, self._gpu, target, layer, Direction.H2D)
            for layer in range(self._gpu.layer_group)
        ]

    def start_after(self, before: CopyHandle, *copies: BlockCopy) -> CopyHandle:
        """Start copies as one, once `before` is over, and with it whatever that one waited for.

        On a CPU the caller waits; on CUDA only until `before` is queued.
        """
        with torch.cuda.stream(self._order):
            self.wait_in_stream([copy.seq for copy in copies], before)
            return self.start(*copies)

    def wait(self, seq: Sequence, handles: Iterable[CopyHandle]) -> bool:
        """Block the caller until a sequence's copies are over; whether all went well."""
        errors = list(_failures(handles))
        for error in errors:
            self.fail(seq, f"copy of KV blocks: {error}")
        return not errors

    def went_well(self, handles: Iterable[CopyHandle]) -> bool:
        """The same of copies whose failure ends no sequence."""
        return not list(_failures(handles))

    def wait_in_stream(self, seqs: Iterable[Sequence], handle: CopyHandle) -> bool:
        """Let the current stream wait for a copy of some sequences' blocks; the host goes on queueing layers.

        Whether the copy went well, as far as is known.
        """
        try:
            handle.wait_in_stream()
        except CopyFailed as error:
            for seq in seqs:
                self.fail(seq, f"copy of KV blocks: {error}")
            return False
        return True


def _failures(handles: Iterable[CopyHandle]) -> Iterator[CopyFailed]:
    """Block the caller until every copy is over; those that fail, as they do."""
    for handle in handles:
        try:
            handle.wait()
        except CopyFailed as error:
            yield error
