"""Samples of single kernels: their files, what they tell too little of, and that shipped constants are fits to them."""

import pytest
import test_calib_experts as experts
import test_calib_gdn as gdn
import test_calib_latents as latents
from calib_small import REFITTED

from calib.gdn import fit_gdn
from calib.kernel_fit import read_kernel_samples
from calib.kernels import FITS
from calib.latents import fit_latents
from calib.profile_files import DATA, KERNEL_FILES
from calib.samples import samples_sha256, write_samples
from sim.cost.profile import EXPERT_NAMES, LATENT_UNITS, load_profile, shipped_profiles
from sim.errors import UserError
from sim.specs.hardware import load_hardware
from sim.specs.quantization import PRODUCT_FORMATS

SHIPPED = {kind: sorted(path.name[: -len(".csv.gz")] for path in (DATA / kind).iterdir()) for kind in KERNEL_FILES}


def test_a_file_is_read_as_it_was_written(tmp_path):
    path, samples = tmp_path / "x.csv.gz", [experts.sample(), experts.sample(tokens=1, latency_s=3.25e-5)]
    write_samples(path, samples, ["kernels: mine"], type(samples[0]))
    assert read_kernel_samples(path, type(samples[0])) == samples
    # Four bytes that hold a date in other gzip files.
    assert path.read_bytes()[4:8] == bytes(4)


@pytest.mark.parametrize(
    ("fit", "samples", "heads"),
    [
        (lambda chosen: fit_latents(chosen, latents.PROFILE, latents.HARDWARE), latents.planted(), "num_heads"),
        (lambda chosen: fit_gdn(chosen, gdn.HARDWARE), gdn.planted(), "num_value_heads"),
    ],
)
def test_samples_of_one_phase_or_one_number_of_heads_tell_too_little(fit, samples, heads):
    for name, value in ((heads, getattr(samples[0], heads)), ("phase", "decode")):
        with pytest.raises(UserError, match="need both phases and two numbers of"):
            fit([s for s in samples if getattr(s, name) == value])


def test_profiles_have_constants_of_kernels_where_samples_of_them_ship():
    profiles = [load_profile(name) for name in shipped_profiles()]
    has = {
        "experts": lambda p: EXPERT_NAMES & p.constants.keys(),
        "latents": lambda p: p.latents,
        "gdn": lambda p: p.gdn,
    }
    for kind in KERNEL_FILES:
        found = [p for p in profiles if has[kind](p)]
        assert [p.name for p in found] == SHIPPED[kind]
        for profile in found:
            assert profile.provenance[f"{kind}_sha256"] == samples_sha256(DATA / kind / f"{profile.name}.csv.gz")


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, names in SHIPPED.items() for name in names if not name.startswith(REFITTED)],
)
def test_shipped_constants_are_the_fit_to_shipped_samples(kind, name):
    """Rates are below the peak, and heads that were left out are priced within 8 %; of two engines' within 10 %."""
    profile = load_profile(name)
    hardware, shipped = load_hardware(profile.gpu), profile.residuals or {}
    for fit in FITS[kind](DATA / kind / f"{name}.csv.gz", profile.without(LATENT_UNITS), hardware):
        values = fit.fit.values
        assert {own: profile.value(own) for own in values} == pytest.approx(values, rel=1e-3)
        assert {own: shipped[own] for own in fit.residuals} == pytest.approx(fit.residuals, abs=2e-4)
        # What has inputs of 16 bits is multiplied so.
        inputs = getattr(fit.samples[0], "quantization", "")
        peak = hardware.product_flops_per_s(inputs) if inputs in PRODUCT_FORMATS else hardware.fp16_flops_per_s
        assert all(rate < peak for own, rate in values.items() if own.endswith("flops_per_s"))
        reads = [v for own, v in values.items() if own.endswith(("expert_bytes_per_s", "decode_bytes_per_s"))]
        assert all(rate < hardware.hbm_bytes_per_s for rate in reads)
        limit = 0.1 if kind == "latents" else 0.08
        assert all(error < limit for own, error in fit.residuals.items() if own.startswith("unseen_heads"))
