"""`DecodeGraph`: decode iterations as captured CUDA graphs, one launch in place of some ten a layer."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gpu_runtime.attention_batch import NOWHERE, AttentionBatch
from gpu_runtime.decoder import Decoder
from gpu_runtime.kv_pool import KVPool


class DecodeGraph:
    """Decode iterations of up to `max(batch_sizes)` sequences, padded to the next captured size.

    Padding reads block 0 and writes nowhere. Block tables have their full width, contexts are split as the longest one
    is, and lengths are read on the device: so one graph serves all contexts. Layers cannot be interrupted; a driver
    that acts between them calls `Decoder.forward`.
    """

    def __init__(self, decoder: Decoder, pool: KVPool, batch_sizes: Sequence[int], max_blocks: int) -> None:
        """Capture a graph for each batch size.

        Args:
            decoder: on CUDA.
            pool: the KV cache that the graphs read and write.
            batch_sizes: to capture; the largest limits a batch.
            max_blocks: blocks per sequence and layer group at most.

        Raises:
            ValueError: no CUDA device.
        """
        if decoder.device.type != "cuda":
            raise ValueError(f"{decoder.config.name} is on {decoder.device}: CUDA graphs need a CUDA device")
        self._decoder = decoder
        self._pool = pool
        self._sizes = sorted(batch_sizes)
        self._tokens = torch.zeros(self._sizes[-1], dtype=torch.int64, device=pool.device)
        self._batch = _padded(self._sizes[-1], max_blocks, pool, decoder.config.max_position_embeddings)
        self._memory = torch.cuda.graph_pool_handle()
        # Larger ones first, so that smaller ones fit in the memory they share.
        self._graphs = {size: self._capture(size) for size in reversed(self._sizes)}

    def run(self, token_ids: Tensor, batch: AttentionBatch) -> Tensor:
        """Logits [B, V] of a batch of decodes: a view that the next run of the same size overwrites.

        Raises:
            ValueError: a batch that is no decode, or larger or longer than what was captured.
        """
        count = len(batch.num_new)
        width = batch.block_tables.shape[2]
        if batch.max_query_len != 1 or count > self._sizes[-1] or width > self._batch.block_tables.shape[2]:
            raise ValueError(
                f"batch of {count} sequences, {batch.max_query_len} new tokens and {width} blocks each: captured are "
                f"decodes of {self._sizes[-1]} sequences and {self._batch.block_tables.shape[2]} blocks"
            )
        size = next(size for size in self._sizes if size >= count)
        static = self._batch
        self._tokens[:count] = token_ids
        for mine, given in (
            (static.context_lens, batch.context_lens),
            (static.seq_lens, batch.seq_lens),
            (static.positions, batch.positions),
        ):
            mine[:count] = given
            mine[count:size] = 0 if mine is not static.seq_lens else 1
        static.block_tables[:, :count, :width] = batch.block_tables
        static.block_tables[:, count:size] = 0
        static.slot_mapping[:, :count] = batch.slot_mapping
        static.slot_mapping[:, count:size] = NOWHERE
        graph, logits = self._graphs[size]
        graph.replay()
        return logits[:count]

    def _capture(self, size: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        batch = _first(self._batch, size)
        tokens = self._tokens[:size]
        stream = torch.cuda.Stream(self._decoder.device)
        stream.wait_stream(torch.cuda.current_stream(self._decoder.device))
        with torch.cuda.stream(stream):
            # Compiles the kernels and lets libraries take their workspaces: neither may happen under capture.
            self._decoder.forward(tokens, batch, self._pool)
        torch.cuda.current_stream(self._decoder.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            logits = self._decoder.forward(tokens, batch, self._pool)
        return graph, logits


def _padded(size: int, max_blocks: int, pool: KVPool, max_positions: int) -> AttentionBatch:
    """A batch of decodes that write nowhere, on tensors of its own."""
    longest = min(max_blocks * pool.block_tokens, max_positions)

    def full(*shape: int, value: int = 0) -> Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=pool.device)

    return AttentionBatch(
        num_new=(1,) * size,
        context=(longest - 1,) * size,
        query_start=torch.arange(size + 1, dtype=torch.int32, device=pool.device),
        context_lens=full(size),
        seq_lens=full(size, value=1),
        positions=full(size),
        block_tables=full(pool.num_groups, size, max_blocks),
        slot_mapping=full(pool.num_groups, size, value=NOWHERE),
        decode_seqs=torch.arange(size, dtype=torch.int32, device=pool.device),
        chunk_seqs=full(0),
        num_cached_chunks=0,
        block_tokens=pool.block_tokens,
        max_query_len=1,
        max_seq_len=longest,
    )


def _first(batch: AttentionBatch, size: int) -> AttentionBatch:
    """Views of the first `size` sequences of a batch of decodes."""
    return replace(
        batch,
        num_new=batch.num_new[:size],
        context=batch.context[:size],
        query_start=batch.query_start[: size + 1],
        context_lens=batch.context_lens[:size],
        seq_lens=batch.seq_lens[:size],
        positions=batch.positions[:size],
        block_tables=batch.block_tables[:, :size],
        slot_mapping=batch.slot_mapping[:, :size],
        decode_seqs=batch.decode_seqs[:size],
    )
