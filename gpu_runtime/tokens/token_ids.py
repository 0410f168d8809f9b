"""`TokenIds`: the tokens of the sequences of one device, and the names of the blocks that they fill.

A full block is named by the tokens in it and before it, as vLLM hashes them (sha256, chained).
"""

from collections.abc import Sequence as Seq
from hashlib import sha256
from itertools import cycle, islice

import numpy as np

from sim.engine.sequence import Sequence
from traces.request import Request

NO_PARENT = bytes(32)
"""Stands for the hash of a block before the first."""


def hash_blocks(tokens: list[int], block_tokens: int, parent: bytes = NO_PARENT) -> list[bytes]:
    """The hash of each full block of `tokens`: of the hash before it, `parent` for the first, and of its tokens."""
    found = []
    data = np.asarray(tokens, dtype="<i8").tobytes()
    size = block_tokens * 8
    for begin in range(0, len(data) - size + 1, size):
        parent = sha256(parent + data[begin : begin + size]).digest()
        found.append(parent)
    return found


def answer_to(prompt: Seq[int], num_tokens: int) -> list[int]:
    """A tool's answer that depends on nothing but the request: its prompt, again and again."""
    return list(islice(cycle(prompt), num_tokens))


class TokenIds:
    """Prompts from the arrival of their requests on, and what has been chosen after them.

    `block_tokens` are those of a block that has a name; None where prefixes are not cached, and none has.
    """

    def __init__(self, block_tokens: int | None) -> None:
        self._block_tokens = block_tokens
        self._last: dict[int, bytes] = {}
        """Hash of the last full block, by request id."""
        self._grown: list[tuple[Sequence, tuple[int, ...]]] = []
        self._prompts: dict[int, list[int]] = {}
        # By request id, of those that have not been computed.
        self._tokens: dict[Sequence, list[int]] = {}

    def __len__(self) -> int:
        """How many sequences have been computed and not forgotten."""
        return len(self._tokens)

    def __contains__(self, seq: Sequence) -> bool:
        """Whether a sequence has been computed and not forgotten."""
        return seq in self._tokens

    def arrived(self, request: Request, prompt: list[int]) -> Request:
        """The request, with the names of its prompt's blocks where prefixes are cached."""
        self._prompts[request.request_id] = prompt
        if self._block_tokens is None:
            return request
        hashes = hash_blocks(prompt, self._block_tokens)
        self._last[request.request_id] = hashes[-1] if hashes else NO_PARENT
        names = tuple(map(int.from_bytes, hashes))
        return request._replace(hash_ids=names, hash_block_tokens=self._block_tokens, output_hash_ids=())

    def named_blocks(self) -> list[tuple[Sequence, tuple[int, ...]]]:
        """Sequences that have filled a block since this was last asked, and its name."""
        found, self._grown = self._grown, []
        return found

    def of(self, seq: Sequence) -> list[int]:
        """The prompt, and all that has been chosen."""
        tokens = self._tokens.get(seq)
        if tokens is None:
            tokens = self._tokens[seq] = self._prompts.pop(seq.request.request_id)
        return tokens

    def append(self, seq: Sequence, token: int) -> None:
        """A token has been chosen."""
        tokens, size, number = self.of(seq), self._block_tokens, seq.request.request_id
        tokens.append(token)
        if size is not None and len(tokens) % size == 0:
            (self._last[number],) = hash_blocks(tokens[-size:], size, self._last[number])
            self._grown.append((seq, (int.from_bytes(self._last[number]),)))

    def extend(self, seq: Sequence, num_tokens: int) -> None:
        """A tool has answered with so many tokens. A trace says no more of them (`answer_to`)."""
        for token in answer_to(self.of(seq)[: seq.request.prompt_tokens], num_tokens):
            self.append(seq, token)

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended, whether it was ever computed or not."""
        self._tokens.pop(seq, None)
        self._prompts.pop(seq.request.request_id, None)
        self._last.pop(seq.request.request_id, None)
