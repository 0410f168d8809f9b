"""The roofline fitted jointly over operations, models and sizes.

    T = ridge(linear FLOPs / F, linear bytes / H) + max(launch, elementwise bytes / E) + attention
        + ridge(head FLOPs / F, head bytes / H) + all-reduces + layers c + steps c_step

with layers launched one by one lasting at least layers c_eager, those from graphs by piece layers c_pieced, and the
first term times what was measured over it by tokens, where that pays (`calib.factors`). Attention is as
`sim.cost.roofline.RooflineCost` prices an iteration, and ridge(a, b) = (a^p + b^p)^(1/p).

Every constant has one physical meaning: F and F_attn the FLOP/s that matrix products and attention reach, H and E the
bytes/s that memory delivers to matrix products and to what lies between them, c what a layer costs beside (launches,
gaps), c_step what a step costs beside, p how far computing and reading overlap within a kernel. `docs/calibration.md`
shows what each is worth in held-out error.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from calib.copies import all_reduce_s
from calib.factors import factors_at, fit_factors
from calib.robust import Array, Estimate, Fit, Parameter, fit_relative
from calib.terms import Terms
from sim.cost.kernels import Point
from sim.cost.profile import OPTIONAL
from sim.cost.roofline import READ_ANEW, SPLIT_BELOW

MOST_EXPONENT = 50.0
"""Beyond this the ridge is a corner: max(compute, memory)."""
RATES = ("flops_per_s", "hbm_bytes_per_s")
EAGER_PAYS = 1.5
"""Without a cost of launching layers, errors on passes that were launched must be so many times as large."""
LONG_ATTENTION = 0.1
"""Share of a prompt's FLOPs that attention must reach somewhere for its rate to be told from that of the rest."""
NO_ALL_REDUCE = {
    "allreduce_bytes_per_s": 1e30,
    "allreduce_latency_s": 0.0,
    "allreduce_chunk_s": 0.0,
    "allreduce_launch_s": 0.0,
}
"""Constants of all-reduces that cost nothing, for samples without any."""


def predict_s(constants: Mapping[str, float], terms: Terms, factors: Sequence[Point] | None = None) -> Array:
    """Seconds of every sample, shape (samples,), from constants by their names in a profile, and products' factors."""
    device_s = _device_s(constants, terms, factors)
    launched = [(name, layers) for name, layers in _launched(terms).items() if constants.get(name)]
    if not launched:
        return device_s
    beside_s = _head_s(constants, terms) + _step_s(constants, terms)
    least_s = sum(layers * constants[name] for name, layers in launched)
    return device_s + np.maximum(0.0, least_s - (device_s - beside_s))


def _launched(terms: Terms) -> dict[str, Array]:
    """What a layer takes at least by how its kernels are launched, and how many are so."""
    return {"eager_layer_s": terms.eager_layers, "pieced_layer_s": terms.pieced_layers}


def _device_s(constants: Mapping[str, float], terms: Terms, factors: Sequence[Point] | None) -> Array:
    """The same where the host is always ahead of the GPU."""
    return (
        products_s(constants, terms) * factors_at(factors, terms.tokens)
        + np.maximum(
            terms.elementwise_layers * constants["elementwise_launch_s"],
            terms.elementwise_bytes / constants["elementwise_bytes_per_s"],
        )
        + attention_s(constants, terms)
        + _head_s(constants, terms)
        + 2 * terms.layers * all_reduce_s(constants, terms.reduced_bytes, terms.gpus)
        + terms.layers * constants["layer_overhead_s"]
        + _step_s(constants, terms)
    )


def _head_s(constants: Mapping[str, float], terms: Terms) -> Array:
    read_s = terms.head_bytes / constants["hbm_bytes_per_s"]
    return ridge_s(terms.head_flops / constants["flops_per_s"], read_s, constants["roofline_exponent"])


def _step_s(constants: Mapping[str, float], terms: Terms) -> Array:
    """What the engine of whole steps takes beside."""
    each_s = terms.step_sequences * constants.get("step_s_per_sequence", 0.0)
    return terms.steps * constants.get("step_overhead_s", 0.0) + each_s


def products_s(constants: Mapping[str, float | Array], terms: Terms) -> Array:
    """Seconds of the layers' matrix products, by the roofline alone; constants may differ from sample to sample."""
    read_s = (terms.weight_bytes + terms.activation_bytes) / constants["hbm_bytes_per_s"]
    return ridge_s(terms.linear_flops / constants["flops_per_s"], read_s, constants["roofline_exponent"])


def fit_linear_factors(constants: Mapping[str, float], terms: Terms, measured_s: Array) -> list[Point]:
    """What products take over the roofline of these constants, by tokens."""
    own_s = products_s(constants, terms)
    rest_s = predict_s(constants, terms) - own_s
    return fit_factors(lambda _, factors: rest_s + own_s * factors, terms.tokens, measured_s)[1]


def attention_s(constants: Mapping[str, float], terms: Terms) -> Array:
    """Seconds of attention, shape (samples,): prompts' kernel and decodes', or one for both where tiles are known."""
    flops, tile = constants["attention_flops_per_s"], constants["attention_tile_tokens"]
    slots, waves = constants["attention_slots"], constants["kv_padding_waves"]
    share = np.minimum(1.0, waves * slots / (terms.kv_heads * np.maximum(terms.decodes, 1.0))) if slots else 1.0
    padding_bytes = constants["kv_padding_tokens"] * share * terms.padding_bytes
    read_s = (terms.kv_bytes + padding_bytes) / constants["kv_bytes_per_s"]
    apart_s = terms.attention_flops / flops + read_s
    if not tile:
        return apart_s
    # Bytes of the tiles' padding over bytes of the contexts.
    padded = constants["attention_padding_tokens"] * np.divide(
        terms.padding_bytes, terms.kv_bytes, out=np.zeros_like(read_s), where=terms.decodes > 0
    )
    rows = np.maximum(terms.new_tokens, tile) * terms.row_flops + tile * terms.decode_row_flops * (1.0 + padded)
    compute_s = np.maximum(rows, tile * slots * terms.walk_flops) / flops
    together = (terms.row_flops > 0) & (terms.heads_per_kv > 0)
    heads, longest_s = terms.layers * terms.kv_heads * terms.heads_per_kv, 0.0
    if slots:
        idle = np.maximum(0.0, terms.new_tokens / tile - 1.0) * terms.decodes
        compute_s = compute_s + constants["attention_idle_tile_s"] * idle * heads / slots
        reads = np.clip(terms.decodes * terms.heads_per_kv / slots, 1.0, terms.heads_per_kv)
        read_s = read_s * (1.0 + (reads - 1.0) * _anew(terms.head_kv_bytes, constants["l2_bytes"]))
        whole = terms.kv_heads * terms.decodes >= SPLIT_BELOW * slots
        longest_s = np.where(
            together,
            tile * slots * terms.longest_flops / flops,
            np.where(whole, terms.longest_bytes / constants["longest_kv_bytes_per_s"], 0.0),
        )
    together_s = ridge_s(compute_s, read_s, constants["attention_roofline_exponent"])
    return np.where(together, together_s, apart_s) + longest_s


def _anew(head_kv_bytes: Array, l2_bytes: float) -> Array:
    """Share of a KV head's bytes that L2 has lost when the next query heads read them."""
    first, last = READ_ANEW
    return np.clip((head_kv_bytes / l2_bytes - first) / (last - first), 0.0, 1.0) if l2_bytes else np.ones(1)


def ridge_s(compute_s: Array, memory_s: Array, exponent: float | Array) -> Array:
    """`sim.cost.model.ridge` over arrays; zero where both parts are."""
    most = np.maximum(compute_s, memory_s)
    ratio = np.divide(np.minimum(compute_s, memory_s), most, out=np.zeros_like(most), where=most > 0)
    return most * (1.0 + ratio**exponent) ** (1.0 / exponent)


def fit_roofline(
    terms: Terms,
    measured_s: Array,
    fixed: Mapping[str, float] = NO_ALL_REDUCE,
    *,
    own_engine: bool = False,
    without: Collection[str] = (),
) -> Fit:
    """The constants that explain the samples best, with their standard errors.

    Args:
        terms: of the samples, each timed alone.
        measured_s: medians, shape (samples,).
        fixed: what others tell: constants of all-reduces, which matter only where whole steps of several GPUs were
            timed, those of `OPTIONAL` that these samples say nothing about, and the GPU's `l2_bytes` (else 0).
        own_engine: whole steps are our own engine's, whose host takes time for every sequence.
        without: parameters that are not fitted, to show what they are worth.

    Returns:
        Estimates of flops_per_s, attention_flops_per_s, hbm_bytes_per_s, kv_bytes_per_s, kv_padding_tokens,
            kv_padding_waves, roofline_exponent, layer_overhead_s, step_overhead_s, step_s_per_sequence,
            attention_tile_tokens, attention_slots, attention_padding_tokens, attention_roofline_exponent,
            elementwise_bytes_per_s, elementwise_launch_s, eager_layer_s and pieced_layer_s. Those the samples say
            nothing about are left out: attention, where prompts are short; the step, where no whole step was timed, or
            where all had as many layers: then the layers' overhead holds both; tiles, where no decodes ran beside
            prompts, or these were of our runtime, which attends in two kernels; what lies between products, where it
            was not timed apart; c_eager and c_pieced, where nothing came from graphs, or launches were never what took
            longest.
    """
    parameters = {name: own for name, own in _parameters(terms, measured_s).items() if name not in without}
    if own_engine and "step_overhead_s" in parameters and len(np.unique(terms.step_sequences[terms.steps > 0])) > 2:
        parameters["step_s_per_sequence"] = Parameter(1e-6, 0.0, log=False)

    def predicted(values: Mapping[str, float]) -> Array:
        return predict_s(complete({**fixed, **values}), terms)

    found = fit_relative(predicted, measured_s, parameters)
    for name, layers in _launched(terms).items() if _of_the_runtime(terms) else ():
        if name in fixed or not (mine := layers > 0).any():
            continue
        # Off what the quickest pass took a layer, where the maximum has no slope.
        least_s = float(np.min(measured_s[mine] / layers[mine]))
        launched = {**parameters, name: Parameter(1.1 * least_s, log=False)}
        other = fit_relative(predicted, measured_s, launched)

        def miss(fit: Fit, mine: NDArray[np.bool_] = mine) -> float:
            return float(np.mean(np.abs(np.log(predicted(fit.values) / measured_s)[mine])))

        # Where the GPU always takes longer, the quickest passes' own scatter would pass for a floor.
        if miss(found) > EAGER_PAYS * miss(other):
            found, parameters = other, launched
    for name in (*_launched(terms), "attention_flops_per_s", "kv_bytes_per_s", "elementwise_bytes_per_s"):
        if name in parameters and not found.estimates[name].told:
            del parameters[name]
            found = fit_relative(predicted, measured_s, parameters)
    if "kv_bytes_per_s" in parameters and not all(found.estimates[name].told for name in RATES):
        # Few samples tell one rate of memory only.
        for name in ("kv_bytes_per_s", "kv_padding_tokens", "kv_padding_waves"):
            parameters.pop(name, None)
        found = fit_relative(predicted, measured_s, parameters)
    estimates = with_exponent(found.estimates, "roofline_exponent")
    return Fit(with_exponent(estimates, "attention_roofline_exponent", "attention_overlap"), found.scatter)


def with_exponent(found: Mapping[str, Estimate], name: str, inverse: str = "overlap") -> dict[str, Estimate]:
    """Estimates with a ridge's exponent p under this name instead of 1/p, which is searched, for its finite limits."""
    estimates = dict(found)
    overlap = estimates.pop(inverse, None)
    if overlap is not None:
        p = 1.0 / overlap.value
        stderr = None if overlap.stderr is None else overlap.stderr * p * p
        estimates[name] = Estimate(p, stderr, 1.0 / overlap.high, 1.0 / max(overlap.low, 1e-9))
    return estimates


def _parameters(terms: Terms, measured_s: Array) -> dict[str, Parameter]:
    """What the samples can tell, each with a start."""
    parameters = {
        "flops_per_s": Parameter(fastest(terms.linear_flops + terms.head_flops, measured_s)),
        "hbm_bytes_per_s": Parameter(fastest(terms.weight_bytes + terms.kv_bytes + terms.head_bytes, measured_s)),
        "overlap": Parameter(0.4, 1 / MOST_EXPONENT, 1.0, log=False),
        "layer_overhead_s": Parameter(1e-5, 0.0, log=False),
    }
    if _has_long_prompts(terms):
        parameters["attention_flops_per_s"] = Parameter(parameters["flops_per_s"].start)
    if terms.kv_bytes.any():
        parameters["kv_bytes_per_s"] = Parameter(parameters["hbm_bytes_per_s"].start)
        parameters["kv_padding_tokens"] = Parameter(32.0, 0.0, log=False)
    # The runtime's prompts and decodes attend in kernels of their own.
    if np.any((terms.row_flops > 0) & (terms.decodes > 0)) and not _of_the_runtime(terms):
        parameters["attention_tile_tokens"] = Parameter(64.0, 1.0, 1024.0)
        parameters["attention_slots"] = Parameter(128.0, 1.0)
        if "kv_padding_tokens" in parameters:
            parameters["kv_padding_waves"] = Parameter(2.0, 0.1, 100.0)
        parameters["attention_padding_tokens"] = Parameter(128.0, 0.0, log=False)
        parameters["attention_overlap"] = Parameter(0.4, 1 / MOST_EXPONENT, 1.0, log=False)
    apart = (terms.elementwise_layers > 0) & (terms.layers == 0)
    if apart.any():
        parameters["elementwise_bytes_per_s"] = Parameter(fastest(terms.elementwise_bytes[apart], measured_s[apart]))
        parameters["elementwise_launch_s"] = Parameter(1e-5, 0.0, log=False)
    if _tells_steps_apart(terms):
        parameters["step_overhead_s"] = Parameter(1e-4, 0.0, log=False)
    return parameters


def complete(values: Mapping[str, float]) -> dict[str, float]:
    """All constants that `predict_s` needs: fitted ones, and what their absence means for the rest; with `l2_bytes`."""
    values = {"roofline_exponent": 1.0 / values.get("overlap", 1.0 / MOST_EXPONENT), **values}
    if "attention_overlap" in values:
        values["attention_roofline_exponent"] = 1.0 / values["attention_overlap"]
    found = {"attention_flops_per_s": values["flops_per_s"], "layer_overhead_s": 0.0, "l2_bytes": 0.0, **NO_ALL_REDUCE}
    found |= {name: absent for name, absent in OPTIONAL.items() if not isinstance(absent, str)}
    found |= values
    for name, absent in OPTIONAL.items():
        if isinstance(absent, str):
            found.setdefault(name, found[absent])
    return found


def fastest(amount: Array, measured_s: Array) -> float:
    """A start for a rate: the best any sample reached."""
    return max(float(np.max(amount / measured_s)), 1.0)


def _has_long_prompts(terms: Terms) -> bool:
    total = terms.linear_flops + terms.attention_flops
    share = np.divide(terms.attention_flops, total, out=np.zeros_like(total), where=total > 0)
    return bool(np.max(share, initial=0.0) >= LONG_ATTENTION)


def _of_the_runtime(terms: Terms) -> bool:
    """Whether some layers came from graphs and others were launched one by one, as our own runtime does."""
    launched = (terms.eager_layers > 0) | (terms.pieced_layers > 0)
    return bool(launched.any() and np.any((terms.elementwise_layers > 0) & ~launched & (terms.layers > 0)))


def _tells_steps_apart(terms: Terms) -> bool:
    """Whether a step's overhead can be told from its layers': not if every sample has as many of both."""
    layered = terms.layers > 0
    return len(np.unique(terms.steps[layered] / terms.layers[layered])) > 1
