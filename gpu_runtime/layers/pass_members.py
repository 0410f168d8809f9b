"""`Member`: a sequence in a pass, and which blocks its layers have. `BlockTables`: these as the kernels read them."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from gpu_runtime.kv.copy_engine import CopyHandle
from gpu_runtime.kv.replay.held import Held
from gpu_runtime.kv.replay.placement import Placement
from gpu_runtime.kv.replay.prefix_blocks import Span
from sim.engine.sequence import Sequence


@dataclass(eq=False)
class Member:
    """One sequence of a pass: `num_new` tokens are computed, `cached` were before."""

    seq: Sequence
    num_new: int
    cached: int
    held: Held
    slots: list[list[int]]
    """GPU blocks that its layers on the host pass through, in turn; empty if it has none."""
    hosted: list[int]
    """Its layers on the host, in order."""
    arriving: dict[int, CopyHandle] = field(default_factory=dict)
    """By layer, the copy of what is cached into the slot."""
    leaving: dict[int, CopyHandle] = field(default_factory=dict)
    """By layer, the copy of what was computed out of the slot."""
    turns: dict[int, int] = field(init=False)
    """How many of its layers before each one on the host pass through the slots."""
    num_read: int = 0
    num_sent: int = 0
    """Blocks that were copied into the slots and out of them."""
    num_projected: int = 0
    num_saved: int = 0
    """Blocks of the slots whose KV was made there, and inputs of tokens that went to the host, of all layers."""
    num_rebuilt: int = 0
    """Tokens of single layers whose KV was computed again."""

    def __post_init__(self) -> None:
        self.turns = {layer: turn for turn, layer in enumerate(self.hosted)}

    @property
    def span(self) -> Span:
        """The tokens that it computes."""
        return self.seq, self.cached, self.cached + self.num_new

    def slot(self, layer: int) -> list[int]:
        """GPU blocks that a layer on the host passes through."""
        return self.slots[self.turns[layer] % len(self.slots)]

    def before(self, layer: int) -> int | None:
        """The layer that passes through the slot of a layer on the host before it; None for the first."""
        turn = self.turns[layer] - len(self.slots)
        return self.hosted[turn] if turn >= 0 else None

    def blocks(self, layer: int) -> list[int]:
        """GPU blocks of a layer: its own, or the slot."""
        own = self.held.gpu.get(layer)
        return self.slot(layer) if own is None else own


class BlockTables:
    """Tables of a pass's blocks; a sequence's rows are kept until they change."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._known: dict[Sequence, tuple[Held, int, np.ndarray]] = {}

    def of(self, members: Iterable[Member]) -> np.ndarray:
        """Block ids [groups, sequences, blocks], int32: a sequence's own, or the slot its group passes through."""
        rows = [self.rows(member) for member in members]
        tables = np.zeros((self._placement.num_groups, len(rows), max(row.shape[1] for row in rows)), dtype=np.int32)
        for i, row in enumerate(rows):
            tables[:, i, : row.shape[1]] = row
        return tables

    def forget(self, seq: Sequence) -> None:
        """Its blocks have been given back."""
        self._known.pop(seq, None)

    def rows(self, member: Member) -> np.ndarray:
        """Block ids [groups, blocks] of one sequence, int32; as long as they do not change the same array."""
        if not member.slots:
            return self._own(member.seq, member.held)
        return np.array([member.blocks(group) for group in range(self._placement.num_groups)], dtype=np.int32)

    def resident(self, seqs: Iterable[Sequence]) -> list[np.ndarray] | None:
        """The rows of sequences that have nothing on the host; None if one has."""
        held_by, rows = self._placement.held, []
        for seq in seqs:
            held = held_by[seq]
            if held.host:
                return None
            rows.append(self._own(seq, held))
        return rows

    def _own(self, seq: Sequence, held: Held) -> np.ndarray:
        known = self._known.get(seq)
        if known is not None and known[0] is held and known[1] == held.version:
            return known[2]
        rows = np.array([held.gpu[group] for group in range(self._placement.num_groups)], dtype=np.int32)
        self._known[seq] = held, held.version, rows
        return rows
