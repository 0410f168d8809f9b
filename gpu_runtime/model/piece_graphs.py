"""`PieceGraphs`: iterations with prompts, where what lies between two layers' attention is a captured CUDA graph."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from gpu_runtime.kv.pool import KVPool
from gpu_runtime.model.attention_batch import AttentionBatch
from gpu_runtime.model.decode_graph import Capture
from gpu_runtime.model.decoder import Decoder


class PieceGraphs:
    """Iterations of up to `max(sizes)` tokens, padded to the next captured size; vLLM's piecewise CUDA graphs.

    What knows positions, lengths and blocks runs between the pieces as it is, on the tokens that there are: rotation,
    the write of KV, attention. So a piece is captured once for a number of tokens, whoever they belong to, and padding
    is seen by nothing but products and norms, row by row.
    """

    @torch.inference_mode()
    def __init__(self, decoder: Decoder, sizes: Sequence[int], capture: Capture) -> None:
        """Capture the pieces of each size of `sizes`, in tokens, one more than there are layers."""
        self._decoder, self._sizes = decoder, sorted(sizes)
        largest, config = self._sizes[-1], decoder.config

        def rows(width: int) -> Tensor:
            return torch.zeros(largest, width, dtype=decoder.dtype, device=decoder.device)

        self._tokens = torch.zeros(largest, dtype=torch.int64, device=decoder.device)
        # What a piece reads of what came before it, and what it leaves: residual, projections, attention's answer.
        self._hidden, self._projected = rows(config.hidden_size), rows(config.q_size + 2 * config.kv_size)
        self._attended = rows(config.q_size)
        # Larger ones first, so that smaller ones fit in the memory they share.
        self._replays = {size: [capture(piece) for piece in self._pieces(size)] for size in reversed(self._sizes)}

    def _pieces(self, size: int) -> list[Callable[[], object]]:
        return [partial(self._begin, size), *(partial(self._go_on, size, i) for i in range(len(self._decoder.layers)))]

    def _begin(self, size: int) -> None:
        """Embedding, and the first layer up to its attention."""
        layer = self._decoder.layers[0]
        hidden = self._hidden[:size].copy_(self._decoder.embed(self._tokens[:size]))
        self._projected[:size].copy_(layer.project(layer.norm(hidden)))

    def _go_on(self, size: int, index: int) -> None:
        """A layer from its attention on, and the next one up to it; of the last the norm in place of the residual."""
        layers = self._decoder.layers
        hidden, update = layers[index].close(self._hidden[:size], self._attended[:size], keeps_input=False)
        hidden, normed = self._decoder.add_norm(hidden, update, index + 1)
        if index + 1 < len(layers):
            self._projected[:size].copy_(layers[index + 1].project(normed))
        self._hidden[:size].copy_(hidden if index + 1 < len(layers) else normed)

    def fits(self, num_tokens: int) -> bool:
        """Whether `forward` can compute so many new tokens."""
        return num_tokens <= self._sizes[-1]

    def forward(
        self, token_ids: Tensor, batch: AttentionBatch, pool: KVPool, sample_rows: Tensor | None = None
    ) -> Tensor:
        """As `Decoder.forward`, of tokens that fit; with nothing between the layers."""
        rows = batch.last_rows if sample_rows is None else sample_rows
        return self._decoder.head(self.layers(token_ids, batch, pool).index_select(0, rows))

    @torch.inference_mode()
    def layers(self, token_ids: Tensor, batch: AttentionBatch, pool: KVPool) -> Tensor:
        """What the head reads [N, h] of all tokens: a view that the next iteration overwrites."""
        count = len(token_ids)
        begin, *others = self._replays[next(size for size in self._sizes if size >= count)]
        # Padding computes what others have left there.
        self._tokens[:count].copy_(token_ids)
        begin()
        for index, (layer, go_on) in enumerate(zip(self._decoder.layers, others, strict=True)):
            self._attended[:count].copy_(layer.attend(self._projected[:count], batch, pool, index))
            go_on()
        return self._hidden[:count]
