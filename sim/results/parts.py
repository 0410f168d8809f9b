"""The parts of a `Result` (`sim.results.schema`): what ran, on what, and what was counted.

Every field is an entry of result.json under the same name; `docs/results.md` explains each.
"""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType, field, structs

from sim.engine.limits import TierName

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


class ResolvedScenario(Struct, kw_only=True, frozen=True):
    """The scenario as it ran: the fields of `sim.scenario.Scenario`, in their order, then what they resolved to."""

    trace: str | None
    """Trace file that was replayed; None: a workload."""
    trace_format: str | None
    """Format of the trace, where it was given."""
    time_unit: str | None
    """Unit of the trace's timestamps, where it was given."""
    hash_block_tokens: int | None
    """Tokens of a block of the hash ids, where they were given."""
    zero_tokens: str | None
    """What rows of 0 tokens were; None: refused."""
    tokenizer: str | None
    """What counted the trace's prompts in words."""
    default_prompt_tokens: int | None
    """Length of the trace's prompts that had none."""
    default_output_tokens: int | None
    """Length of the trace's outputs that had none."""
    workload: str | None
    """Generated traffic; None: a trace."""
    num_prompts: int | None
    """Requests asked for; None: all of the trace, or 1000 of a workload."""
    request_rate: float | None
    """Requests/s asked for; infinite: all at once ("inf" in the file)."""
    burstiness: float
    """Gamma shape of the arrivals."""
    rate_scale: float
    """Factor by which arrivals were sped up."""
    clip: int | None
    """Context length to which requests were cut, tokens."""
    input_len: int | None
    """Prompt tokens of the workload."""
    output_len: int | None
    """Output tokens of the workload."""
    range_ratio: float | UnsetType = UNSET
    """Lengths lay within 1 +- this of the mean; absent, as those that follow, where not given."""
    end_rate: float | UnsetType = UNSET
    """Requests/s at the end of a ramp."""
    burst_factor: float | UnsetType = UNSET
    """Rate in a burst over that outside."""
    burst_period: float | UnsetType = UNSET
    """From burst to burst, s."""
    burst_duration: float | UnsetType = UNSET
    """Length of a burst, s."""
    turns: float | UnsetType = UNSET
    """Mean turns of a session."""
    think_time: float | UnsetType = UNSET
    """Mean time from a turn to the next, s."""
    shared_prefix: int | UnsetType = UNSET
    """Tokens of a system prompt."""
    prefix_groups: int | UnsetType = UNSET
    """System prompts."""
    max_context: int | UnsetType = UNSET
    """Tokens that no session exceeded."""
    max_concurrency: int | UnsetType = UNSET
    """Most requests in flight; absent: any number."""
    closed_sessions: bool | UnsetType = UNSET
    """Whether turns waited for the answers before them; absent: they did not."""
    seed: int
    """Of everything random."""
    model: str
    """As it was named: built-in model, or path of a config.json."""
    dtype: str
    """Of weights and KV cache, as it was named."""
    quantization: str | UnsetType = UNSET
    """Of the weights as they are loaded, as it was named; absent: as the model's config.json says."""
    kv_cache_dtype: str
    """Of the KV cache, as it was named."""
    gpu: str
    """As it was named."""
    tp: int
    """GPUs in the tensor-parallel group."""
    pipeline_parallel_size: int | UnsetType = UNSET
    """Stages of an engine's pipeline; absent where not given."""
    replicas: int | UnsetType = UNSET
    """Engines behind the router; absent where not given."""
    router: str | UnsetType = UNSET
    """As it was named; absent where it was not."""
    prefill_replicas: int | UnsetType = UNSET
    """Engines that only prefill; absent, as those that follow, where not given."""
    decode_replicas: int | UnsetType = UNSET
    """Engines that only decode."""
    link_gbps: float | UnsetType = UNSET
    """Link of each engine to others, Gbit/s in each direction."""
    prefill_tp: int | UnsetType = UNSET
    """GPUs of an engine that prefills."""
    decode_tp: int | UnsetType = UNSET
    """GPUs of an engine that decodes."""
    prefill_pipeline_parallel_size: int | UnsetType = UNSET
    """Stages of an engine that prefills."""
    decode_pipeline_parallel_size: int | UnsetType = UNSET
    """Stages of an engine that decodes."""
    prefill_gpu: str | UnsetType = UNSET
    """Their GPU, as it was named."""
    decode_gpu: str | UnsetType = UNSET
    """Their GPU, as it was named."""
    prefill_profile: str | UnsetType = UNSET
    """Their constants, as they were named."""
    decode_profile: str | UnsetType = UNSET
    """Their constants, as they were named."""
    profile: str | None
    """As it was named; None: the GPU's own."""
    engine_profile: str | UnsetType = UNSET
    """Host time and CUDA graphs of the engine, as it was named; absent: the policy's."""
    cost_form: str | None
    """Form of the cost model; None: the profile's."""
    num_gpu_blocks_override: int | None
    """GPU KV blocks asked for; None: sized from memory."""
    num_cpu_blocks_override: int | None
    """Host KV blocks asked for; None: sized from the swap space."""
    block_size: int
    """Tokens of a KV block."""
    max_num_seqs: int
    """Most sequences in one iteration."""
    max_num_batched_tokens: int
    """Most tokens in one iteration, resolved."""
    max_model_len: int
    """Longest context, tokens, resolved."""
    enable_chunked_prefill: bool
    """Resolved."""
    enable_prefix_caching: bool
    """Resolved."""
    gpu_memory_utilization: float
    """Share of GPU memory that the engine may use."""
    disable_hybrid_kv_cache_manager: bool
    """Whether layers with a sliding window keep the whole context too."""
    swap_space: float | None
    """Host memory for KV asked for, GiB per GPU; None: the policy's default."""
    goodput: list[str]
    """SLOs as `NAME:MILLISECONDS`."""

    policy: str
    """Name of the policy, without its options."""
    policy_options: dict[str, Option]
    """Options of the policy by name, defaults included."""
    policy_parts: dict[str, str]
    """Name of each part: order, batching, admission, memory, eviction, stage."""
    num_gpu_blocks: int
    """GPU KV blocks (`block_size` tokens, all layers that keep KV), per GPU."""
    num_cpu_blocks: int
    """Host KV blocks, per GPU."""
    block_bytes: float
    """Bytes of a block, per GPU."""
