"""`AttentionBatch`: what one iteration's attention must know of its sequences, as tensors on the device."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_runtime.device_stream import to_device

NOWHERE = -1
"""A slot that `write_kv` skips on CUDA: padding of a captured batch."""
LONG_PROMPT = 512
"""Where FlashAttention is not to be had (`backend.uses_flash`), prompts of so many tokens, which fill a GPU alone, have
a kernel of their own each; all shorter ones of a batch share one."""

TablesLike = Sequence[Sequence[Sequence[int]]] | np.ndarray
"""Block ids per layer group and sequence; or an int32 array [num_groups, B, max_blocks], padded with any id."""


@dataclass(frozen=True, eq=False)
class AttentionBatch:
    """B sequences with N new tokens in all, whose rows lie one sequence after the other. Tensors are int32.

    Attributes:
        num_new: new tokens of each sequence (on the host).
        context: tokens of each sequence whose KV is cached already (on the host).
        query_start: [B + 1] first row of each sequence, then N.
        context_lens: [B] as `context`.
        seq_lens: [B] context + new.
        positions: [N] position of each new token in its sequence.
        block_tables: [num_groups, B, max_blocks] physical block ids.
        slot_mapping: [num_groups, N] where each new token's KV goes: block * block_tokens + offset; -1: nowhere.
        decode_seqs: indices of the sequences with one new token.
        chunk_seqs: indices of the others: those with cached context, then prompts, long ones last.
        prompt_starts: [P + 1] of the P prompts, which have more than one new token and nothing cached: first row of
            each among the rows of prompts alone, then how many these are.
        prompt_rows: those rows among all: a slice where they are in a row, else their indices.
        max_prompt_len: most tokens of a prompt; 0 without any.
        num_cached_chunks: how many of `chunk_seqs` have cached context.
        num_batched_chunks: how many have, or are prompts shorter than `LONG_PROMPT`.
        block_tokens: tokens per block.
        max_query_len: most new tokens of a sequence.
        max_seq_len: longest context + new.
    """

    num_new: tuple[int, ...]
    context: tuple[int, ...]
    query_start: Tensor
    context_lens: Tensor
    seq_lens: Tensor
    positions: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    decode_seqs: Tensor
    chunk_seqs: Tensor
    prompt_starts: Tensor
    prompt_rows: slice | Tensor
    max_prompt_len: int
    num_cached_chunks: int
    num_batched_chunks: int
    block_tokens: int
    max_query_len: int
    max_seq_len: int

    @property
    def num_tokens(self) -> int:
        """N, new tokens of all sequences."""
        return self.positions.shape[0]

    @property
    def last_rows(self) -> Tensor:
        """[B] row of each sequence's last new token, the one to sample from."""
        return self.query_start[1:] - 1

    def chunk_rows(self) -> Iterator[tuple[int, slice]]:
        """Index and rows of each sequence with more than one new token."""
        start = 0
        for seq, n in enumerate(self.num_new):
            if n > 1:
                yield seq, slice(start, start + n)
            start += n

    def num_blocks(self, seq: int) -> int:
        """Blocks of all tokens of a sequence, in each group."""
        return -(-(self.context[seq] + self.num_new[seq]) // self.block_tokens)

    @classmethod
    def build(
        cls,
        num_new: Sequence[int],
        context: Sequence[int],
        block_tables: TablesLike,
        block_tokens: int,
        device: torch.device | str,
    ) -> "AttentionBatch":
        """Lay out an iteration; everything travels to the device in one copy.

        Args:
            num_new: new tokens of each sequence, at least one.
            context: tokens cached before, for each sequence.
            block_tables: per layer group and sequence, enough blocks for context + new tokens.
        """
        new, cached = np.asarray(num_new, dtype=np.int32), np.asarray(context, dtype=np.int32)
        if new.ndim != 1 or new.shape != cached.shape or not len(new) or new.min() < 1 or cached.min() < 0:
            raise ValueError(
                f"num_new {list(num_new)} must be positive, context {list(context)} as long and not negative"
            )
        total = cached + new
        tables = _tables(block_tables, -(-total // block_tokens))
        start = np.concatenate(([0], np.cumsum(new)))
        owner = np.repeat(np.arange(len(new)), new)
        positions = np.arange(start[-1]) - start[owner] + cached[owner]
        slots = tables[:, owner, positions // block_tokens] * block_tokens + positions % block_tokens
        chunks = np.flatnonzero(new > 1)
        is_prompt = (new > 1) & (cached == 0)
        rows = np.flatnonzero(is_prompt[owner])
        in_a_row = not len(rows) or rows[-1] - rows[0] + 1 == len(rows)
        # Cached, short, long; each in order.
        kind = np.where(cached[chunks] > 0, 0, np.where(new[chunks] < LONG_PROMPT, 1, 2))
        parts = {
            "query_start": start,
            "context_lens": cached,
            "seq_lens": total,
            "positions": positions,
            "block_tables": tables,
            "slot_mapping": slots,
            "decode_seqs": np.flatnonzero(new == 1),
            "chunk_seqs": chunks[np.argsort(kind, kind="stable")],
            "prompt_starts": np.concatenate(([0], np.cumsum(new[is_prompt]))),
        }
        if not in_a_row:
            parts["prompt_rows"] = rows
        sent: dict[str, Any] = dict(_to_device(parts, torch.device(device)))
        if in_a_row:
            sent["prompt_rows"] = slice(int(rows[0]), int(rows[-1]) + 1) if len(rows) else slice(0, 0)
        return cls(
            num_new=tuple(new.tolist()),
            context=tuple(cached.tolist()),
            num_cached_chunks=int((kind == 0).sum()),
            num_batched_chunks=int((kind < 2).sum()),
            block_tokens=block_tokens,
            max_query_len=int(new.max()),
            max_seq_len=int(total.max()),
            max_prompt_len=int(new[is_prompt].max(initial=0)),
            **sent,
        )


def _tables(given: TablesLike, num_blocks: np.ndarray) -> np.ndarray:
    """[num_groups, B, max_blocks], rows padded with 0; ValueError where a sequence has too few blocks."""
    if isinstance(given, np.ndarray):
        if given.ndim != 3 or given.shape[1] != len(num_blocks) or given.shape[2] < num_blocks.max():
            raise ValueError(
                f"block tables of shape {given.shape}: {len(num_blocks)} sequences need {num_blocks} blocks"
            )
        return given
    tables = np.zeros((len(given), len(num_blocks), int(num_blocks.max())), dtype=np.int32)
    for group, rows in enumerate(given):
        if len(rows) != len(num_blocks):
            raise ValueError(f"group {group}: block tables of {len(rows)} sequences, the batch has {len(num_blocks)}")
        for index, (row, count) in enumerate(zip(rows, num_blocks.tolist(), strict=True)):
            if len(row) < count:
                raise ValueError(f"group {group}, sequence {index}: {len(row)} blocks given, {count} needed")
            tables[group, index, :count] = row[:count]
    return tables


def _to_device(arrays: dict[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """The arrays as int32 tensors, sent as one."""
    flat = np.concatenate([array.reshape(-1) for array in arrays.values()]).astype(np.int32)
    parts = to_device(flat, device).split([array.size for array in arrays.values()])
    return {name: part.view(arrays[name].shape) for name, part in zip(arrays, parts, strict=True)}
