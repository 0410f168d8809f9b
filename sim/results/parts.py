"""The parts of a `Result` (`sim.results.schema`): what ran, on what, and what was counted.

Every field is an entry of result.json under the same name; `docs/results.md` explains each.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType, field, structs

from sim.engine.limits import TierName
from sim.scenario import Scenario

Option = bool | int | float | str | None


class Counts(Struct, kw_only=True, frozen=True):
    """What a run counts beside times. In the file the policy's own counters stand among the others."""

    swap_out_blocks: int
    """Whole blocks that preempted sequences had copied to the host."""
    swap_in_blocks: int
    """Whole blocks copied back for swapped sequences; LayerKV copies layers back and counts them itself."""
    swap_space_exhausted: int
    """Preemptions that became recomputations because the host pool was full."""
    prefix_query_tokens: int = 0
    """Prompt tokens of requests that were admitted where prefixes are cached, each counted once."""
    prefix_hit_tokens: int
    """Prompt tokens that were cached when their requests were first admitted."""
    prefix_rehit_tokens: int
    """Tokens that were cached when preempted requests were admitted again."""
    prefix_evicted_blocks: int
    """Cached blocks that were given up for others."""
    ignored: dict[str, int]
    """Requests ignored, by reason."""
    policy: dict[str, int] = field(default_factory=dict)
    """The policy's own counters, by name; which there are is the policy's business."""


class LatencyParts(Struct, kw_only=True, frozen=True):
    """Where the mean end-to-end latency of completed requests went, s; the parts add up to it.

    Seconds of an iteration are seconds of each request in it, whatever it does for them.
    """

    queue_s: float
    """From arrival to first scheduled."""
    prefill_s: float
    """In iterations that computed its prompt."""
    decode_s: float
    """In iterations that gave it a token."""
    recompute_s: float
    """In iterations that computed again what a preemption had thrown away."""
    copies_s: float | None
    """In its iterations, while they waited for copies over PCIe; None where that cannot be told from computing."""
    engine_s: float | None
    """In its iterations, while the GPU waited for the engine's own processes; None likewise."""
    passed_s: float
    """In the batch, or half prefilled, while an iteration computed others."""
    preempted_s: float
    """In no batch since it was first scheduled: preempted, paused, swapped out, parked, or between two engines."""


class TierUse(Struct, kw_only=True, frozen=True):
    """A tier below the GPU that keeps prefixes. Seconds are by price, each copy and computation as if alone."""

    tier: TierName
    """Which."""
    num_blocks: int
    """Blocks that it holds, of all engines."""
    hit_tokens: int
    """Tokens of prompts loaded from there; those hit on the GPU are the other prefix hits."""
    num_loads: int
    """Loads."""
    stored_blocks: int
    """Blocks copied there."""
    evicted_blocks: int
    """Blocks that gave way there."""
    saved_s: float
    """By which loads were shorter than computing the same again, s."""
    lost_s: float
    """By which others were longer, s."""


class LaneUse(Struct, kw_only=True, frozen=True):
    """How long one lane was in use."""

    busy_s: float
    """Time in which the lane worked, s."""


class LanesUse(Struct, kw_only=True, frozen=True):
    """Use of the instance's lanes, by their names in the file."""

    compute: LaneUse = field(name="GPU compute")
    """Computation."""
    h2d: LaneUse = field(name="PCIe host to device")
    """Copies to the GPU."""
    d2h: LaneUse = field(name="PCIe device to host")
    """Copies to the host."""
    host: LaneUse | UnsetType = field(name="Engine host", default=UNSET)
    """The engine's own processes; absent where prices are all there is."""
    disk_read: LaneUse | UnsetType = field(name="Disk read", default=UNSET)
    """Copies from disk to host; absent where there were none."""
    disk_write: LaneUse | UnsetType = field(name="Disk write", default=UNSET)
    """Copies from host to disk; absent where there were none."""

    def by_name(self) -> dict[str, LaneUse]:
        """The lanes under the names that people read."""
        uses = zip(self.__struct_encode_fields__, structs.astuple(self), strict=True)
        return {name: use for name, use in uses if use is not UNSET}


class EngineUse(Struct, kw_only=True, frozen=True):
    """One engine of several."""

    engine: int
    """Its place, from 0."""
    role: Literal["both", "prefill", "decode"]
    """What it does of a request."""
    gpu: str
    """Name of its GPU."""
    tp: int
    """GPUs in its tensor-parallel group."""
    num_prompts: int
    """Requests that ended there, completed or ignored, or went on to another engine."""
    num_gpu_blocks: int
    """GPU KV blocks, per GPU."""
    num_iterations: int
    """Iterations."""
    num_preemptions: int
    """Times a sequence lost its place among those decoding, or its KV."""
    lanes: LanesUse
    """How long each lane was in use."""
    links: dict[str, LaneUse] | UnsetType = UNSET
    """The same of its links to others, by name; absent where it has none."""


class UsedProfile(Struct, kw_only=True, frozen=True):
    """The fitted constants that priced (or, live, predicted) the run."""

    name: str
    """Of the profile."""
    status: Literal["measured", "imported", "derived", "measured-from-server"]
    """Where its constants come from: that GPU, public tables, specifications, or requests of a server."""
    sha256: str
    """Of the constants' content, hexadecimal."""
    beyond_range: dict[str, float] | UnsetType = UNSET
    """What was priced beyond the fitted range: quantity (tokens, batch, context_tokens), most seen. Absent if nothing
    was."""


class UsedEngineProfile(Struct, kw_only=True, frozen=True):
    """What the engine cost beside the GPU: host time, padded batches, front end."""

    name: str
    """Of the engine profile."""
    sha256: str
    """Of its content, hexadecimal."""
    assumed: list[str]
    """Those of its constants that nobody measured."""


class Versions(Struct, kw_only=True, frozen=True):
    """What produced the result."""

    kvtwin: str
    """Version of the program."""


class Machine(Struct, kw_only=True, frozen=True):
    """What executed a live run."""

    device: str
    """The GPU's or the CPU's name."""
    torch: str
    """Version of torch."""
    dtype: str
    """Type of the weights and of the KV cache."""
    threads: str
    """Threads that torch may use."""


def _resolved(option: str) -> Any:  # noqa: ANN401
    """The field of an option that a run has a value of, always."""
    metadata = Scenario.__dataclass_fields__[option].metadata
    return dataclasses.field(metadata={**metadata, "resolved": True})


@dataclass(frozen=True, kw_only=True)
class ResolvedScenario(Scenario):
    """The scenario as it ran: the options in their order, some of them resolved, then what else they resolved to.

    An option that was not given is null in the file, or not there if it is `sparse`.
    """

    block_size: int = _resolved("block_size")
    max_num_seqs: int = _resolved("max_num_seqs")
    max_num_batched_tokens: int = _resolved("max_num_batched_tokens")
    max_model_len: int = _resolved("max_model_len")
    enable_chunked_prefill: bool = _resolved("enable_chunked_prefill")
    enable_prefix_caching: bool = _resolved("enable_prefix_caching")
    policy: str
    """Name of the policy, without its options."""
    policy_options: dict[str, Option]
    """Options of the policy by name, defaults included; `kvtwin run --help` explains them."""
    policy_parts: dict[str, str]
    """Name of each part: `order`, `batching`, `admission`, `memory`, `eviction`, `stage`."""
    num_gpu_blocks: int
    """GPU KV blocks (`block_size` tokens of all layers that keep KV), per GPU; of pools, as the next two, of the
    engines that prefill."""
    num_cpu_blocks: int
    """Host KV blocks, per GPU."""
    block_bytes: float
    """Bytes of a block, per GPU."""
