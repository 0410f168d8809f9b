"""Bytes per weight and per KV element of a quantised checkpoint, from `quantization_config` or `hf_quant_config.json`.

Formats: block FP8 (DeepSeek), MXFP4 (gpt-oss), GPTQ, AWQ, bitsandbytes, compressed-tensors, ModelOpt FP8 and NVFP4.
Others are refused.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from sim.errors import UserError

SCALE_BYTES = 2
"""Bytes of one group's scale in the integer formats (fp16)."""
NVFP4_BYTES = 0.5 + 1 / 16
"""Four bits, and an FP8 scale per 16 elements (the per-tensor scale is negligible)."""
MXFP4_BYTES = 0.5 + 1 / 32
"""Four bits, and an exponent of a byte per 32 elements (OCP Microscaling Formats 1.0, 2023)."""
KV_BYTES = {"FP8": 1.0, "INT8": 1.0, "NVFP4": NVFP4_BYTES}


class WeightFormat(NamedTuple):
    """How weights are stored and multiplied.

    Attributes:
        weight_bytes: of a weight, the format's own scales included; those of integers depend on the group's size.
        input_bytes: of an element of the products' inputs, which are quantised as well; None: they keep 16 bits.
    """

    weight_bytes: float
    input_bytes: float | None = None


FORMATS = {
    "fp8": WeightFormat(1.0, 1.0),
    "nvfp4": WeightFormat(NVFP4_BYTES, NVFP4_BYTES),
    "mxfp4": WeightFormat(MXFP4_BYTES),
    "int4": WeightFormat(0.5),
}
"""Formats whose kernels have constants of their own, as profiles name them."""
PRODUCT_FORMATS = tuple(name for name, weights in FORMATS.items() if weights.input_bytes is not None)
"""Those whose products are in the format as well, on GPUs that can."""
COMPRESSED = {
    (("float", 8), ("float", 8)): "fp8",
    (("float", 4), ("float", 4)): "nvfp4",
    (("int", 4), (None, None)): "int4",
}
"""compressed-tensors' type and bits of weights and inputs, and the format that they are."""

Projection = tuple[str, int]
"""A module's dotted name and its number of weights."""


class Quantization:
    """Which modules are quantised and to how many bytes per element, scales included.

    Args:
        config: the `quantization_config` object, or the `quantization` object of `hf_quant_config.json`; None: none.
        path: the file, for messages.
    """

    def __init__(self, config: dict[str, Any] | None, path: Path) -> None:
        self._path = path
        self._config = config or {}
        self._bytes = self._weight_bytes() if config else None
        self._kept = self._kept_modules()

    @property
    def format(self) -> str:
        """A key of `FORMATS`; empty: nothing is quantised, or as none of them (FP8 weights with inputs of 16 bits)."""
        config, method = self._config, str(self._config.get("quant_method")).lower()
        if config.get("quant_algo"):
            return str(config["quant_algo"]).lower()
        if method in ("gptq", "awq"):
            return "int4" if config["bits"] == 4 else ""
        if method == "compressed-tensors":
            (group,) = config["config_groups"].values()
            sides = (group["weights"], group.get("input_activations") or {})
            kinds = tuple((side.get("type"), side.get("num_bits")) for side in sides)
            return COMPRESSED.get(kinds, "")
        return {"fbgemm_fp8": "fp8"}.get(method, method if method in FORMATS else "")

    def mean_bytes(self, projections: Iterable[Projection], plain_bytes: float) -> float:
        """Mean bytes per weight over `projections`, those the checkpoint keeps unquantised at `plain_bytes`."""
        if self._bytes is None:
            return plain_bytes
        total = elements = 0.0
        for name, count in projections:
            total += count * (plain_bytes if self._is_kept(name) else self._bytes)
            elements += count
        return total / elements if elements else plain_bytes

    def kv_bytes(self, plain_bytes: float) -> float:
        """Bytes per KV element: the checkpoint's own KV format where it names one, else `plain_bytes`."""
        scheme = self._config.get("kv_cache_scheme") or self._config.get("kv_cache_quant_algo")
        if scheme is None:
            return plain_bytes
        if isinstance(scheme, dict) and scheme.get("num_bits") == 8:
            return 1.0
        if isinstance(scheme, str) and scheme.upper() in KV_BYTES:
            return KV_BYTES[scheme.upper()]
        raise self._refuse("kv_cache_scheme", scheme, f"KV formats read here: {', '.join(KV_BYTES)}")

    def _weight_bytes(self) -> float:
        config = self._config
        method = str(config.get("quant_method") or ("modelopt" if config.get("quant_algo") else "")).lower()
        if method == "modelopt" or config.get("quant_algo"):
            return self._modelopt_bytes()
        if method in ("fp8", "fbgemm_fp8"):
            return 1 + self._block_scale_bytes()
        if method in ("gptq", "awq"):
            bits, group = self._number("bits"), self._number("group_size")
            if bits not in (2, 3, 4, 8):
                raise self._refuse("bits", bits, "expected 2, 3, 4 or 8")
            # Each group keeps a scale and a zero point.
            return bits / 8 + ((SCALE_BYTES + bits / 8) / group if group > 0 else 0)
        if method == "mxfp4":
            return MXFP4_BYTES
        if method == "bitsandbytes":
            # NF4 keeps a 4-byte maximum per 64 elements.
            return 0.5 + 4 / 64 if config.get("load_in_4bit") else 1.0
        if method == "compressed-tensors":
            return self._compressed_bytes()
        known = "fp8, mxfp4, gptq, awq, bitsandbytes, compressed-tensors"
        raise self._refuse("quant_method", method or None, f"known: {known}")

    def _modelopt_bytes(self) -> float:
        algorithm = str(self._config.get("quant_algo")).upper()
        sizes = {"FP8": 1.0, "NVFP4": NVFP4_BYTES}
        if algorithm not in sizes:
            raise self._refuse("quant_algo", self._config.get("quant_algo"), f"known: {', '.join(sizes)}")
        return sizes[algorithm]

    def _block_scale_bytes(self) -> float:
        block = self._config.get("weight_block_size")
        if block is None:
            return 0.0
        if not (isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
            raise self._refuse("weight_block_size", block, "expected two positive integers")
        return 4 / (block[0] * block[1])

    def _compressed_bytes(self) -> float:
        groups = self._config.get("config_groups")
        group = next(iter(groups.values())) if isinstance(groups, dict) and len(groups) == 1 else None
        if not isinstance(group, dict) or group.get("targets") != ["Linear"]:
            raise self._refuse("config_groups", groups, "only one group with targets ['Linear'] can be sized")
        weights = group.get("weights")
        bits = weights.get("num_bits") if isinstance(weights, dict) else None
        if not isinstance(weights, dict) or bits not in (2, 3, 4, 8):
            raise self._refuse("config_groups.weights", weights, "expected num_bits of 2, 3, 4 or 8")
        if weights.get("type") == "float" and bits == 4:
            return NVFP4_BYTES
        size = weights.get("group_size")
        return bits / 8 + (SCALE_BYTES / size if isinstance(size, int) and size > 0 else 0)

    def _kept_modules(self) -> re.Pattern[str] | None:
        config = self._config
        names: list[str] = []
        for field in ("modules_to_not_convert", "ignore", "exclude_modules", "ignored_layers"):
            value = config.get(field) or []
            if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                raise self._refuse(field, value, "expected a list of module names")
            names += value
        try:
            return re.compile("|".join(_pattern(name) for name in names)) if names else None
        except re.error as error:
            raise self._refuse("ignore", names, f"a pattern does not compile: {error}") from error

    def _is_kept(self, name: str) -> bool:
        if self.format == "mxfp4":
            # gpt-oss's model card (OpenAI 2025): the experts alone.
            return ".experts." not in name
        # Multimodal checkpoints nest the language model one level deeper, in one of two orders.
        nested = f"language_model.{name}", name.replace("model.", "model.language_model.", 1)
        return self._kept is not None and any(map(self._kept.search, (name, *nested)))

    def _number(self, field: str) -> int:
        value = self._config.get(field)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._refuse(field, value, "expected a whole number")
        return value

    def _refuse(self, field: str, value: object, remedy: str) -> UserError:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        return UserError(f"{self._path}: field quantization_config.{field} = {shown} cannot be sized: {remedy}")


def _pattern(name: str) -> str:
    """A regular expression for one entry: `re:` expression, shell wildcard, or whole dotted components."""
    if name.startswith("re:"):
        return f"^(?:{name[3:]})"
    if "*" in name:
        return rf"(?:^|\.){re.escape(name).replace(re.escape('*'), '.*')}$"
    return rf"(?:^|\.){re.escape(name)}(?:\.|$)"
