"""Which constants a server's run is fitted with, within which limits, and a set-up with other values of them."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

import msgspec

from calib.robust import Estimate, Parameter
from sim.cost.engine_profile import KNOWN_UNITS, MEASURED
from sim.cost.profile import MAY_BE_ZERO, Constant, product_name
from sim.errors import UserError
from sim.run.prepare import Setup
from sim.specs.quantization import PRODUCT_FORMATS

FITTED = {
    "roofline": ("step_overhead_s", "hbm_bytes_per_s", "flops_per_s", "attention_flops_per_s"),
    "linear": ("decode_base_s", "decode_s_per_context_token", "prefill_s_per_token", "decode_s_per_sequence"),
}
"""By form: what is fitted unless told otherwise; what a run tells least comes last."""
MOST_CONSTANTS = 4
"""Beside those of the front end, which TTFT tells apart from all others."""
SPAN = 30.0
"""A constant is looked for within this factor of where it starts."""
LEAST_OVERHEAD_S = 1e-3
"""Scale on which a constant that starts at zero is looked for."""
MOST_RELATIVE_ERROR = 0.5
"""Standard error of a rate, as a share of it, beyond which a run does not tell it."""


HOST = "step_overhead_s"
"""The engine's host time of an iteration: of its engine profile, and of a profile fitted to a server that ran it."""
FRONT_END, PER_TOKEN = "front_end_s", "front_end_s_per_token"
"""What HTTP and tokeniser take for a request, and for a token of its prompt: likewise of the engine."""
OF_FRONT_END = (FRONT_END, PER_TOKEN)
TOKENISER_S = 1e-6
"""Scale on which a tokeniser's time a token is looked for."""

WEIGHTS_RATE, KV_RATE = "hbm_bytes_per_s", "kv_bytes_per_s"
"""Requests hardly tell the two apart, so that one follows the other; by itself, the first is one with the host time."""
ATTENTION_RATE = "attention_flops_per_s"


def constants_of(setup: Setup) -> dict[str, Constant]:
    """The profile's constants, and the host and the front end of the engine that prices are for."""
    constants = dict(setup.profile.constants)
    engine = setup.engine_profile
    if engine is not None:
        source = f"of engine profile {engine.name}"
        for name in (HOST, *OF_FRONT_END):
            own = MEASURED[name]
            constants[name] = Constant(engine.value(own), None, KNOWN_UNITS[own], source)
    return constants


def chosen_constants(setup: Setup, names: Sequence[str] | None, *, cached: bool) -> list[str]:
    """The constants to fit: those named, else those of the profile's form, and the front end's where there is one.

    Args:
        cached: whether prompts have prefixes that were cached. They take the tokeniser as long as others but the GPU
            less, so that the two are told apart.

    Raises:
        UserError: for what the form has not.
    """
    form, known = setup.profile.form, constants_of(setup)
    if names is None:
        if form not in FITTED:
            raise UserError(f"--base: {setup.profile.name} is of form {form}: give one of {' or '.join(FITTED)}")
        front_end = OF_FRONT_END if cached else (FRONT_END,)
        return [of_model(setup, name) for name in FITTED[form]] + [name for name in front_end if name in known]
    for name in names:
        if name not in known:
            close = get_close_matches(name, known, 3) or [n for n in (*FITTED.get(form, ()), FRONT_END) if n in known]
            raise UserError(
                f"--constants: {name!r} is none of this run's: try {', '.join(close)} (kvtwin profile show "
                f"{setup.profile.name} has the GPU's)"
            )
    chosen = list(dict.fromkeys(names))
    count = sum(name not in OF_FRONT_END for name in chosen)
    if not chosen or count > MOST_CONSTANTS:
        raise UserError(f"--constants: {count} named: a run tells few apart, name 1 to {MOST_CONSTANTS}")
    return chosen


def of_model(setup: Setup, name: str) -> str:
    """The constant that counts for the model's weights and KV: of quantised ones whose kernels were timed their own."""
    model, own = setup.model, name
    if name == "flops_per_s" and model.quantised_flops_share:
        own = product_name(model.product_quantization, name)
    elif name == KV_RATE and model.fp8_kv and not model.mla:
        own = f"fp8_{name}"
    return own if own in setup.profile.constants else name


def parameters_of(setup: Setup, names: Sequence[str]) -> dict[str, Parameter]:
    """Start and limits of each constant: that of the profile, and no rate beyond what the GPU's specification says."""
    hardware = setup.hardware
    peaks = {"FLOP/s": hardware.fp16_flops_per_s, "B/s": hardware.hbm_bytes_per_s}
    own_peaks = {product_name(kind, "flops_per_s"): hardware.product_flops_per_s(kind) for kind in PRODUCT_FORMATS}
    found = {}
    for name in names:
        constant = constants_of(setup)[name]
        if name == PER_TOKEN:
            found[name] = Parameter(max(constant.value, TOKENISER_S), 0.0, SPAN * TOKENISER_S, log=False)
            continue
        if name in MAY_BE_ZERO:
            scale = max(constant.value, LEAST_OVERHEAD_S if constant.unit == "s" else constant.value or 1e-9)
            found[name] = Parameter(scale, 0.0, SPAN * scale, log=False)
            continue
        peak = own_peaks.get(name, peaks.get(constant.unit, float("inf")))
        most = min(SPAN * constant.value, peak)
        found[name] = Parameter(min(constant.value, 0.99 * most), constant.value / SPAN, most)
    return found


def is_told(estimate: Estimate, parameter: Parameter) -> bool:
    """Whether a run tells a constant: within its own half, or of an overhead within what it started at."""
    if estimate.stderr is None:
        return True
    return estimate.stderr <= (MOST_RELATIVE_ERROR * estimate.value if parameter.log else parameter.start)


def with_constants(setup: Setup, values: Mapping[str, float]) -> Setup:
    """The set-up with these constants instead of its profile's."""
    constants = constants_of(setup)
    for name, value in values.items():
        for follower in {KV_RATE, of_model(setup, KV_RATE)} if name == WEIGHTS_RATE else ():
            if follower in constants and follower not in values:
                kv = constants[follower]
                source = f"in proportion to {WEIGHTS_RATE}; before: {kv.source}"
                rate = kv.value * value / constants[name].value
                constants[follower] = msgspec.structs.replace(kv, value=rate, source=source)
        constants[name] = msgspec.structs.replace(constants[name], value=value)
    for name in OF_FRONT_END:
        # The engine's own stays with it unless a run says otherwise.
        if name not in values and name not in setup.profile.constants:
            constants.pop(name, None)
    profile = msgspec.structs.replace(setup.profile, constants=constants, status="measured-from-server")
    engine = setup.engine_profile and setup.engine_profile.measured_by(profile)
    return setup.priced(profile, engine)
