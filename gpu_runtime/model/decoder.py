"""`Decoder`: a Llama-family decoder over paged KV, whose driver can act between its layers."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from gpu_runtime.kv.pool import KVPool
from gpu_runtime.model.attention import AttentionBatch
from gpu_runtime.model.checkpoint import Checkpoint
from gpu_runtime.model.config import DecoderConfig
from gpu_runtime.model.experts import mix_experts
from gpu_runtime.model.fp8 import product
from gpu_runtime.model.kernels import Kernels
from gpu_runtime.model.rotary import RotaryEmbedding
from gpu_runtime.model.weights import EndWeights, LayerWeights, RandomWeights
from gpu_runtime.ranks import Group


class DecoderLayer:
    """One layer: attention over the pool, then the MLP, each added to what it read.

    Of several ranks (`group`) each has its part, and both are summed over all before they are added.
    """

    def __init__(
        self, config: DecoderConfig, weights: LayerWeights, rotary: RotaryEmbedding, group: Group | None = None
    ) -> None:
        self._config, self._group = config, group
        self.weights = weights
        self._rotary = rotary
        self.kernels = Kernels()

    def forward(
        self, hidden: Tensor, batch: AttentionBatch, pool: KVPool, layer_index: int, *, keeps_input: bool = True
    ) -> Tensor:
        """The layer's output [N, h] for its input [N, h]; new KV is written to the pool.

        `keeps_input`: whether the input is left as it is; else its memory may be written to.
        """
        attended = self.attend(self.project(self.norm(hidden)), batch, pool, layer_index)
        hidden, update = self.close(hidden, attended, keeps_input=keeps_input)
        return hidden + update

    def norm(self, hidden: Tensor) -> Tensor:
        """What is projected of an input [N, h]."""
        return self.kernels.rms_norm(hidden, self.weights.input_norm, self._config.rms_norm_eps)

    def project(self, normed: Tensor) -> Tensor:
        """Queries, keys and values [N, q + 2 kv], as they are before rotation."""
        return product(normed, self.weights.qkv, self.weights.qkv_bias)

    def attend(self, projected: Tensor, batch: AttentionBatch, pool: KVPool, layer_index: int) -> Tensor:
        """Rotate, write new KV to the pool, and attend: [N, q]. All of a layer that asks where tokens stand."""
        w = self.weights
        query, key, value = self._rotary.rotate_and_write(projected, w.q_norm, w.k_norm, pool, layer_index, batch)
        return self.kernels.attend(query, pool, layer_index, batch, (key, value)).flatten(1)

    def close(self, hidden: Tensor, attended: Tensor, *, keeps_input: bool) -> tuple[Tensor, Tensor]:
        """Of an input and what attention gave: what the MLP reads [N, h], and what it adds to that [N, h]."""
        c, w, kernels = self._config, self.weights, self.kernels
        if keeps_input and kernels.overwrites:
            hidden = hidden.clone()
        update = self._sum(product(attended, w.output))
        hidden, normed = kernels.add_rms_norm(hidden, update, w.post_norm, c.rms_norm_eps)
        if c.experts is not None:
            return hidden, self._sum(mix_experts(normed, w, c.experts, kernels.silu_and_mul))
        return hidden, self._sum(product(kernels.silu_and_mul(product(normed, w.gate_up)), w.down))

    def _sum(self, update: Tensor) -> Tensor:
        return update if self._group is None else self._group.sum(update)

    def restore_kv(self, hidden: Tensor, batch: AttentionBatch, pool: KVPool, layer_index: int) -> None:
        """Write the KV of all N tokens from the layer's saved inputs [N, h]: no attention, no MLP.

        What HCache (Gao et al. 2025) and KVPR (Jiang et al. 2024) do in place of a copy or of a recomputation.
        """
        c, w = self._config, self.weights
        bias = None if w.qkv_bias is None else w.qkv_bias[c.q_size :]
        projected = product(self.norm(hidden), w.qkv[c.q_size :], bias)
        self._rotary.rotate_and_write(projected, w.q_norm, w.k_norm, pool, layer_index, batch)


class Decoder:
    """Embedding, layers and head. `config` describes what is held: `num_layers` are those built."""

    def __init__(
        self, config: DecoderConfig, layers: list[LayerWeights], ends: EndWeights, group: Group | None = None
    ) -> None:
        """Of one rank of a `group` config and weights are its part."""
        self.group = group
        device = layers[0].qkv.device
        self.config = msgspec.structs.replace(config, num_layers=len(layers), windows=config.windows[: len(layers)])
        self.device = device
        self.dtype = layers[0].input_norm.dtype
        rotary = RotaryEmbedding(config, device)
        self.layers = [DecoderLayer(config, weights, rotary, group) for weights in layers]
        self.ends = ends
        self.kernels = Kernels()

    def compute_with(self, kernels: Kernels) -> None:
        """Use these kernels from now on; graphs that were captured keep theirs."""
        for part in (self, *self.layers):
            part.kernels = kernels

    @classmethod
    def random(
        cls,
        config: DecoderConfig,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        seed: int,
        num_layers: int | None = None,
        group: Group | None = None,
    ) -> "Decoder":
        """Seeded random weights, generated on the device.

        Args:
            seed: the same on the same kind of device gives the same decoder.
            num_layers: build only the first layers.
            group: keep this rank's part.
        """
        weights = RandomWeights(config, device, dtype, seed)
        return cls._of(config, weights, num_layers or config.num_layers, group)

    @classmethod
    def from_safetensors(
        cls, folder: Path | str, device: torch.device | str, dtype: torch.dtype, group: Group | None = None
    ) -> "Decoder":
        """A Hugging Face checkpoint: `config.json` and `*.safetensors` of one folder, converted to `dtype`.

        Of one rank of a `group` its part.

        Raises:
            UserError: a config that the runtime does not compute; a tensor missing, misshapen, quantised or unknown.
        """
        config = DecoderConfig.from_hf(folder)
        checkpoint = Checkpoint(Path(folder), config, device, dtype)
        return cls._of(config, checkpoint, config.num_layers, group)

    @classmethod
    def _of(
        cls, config: DecoderConfig, weights: RandomWeights | Checkpoint, num_layers: int, group: Group | None
    ) -> "Decoder":
        """Layer by layer, so that of a rank no more than one is ever whole."""
        layers = map(weights.layer, range(num_layers))
        ends = weights.ends()
        if group is None:
            return cls(config, list(layers), ends)
        part = config.part(group.size)
        mine = [layer.part(config, group.rank, group.size) for layer in layers]
        return cls(part, mine, ends.part(group.rank, group.size), group)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Hidden states [N, h] of token ids [N]."""
        return embedding(token_ids, self.ends.embedding)

    def forward(
        self,
        token_ids: Tensor,
        batch: AttentionBatch,
        pool: KVPool,
        sample_rows: Tensor | None = None,
        *,
        before_layer: Callable[[int], None] | None = None,
        after_layer: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """One iteration: logits [rows, V] of the rows to sample from.

        Args:
            token_ids: [N] new tokens of all sequences.
            batch: where they stand.
            pool: the KV cache; new KV is written to it.
            sample_rows: rows of `token_ids` to give logits for; None: the last of each sequence.
            before_layer: called with a layer's index before anything of it is queued.
            after_layer: called with a layer's index and its input [N, h] once all of it is queued.
        """
        hidden = self.embed(token_ids)
        normed = self.layers[0].norm(hidden)
        for index, layer in enumerate(self.layers):
            if before_layer is not None:
                before_layer(index)
            entered = hidden
            attended = layer.attend(layer.project(normed), batch, pool, index)
            hidden, update = layer.close(hidden, attended, keeps_input=after_layer is not None)
            hidden, normed = self.add_norm(hidden, update, index + 1)
            if after_layer is not None:
                after_layer(index, entered)
        return self.head(normed.index_select(0, batch.last_rows if sample_rows is None else sample_rows))

    def add_norm(self, hidden: Tensor, update: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """A layer's output as a sum, and the norm that layer `index` reads, or behind the last the head: one kernel."""
        norm = self.layers[index].weights.input_norm if index < len(self.layers) else self.ends.final_norm
        return self.kernels.add_rms_norm(hidden, update, norm, self.config.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, V] of the last layer's outputs [rows, h]."""
        return self.head(self.kernels.rms_norm(hidden, self.ends.final_norm, self.config.rms_norm_eps))

    def head(self, normed: Tensor) -> Tensor:
        """The same of what has been normed."""
        logits = linear(normed, self.ends.head)
        return logits if self.group is None else self.group.gather(logits)[:, : self.config.vocab_size]


class Scores(NamedTuple):
    """What a model says of tokens that come next. Those of a captured graph are views that its next run overwrites."""

    logits: Tensor
    """[rows, V]."""
    likeliest: Tensor
    """[rows], int64."""


def scored(logits: Tensor) -> Scores:
    """Logits [rows, V] with the likeliest token of each row."""
    return Scores(logits, greedy(logits))


def greedy(logits: Tensor) -> Tensor:
    """The likeliest token of each row, [rows]."""
    return logits.argmax(dim=-1)
