"""Planted samples for tests of the fits: round constants, a grid of shapes, noise with slow outliers."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

import msgspec
import numpy as np

from calib.roofline import complete, predict_s
from calib.samples import Sample
from calib.terms import Terms, terms_of
from sim.cost.profile import OPTIONAL, load_profile
from sim.specs.hardware import load_hardware
from sim.specs.models import load_model

A100 = {
    "flops_per_s": 2.5e14, "attention_flops_per_s": 1.75e14, "hbm_bytes_per_s": 1.6e12, "kv_bytes_per_s": 1.5e12,
    "kv_padding_tokens": 20.0, "roofline_exponent": 2.8, "layer_overhead_s": 4e-5,
}  # fmt: skip
H100 = {
    "flops_per_s": 7e14, "attention_flops_per_s": 5.5e14, "hbm_bytes_per_s": 2.8e12, "kv_bytes_per_s": 3e12,
    "kv_padding_tokens": 60.0, "roofline_exponent": 4.3, "layer_overhead_s": 2.8e-5,
}  # fmt: skip
L20 = {
    "flops_per_s": 8.4e13, "attention_flops_per_s": 6.2e13, "hbm_bytes_per_s": 6.8e11, "kv_bytes_per_s": 6.4e11,
    "kv_padding_tokens": 30.0, "roofline_exponent": 3.0, "layer_overhead_s": 3e-5,
}  # fmt: skip
"""Constants of the size that such GPUs have."""
RING = {
    "allreduce_bytes_per_s": 9e10,
    "allreduce_latency_s": 4e-6,
    "allreduce_chunk_s": 3e-6,
    "allreduce_launch_s": 6e-6,
}
"""Of all-reduces."""
HARDWARE = load_hardware("a100-80g")
BASE = load_profile("a100-80g-derived").without(OPTIONAL)
"""Without assumptions about what the samples leave out, so that planted constants are all there is."""
REFITTED = ("a100-80g", "l40s", "h100")
"""GPUs whose shipped samples `test_calib_holdout` fits again whole: experts, latents and Gated DeltaNet too."""
THREE = ("llama-2-7b", "llama-2-70b", "llama-3.1-8b")
PROMPTS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
BATCHES = (1, 4, 16, 64, 256)
CONTEXTS = (128, 1024, 4096, 16384)

spec = cache(load_model)


def shapes(
    models: Sequence[str] = THREE,
    op: str = "layers",
    *,
    prompts: Sequence[int] = PROMPTS,
    batches: Sequence[int] = BATCHES,
    contexts: Sequence[int] = CONTEXTS,
    layers: int = 1,
) -> list[Sample]:
    """Prompts and decodes of each model, still without times; whole steps have all of a model's layers."""
    found = []
    for model in models:
        common = {"op": op, "latency_s": 1.0, "model": model}
        common["num_layers"] = spec(model).num_layers if op == "step" else layers
        found += [Sample(**common, new_tokens=n) for n in prompts]
        found += [Sample(**common, batch_size=b, new_tokens=1, context_tokens=c) for b in batches for c in contexts]
    return found


def terms(samples: Iterable[Sample]) -> Terms:
    samples = list(samples)
    return terms_of(samples, {s.model: spec(s.model) for s in samples})


def timed(samples: Sequence[Sample], seconds: Iterable[float]) -> list[Sample]:
    """The same samples with these times."""
    return [msgspec.structs.replace(s, latency_s=float(t)) for s, t in zip(samples, seconds, strict=True)]


def planted(samples: Sequence[Sample], constants: Mapping[str, float] = A100) -> list[Sample]:
    """Samples with exactly the times that the constants give."""
    return timed(samples, predict_s(complete(constants), terms(samples)))


def noise(rng: np.random.Generator, count: int, *, outliers: float = 0.05) -> np.ndarray:
    """Factors of measured over true times: 3 % log-normal, and a share of outliers 1.2 to 3 times slower."""
    factors = np.exp(rng.normal(0.0, 0.03, count))
    return np.where(rng.random(count) < outliers, factors * rng.uniform(1.2, 3.0, count), factors)


def noisy(samples: Sequence[Sample], seed: int = 0) -> list[Sample]:
    """Samples with noise and outliers on their times."""
    factors = noise(np.random.default_rng(seed), len(samples))
    return timed(samples, [s.latency_s * f for s, f in zip(samples, factors, strict=True)])


def copies(
    op: str,
    *,
    launch_s: float,
    bytes_per_s: float,
    sizes: Sequence[float] | None = None,
    overlap: bool = True,
    lone_s: float = 7e-6,
    setup_s: float = 5e-6,
) -> list[Sample]:
    """Copies of 4 KiB to 256 MiB in 1 to 64 pieces, timed by costs of asking and a rate; without `overlap` by a launch
    alone, as papers have it."""
    found = []
    for size in sizes or [4096.0 * 4**i for i in range(9)]:
        for pieces in (1, 8, 64):
            asked_s, moved_s = launch_s * pieces, size * pieces / bytes_per_s
            if overlap:
                seconds = lone_s + moved_s if pieces == 1 else setup_s + max(asked_s, moved_s)
            else:
                seconds = asked_s + moved_s
            found.append(Sample(op=op, latency_s=seconds, num_bytes=size * pieces, num_copies=pieces))
    return found
