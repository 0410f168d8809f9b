"""`Point`: one thing to measure, alone. A sample without its times; fields are columns of `calib.samples`."""

from collections.abc import Sequence
from statistics import median
from typing import Any

import msgspec

from calib.samples import Sample, spread_s

KIB = 1024
BLOCK_TOKENS = 16
"""Tokens per KV block."""
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
    num_bytes: int = 0
    num_copies: int = 1
    memory: str = "pinned"
    graph: int = 0

    @property
    def tokens(self) -> int:
        """Tokens computed, all sequences together."""
        return self.batch_size * self.new_tokens

    @property
    def length(self) -> int:
        """Tokens of one of its sequences in the end."""
        return self.context_tokens + self.new_tokens

    @property
    def blocks(self) -> int:
        """KV blocks that its sequences need in one layer."""
        needs_none = self.op == "lm_head" or not self.new_tokens
        return 0 if needs_none else self.batch_size * -(-self.length // BLOCK_TOKENS)

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
        if self.num_bytes:
            pieces = f"{self.num_copies} x " if self.num_copies > 1 else ""
            words.append(f"{pieces}{readable_bytes(self.piece_bytes)} {self.memory}")
        elif self.num_copies > 1:
            words.append(f"{self.num_copies} times")
        if self.tp > 1:
            words.append(f"on {self.tp} GPUs")
        if self.graph:
            words.append("from a graph")
        return " ".join(words)

    def sample(self, repeats_s: Sequence[float]) -> Sample:
        """The sample that these repeats (seconds each) make of the point."""
        fields: dict[str, Any] = msgspec.structs.asdict(self) | {"num_bytes": float(self.num_bytes)}
        return Sample(latency_s=median(repeats_s), spread_s=spread_s(repeats_s), repeats=len(repeats_s), **fields)


def readable_bytes(count: int) -> str:
    """A number of bytes in the largest binary unit that it is a multiple of, or nearly."""
    for unit, name in UNITS:
        if count >= unit:
            return f"{count / unit:.4g} {name}"
    return f"{count} B"
