"""Rotary positions as a config gives them: the base, and how frequencies are stretched for longer contexts."""

import math
from typing import Any

import msgspec

from sim.errors import UserError
from sim.specs.hf_fields import Fields


class LinearScaling(msgspec.Struct, frozen=True, tag="linear"):
    """Every frequency divided by `factor` (position interpolation, Chen et al. 2023)."""

    factor: float


class Llama3Scaling(msgspec.Struct, frozen=True, tag="llama3"):
    """Llama 3.1: waves longer than the old context / `low_freq_factor` are stretched `factor` times, short ones kept.

    Between the old context / `low_freq_factor` and / `high_freq_factor` both are blended linearly.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


RopeScaling = LinearScaling | Llama3Scaling


def read_rope(fields: Fields, default_theta: float) -> tuple[float, RopeScaling | None]:
    """Base and scaling of a Hugging Face config, in its older spelling or that of transformers 5.

    Raises:
        UserError: a type of scaling that is not computed, partial rotation, or a number that is none.
    """
    field = "rope_parameters" if "rope_parameters" in fields else "rope_scaling"
    given = fields.get(field) or {}
    if not isinstance(given, dict):
        raise fields.error(field, "must be an object or null")
    if fields.get("partial_rotary_factor") not in (None, 1, 1.0) or given.get("partial_rotary_factor", 1) != 1:
        raise fields.error("partial_rotary_factor", "is not computed by the runtime: expected 1")
    base = given.get("rope_theta", fields.get("rope_theta"))
    theta = default_theta if base is None else _number({"rope_theta": base}, "rope_theta", fields)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, LinearScaling(_number(given, "factor", fields))
    if kind != "llama3":
        raise UserError(
            f"{fields.path}: field {field}.rope_type = {kind!r} is not computed by the runtime: "
            "known: default, linear, llama3"
        )
    low, high = (_number(given, f"{side}_freq_factor", fields) for side in ("low", "high"))
    if low >= high:
        raise UserError(f"{fields.path}: field {field}.low_freq_factor = {low} must be below high_freq_factor {high}")
    original = _number(given, "original_max_position_embeddings", fields)
    return theta, Llama3Scaling(_number(given, "factor", fields), low, high, int(original))


def _number(given: dict[str, Any], field: str, fields: Fields) -> float:
    value = given.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UserError(f"{fields.path}: field {field} = {value!r} must be a positive number: correct it")
    return float(value)
