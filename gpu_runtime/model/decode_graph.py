"""`DecodeGraph`: decode iterations as captured CUDA graphs, one launch in place of some ten a layer."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_runtime.device_stream import to_device
from gpu_runtime.kv.pool import KVPool
from gpu_runtime.model.attention_batch import NOWHERE, AttentionBatch
from gpu_runtime.model.decoder import Decoder, Scores, greedy
from gpu_runtime.model.kernels import PlanDecodes
from gpu_runtime.tokens.tokens_in_flight import LateTokens

Capture = Callable[[Callable[[], object]], Callable[[], object]]
"""Makes of a computation on tensors that stay where they are one that repeats it with what is in them then."""
NUM_STAGED = 2
"""Batches that the host may have written and the device not yet fetched: an iteration is launched while the one before
runs. The one before that has ended."""
Between = Callable[[int], None]
"""Called with a layer's index, before or after the layer."""


class Metadata:
    """What a captured batch must know anew in each iteration, as views of one buffer of int32: one copy brings it.

    Attributes:
        tokens: [size] the token that each sequence computes.
        seq_lens: [size] context + 1.
        positions: [size] of the token in its sequence, which is its context.
        slots: [groups, size] where its KV goes.
        used: elements of the buffer in use.
    """

    def __init__(self, buffer: Tensor, size: int, num_groups: int) -> None:
        self.used = (3 + num_groups) * size
        self.tokens, self.seq_lens, self.positions = buffer[: 3 * size].view(3, size)
        self.slots = buffer[3 * size : self.used].view(num_groups, size)

    @staticmethod
    def elements(size: int, num_groups: int, max_blocks: int) -> int:
        """Of a buffer for so many sequences, and of their block tables."""
        return (3 + num_groups + max_blocks * num_groups) * size


class Tables:
    """Block tables [groups, largest, max_blocks] int32 of all captured sizes, which have the first rows each.

    They stay from one iteration to the next, whatever its size: only what has changed is sent. Rows of padding have
    what some sequence left there, which is a block as well.
    """

    def __init__(self, num_groups: int, largest: int, max_blocks: int, device: torch.device) -> None:
        self.known = np.zeros((num_groups, largest, max_blocks), dtype=np.int32)
        """What is on the device, or on its way there."""
        self.there = torch.zeros(self.known.shape, dtype=torch.int32, device=device)
        self._rows: list[np.ndarray | None] = [None] * largest
        groups = np.arange(num_groups, dtype=np.int64)[:, None]
        self._starts = groups * (largest * max_blocks)

    def update(self, tables: Sequence[np.ndarray]) -> None:
        """Send what has changed of the `tables` [groups, blocks] of a batch's sequences, in order.

        An array seen before at the same place is taken to be unchanged.
        """
        places, blocks, width = [], [], self.known.shape[2]
        for i, rows in enumerate(tables):
            if self._rows[i] is rows:
                continue
            self._rows[i] = rows
            known = self.known[:, i, : rows.shape[1]]
            changed = known != rows
            if changed.any():
                at = self._starts + (i * width + np.arange(rows.shape[1]))
                places.append(at[changed])
                blocks.append(rows[changed])
                known[changed] = rows[changed]
        if places:
            sent = to_device(np.stack((np.concatenate(places), np.concatenate(blocks))), self.there.device)
            self.there.view(-1).index_copy_(0, sent[0], sent[1].to(torch.int32))


class Staging:
    """What a batch must know, on the host, until the device has fetched it; one of `NUM_STAGED`."""

    def __init__(self, sizes: Sequence[int], num_groups: int, *, pin: bool) -> None:
        """For any of the captured `sizes`; `pin` the memory for a CUDA device."""
        self.buffer = torch.zeros((3 + num_groups) * max(sizes), dtype=torch.int32, pin_memory=pin)
        self.of_size = {size: Metadata(self.buffer, size, num_groups) for size in sizes}

    def write(
        self, size: int, tokens: Sequence[int], seq_lens: Sequence[int], known: np.ndarray, block_tokens: int
    ) -> Metadata:
        """Write a batch that is padded to `size`, with its tables `known` [groups, largest, max_blocks]."""
        data, count = self.of_size[size], len(tokens)
        lengths, positions = data.seq_lens.numpy(), data.positions.numpy()
        inputs = data.tokens.numpy()
        inputs[:count], inputs[count:] = tokens, 0
        lengths[:count], lengths[count:] = seq_lens, 1
        np.subtract(lengths, 1, out=positions)
        blocks, offsets = np.divmod(positions[:count], block_tokens)
        slots = data.slots.numpy()
        slots[:, :count] = known[:, np.arange(count), blocks] * block_tokens + offsets
        slots[:, count:] = NOWHERE
        return data


class DecodeGraph:
    """Decode iterations of up to `max(batch_sizes)` sequences, padded to the next captured size.

    Padding reads some block and writes nowhere. Block tables have their full width, contexts are split as the longest
    one is, and lengths are read on the device: so one graph serves all contexts. With `by_layer` every layer is a graph
    of its own, between which a driver can act.
    """

    @torch.inference_mode()
    def __init__(
        self,
        decoder: Decoder,
        pool: KVPool,
        batch_sizes: Sequence[int],
        max_blocks: int,
        *,
        by_layer: bool = False,
        capture: Capture,
    ) -> None:
        """Capture a graph for each batch size, or with `by_layer` one for each and each layer.

        Args:
            decoder: on CUDA.
            pool: the KV cache that the graphs read and write.
            batch_sizes: to capture; the largest limits a batch.
            max_blocks: blocks per sequence and layer group at most.
            by_layer: let `run` act between layers.
            capture: makes the graphs.
        """
        # Graphs know addresses only: what is there must live as long.
        self._decoder, self._pool = decoder, pool
        self._sizes = sorted(batch_sizes)
        self.by_layer = by_layer
        self._longest = min(max_blocks * pool.block_tokens, decoder.config.max_position_embeddings)
        largest, config = self._sizes[-1], decoder.config
        groups = pool.num_groups
        self._buffer = torch.zeros((3 + groups) * largest, dtype=torch.int32, device=pool.device)
        self._tables = Tables(groups, largest, max_blocks, pool.device)
        pin = pool.device.type == "cuda"
        self._stagings = cycle([Staging(self._sizes, groups, pin=pin) for _ in range(NUM_STAGED)])
        self._starts = torch.arange(largest + 1, dtype=torch.int32, device=pool.device)
        self._none = torch.zeros(0, dtype=torch.int32, device=pool.device)
        # One for all sizes: logits that each graph kept for itself would take a gigabyte of a large vocabulary.
        self._logits = torch.empty(largest, config.vocab_size, dtype=decoder.dtype, device=pool.device)
        self._likeliest = torch.zeros(largest, dtype=torch.int64, device=pool.device)
        self._hidden = torch.zeros(largest, config.hidden_size, dtype=decoder.dtype, device=pool.device)

        self._plans: dict[int, PlanDecodes | None] = {}
        self._replays: dict[int, list[Callable[[], object]]] = {}
        # Larger ones first, so that smaller ones fit in the memory they share.
        for size in reversed(self._sizes):
            batch = self._batch(size)
            self._plans[size] = decoder.kernels.planner(batch, pool)
            self._replays[size] = [capture(part) for part in self._parts(batch)]

    def _batch(self, size: int) -> AttentionBatch:
        """A batch of decodes on views of the buffer, as long as contexts can be."""
        data = Metadata(self._buffer, size, self._pool.num_groups)
        # What other sizes have left there is no position.
        self._buffer.zero_()
        data.seq_lens.fill_(1)
        data.slots.fill_(NOWHERE)
        return AttentionBatch(
            num_new=(1,) * size,
            context=(self._longest - 1,) * size,
            query_start=self._starts[: size + 1],
            context_lens=data.positions,
            seq_lens=data.seq_lens,
            positions=data.positions,
            block_tables=self._tables.there[:, :size],
            slot_mapping=data.slots,
            decode_seqs=self._starts[:size],
            chunk_seqs=self._none,
            prompt_starts=self._starts[:1],
            prompt_rows=slice(0, 0),
            max_prompt_len=0,
            num_cached_chunks=0,
            num_batched_chunks=0,
            block_tokens=self._pool.block_tokens,
            max_query_len=1,
            max_seq_len=self._longest,
        )

    def _parts(self, batch: AttentionBatch) -> list[Callable[[], object]]:
        """What is captured for a batch: all of it, or embedding, layers and head apart."""
        size = len(batch.num_new)
        tokens = Metadata(self._buffer, size, self._pool.num_groups).tokens
        decoder, pool, hidden = self._decoder, self._pool, self._hidden[:size]

        def keep(logits: Tensor) -> None:
            self._likeliest[:size].copy_(greedy(self._logits[:size].copy_(logits)))

        if not self.by_layer:
            return [lambda: keep(decoder.forward(tokens, batch, pool))]

        def compute(index: int) -> None:
            hidden.copy_(decoder.layers[index].forward(hidden, batch, pool, index))

        layers = [partial(compute, index) for index in range(len(decoder.layers))]
        return [lambda: hidden.copy_(decoder.embed(tokens)), *layers, lambda: keep(decoder.logits(hidden))]

    def fits(self, num_seqs: int, longest: int) -> bool:
        """Whether `run` can compute so many decodes, the longest of which has so many tokens in the end."""
        return num_seqs <= self._sizes[-1] and longest <= self._longest

    @torch.inference_mode()
    def run(
        self,
        tokens: Sequence[int],
        seq_lens: Sequence[int],
        tables: Sequence[np.ndarray],
        *,
        late: LateTokens | None = None,
        before_layer: Between | None = None,
        after_layer: Between | None = None,
    ) -> Scores:
        """Logits [B, V] and likeliest tokens [B] of a batch of decodes: views that the next run overwrites.

        Args:
            tokens: [B] the last token of each sequence.
            seq_lens: [B] its tokens, that one included.
            tables: for each sequence its block ids [groups, blocks], int32; an array seen in the run before at the
                same place is taken to be unchanged.
            late: which tokens are chosen by an iteration that still runs; they are fillers in `tokens`.
            before_layer, after_layer: act around layers; `by_layer` graphs only.

        Raises:
            ValueError: a batch that does not fit, or acting between layers that are one graph.
        """
        count = len(tokens)
        if not self.fits(count, max(seq_lens)):
            raise ValueError(
                f"batch of {count} sequences of up to {max(seq_lens)} tokens: captured are decodes of "
                f"{self._sizes[-1]} sequences and {self._longest} tokens"
            )
        if not self.by_layer and (before_layer or after_layer):
            raise ValueError("layers that were captured as one graph cannot be interrupted")
        size = self.size_of(count)
        staging = next(self._stagings)
        self._tables.update(tables)
        data = staging.write(size, tokens, seq_lens, self._tables.known, self._pool.block_tokens)
        self._buffer[: data.used].copy_(staging.buffer[: data.used], non_blocking=True)
        if late is not None:
            late.fill(self._buffer[:size])
        plan = self._plans[size]
        if plan is not None:
            plan(data.seq_lens.numpy(), self._tables.known[0, :size].T)
        for place, replay in enumerate(self._replays[size], start=-1):
            is_layer = 0 <= place < len(self._decoder.layers)
            if is_layer and before_layer is not None:
                before_layer(place)
            replay()
            if is_layer and after_layer is not None:
                after_layer(place)
        return Scores(self._logits[:count], self._likeliest[:count])

    def size_of(self, num_seqs: int) -> int:
        """The captured size that so many decodes are padded to."""
        return next(size for size in self._sizes if size >= num_seqs)


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
        graph = capture_graph(compute, self._stream, self._memory)
        # The first launch also moves the graph to the GPU: no request shall wait for that, or find no room for it.
        graph.replay()
        return graph.replay


def capture_graph(
    compute: Callable[[], object],
    stream: torch.cuda.Stream,
    memory: Any = None,  # noqa: ANN401 - torch does not name the type publicly
) -> torch.cuda.CUDAGraph:
    """A graph of `compute`, captured on a stream, with memory of its own or of a pool.

    Raises:
        torch.OutOfMemoryError: there is no memory for it.
        RuntimeError: it waits for the device, or sends it something.
    """
    graph, caller = torch.cuda.CUDAGraph(), torch.cuda.current_stream(stream.device)
    try:
        with torch.cuda.graph(graph, pool=memory, stream=stream):
            compute()
    except RuntimeError as error:
        # Where memory runs out, ending the capture may fail as well: what came first is told.
        if isinstance(error.__context__, torch.OutOfMemoryError):
            raise error.__context__ from None
        raise
    finally:
        # Where ending the capture fails, torch leaves its stream current.
        torch.cuda.set_stream(caller)
    return graph
