"""A runner of small decoders that keeps sequences in a scattered pool."""

import random

import numpy as np
import torch

from gpu_runtime.kv.pool import KVPool
from gpu_runtime.model.attention import AttentionBatch
from gpu_runtime.model.decoder import Decoder
from kvtwin.testing.live import SMALL, CheckedDevice

__all__ = ["GRAPHED", "PIECED", "SMALL", "Runner", "Warm"]

GRAPHED = {"graph_batch_sizes": (1, 2, 4), "capture": lambda compute: compute, "spare_blocks": 1}
"""Options of a device that computes decodes as graphs, which here are computed each time. A padded row, whose slot is
nowhere, writes to the spare block: a CPU writes behind."""
PIECED = {**GRAPHED, "piece_sizes": (4, 8, 16)}
"""The same, and what lies between the attention of layers of up to 16 tokens."""


class Warm(CheckedDevice):
    """Has its graphs when serving begins."""

    def start(self):
        with torch.inference_mode():
            self.warm_up()
        super().start()


class Runner:
    """Sequences of one decoder: their tokens, their block tables, and the pool that holds them in random order."""

    def __init__(self, decoder: Decoder, layer_group=1, block_tokens=4, num_blocks=400, seed=0, kv_dtype=None):
        self.decoder = decoder
        self.pool = KVPool(
            decoder.config, num_blocks, block_tokens, layer_group, decoder.device, kv_dtype or decoder.dtype
        )
        ids = self.pool.ids.allocate(num_blocks)
        random.Random(seed).shuffle(ids)
        self.pool.ids.free(ids)
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, list[list[int]]] = {}
        self.hidden: dict[int, torch.Tensor] = {}

    def batch(self, new: dict[int, list[int]]) -> AttentionBatch:
        """Take the tokens into the sequences and lay out the iteration that computes them."""
        context = [len(self.tokens.setdefault(seq, [])) for seq in new]
        for seq, tokens in new.items():
            self.tokens[seq] += tokens
            table = self.tables.setdefault(seq, [[] for _ in range(self.pool.num_groups)])
            for blocks in table:
                blocks += self.pool.ids.allocate(-(-len(self.tokens[seq]) // self.pool.block_tokens) - len(blocks))
        tables = [[self.tables[seq][group] for seq in new] for group in range(self.pool.num_groups)]
        return AttentionBatch.build(
            [len(t) for t in new.values()], context, tables, self.pool.block_tokens, self.decoder.device
        )

    def decodes(self, new: dict[int, list[int]]) -> tuple[list[int], list[int], list[np.ndarray]]:
        """Take a token into each sequence: what `DecodeGraph.run` is told of the iteration that computes them."""
        self.batch(new)
        lengths = [len(self.tokens[seq]) for seq in new]
        return [t[-1] for t in new.values()], lengths, [np.array(self.tables[seq], dtype=np.int32) for seq in new]

    def step(self, new: dict[int, list[int]]) -> dict[int, torch.Tensor]:
        """Logits [new tokens, V] of every sequence in the iteration; keeps layer inputs in `hidden`."""
        batch = self.batch(new)
        ids = torch.tensor([t for tokens in new.values() for t in tokens], device=self.decoder.device)
        rows = torch.arange(len(ids), device=self.decoder.device)
        logits = self.decoder.forward(ids, batch, self.pool, rows, after_layer=self.hidden.__setitem__)
        return dict(zip(new, logits.split([len(tokens) for tokens in new.values()]), strict=True))
