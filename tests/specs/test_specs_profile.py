"""Profiles: every shipped one holds to the schema, and bad files are refused by field."""

import json
import re

import msgspec
import pytest
from msgspec import structs

from calib.experts import ExpertSample
from calib.gdn import GdnSample
from calib.latents import LatentSample
from calib.measure.capacity import Capacity
from calib.measure.log import Header, Measured, Note, Skipped
from calib.measure.points import Point
from sim.cost.engine_profile import EngineConstant, EngineProfile
from sim.cost.kernels import KernelTables
from sim.cost.profile import (
    KERNEL_NAMES,
    OPTIONAL,
    ROOFLINE_UNITS,
    SHIPPED,
    Constant,
    FittedRange,
    Profile,
    ShortLinear,
    default_profile,
    linear_profile,
    load_profile,
    read_profile,
)
from sim.errors import UserError
from sim.specs.hardware import HardwareFile, HardwareSpec, Quantity, built_in_hardware, load_hardware


@pytest.mark.parametrize("gpu", built_in_hardware())
def test_every_gpu_has_a_derived_profile_that_says_where_each_constant_comes_from(gpu):
    profile = load_profile(f"{gpu}-derived", load_hardware(gpu))
    assert (profile.gpu, profile.status, profile.form) == (gpu, "derived", "roofline")
    assert set(ROOFLINE_UNITS) - set(profile.constants) <= set(OPTIONAL) | KERNEL_NAMES
    for name, constant in profile.constants.items():
        assert len(constant.source) > 20, name
    assert profile.linear is None


OFF_THE_PEAK = {"rtx-4090-imported": 0.90, "rtx-pro-6000-imported": 1.29}
"""alpha x FLOP/s over the peak, fitted to prompts of at most 2,048 tokens."""


@pytest.mark.parametrize("gpu", built_in_hardware())
def test_nothing_achieved_exceeds_the_specification(gpu):
    profile, hardware = default_profile(gpu), load_hardware(gpu)
    assert profile.value("flops_per_s") < hardware.fp16_flops_per_s
    assert profile.value("hbm_bytes_per_s") < hardware.hbm_bytes_per_s
    link = hardware.nvlink_bytes_per_s or hardware.pcie_bytes_per_s
    assert profile.value("allreduce_bytes_per_s") < link
    # Eq. 3 has one rate for all: alpha is a fit to whole prompts, off the peak over that of matrix products; the more,
    # the shorter the prompts are that were timed, since short ones wait for weights.
    longest = profile.range.tokens[1] if profile.range and profile.range.tokens else 0
    assert (profile.name in OFF_THE_PEAK) == (0 < longest <= 2048)
    expected = OFF_THE_PEAK.get(profile.name, 1.0) * hardware.fp16_flops_per_s
    apart = 1e-5 if profile.status == "derived" else 0.02
    assert profile.value("alpha") * profile.value("flops_per_s") == pytest.approx(expected, rel=apart)


def edited(tmp_path, edit):
    data = json.loads((SHIPPED / "l20-derived.json").read_text())
    edit(data)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data))
    return path


def constant(name, **fields):
    return lambda data: data["constants"][name].update(fields)


BAD = [
    (constant("layer_overhead_s", unit="ms"), ["constants.layer_overhead_s.unit", "'ms'", "expected 's'", "convert"]),
    (lambda d: d["constants"].pop("alpha"), ["constants.alpha", "missing", "roofline"]),
    (lambda d: d["constants"].update(gamma=d["constants"]["alpha"]), ["constants.gamma", "not a constant", "remove"]),
    (lambda d: d.update(extra=1), ["remove or rename 'extra'"]),
    (lambda d: d.update(form="cubic"), ["form", "cubic"]),
    (lambda d: d.update(residuals={"prefill_mape": -1}), ["residuals.prefill_mape", "-1"]),
    (lambda d: d.update(range={"tokens": [9, 1]}), ["range.tokens", "lower limit first"]),
    (lambda d: d.update(all_reduce={"1": [[8192, 1e-5]]}), ["all_reduce.1", "from 2 on"]),
    (lambda d: d.update(all_reduce={"2": [[8192, 1e-5], [8192, 2e-5]]}), ["all_reduce.2", "in order of bytes"]),
    (lambda d: d.update(all_reduce={"2": [[8192, 0]]}), ["all_reduce.2", "more than zero"]),
    (lambda d: d.update(all_reduce={"2": [[0, 1e-5]]}), ["all_reduce.2", "more than 0"]),
    (lambda d: d.update(all_reduce={"2": [[8192, 1.1e9]]}), ["all_reduce.2 = 1100000000.0 s", "is it in this unit"]),
    (lambda d: d.update(linear_factors=[[8, 0.009]]), ["linear_factors = 0.009 1 is not between 0.01 and 1e+09"]),
    (lambda d: d.update(range={"context_tokens": [1, -9]}), ["range.context_tokens = -9", "zero or more"]),
    *(
        (lambda d, name=name, points=points: d.update({name: points}), [name, words])
        for name, points, words in (
            ("linear_factors", [], "[tokens, factor]"),
            ("linear_factors", [[8, 1.0], [8, 1.1]], "in order of tokens"),
            ("fp8_linear_factors", [[0, 1.0]], "1 or more"),
            ("nvfp4_linear_factors", [[8, 1.0], [9, 0.0]], "more than zero"),
        )
    ),
]


def test_what_may_be_zero_or_alike_is_taken(tmp_path):
    def edit(data):
        data["constants"]["beta"]["stderr"] = 0.0
        data.update(residuals={"prefill_mape": 0.0}, range={"tokens": [0, 0], "batch": [7, 7]})

    profile = read_profile(edited(tmp_path, edit))
    assert profile.constants["beta"].stderr == 0.0 and profile.residuals == {"prefill_mape": 0.0}
    assert profile.range == FittedRange(tokens=(0, 0), batch=(7, 7))


def test_the_linear_form_has_no_roofline_to_correct(tmp_path):
    linear = structs.replace(linear_profile("mine", (0.1,) * 8, "a test"), linear_factors=[(1, 1.0)])
    path = tmp_path / "mine.json"
    path.write_bytes(linear.to_json())
    with pytest.raises(UserError, match=r"field linear_factors corrects a roofline: form 'linear' has none; remove it"):
        read_profile(path)


@pytest.mark.parametrize(("edit", "words"), BAD)
def test_bad_files_are_refused_by_field(tmp_path, edit, words):
    with pytest.raises(UserError) as error:
        read_profile(edited(tmp_path, edit))
    message = str(error.value)
    assert "\n" not in message
    for word in ["mine.json", *words]:
        assert word in message


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("flops_per_s", 1.0, 1e24), ("hbm_bytes_per_s", 1.0, 1e24), ("alpha", 0.01, 1e9), ("layer_overhead_s", 0.0, 1e9)],
)
def test_constants_lie_within_the_range_of_their_unit(tmp_path, name, least, most):
    for value in (least, most):
        assert read_profile(edited(tmp_path, constant(name, value=value))).value(name) == value
    for value in [most * 1.01, *([least * 0.99] if least else [])]:
        with pytest.raises(UserError, match=re.escape(f"constants.{name}.value = {value} ")):
            read_profile(edited(tmp_path, constant(name, value=value)))


@pytest.mark.parametrize(
    "kind",
    [
        Profile, Constant, FittedRange, ShortLinear, KernelTables, EngineProfile, EngineConstant, HardwareFile,
        Quantity, HardwareSpec, ExpertSample, GdnSample, LatentSample, Header, Measured, Skipped, Note, Capacity, Point,
    ],
)  # fmt: skip
def test_whoever_misspells_a_field_of_a_file_is_told(kind):
    """All that files are read into: a field that is not known is not passed over."""
    with pytest.raises(msgspec.ValidationError, match="contains unknown field `mispelled`"):
        msgspec.json.decode(TAGGED.get(kind, b'{"mispelled": 1}'), type=kind)


TAGGED = {
    kind: f'{{"line": "{tag}", "mispelled": 1}}'.encode()
    for kind, tag in ((Header, "header"), (Measured, "point"), (Skipped, "skipped"), (Note, "note"))
}
"""Lines of a log say what they are."""


def test_the_hash_is_of_the_content_not_the_layout(tmp_path):
    profile = default_profile("l20")
    data = json.loads((SHIPPED / "l20-derived.json").read_text())
    path = tmp_path / "other.json"
    path.write_text(json.dumps({key: data[key] for key in reversed(data)}, indent=7))
    assert read_profile(path).content_hash == profile.content_hash
    assert len(profile.content_hash) == 64
    changed = read_profile(edited(tmp_path, constant("alpha", value=1.5)))
    assert changed.content_hash != profile.content_hash


def test_a_written_profile_reads_back(tmp_path):
    extra = {"range": {"tokens": [16, 16384]}, "residuals": {"prefill_mape": 0.05}}
    profile = read_profile(edited(tmp_path, lambda data: data.update(extra)))
    path = tmp_path / "again.json"
    path.write_bytes(profile.to_json())
    assert read_profile(path) == profile
    assert profile.range and profile.range.tokens == (16, 16384)
    # The linear form in full too, though it has a short one.
    linear = linear_profile("mine", (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8), "a test")
    path.write_bytes(linear.to_json())
    assert read_profile(path) == linear


def test_a_profile_of_another_gpu_is_refused():
    with pytest.raises(UserError, match=r"gpu = 'a100-80g' is not the gpu simulated, 'l20'.*use a profile of l20"):
        load_profile("a100-80g-derived", "l20")


def test_unknown_names():
    with pytest.raises(UserError, match=r"did you mean 'l20-derived'\?"):
        load_profile("l20-derive")
    with pytest.raises(UserError, match=r"none is shipped for gpu 'b100' \(there are: a100-40g, "):
        default_profile("b100")
    with pytest.raises(UserError, match="neither a profile nor a gpu"):
        load_profile()


def test_a_constant_that_the_form_lacks():
    with pytest.raises(UserError, match=r"l20-derived: field constants\.prefill_base_s is missing"):
        default_profile("l20").value("prefill_base_s")


SHORT = {"form": "linear", "prefill": [0.01, 2e-4, 0], "decode": [0.02, 1e-4, 5e-7], "swap_s_per_block": 1e-3}


def short(tmp_path, change):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(SHORT | change))
    return path


def test_the_short_linear_form(tmp_path):
    profile = load_profile(str(short(tmp_path, {})), "l20")
    assert (profile.name, profile.form, profile.gpu) == ("mine", "linear", "any")
    assert profile.linear and profile.linear.prefill == (0.01, 2e-4, 0)
    assert profile.linear.decode == (0.02, 1e-4, 5e-7)
    assert profile.linear.swap_s_per_block == 1e-3
    again = tmp_path / "again.json"
    again.write_bytes(profile.to_json())
    assert read_profile(again) == profile


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prefill": [0.01, -2e-4, 0]}, ["prefill[1]", "-0.0002", "zero or more"]),
        ({"decode": [0.01, 1e-4, float("nan")]}, ["decode[2]", "nan"]),
        ({"swap_s_per_block": -1}, ["swap_s_per_block", "-1"]),
        ({"swap_s_per_block": 2e9}, ["swap_s_per_block = 2000000000.0 s", "is it in this unit"]),
        ({"prefill": [1, 2, "3"]}, ["prefill[2]", "'3'"]),
        ({"overhead": 1}, ["remove or rename 'overhead'"]),
    ],
)
def test_bad_short_files_are_refused_by_field(tmp_path, change, words):
    with pytest.raises(UserError) as error:
        read_profile(short(tmp_path, change))
    for word in ["mine.json", *words]:
        assert word in str(error.value)
