"""`Priority`: the most urgent first, then by arrival (vLLM's `--scheduling-policy priority`)."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import ClassVar

from sim.engine.sequence import Sequence
from sim.parts.base import Order

Urgency = tuple[int, float, int]


def urgency(seq: Sequence) -> Urgency:
    """What the queue and victims are ordered by; smaller is more urgent."""
    request = seq.request
    return request.priority, request.arrival_s, request.request_id


class Priority(Order):
    """A heap; a preempted sequence takes the place that its priority gives it."""

    name: ClassVar[str] = "priority"
    sticky: ClassVar[bool] = False

    def __init__(self) -> None:
        self._heap: list[tuple[Urgency, Sequence]] = []
        self.waiting = self._heap

    def add(self, seq: Sequence) -> None:
        heappush(self._heap, (urgency(seq), seq))

    def put_back(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            self.add(seq)

    def head(self) -> Sequence:
        return self._heap[0][1]

    def pop(self) -> Sequence:
        return heappop(self._heap)[1]

    def remove(self, seq: Sequence) -> bool:
        entry = (urgency(seq), seq)
        if entry not in self._heap:
            return False
        self._heap.remove(entry)
        heapify(self._heap)
        return True

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for _, seq in sorted(self._heap, key=lambda entry: entry[0]))
