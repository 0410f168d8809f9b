"""`WindowedBatch`: the decode batch of a model some of whose layers attend to a window of the context only.

Such a layer reads min(context, window) tokens of each member and keeps a ring of as many blocks. A member below a cap
is counted by the step at which it gets there, as completions are: a step still costs no work per member.
"""

from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING

from sim.engine.batch import DecodeBatch
from sim.engine.limits import WindowLimits
from sim.engine.plan import IterationPlan, StepTimes, WindowTokens
from sim.engine.sequence import Sequence

if TYPE_CHECKING:
    from sim.engine.itl import GapCollector


class Below:
    """Members whose context is below a cap, as counts; their growth by length modulo the block size."""

    __slots__ = ("_heap", "_reaching", "cap", "crossed", "growth", "offsets", "size")

    def __init__(self, cap: int, block_size: int) -> None:
        self.cap = cap
        self.size = 0
        # Sum of the members' `batch_offset`: their contexts together are offsets + size * step.
        self.offsets = 0
        self.growth = [0] * block_size
        # Members that have reached the cap by this step have left the counts.
        self.crossed = 0
        # Members by the step at which they reach the cap.
        self._reaching: dict[int, int] = {}
        self._heap: list[int] = []

    def count(self, offset: int, sign: int) -> None:
        """A member with that `batch_offset` joins the batch (`sign` 1) or leaves it (-1)."""
        step = self.cap - offset
        if step <= self.crossed:
            return
        self._count(offset, sign)
        reaching, heap = self._reaching, self._heap
        known = reaching.get(step)
        if known is None:
            heappush(heap, step)
        reaching[step] = (known or 0) + sign
        while heap and not reaching[heap[0]]:
            # The members that would have reached the cap then have left.
            del reaching[heappop(heap)]

    def _count(self, offset: int, count: int) -> None:
        self.size += count
        self.offsets += count * offset
        self.growth[(1 - offset) % len(self.growth)] += count

    def cross(self, step: int) -> None:
        """The batch is at `step`: members that have reached the cap leave the counts."""
        heap = self._heap
        while heap and (heap[0] <= step or not self._reaching[heap[0]]):
            at = heappop(heap)
            self._count(self.cap - at, -self._reaching.pop(at))
        self.crossed = step

    def next_step(self) -> float:
        """Step at which the next member reaches the cap; infinite where none is below it."""
        return self._heap[0] if self._heap else inf


class WindowedBatch(DecodeBatch):
    """As `DecodeBatch`; jumps end where a member's window or ring is full, a breakpoint of durations."""

    __slots__ = ("_reading", "_ring", "window")

    def __init__(self, block_size: int, gaps: "GapCollector", limits: WindowLimits) -> None:
        super().__init__(block_size, gaps)
        self.window = limits.tokens
        self._reading = Below(limits.tokens, block_size)
        # The token that follows the last one of a full ring overwrites.
        self._ring = None if limits.blocks is None else Below(limits.blocks * block_size + 1, block_size)

    @property
    def windowed(self) -> WindowTokens:
        """What a layer with a window reads in the next iteration of the whole batch."""
        below = self._reading
        tokens = below.offsets + below.size * self.step + (len(self.members) - below.size) * self.window
        return WindowTokens(tokens, below.size)

    def follow(self, plan: IterationPlan) -> None:
        """Say the same for the decodes of a plan."""
        window = self.window
        if plan.num_decodes == len(self.members):
            plan.decode_window = self.windowed
        else:
            plan.decode_window = WindowTokens(sum(min(window, self.num_tokens_of(seq)) for seq in plan.decodes), 0)

    def ring_blocks_needed(self, steps: int = 1) -> int:
        """Blocks that the rings of one group of layers grow by in the next `steps` iterations.

        Only as far as `steps_to_finish` allows: no ring is full before.
        """
        ring = self._ring
        if ring is None:
            return 0
        size = self.block_size
        cycles, rest = divmod(steps, size)
        begin = self.step % size
        return cycles * ring.size + sum(ring.growth[(begin + i) % size] for i in range(rest))

    def ring_grows(self, seq: Sequence) -> bool:
        """Whether the block that the next token of a member begins is one more for its ring."""
        return self._ring is not None and seq.batch_offset + self.step < self._ring.cap

    def steps_to_finish(self) -> int:
        """Iterations until the next completion, window full or ring full; at least 1."""
        steps = min(super().steps_to_finish(), self._reading.next_step() - self.step + 1)
        if self._ring is not None:
            steps = min(steps, self._ring.next_step() - self.step)
        return int(steps)

    def add(self, seq: Sequence, *, first: bool = False, num_hosted: int = 0) -> None:
        super().add(seq, first=first, num_hosted=num_hosted)
        self._count(seq.batch_offset, 1)

    def remove(self, seq: Sequence) -> None:
        self._count(seq.batch_offset, -1)
        super().remove(seq)

    def _shift(self, seq: Sequence) -> None:
        self._count(seq.batch_offset, -1)
        super()._shift(seq)
        self._count(seq.batch_offset, 1)

    def _count(self, offset: int, sign: int) -> None:
        self._reading.count(offset, sign)
        if self._ring is not None:
            self._ring.count(offset, sign)

    def advance(self, times: StepTimes) -> list[Sequence]:
        finished = super().advance(times)
        self._reading.cross(self.step)
        if self._ring is not None:
            self._ring.cross(self.step)
        return finished
