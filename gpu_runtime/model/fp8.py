"""Matrices of FP8 weights: `Fp8Matrix`, whose products tensor cores compute in FP8, and what a config says of them.

Checkpoints of `compressed-tensors` and of `fp8` with a scale a matrix or a row. Several matrices below one another have
a scale a row, which says the same. Activations take a scale a token, found anew for each product, whatever a checkpoint
says of theirs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from sim.errors import UserError
from sim.specs.hf_fields import Fields

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
LEAST_SCALE = 1e-12
KEPT_ON = ("cuda",)
"""Where weights stay in FP8. Elsewhere they are converted when they are read: the reference."""
CAPABILITY = (8, 9)
"""Of the first GPUs whose tensor cores compute FP8."""
STEP = 16
"""What rows and columns must be multiples of (`torch._scaled_mm`)."""


@dataclass(frozen=True, eq=False)
class Fp8Matrix:
    """[out, in]: `data` FP8, times the row's of `scales` [out, 1], fp32."""

    data: Tensor
    scales: Tensor

    @classmethod
    def of(cls, matrix: Tensor) -> "Fp8Matrix":
        """The nearest to a matrix [out, in] with a scale a row."""
        return cls(*_quantized(matrix))

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.data.device

    def __getitem__(self, rows: slice) -> "Fp8Matrix":
        return Fp8Matrix(self.data[rows], self.scales[rows])

    def cut(self, part: Callable[[Tensor], Tensor], *, rows: bool) -> "Fp8Matrix":
        """`part` of its rows, or of its columns."""
        return Fp8Matrix(part(self.data), part(self.scales) if rows else self.scales)

    def product(self, hidden: Tensor) -> Tensor:
        """[N, out] of [N, in]."""
        tokens, scales = _quantized(hidden)
        # Its only name: torch has none that is public.
        scaled_mm: Callable[..., Tensor] = vars(torch)["_scaled_mm"]
        return scaled_mm(tokens, self.data.t(), scales, self.scales.t(), out_dtype=hidden.dtype)


Matrix = Tensor | Fp8Matrix


def product(hidden: Tensor, matrix: Matrix, bias: Tensor | None = None) -> Tensor:
    """[N, out] of `hidden` [N, in] and a matrix [out, in], plus a bias [out]."""
    if not isinstance(matrix, Fp8Matrix):
        return linear(hidden, matrix, bias)
    found = matrix.product(hidden)
    return found if bias is None else found + bias


def _quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 of [N, n] and scales [N, 1]: the largest of each row is the largest that there is."""
    scales = rows.abs().amax(dim=1, keepdim=True).float().clamp(min=LEAST_SCALE) / LARGEST
    return (rows.float() / scales).clamp(-LARGEST, LARGEST).to(FP8), scales


def has_fp8_weights(fields: Fields) -> bool:
    """Whether a config's `quantization_config` says FP8 weights that `Fp8Matrix` holds; False without one.

    Raises:
        UserError: another quantisation, by the field that says so.
    """
    found: Any = fields.get("quantization_config")
    if found is None:
        return False
    method = found.get("quant_method") if isinstance(found, dict) else None
    if method == "fp8":
        if found.get("weight_block_size") is not None:
            raise _refused(fields, "weight_block_size", found["weight_block_size"], "a scale a matrix")
        return True
    if method != "compressed-tensors":
        raise _refused(fields, "quant_method", method, "fp8 or compressed-tensors")
    groups = found.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) and groups else [None]:
        weights: Any = group.get("weights") if isinstance(group, dict) else None
        kind = {name: weights.get(name) for name in ("type", "num_bits")} if isinstance(weights, dict) else weights
        if kind != {"type": "float", "num_bits": 8}:
            raise _refused(fields, "config_groups", kind, "weights of type float and num_bits 8")
        if weights.get("strategy") not in ("tensor", "channel"):
            raise _refused(fields, "strategy", weights.get("strategy"), "tensor or channel")
    return True


def _refused(fields: Fields, name: str, value: object, known: str) -> UserError:
    return fields.error(
        "quantization_config", f"has {name} {value!r}, which the runtime does not compute: expected {known}"
    )


def check_fp8(name: str, widths: dict[str, int], device: torch.device) -> None:
    """UserError unless products of such widths, by what they are called, can be computed on the device."""
    if device.type not in KEPT_ON:
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        raise UserError(
            f"{name}: FP8 weights need a GPU of compute capability 8.9, this one has {capability[0]}.{capability[1]}: "
            "take an unquantised checkpoint"
        )
    for what, width in widths.items():
        if width % STEP:
            raise UserError(
                f"{name}: FP8 products need multiples of {STEP}, {width} {what}: take a lower --tp, or an unquantised "
                "checkpoint"
            )
