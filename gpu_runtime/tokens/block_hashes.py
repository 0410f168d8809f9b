"""`BlockHashes`: names of full blocks by the tokens in them and before them, as vLLM hashes them (sha256, chained)."""

from hashlib import sha256

import numpy as np

from sim.engine.sequence import Sequence
from traces.request import Request

HASH_BYTES = 32
NO_PARENT = bytes(HASH_BYTES)


def hash_blocks(tokens: list[int], block_tokens: int, parent: bytes = NO_PARENT) -> list[bytes]:
    """The hash of each full block of `tokens`: of the hash before it, `parent` for the first, and of its tokens."""
    found = []
    data = np.asarray(tokens, dtype="<i8").tobytes()
    size = block_tokens * 8
    for begin in range(0, len(data) - size + 1, size):
        parent = sha256(parent + data[begin : begin + size]).digest()
        found.append(parent)
    return found


class BlockHashes:
    """What is in the blocks of requests that run. Equal keys mean equal tokens, in the block and before it."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._last: dict[int, bytes] = {}
        """Hash of the last full block, by request id."""
        self._grown: list[tuple[Sequence, tuple[int, ...]]] = []

    def named(self, request: Request, prompt: list[int]) -> Request:
        """The request with the keys of its prompt's full blocks in place of a trace's names."""
        hashes = hash_blocks(prompt, self._block_tokens)
        self._last[request.request_id] = hashes[-1] if hashes else NO_PARENT
        keys = tuple(int.from_bytes(digest) for digest in hashes)
        return request._replace(hash_ids=keys, hash_block_tokens=self._block_tokens, output_hash_ids=())

    def grown(self, seq: Sequence, tokens: list[int]) -> None:
        """`seq` has a token more, the last of `tokens`."""
        size = self._block_tokens
        if len(tokens) % size == 0:
            number = seq.request.request_id
            self._last[number] = hash_blocks(tokens[-size:], size, self._last[number])[0]
            self._grown.append((seq, (int.from_bytes(self._last[number]),)))

    def take(self) -> list[tuple[Sequence, tuple[int, ...]]]:
        """Sequences that have filled a block since this was last asked, and its key."""
        found, self._grown = self._grown, []
        return found

    def forget(self, seq: Sequence) -> None:
        """`seq` has ended."""
        self._last.pop(seq.request.request_id, None)
