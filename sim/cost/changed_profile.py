"""What if the link were twice as fast? A profile with some of its constants changed by the user.

`--profile l20-derived:h2d_bytes_per_s=50e9,d2h_bytes_per_s=50e9`; without a name before the colon the GPU's own.
"""

from math import isfinite

from msgspec import structs

from sim.cost.profile import GIVEN, KERNEL_NAMES, MAY_BE_ZERO, UNITS, Constant, Profile, load_profile
from sim.errors import UserError
from sim.specs.hardware import HardwareSpec
from sim.specs.quantization import PRODUCT_FORMATS

BOTH_DIRECTIONS = "pcie_bytes_per_s"
"""Short for `h2d_bytes_per_s` and `d2h_bytes_per_s`."""
GPU_SPEED = "gpu_speed"
"""A factor on everything that the GPU computes, reads and launches; not on copies and all-reduces."""
RATES = (
    "flops_per_s",
    "fp32_flops_per_s",
    "attention_flops_per_s",
    "hbm_bytes_per_s",
    "kv_bytes_per_s",
    "fp8_kv_bytes_per_s",
    "elementwise_bytes_per_s",
)
RATES += tuple(f"{kind}_{name}" for kind in PRODUCT_FORMATS for name in ("flops_per_s", "quantize_bytes_per_s"))
RATES += tuple(sorted(name for name in KERNEL_NAMES if name.endswith("_per_s")))
TIMES = (
    "layer_overhead_s",
    "fp8_kv_layer_overhead_s",
    "elementwise_launch_s",
    "step_overhead_s",
    "alpha",
)
TIMES += tuple(f"{kind}_layer_overhead_s" for kind in PRODUCT_FORMATS)
TIMES += tuple(sorted(name for name in KERNEL_NAMES if name.endswith("_launch_s")))
TIMES += ("prefill_base_s", "prefill_s_per_token", "prefill_s_per_square_token")
TIMES += ("decode_base_s", "decode_s_per_sequence", "decode_s_per_context_token")


def profile_named(text: str | None, gpu: HardwareSpec | str | None = None) -> Profile:
    """The profile that a scenario names: as `load_profile` has it, or `NAME:CONSTANT=VALUE,...` of one."""
    base, colon, changes = (text or "").rpartition(":")
    return changed(load_profile(base or None, gpu), changes) if colon and "=" in changes else load_profile(text, gpu)


def also_changed(text: str | None, changes: str) -> str:
    """A profile as `profile_named` takes it, with more of its constants changed."""
    return f"{text or ''}{',' if '=' in (text or '') else ':'}{changes}"


def changed(profile: Profile, text: str) -> Profile:
    """The profile with the constants of `text`, `NAME=VALUE,...` in their own units, in place of its own.

    Its name says so; its status stays that of the rest.

    Raises:
        UserError: a word that is no constant of the profile's form, or a value that it cannot have.
    """
    constants = dict(profile.constants)
    for word in text.split(","):
        name, _, given = word.partition("=")
        name = name.strip().replace("-", "_")
        value = _number(profile, name, given)
        if name == GPU_SPEED:
            if profile.kernels is not None:
                raise UserError(f"profile {profile.name}: {GPU_SPEED} does not scale tables of kernels; leave it out")
            factors = dict.fromkeys(RATES, value) | dict.fromkeys(TIMES, 1.0 / value)
            new = {own: constants[own].value * factor for own, factor in factors.items() if own in constants}
        else:
            new = dict.fromkeys(("h2d_bytes_per_s", "d2h_bytes_per_s") if name == BOTH_DIRECTIONS else (name,), value)
        for own, number in new.items():
            unit = UNITS[profile.form].get(own)
            if unit is None:
                known = ", ".join((BOTH_DIRECTIONS, GPU_SPEED, *UNITS[profile.form]))
                raise UserError(
                    f"profile {profile.name}: {own!r} is no constant of form {profile.form}; known: {known}"
                )
            if own.startswith("allreduce"):
                # What is said counts, not what was measured.
                profile = structs.replace(profile, all_reduce=None)
            constants[own] = Constant(number, None, unit, f"{GIVEN}{name}={given.strip()}")
    return structs.replace(profile, name=f"{profile.name}:{text}", constants=constants)


def _number(profile: Profile, name: str, given: str) -> float:
    try:
        value = float(given)
    except ValueError:
        value = -1.0
    if not isfinite(value) or value < 0 or (value == 0 and name not in MAY_BE_ZERO):
        raise UserError(f"profile {profile.name}: {name} = {given!r} is not a number above 0; correct the value")
    return value
