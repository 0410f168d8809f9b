"""Warming up: every kernel and copy that serving may reach is reached before the first request."""

from collections.abc import Iterator

import numpy as np
import torch

from gpu_runtime.kv.copy_engine import CopyEngine
from gpu_runtime.kv.pool import KVPool
from gpu_runtime.model.attention_batch import AttentionBatch
from gpu_runtime.model.decoder import Decoder, scored
from gpu_runtime.model.sampling import Sampling, choose
from sim.cost.model import BATCHED_COPIES
from sim.engine.changes import Direction
from sim.engine.limits import Limits

FEW_TOKENS = 8


def run_kernels(decoder: Decoder, pool: KVPool, limits: Limits) -> None:
    """Compute batches of all kinds on the pool's first block, which is free."""
    for new, cached in batches(decoder, limits):
        width = -(-max(n + c for n, c in zip(new, cached, strict=True)) // pool.block_tokens)
        tables = np.zeros((pool.num_groups, len(new), width), dtype=np.int32)
        batch = AttentionBatch.build(new, cached, tables, pool.block_tokens, pool.device)
        tokens = torch.zeros(sum(new), dtype=torch.int64, device=pool.device)
        try:
            scored(decoder.forward(tokens, batch, pool)).likeliest.tolist()
        except torch.OutOfMemoryError:
            # Served, it would be computed part by part.
            torch.cuda.empty_cache()


def run_sampling(decoder: Decoder, limits: Limits) -> None:
    """Draw tokens with and without filters; on CUDA for all seats at once, which some kernels sort in another way."""
    seats = min(limits.max_num_seqs, limits.max_num_batched_tokens) if decoder.device.type == "cuda" else 1
    logits = torch.zeros(seats, decoder.config.vocab_size, dtype=decoder.dtype, device=decoder.device)
    for sampling in (Sampling(seed=0), Sampling(top_p=0.5, top_k=2, min_p=0.1, seed=0)):
        for rows in {1, seats}:
            choose(scored(logits[:rows]), [sampling] * rows, range(rows)).tolist()


def batches(decoder: Decoder, limits: Limits) -> Iterator[tuple[list[int], list[int]]]:
    """New and cached tokens: a prompt, a chunk beside a decode, a decode; on CUDA also the longest and the most."""
    longest = min(limits.max_model_len, decoder.config.max_position_embeddings)
    few = max(1, min(FEW_TOKENS, longest // 2))
    yield [few], [0]
    yield [few, 1], [longest - few, few]
    yield [1], [few]
    if decoder.device.type == "cuda":
        budget = limits.max_num_batched_tokens
        long, seats = min(longest, budget), min(limits.max_num_seqs, budget)
        short = min(long, budget // seats)
        # Long contexts are split, long prompts have kernels of their own, and those of products differ by their rows.
        yield [1], [longest - 1]
        yield [long], [0]
        yield [long] * (budget // long), [0] * (budget // long)
        yield [short] * seats, [0] * seats
        yield [1] * seats, [few - 1] * seats


def run_copies(copies: CopyEngine, gpu: KVPool, host: KVPool) -> None:
    """Copy free blocks there and back: in a row, scattered on the GPU, scattered on both sides."""
    count = min(gpu.num_blocks // 2, host.num_blocks, 2 * BATCHED_COPIES)
    row, apart = list(range(count)), list(range(0, 2 * count, 2))
    for here, there in ((row, row), (apart, row), (apart, row[::-1])):
        copies.copy_blocks(gpu, here, host, there, Direction.D2H).wait()
        copies.copy_blocks(host, there, gpu, here, Direction.H2D).wait()
