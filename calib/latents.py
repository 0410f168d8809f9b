"""Kernels of latent attention (MLA): samples of them, and the constants that explain these.

One sample is one layer's whole attention on one GPU, as DeepSeek V3 has it: projections, norms of latents, rotary
embedding, KV's write, attention, output projection. The norm before it and the all-reduce are not in it.

    decodes: T = products + launch + N n_q 4 (d_c + d_R) / J + (context + N padding) ridge(compute, read)
    prompts: T = products + launch + N n_q 4 (d_c + d_R) / J + pairs 2 n_q (d_qk + d_v) / F_prefill

Where norms and rotary embedding were timed operation by operation, as no server runs them, a constant is added that no
profile has (`EAGER_S`).

N tokens, n_q heads of this GPU. A decode computes 2 max(n_q, 64) (2 d_c + d_R) / F_decode for each token of its
context, since kernels take heads in tiles of 64, and reads latents at the profile's KV rate. J is the rate at which
queries and keys are put together. `products` are the profile's own, overhead of a layer included.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import msgspec
import numpy as np

from calib.kernel_fit import KernelFit, KernelSample, KernelTerms, errors_of_fit, phases
from calib.robust import Array, Fit, Parameter, fit_relative
from calib.roofline import ridge_s
from sim.cost.profile import LATENT_UNITS, Profile
from sim.cost.roofline import RooflineCost
from sim.specs.hardware import HardwareSpec
from sim.specs.models import ModelSpec, load_model

MODEL = "deepseek-v3"
"""Whose attention the samples are."""
EAGER_S = "latent_eager_s"
"""What an `eager` sample takes longer."""


class LatentSample(KernelSample, frozen=True, kw_only=True):
    """One operating point.

    Attributes:
        phase: `decode`, one token of each sequence, or `prefill`, prompts with nothing cached.
        fp8: 1 where projections are FP8 in blocks of 128 by 128 weights, 0 where they have 16 bits.
        num_heads: query heads of one GPU.
        batch: sequences.
        context_tokens: of each sequence, the new ones included.
        latency_s: mean seconds of one layer.
        eager: 1 where norms and rotary embedding ran operation by operation, 0 where by kernels of their own.
    """

    phase: Literal["decode", "prefill"]
    fp8: int
    num_heads: int
    batch: int
    context_tokens: int
    latency_s: float
    eager: int = 0
    what: ClassVar[str] = "latent attention"
    checked: ClassVar[str] = "its sizes or latency_s"

    @property
    def is_possible(self) -> bool:
        return min(self.num_heads, self.batch, self.context_tokens) > 0 and super().is_possible

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences."""
        return self.batch if self.phase == "decode" else self.batch * self.context_tokens


@dataclass(frozen=True)
class LatentTerms(KernelTerms):
    """Per sample, of one layer on one GPU; arrays of shape (samples,). Those of the other phase are zero.

    Attributes:
        known_s: what the profile prices: products, and overhead of a layer.
        joined_bytes: of queries and keys that are put together.
        decodes, context_tokens: sequences that decode, and their contexts together.
        token_flops: of a decode for each token of its context.
        prefill_flops: of prompts' attention.
        eager: 1 or 0, as samples say.
    """

    known_s: Array
    joined_bytes: Array
    decodes: Array
    context_tokens: Array
    token_flops: Array
    prefill_flops: Array
    eager: Array

    @classmethod
    def of(cls, samples: Sequence[LatentSample], profile: Profile, hardware: HardwareSpec) -> "LatentTerms":
        """The terms of samples, products at the profile's price."""
        models = {(s.fp8, s.num_heads): attention_model(s.num_heads, fp8=bool(s.fp8)) for s in samples}
        prices = {key: RooflineCost(model, hardware, profile, 1) for key, model in models.items()}
        known, joined, token_flops, pair_flops = [], [], [], []
        for s in samples:
            model, price = models[s.fp8, s.num_heads], prices[s.fp8, s.num_heads]
            known.append(price.products_s(s.num_tokens) + price.overhead_s)
            joined.append(s.num_tokens * model.latent_joined_bytes_per_token())
            token_flops.append(model.latent_flops_per_token_read())
            pair_flops.append(model.attention_flops_per_token_pair)
        decode = np.array([s.phase == "decode" for s in samples])
        batch = np.array([s.batch for s in samples], dtype=np.float64)
        context = np.array([s.context_tokens for s in samples], dtype=np.float64)
        pairs = batch * context * (context + 1) / 2
        return cls(
            np.array(known),
            np.array(joined),
            batch * decode,
            batch * context * decode,
            np.array(token_flops),
            np.array(pair_flops) * pairs * ~decode,
            np.array([float(s.eager) for s in samples]),
        )


def attention_model(num_heads: int, *, fp8: bool) -> ModelSpec:
    """One layer of DeepSeek V3 with so many query heads, and an MLP and vocabulary of next to nothing."""
    model = load_model(MODEL)
    kept = model.attention_dtype_bytes if fp8 else model.dtype_bytes
    return msgspec.structs.replace(
        model, num_layers=1, num_heads=num_heads, num_kv_heads=num_heads, moe=None, intermediate_size=1, vocab_size=1,
        attention_dtype_bytes=kept, mlp_dtype_bytes=kept, quantization="fp8" if fp8 else "",
    )  # fmt: skip


def fit_latents(samples: Sequence[LatentSample], profile: Profile, hardware: HardwareSpec) -> KernelFit[LatentSample]:
    """A fit to samples whose products `profile` prices, with errors on numbers of heads left out.

    Raises:
        UserError: samples of one number of heads, or of one phase.
    """
    heads = np.array([s.num_heads for s in samples])
    parts = phases("latent", LatentSample.what, [s.phase for s in samples], heads)
    terms, seconds = LatentTerms.of(samples, profile, hardware), np.array([s.latency_s for s in samples])
    token_bytes = attention_model(1, fp8=False).kv_bytes_per_token_layer()
    kv = KVPrice(token_bytes / profile.value("kv_bytes_per_s"), profile.value("roofline_exponent"))
    fit_to, predict_s = partial(_fit, kv=kv, hardware=hardware), partial(predict_latent_s, kv=kv)
    fit, own, unseen = errors_of_fit(seconds, terms, heads, fit_to, predict_s)
    kept = replace(fit, estimates={name: fit.estimates[name] for name in LATENT_UNITS})
    return KernelFit(list(samples), kept, own, unseen, "heads", parts)


@dataclass(frozen=True)
class KVPrice:
    """What reading latents costs: seconds for a token's by the profile's KV rate, and the ridge's exponent."""

    s_per_token: float
    exponent: float


def _fit(terms: LatentTerms, seconds: Array, kv: KVPrice, hardware: HardwareSpec) -> Fit:
    parameters = {
        "latent_decode_flops_per_s": Parameter(hardware.fp16_flops_per_s),
        "latent_prefill_flops_per_s": Parameter(hardware.fp16_flops_per_s),
        "latent_padding_tokens": Parameter(100.0, 0.0, log=False),
        "latent_joined_bytes_per_s": Parameter(hardware.hbm_bytes_per_s),
        "latent_launch_s": Parameter(2e-5, 0.0, log=False),
    }
    if 0 < terms.eager.sum() < len(terms.eager):  # else a launch holds it
        parameters[EAGER_S] = Parameter(2e-5, 0.0, log=False)
    return fit_relative(lambda values: predict_latent_s(values, terms, kv), seconds, parameters)


def predict_latent_s(constants: Mapping[str, float], terms: LatentTerms, kv: KVPrice) -> Array:
    """Seconds of every sample, shape (samples,)."""
    compute_s = terms.token_flops / constants["latent_decode_flops_per_s"]
    token_s = ridge_s(compute_s, np.full_like(compute_s, kv.s_per_token), kv.exponent)
    seconds = terms.known_s + constants["latent_launch_s"] + terms.eager * constants.get(EAGER_S, 0.0)
    seconds = seconds + terms.joined_bytes / constants["latent_joined_bytes_per_s"]
    seconds += (terms.context_tokens + constants["latent_padding_tokens"] * terms.decodes) * token_s
    return seconds + terms.prefill_flops / constants["latent_prefill_flops_per_s"]
