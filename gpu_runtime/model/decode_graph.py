"""`DecodeGraph`: decode iterations as captured CUDA graphs, one launch in place of some ten a layer."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from gpu_runtime.kv.pool import KVPool
from gpu_runtime.model.attention_batch import NOWHERE, AttentionBatch
from gpu_runtime.model.decoder import Decoder

Capture = Callable[[Callable[[], object]], Callable[[], object]]
"""Makes of a computation on tensors that stay where they are one that repeats it with what is in them then."""
LARGEST_CAPTURE = 256
CAPTURE_STEP = 8


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture, as vLLM 0.5.5 does: 1, 2, 4, multiples of 8, until one holds `max_num_seqs`; 256 at most.

    ValueError unless `max_num_seqs` is positive.
    """
    if max_num_seqs < 1:
        raise ValueError(f"max_num_seqs {max_num_seqs}: must be positive")
    sizes = [1, 2, 4, *range(CAPTURE_STEP, LARGEST_CAPTURE + 1, CAPTURE_STEP)]
    enough = next((i for i, size in enumerate(sizes) if size >= max_num_seqs), len(sizes) - 1)
    return sizes[: enough + 1]


class DecodeGraph:
    """Decode iterations of up to `max(batch_sizes)` sequences, padded to the next captured size.

    Padding reads block 0 and writes nowhere. Block tables have their full width, contexts are split as the longest one
    is, and lengths are read on the device: so one graph serves all contexts. Layers cannot be interrupted; a driver
    that acts between them calls `Decoder.forward`.
    """

    @torch.inference_mode()
    def __init__(
        self,
        decoder: Decoder,
        pool: KVPool,
        batch_sizes: Sequence[int],
        max_blocks: int,
        *,
        capture: Capture | None = None,
    ) -> None:
        """Capture a graph for each batch size.

        Args:
            decoder: on CUDA.
            pool: the KV cache that the graphs read and write.
            batch_sizes: to capture; the largest limits a batch.
            max_blocks: blocks per sequence and layer group at most.
            capture: makes the graphs; None: as CUDA graphs.

        Raises:
            ValueError: no CUDA device.
        """
        if capture is None:
            if decoder.device.type != "cuda":
                raise ValueError(f"{decoder.config.name} is on {decoder.device}: CUDA graphs need a CUDA device")
            capture = CudaCapture(decoder.device)
        # Graphs know addresses only: what is there must live as long.
        self._decoder, self._pool = decoder, pool
        self._sizes = sorted(batch_sizes)
        largest = self._sizes[-1]
        self._tokens = torch.zeros(largest, dtype=torch.int64, device=pool.device)
        self._batch = _padded(largest, max_blocks, pool, decoder.config.max_position_embeddings)
        # One for all sizes: logits that each graph kept for itself would take a gigabyte of a large vocabulary.
        self._logits = torch.empty(largest, decoder.config.vocab_size, dtype=decoder.dtype, device=pool.device)

        # Larger ones first, so that smaller ones fit in the memory they share.
        self._replays = {size: capture(partial(self._compute, size)) for size in reversed(self._sizes)}

    def _compute(self, size: int) -> None:
        logits = self._decoder.forward(self._tokens[:size], _first(self._batch, size), self._pool)
        self._logits[:size] = logits

    def fits(self, batch: AttentionBatch) -> bool:
        """Whether `run` can compute a batch: decodes, no more and no longer than what was captured."""
        return (
            batch.max_query_len == 1
            and len(batch.num_new) <= self._sizes[-1]
            and batch.block_tables.shape[2] <= self._batch.block_tables.shape[2]
            and batch.max_seq_len <= self._batch.max_seq_len
        )

    @torch.inference_mode()
    def run(self, token_ids: Tensor, batch: AttentionBatch) -> Tensor:
        """Logits [B, V] of a batch of decodes: a view that the next run overwrites.

        Raises:
            ValueError: a batch that does not fit.
        """
        count = len(batch.num_new)
        width = batch.block_tables.shape[2]
        static = self._batch
        if not self.fits(batch):
            raise ValueError(
                f"batch of {count} sequences, {batch.max_query_len} new tokens and {width} blocks each, "
                f"{batch.max_seq_len} tokens long: captured are decodes of {self._sizes[-1]} sequences, "
                f"{static.block_tables.shape[2]} blocks and {static.max_seq_len} tokens"
            )
        size = next(size for size in self._sizes if size >= count)
        self._tokens[:count] = token_ids
        for mine, given, padding in (
            (static.context_lens, batch.context_lens, 0),
            (static.seq_lens, batch.seq_lens, 1),
            (static.positions, batch.positions, 0),
        ):
            mine[:count] = given
            mine[count:size] = padding
        static.block_tables[:, :count, :width] = batch.block_tables
        static.block_tables[:, count:size] = 0
        static.slot_mapping[:, :count] = batch.slot_mapping
        static.slot_mapping[:, count:size] = NOWHERE
        self._replays[size]()
        return self._logits[:count]


class CudaCapture:
    """Captures computations as CUDA graphs that share their memory: one may run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.cuda.graph_pool_handle()
        # One stream for all: libraries keep a workspace for each they have seen.
        self._stream = torch.cuda.Stream(device)

    def __call__(self, compute: Callable[[], object]) -> Callable[[], object]:
        """A graph of `compute`, ready to be launched on any stream."""
        caller = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            # Compiles the kernels and lets libraries take their workspaces: neither may happen under capture.
            compute()
        caller.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, stream=self._stream):
            compute()
        # The first launch also moves the graph to the GPU: no request shall wait for that, or find no room for it.
        graph.replay()
        return graph.replay


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
