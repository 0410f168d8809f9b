"""`TokenIds`: the tokens of the sequences of one device, and the names of the blocks that they fill."""

from collections.abc import Sequence as Seq
from itertools import cycle, islice

from gpu_runtime.tokens.block_hashes import BlockHashes
from sim.engine.sequence import Sequence
from traces.request import Request


def answer_to(prompt: Seq[int], num_tokens: int) -> list[int]:
    """A tool's answer that depends on nothing but the request: its prompt, again and again."""
    return list(islice(cycle(prompt), num_tokens))


class TokenIds:
    """Prompts from the arrival of their requests on, and what has been chosen after them.

    `hashes` name the blocks; None where prefixes are not cached.
    """

    def __init__(self, hashes: BlockHashes | None) -> None:
        self._hashes = hashes
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
        return request if self._hashes is None else self._hashes.named(request, prompt)

    def named_blocks(self) -> list[tuple[Sequence, tuple[int, ...]]]:
        """Sequences that have filled a block since this was last asked, and its name."""
        return [] if self._hashes is None else self._hashes.take()

    def of(self, seq: Sequence) -> list[int]:
        """The prompt, and all that has been chosen."""
        tokens = self._tokens.get(seq)
        if tokens is None:
            tokens = self._tokens[seq] = self._prompts.pop(seq.request.request_id)
        return tokens

    def append(self, seq: Sequence, token: int) -> None:
        """A token has been chosen."""
        tokens = self.of(seq)
        tokens.append(token)
        if self._hashes is not None:
            self._hashes.grown(seq, tokens)

    def extend(self, seq: Sequence, num_tokens: int) -> None:
        """A tool has answered with so many tokens. A trace says no more of them (`answer_to`)."""
        for token in answer_to(self.of(seq)[: seq.request.prompt_tokens], num_tokens):
            self.append(seq, token)

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended, whether it was ever computed or not."""
        self._tokens.pop(seq, None)
        self._prompts.pop(seq.request.request_id, None)
        if self._hashes is not None:
            self._hashes.forget(seq)
