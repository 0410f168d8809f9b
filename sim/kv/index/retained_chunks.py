"""`ChunkStore`: chunks of conversations on the GPU and the host, each by itself, and which of them give way.

Pensieve's rule (section 4.3.1): the chunk goes first whose cost to compute again, for the time since it was used, is
least. Attention makes later chunks dearer: of one conversation the first goes first, and what is left need not begin
where the conversation does.
"""

from collections.abc import Callable, Iterable
from heapq import nsmallest

from sim.engine.sequence import Sequence
from sim.kv.block_pool import Evicts

CLEAN, DIRTY, LEAVING = range(3)
"""Idle chunks on the GPU: the host has a copy; it has none; it is being given one."""
RESOLUTION_S = 6
"""Digits of seconds that ages count in: sums of floats differ by less, and may not decide."""


class Chunk:
    """A block of tokens. `place`: how many stand before it in its conversation; `owner` had it last."""

    __slots__ = ("copies", "is_leaving", "key", "on_gpu", "on_host", "owner", "place", "used_s", "users")

    def __init__(self, key: int, place: int, owner: Sequence) -> None:
        self.key, self.place, self.owner = key, place, owner
        self.users = 0
        """Sequences that hold it on the GPU."""
        self.copies = 0
        """Copies that read it on the host."""
        self.on_gpu = self.on_host = self.is_leaving = False
        self.used_s = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether it is on the GPU and no sequence holds it there."""
        return self.on_gpu and not self.users

    @property
    def state(self) -> int:
        """Of an idle chunk: whether it could go at once."""
        return CLEAN if self.on_host else LEAVING if self.is_leaving else DIRTY


class ChunkStore(Evicts):
    """Chunks by key, and the host's room.

    Args:
        num_host: chunks that the host holds.
        cost_s: of computing the chunk at a place again, s.
    """

    def __init__(self, num_host: int, cost_s: Callable[[int], float]) -> None:
        self.num_host = self.host_free = num_host
        self.chunks: dict[int, Chunk] = {}
        self.num_idle = self.num_evicted = self.num_evicted_host = 0
        self.version = 0
        """Grows with every change to what can be hit."""
        self.num = [0, 0, 0]
        """Idle chunks on the GPU that are clean, dirty and leaving."""
        self._cost_s = cost_s
        self._clock_s = 0.0
        # Idle chunks on the GPU, the next to go last; None: to be made.
        self._ranked: list[Chunk] | None = None

    def now(self, time_s: float) -> None:
        """Ages are those at this time from now on: when a sequence starts or ends, not within a jump."""
        self._clock_s = round(time_s, RESOLUTION_S)
        self._ranked = None

    def _count(self, chunk: Chunk, sign: int) -> None:
        if chunk.is_idle:
            self.num[chunk.state] += sign
            self.num_idle += sign
            self._ranked = None

    def _rank(self, chunk: Chunk) -> tuple[float, int]:
        return -(self._clock_s - chunk.used_s) / self._cost_s(chunk.place), chunk.place

    # -- the GPU -----------------------------------------------------------------------------------------------------

    def hold(self, chunk: Chunk) -> bool:
        """One more sequence holds it on the GPU; whether it was idle there."""
        self._count(chunk, -1)
        was_idle = chunk.is_idle
        chunk.on_gpu = True
        chunk.users += 1
        self.version += 1
        return was_idle

    def let_go(self, chunk: Chunk, owner: Sequence) -> bool:
        """One fewer does; whether it is idle now."""
        chunk.users -= 1
        self._use(chunk, owner)
        return not chunk.users

    def put(self, key: int, place: int, owner: Sequence) -> bool:
        """A sequence leaves a chunk of its own; whether it is idle on the GPU now, which may have had it already."""
        chunk = self.chunks.get(key)
        if chunk is None:
            chunk = self.chunks[key] = Chunk(key, place, owner)
        is_new = not chunk.on_gpu
        self._count(chunk, -1)
        chunk.on_gpu = True
        self._use(chunk, owner)
        return is_new

    def _use(self, chunk: Chunk, owner: Sequence) -> None:
        chunk.used_s, chunk.owner = self._clock_s, owner
        self._count(chunk, 1)
        self.version += 1

    def evict(self, count: int) -> None:
        """Give up idle chunks on the GPU: those that the host has too first."""
        if self._ranked is None:
            idle = (chunk for chunk in self.chunks.values() if chunk.is_idle)
            self._ranked = sorted(idle, key=lambda chunk: (chunk.state, self._rank(chunk)), reverse=True)
        ranked = self._ranked
        for _ in range(count):
            self._leave_gpu(ranked.pop())
        self._ranked = ranked
        self.num_evicted += count

    def _leave_gpu(self, chunk: Chunk) -> None:
        self._count(chunk, -1)
        self.left_gpu(chunk)
        chunk.on_gpu = False
        if chunk.is_leaving:
            # The next to take its block overwrites what is being copied.
            self.left_host(chunk)
            chunk.is_leaving = False
            self.host_free += 1
        self.version += 1
        self._forget_if_nowhere(chunk)

    def left_gpu(self, chunk: Chunk) -> None:
        """A chunk is about to leave the GPU. For what keeps its block's id (`TellingChunks`)."""

    def left_host(self, chunk: Chunk) -> None:
        """It, or its copy under way, is about to leave the host."""

    def _forget_if_nowhere(self, chunk: Chunk) -> None:
        if not (chunk.on_gpu or chunk.on_host):
            del self.chunks[chunk.key]

    # -- the host ----------------------------------------------------------------------------------------------------

    def send_out(self, count: int) -> list[Chunk]:
        """Up to so many chunks that are to be copied to the host now: the next to go that it lacks."""
        count = min(count, self.num[DIRTY])
        if count > self.host_free:
            count = min(count, self.host_free + sum(map(self._may_leave_host, self.chunks.values())))
        if count <= 0:
            return []
        dirty = (chunk for chunk in self.chunks.values() if chunk.is_idle and chunk.state == DIRTY)
        chosen = nsmallest(count, dirty, key=self._rank)
        if count > self.host_free:
            others = filter(self._may_leave_host, self.chunks.values())
            for chunk in nsmallest(count - self.host_free, others, key=self._rank):
                self._leave_host(chunk)
                self.num_evicted_host += 1
        for chunk in chosen:
            self._count(chunk, -1)
            chunk.is_leaving = True
            self._count(chunk, 1)
        self.host_free -= count
        return chosen

    @staticmethod
    def _may_leave_host(chunk: Chunk) -> bool:
        return chunk.on_host and not chunk.on_gpu and not chunk.copies

    def _leave_host(self, chunk: Chunk) -> None:
        self.left_host(chunk)
        chunk.on_host = False
        self.host_free += 1
        self.version += 1
        self._forget_if_nowhere(chunk)

    def arrived(self, chunks: Iterable[Chunk]) -> None:
        """Copies to the host have ended; what left the GPU meanwhile is lost."""
        for chunk in chunks:
            if chunk.is_leaving:
                self._count(chunk, -1)
                chunk.is_leaving, chunk.on_host = False, True
                self._count(chunk, 1)
        self.version += 1

    def drop(self, key: int) -> None:
        """It will not be asked for again. What a sequence still reads goes by its age."""
        chunk = self.chunks.get(key)
        if chunk is None or chunk.users or chunk.copies:
            return
        self._count(chunk, -1)
        if chunk.on_gpu:
            self.left_gpu(chunk)
        if chunk.on_host or chunk.is_leaving:
            self.left_host(chunk)
            self.host_free += 1
        chunk.on_gpu = chunk.on_host = chunk.is_leaving = False
        self.version += 1
        self._forget_if_nowhere(chunk)
