"""Work of one model: the live runtime's own layers, over paged KV in place, at the model's true shapes."""

from collections.abc import Iterator
from itertools import repeat
from zlib import crc32

import msgspec
import numpy as np
import torch
from torch import Tensor

from calib.measure.clocks import Unmeasurable, Work
from calib.measure.graphs import telling_capture
from calib.measure.lengths import drawn_lengths
from calib.measure.points import BLOCK_TOKENS, Point
from calib.samples import PIECES
from gpu_runtime.kv.pool import KVPool
from gpu_runtime.model.attention import AttentionBatch
from gpu_runtime.model.capture_sizes import captured_size
from gpu_runtime.model.config import DecoderConfig
from gpu_runtime.model.decode_graph import Capture, CudaCapture
from gpu_runtime.model.decoder import Decoder
from gpu_runtime.model.piece_graphs import PieceGraphs
from sim.specs.model_spec import ModelSpec

TILE_ELEMENTS = 2**22
"""Random keys and values, repeated: making a pool full of them takes long on a CPU."""


class ModelWork:
    """A decoder of a few layers with seeded random weights, and a pool of random keys and values for it.

    Each layer has blocks of its own, in random order and anew for every point, as in a pool long in use.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        num_layers: int,
        kv_blocks: int,
        longest: int,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
        capture: Capture | None = None,
    ) -> None:
        """Build weights and pool on the device, of this `dtype`.

        Args:
            num_layers: decoder layers to build.
            kv_blocks: blocks of the KV cache per layer.
            longest: tokens of the longest sequence; positions past the model's own cost the same.
            seed: of weights and data.
            capture: makes graphs by piece; None: as CUDA graphs.
        """
        config = DecoderConfig.from_spec(spec)
        positions = max(config.max_position_embeddings, longest)
        config = msgspec.structs.replace(config, max_position_embeddings=positions)
        self.decoder = Decoder.random(config, device=device, dtype=dtype, seed=seed, num_layers=num_layers)
        self._pool = KVPool(self.decoder.config, num_layers * kv_blocks, BLOCK_TOKENS, 1, device, dtype)
        _fill(self._pool.data, seed)
        self._seed = seed
        self._capture = capture
        self._pieces: tuple[int, PieceGraphs] | None = None

    def works(self, point: Point) -> Iterator[Work]:
        """What executes a point of this model, execution by execution, on random data; prompts of new lengths each."""
        seed = crc32(msgspec.json.encode(point), self._seed)
        if point.op == "lm_head":
            rows = self._hidden(point.batch_size, seed)
            yield from repeat(lambda: self.decoder.logits(rows))
        tables = self._tables(point, np.random.default_rng(seed))
        hidden = self._hidden(point.batch_size * (point.new_tokens + point.draw) + point.decodes, seed)
        decodes = [1] * point.decodes
        cached = [point.context_tokens] * point.batch_size + [point.decode_context_tokens] * point.decodes
        work: Work | None = None
        for lengths in drawn_lengths(point, seed):
            if work is None or point.draw:
                batch = AttentionBatch.build([*lengths, *decodes], cached, tables, BLOCK_TOKENS, self.decoder.device)
                work = self._work(point, batch, hidden[: sum(lengths) + point.decodes])
            yield work

    def _work(self, point: Point, batch: AttentionBatch, hidden: Tensor) -> Work:
        pool = self._pool
        if point.graph == PIECES:
            pieces = self._pieces_of(captured_size(batch.num_tokens))
            tokens = torch.zeros(batch.num_tokens, dtype=torch.int64, device=self.decoder.device)
            return lambda: pieces.layers(tokens, batch, pool)
        built = len(self.decoder.layers)
        order = [(self.decoder.layers[index % built], index % built) for index in range(point.num_layers)]

        def run_layers() -> Tensor:
            states = hidden
            for layer, index in order:
                states = layer.forward(states, batch, pool, index)
            return states

        def restore() -> None:
            for layer, index in order:
                layer.restore_kv(hidden, batch, pool, index)

        return restore if point.op == "restore" else run_layers

    def _pieces_of(self, size: int) -> PieceGraphs:
        """The layers built, captured by piece for so many tokens; those of another size go first."""
        if self._pieces is None or self._pieces[0] != size:
            self._pieces = None
            with telling_capture():
                capture = self._capture or CudaCapture(self.decoder.device)
                self._pieces = size, PieceGraphs(self.decoder, [size], capture)
        return self._pieces[1]

    def _tables(self, point: Point, rng: np.random.Generator) -> np.ndarray:
        """Block ids [layers, sequences, blocks], int32; a recomputed prefix is dropped, so its layers share theirs."""
        layers = self._pool.num_groups
        width = -(-point.length // BLOCK_TOKENS)
        own = 1 if point.op == "recompute" else layers
        count = own * point.sequences * width
        if count > self._pool.num_blocks:
            raise Unmeasurable(f"needs {count} KV blocks, the pool has {self._pool.num_blocks}")
        ids = rng.permutation(self._pool.num_blocks)[:count].astype(np.int32)
        tables = ids.reshape(own, point.sequences, width)
        return np.ascontiguousarray(np.broadcast_to(tables, (layers, point.sequences, width)))

    def _hidden(self, rows: int, seed: int) -> Tensor:
        device, dtype = self.decoder.device, self.decoder.dtype
        shape = (rows, self.decoder.config.hidden_size)
        return torch.randn(shape, device=device, dtype=dtype, generator=torch.Generator(device).manual_seed(seed))


def _fill(data: Tensor, seed: int) -> None:
    """Normal random values throughout."""
    flat = data.view(-1)
    generator = torch.Generator(data.device).manual_seed(seed)
    tile = torch.randn(min(TILE_ELEMENTS, len(flat)), device=data.device, dtype=data.dtype, generator=generator)
    for part in flat.split(len(tile)):
        part.copy_(tile[: len(part)])
