"""Every shipped profile keeps the schema and says where it comes from; derived ones follow from their sibling."""

import json

import msgspec
import pytest

from calib.derive import OWN, derive_profile
from calib.profile_files import DATA
from calib.roofline import MOST_EXPONENT
from calib.samples import read_samples, samples_sha256
from calib.terms import load_models
from sim.cost.profile import (
    KERNEL_NAMES,
    MAY_BE_ZERO,
    OPTIONAL,
    ROOFLINE_UNITS,
    SHIPPED,
    UNITS,
    default_profile,
    load_profile,
    shipped_profiles,
)
from sim.errors import UserError
from sim.specs.hardware import built_in_hardware, load_hardware

FITTED = [name for name in shipped_profiles() if not name.endswith("-derived")]
IMPORTED = [name for name in shipped_profiles() if name.endswith("-imported")]
DERIVED = [name for name in shipped_profiles() if name.endswith("-derived")]

# -- shipped profiles ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shipped_profiles())
def test_a_shipped_file_is_what_the_profile_writes_and_says_where_all_comes_from(name):
    """So that fitting again changes nothing but what changed."""
    data, profile = json.loads((SHIPPED / f"{name}.json").read_text()), load_profile(name)
    assert msgspec.json.decode(profile.to_json()) == data
    assert name == f"{profile.gpu}-{profile.status}" and profile.gpu in built_in_hardware()
    assert profile.form == "roofline" or profile.status == "measured"
    units = UNITS[profile.form]
    assert list(profile.constants) == [name for name in units if name in profile.constants]
    assert set(units) - set(profile.constants) <= set(OPTIONAL) | KERNEL_NAMES
    for constant, found in profile.constants.items():
        assert found.unit == units[constant] and len(found.source) > 20
        assert found.value >= 0 if constant in MAY_BE_ZERO else found.value > 0
    assert all(data["provenance"].values())


@pytest.mark.parametrize("name", DERIVED)
def test_a_derived_profile_claims_no_measurement(name):
    profile = load_profile(name)
    assert all(constant.stderr is None for constant in profile.constants.values())
    assert profile.range is None
    assert "calibrate before relying on absolute times" in profile.provenance["caution"]


@pytest.mark.parametrize("name", FITTED)
def test_a_fitted_profile_has_samples_range_and_residuals(name):
    profile = load_profile(name)
    path = DATA / profile.provenance["samples"]
    samples = read_samples(path)
    assert path.name == f"{name}.csv.gz"
    assert profile.provenance["samples_sha256"] == samples_sha256(path)
    assert profile.range is not None
    fitted = [s for s in samples if not s.beside and not s.is_quantised]
    prompts = [s for s in fitted if s.is_prompt]
    decodes = [s for s in fitted if s.is_decode and s.op == "products"]
    assert profile.range.tokens == (min(s.tokens for s in prompts), max(s.tokens for s in prompts))
    assert profile.range.batch == (min(s.batch_size for s in decodes), max(s.batch_size for s in decodes))
    assert profile.residuals is not None
    assert {"prefill_mape", "decode_mape"} <= set(profile.residuals)
    assert sorted(load_models(samples, path.parent)) == sorted({s.model for s in samples if s.model})


@pytest.mark.parametrize("name", IMPORTED)
def test_every_constant_of_an_imported_profile_is_fitted_or_says_what_it_was_carried_over_from(name):
    profile = load_profile(name)
    base = load_profile(f"{profile.gpu}-derived")
    assert profile.provenance["base"].startswith(base.name)
    for constant, found in profile.constants.items():
        if found.source.startswith("fitted"):
            assert (found.stderr is None) == ("at the limit" in found.source)
            if found.stderr is not None:
                low, high = map(float, found.source.split("interval ")[1].partition(";")[0].split(" to "))
                assert low < found.value < high
                above, stderr = high - found.value, found.stderr
                if constant.endswith("roofline_exponent"):
                    # Searched, and of even width, as 1 / p.
                    above, stderr = 1 / found.value - 1 / high, found.stderr / found.value**2
                # Below, intervals may end at zero, and an exponent's at its most.
                assert above <= 3.6 * stderr and (above >= 1.9 * stderr or high == MOST_EXPONENT)
        else:
            old = base.constants[constant]
            assert (found.value, found.stderr) == (old.value, old.stderr)
            assert found.source == f"carried over from {base.name}: {old.source}"
    fitted = {name for name, found in profile.constants.items() if found.source.startswith("fitted")}
    assert fitted >= {"flops_per_s", "attention_flops_per_s", "hbm_bytes_per_s", "kv_bytes_per_s", "alpha"}


def test_every_samples_file_that_ships_belongs_to_a_profile():
    assert sorted(path.name for path in DATA.glob("*.gz")) == [f"{name}.csv.gz" for name in FITTED]


# -- deriving --------------------------------------------------------------------------------------------------------


def derived(gpu="l20", sibling="l40s-imported", **options):
    theirs = load_profile(sibling)
    base = load_profile(f"{gpu}-derived")
    return derive_profile(load_hardware(gpu), theirs, base, **options)


def test_a_derived_profile_takes_the_siblings_shares_of_the_specification():
    """The L20 from the L40S: 119.5 of 362.05 TFLOP/s and 864 of 864 GB/s, and the rest as it is said."""
    profile, sibling = derived(), load_profile("l40s-imported")
    ours, theirs = load_hardware("l20"), load_hardware("l40s")
    compute = ours.fp16_flops_per_s / theirs.fp16_flops_per_s
    memory = ours.hbm_bytes_per_s / theirs.hbm_bytes_per_s
    assert profile.value("flops_per_s") == pytest.approx(compute * sibling.value("flops_per_s"))
    assert profile.value("attention_flops_per_s") == pytest.approx(compute * sibling.value("attention_flops_per_s"))
    assert profile.value("hbm_bytes_per_s") == pytest.approx(memory * sibling.value("hbm_bytes_per_s"))
    assert profile.value("roofline_exponent") == sibling.value("roofline_exponent")
    assert profile.value("alpha") * profile.value("flops_per_s") == pytest.approx(ours.fp16_flops_per_s)
    base = load_profile("l20-derived")
    for name in OWN:
        assert profile.constants.get(name) == base.constants.get(name)
    assert (profile.name, profile.gpu, profile.status, profile.form) == ("l20-derived", "l20", "derived", "roofline")
    assert set(ROOFLINE_UNITS) - set(profile.constants) <= set(OPTIONAL) | KERNEL_NAMES
    for name in profile.constants.keys() - OWN:
        constant = profile.constants[name]
        assert constant.stderr is None and constant.source.startswith(("assumed", "derived"))
    assert "the share l40s-imported reaches" in profile.constants["hbm_bytes_per_s"].source


def test_a_derived_profile_carries_over_what_another_gpu_measured_without_its_standard_error():
    """How well it is known there says nothing of here."""
    l40s = load_profile("l40s-imported")
    found = derive_profile(load_hardware("l20"), l40s, l40s).constants["allreduce_bytes_per_s"]
    measured = l40s.constants["allreduce_bytes_per_s"]
    assert measured.stderr is not None and (found.value, found.stderr) == (measured.value, None)
    assert found.source == f"carried over from l40s-imported: {measured.source}"


def test_a_share_of_the_peak_may_be_assumed_with_a_reason():
    profile, plain = derived(compute_share=0.5, reason="half is safe"), derived()
    assert profile.value("flops_per_s") == pytest.approx(0.5 * 119.5e12)
    assert profile.value("alpha") == pytest.approx(2.0)
    assert profile.constants["flops_per_s"].source == "assumed: 0.5 of the peak, 1.195e+14 FLOP/s: half is safe"
    ratio = plain.value("attention_flops_per_s") / plain.value("flops_per_s")
    assert profile.value("attention_flops_per_s") == pytest.approx(ratio * 0.5 * 119.5e12)
    assert profile.constants["hbm_bytes_per_s"] == plain.constants["hbm_bytes_per_s"]
    assert derived(compute_share=1.0, reason="all").value("flops_per_s") == 119.5e12


@pytest.mark.parametrize("share", [0.0, 1.01, float("nan")])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(UserError, match=f"--compute-share: {share} is not a share of the peak: give one above 0"):
        derived(compute_share=share, reason="because")


@pytest.mark.parametrize("gpu", ["rtx-4090", "rtx-pro-6000"])
def test_what_ships_as_derived_from_the_rtx_4090_is_derived_from_it(gpu):
    shipped, again = load_profile(f"{gpu}-derived"), derived(gpu, "rtx-4090-imported")
    assert {n: c.value for n, c in again.constants.items()} == pytest.approx(
        {n: c.value for n, c in shipped.constants.items()}
    )
    assert again.provenance == shipped.provenance


def test_the_l20_s_shares_are_those_of_an_earlier_fit():
    """It reads memory of the L40S's kind. Derived anew, all that is known of it beside the mixed kernel differs little.

    Studies of the L20 are of these constants: if it is derived anew, run them again.
    """
    shipped = load_profile("l20-derived")
    again = derived("l20", "rtx-4090-imported", memory=load_profile("l40s-imported"))
    kernel = ("attention_", "kv_padding", "longest_")
    mixed = {name for name in ROOFLINE_UNITS if name.startswith(kernel) and "flops" not in name}
    assert shipped.constants.keys() - mixed == again.constants.keys() - mixed
    for name in shipped.constants.keys() - mixed:
        assert shipped.value(name) == pytest.approx(again.value(name), rel=0.15), name
    assert "an earlier fit" in shipped.provenance["caution"]


def test_a_derived_profile_serves_where_nothing_better_ships():
    for gpu in built_in_hardware():
        named = [f"{gpu}-{status}" for status in ("measured", "imported", "derived")]
        assert default_profile(gpu).name == next(name for name in named if name in shipped_profiles())


@pytest.mark.parametrize(("gpu", "bound"), [("h100", 0.055), ("h200", 0.055), ("l40s", 0.09)])
def test_layers_of_fp8_of_models_not_seen_are_priced_within_bounds(gpu, bound):
    """Prefill and decode, over KV of both types; what docs/calibration.md says of them."""
    residuals = load_profile(f"{gpu}-imported").residuals or {}
    phases = ("fp8_prefill", "fp8_decode", "fp8_kv_prefill", "fp8_kv_decode")
    assert max(residuals[f"unseen_model_{phase}_mape"] for phase in phases) < bound
