"""flashinfer's kernels (Ye et al. 2025), which vLLM uses: paged attention with balanced splits, norms, activation.

Not yet run on a GPU: checked against what flashinfer 0.7.2 documents. Rotation stays ours, which norms heads, rotates
them and writes KV in one kernel and skips padding; flashinfer's take a kernel each, and `append_paged_kv_cache` neither
skips padding nor converts to the pool's type: behind `apply_rope_with_cos_sin_cache_inplace` ours would have to run.
"""

from contextlib import suppress
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from gpu_runtime.device_stream import to_device
from gpu_runtime.kv.pool import KVPool
from gpu_runtime.model import backend, flash_prompts, torch_attention
from gpu_runtime.model.attention_batch import AttentionBatch
from gpu_runtime.model.config import DecoderConfig
from gpu_runtime.model.kernels import Kernels, PlanDecodes
from sim.errors import UserError

WORKSPACE_BYTES = 394 * 2**20
"""For partial results of split contexts, as vLLM has it (FLASHINFER_WORKSPACE_BUFFER_SIZE)."""
WRAPPER_BYTES = 8 * 2**20
"""What a wrapper takes of the device for its plan."""
LAYOUT = "HND"
"""Heads before tokens within a block, as in `KVPool`."""


class FlashinferKernels(Kernels):
    """Attention is planned on the host once an iteration, for all layers: they must share a block table."""

    one_table = True
    overwrites = True

    def __init__(self, num_heads: int, dtype: torch.dtype, device: torch.device) -> None:
        """`num_heads` query heads, computed in `dtype`, 16 bits wide."""
        self._library = import_module("flashinfer")
        self._num_heads, self._dtype, self._device = num_heads, dtype, device
        # Zeroed, as its first use asks.
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        # With tensor cores any number of query heads a KV head will do.
        self._decodes = self._library.BatchDecodeWithPagedKVCacheWrapper(self._workspace, LAYOUT, use_tensor_cores=True)
        self._chunks = self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, LAYOUT)
        self._captured: WeakKeyDictionary[AttentionBatch, Any] = WeakKeyDictionary()
        self._planned: AttentionBatch | None = None
        self._rows: Tensor | None = None
        self._runs: Any = None

    def rms_norm(self, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return self._library.rmsnorm(hidden, weight, epsilon)

    def add_rms_norm(self, hidden: Tensor, update: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        # In place: the sum replaces `hidden`, and its norm `update`.
        self._library.fused_add_rmsnorm(update, hidden, weight, epsilon)
        return hidden, update

    def attention_of(self, dtype: torch.dtype, head_dim: int, device: torch.device) -> str:
        return "flashinfer"

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return self._library.silu_and_mul(gate_up)

    def attend(
        self, query: Tensor, pool: KVPool, layer: int, batch: AttentionBatch, new: tuple[Tensor, Tensor]
    ) -> Tensor:
        _, cache = pool.layer(layer)
        captured = self._captured.get(batch)
        if captured is not None:
            return captured.run(query, cache)
        if batch is not self._planned:
            self._plan(batch, pool)
        if self._rows is None:
            return self._runs.run(query, cache)
        out = torch.empty_like(query)
        # Stored in fewer bits, a prompt's own keys are better taken as they are.
        if batch.max_prompt_len and backend.uses_flash(query):
            out[batch.prompt_rows] = flash_prompts.attend_prompts(query, *new, batch)
        else:
            torch_attention.attend_prompts(query, *new, batch, out)
        if self._runs is not None:
            out[self._rows] = self._runs.run(query[self._rows], cache)
        return out

    def _plan(self, batch: AttentionBatch, pool: KVPool) -> None:
        """Choose the sequences that attend through the blocks, and plan it; `_rows` are theirs, None for all rows."""
        self._check(pool)
        num_new, context = np.array(batch.num_new), np.array(batch.context)
        members = np.arange(len(num_new))
        if pool.dtype != self._dtype:
            members = np.flatnonzero((num_new == 1) | (context > 0))
        rows = np.repeat(np.isin(np.arange(len(num_new)), members), num_new)
        self._rows = None if rows.all() else to_device(np.flatnonzero(rows), self._device)
        self._planned, self._runs = batch, None
        if not len(members):
            return
        num_new, pages = num_new[members], -(-(num_new + context)[members] // pool.block_tokens)
        starts = _starts(pages)
        # Of each member's row of the table as many blocks as it has.
        within = np.arange(starts[-1]) - np.repeat(starts[:-1], pages)
        tables = batch.block_tables[0]
        places = np.repeat(members * tables.shape[1], pages) + within
        indices = tables.reshape(-1)[to_device(places, self._device)]
        last = _last_page_len((context[members] + num_new), pool.block_tokens)
        if batch.max_query_len == 1:
            self._runs = self._decodes
            self._runs.plan(_int32(starts), indices, last, *self._shapes(pool), **self._types(pool))
        else:
            self._runs = self._chunks
            queries = _int32(_starts(num_new))
            # Causal from the end: the last query sees all keys.
            self._runs.plan(
                queries, _int32(starts), indices, last, *self._shapes(pool), causal=True, **self._types(pool)
            )

    def planner(self, batch: AttentionBatch, pool: KVPool) -> PlanDecodes:
        self._check(pool)
        size, most = batch.block_tables.shape[1:]

        def buffer(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=self._device)

        wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            LAYOUT,
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=buffer(size + 1),
            paged_kv_indices_buffer=buffer(size * most),
            paged_kv_last_page_len_buffer=buffer(size),
        )

        def plan(seq_lens: np.ndarray, tables: np.ndarray) -> None:
            pages = -(-seq_lens // pool.block_tokens)
            indices = tables.T[np.arange(len(tables)) < pages[:, None]]
            last = _last_page_len(seq_lens, pool.block_tokens)
            wrapper.plan(_int32(_starts(pages)), _int32(indices), last, *self._shapes(pool), **self._types(pool))

        # As long as contexts can be: the graph must have room for any later plan.
        plan(np.full(size, batch.max_seq_len), np.zeros((most, size), dtype=np.int32))
        self._captured[batch] = wrapper
        return plan

    def working_bytes(self, num_graphs: int) -> int:
        return WORKSPACE_BYTES + WRAPPER_BYTES * (2 + num_graphs)

    def _check(self, pool: KVPool) -> None:
        if pool.num_groups > 1:
            raise ValueError(f"flashinfer plans one block table for all layers, the pool has {pool.num_groups}")

    def _shapes(self, pool: KVPool) -> tuple[int, int, int, int]:
        """Query heads, KV heads, elements of a head, tokens of a block."""
        _, _, _, num_kv_heads, block_tokens, head_dim = pool.data.shape
        return self._num_heads, num_kv_heads, head_dim, block_tokens

    def _types(self, pool: KVPool) -> dict[str, torch.dtype]:
        return {"q_data_type": self._dtype, "kv_data_type": pool.dtype}


def build_kernels(name: str, num_heads: int, dtype: torch.dtype, device: torch.device) -> Kernels:
    """The kernels of an attention backend that `backend.check_backend` let pass."""
    return FlashinferKernels(num_heads, dtype, device) if name == "flashinfer" else Kernels()


def build_all(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> dict[str, Kernels]:
    """The kernels of all backends that can compute a model on a device, those of `auto` first."""
    found: dict[str, Kernels] = {}
    for name in backend.OF_DEVICE[device.type][2:]:
        with suppress(UserError):
            backend.check_backend(name, device.type, dtype, config)
            found[name] = build_kernels(name, config.num_heads, dtype, device)
    return found


def _starts(counts: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(counts)))


def _last_page_len(lengths: np.ndarray, block_tokens: int) -> Tensor:
    """Tokens in each sequence's last block: 1 to `block_tokens`."""
    return _int32((lengths - 1) % block_tokens + 1)


def _int32(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32))
