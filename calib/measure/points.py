"""`Point`: one thing to measure, alone. A sample without its times; fields are columns of `calib.samples`."""

from collections.abc import Sequence
from statistics import median
from typing import Any

import msgspec

from calib.samples import WHOLE, Sample, spread_s

KIB = 1024
BLOCK_TOKENS = 16
"""Tokens per KV block."""
DRAWN_OPS = frozenset({"layers", "recompute", "step"})
DRAWN_SHARE = 64
"""Prompts of a grid's n tokens have n - n / 32 to n: half as far from their mean, n - n / 64. Up to n, since kernels
compute whole tiles and n is full of them."""
UNITS = ((KIB**3, "GiB"), (KIB**2, "MiB"), (KIB, "KiB"))


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """One operating point, before it is measured."""

    op: str
    model: str = ""
    tp: int = 1
    num_layers: int = 1
    batch_size: int = 1
    new_tokens: int = 0
    context_tokens: int = 0
    decodes: int = 0
    decode_context_tokens: int = 0
    num_bytes: int = 0
    num_copies: int = 1
    memory: str = "pinned"
    graph: int = 0

    @property
    def tokens(self) -> int:
        """Tokens computed, all sequences together."""
        return self.batch_size * self.new_tokens

    @property
    def sequences(self) -> int:
        """Sequences, those that decode beside others included."""
        return self.batch_size + self.decodes

    @property
    def draw(self) -> int:
        """How far the lengths of its prompts lie from `new_tokens` at most (`calib.measure.lengths`)."""
        is_prompt = self.op in DRAWN_OPS and not self.context_tokens and self.graph != WHOLE
        return self.new_tokens // (DRAWN_SHARE - 1) if is_prompt else 0

    @property
    def length(self) -> int:
        """Tokens of its longest sequence in the end."""
        return max(self.context_tokens + self.new_tokens + self.draw, self.decode_context_tokens + (self.decodes > 0))

    @property
    def blocks(self) -> int:
        """KV blocks that its sequences need in one layer."""
        needs_none = self.op == "lm_head" or not self.new_tokens
        return 0 if needs_none else self.sequences * -(-self.length // BLOCK_TOKENS)

    @property
    def piece_bytes(self) -> int:
        """Bytes of one of its copies."""
        return self.num_bytes // self.num_copies

    @property
    def label(self) -> str:
        """The point in words, for people."""
        words = [self.op]
        if self.new_tokens:
            words.append(f"{self.model}, {self.batch_size} x {self.new_tokens} tokens")
            if self.context_tokens:
                words.append(f"after {self.context_tokens}")
            if self.decodes:
                words.append(f"beside {self.decodes} decodes after {self.decode_context_tokens}")
        if self.num_bytes:
            pieces = f"{self.num_copies} x " if self.num_copies > 1 else ""
            words.append(f"{pieces}{readable_bytes(self.piece_bytes)} {self.memory}")
        elif self.num_copies > 1:
            words.append(f"{self.num_copies} times")
        if self.tp > 1:
            words.append(f"on {self.tp} GPUs")
        if self.graph:
            words.append("from a graph" if self.graph == WHOLE else "from graphs by piece")
        return " ".join(words)

    def sample(self, repeats_s: Sequence[float]) -> Sample:
        """The sample that these repeats (seconds each) make of the point."""
        fields: dict[str, Any] = msgspec.structs.asdict(self) | {"num_bytes": float(self.num_bytes)}
        return Sample(latency_s=median(repeats_s), spread_s=spread_s(repeats_s), repeats=len(repeats_s), **fields)


def mean_tokens(tokens: int) -> int:
    """Mean of the prompts that are drawn for a grid's `tokens`."""
    return tokens - tokens // DRAWN_SHARE


def readable_bytes(count: int) -> str:
    """A number of bytes in the largest binary unit that it is a multiple of, or nearly."""
    for unit, name in UNITS:
        if count >= unit:
            return f"{count / unit:.4g} {name}"
    return f"{count} B"
