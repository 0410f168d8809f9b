"""The weights of a decoder, projections fused as one GEMM computes them; seeded random ones."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from gpu_runtime.model.config import DecoderConfig
from gpu_runtime.model.fp8 import KEPT_ON, Fp8Matrix, Matrix

ROWS, COLUMNS = -2, -1
"""Dimensions of a matrix [out, in]."""


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One decoder layer. Matrices are [out, in]; h hidden, f MLP width, q and kv elements of a token's Q and K.

    Attributes:
        input_norm: [h].
        qkv: [q + 2 kv, h], queries first, then keys, then values.
        qkv_bias: [q + 2 kv], or None.
        q_norm: [head_dim], or None.
        k_norm: [head_dim], or None.
        output: [h, q].
        post_norm: [h].
        gate_up: [2 f, h], gate first; of experts [E, 2 f, h].
        down: [h, f]; of experts [E, h, f].
        router: [E, h], or None where there are no experts.
    """

    input_norm: Tensor
    qkv: Matrix
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Matrix
    post_norm: Tensor
    gate_up: Matrix
    down: Matrix
    router: Tensor | None = None

    def part(self, config: DecoderConfig, rank: int, size: int) -> "LayerWeights":
        """What one of `size` ranks has of the whole: heads and columns of the MLP, and of what follows these the rows.

        `config` is the whole layer's.
        """
        widths = (config.q_size, config.kv_size, config.kv_size)

        def cut(matrix: Tensor, widths: Sequence[int], dim: int) -> Tensor:
            """Of each of the matrices beside one another its part."""
            return torch.cat([whole.chunk(size, dim)[rank] for whole in matrix.split(list(widths), dim)], dim)

        def part(matrix: Matrix, widths: Sequence[int], dim: int) -> Matrix:
            if isinstance(matrix, Fp8Matrix):
                return matrix.cut(lambda tensor: cut(tensor, widths, dim), rows=dim == ROWS)
            return cut(matrix, widths, dim)

        columns = config.intermediate_size if config.experts is None else config.experts.width
        return replace(
            self,
            qkv=part(self.qkv, widths, ROWS),
            qkv_bias=None if self.qkv_bias is None else cut(self.qkv_bias, widths, 0),
            output=part(self.output, (config.q_size,), COLUMNS),
            gate_up=part(self.gate_up, (columns, columns), ROWS),
            down=part(self.down, (columns,), COLUMNS),
        )


@dataclass(frozen=True, eq=False)
class EndWeights:
    """What stands before and after the layers: `embedding` [V, h], `final_norm` [h], `head` [V, h] (may be one)."""

    embedding: Tensor
    final_norm: Tensor
    head: Tensor

    def part(self, rank: int, size: int) -> "EndWeights":
        """What one of `size` ranks has: a part of the head's rows, as many for all, of which the last may be zeros."""
        count = -(-len(self.head) // size)
        mine = self.head[rank * count : (rank + 1) * count]
        return replace(self, head=pad(mine, (0, 0, 0, count - len(mine))))


class RandomWeights:
    """Weights that depend on the seed and their place only, so that two layers of a model are its first two.

    Projections keep the variance of what they read at one; those that write to the residual stream are smaller by
    sqrt(2 L) (GPT-2, Radford et al. 2019, sec. 2.3), so its variance stays below three and fp16 never overflows.
    """

    def __init__(self, config: DecoderConfig, device: torch.device | str, dtype: torch.dtype, seed: int) -> None:
        self._config, self._seed = config, seed
        self._device, self._dtype = torch.device(device), dtype
        self._generator = torch.Generator(self._device)

    def layer(self, index: int) -> LayerWeights:
        """Layer `index`, generated on the device."""
        c = self._config
        self._start(index + 1)
        residual = (2 * c.num_layers) ** -0.5
        found = LayerWeights(
            input_norm=self._ones(c.hidden_size),
            qkv=self._matrix(c.q_size + 2 * c.kv_size, c.hidden_size),
            qkv_bias=self._normal((c.q_size + 2 * c.kv_size,), 0.1) if c.qkv_bias else None,
            q_norm=self._ones(c.head_dim) if c.qk_norm else None,
            k_norm=self._ones(c.head_dim) if c.qk_norm else None,
            output=self._matrix(c.hidden_size, c.q_size, residual),
            post_norm=self._ones(c.hidden_size),
            **self._mlp(residual),
        )
        if not c.fp8 or self._device.type not in KEPT_ON:
            return found
        matrices = {name: getattr(found, name) for name in ("qkv", "output", "gate_up", "down")}
        return replace(found, **{name: Fp8Matrix.of(matrix) for name, matrix in matrices.items()})

    def _mlp(self, residual: float) -> dict[str, Tensor]:
        h, experts = self._config.hidden_size, self._config.experts
        if experts is None:
            f = self._config.intermediate_size
            return {"gate_up": self._matrix(2 * f, h), "down": self._matrix(h, f, residual)}
        num, f = experts.num, experts.width
        return {
            "gate_up": self._normal((num, 2 * f, h), h**-0.5),
            "down": self._normal((num, h, f), residual * f**-0.5),
            "router": self._matrix(num, h),
        }

    def ends(self) -> EndWeights:
        """Embedding, final norm and head."""
        c = self._config
        self._start(0)
        head = self._matrix(c.vocab_size, c.hidden_size)
        # A tied table serves as head; the first norm makes up for its small rows.
        embedding = head if c.tie_word_embeddings else self._normal((c.vocab_size, c.hidden_size), 1.0)
        return EndWeights(embedding, self._ones(c.hidden_size), head)

    def _start(self, place: int) -> None:
        self._generator.manual_seed(self._seed * 10_007 + place)

    def _matrix(self, rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return self._normal((rows, columns), scale * columns**-0.5)

    def _normal(self, shape: tuple[int, ...], std: float) -> Tensor:
        empty = torch.empty(shape, device=self._device, dtype=self._dtype)
        return empty.normal_(0.0, std, generator=self._generator)

    def _ones(self, size: int) -> Tensor:
        return torch.ones(size, device=self._device, dtype=self._dtype)
