"""Hardware files: every value has a source, and bad ones are refused by field."""

import json

import pytest

from sim.errors import UserError
from sim.specs.hardware import BUILT_IN, DEVICES, built_in_hardware, gpu_called, load_hardware
from sim.specs.json_file import read_json_object
from sim.specs.quantization import PRODUCT_FORMATS


@pytest.mark.parametrize("name", built_in_hardware())
def test_every_value_has_a_source_that_says_how_it_is_known(name):
    hardware = load_hardware(name)
    assert hardware.name == name
    may_lack = hardware.compute_capability, hardware.fp8_flops_per_s, hardware.nvfp4_flops_per_s
    given = sum(value is not None for value in (*may_lack, hardware.l2_bytes, hardware.board_power_w))
    assert len(hardware.sources) == 7 + given
    assert (hardware.fp8_flops_per_s is not None) == ((hardware.compute_capability or 0) >= 8.9)
    assert (hardware.nvfp4_flops_per_s is not None) == ((hardware.compute_capability or 0) >= 10)
    own = [hardware.product_flops_per_s(kind) for kind in PRODUCT_FORMATS]
    assert own == [rate or hardware.fp16_flops_per_s for rate in may_lack[1:]]
    for source in hardware.sources.values():
        assert source.split(": ")[0] in ("specification", "measured", "assumed")


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA A100-PCIE-40GB", "a100-40g"),
        ("Tesla T4", "t4"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
    ],
)
def test_cudas_names(name, gpu):
    assert gpu_called(name) == gpu
    assert set(DEVICES.values()) <= set(built_in_hardware())


@pytest.mark.parametrize("name", [
        "NVIDIA GB300", "NVIDIA T400 4GB", "NVIDIA L200", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA H20", "NVIDIA GH200 480GB",
    ])  # fmt: skip
def test_a_gpu_that_only_sounds_like_one_has_no_spec(name):
    with pytest.raises(UserError, match=f"--gpu: no spec for '{name}': name one of a100-40g"):
        gpu_called(name)


def write(tmp_path, field, change):
    data = json.loads((BUILT_IN / "l20.json").read_text())
    if change is None:
        del data[field]
    else:
        data[field] = data.get(field, {}) | change
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data))
    return str(path)


@pytest.mark.parametrize("field", ["memory_bytes", "hbm_bytes_per_s"])
@pytest.mark.parametrize("value", [1e6, 1e10, 1e16])
def test_a_users_own_file(tmp_path, field, value):
    assert getattr(load_hardware(write(tmp_path, field, {"value": value})), field) == value


def test_a_gpu_without_a_name_is_refused(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(json.loads((BUILT_IN / "l20.json").read_text()) | {"name": ""}))
    with pytest.raises(UserError, match=r"mine\.json: field name is empty: name the GPU"):
        load_hardware(str(path))


@pytest.mark.parametrize(
    ("field", "change", "words"),
    [
        ("gpus_per_pcie_link", {"value": 1.5}, ["gpus_per_pcie_link.value", "1.5", "whole"]),
        ("memory_bytes", {"value": 1.001e24}, ["memory_bytes.value", "is not between 1 and 1e+24"]),
        ("memory_bytes", {"value": None}, ["memory_bytes.value is null", "only nvlink_bytes_per_s may be null"]),
        ("pcie_bytes_per_s", {"value": 25.0}, ["pcie_bytes_per_s.value = 25.0", "is it in SI units?"]),
        ("fp4_flops_per_s", {"value": 1.0}, ["fp4_flops_per_s", "remove or rename"]),
    ],
)
def test_bad_values_are_refused_by_field(tmp_path, field, change, words):
    with pytest.raises(UserError) as error:
        load_hardware(write(tmp_path, field, change))
    for word in ["mine.json", *words]:
        assert word in str(error.value)


def test_an_unknown_gpu_gets_the_nearest_right_name():
    with pytest.raises(UserError, match=r"did you mean 'rtx-4090'\?.*a100-40g, "):
        load_hardware("rtx4090")


def test_what_ships_is_read_once_and_a_file_of_ones_own_anew(tmp_path):
    """Studies ask for the same GPU thousands of times; one's own file may change between two runs of a notebook."""
    assert load_hardware("l20") is load_hardware("L20")
    assert load_hardware(write(tmp_path, "memory_bytes", {"value": 1e9})).memory_bytes == 1e9
    assert load_hardware(write(tmp_path, "memory_bytes", {"value": 2e9})).memory_bytes == 2e9


@pytest.mark.parametrize("number", [2**63 - 1, 1 - 2**63])
def test_the_largest_numbers_are_read(tmp_path, number):
    (tmp_path / "a.json").write_text(f'{{"n": {number}}}')
    assert read_json_object(tmp_path / "a.json") == {"n": number}


@pytest.mark.parametrize("number", [2**63, -(2**63)])
def test_larger_ones_are_refused(tmp_path, number):
    (tmp_path / "a.json").write_text(f'{{"n": {number}}}')
    with pytest.raises(UserError, match="more than 64 bits"):
        read_json_object(tmp_path / "a.json")


def test_what_cannot_be_read_says_why(tmp_path):
    with pytest.raises(UserError, match=r"a\.json: cannot be read \(No such file or directory\): check the path"):
        read_json_object(tmp_path / "a.json")
