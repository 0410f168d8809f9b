"""`Profile`: the fitted constants that price time on a GPU, read from JSON with a strict schema.

The shipped ones lie in `calib/profiles/`. A data edge, not an import: this module finds the folder beside `sim`.
"""

import hashlib
from collections.abc import Collection, Sequence
from itertools import chain, pairwise
from math import inf, isfinite
from pathlib import Path
from typing import Any, Literal

import msgspec

from sim.cost.kernels import KernelTables, Point
from sim.errors import UserError
from sim.specs.hardware import HardwareSpec
from sim.specs.json_file import built_in_names, convert, find_file, once_of, read_json_object
from sim.specs.quantization import FORMATS, PRODUCT_FORMATS

SHIPPED = Path(__file__).parents[2] / "calib" / "profiles"

EXPERT_UNITS = {
    "expert_flops_per_s": "FLOP/s",
    "expert_bytes_per_s": "B/s",
    "expert_roofline_exponent": "1",
    "expert_activation_bytes_per_s": "B/s",
    "expert_launch_s": "s",
}
"""Constants of routed experts in 16 bits. Those of another type of weights have its name before theirs."""
EXPERT_QUANTIZATIONS = ("", *FORMATS)
"""Types of experts' weights that profiles may hold constants of: 16 bits, or a format; of FP8 in blocks."""
PRODUCT_UNITS: dict[str, tuple[str, str | float]] = {
    "flops_per_s": ("FLOP/s", "flops_per_s"),
    "roofline_exponent": ("1", "roofline_exponent"),
    "quantize_bytes_per_s": ("B/s", inf),
    "layer_overhead_s": ("s", "layer_overhead_s"),
}
"""Constants of products whose weights and inputs are quantised: unit, and what counts where a profile lacks them."""


def product_name(quantization: str, name: str) -> str:
    """What a constant of `PRODUCT_UNITS`, or `linear_factors`, is called for a format; empty: 16 bits."""
    return f"{quantization}_{name}" if quantization else name


def expert_names(quantization: str) -> dict[str, str]:
    """Constants of `EXPERT_UNITS`, and what they are called for a type of weights."""
    return {name: f"{quantization}_{name}" if quantization else name for name in EXPERT_UNITS}


LATENT_UNITS = {
    "latent_decode_flops_per_s": "FLOP/s",
    "latent_prefill_flops_per_s": "FLOP/s",
    "latent_padding_tokens": "token",
    "latent_joined_bytes_per_s": "B/s",
    "latent_launch_s": "s",
}
"""Constants of latent attention (MLA) over KV of 16 bits: `sim.cost.latents`."""
GDN_UNITS = {
    "gdn_decode_bytes_per_s": "B/s",
    "gdn_decode_launch_s": "s",
    "gdn_prefill_tokens_per_s": "token/s",
    "gdn_prefill_heads": "1",
    "gdn_prefill_padding_tokens": "token",
    "gdn_conv_bytes_per_s": "B/s",
    "gdn_prefill_launch_s": "s",
}
"""Constants of Gated DeltaNet with heads of 128 elements: `sim.cost.gated_delta_net`."""
_EXPERTS = tuple(tuple(expert_names(quantization).values()) for quantization in EXPERT_QUANTIZATIONS)
KERNELS = (*_EXPERTS, tuple(LATENT_UNITS), tuple(GDN_UNITS))
"""Kinds of kernels with constants of their own; of each kind a profile has all or none."""
EXPERT_NAMES = frozenset(chain.from_iterable(_EXPERTS))
KERNEL_NAMES = EXPERT_NAMES | LATENT_UNITS.keys() | GDN_UNITS.keys()

ROOFLINE_UNITS = {
    "flops_per_s": "FLOP/s",
    **{product_name(kind, name): unit for kind in PRODUCT_FORMATS for name, (unit, _) in PRODUCT_UNITS.items()},
    "fp32_flops_per_s": "FLOP/s",
    "attention_flops_per_s": "FLOP/s",
    "attention_tile_tokens": "token",
    "attention_slots": "1",
    "attention_padding_tokens": "token",
    "attention_roofline_exponent": "1",
    "attention_idle_tile_s": "s",
    "hbm_bytes_per_s": "B/s",
    "kv_bytes_per_s": "B/s",
    "kv_padding_tokens": "token",
    "kv_padding_waves": "1",
    "longest_kv_bytes_per_s": "B/s",
    "fp8_kv_bytes_per_s": "B/s",
    "fp8_kv_padding_tokens": "token",
    "fp8_kv_layer_overhead_s": "s",
    "elementwise_bytes_per_s": "B/s",
    "elementwise_launch_s": "s",
    "roofline_exponent": "1",
    "layer_overhead_s": "s",
    "step_overhead_s": "s",
    "step_s_per_sequence": "s/sequence",
    "front_end_s": "s",
    "front_end_s_per_token": "s/token",
    "eager_layer_s": "s",
    "pieced_layer_s": "s",
    **{names[name]: EXPERT_UNITS[name] for names in map(expert_names, EXPERT_QUANTIZATIONS) for name in names},
    **LATENT_UNITS,
    **GDN_UNITS,
    "h2d_bytes_per_s": "B/s",
    "d2h_bytes_per_s": "B/s",
    "copy_lone_s": "s",
    "copy_setup_s": "s",
    "copy_launch_s": "s",
    "host_memcpy_bytes_per_s": "B/s",
    "allreduce_bytes_per_s": "B/s",
    "allreduce_latency_s": "s",
    "allreduce_chunk_s": "s",
    "allreduce_launch_s": "s",
    "alpha": "1",
    "beta": "1",
}
"""Constants of the forms `roofline` and `paper` and their units; rates are those achieved, per GPU.

`alpha` and `beta` are LayerKV's corrections of Eq. 3 (prefill over peak FLOP/s) and Eq. 4 (copy over the PCIe rate);
`roofline_exponent` is the sharpness p of the ridge between compute and memory (`sim.cost.model.ridge`);
`copy_lone_s` is what each piece of a copy costs where they are asked for one by one, `copy_setup_s` and `copy_launch_s`
what a call and each of its pieces cost where it asks for `sim.cost.model.BATCHED_COPIES` or more;
`allreduce_bytes_per_s` is NCCL's bus bandwidth; `allreduce_latency_s` is per step of the ring, 2 (G - 1) of them,
`allreduce_chunk_s` per chunk of the pipeline, `allreduce_launch_s` per all-reduce.
`step_overhead_s`, `step_s_per_sequence`, `eager_layer_s` and `pieced_layer_s` (the least that a layer of a pass with
prompts takes, whose kernels are launched one by one, or come from graphs with attention between them) are the host time
of the live runtime's own engine, where its iterations were timed whole: absent otherwise, and of no other engine
(`sim.cost.engine_profile`). `front_end_s` and
`front_end_s_per_token` are of a server that a profile was fitted to. `docs/calibration.md` has them all.
"""
GIVEN = "given by the user: "
"""Begins the source of a constant that was (`sim.cost.changed_profile`)."""
OPTIONAL: dict[str, str | float] = {
    **{product_name(kind, name): absent for kind in PRODUCT_FORMATS for name, (_, absent) in PRODUCT_UNITS.items()},
    "fp32_flops_per_s": "flops_per_s",
    "attention_tile_tokens": 0.0,
    "attention_slots": 0.0,
    "attention_padding_tokens": 0.0,
    "attention_roofline_exponent": 1.0,
    "attention_idle_tile_s": 0.0,
    "kv_bytes_per_s": "hbm_bytes_per_s",
    "kv_padding_tokens": 0.0,
    "kv_padding_waves": inf,
    "longest_kv_bytes_per_s": inf,
    "fp8_kv_bytes_per_s": "kv_bytes_per_s",
    "fp8_kv_padding_tokens": "kv_padding_tokens",
    "fp8_kv_layer_overhead_s": 0.0,
    "elementwise_bytes_per_s": inf,
    "elementwise_launch_s": 0.0,
    "copy_lone_s": 0.0,
    "copy_setup_s": 0.0,
    "allreduce_chunk_s": 0.0,
    "allreduce_launch_s": 0.0,
    "step_overhead_s": 0.0,
    "step_s_per_sequence": 0.0,
    "front_end_s": 0.0,
    "front_end_s_per_token": 0.0,
    "eager_layer_s": 0.0,
    "pieced_layer_s": 0.0,
}
"""Constants that a profile may lack, and what then counts: another constant, or a value at which their term is free."""
LINEAR_UNITS = {
    "prefill_base_s": "s",
    "prefill_s_per_token": "s/token",
    "prefill_s_per_square_token": "s/token^2",
    "decode_base_s": "s",
    "decode_s_per_sequence": "s/sequence",
    "decode_s_per_context_token": "s/token",
    "swap_s_per_block": "s/block",
    "copy_launch_s": "s",
}
"""Constants of the form `linear`: p0, p1, p2, d0, d1, d2, seconds per swapped block, and what of those each piece costs
whatever its size: a copy of one layer of a block costs it as well."""
UNITS = {"roofline": ROOFLINE_UNITS, "table": ROOFLINE_UNITS, "paper": ROOFLINE_UNITS, "linear": LINEAR_UNITS}
RANGES = {"FLOP/s": (1.0, 1e24), "B/s": (1.0, 1e24), "1": (0.01, 1e9)}
"""Least and most of a constant, by its unit; 1e9 s, tokens or sequences is the most of all others."""
MAY_BE_ZERO = frozenset(
    {"layer_overhead_s", "fp8_kv_padding_tokens", "copy_launch_s", "allreduce_latency_s"}
    | {product_name(kind, "layer_overhead_s") for kind in PRODUCT_FORMATS}
    | {name for name in KERNEL_NAMES if name.endswith(("_launch_s", "_padding_tokens"))}
    | LINEAR_UNITS.keys()
    | {name for name, absent in OPTIONAL.items() if absent == 0.0}
)
"""Constants that cost nothing at zero; the others divide or scale, and must be positive."""


class Constant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fitted value in SI units, its standard error (None: not fitted, or not known), and where it comes from."""

    value: float
    stderr: float | None
    unit: str
    source: str


class FittedRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Least and most of what the measurements covered; beyond it the profile extrapolates."""

    tokens: tuple[float, float] | None = None
    batch: tuple[float, float] | None = None
    context_tokens: tuple[float, float] | None = None


class LinearCoefficients(msgspec.Struct, frozen=True):
    """Prefill p0 + p1 tokens + p2 sum(len^2), decode d0 + d1 batch + d2 context tokens, swap per block; seconds."""

    prefill: tuple[float, float, float]
    decode: tuple[float, float, float]
    swap_s_per_block: float
    copy_launch_s: float


class ShortLinear(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The short file of a user's own coefficients."""

    form: Literal["linear"]
    prefill: tuple[float, float, float]
    decode: tuple[float, float, float]
    swap_s_per_block: float
    copy_launch_s: float = 0.0


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Constants of one GPU, with where they come from and how well they fit.

    Attributes:
        gpu: name of the hardware spec; "any" for a user's own linear coefficients.
        status: measured on that GPU by this project, imported from public tables, derived from a specification, or
            fitted to the requests of a server (measured-from-server).
        constants: those of `UNITS[form]`; those of `OPTIONAL` may be missing.
        residuals: errors of the fit, such as {"prefill_mape": 0.059}; in form `table` of its roofline.
        kernels: what the form `table` interpolates.
        all_reduce: by the number of GPUs, measured bytes and seconds of an all-reduce, rising: between them time is
            interpolated, beyond them it grows with the bytes. The constants price groups of other sizes.
        all_gather, reduce_scatter: the same of these; bytes are what each GPU has after the one, before the other.
        linear_factors: what the matrix products of a layer take over their roofline, by tokens, rising: between them
            the factor is interpolated, beyond them it is that of the edge. Of dense models alone.
        fp8_linear_factors, nvfp4_linear_factors: the same of products in these formats (absent: `linear_factors`).
        engine_profile: name of the engine profile of the server it was fitted to, which prices every policy on it.
    """

    name: str
    gpu: str
    status: Literal["measured", "imported", "derived", "measured-from-server"]
    form: Literal["roofline", "table", "linear", "paper"]
    constants: dict[str, Constant]
    provenance: dict[str, str]
    range: FittedRange | None = None
    residuals: dict[str, float] | None = None
    kernels: KernelTables | None = None
    all_reduce: dict[str, list[tuple[float, float]]] | None = None
    all_gather: dict[str, list[tuple[float, float]]] | None = None
    reduce_scatter: dict[str, list[tuple[float, float]]] | None = None
    linear_factors: list[Point] | None = None
    fp8_linear_factors: list[Point] | None = None
    nvfp4_linear_factors: list[Point] | None = None
    engine_profile: str | None = None

    def value(self, name: str) -> float:
        """One constant, in the unit of its name. UserError where the profile's form has none of that name."""
        constant = self.constants.get(name)
        if constant is None and self.form != "linear" and name in OPTIONAL:
            absent = OPTIONAL[name]
            return self.value(absent) if isinstance(absent, str) else absent
        if constant is None:
            raise UserError(
                f"profile {self.name}: field constants.{name} is missing in form {self.form!r}: "
                f"it has {', '.join(self.constants)}"
            )
        return constant.value

    def without(self, names: Collection[str]) -> "Profile":
        """The profile without the constants of these names."""
        kept = {name: constant for name, constant in self.constants.items() if name not in names}
        return msgspec.structs.replace(self, constants=kept)

    def factors(self, quantization: str) -> list[Point] | None:
        """What products of a format take over their roofline, those of 16 bits where it has none of its own."""
        own = getattr(self, product_name(quantization, "linear_factors"))
        return self.linear_factors if own is None else own

    def experts(self, quantization: str | None) -> dict[str, float] | None:
        """Constants of experts of that type by the names of `EXPERT_UNITS`; None where none were timed."""
        if quantization is None or expert_names(quantization)["expert_flops_per_s"] not in self.constants:
            return None
        return {name: self.value(own) for name, own in expert_names(quantization).items()}

    @property
    def latents(self) -> dict[str, float] | None:
        """Constants of `LATENT_UNITS`; None where no such kernels were timed."""
        return self._all_or_none(LATENT_UNITS)

    @property
    def gdn(self) -> dict[str, float] | None:
        """Constants of `GDN_UNITS`; None where no such kernels were timed."""
        return self._all_or_none(GDN_UNITS)

    def _all_or_none(self, names: Collection[str]) -> dict[str, float] | None:
        """Of a kind of kernels a profile has all constants or none (`KERNELS`)."""
        return None if self.constants.keys().isdisjoint(names) else {name: self.value(name) for name in names}

    @property
    def linear(self) -> LinearCoefficients | None:
        """The coefficients of the form `linear`; None in other forms."""
        if self.form != "linear":
            return None
        p0, p1, p2, d0, d1, d2, swap, launch = (self.value(name) for name in LINEAR_UNITS)
        return LinearCoefficients((p0, p1, p2), (d0, d1, d2), swap, launch)

    @property
    def content_hash(self) -> str:
        """SHA-256 (hex) of the profile as canonical JSON: the same for any order of fields and layout of the file."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()

    def to_json(self) -> bytes:
        """The profile as a file that `load_profile` reads back to an equal one."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


def shipped_profiles() -> list[str]:
    """Names that `load_profile` knows without a path."""
    return built_in_names(SHIPPED)


def default_profile(gpu_name: str) -> Profile:
    """The shipped profile of a GPU: measured if there is one, else imported, else derived. UserError if none."""
    for status in ("measured", "imported", "derived"):
        path = SHIPPED / f"{gpu_name.lower()}-{status}.json"
        if path.is_file():
            return _read(path)
    gpus = sorted({name.rpartition("-")[0] for name in shipped_profiles()})
    raise UserError(
        f"profile: none is shipped for gpu {gpu_name!r} (there are: {', '.join(gpus)}): give one with "
        "--profile; `kvtwin profile derive` makes one"
    )


def load_profile(name_or_path: str | None = None, gpu: HardwareSpec | str | None = None) -> Profile:
    """A shipped profile by name, a profile file, or with no name the default of `gpu`.

    Raises:
        UserError: unknown name, a file that breaks the schema, or a profile of another GPU than `gpu`.
    """
    gpu_name = gpu.name if isinstance(gpu, HardwareSpec) else gpu
    if name_or_path is None:
        if gpu_name is None:
            raise UserError("profile: neither a profile nor a gpu is given: name one, for example --gpu l20")
        return default_profile(gpu_name)
    path = find_file(name_or_path, SHIPPED, "profile")
    profile = _read(path)
    if gpu_name is not None and profile.gpu.lower() not in ("any", gpu_name.lower()):
        raise UserError(
            f"{path}: field gpu = {profile.gpu!r} is not the gpu simulated, {gpu_name!r}: "
            f"use a profile of {gpu_name}, or simulate {profile.gpu}"
        )
    return profile


def read_profile(path: Path | str) -> Profile:
    """The profile in a file, in full or in the short linear form; UserError names file, field, value and remedy."""
    path = Path(path)
    data = read_json_object(path)
    if "constants" not in data and data.get("form") == "linear":
        return _short_linear(data, path)
    constants = data.get("constants")
    if isinstance(constants, dict):
        for name, constant in constants.items():
            convert(constant, Constant, path, f"constants.{name}")
    profile = convert(data, Profile, path)
    _check_constants(profile, path)
    _check_numbers(profile, path)
    _check_all_reduce(profile, path)
    _check_factors(profile, path)
    if (profile.form == "table") != (profile.kernels is not None):
        raise UserError(
            f"{path}: field kernels belongs to form table, and form table needs it: this is {profile.form!r}"
        )
    fault = profile.kernels.fault() if profile.kernels else ""
    if fault:
        raise UserError(f"{path}: field kernels.{fault}")
    return profile


_read = once_of(SHIPPED, read_profile)


def _check_all_reduce(profile: Profile, path: Path) -> None:
    measured = ((name, getattr(profile, name) or {}) for name in ("all_reduce", "all_gather", "reduce_scatter"))
    for name, gpus, points in ((name, gpus, points) for name, groups in measured for gpus, points in groups.items()):
        where = f"{path}: field {name}.{gpus}"
        if not gpus.isdecimal() or int(gpus) < 2:
            raise UserError(f"{where}: is not a number of GPUs from 2 on: name the group by how many it has")
        sizes = [size for size, _ in points]
        if not points or sizes[0] <= 0 or any(b <= a for a, b in pairwise(sizes)):
            raise UserError(f"{where}: give points [bytes, seconds] in order of bytes, which are more than 0")
        for _, seconds in points:
            _check_number(seconds, where, zero=False)
            _check_range(seconds, where, "s")


def _check_factors(profile: Profile, path: Path) -> None:
    for field in (product_name(kind, "linear_factors") for kind in ("", *PRODUCT_FORMATS)):
        points = getattr(profile, field)
        if points is None:
            continue
        where, tokens = f"{path}: field {field}", [tokens for tokens, _ in points]
        if profile.form == "linear":
            raise UserError(f"{where} corrects a roofline: form 'linear' has none; remove it")
        if not tokens or tokens[0] < 1 or any(b <= a for a, b in pairwise(tokens)):
            raise UserError(f"{where}: give points [tokens, factor] in order of tokens, which are 1 or more")
        for _, factor in points:
            _check_number(factor, where, zero=False)
            _check_range(factor, where, "1")


def _check_constants(profile: Profile, path: Path) -> None:
    units = UNITS[profile.form]
    for name in units:
        if name not in profile.constants and name not in OPTIONAL and not _may_lack(profile, name):
            raise UserError(
                f"{path}: field constants.{name} is missing: give it in {units[name]} (form {profile.form!r} needs it)"
            )
    for name, constant in profile.constants.items():
        where = f"{path}: field constants.{name}"
        if name not in units:
            raise UserError(f"{where} is not a constant of form {profile.form!r}: remove it; known: {', '.join(units)}")
        if constant.unit != units[name]:
            raise UserError(f"{where}.unit = {constant.unit!r}: expected {units[name]!r}: convert value and stderr")
        _check_number(constant.value, f"{where}.value", zero=name in MAY_BE_ZERO)
        _check_range(constant.value, f"{where}.value", units[name])
        if constant.stderr is not None:
            _check_number(constant.stderr, f"{where}.stderr", zero=True)
        if not constant.source:
            raise UserError(f"{where}.source is empty: say where the value comes from")
    _check_longest(profile, path)


def _check_longest(profile: Profile, path: Path) -> None:
    """How long a block walks the longest context says nothing without the kernel's tiles, and how many go at once."""
    name = "longest_kv_bytes_per_s"
    needed = [own for own in ("attention_tile_tokens", "attention_slots") if name in profile.constants]
    missing = [own for own in needed if not profile.value(own)]
    if missing:
        raise UserError(
            f"{path}: field constants.{name} = {profile.value(name):g} B/s counts only where one kernel does prompts "
            f"and decodes: give {' and '.join(missing)} as well, or remove it"
        )


def _may_lack(profile: Profile, name: str) -> bool:
    """Whether a constant is one of kernels of which the profile has none."""
    return any(name in kind and not any(own in profile.constants for own in kind) for kind in KERNELS)


def _check_numbers(profile: Profile, path: Path) -> None:
    for field, value in (profile.residuals or {}).items():
        _check_number(value, f"{path}: field residuals.{field}", zero=True)
    limits = profile.range or FittedRange()
    for field in FittedRange.__struct_fields__:
        pair = getattr(limits, field)
        for bound in pair or ():
            _check_number(bound, f"{path}: field range.{field}", zero=True)
        if pair and pair[0] > pair[1]:
            raise UserError(f"{path}: field range.{field} = {list(pair)}: put the lower limit first")


def _check_number(value: float, where: str, *, zero: bool) -> None:
    if not isfinite(value):
        raise UserError(f"{where} = {value} is not a finite number: measure it again or give an estimate")
    if value < 0 or (value == 0 and not zero):
        raise UserError(f"{where} = {value} must be {'zero or more' if zero else 'more than zero'}: correct the value")


def _check_range(value: float, where: str, unit: str) -> None:
    least, most = RANGES.get(unit, (0.0, 1e9))
    if value and not least <= value <= most:
        raise UserError(f"{where} = {value} {unit} is not between {least:g} and {most:g}: is it in this unit?")


def _short_linear(data: dict[str, Any], path: Path) -> Profile:
    """A user's own coefficients: {"form": "linear", "prefill": [3], "decode": [3], "swap_s_per_block": s}."""
    short = convert(data, ShortLinear, path)
    given = (*short.prefill, *short.decode, short.swap_s_per_block, short.copy_launch_s)
    fields = [f"{part}[{i}]" for part in ("prefill", "decode") for i in range(3)] + list(LINEAR_UNITS)[6:]
    for field, value in zip(fields, given, strict=True):
        _check_number(value, f"{path}: field {field}", zero=True)
        _check_range(value, f"{path}: field {field}", "s")
    return linear_profile(path.stem, given, path.name)


def linear_profile(name: str, values: Sequence[float], file: str) -> Profile:
    """A profile of form `linear` from the values of `LINEAR_UNITS`, in that order, as `file` gives them."""
    constants = {
        unit_name: Constant(value, None, unit, f"given by the user in {file}")
        for (unit_name, unit), value in zip(LINEAR_UNITS.items(), values, strict=True)
    }
    return Profile(name, "any", "measured", "linear", constants, {"file": file})
