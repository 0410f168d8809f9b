"""What kernels of routed experts say of their price: tables in Markdown."""

from collections.abc import Mapping, Sequence

import numpy as np

from calib.experts import WEIGHT_BYTES, ExpertSample, ExpertTerms, predict_expert_s
from calib.kernel_fit import KernelFit
from calib.report import percent, table
from calib.robust import Array
from calib.roofline import ridge_s
from sim.cost.model import ACTIVATION_BYTES
from sim.cost.profile import Profile, expert_names, product_name
from sim.specs.quantization import FORMATS, PRODUCT_FORMATS

KINDS = {"": "16 bits", "fp8": "block FP8", "nvfp4": "NVFP4", "mxfp4": "MXFP4", "int4": "int4"}
SIZES = {"1 to 16": (1, 16), "32 to 256": (32, 256), "320 and more": (320, 1 << 30)}


def experts_table(found: Mapping[str, tuple[Profile, Sequence[KernelFit[ExpertSample]]]]) -> str:
    """Mean absolute relative errors and, of some, biases; by GPU and type of weights.

    Args:
        found: by GPU, its profile and the fits to its samples.
    """
    rows = []
    for gpu, (profile, fits) in found.items():
        for fit in fits:
            samples, unseen = fit.samples, fit.unseen if len(fit.unseen) else fit.own
            measured = np.array([s.latency_s for s in samples])
            shapes = np.array([s.shape for s in samples])
            tokens, gpus = np.array([s.tokens for s in samples]), np.array([s.tp for s in samples])
            routed = np.array([s.routing != "balanced" for s in samples])
            simulated = simulated_s(fit, samples) / measured - 1
            worst = max((error(unseen[shapes == shape]), str(shape)) for shape in set(shapes))
            sizes = (unseen[(tokens >= low) & (tokens <= high)] for low, high in SIZES.values())
            rows.append(
                (
                    f"{gpu}, {KINDS[samples[0].quantization]}",
                    f"{len(samples):,}, {len(set(shapes))}",
                    signed(as_dense_s(profile, samples) / measured - 1),
                    f"**{percent(error(unseen))}**",
                    " / ".join(signed(errors) for errors in sizes),
                    f"{percent(error(unseen[gpus == 1]))} / {percent(error(unseen[gpus == 8]))}",
                    f"{percent(worst[0])} ({worst[1]})",
                    f"{signed(simulated[routed])} / {signed(simulated[~routed])}",
                )
            )
    header = ("GPU, weights", "samples, shapes", "as dense matrices", "left out")
    sizes = f"left out, {' / '.join(SIZES)} tokens"
    return table((*header, sizes, "of 1 / 8 GPUs", "worst shape", "simulated, power law / balanced"), rows)


def error(errors: Array) -> float:
    """Mean absolute error; NaN of none."""
    return float(np.abs(errors).mean()) if len(errors) else float("nan")


def signed(errors: Array) -> str:
    """Mean absolute error and, in brackets, the mean."""
    return f"{percent(error(errors))} ({100 * errors.mean():+.0f})" if len(errors) else "-"


def simulated_s(fit: KernelFit[ExpertSample], samples: Sequence[ExpertSample]) -> Array:
    """Seconds as the simulator prices them: tokens choose at random, whatever the samples' routing was."""
    values = {name: fit.fit.values[own] for name, own in expert_names(fit.samples[0].quantization).items()}
    terms, met = ExpertTerms.of(samples), np.array([s.experts_met for s in samples])
    uniform = ExpertTerms(terms.flops, terms.met_bytes * _uniformly_met(samples) / met, terms.activation_bytes)
    return predict_expert_s(values, uniform)


def as_dense_s(profile: Profile, samples: Sequence[ExpertSample]) -> Array:
    """Seconds of experts priced as linear layers, what a profile without constants of their kernels gives them."""
    kind, value = samples[0].quantization, profile.value
    own = kind if kind in PRODUCT_FORMATS else ""
    tokens = np.array([s.tokens for s in samples])
    rows = tokens * np.array([s.experts_per_token for s in samples])
    hidden, width = np.array([s.hidden_size for s in samples]), np.array([s.intermediate_size / s.tp for s in samples])
    gates = np.array([1 + s.gated for s in samples])
    weights = (gates + 1) * hidden * width
    moved = rows * (2 * hidden + (gates + 1) * width) * ACTIVATION_BYTES
    read = _uniformly_met(samples) * weights * WEIGHT_BYTES[kind] + moved
    compute_s = 2 * rows * weights / value(product_name(own, "flops_per_s"))
    exponent = value(product_name(own, "roofline_exponent"))
    seconds = ridge_s(compute_s, read / value("hbm_bytes_per_s"), exponent)
    seconds += rows * (gates + 1) * width * ACTIVATION_BYTES / value("elementwise_bytes_per_s")
    if input_bytes := FORMATS[own].input_bytes if own else None:
        quantised_bytes = (tokens * hidden + rows * width) * (ACTIVATION_BYTES + input_bytes)
        seconds += quantised_bytes / value(product_name(own, "quantize_bytes_per_s"))
    return seconds


def _uniformly_met(samples: Sequence[ExpertSample]) -> Array:
    """Experts that tokens meet which choose at random."""
    experts = np.array([s.num_experts for s in samples])
    idle = 1 - np.array([s.experts_per_token for s in samples]) / experts
    return experts * (1 - idle ** np.array([s.tokens for s in samples]))
