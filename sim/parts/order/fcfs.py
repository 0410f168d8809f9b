"""`Fcfs`: first come, first served; preempted sequences come first again (vLLM 0.5.5's `waiting`)."""

from collections import deque
from collections.abc import Iterator
from typing import ClassVar

from sim.engine.sequence import Sequence
from sim.parts.base import Order


class Fcfs(Order):
    """A queue by arrival."""

    name: ClassVar[str] = "fcfs"
    sticky: ClassVar[bool] = True

    def __init__(self) -> None:
        self._queue: deque[Sequence] = deque()
        self.waiting = self._queue

    def add(self, seq: Sequence) -> None:
        self._queue.append(seq)

    def put_back(self, seqs: list[Sequence]) -> None:
        self._queue.extendleft(seqs)

    def head(self) -> Sequence:
        return self._queue[0]

    def pop(self) -> Sequence:
        return self._queue.popleft()

    def remove(self, seq: Sequence) -> bool:
        if seq not in self._queue:
            return False
        self._queue.remove(seq)
        return True

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)
