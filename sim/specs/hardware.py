"""GPUs and their host: `load_hardware`. Built-ins lie in `sim/specs/gpus/`, every value with its source."""

import re
from math import isfinite
from pathlib import Path
from typing import Literal

import msgspec

from sim.errors import UserError
from sim.specs.json_file import built_in_names, convert, find_file, once_of, read_json_object

BUILT_IN = Path(__file__).parent / "gpus"


class Quantity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value of a hardware file: where it comes from, and whether it was specified, measured or assumed."""

    value: float | None
    status: Literal["specification", "measured", "assumed"]
    source: str


class HardwareFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A hardware file: a name, and the fields of `HardwareSpec` as quantities."""

    name: str
    memory_bytes: Quantity
    fp16_flops_per_s: Quantity
    hbm_bytes_per_s: Quantity
    pcie_bytes_per_s: Quantity
    gpus_per_pcie_link: Quantity
    nvlink_bytes_per_s: Quantity
    host_memory_bytes: Quantity
    copies_beside_compute: bool = True
    compute_capability: Quantity | None = None
    fp8_flops_per_s: Quantity | None = None
    nvfp4_flops_per_s: Quantity | None = None
    l2_bytes: Quantity | None = None
    board_power_w: Quantity | None = None


MOST = 1e24
"""Of any quantity: bytes, rates, the GPUs at a link."""
LEAST_RATE, MOST_RATE = 1e6, 1e16
"""Of links and memory, B/s: no machine is below or above."""
PLAIN_FIELDS = ("name", "copies_beside_compute")
"""Fields of a hardware file that are no quantities."""
DEVICES = {
    "H200": "h200", "H100": "h100", "GB200": "gb200", "B300": "b300", "B200": "b200", "L40S": "l40s", "L20": "l20",
    "A100": "a100-80g", "RTX 4090": "rtx-4090", "RTX PRO 6000 Blackwell Server": "rtx-pro-6000", "V100": "v100",
    "T4": "t4",
}  # fmt: skip
"""Words of the names that CUDA gives devices, and our specs of them; the first that fits."""
UNLIKE = ("H100 PCIe", "H100 NVL", "H200 NVL")
"""Of these names' words some are another GPU's, whose memory, clocks and links they have not."""


class HardwareSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One kind of GPU in its host.

    Attributes:
        memory_bytes: total memory as CUDA reports it, which is what engines divide; it differs from the GB on the
            data sheet (L20 48 GB: 47.8e9, A100 80 GB: 85.0e9).
        fp16_flops_per_s: dense half-precision peak with float32 accumulation, FLOP/s.
        hbm_bytes_per_s: peak bandwidth of the GPU's memory, B/s.
        pcie_bytes_per_s: effective rate of contiguous copies per direction over one link, B/s.
        gpus_per_pcie_link: GPUs that share a link to the host.
        nvlink_bytes_per_s: peak per direction and GPU, B/s; None: GPUs talk over PCIe.
        host_memory_bytes: memory of the host that KV can move to.
        copies_beside_compute: whether it has copy engines; false for a CPU, which copies itself.
        compute_capability: CUDA's, major.minor; None: unknown, or not an NVIDIA GPU.
        fp8_flops_per_s, nvfp4_flops_per_s: dense peak in the format with float32 accumulation, FLOP/s; None: it
            multiplies nothing in it.
        l2_bytes: the L2 cache that all of its multiprocessors share; None: not given.
        board_power_w: most that the board draws, W (TDP, TGP); None: not given.
        sources: field name to "status: source".
    """

    name: str
    memory_bytes: float
    fp16_flops_per_s: float
    hbm_bytes_per_s: float
    pcie_bytes_per_s: float
    gpus_per_pcie_link: int
    nvlink_bytes_per_s: float | None
    host_memory_bytes: float
    copies_beside_compute: bool = True
    compute_capability: float | None = None
    fp8_flops_per_s: float | None = None
    nvfp4_flops_per_s: float | None = None
    l2_bytes: float | None = None
    board_power_w: float | None = None
    sources: dict[str, str]

    def product_flops_per_s(self, quantization: str) -> float:
        """Dense peak of products in a format of `PRODUCT_FORMATS`; that of 16 bits where it has none, FLOP/s."""
        return getattr(self, f"{quantization}_flops_per_s") or self.fp16_flops_per_s


def built_in_hardware() -> list[str]:
    """Names that `load_hardware` knows without a path."""
    return built_in_names(BUILT_IN)


def gpu_called(name: str) -> str:
    """The built-in GPU that CUDA calls so; UserError for others, and for slices of one (MIG)."""
    for words, gpu in DEVICES.items():
        if re.search(rf"\b{words}\b", name) and "MIG" not in name and not any(other in name for other in UNLIKE):
            return "a100-40g" if gpu == "a100-80g" and "40GB" in name else gpu
    raise UserError(f"--gpu: no spec for {name!r}: name one of {', '.join(built_in_hardware())}, or give a file")


def load_hardware(name_or_path: str) -> HardwareSpec:
    """A built-in GPU by name, or a hardware file.

    Raises:
        UserError: unknown name (with the nearest right one), or a file with a missing, unknown or impossible field.
    """
    return _read(find_file(name_or_path, BUILT_IN, "gpu"))


def _hardware(path: Path) -> HardwareSpec:
    file = convert(read_json_object(path), HardwareFile, path)
    if not file.name:
        raise UserError(f"{path}: field name is empty: name the GPU")
    values: dict[str, float | None] = {}
    sources: dict[str, str] = {}
    quantities = {field: getattr(file, field) for field in HardwareFile.__struct_fields__ if field not in PLAIN_FIELDS}
    for field, quantity in quantities.items():
        if quantity is None:
            continue
        values[field] = _checked(quantity, field, path)
        sources[field] = f"{quantity.status}: {quantity.source}"
    plain = {"name": file.name, "copies_beside_compute": file.copies_beside_compute}
    return msgspec.convert({**plain, "sources": sources, **values}, HardwareSpec)


_read = once_of(BUILT_IN, _hardware)


def _checked(quantity: Quantity, field: str, path: Path) -> float | int | None:
    value = quantity.value
    if value is None:
        if field != "nvlink_bytes_per_s":
            raise UserError(f"{path}: field {field}.value is null: give a number (only nvlink_bytes_per_s may be null)")
        return None
    if not isfinite(value) or value <= 0:
        raise UserError(f"{path}: field {field}.value = {value} must be a positive finite number")
    if not 1.0 <= value <= MOST:
        raise UserError(f"{path}: field {field}.value = {value} is not between 1 and {MOST:g}: is it in SI units?")
    if field.endswith("_bytes_per_s") and not LEAST_RATE <= value <= MOST_RATE:
        raise UserError(
            f"{path}: field {field}.value = {value} is not between {LEAST_RATE:g} and {MOST_RATE:g} B/s: is it in SI "
            "units?"
        )
    if field == "gpus_per_pcie_link":
        if value != int(value):
            raise UserError(f"{path}: field {field}.value = {value} must be a whole number")
        return int(value)
    return value
