"""Typed access to the fields of a Hugging Face config, and the refusal of fields that speak of shapes unknown here."""

import re
from pathlib import Path
from typing import Any

from sim.errors import UserError

SHAPE_WORDS = re.compile(
    "kv|head|layer|window|attn|attention|expert|moe|rank|ssm|mamba|conv|spars|index|shar|compress|chunk|state|hybrid|"
    "block|cache|recurren|(^|_)dim|hidden|altup|laurel|mixer|delta|retention"
)
"""A field with one of these in its name may change what a token's KV or a layer's weights take."""

_KNOWN_SHAPES = (
    "_sliding_window_pattern attention_bias attn_output_gate attn_type_list cla_share_factor decoder_sparse_step "
    "do_layer_norm_before enable_bias expert_bias experts_per_token ffn_dim first_k_dense_replace "
    "full_attention_interval head_dim linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads "
    "linear_num_value_heads linear_value_head_dim mamba_scan_tokens mamba_ssm_dtype mlp_layers "
    "hidden_size intermediate_size is_encoder_decoder kv_lora_rank layer_types max_window_layers mlp_bias "
    "mlp_layer_types mlp_only_layers moe_intermediate_size moe_layer_freq moe_num_experts moe_topk n_routed_experts "
    "n_shared_experts num_attention_heads num_experts num_experts_per_tok num_experts_per_token num_hidden_layers "
    "num_key_value_heads num_key_value_layers num_local_experts q_lora_rank qk_head_dim qk_nope_head_dim "
    "qk_rope_head_dim shared_expert_intermediate_size shared_intermediate_size sliding_window "
    "sliding_window_pattern sliding_window_size use_sliding_window v_head_dim word_embed_proj_dim "
)
KNOWN_SHAPES = frozenset(_KNOWN_SHAPES.split())
"""Fields that the reader takes into account."""
INDEXER = frozenset(("index_head_dim", "index_n_heads", "index_topk", "indexer_rope_interleave"))
"""Likewise where the family has an indexer."""

_HARMLESS = (
    "apply_residual_connection_post_layernorm attention_softmax_in_fp32 skip_bias_add_qkv "
    "_attn_implementation _remove_final_layer_norm activation_dropout add_cross_attention attention_dropout "
    "attention_probs_dropout_prob attn_implementation cache_implementation chunk_size_feed_forward "
    "cross_attention_hidden_size hidden_act hidden_activation hidden_dropout hidden_dropout_prob "
    "initial_context_length keys_to_ignore_at_inference layer_norm_elementwise_affine layer_norm_eps "
    "layer_norm_epsilon layerdrop mm_hidden_size moe_aux_loss_coeff moe_router_dtype mtp_num_hidden_layers "
    "mtp_transformer_layers num_mtp_modules num_nextn_predict_layers output_attentions output_hidden_states "
    "pruned_heads qk_layernorm_eps query_pre_attn_scalar rms_norm_eps rotary_dim use_cache use_qk_norm "
)
HARMLESS = frozenset(_HARMLESS.split())
"""Fields with such a name that change neither KV nor weights: dropouts, epsilons, outputs, prediction heads."""


MOST = 10**9 - 1
"""Of what a config counts; no model comes near."""


class Fields:
    """One config's fields; every misfit is a UserError that names the file, the field and the value."""

    def __init__(self, config: dict[str, Any], path: Path) -> None:
        self._config = config
        self.path = path

    def __contains__(self, field: str) -> bool:
        return self._config.get(field) is not None

    def get(self, field: str) -> object:
        """The raw value; None where absent or null."""
        return self._config.get(field)

    def count(self, field: str, default: int | None = None) -> int:
        """A positive whole number; `default` where absent or null (required without one)."""
        value = self._config.get(field)
        if value is None:
            if default is None:
                raise UserError(f"{self.path}: field {field} is missing: give a Hugging Face config with {field}")
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self.error(field, "must be a positive whole number")
        if value > MOST:
            raise self.error(field, f"is more than {MOST:,}: correct it")
        return value

    def size(self, field: str) -> int:
        """A whole number of zero or more; 0 where absent or null."""
        return 0 if self._config.get(field) in (None, 0) else self.count(field)

    def flag(self, field: str, default: bool) -> bool:
        """True or false; `default` where absent or null."""
        value = self._config.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(field, "must be true or false")
        return value

    def one_of(self, names: tuple[str, ...]) -> int | None:
        """The count that stands under any of several names; UserError when two of them disagree."""
        found = {name: self.count(name) for name in names if self.size(name)}
        if len(set(found.values())) > 1:
            raise UserError(f"{self.path}: fields {found} disagree: keep one")
        return next(iter(found.values()), None)

    def error(self, field: str, reason: str) -> UserError:
        """The error for a field's value."""
        value = repr(self._config.get(field))
        return UserError(f"{self.path}: field {field} = {value if len(value) <= 60 else value[:57] + '...'} {reason}")

    def refuse_unknown(self, known: frozenset[str]) -> None:
        """UserError for the first field that speaks of shapes, is set and is neither `known` nor harmless."""
        for field, value in self._config.items():
            # 0 == False, so numeric zeros are empty too.
            empty = value in (None, False, [], {}, "") or field in known or field in HARMLESS
            if not empty and SHAPE_WORDS.search(field) and not isinstance(value, float):
                raise self.error(field, "is not understood and may change the KV: drop it only if it does not")
