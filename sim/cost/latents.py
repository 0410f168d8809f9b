"""Latent attention (MLA), where its kernels were timed; else it is priced as other attention is.

    decodes: (context + N padding) ridge(2 max(n_q, 64) (2 d_c + d_R) / F_decode, bytes / H_kv)
    prompts: pairs 2 n_q (d_qk + d_v) / F_prefill
    both:    N n_q 4 (d_c + d_R) / J + launch, of each layer

n_q are the query heads of one GPU; J is the rate at which queries and keys are put together. `calib.latents` fits it.
"""

from dataclasses import dataclass

from sim.cost.profile import Profile
from sim.specs.models import ModelSpec


@dataclass(frozen=True)
class LatentPrice:
    """Per GPU of a group.

    Attributes:
        decode_s_per_token_read: computing, of one layer; reading the latents is the profile's KV rate.
        padding_tokens: that a decode's kernel costs beside its context.
        prefill_s_per_pair: of all layers.
        joined_s_per_token: of all layers.
        launch_s: of one layer.
    """

    decode_s_per_token_read: float
    padding_tokens: float
    prefill_s_per_pair: float
    joined_s_per_token: float
    launch_s: float


def latent_price(model: ModelSpec, profile: Profile, tp: int) -> LatentPrice | None:
    """What the profile's constants make of a model with latents of 16 bits; None where either is otherwise."""
    constants = profile.latents
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
