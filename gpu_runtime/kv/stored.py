"""The type that keys and values are stored in, where it is not the one they are computed in (`--kv-cache-dtype`).

fp8 has one scale per tensor, as in vLLM, and it is 1, vLLM's where a checkpoint names none: values are cast, and what
exceeds the type's range is cut to it rather than lost.
"""

import torch
from torch import Tensor

from sim.errors import UserError
from sim.specs.kv_format import KV_DTYPES

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def stored_dtype(name: str, computed: torch.dtype, device: torch.device | str) -> torch.dtype:
    """The type of `--kv-cache-dtype`; `auto` is the one that is computed in.

    UserError where the runtime, or the CUDA device, does not store it.
    """
    if name == "auto":
        return computed
    wanted = KV_DTYPES[name]
    found = TORCH_DTYPES.get(wanted.name)
    if found is None:
        raise UserError(f"--kv-cache-dtype: {name} is not computed by the runtime: use auto, bfloat16, fp8 or fp8_e5m2")
    if torch.device(device).type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major + minor / 10 < wanted.least_capability:
            raise UserError(
                f"--kv-cache-dtype: {name} needs compute capability {wanted.least_capability}, the device has "
                f"{major}.{minor}: use auto or fp8_e5m2"
            )
    return found


def finite_limit(dtype: torch.dtype) -> float:
    """Largest value of an 8-bit type; 0 for others, which take any value that is computed."""
    return torch.finfo(dtype).max if dtype in FLOAT8 else 0.0


def to_stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` as they are stored, 8-bit types as their bytes (`raw`)."""
    limit = finite_limit(dtype)
    if limit:
        return raw(values.clamp(-limit, limit).to(dtype))
    return values.to(dtype)


def raw(tensor: Tensor) -> Tensor:
    """A view of 8-bit floats as bytes, which torch can index and copy everywhere; other tensors as they are."""
    return tensor.view(torch.uint8) if tensor.dtype in FLOAT8 else tensor
