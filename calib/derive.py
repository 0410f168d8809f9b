"""A profile for a GPU that was not measured: a sibling's shares of the specification, every assumption spelled out."""

import msgspec

from sim.cost.profile import KERNEL_NAMES, ROOFLINE_UNITS, Constant, Profile
from sim.errors import UserError
from sim.specs.hardware import HardwareSpec, load_hardware

COPY_RATES = ("h2d_bytes_per_s", "d2h_bytes_per_s")
OWN = (
    "layer_overhead_s",
    "attention_idle_tile_s",
    *COPY_RATES,
    "copy_launch_s",
    "host_memcpy_bytes_per_s",
    "allreduce_bytes_per_s",
    "allreduce_latency_s",
    "allreduce_chunk_s",
    "allreduce_launch_s",
    "beta",
)
"""Constants that a sibling says nothing about: launches, link and host."""


def derive_profile(
    hardware: HardwareSpec,
    sibling: Profile,
    base: Profile,
    *,
    compute_share: float | None = None,
    reason: str = "",
    memory: Profile | None = None,
) -> Profile:
    """Constants of `hardware` from the shares of the specification that a measured sibling reaches.

    Args:
        sibling: of the GPU whose shares are taken over: compute, attention, memory.
        base: profile of `hardware` itself, for `OWN`; of another GPU their sources say so.
        compute_share: share of the peak FLOP/s that matrix products are assumed to reach; the sibling's if None.
        reason: why `compute_share` is what it is; needed with it.
        memory: of another GPU whose shares of the memory bandwidth are taken over, where its memory is more alike.

    Raises:
        UserError: `compute_share` outside (0, 1], or without a reason.
    """
    if compute_share is not None and not 0 < compute_share <= 1:
        raise UserError(f"--compute-share: {compute_share} is not a share of the peak: give one above 0, at most 1")
    if compute_share is not None and not reason:
        raise UserError("--compute-share: say in --reason why, for the profile to carry")
    share = compute_share or sibling.value("flops_per_s") / load_hardware(sibling.gpu).fp16_flops_per_s
    assumed = _assumed(hardware, sibling, share, reason or f"the share {sibling.name} reaches")
    assumed |= _bandwidths(hardware, memory or sibling, sibling)
    found: dict[str, Constant] = {}
    for name, unit in ROOFLINE_UNITS.items():
        if name in assumed:
            value, text = assumed[name]
            found[name] = Constant(value, None, unit, text)
        elif name == "step_overhead_s" or name.startswith(("fp8", "nvfp4")) or name in KERNEL_NAMES:
            # Of the engine that was timed there; of kernels that GPUs of one family need not share.
            continue
        elif name in COPY_RATES and base.gpu != hardware.name:
            text = "assumed: pcie_bytes_per_s of the specification"
            found[name] = Constant(hardware.pcie_bytes_per_s, None, unit, text)
        elif name in OWN:
            if name in base.constants:
                found[name] = base.constants[name]
                if base.gpu != hardware.name:
                    text = f"carried over from {base.name}: {found[name].source}"
                    found[name] = msgspec.structs.replace(found[name], stderr=None, source=text)
        elif name in sibling.constants:
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
        all_reduce=base.all_reduce if base.gpu == hardware.name else None,
    )


def _assumed(hardware: HardwareSpec, sibling: Profile, share: float, why: str) -> dict[str, tuple[float, str]]:
    """Values scaled from the specification, with the words that say how."""
    peak = hardware.fp16_flops_per_s
    flops = share * peak
    attention = sibling.value("attention_flops_per_s") / sibling.value("flops_per_s")
    as_there = f"assumed: {attention:.3g} of flops_per_s, as {sibling.name} reaches"
    return {
        "flops_per_s": (flops, f"assumed: {share:.3g} of the peak, {peak:.4g} FLOP/s: {why}"),
        "attention_flops_per_s": (attention * flops, as_there),
        "alpha": (1 / share, "derived: specified peak over flops_per_s (LayerKV Eq. 3 divides by the peak)"),
    }


def _bandwidths(hardware: HardwareSpec, memory: Profile, sibling: Profile) -> dict[str, tuple[float, str]]:
    """Rates of reading, and tiles of attention that run at once: in proportion to the peak, as multiprocessors are."""
    found: dict[str, tuple[float, str]] = {}
    like = {"hbm_bytes_per_s": memory, "kv_bytes_per_s": memory, "elementwise_bytes_per_s": sibling}
    for name, profile in like.items():
        if name in profile.constants:
            share = profile.value(name) / load_hardware(profile.gpu).hbm_bytes_per_s
            text = f"assumed: {share:.3g} of {hardware.hbm_bytes_per_s:.4g} B/s, the share {profile.name} reaches"
            found[name] = (share * hardware.hbm_bytes_per_s, text)
    if sibling.value("attention_slots"):
        scale = hardware.fp16_flops_per_s / load_hardware(sibling.gpu).fp16_flops_per_s
        text = f"assumed: {scale:.3g} of those of {sibling.name}, as of the peak FLOP/s"
        found["attention_slots"] = (scale * sibling.value("attention_slots"), text)
    return found
