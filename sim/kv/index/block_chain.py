"""Keys that name a block's content and all before it, as vLLM's chained hashes do: `NamedChain`, `BlockChain`."""

from collections.abc import Callable, Iterable

from sim.engine.sequence import Sequence
from sim.kv.index.block_keys import BlockKeys
from traces.request import Request

FIRST_PRIVATE_KEY = 1 << 64
"""Beyond all keys of named blocks."""
FEWEST_LINKS = 64_000
"""Links of a chain that are not worth forgetting."""


class NamedChain(BlockKeys):
    """Keys of the blocks that a trace names: equal keys for equal prefixes, and for nothing else."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self._links: dict[tuple[int, int], int] = {}
        self._last_key = 0
        self._most_links = 0

    def of(self, request: Request) -> tuple[int, ...]:
        return self.extended((), super().of(request))

    def extended(self, chained: tuple[int, ...], keys: tuple[int, ...]) -> tuple[int, ...]:
        """Keys of a sequence's first blocks, and those of the blocks that follow."""
        links, found, last, latest = self._links, [], chained[-1] if chained else 0, self._last_key
        for key in keys:
            last = links.setdefault((last, key), latest + 1)
            if last > latest:
                latest = last
            found.append(last)
        self._last_key = latest
        return (*chained, *found)

    def __len__(self) -> int:
        """Links that are known."""
        return len(self._links)

    def forget(self, keys_in_use: Callable[[], Iterable[int]]) -> None:
        """Forget links to none of the keys in use, which are asked for once there are twice as many as were kept.

        A request with a forgotten prefix gets new keys for it: no sequence holds the old ones.
        """
        if len(self._links) <= max(FEWEST_LINKS, self._most_links):
            return
        kept = set(keys_in_use())
        # A link is younger than those before it.
        for (last, _), key in reversed(self._links.items()):
            if key in kept:
                kept.add(last)
        self._links = {link: key for link, key in self._links.items() if key in kept}
        self._most_links = 2 * len(self._links)


class BlockChain:
    """The same, and keys of its own for what of a sequence has no name."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._named = NamedChain(block_size)
        self._next_private_key = FIRST_PRIVATE_KEY

    def of(self, seq: Sequence) -> tuple[int, ...]:
        """One key for each block that the sequence will ever fill."""
        count = (seq.request.prompt_tokens + seq.output_tokens) // self._block_size
        found, first = self._named.of(seq.request)[:count], self._next_private_key
        self._next_private_key += count - len(found)
        return (*found, *range(first, self._next_private_key))

    def named_of(self, request: Request) -> tuple[int, ...]:
        """Of the blocks that a trace names alone."""
        return self._named.of(request)

    def named(self, known: Iterable[int], keys: tuple[int, ...]) -> tuple[int, ...]:
        """The named blocks of a sequence, `known` ones, and those that have names now."""
        return self._named.extended(tuple(known), keys)
