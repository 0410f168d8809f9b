"""A profile for a GPU that nobody measured: a sibling's shares of the specification, every assumption spelled out."""

from sim.cost.profile import OPTIONAL, ROOFLINE_UNITS, Constant, Profile
from sim.errors import UserError
from sim.specs.hardware import HardwareSpec

OWN = (
    "layer_overhead_s",
    "h2d_bytes_per_s",
    "d2h_bytes_per_s",
    "copy_launch_s",
    "host_memcpy_bytes_per_s",
    "allreduce_bytes_per_s",
    "allreduce_latency_s",
    "beta",
)
"""Constants that a sibling says nothing about: launches, link and host."""


def derive_profile(
    hardware: HardwareSpec,
    sibling: Profile,
    sibling_hardware: HardwareSpec,
    base: Profile,
    *,
    compute_share: float | None = None,
    reason: str = "",
) -> Profile:
    """Constants of `hardware` from the shares of the specification that a measured sibling reaches.

    Args:
        sibling, sibling_hardware: the GPU whose shares are taken over: compute, attention, memory.
        base: profile of `hardware` itself, for `OWN`.
        compute_share: share of the peak FLOP/s that matrix products are assumed to reach; the sibling's if None.
        reason: why `compute_share` is what it is; needed with it.

    Raises:
        UserError: `compute_share` outside (0, 1], or without a reason.
    """
    if compute_share is not None and not 0 < compute_share <= 1:
        raise UserError(f"--compute-share: {compute_share} is not a share of the peak: give one above 0, at most 1")
    if compute_share is not None and not reason:
        raise UserError("--compute-share: say in --reason why, for the profile to carry")
    share = sibling.value("flops_per_s") / sibling_hardware.fp16_flops_per_s if compute_share is None else compute_share
    assumed = _assumed(hardware, sibling, sibling_hardware, share, reason or f"the share {sibling.name} reaches")
    found: dict[str, Constant] = {}
    for name, unit in ROOFLINE_UNITS.items():
        if name in assumed:
            value, text = assumed[name]
            found[name] = Constant(value, None, unit, text)
        elif name in OPTIONAL:
            continue
        elif name in OWN:
            found[name] = base.constants[name]
        else:
            found[name] = Constant(sibling.value(name), None, unit, f"assumed as in {sibling.name}")
    return Profile(
        name=f"{hardware.name}-derived",
        gpu=hardware.name,
        status="derived",
        form="roofline",
        constants=found,
        provenance={
            "method": f"shares of the specification that {sibling.name} reaches; see each source",
            "caution": "nothing here was measured on this GPU; calibrate before relying on absolute times",
        },
    )


def _assumed(
    hardware: HardwareSpec, sibling: Profile, sibling_hardware: HardwareSpec, share: float, why: str
) -> dict[str, tuple[float, str]]:
    """Values scaled from the specification, with the words that say how."""
    flops = share * hardware.fp16_flops_per_s
    attention = sibling.value("attention_flops_per_s") / sibling.value("flops_per_s")
    memory_share = sibling.value("hbm_bytes_per_s") / sibling_hardware.hbm_bytes_per_s
    peak, memory = hardware.fp16_flops_per_s, hardware.hbm_bytes_per_s
    return {
        "flops_per_s": (flops, f"assumed: {share:.3g} of the peak, {peak:.4g} FLOP/s: {why}"),
        "attention_flops_per_s": (
            attention * flops,
            f"assumed: {attention:.3g} of flops_per_s, as {sibling.name} reaches",
        ),
        "hbm_bytes_per_s": (
            memory_share * memory,
            f"assumed: {memory_share:.3g} of {memory:.4g} B/s, the share {sibling.name} reaches",
        ),
        "alpha": (1 / share, "derived: specified peak over flops_per_s (LayerKV Eq. 3 divides by the peak)"),
    }
