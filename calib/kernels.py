"""Kinds of single kernels with files of samples of their own, and the fits to such a file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from calib.experts import ExpertSample, fit_experts
from calib.gdn import GdnSample, fit_gdn
from calib.kernel_fit import KernelFit, read_kernel_samples
from calib.latents import LatentSample, fit_latents
from sim.cost.profile import Profile
from sim.specs.hardware import HardwareSpec

FITS: dict[str, Callable[[Path, Profile, HardwareSpec], list[KernelFit[Any]]]] = {
    "experts": lambda path, *_: fit_experts(read_kernel_samples(path, ExpertSample)),
    "latents": lambda path, *known: [fit_latents(read_kernel_samples(path, LatentSample), *known)],
    "gdn": lambda path, _, hardware: [fit_gdn(read_kernel_samples(path, GdnSample), hardware)],
}
"""By `calib.profile_files.KERNEL_FILES`: of a file, with the profile and the GPU whose constants they become."""
