"""`Storage`: the files that chunks of KV are kept in behind the host, and `Lookups`, what an engine has asked of them.

After vLLM 0.33 (`kv_offload/tiering/fs`, `async_lookup.py`). LMCache calls such a store local disk where an engine has
one of its own, remote where engines share it. One thread answers whether a chunk is there, between two steps.
"""

from collections import OrderedDict
from collections.abc import Iterable

from sim.kv.index.block_chain import BlockChain
from sim.kv.tiers.jobs import Offloaded


class Storage:
    """Which chunks are kept, of one engine or of all that share them.

    Args:
        num_chunks: that there is room for; the longest unused gives way. None: as many as are written.
        chain: names the chunks.
    """

    def __init__(self, num_chunks: int | None, chain: BlockChain) -> None:
        self.num_chunks, self.chain = num_chunks, chain
        self._kept: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, key: int) -> bool:
        return key in self._kept

    def write(self, keys: Iterable[int]) -> int:
        """Chunks have been written; how many gave way."""
        for key in keys:
            self._kept[key] = None
            self._kept.move_to_end(key)
        over = 0 if self.num_chunks is None else max(0, len(self._kept) - self.num_chunks)
        for _ in range(over):
            self._kept.popitem(last=False)
        return over

    def read(self, keys: Iterable[int]) -> None:
        """Chunks that are there are used again."""
        for key in keys:
            if key in self._kept:
                self._kept.move_to_end(key)


class Lookups:
    """Answers for an engine's requests. What one was told holds until all that asked have ended."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._answers: dict[int, bool] = {}
        self._askers: dict[int, set[Offloaded]] = {}
        self._asked: dict[Offloaded, set[int]] = {}
        self._open: list[int] = []

    def find(self, request: Offloaded, key: int) -> bool | None:
        """Whether a chunk is there; None: that is not known before the next step."""
        askers = self._askers.get(key)
        if askers is None:
            askers = self._askers[key] = set()
            self._open.append(key)
        askers.add(request)
        self._asked.setdefault(request, set()).add(key)
        return self._answers.get(key)

    def answer(self) -> bool:
        """The step has asked all it wants to know; whether it has asked anything."""
        asked, self._open = self._open, []
        for key in asked:
            if key in self._askers:
                self._answers[key] = key in self._storage
        return bool(asked)

    def forget(self, request: Offloaded) -> None:
        """A request has ended, and nothing of it is stored any more."""
        for key in self._asked.pop(request, ()):
            askers = self._askers[key]
            askers.remove(request)
            if not askers:
                del self._askers[key]
                self._answers.pop(key, None)
