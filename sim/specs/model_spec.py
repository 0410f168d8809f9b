"""`ModelSpec`: what a decoder-only transformer costs per token, in bytes and FLOPs. The only place with these formulas.

Notation of the roofline: L layers, h hidden, n_q/n_kv query/KV heads of d elements, f MLP width, V vocabulary.
Sources: grouped-query attention (Ainslie et al. 2023), multi-head latent attention (DeepSeek-V2, 2024, sec. 2.1).
"""

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
    q_lora_rank: int | None = None
    """Width of the query's low-rank bottleneck; None: queries are projected directly."""
    indexer: IndexerSpec | None = None
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
    shared_intermediate_size: int = 0
    """Width of all shared experts together; 0: none."""
    shared_gate: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    """Biases on the projections of routed experts."""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of a decoder-only language model, and what follows from it.

    Bytes per weight are averages over layers, scales of quantisation included: `dtype_bytes` for whatever is never
    quantised (embeddings, head, norms, router), the other three for the projections of attention, of the dense MLP
    and of the experts. Vision towers, multi-token-prediction heads and adapters are not counted.
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
    kv_residual_tokens: int = 0
    """Vector operations that make a half-precision element of a stored one."""

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
        weights = self._attention_query_output_weights + self._dense_mlp_weights
        return 2.0 * layers * weights / self.linear_flops_per_token

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
        weights = self._mlp_matrices * self.hidden_size * moe.experts_per_token * moe.moe_intermediate_size
        return 2.0 * moe.num_moe_layers * weights

    @property
    def routed_weight_bytes(self) -> float:
        """Bytes of all routed experts of all layers, all GPUs together."""
        if self.moe is None:
            return 0.0
        return self.moe.num_moe_layers * self._routed_weights * self.expert_dtype_bytes

    def routed_activation_bytes_per_token(self, tp: int = 1) -> float:
        """Bytes per GPU that a token's routed experts read and write in all layers.

        Inputs and outputs of both products and of the activation function between them, and what the sum reads.
        """
        if self.moe is None:
            return 0.0
        gates = self._mlp_matrices - 1
        elements = 3 * self.hidden_size + (2 * gates + 2) * self.moe.moe_intermediate_size / tp
        return self.moe.num_moe_layers * self.moe.experts_per_token * elements * self.dtype_bytes

    # -- parameters ---------------------------------------------------------------------------------------------------

    @property
    def num_params(self) -> int:
        """Parameters of the language model, norms and biases included."""
        own = self._attention_weights + self._attention_biases + self.norm_params_per_layer
        layers = self.num_attention_layers * own
        if self.gdn:
            layers += self.gdn.num_layers * (self._gdn_weights + self._gdn_other_params)
        layers -= self._num_borrowing_layers * (self._attention_kv_weights + self._attention_kv_biases)
        mlp = self._num_dense_layers * (self._dense_mlp_weights + self._dense_mlp_biases)
        if self.moe:
            mlp += self.moe.num_moe_layers * (self._expert_weights + self._expert_biases + self._router_params)
        return layers + mlp + self._embedding_params + self.final_norm_params

    @property
    def _num_dense_layers(self) -> int:
        return self.num_layers - (self.moe.num_moe_layers if self.moe else 0)

    @property
    def _embedding_params(self) -> int:
        tables = 1 if self.tie_word_embeddings else 2
        return (tables * self.vocab_size + self.position_rows) * self.hidden_size

    @property
    def _attention_weights(self) -> int:
        """Elements of the projections of attention in one layer."""
        return self._attention_query_output_weights + self._attention_kv_weights + self._attention_latent_weights

    @property
    def _gdn_weights(self) -> int:
        """Elements of the projections of one layer that keeps a state; 0 where there is none."""
        return self.gdn.projection_weights(self.hidden_size) if self.gdn else 0

    @property
    def _gdn_other_params(self) -> int:
        """Other elements of such a layer, its two norms included."""
        return self.gdn.other_params + 2 * self.hidden_size if self.gdn else 0

    @property
    def _num_gdn_layers(self) -> int:
        return self.num_layers - self.num_attention_layers

    @property
    def _attention_query_output_weights(self) -> int:
        """Elements split over the GPUs of a group by query heads."""
        h, n = self.hidden_size, self.num_heads
        if self.mla is None:
            return (3 if self.output_gate else 2) * h * n * self.head_dim
        m = self.mla
        query_in = h if m.q_lora_rank is None else m.q_lora_rank
        keys_values = m.kv_lora_rank * n * (m.qk_nope_head_dim + m.v_head_dim)
        return query_in * n * (m.qk_nope_head_dim + m.qk_rope_head_dim) + keys_values + n * m.v_head_dim * h

    @property
    def _attention_kv_weights(self) -> int:
        """Elements split by KV heads, replicated where there are more GPUs than KV heads."""
        return 0 if self.mla else 2 * self.hidden_size * self.num_kv_heads * self.head_dim

    @property
    def _num_borrowing_layers(self) -> int:
        """Layers without keys and values of their own."""
        return self.num_attention_layers - self.num_stored_layers

    @property
    def _attention_kv_biases(self) -> int:
        return 0 if self.mla or not self.qkv_bias else 2 * self.num_kv_heads * self.head_dim

    @property
    def _attention_latent_weights(self) -> int:
        """Elements every GPU holds: MLA's projections into the latents, and the indexer's."""
        if self.mla is None:
            return 0
        q_lora_rank = self.mla.q_lora_rank or 0
        indexer = self.indexer.projections(self.hidden_size, q_lora_rank) if self.indexer else {}
        return self.hidden_size * (self.mla.latent_dim + q_lora_rank) + sum(indexer.values())

    @property
    def _attention_biases(self) -> int:
        if self.mla:
            return 0
        qkv = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim if self.qkv_bias else 0
        return qkv + (self.hidden_size if self.output_bias else 0)

    @property
    def _mlp_matrices(self) -> int:
        return 3 if self.gated_mlp else 2

    @property
    def _dense_mlp_weights(self) -> int:
        return self._mlp_matrices * self.hidden_size * self.intermediate_size

    @property
    def _dense_mlp_biases(self) -> int:
        if not self.mlp_bias:
            return 0
        return (self._mlp_matrices - 1) * self.intermediate_size + self.hidden_size

    @property
    def _expert_weights(self) -> int:
        """Elements of all experts of one layer, shared ones included."""
        assert self.moe
        width = self.moe.num_experts * self.moe.moe_intermediate_size + self.moe.shared_intermediate_size
        return self._mlp_matrices * self.hidden_size * width

    @property
    def _expert_biases(self) -> int:
        """Elements of the biases of all routed experts of one layer."""
        assert self.moe
        if not self.moe.expert_bias:
            return 0
        width = (self._mlp_matrices - 1) * self.moe.moe_intermediate_size + self.hidden_size
        return self.moe.num_experts * width

    @property
    def _routed_weights(self) -> int:
        """Elements of all routed experts of one layer."""
        assert self.moe
        return self._mlp_matrices * self.hidden_size * self.moe.num_experts * self.moe.moe_intermediate_size

    @property
    def _active_expert_weights(self) -> int:
        """Elements one token meets in one layer."""
        assert self.moe
        width = self.moe.experts_per_token * self.moe.moe_intermediate_size + self.moe.shared_intermediate_size
        return self._mlp_matrices * self.hidden_size * width

    @property
    def _router_weights(self) -> int:
        assert self.moe
        return self.hidden_size * (self.moe.num_experts + (1 if self.moe.shared_gate else 0))

    @property
    def _router_params(self) -> int:
        assert self.moe
        return self._router_weights + (self.moe.num_experts if self.moe.router_bias else 0)

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
        if self.gdn and (self.gdn.num_key_heads % tp or self.gdn.num_value_heads % tp):
            raise UserError(
                f"{self.name}: tensor_parallel_size {tp} does not divide {self.gdn.num_key_heads} key heads and "
                f"{self.gdn.num_value_heads} value heads of Gated DeltaNet: choose one that does"
            )

    def kv_elements_per_token_layer(self, tp: int = 1) -> int:
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
        kv_split = tp if self.mla else min(tp, self.num_kv_heads)
        attention = self._attention_query_output_weights / tp + self._attention_kv_weights / kv_split
        per_layer = (attention + self._attention_latent_weights) * self.attention_dtype_bytes
        per_layer += (self._attention_biases / tp + self.norm_params_per_layer) * self.dtype_bytes
        total = self.num_attention_layers * per_layer
        gdn_layer = self._gdn_weights * self.attention_dtype_bytes + self._gdn_other_params * self.dtype_bytes
        total += self._num_gdn_layers * gdn_layer / tp
        borrowed = self._attention_kv_weights / kv_split * self.attention_dtype_bytes
        borrowed += self._attention_kv_biases / tp * self.dtype_bytes
        total -= self._num_borrowing_layers * borrowed
        dense = self._dense_mlp_weights * self.mlp_dtype_bytes + self._dense_mlp_biases * self.dtype_bytes
        total += self._num_dense_layers * dense / tp
        if self.moe:
            experts = self._expert_weights * self.expert_dtype_bytes + self._expert_biases * self.dtype_bytes
            total += self.moe.num_moe_layers * (experts / tp + self._router_params * self.dtype_bytes)
            if expert_gpus is not None and expert_gpus != tp:
                routed = self.routed_weight_bytes + self.moe.num_moe_layers * self._expert_biases * self.dtype_bytes
                total += routed / expert_gpus - routed / tp
        return total + (self._embedding_params / tp + self.final_norm_params) * self.dtype_bytes

    @property
    def linear_weight_bytes(self) -> float:
        """Bytes of the weights of the linear layers of all layers, all experts included, all GPUs together."""
        return self.linear_weight_bytes_read(None)

    def linear_weight_bytes_read(self, num_tokens: int | None) -> float:
        """Bytes of weights that the linear layers of all layers read for `num_tokens` tokens, all GPUs together.

        Each token chooses k of a layer's E routed experts; were the choices uniform and independent, N tokens would
        meet E (1 - (1 - k/E)^N) of them. None: all experts.
        """
        total = self._projection_weights * self.attention_dtype_bytes
        total += self._num_dense_layers * self._dense_mlp_weights * self.mlp_dtype_bytes
        if self.moe:
            experts = self._expert_weights
            if num_tokens is not None:
                idle = (1 - self.moe.experts_per_token / self.moe.num_experts) ** num_tokens
                experts -= idle * self._routed_weights
            read = experts * self.expert_dtype_bytes + self._router_weights * self.dtype_bytes
            total += self.moe.num_moe_layers * read
        return total

    def linear_activation_bytes_per_token(self, tp: int = 1) -> float:
        """Bytes per GPU that the linear layers of all layers read as inputs and write as outputs for one token.

        Widths between column- and row-parallel projections are split over `tp` GPUs, the hidden state is not.
        """
        self.check_tp(tp)
        h = self.hidden_size
        elements = 3 * h * self.num_layers + self.num_attention_layers * self._attention_inner_width(tp)
        if self.gdn:
            elements += self.gdn.num_layers * self.gdn.inner_width / tp
        if not self.mla:
            elements -= self._num_borrowing_layers * self.kv_elements_per_token_layer(tp)
        gates = 2 if self.gated_mlp else 1
        # Into the MLP: h; out of its first projections: `gates` widths; into its last: one; out of it: h.
        elements += self._num_dense_layers * (h + (gates + 1) * self.intermediate_size / tp)
        if self.moe:
            width = self.moe.experts_per_token * self.moe.moe_intermediate_size + self.moe.shared_intermediate_size
            experts = self.moe.experts_per_token + (1 if self.moe.shared_intermediate_size else 0)
            # Every expert reads the hidden state and writes one; the h counted above is that of a dense MLP's output.
            elements += self.moe.num_moe_layers * ((2 * experts - 1) * h + (gates + 1) * width / tp)
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
        operands = 3 if self.gated_mlp else 2
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
        h, m = self.hidden_size, self.mla
        attention = h + self.num_heads / tp * (m.v_head_dim if m else self.head_dim)
        if m:
            attention += m.kv_lora_rank + (m.q_lora_rank or 0)
        inputs = self.num_attention_layers * attention
        if self.gdn:
            inputs += self.gdn.num_layers * (h + self.gdn.value_width / tp)
        elements = inputs * self._quantised_share(self.attention_dtype_bytes)
        width = self.intermediate_size / tp
        elements += self._num_dense_layers * (h + width) * self._quantised_share(self.mlp_dtype_bytes)
        if self.moe:
            width = self.moe.experts_per_token * self.moe.moe_intermediate_size + self.moe.shared_intermediate_size
            inputs = h + width / tp if width else 0.0
            elements += self.moe.num_moe_layers * inputs * self._quantised_share(self.expert_dtype_bytes)
        return elements * (self.dtype_bytes + input_bytes)

    def _attention_inner_width(self, tp: int) -> float:
        """Elements of one token between the projections of attention: queries, keys, values, and attention's output."""
        n = self.num_heads / tp
        if self.mla is None:
            return ((3 if self.output_gate else 2) * n + 2 * max(1, self.num_kv_heads // tp)) * self.head_dim
        m = self.mla
        latents = 2 * (m.kv_lora_rank + (m.q_lora_rank or 0)) + m.qk_rope_head_dim
        latents += m.indexer.width if m.indexer else 0
        return latents + n * (m.qk_nope_head_dim + m.qk_rope_head_dim) + n * (m.qk_nope_head_dim + 2 * m.v_head_dim)

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
    def _projection_weights(self) -> int:
        """Weights around attention and states in all layers; those that borrow KV project none."""
        weights = self.num_attention_layers * self._attention_weights + self._num_gdn_layers * self._gdn_weights
        return weights - self._num_borrowing_layers * self._attention_kv_weights

    @property
    def linear_flops_per_token(self) -> float:
        """FLOPs per token of all layers' projections and MLP (c_lin); of the experts only those a token activates."""
        weights = self._projection_weights + self._num_dense_layers * self._dense_mlp_weights
        if self.moe:
            weights += self.moe.num_moe_layers * (self._active_expert_weights + self._router_weights)
        return 2.0 * weights

    @property
    def product_quantization(self) -> str:
        """The format of quantised weights where their products' inputs are quantised as well; else empty."""
        return self.quantization if self.quantization in PRODUCT_FORMATS else ""

    @property
    def quantised_flops_share(self) -> float:
        """Share of `linear_flops_per_token` whose weights and inputs are both quantised."""
        if self._input_bytes is None:
            return 0.0
        weights = self._projection_weights * self._quantised_share(self.attention_dtype_bytes)
        weights += self._num_dense_layers * self._dense_mlp_weights * self._quantised_share(self.mlp_dtype_bytes)
        if self.moe:
            share = self._quantised_share(self.expert_dtype_bytes)
            weights += self.moe.num_moe_layers * self._active_expert_weights * share
        return 2.0 * weights / self.linear_flops_per_token

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
        return 2.0 * self._attention_kv_weights

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
