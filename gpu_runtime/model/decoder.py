"""`Decoder`: a Llama-family decoder over paged KV, whose driver can act between its layers."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from gpu_runtime.kv.pool import KVPool
from gpu_runtime.model.attention import AttentionBatch
from gpu_runtime.model.checkpoint import Checkpoint
from gpu_runtime.model.config import DecoderConfig
from gpu_runtime.model.experts import mix_experts
from gpu_runtime.model.kernels import Kernels
from gpu_runtime.model.rotary import RotaryEmbedding
from gpu_runtime.model.weights import EndWeights, LayerWeights, RandomWeights


class DecoderLayer:
    """One layer: attention over the pool, then the MLP, each added to what it read."""

    def __init__(self, config: DecoderConfig, weights: LayerWeights, rotary: RotaryEmbedding) -> None:
        self._config = config
        self.weights = weights
        self._rotary = rotary
        self.kernels = Kernels()

    def forward(
        self, hidden: Tensor, batch: AttentionBatch, pool: KVPool, layer_index: int, *, keeps_input: bool = True
    ) -> Tensor:
        """The layer's output [N, h] for its input [N, h]; new KV is written to the pool.

        `keeps_input`: whether the input is left as it is; else its memory may be written to.
        """
        c, w, kernels = self._config, self.weights, self.kernels
        normed = kernels.rms_norm(hidden, w.input_norm, c.rms_norm_eps)
        projected = linear(normed, w.qkv, w.qkv_bias)
        query, key, value = self._rotary.rotate_and_write(projected, w.q_norm, w.k_norm, pool, layer_index, batch)
        attended = kernels.attend(query, pool, layer_index, batch, (key, value))
        if keeps_input and kernels.overwrites:
            hidden = hidden.clone()
        update = linear(attended.flatten(1), w.output)
        hidden, normed = kernels.add_rms_norm(hidden, update, w.post_norm, c.rms_norm_eps)
        if c.experts is not None:
            return hidden + mix_experts(normed, w, c.experts, kernels.silu_and_mul)
        return hidden + linear(kernels.silu_and_mul(linear(normed, w.gate_up)), w.down)

    def restore_kv(self, hidden: Tensor, batch: AttentionBatch, pool: KVPool, layer_index: int) -> None:
        """Write the KV of all N tokens from the layer's saved inputs [N, h]: no attention, no MLP.

        What HCache (Gao et al. 2025) and KVPR (Jiang et al. 2024) do in place of a copy or of a recomputation.
        """
        c, w = self._config, self.weights
        normed = self.kernels.rms_norm(hidden, w.input_norm, c.rms_norm_eps)
        bias = None if w.qkv_bias is None else w.qkv_bias[c.q_size :]
        projected = linear(normed, w.qkv[c.q_size :], bias)
        self._rotary.rotate_and_write(projected, w.q_norm, w.k_norm, pool, layer_index, batch)


class Decoder:
    """Embedding, layers and head. `config` describes what is held: `num_layers` are those built."""

    def __init__(self, config: DecoderConfig, layers: list[LayerWeights], ends: EndWeights | None) -> None:
        device = layers[0].qkv.device
        self.config = msgspec.structs.replace(config, num_layers=len(layers), windows=config.windows[: len(layers)])
        self.device = device
        self.dtype = layers[0].qkv.dtype
        rotary = RotaryEmbedding(config, device)
        self.layers = [DecoderLayer(config, weights, rotary) for weights in layers]
        self._ends = ends
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
        with_head: bool = True,
    ) -> "Decoder":
        """Seeded random weights, generated on the device.

        Args:
            config: shapes.
            device: where the weights lie.
            dtype: of the weights.
            seed: of the weights; the same on the same kind of device gives the same decoder.
            num_layers: build only the first layers.
            with_head: build embedding, final norm and head; without them only layers can be run.
        """
        weights = RandomWeights(config, device, dtype, seed)
        layers = [weights.layer(index) for index in range(num_layers or config.num_layers)]
        return cls(config, layers, weights.ends() if with_head else None)

    @classmethod
    def from_safetensors(cls, folder: Path | str, device: torch.device | str, dtype: torch.dtype) -> "Decoder":
        """A Hugging Face checkpoint: `config.json` and `*.safetensors` of one folder, converted to `dtype`.

        Raises:
            UserError: a config that the runtime does not compute; a tensor missing, misshapen, quantised or unknown.
        """
        config = DecoderConfig.from_hf(folder)
        checkpoint = Checkpoint(Path(folder), config, device, dtype)
        return cls(config, [checkpoint.layer(index) for index in range(config.num_layers)], checkpoint.ends())

    @property
    def ends(self) -> EndWeights:
        """Embedding, final norm and head; ValueError in a decoder built without."""
        if self._ends is None:
            raise ValueError(f"{self.config.name}: this decoder was built without embedding and head")
        return self._ends

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
        for index, layer in enumerate(self.layers):
            if before_layer is not None:
                before_layer(index)
            entered, hidden = (
                hidden,
                layer.forward(hidden, batch, pool, index, keeps_input=after_layer is not None),
            )
            if after_layer is not None:
                after_layer(index, entered)
        return self.logits(hidden.index_select(0, batch.last_rows if sample_rows is None else sample_rows))

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, V] of the last layer's outputs [rows, h]."""
        normed = self.kernels.rms_norm(hidden, self.ends.final_norm, self.config.rms_norm_eps)
        return linear(normed, self.ends.head)


def greedy(logits: Tensor) -> Tensor:
    """The likeliest token of each row, [rows]."""
    return logits.argmax(dim=-1)
