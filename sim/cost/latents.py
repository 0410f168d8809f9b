"""Latent attention (MLA), where its kernels were timed; else it is priced as other attention is.

    decodes: (context + N padding) ridge(2 max(n_q, 64) (2 d_c + d_R) / F_decode, bytes / H_kv)
    prompts: pairs 2 n_q (d_qk + d_v) / F_prefill
    both:    N n_q 4 (d_c + d_R) / J + launch, of each layer

n_q are the query heads of one GPU; J is the rate at which queries and keys are put together. `calib.latents` fits it.

Where an indexer of n_i heads of d_i elements chooses what is attended to, prompts multiply with latents as decodes do,
and it asks every token before:

    decodes: min(context, top_k) ridge(2 max(n_q, 64) (2 d_c + d_R) / F, bytes / H_kv)
             + context ridge(2 n_i d_i / F, bytes / H_kv)
    prompts: (pairs 2 max(n_q, 64) (2 d_c + d_R) + all pairs 2 n_i d_i) / F, of pairs at most top_k a token

F is the rate of other prompts' attention. Top-k and all else that the indexer does takes `INDEXER_LAUNCH_S`, and
`INDEXER_TOKEN_S` a token. `docs/sparse-attention.md` has what vLLM's kernels took.
"""

from typing import NamedTuple

from sim.cost.profile import Profile
from sim.errors import UserError
from sim.specs.models import ModelSpec

INDEXER_LAUNCH_S, INDEXER_TOKEN_S = 8e-5, 1.3e-7
"""Of a layer, and of each of its new tokens. Two numbers for all GPUs: 84 and 80 us, 147 and 115 ns explain 3,650 times
of vLLM 0.24's attention of DeepSeek-V3.2 on H100 and H200 (aiconfigurator-core's tables)."""
LEAST_HEADS = 32
"""Of a GPU, with which vLLM computes prompts over FP8 latents by the kernel for prompts
(`MIN_HEADS_FOR_BF16_PREFILL`): with fewer, times are others by factors."""


class LatentPrice(NamedTuple):
    """Per GPU of a group.

    Attributes:
        decode_s_per_token_read: computing, of one layer; reading the latents is the profile's KV rate.
        padding_tokens: that a decode's kernel costs beside its context.
        prefill_s_per_pair: of all layers.
        joined_s_per_token: of all layers.
        launch_s: of one layer.
        index_s_per_pair: indexers of all layers, of a token that asks and one of its context.
    """

    decode_s_per_token_read: float
    padding_tokens: float
    prefill_s_per_pair: float
    joined_s_per_token: float
    launch_s: float
    index_s_per_pair: float = 0.0


def latent_price(model: ModelSpec, profile: Profile, tp: int) -> LatentPrice | None:
    """What the profile's constants make of a model with latents of 16 bits; None where either is otherwise.

    Models with an indexer have a price in all profiles.
    """
    constants = profile.latents
    if model.indexer:
        return _indexed_price(model, profile, tp)
    if model.mla is None or constants is None or model.kv_dtype_bytes != model.dtype_bytes:
        return None
    joined_s = model.latent_joined_bytes_per_token(tp) / constants["latent_joined_bytes_per_s"]
    return LatentPrice(
        model.latent_flops_per_token_read(tp) / constants["latent_decode_flops_per_s"],
        constants["latent_padding_tokens"],
        model.attention_flops_per_token_pair / (tp * constants["latent_prefill_flops_per_s"]),
        model.num_layers * joined_s,
        constants["latent_launch_s"],
    )


def _indexed_price(model: ModelSpec, profile: Profile, tp: int) -> LatentPrice:
    assert model.indexer
    if model.kv_dtype_bytes != model.dtype_bytes and model.num_heads < LEAST_HEADS * tp:
        raise UserError(
            f"{model.name} with latents in FP8 has no price with {model.num_heads // tp} heads a GPU: below "
            f"{LEAST_HEADS} vLLM computes prompts in another way; take --kv-cache-dtype bfloat16, or a smaller "
            "tensor_parallel_size"
        )
    layers, rate, constants = model.num_layers, profile.value("attention_flops_per_s"), profile.latents
    joined_s, launch_s, padding_tokens = INDEXER_TOKEN_S, INDEXER_LAUNCH_S, profile.value("kv_padding_tokens")
    if constants:
        joined_s += model.latent_joined_bytes_per_token(tp) / constants["latent_joined_bytes_per_s"]
        launch_s += constants["latent_launch_s"]
        padding_tokens = constants["latent_padding_tokens"]
    read_s, index_s = model.latent_flops_per_token_read(tp) / rate, model.indexer.flops_per_pair / rate
    return LatentPrice(read_s, padding_tokens, layers * read_s, layers * joined_s, launch_s, layers * index_s)
