"""Prompts made of passages of a corpus and a question, as retrieval makes them: what reuse beyond prefixes is for.

The same few passages are asked for again and again, in another order and behind others. Hash ids name their content.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, count, islice

import numpy as np

from traces.errors import TraceError
from traces.rates import check_between
from traces.request import Request

LIMITS = (
    ("documents", 1, 10_000),
    ("document_len", 1, 1_000_000),
    ("corpus", 1, 1_000_000),
    ("hash_block_tokens", 1, 1_000_000),
    ("skew", 0, 5),
)


def with_documents(questions: Iterable[Request], options: Mapping[str, float], seed: int) -> Iterator[Request]:
    """Put `documents` different passages of `document_len` tokens each before every prompt.

    The passage of rank r among `corpus` ones is drawn with a weight of r ** -`skew`; they stand in the order drawn.
    Raises `TraceError` at once where an option is out of range.
    """
    for name, least, most in LIMITS:
        check_between(name, options[name], "correct it", least, most)
    num, length, corpus, block = (
        int(options[name]) for name in ("documents", "document_len", "corpus", "hash_block_tokens")
    )
    if num > corpus:
        raise TraceError(f"documents {num} is more than a corpus of {corpus}; give fewer, or a larger corpus")
    if length % block:
        raise TraceError(f"document_len {length} is not whole blocks of hash_block_tokens {block}; give a multiple")
    return _drawn(questions, num, length // block, corpus, options["skew"], block, seed)


def _drawn(
    questions: Iterable[Request], num: int, blocks: int, corpus: int, skew: float, block: int, seed: int
) -> Iterator[Request]:
    weights = np.arange(1, corpus + 1, dtype=float) ** -skew
    weights /= weights.sum()
    random, fresh_ids = np.random.default_rng([seed, 3]), count(corpus * blocks)
    for request in questions:
        drawn = random.choice(corpus, num, replace=False, p=weights).tolist()
        passages = chain.from_iterable(range(d * blocks, (d + 1) * blocks) for d in drawn)
        ids = (*passages, *islice(fresh_ids, request.prompt_tokens // block))
        prompt = request.prompt_tokens + num * blocks * block
        yield request._replace(prompt_tokens=prompt, hash_ids=ids, hash_block_tokens=block)
