"""The sections of a `Result` (`sim.results.schema`): what ran, on what, and what was counted.

Every field is an entry of result.json under the same name; `docs/results.md` explains each.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType, field, structs

from sim.engine.limits import TierName
from sim.options.scenario import Scenario

Option = bool | int | float | str | None


class Counts(Struct, kw_only=True, frozen=True):
    """What a run counts beside times."""

    swap_out_blocks: int
    """Blocks copied to the host for sequences that were preempted."""
    swap_in_blocks: int
    """Blocks copied back for swapped sequences (LayerKV counts its own way back, below)."""
    swap_space_exhausted: int
    """Preemptions that became recomputations because the host pool was full; vLLM 0.5.5 aborts there."""
    prefix_query_tokens: int = 0
    """Prompt tokens of requests that were admitted where prefixes are cached, each counted once."""
    prefix_hit_tokens: int
    """Prompt tokens that were cached when their requests were first admitted."""
    prefix_rehit_tokens: int
    """Tokens that were cached when preempted requests were admitted again."""
    prefix_evicted_blocks: int
    """Cached blocks that were given up for others."""
    ignored: dict[str, int]
    """Reason: requests ignored for it. Reasons that begin with `failed:` are failed copies and kernels, those with
    `rejected:` what a policy turned away for its SLOs."""
    # By name; which there are is the policy's business. In the file they stand among the others.
    policy: dict[str, int] = field(default_factory=dict)


class SLOClass(Struct, kw_only=True, frozen=True):
    """Requests of the same SLOs."""

    slos: str
    """As the trace has them, `ttft:500 tpot:50` (ms). Of requests that have none of their own: `--goodput`, or `none`
    where that is not given."""
    num_prompts: int
    """Requests that ended."""
    good: int
    """Of these, the ones that met all of them."""


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
    """In its iterations, waiting for copies over PCIe. None: live, where that cannot be told from computing."""
    engine_s: float | None
    """In its iterations, the GPU waiting for the engine's own processes. None: live."""
    passed_s: float
    """In the batch, or half prefilled, while an iteration computed others."""
    preempted_s: float
    """In no batch since it was first scheduled: preempted, paused, swapped out, parked, or between two engines."""
    tool_s: float | UnsetType = UNSET
    """With tools. Absent: none was called."""


class Scaling(Struct, kw_only=True, frozen=True):
    """Replicas that came and went (`--autoscale`). GPU-seconds count from when a replica is asked for until it has let
    go of its GPUs, start and draining included."""

    gpu_s: float
    """GPU-seconds of all replicas."""
    idle_share: float
    """Share of them in which no iteration was computed."""
    starting_share: float
    """Share of them in which the replica did not serve yet."""
    fixed_gpu_s: float
    """GPU-seconds of as many replicas as there were at most, all the time."""
    num_started: int
    """Replicas that were started, those at first left out."""
    most_replicas: int
    """The most that held GPUs at once."""
    mean_replicas: float
    """Replicas that held GPUs, mean over time."""
    asked_s: list[float]
    """When each replica was asked for, s; of engine 0 on, as all lists here."""
    ready_s: list[float]
    """From when on it served, s."""
    drained_from_s: list[float | None]
    """From when on it got no more requests, s. None: it stayed."""
    stopped_s: list[float | None]
    """When it let go of its GPUs, s. None: at the end."""


class TierUse(Struct, kw_only=True, frozen=True):
    """A tier below the GPU that keeps prefixes. Seconds are by price, each copy and computation as if alone."""

    tier: TierName
    """`host` or `disk`."""
    num_blocks: int
    """Blocks that it holds, of all engines."""
    hit_tokens: int
    """Tokens of prompts loaded from there; what was fetched from the disk before counts for the host."""
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
    """Time in which the lane worked, until the last copy, s; waiting for other lanes does not count."""


class LanesUse(Struct, kw_only=True, frozen=True):
    """Use of the instance's lanes, by their names in the file."""

    compute: LaneUse = field(name="GPU compute")
    """Computation."""
    h2d: LaneUse = field(name="PCIe host to device")
    """Copies to the GPU, over the links of all its GPUs."""
    d2h: LaneUse = field(name="PCIe device to host")
    """Copies to the host."""
    host: LaneUse | UnsetType = field(name="Engine host", default=UNSET)
    """The engine's own processes. Absent: prices are all there is, or a live run."""
    disk_read: LaneUse | UnsetType = field(name="Disk read", default=UNSET)
    """Copies from disk to host. Absent: there were none."""
    disk_write: LaneUse | UnsetType = field(name="Disk write", default=UNSET)
    """Copies from host to disk. Absent: there were none."""

    def by_name(self) -> dict[str, LaneUse]:
        """The lanes under the names that people read."""
        uses = zip(self.__struct_encode_fields__, structs.astuple(self), strict=True)
        return {name: use for name, use in uses if use is not UNSET}


class EngineUse(Struct, kw_only=True, frozen=True):
    """One engine of several."""

    engine: int
    """Its place, from 0; those that prefill for others first."""
    role: Literal["both", "prefill", "decode"]
    """`both`, or what it does for others: `prefill`, `decode`."""
    gpu: str
    """Name of its GPU."""
    tp: int
    """GPUs in its tensor-parallel group."""
    num_prompts: int
    """Requests that ended there, completed or ignored, or went on to another engine."""
    num_gpu_blocks: int
    """Its GPU pool, blocks per GPU."""
    num_iterations: int
    """Its iterations."""
    num_preemptions: int
    """Its preemptions."""
    lanes: LanesUse
    """How long each of its lanes was in use, as above."""
    links: dict[str, LaneUse] | UnsetType = UNSET
    """The same of its links to others, `link out` and `link in`. Absent: it has none."""


class ErrorInterval(Struct, kw_only=True, frozen=True):
    """Where a measured value is to be expected, by how far off the simulation was on servers like this one."""

    low: float
    """The simulated value over the factor within which `share` of those rows lie; each configuration counts as one."""
    high: float
    """The simulated value times that factor."""
    median_ratio: float
    """Measured over simulated, the median of those rows; 1.3: servers took 1.3 times as long."""
    rows: int
    """Rows that it is drawn from."""
    configurations: int
    """What they are of: servers of a model in a format, of an engine's release, on so many GPUs."""
    alike: str
    """What those servers have in common with the run: layers, GPU, weights, parallelism, load, as far as enough do."""


class Accuracy(Struct, kw_only=True, frozen=True):
    """How far measured servers like the run's were off ([accuracy.md](accuracy.md#intervals))."""

    share: float
    """Share of such rows within the intervals, 0 to 1."""
    intervals: dict[str, ErrorInterval]
    """By metric, as the result names it. Missing: too few measured configurations are like it."""
    unknown: str | UnsetType = UNSET
    """Why the run, or some of its metrics, have none. Absent: no more is to be said."""


class UsedProfile(Struct, kw_only=True, frozen=True):
    """The fitted constants that priced (or, live, predicted) the run."""

    name: str
    """Name of the profile."""
    status: Literal["measured", "imported", "derived", "measured-from-server"]
    """`measured` on that GPU, `imported` from public tables, `derived` from specifications, or `measured-from-server`:
    fitted to the requests of one ([calibration.md](calibration.md))."""
    sha256: str
    """SHA-256 of its content, hexadecimal."""
    beyond_range: dict[str, float] | UnsetType = UNSET
    """What was priced beyond the range that the constants were fitted on: the most `tokens` of a prefill, sequences of
    a decode (`batch`), `context_tokens` of a decode. Absent: nothing was."""


class UsedEngineProfile(Struct, kw_only=True, frozen=True):
    """What the engine cost beside the GPU: host time, padded batches, front end."""

    name: str
    """Name of the engine profile ([calibration.md](calibration.md))."""
    sha256: str
    """SHA-256 of its content, hexadecimal."""
    assumed: list[str]
    """Those of its constants that were not measured."""


class Versions(Struct, kw_only=True, frozen=True):
    """What produced the result."""

    kvtwin: str
    """Version of the program."""
    compiled: bool | UnsetType = UNSET
    """Whether mypyc had compiled it ([speed.md](speed.md)); absent: no."""


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
    attention: str | UnsetType = UNSET
    """Kernels that attend: of prompts, and of what has KV cached; absent: an earlier version."""


def _resolved(option: str) -> Any:  # noqa: ANN401
    """The field of an option that a run has a value of, always."""
    metadata = Scenario.__dataclass_fields__[option].metadata
    return dataclasses.field(metadata={**metadata, "resolved": True})


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class ResolvedScenario(Scenario):
    """The scenario as it ran: the options in their order, some of them resolved, then what else they resolved to.

    An option that was not given is null in the file, or not there if it is `sparse`.
    """

    def __init__(self, **values: Any) -> None:  # noqa: ANN401
        """`values` of all fields. A dataclass writes it out for each of them, which takes each start milliseconds."""
        vars(self).update(values)

    block_size: int = _resolved("block_size")
    max_num_seqs: int = _resolved("max_num_seqs")
    max_num_batched_tokens: int = _resolved("max_num_batched_tokens")
    max_model_len: int = _resolved("max_model_len")
    enable_chunked_prefill: bool = _resolved("enable_chunked_prefill")
    enable_prefix_caching: bool = _resolved("enable_prefix_caching")
    policy: str
    """Name of the policy, without its options."""
    policy_options: dict[str, Option]
    """Options of the policy by name, defaults included; `kvtwin run --help all` explains them."""
    policy_parts: dict[str, str]
    """Name of each part: `order`, `batching`, `admission`, `memory`, `eviction`, `stage`."""
    num_gpu_blocks: int
    """GPU KV blocks (`block_size` tokens of all layers that keep KV), per GPU; of pools, as the next two, of the
    engines that prefill."""
    num_cpu_blocks: int
    """Host KV blocks, per GPU."""
    block_bytes: float
    """Bytes of a block, per GPU."""
