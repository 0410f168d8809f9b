"""`TracePrompts`: token ids for requests that come with lengths and perhaps with `hash_ids`, but with no text."""

import numpy as np
import torch

from gpu_runtime.tokens.splitmix import BITS, counts, mix
from sim.engine.sequence import Sequence
from traces.request import Request


class TracePrompts:
    """Prompts with the same tokens where a trace names the same blocks, else random ones.

    The token at an offset of a named block depends on both and on the seed. Where an answer fills a block that the
    trace names (`output_hash_ids`, and the prompt's last block), later prompts have what was really generated there, so
    that the next turn of a conversation goes on from this one's answer. A prompt is fixed when its request arrives: of
    an answer that has not come by then it has made-up tokens, as the trace says that it was sent before.
    """

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size, self._seed = vocab_size, seed
        self._answers: dict[int, tuple[Request, int]] = {}
        """Requests whose answers have named blocks, by id, and where their next token stands."""
        self._generated: dict[int, dict[int, int]] = {}
        """Tokens at offsets of named blocks."""

    def __call__(self, request: Request) -> list[int]:
        """Token ids [prompt_tokens]."""
        ids, size = request.hash_ids, request.hash_block_tokens
        if request.prompt_tokens < (len(ids) + len(request.output_hash_ids)) * size:
            self._answers[request.request_id] = request, request.prompt_tokens
        prompt = self._random(request)
        named = min(len(ids) * size, request.prompt_tokens)
        if named:
            prompt[:named] = self._blocks(ids, size)[:named]
        for place, ident in enumerate(ids if self._generated else ()):
            for offset, token in self._generated.get(ident, {}).items():
                if place * size + offset < named:
                    prompt[place * size + offset] = token
        return prompt

    def hear(self, seq: Sequence, token: int, time_s: float) -> None:
        """A token of an answer (`gpu_runtime.device.OnToken`)."""
        number = seq.request.request_id
        answer = self._answers.get(number)
        if answer is None:
            return
        request, position = answer
        block, offset = divmod(position, request.hash_block_tokens)
        ids = request.hash_ids + request.output_hash_ids
        self._generated.setdefault(ids[block], {})[offset] = token
        position += 1
        if position < min(len(ids) * request.hash_block_tokens, request.prompt_tokens + request.output_tokens):
            self._answers[number] = request, position
        else:
            del self._answers[number]

    def _random(self, request: Request) -> list[int]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + request.request_id)
        return torch.randint(0, self._vocab_size, (request.prompt_tokens,), generator=generator).tolist()

    def _blocks(self, ids: tuple[int, ...], size: int) -> list[int]:
        """The tokens of named blocks, one after the other."""
        names = np.array([ident % BITS for ident in ids], dtype=np.uint64)
        mixed = mix(mix(names + mix(np.array([self._seed % BITS], dtype=np.uint64)))[:, None] + counts(size))
        return (mixed % np.uint64(self._vocab_size)).ravel().tolist()
