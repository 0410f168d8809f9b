"""What Triton's kernels compute, by torch, and exactly what each of them reads and writes (`pretended_cuda`)."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from happens_before import GRANULE, Place
from pretended_cuda import Machine
from pretended_streams import Work
from pretended_tensors import OnDevice, elements, whole
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from gpu_runtime.model import torch_attention, triton_attention, triton_layer
from gpu_runtime.model.attention_batch import AttentionBatch


def values(*tensors: Any) -> list[Tensor]:
    """What is in tensors of the device."""
    return [tensor.inner for tensor in tensors]


def all_of(*tensors: Any) -> list[Place]:
    """The whole of each."""
    return [(tensor.memory, whole(tensor.inner)) for tensor in tensors]


def part(tensor: Any, *index: Any) -> Place:
    """The granules of some elements of a tensor, picked as numpy picks them."""
    inner = tensor.inner
    at = elements(tuple(inner.shape), inner.stride(), inner.storage_offset())
    return tensor.memory, at[index] * inner.element_size() // GRANULE


def attend(
    machine: Machine, query: Any, cache: Any, tables: Any, batch: AttentionBatch, seqs: Any, out: Any, *_: object
) -> None:
    """Sequences `seqs` over their blocks; padding, whose slot is nowhere, attends to nothing."""
    block_tokens, slots = batch.block_tokens, batch.slot_mapping

    def members() -> list[tuple[slice, int, np.ndarray]]:
        """Rows, length and blocks of each."""
        found = []
        starts, lengths, first_slots = (t.numpy() for t in values(batch.query_start, batch.seq_lens, slots))
        first_slots = first_slots[0]
        for seq in seqs.inner.tolist():
            rows = slice(int(starts[seq]), int(starts[seq + 1]))
            if first_slots[rows.start] >= 0:
                blocks = tables.inner[seq, : -(-int(lengths[seq]) // block_tokens)].numpy()
                found.append((rows, int(lengths[seq]), blocks))
        return found

    def compute() -> None:
        q, kv, to = values(query, cache, out)
        for rows, length, blocks in members():
            held = kv[torch.from_numpy(blocks).long()].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length].to(q.dtype)
            found = torch_attention._attend_chunk(q[rows], held[0], held[1], length - len(q[rows]))
            to[rows] = found.flatten(1, 2)

    def places() -> tuple[list[Place], list[Place]]:
        reads = all_of(query, seqs, batch.query_start, batch.seq_lens, slots)
        writes = []
        for rows, length, blocks in members():
            reads += all_of(tables)
            tokens = np.arange(length)
            reads.append(part(cache, blocks[tokens // block_tokens], slice(None), slice(None), tokens % block_tokens))
            writes.append(part(out, rows))
        return reads, writes

    machine.launch(Work("attention", compute, places))


def rotate_and_write(
    machine: Machine, projected: Any, norms: Any, epsilon: float, table: Any, positions: Any, slots: Any, cache: Any
) -> tuple[Any, Any, Any]:
    """`triton_layer.rotate_and_write`."""
    num_kv_heads, block_tokens, head_dim = cache.inner.shape[2:]
    num_rows = len(projected)
    num_heads = projected.shape[1] // head_dim - 2 * num_kv_heads
    queries = machine.fresh(torch.empty(num_rows, num_heads, head_dim, dtype=projected.dtype))
    keys = machine.fresh(torch.empty(num_rows, num_kv_heads, head_dim, dtype=projected.dtype))
    new = projected[:, (num_heads + num_kv_heads) * head_dim :].unflatten(1, (-1, head_dim))

    def turned(heads: Tensor, norm: Any) -> Tensor:
        if norm is not None:
            heads = rms_norm(heads, (head_dim,), norm.inner, epsilon)
        cos, sin = table.inner[positions.inner.long()][:, None, :].chunk(2, dim=-1)
        left, right = heads.float().chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(heads.dtype)

    def compute() -> None:
        heads = projected.inner.unflatten(1, (-1, head_dim))
        q_norm, k_norm = norms or (None, None)
        queries.inner.copy_(turned(heads[:, :num_heads], q_norm))
        keys.inner.copy_(turned(heads[:, num_heads : num_heads + num_kv_heads], k_norm))
        rows = torch.nonzero(slots.inner >= 0).flatten()
        where = slots.inner[rows].long()
        torch_attention.write_kv(keys.inner[rows], new.inner[rows], cache.inner, where, block_tokens)

    def places() -> tuple[list[Place], list[Place]]:
        where = slots.inner.numpy()
        where = where[where >= 0]
        written = part(cache, where // block_tokens, slice(None), slice(None), where % block_tokens)
        return all_of(projected, table, positions, slots, *(norms or ())), [*all_of(queries, keys), written]

    machine.launch(Work("rotate_and_write", compute, places))
    return queries, keys, new


def silu_and_mul(machine: Machine, gate_up: Any) -> OnDevice:
    """`triton_layer.silu_and_mul`."""
    out = machine.fresh(torch.empty(len(gate_up), gate_up.shape[1] // 2, dtype=gate_up.dtype))

    def compute() -> None:
        gate, up = gate_up.inner.chunk(2, dim=-1)
        out.inner.copy_(silu(gate) * up)

    machine.launch(Work("silu_and_mul", compute, lambda: (all_of(gate_up), all_of(out))))
    return out


def add_rms_norm(machine: Machine, hidden: Any, update: Any, weight: Any, epsilon: float) -> tuple[Any, Any]:
    """`triton_layer.add_rms_norm`."""
    total, normed = (machine.fresh(torch.empty(hidden.shape, dtype=hidden.dtype)) for _ in range(2))

    def compute() -> None:
        total.inner.copy_(hidden.inner + update.inner)
        normed.inner.copy_(rms_norm(total.inner, weight.shape, weight.inner, epsilon))

    machine.launch(Work("add_rms_norm", compute, lambda: (all_of(hidden, update, weight), all_of(total, normed))))
    return total, normed


def stand_in(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    """Let the kernels of this machine take the place of Triton's."""

    def attend_decodes(query: Any, cache: Any, tables: Any, batch: AttentionBatch, out: Any, window: Any) -> None:
        assert window is None
        attend(machine, query, cache, tables, batch, batch.decode_seqs, out)

    patch.setattr(triton_attention, "attend_decodes", attend_decodes)
    patch.setattr(triton_attention, "attend_chunks", partial(attend, machine))
    patch.setattr(triton_layer, "rotate_and_write", partial(rotate_and_write, machine))
    patch.setattr(triton_layer, "add_rms_norm", partial(add_rms_norm, machine))
    patch.setattr(triton_layer, "silu_and_mul", partial(silu_and_mul, machine))
