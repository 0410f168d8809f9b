"""`ModelSpec`: what a decoder-only transformer costs per token, in bytes and FLOPs. The only place with these formulas.

Notation of the roofline: L layers, h hidden, n_q/n_kv query/KV heads of d elements, f MLP width, V vocabulary.
Sources: grouped-query attention (Ainslie et al. 2023), multi-head latent attention (DeepSeek-V2, 2024, sec. 2.1).
"""

from typing import Literal, NamedTuple

import msgspec

from sim.errors import UserError
from sim.specs.gated_delta_net import GatedDeltaNetSpec
from sim.specs.indexer import DEQUANTIZE_OPS, IndexerSpec, scaled_bytes
from sim.specs.kv_format import KVDtype, KVFormat, KVLayers
from sim.specs.quantization import FORMATS, PRODUCT_FORMATS

HIDDEN_STATE_BYTES = 2
"""Bytes per element of hidden states."""
ALL_QUANTISED = 0.94
"""Share of routed experts' weights beyond which all are quantised, and the rest is scales of small groups."""


LATENT_TILE_HEADS = 64
"""Query heads that a block of the kernels of latent attention computes together (FlashMLA, FlashAttention-3)."""


class MlaSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention: one latent of `kv_lora_rank` plus one rotary key per token, shared by all heads."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None
    """Width of the query's low-rank bottleneck; None: queries are projected directly."""
    indexer: IndexerSpec | None
    """What chooses the tokens that are attended to; None: all are."""

    @property
    def latent_dim(self) -> int:
        """Elements that are kept of a token."""
        return self.kv_lora_rank + self.qk_rope_head_dim


class MoeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Mixture of experts in `num_moe_layers` of the layers; the others have the dense MLP."""

    num_experts: int
    experts_per_token: int
    moe_intermediate_size: int
    num_moe_layers: int
    shared_intermediate_size: int
    """Width of all shared experts together; 0: none."""
    shared_gate: bool
    router_bias: bool
    fp32_router: bool
    """Whether engines keep its router in 32 bits and multiply so: whole on each GPU of a group."""
    expert_bias: bool
    """Biases on the projections of routed experts."""


class Product(NamedTuple):
    """A matrix product in each of some layers, as one GPU computes it: `inputs` times `outputs` weights."""

    num_layers: int
    inputs: float
    outputs: float
    weight_bytes: float
    """Mean of a weight."""
    num_held: int = 1
    """Like matrices in a layer: those of experts."""
    num_active: int = 1
    """Those of them that a token meets."""

    @property
    def held(self) -> float:
        """Weights in all layers."""
        return self.num_layers * self.num_held * self.inputs * self.outputs

    @property
    def active(self) -> float:
        """Weights in all layers that a token meets."""
        return self.num_layers * self.num_active * self.inputs * self.outputs


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of a decoder-only language model, and what follows from it.

    Bytes per weight are averages over layers, scales of quantisation included: `dtype_bytes` for whatever is never
    quantised (embeddings, head, norms, router), the other three for the projections of attention, of the dense MLP
    and of the experts. Vision towers and multi-token-prediction heads are not counted; for adapters see
    `sim.specs.adapters`.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    gated_mlp: bool
    vocab_size: int
    tie_word_embeddings: bool
    max_position_embeddings: int
    dtype_bytes: float = 2.0
    kv_dtype_bytes: float = 2.0
    attention_dtype_bytes: float = 2.0
    mlp_dtype_bytes: float = 2.0
    expert_dtype_bytes: float = 2.0
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    norm_params_per_layer: int = 0
    """Elements of all norms of a layer that attends, those on queries and keys included, of attention sinks, and of the
    indexer what is never quantised."""
    final_norm_params: int = 0
    position_rows: int = 0
    """Rows of a learned table of positions; 0: rotary or none."""
    output_gate: bool = False
    """Whether attention's result is gated, elementwise, by another projection of as many elements as its queries."""
    mla: MlaSpec | None = None
    moe: MoeSpec | None = None
    gdn: GatedDeltaNetSpec | None = None
    kv_layers: tuple[KVLayers, ...] = ()
    """Classes of layers that differ in their KV; none: every layer keeps and reads all of its own."""
    quantization: str = ""
    """Format of the weights that are quantised, a key of `sim.specs.quantization.FORMATS`; empty: none, or another."""
    kv_dequantize_ops: float = 0.0
    """Vector operations that make a half-precision element of a stored one."""
    kv_residual_tokens: int = 0
    """Last tokens of a sequence whose KV is not quantised."""
    adapted: Literal["", "projections", "all"] = ""
    """What vLLM gives adapters beside: projections alone, embeddings and head as well; empty: not known."""

    windows_apart: bool = False
    """Whether SGLang 0.5.23 gives layers with a window a pool of their own (its `is_hybrid_swa_model`)."""

    def with_dtype(self, dtype_bytes: float) -> "ModelSpec":
        """The same model with weights, activations and KV cache of `dtype_bytes`; what is quantised stays so."""
        old = self.dtype_bytes
        sizes = ("dtype_bytes", "kv_dtype_bytes", "attention_dtype_bytes", "mlp_dtype_bytes", "expert_dtype_bytes")
        return msgspec.structs.replace(self, **{name: dtype_bytes for name in sizes if getattr(self, name) == old})

    def with_quantization(self, quantization: str) -> "ModelSpec":
        """The same model with all its projections in a format of `FORMATS`; the head and routers stay as they are.

        UserError where its checkpoint is quantised already, otherwise than that.
        """
        weight_bytes = FORMATS[quantization].weight_bytes
        found = {self.attention_dtype_bytes, self.mlp_dtype_bytes, self.expert_dtype_bytes}
        if found - {self.dtype_bytes, weight_bytes}:
            raise UserError(
                f"--quantization {quantization}: {self.name} has weights of {min(found):g} bytes already; leave it out"
            )
        return msgspec.structs.replace(
            self, attention_dtype_bytes=weight_bytes, mlp_dtype_bytes=weight_bytes, expert_dtype_bytes=weight_bytes,
            quantization=quantization,
        )  # fmt: skip

    def with_kv_dtype(self, dtype: KVDtype) -> "ModelSpec":
        """The same model with another type of KV. UserError where no engine stores its KV so."""
        if self.mla and dtype.group:
            raise UserError(
                f"--kv-cache-dtype {dtype.name}: {self.name} keeps latents, which no engine stores in groups: "
                "use auto or an fp8 type"
            )
        element_bytes, dequantize_ops = dtype.bytes_per_element(self.head_dim), float(dtype.dequantize_ops)
        if self.indexer and self.mla and dtype.bits == 8:
            # With scales, and the rotary key in 16 bits.
            latent_bytes = scaled_bytes(self.mla.kv_lora_rank) + self.mla.qk_rope_head_dim * HIDDEN_STATE_BYTES
            element_bytes, dequantize_ops = (n / self.mla.latent_dim for n in (latent_bytes, DEQUANTIZE_OPS))
        return msgspec.structs.replace(
            self,
            kv_dtype_bytes=element_bytes,
            kv_dequantize_ops=dequantize_ops,
            kv_residual_tokens=dtype.residual_tokens,
        )

    # -- layers that differ in their KV -------------------------------------------------------------------------------

    @property
    def kv_classes(self) -> tuple[KVLayers, ...]:
        """Classes of layers by their KV; one of all layers where none differ."""
        if self.kv_layers:
            return self.kv_layers
        layers = KVLayers(num_layers=self.num_attention_layers, num_stored=self.num_attention_layers)
        if self.indexer:
            share = self.indexer.token_bytes / self.kv_bytes_per_token_layer()
            layers = msgspec.structs.replace(layers, window=self.indexer.top_k, keeps_all=True, index_share=share)
        return (layers,)

    @property
    def indexer(self) -> IndexerSpec | None:
        """What chooses the tokens that are attended to; None: all are."""
        return self.mla.indexer if self.mla else None

    @property
    def _num_mlp_layers(self) -> int:
        """Layers with an MLP or experts."""
        return (self.gdn.mlp_layers if self.gdn else 0) or self.num_layers

    @property
    def num_attention_layers(self) -> int:
        """Layers that attend; the others keep a state."""
        return self.num_layers - (self.gdn.num_layers if self.gdn else 0)

    @property
    def fp8_kv(self) -> bool:
        """Whether KV is stored in eight bits and with no scales to speak of."""
        return self.kv_dtype_bytes == 1.0

    @property
    def num_stored_layers(self) -> int:
        """Layers with KV of their own."""
        return sum(layers.num_stored for layers in self.kv_classes)

    @property
    def last_token_share(self) -> float:
        """Share of the linear layers' work that a prompt does for its last token only: YOCO's cross-decoder, else 0."""
        layers = sum(layers.num_layers for layers in self.kv_classes if layers.last_token_only)
        if not layers:
            return 0.0
        widths = (*self._attention_widths(1, has_kv=False), *self._mlp_widths(self.intermediate_size))
        return 2.0 * layers * sum(inputs * outputs for inputs, outputs in widths) / self.linear_flops_per_token

    def kv_format(self, tp: int = 1) -> KVFormat:
        """What a GPU of a group of `tp` stores, reads and copies of a sequence at a position."""
        return KVFormat(
            self.kv_classes,
            self.kv_bytes_per_token_layer(tp),
            self._absorbed_flops_per_token_read / tp,
            self.kv_dequantize_ops * self.kv_elements_per_token_layer(tp),
            # Keys are quantised when there are so many: on average half of them have been.
            0.75 * self.kv_residual_bytes(tp),
        )

    @property
    def _absorbed_flops_per_token_read(self) -> float:
        """FLOPs of a decode per token that a layer reads, 2 n_q (2 d_c + d_R), MLA's projections absorbed; else 0.

        Other decodes have some 2 n_q / n_kv FLOPs a byte, far below the ridge; all of MLA's heads share what they read.
        """
        if self.mla is None:
            return 0.0
        return 2.0 * self.num_heads * (self.mla.kv_lora_rank + self.mla.latent_dim)

    def latent_flops_per_token_read(self, tp: int = 1) -> float:
        """FLOPs of a decode's kernel per GPU, layer and token read; heads are taken in tiles of `LATENT_TILE_HEADS`.

        Of latent attention; 0 of other models.
        """
        return self._absorbed_flops_per_token_read * max(1 / tp, LATENT_TILE_HEADS / self.num_heads)

    def latent_joined_bytes_per_token(self, tp: int = 1) -> float:
        """Bytes per GPU and layer of one token's queries, of latent width, read and written; 0 of others."""
        if self.mla is None:
            return 0.0
        return 2.0 * self.num_heads / tp * self.mla.latent_dim * self.dtype_bytes

    # -- routed experts, where they are priced apart -------------------------------------------------------------------

    @property
    def expert_quantization(self) -> str | None:
        """Format of routed experts' weights as profiles name it; empty: 16 bits; None: another, or no experts."""
        if self.moe is None:
            return None
        if self.quantization and self._quantised_share(self.expert_dtype_bytes) > ALL_QUANTISED:
            return self.quantization
        return "" if self.expert_dtype_bytes == self.dtype_bytes == HIDDEN_STATE_BYTES else None

    def without_routed_experts(self) -> "ModelSpec":
        """What is left to compute and read beside the routed experts: the router and shared experts stay."""
        if self.moe is None:
            return self
        moe = msgspec.structs.replace(self.moe, experts_per_token=0, moe_intermediate_size=0)
        return msgspec.structs.replace(self, moe=moe)

    @property
    def routed_flops_per_token(self) -> float:
        """FLOPs of the routed experts that a token meets, in all layers."""
        moe = self.moe
        if moe is None:
            return 0.0
        return 2.0 * moe.num_moe_layers * moe.experts_per_token * self._weights_of_expert

    @property
    def routed_weight_bytes(self) -> float:
        """Bytes of all routed experts of all layers, all GPUs together."""
        if self.moe is None:
            return 0.0
        return self.moe.num_moe_layers * self.moe.num_experts * self._weights_of_expert * self.expert_dtype_bytes

    def routed_activation_bytes_per_token(self, tp: int) -> float:
        """Bytes per GPU that a token's routed experts read and write in all layers.

        Inputs and outputs of both products and of the activation function between them, and what the sum reads.
        """
        if self.moe is None:
            return 0.0
        elements = 3 * self.hidden_size + (2 * self._mlp_gates + 2) * self.moe.moe_intermediate_size / tp
        return self.moe.num_moe_layers * self.moe.experts_per_token * elements * self.dtype_bytes

    # -- weights ------------------------------------------------------------------------------------------------------

    def _products(self, tp: int = 1, expert_gpus: int | None = None) -> list[Product]:
        """Those of all layers but routers', of one GPU of `tp`; `expert_gpus` (default: as many) share the experts."""
        own, attention = self.num_stored_layers, self.attention_dtype_bytes
        # Some layers have no keys and values of their own.
        groups = [
            (own, self._attention_widths(tp, has_kv=True), attention, 1, 1),
            (self.num_attention_layers - own, self._attention_widths(tp, has_kv=False), attention, 1, 1),
            (self._num_dense_layers, self._mlp_widths(self.intermediate_size / tp), self.mlp_dtype_bytes, 1, 1),
        ]
        if self.gdn:
            groups.append((self.gdn.num_layers, self.gdn.widths(self.hidden_size, tp), attention, 1, 1))
        if (moe := self.moe) is not None:
            routed = self._mlp_widths(moe.moe_intermediate_size / (expert_gpus or tp))
            shared = self._mlp_widths(moe.shared_intermediate_size / tp) if moe.shared_intermediate_size else []
            counts = moe.num_experts, moe.experts_per_token
            groups.append((moe.num_moe_layers, routed, self.expert_dtype_bytes, *counts))
            groups.append((moe.num_moe_layers, shared, self.expert_dtype_bytes, 1, 1))
        return [
            Product(num_layers, *widths, weight_bytes, *counts)
            for num_layers, of_layer, weight_bytes, *counts in groups
            for widths in of_layer
        ]

    def _attention_widths(self, tp: int, *, has_kv: bool) -> list[tuple[float, float]]:
        """Inputs and outputs of one layer's products around attention. Queries are split over `tp` GPUs by heads, KV is
        replicated where there are more GPUs than KV heads, MLA's latents and the indexer are everywhere."""
        h, n, m = self.hidden_size, self.num_heads / tp, self.mla
        if m is None:
            queries = (2 if self.output_gate else 1) * n * self.head_dim
            kv = 2 * max(1, self.num_kv_heads // tp) * self.head_dim if has_kv else 0
            return [(h, queries + kv), (n * self.head_dim, h)]
        queries, first = n * (m.qk_nope_head_dim + m.qk_rope_head_dim), m.latent_dim
        if m.indexer:
            # A key of each token; queries from the bottleneck.
            first, queries = first + m.indexer.head_dim, queries + m.indexer.num_heads * m.indexer.head_dim
        from_latent = (m.kv_lora_rank, n * (m.qk_nope_head_dim + m.v_head_dim)), (n * m.v_head_dim, h)
        if m.q_lora_rank is None:
            return [(h, first + queries), *from_latent]
        return [(h, first + m.q_lora_rank), (m.q_lora_rank, queries), *from_latent]

    def _mlp_widths(self, width: float) -> list[tuple[float, float]]:
        """The same of an MLP or an expert."""
        return [(self.hidden_size, self._mlp_gates * width), (width, self.hidden_size)]

    @property
    def _mlp_gates(self) -> int:
        """Projections into the MLP's width."""
        return 2 if self.gated_mlp else 1

    @property
    def _weights_of_expert(self) -> int:
        """Of a routed one."""
        assert self.moe
        return (self._mlp_gates + 1) * self.hidden_size * self.moe.moe_intermediate_size

    @property
    def _router_weights(self) -> int:
        """In all layers."""
        if self.moe is None:
            return 0
        return self.moe.num_moe_layers * self.hidden_size * (self.moe.num_experts + (1 if self.moe.shared_gate else 0))

    @property
    def _num_dense_layers(self) -> int:
        return self._num_mlp_layers - (self.moe.num_moe_layers if self.moe else 0)

    def _other_params(self, tp: int = 1, expert_gpus: int = 1) -> float:
        """Elements that a GPU of `tp` holds beside the products': biases, norms, routers, embeddings and the head."""
        h, biases = self.hidden_size, 0.0
        if not self.mla:
            qkv = self.num_attention_layers * self.num_heads + 2 * self.num_stored_layers * self.num_kv_heads
            biases += qkv * self.head_dim if self.qkv_bias else 0
            biases += self.num_attention_layers * h if self.output_bias else 0
        if self.mlp_bias:
            biases += self._num_dense_layers * (self._mlp_gates * self.intermediate_size + h)
        if self.gdn:
            # Two norms each; where some have no MLP, one and another of each MLP.
            biases += self.gdn.num_layers * (self.gdn.other_params + 2 * h)
            biases += (self.gdn.mlp_layers - self.gdn.num_layers) * h if self.gdn.mlp_layers else 0
        found = biases / tp + self.num_attention_layers * self.norm_params_per_layer + self.final_norm_params
        if self.moe:
            experts = self.moe.num_experts
            found += self._router_weights + (self.moe.num_moe_layers * experts if self.moe.router_bias else 0)
            if self.moe.expert_bias:
                width = self._mlp_gates * self.moe.moe_intermediate_size + h
                found += self.moe.num_moe_layers * experts * width / expert_gpus
        tables = 1 if self.tie_word_embeddings else 2
        return found + (tables * self.vocab_size + self.position_rows) * h / tp

    @property
    def num_params(self) -> int:
        """Parameters of the language model, norms and biases included."""
        return round(sum(product.held for product in self._products()) + self._other_params())

    # -- bytes --------------------------------------------------------------------------------------------------------

    def check_tp(self, tp: int) -> None:
        """UserError unless the attention and KV heads can be split over `tp` GPUs as vLLM splits them."""
        if tp < 1 or self.num_heads % tp:
            raise UserError(
                f"{self.name}: tensor_parallel_size {tp} does not divide {self.num_heads} attention heads: "
                f"choose one of {[n for n in range(1, 65) if self.num_heads % n == 0]}"
            )
        if not self.mla and self.num_kv_heads % tp and tp % self.num_kv_heads:
            raise UserError(
                f"{self.name}: tensor_parallel_size {tp} neither divides nor is a multiple of {self.num_kv_heads} "
                "KV heads: choose one that does"
            )
        if self.gdn and (refusal := self.gdn.refusal_of(tp)):
            raise UserError(f"{self.name}: tensor_parallel_size {tp} {refusal}: choose one that does")

    def kv_elements_per_token_layer(self, tp: int) -> int:
        """Elements per GPU of one token's KV in one layer."""
        self.check_tp(tp)
        if self.mla:
            return self.mla.latent_dim
        return 2 * max(1, self.num_kv_heads // tp) * self.head_dim

    def kv_bytes_per_token_layer(self, tp: int = 1) -> float:
        """Bytes per GPU of one token's KV in one layer. Heads are split over `tp` GPUs, replicated when tp > n_kv.

        MLA's latent is replicated: every GPU holds (kv_lora_rank + qk_rope_head_dim) elements. Engines without latent
        attention (vLLM before 0.7) store DeepSeek's heads expanded, which is not modelled.
        """
        return self.kv_elements_per_token_layer(tp) * self.kv_dtype_bytes

    def kv_bytes_per_token(self, tp: int = 1) -> float:
        """Bytes per GPU of one token's KV in all layers that keep it (kappa), and of what is beside it."""
        layers = sum(layers.num_stored * (layers.kept_share + layers.index_share) for layers in self.kv_classes)
        return layers * self.kv_bytes_per_token_layer(tp)

    def kv_residual_bytes(self, tp: int = 1) -> float:
        """Bytes per GPU that a sequence's last tokens take beyond the others, in all layers: they are not quantised."""
        elements = self.kv_residual_tokens * self.num_stored_layers * self.kv_elements_per_token_layer(tp)
        return elements * (self.dtype_bytes - self.kv_dtype_bytes)

    def weight_bytes(self, tp: int = 1, expert_gpus: int | None = None) -> float:
        """Bytes of weights per GPU: projections, experts and embeddings split, the rest replicated.

        `expert_gpus` is how many share the routed experts, where that is not the group (data-parallel ranks share).
        """
        self.check_tp(tp)
        products = sum(product.held * product.weight_bytes for product in self._products(tp, expert_gpus))
        return products + self._other_params(tp, expert_gpus or tp) * self.dtype_bytes

    @property
    def linear_weight_bytes(self) -> float:
        """Bytes of the weights of the linear layers of all layers, all experts included, all GPUs together."""
        return self.linear_weight_bytes_read(None)

    def linear_weight_bytes_read(self, num_tokens: int | None) -> float:
        """Bytes of weights that the linear layers of all layers read for `num_tokens` tokens, all GPUs together.

        Each token chooses k of a layer's E routed experts; were the choices uniform and independent, N tokens would
        meet E (1 - (1 - k/E)^N) of them. None: all experts.
        """
        total = sum(product.held * product.weight_bytes for product in self._products())
        total += self._router_weights * self.dtype_bytes
        if self.moe and num_tokens is not None:
            total -= (1 - self.moe.experts_per_token / self.moe.num_experts) ** num_tokens * self.routed_weight_bytes
        return total

    def linear_activation_bytes_per_token(self, tp: int = 1) -> float:
        """Bytes per GPU that the linear layers of all layers read as inputs and write as outputs for one token.

        Widths between column- and row-parallel projections are split over `tp` GPUs, the hidden state is not.
        """
        self.check_tp(tp)
        products = self._products(tp)
        elements = sum(p.num_layers * p.num_active * (p.inputs + p.outputs) for p in products)
        return elements * self.dtype_bytes

    def elementwise_bytes_per_token(self, tp: int = 1) -> float:
        """Bytes per GPU that the kernels between the matrix products of all layers read and write for one token.

        Each layer: two norms that add the residual (4 h each), rotary embedding of queries and keys in place, the
        activation function of the MLP, the KV cache's write. Norms on queries and keys are not counted. Attention's
        output gate, and the gated norm of layers that keep a state, read two operands and write one.
        """
        self.check_tp(tp)
        heads = self.num_heads / tp
        if self.mla:
            kv = rotated = self.mla.latent_dim
            rotated += heads * self.mla.qk_rope_head_dim
        else:
            kv = self.kv_elements_per_token_layer(tp)
            rotated = heads * self.head_dim + kv / 2
        elements = self.num_layers * 8 * self.hidden_size + self.num_attention_layers * 2 * rotated
        elements += self.num_stored_layers * 2 * kv
        if self.output_gate:
            elements += self.num_attention_layers * 3 * heads * self.head_dim
        if self.gdn:
            elements += self.gdn.num_layers * 3 * self.gdn.value_width / tp
        operands = self._mlp_gates + 1
        width = self._num_dense_layers * self.intermediate_size
        if self.moe:
            active = self.moe.experts_per_token * self.moe.moe_intermediate_size + self.moe.shared_intermediate_size
            width += self.moe.num_moe_layers * active
        return (elements + operands * width / tp) * self.dtype_bytes

    def quantised_input_bytes_per_token(self, tp: int = 1) -> float:
        """Bytes per GPU that quantising one token's inputs of quantised products reads and writes in all layers.

        Inputs are the hidden state (projections of attention, MLP), attention's output and the MLP's inner width; of
        a mixture of experts, which share the quantised hidden state, the widths of those active.
        """
        input_bytes = self._input_bytes
        if input_bytes is None:
            return 0.0
        self.check_tp(tp)
        elements = 0.0
        for product in self._products(tp):
            inputs = product.num_layers * product.num_active * product.inputs
            elements += inputs * self._quantised_share(product.weight_bytes)
        if self.moe:
            # All experts have the hidden state that was quantised once.
            num_active = self.moe.experts_per_token + bool(self.moe.shared_intermediate_size)
            again = self.moe.num_moe_layers * max(0, num_active - 1) * self.hidden_size
            elements -= again * self._quantised_share(self.expert_dtype_bytes)
        return elements * (self.dtype_bytes + input_bytes)

    @property
    def head_weight_bytes(self) -> float:
        """Bytes of the LM head, V h."""
        return self.vocab_size * self.hidden_size * self.dtype_bytes

    @property
    def head_activation_bytes_per_token(self) -> float:
        """Bytes the LM head reads and writes for one sampled token: a hidden state and the logits."""
        return (self.hidden_size + self.vocab_size) * self.dtype_bytes

    @property
    def hidden_bytes_per_token_layer(self) -> float:
        """Bytes of one token's hidden state at one layer (sigma = 2 h), what hidden-state caching stores."""
        return float(self.hidden_size * HIDDEN_STATE_BYTES)

    # -- FLOPs --------------------------------------------------------------------------------------------------------

    @property
    def linear_flops_per_token(self) -> float:
        """FLOPs per token of all layers' projections and MLP (c_lin); of the experts only those a token activates."""
        return 2.0 * (sum(product.active for product in self._products()) + self._router_weights)

    @property
    def fp32_flops_per_token(self) -> float:
        """FLOPs per token of all layers' routers in 32 bits; 0 where they are in 16."""
        return 2.0 * self._router_weights if self.moe and self.moe.fp32_router else 0.0

    @property
    def product_quantization(self) -> str:
        """The format of quantised weights where their products' inputs are quantised as well; else empty."""
        return self.quantization if self.quantization in PRODUCT_FORMATS else ""

    @property
    def quantised_flops_share(self) -> float:
        """Share of `linear_flops_per_token` whose weights and inputs are both quantised."""
        if self._input_bytes is None:
            return 0.0
        shares = (product.active * self._quantised_share(product.weight_bytes) for product in self._products())
        return 2.0 * sum(shares) / self.linear_flops_per_token

    def _quantised_share(self, mean_bytes: float) -> float:
        """Share of weights of `mean_bytes` that are quantised: of their format's bytes, the rest as it was."""
        saved_bytes = self.dtype_bytes - FORMATS[self.quantization].weight_bytes
        return min(1.0, max(0.0, (self.dtype_bytes - mean_bytes) / saved_bytes))

    @property
    def _input_bytes(self) -> float | None:
        """Bytes of an element of quantised products' inputs; None where there are none such."""
        return FORMATS[self.product_quantization].input_bytes if self.product_quantization else None

    @property
    def head_flops_per_token(self) -> float:
        """FLOPs of the LM head per sampled token, 2 h V."""
        return 2.0 * self.hidden_size * self.vocab_size

    @property
    def kv_projection_flops_per_token_layer(self) -> float:
        """FLOPs that make K and V of one token from one layer's hidden state, 4 h n_kv d: hidden-state restoration."""
        if self.mla:
            return 2.0 * self.hidden_size * self.mla.latent_dim
        return 4.0 * self.hidden_size * self.num_kv_heads * self.head_dim

    @property
    def attention_flops_per_token_pair(self) -> float:
        """FLOPs per (query token, context token) pair over the L layers that attend.

        4 L n_q d; for MLA 2 L n_q (d_qk + d_v).
        Layers with a window have as many for each pair that they see.
        """
        if self.mla:
            width = self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim + self.mla.v_head_dim
            return 2.0 * self.num_attention_layers * self.num_heads * width
        return 4.0 * self.num_attention_layers * self.num_heads * self.head_dim
