"""`EngineProfile`: what a serving engine costs beside the GPU's work, read from JSON with a strict schema.

A GPU's constants (`sim.cost.profile`) say what kernels take. What the engine's own processes do for an iteration, which
batch sizes it captured as CUDA graphs and what its front end adds to a request belong to the engine, on any GPU. The
shipped ones lie in `sim/cost/engines/`.
"""

import hashlib
import re
from collections.abc import Callable
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Literal

import msgspec

from sim.cost.host import Host
from sim.cost.profile import GIVEN, Profile
from sim.errors import UserError
from sim.specs.json_file import built_in_names, convert, find_file, once_of, read_json_object
from sim.specs.memory import EngineMemory

SHIPPED = Path(__file__).parent / "engines"
OURS, OURS_AHEAD = "kvtwin", "kvtwin-async"
"""The live runtime's own engine, and the same where it schedules ahead."""
OF_POLICY = "own"
"""Instead of a profile's name: that of the engine of the policy's time (`Policy.own_engine_profile`)."""
TODAYS, TODAYS_SERIAL = "vllm-v1-async", "vllm-v1"
"""What prices every policy unless another is asked for, and where no host time can be hidden."""
OF_RELEASE = "vllm=="
"""Instead of a profile's name: before a release of vLLM."""
RELEASES = (
    ((0, 5), (0, 5), "vllm-0.5"),
    ((0, 8), (0, 13), TODAYS_SERIAL),
    ((0, 14), (999, 999), TODAYS),
)
"""First and last release of vLLM, and what has its engine as it comes. V1 is the default from 0.8 on; its scheduling is
in series unless asked until PR 27614, asynchronous by default from 0.14 on."""
UNSORTED, GRAPHS_COUNTED, SCALES_DROPPED = (0, 17), (0, 21), (0, 24)
"""First releases that sample without sorting the vocabulary, that count CUDA graphs before they size the pool, and that
keep scales of MXFP4 once (PR 46549 of June 2026; which release has it is assumed)."""
UNITS = {"host_base_s": "s", "host_s_per_sequence": "s/sequence", "front_end_s": "s"}
"""Constants and their units. An iteration of n sequences takes the host `host_base_s` + n `host_s_per_sequence`; a
request spends `front_end_s` in the HTTP server and the tokeniser, before it is scheduled and on its answers' way."""
OPTIONAL_UNITS = {
    "sampling_s_per_logit": "s",
    "front_end_s_per_token": "s/token",
    "eager_layer_s": "s",
    "pieced_layer_s": "s",
    "eager_kernel_s": "s",
}
"""Zero where absent. What the GPU takes for each token that it samples and each entry of the vocabulary, beside the LM
head: nothing for the most likely token, a sort where top-k and top-p cut the rest off. What a request spends in the
front end for each token of its prompt, before it is scheduled: the tokeniser's time, cached prefix or not. The least
that a layer, and that a kernel (`sim.cost.launches`), takes which the host launches by itself: in iterations for which
no graph was captured (`graphs_of`). The least that a layer takes of an iteration with prompts whose attention runs
between graphs."""
GRAPH_STRIDE = 16
"""Between graphs beyond the profile's sizes, where larger ones are asked for: vLLM v1's from 256 tokens on."""
MEMORY_UNITS = dict.fromkeys(EngineMemory.__struct_fields__, "B")
"""What the engine takes of a GPU's memory; where absent as `EngineMemory` has it."""
KNOWN_UNITS = {**UNITS, **OPTIONAL_UNITS, **MEMORY_UNITS}
MEASURED = {
    "step_overhead_s": "host_base_s",
    "step_s_per_sequence": "host_s_per_sequence",
    "eager_layer_s": "eager_layer_s",
    "pieced_layer_s": "pieced_layer_s",
    "front_end_s": "front_end_s",
    "front_end_s_per_token": "front_end_s_per_token",
}
"""Constants of a profile that are the engine's it was measured with, and what they are called here."""


class EngineConstant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value in SI units, where it comes from, and how well it is known."""

    value: float
    unit: str
    status: Literal["measured", "derived", "assumed"]
    """Timed on that engine, worked out from others' published times, or neither."""
    source: str


class EngineProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """What an engine adds to the GPU's times.

    Attributes:
        host: whether the host's part of an iteration is added to the GPU's (`serial`), or runs behind the iteration
            before (`hidden`), so that an iteration lasts as long as the longer of the two.
        graph_batch_sizes: sizes captured as CUDA graphs, rising; a decode batch is padded to the next one. None: none.
        graph_source: where the sizes come from.
        graphs_of: whether iterations with prompts run from them as well (`all`), or those of decodes alone.
        constants: those of `UNITS`, and any of `OPTIONAL_UNITS` and `MEMORY_UNITS`.
        block_copies: whether the keys and the values of each layer of a block are copied apart, or the block as one.
    """

    name: str
    engine: str
    host: Literal["serial", "hidden"]
    graph_batch_sizes: tuple[int, ...]
    graph_source: str
    constants: dict[str, EngineConstant]
    block_copies: Literal["layer", "block"] = "layer"
    graphs_of: Literal["decodes", "all"] = "decodes"

    def value(self, name: str) -> float:
        """One constant, in the unit of its name; zero for one of `OPTIONAL_UNITS` that is absent."""
        if name in OPTIONAL_UNITS and name not in self.constants:
            return 0.0
        return self.constants[name].value

    @property
    def assumed(self) -> list[str]:
        """Constants that were not measured."""
        return [name for name, constant in self.constants.items() if constant.status == "assumed"]

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 (hex) of the profile as canonical JSON."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()

    def host_time(self) -> Host:
        """The host's part of iterations."""
        return Host(self.value("host_base_s"), self.value("host_s_per_sequence"), hidden=self.host == "hidden")

    def front_end(self) -> tuple[float, float]:
        """What a request spends in the HTTP server and the tokeniser, s, and for a token of its prompt, s/token."""
        return self.value("front_end_s"), self.value("front_end_s_per_token")

    def memory(self) -> EngineMemory:
        """What it takes of each GPU's memory; no graphs where it captures none."""
        known = {name: self.constants[name].value for name in MEMORY_UNITS if name in self.constants}
        return EngineMemory(**known if self.graph_batch_sizes else known | {"graph_bytes_per_layer": 0.0})

    def sized(self, max_num_seqs: int, max_cudagraph_capture_size: int | None = None) -> "EngineProfile":
        """With the graphs that an engine of so many sequences captures.

        vLLM v1 captures as far as it is asked to, else twice as many tokens as sequences, and no more than the sizes
        here (`VllmConfig._set_cudagraph_sizes`). Engines whose graphs are of decodes alone need no more than these.
        """
        sizes, most = self.graph_batch_sizes, max_cudagraph_capture_size
        if not sizes or (most is None and self.graphs_of == "decodes"):
            return self
        if most is None:
            most = min(2 * max_num_seqs, sizes[-1])
        sizes += tuple(range(sizes[-1] + GRAPH_STRIDE, most + 1, GRAPH_STRIDE))
        return msgspec.structs.replace(self, graph_batch_sizes=tuple(size for size in sizes if size <= most))

    def padding(self) -> Callable[[int], int]:
        """The tokens that a decode batch's linear layers compute: the next captured size, or its own beyond them."""
        sizes = self.graph_batch_sizes
        padded = list(range(sizes[-1] + 1)) if sizes else []
        for below, size in zip((0, *sizes), sizes, strict=False):
            padded[below + 1 : size + 1] = [size] * (size - below)
        most = len(padded) - 1
        return lambda batch: padded[batch] if batch <= most else batch

    def measured_by(self, profile: Profile) -> "EngineProfile":
        """With what a profile found: our own engine's host time by a calibration, whatever a fitted server ran.

        Raises:
            UserError: such a constant that the user gave, where nothing would ask for it.
        """
        of_ours = self.name in (OURS, OURS_AHEAD) and profile.status == "measured"
        if "step_overhead_s" not in profile.constants or not (of_ours or profile.status == "measured-from-server"):
            for name, own in MEASURED.items():
                if name in profile.constants and profile.constants[name].source.startswith(f"{GIVEN}{name}"):
                    raise UserError(
                        f"profile {profile.name}: {name} is of the engine that the profile was measured with, and "
                        f"{self.name} prices this run; give --engine-profile a file with another {own}"
                    )
            return self
        constants = dict(self.constants)
        for name, own in MEASURED.items():
            found = profile.constants.get(name)
            if found is not None:
                status = "assumed" if found.source.startswith("carried over") else "measured"
                source = f"{name} of {profile.name}: {found.source}"
                constants[own] = EngineConstant(found.value, KNOWN_UNITS[own], status, source)
        return msgspec.structs.replace(self, constants=constants)


def shipped_engines() -> list[str]:
    """Names that `load_engine_profile` knows without a path."""
    return built_in_names(SHIPPED)


def release_of(name: str) -> tuple[int, int] | None:
    """The release that `vllm==X.Y` or `vllm==X.Y.Z` names; None of a profile's. UserError where it is none."""
    if not name.startswith(OF_RELEASE):
        return None
    found = re.fullmatch(r"(\d+)\.(\d+)(\.\w+)?", name.removeprefix(OF_RELEASE))
    if found is None:
        raise UserError(f"--engine {name}: is no release of vLLM; write it as vllm==0.11 or vllm==0.11.2")
    return int(found[1]), int(found[2])


def profile_of_release(name: str) -> str:
    """Name of the shipped profile of a release of vLLM as it comes; a name that is none of a release is itself.

    UserError for a release whose engine no profile is of.
    """
    release = release_of(name)
    if release is None:
        return name
    profile = next((profile for first, last, profile in RELEASES if first <= release <= last), None)
    if profile is None:
        raise UserError(
            f"--engine {name}: no engine profile is of that release; there are such of 0.5 and of 0.8 and later "
            "(vLLM v1); name one, or give a file"
        )
    return profile


def load_engine_profile(name_or_path: str) -> EngineProfile:
    """A shipped engine profile by name or release, or a file; UserError names file, field, value and remedy."""
    profile = _read(find_file(profile_of_release(name_or_path), SHIPPED, "engine profile"))
    release = release_of(name_or_path)
    if release is None or release >= SCALES_DROPPED:
        return profile
    unlike = MEMORY_UNITS if release < UNSORTED else ("graph_bytes_per_layer",) if release < GRAPHS_COUNTED else ()
    constants = {name: constant for name, constant in profile.constants.items() if name not in unlike}
    constants["mxfp4_left_bytes"] = EngineConstant(1 / 32, "B", "derived", "PR 46549 of vllm-project/vllm")
    return msgspec.structs.replace(profile, constants=constants)


def _engine_profile(path: Path) -> EngineProfile:
    data = read_json_object(path)
    constants = data.get("constants")
    if isinstance(constants, dict):
        for name, constant in constants.items():
            convert(constant, EngineConstant, path, f"constants.{name}")
    profile = convert(data, EngineProfile, path)
    _check(profile, path)
    return profile


_read = once_of(SHIPPED, _engine_profile)


MOST = {"B": 1e12}
MOST_S = 3600.0
"""No engine's process takes an hour for an iteration, or a terabyte of a GPU."""


def _check(profile: EngineProfile, path: Path) -> None:
    for name, unit in KNOWN_UNITS.items():
        constant = profile.constants.get(name)
        where = f"{path}: field constants.{name}"
        if constant is None:
            if name not in UNITS:
                continue
            raise UserError(f"{where} is missing: give it in {unit}")
        if constant.unit != unit:
            raise UserError(f"{where}.unit = {constant.unit!r}: expected {unit!r}: convert the value")
        most = MOST.get(unit, MOST_S)
        if not 0 <= constant.value <= most:
            raise UserError(f"{where}.value = {constant.value} must be zero to {most:g} {unit}: correct the value")
        if not constant.source:
            raise UserError(f"{where}.source is empty: say where the value comes from")
    for name in profile.constants.keys() - KNOWN_UNITS.keys():
        raise UserError(f"{path}: field constants.{name} is not known: remove it; known: {', '.join(KNOWN_UNITS)}")
    sizes = profile.graph_batch_sizes
    if any(size < 1 for size in sizes) or any(b <= a for a, b in pairwise(sizes)):
        raise UserError(f"{path}: field graph_batch_sizes = {list(sizes)}: give sizes from 1 on, each larger")
