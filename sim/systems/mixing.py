"""The parts by name, and how a system is built from names: what `composition` and `--policy NAME:part=...` speak.

Memory comes first, then the stage and the eviction that steer it, then the others. A part reads its options from the
preset where that has them, else from options of its own kind given with it, else from their defaults. A part's module
is loaded when somebody builds the part.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from math import inf
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from sim.engine.limits import Deployment, Limits
from sim.errors import UserError
from sim.systems.adaptive_options import AdaptiveOptions
from sim.systems.ellm_options import TokenWiseOptions
from sim.systems.fastserve_options import MlfqOptions
from sim.systems.hand_over_options import HandOverOptions, MixedPoolOptions
from sim.systems.hcache_options import StatesOptions, split_of
from sim.systems.kvpr_options import PartialRecomputeOptions
from sim.systems.layerkv_options import Equations, LayerKVOptions, remembered
from sim.systems.mempool_options import MemPoolOptions
from sim.systems.mooncake_options import ConductorOptions
from sim.systems.offload_options import OffloadOptions
from sim.systems.radix_options import RadixOptions
from sim.systems.tiered_options import RetentionOptions, TieredOptions
from sim.systems.vllm_v1_options import VllmV1Options

if TYPE_CHECKING:
    from sim.engine.scheduler import Parts
    from sim.parts.base import Admission, Eviction, Memory, Order, Stage
    from sim.parts.batching.base import Batching
    from sim.parts.memory.layer_blocks import LayerBlocks
    from sim.parts.offload.connector import OffloadingConnector
    from sim.parts.stage.partial_recompute import BlockSeconds
    from sim.systems.base import Policy

HAND_OVER = "hand-over"
"""The stage of policies that serve with a pool of engines for prefills and one for decodes."""
MEMPOOL = "mempool"
"""The memory of engines that cache prefixes and send one another what they lack."""
STORED = "stored"
"""The memory of engines whose prompts a store of the cluster may have."""
UNIFIED = ("unified", "paced")
"""Batchings with vLLM v1's one budget, whose host time is its."""
KINDS = ("order", "batching", "admission", "memory", "eviction", "stage")
MIN_BATCHED_TOKENS = 2048
CHUNKED_BATCHED_TOKENS = 512
"""vLLM 0.5.5's token budgets: max(max_model_len, 2048), with chunked prefill 512."""

Options = TypeVar("Options")


def options_among(given: Iterable[object], kind: type[Options]) -> Options:
    """The first of a kind, or its defaults."""
    return next((found for found in given if isinstance(found, kind)), None) or kind()


class Builder:
    """Builds one system for one engine."""

    def __init__(
        self,
        policy: "Policy",
        names: Mapping[str, str],
        options: tuple[object, ...],
        limits: Limits,
        deployment: Deployment,
    ) -> None:
        self.policy, self.names, self.limits, self.deployment = policy, names, limits, deployment
        self._options = options

    def options(self, kind: type[Options]) -> Options:
        """The options of a kind: the preset itself, those given with a part, or the defaults."""
        return options_among((self.policy, *self._options), kind)

    def parts(self) -> "Parts":
        """One part of each kind. UserError where they do not go together."""
        from sim.engine.scheduler import Parts

        names = self.names
        self.memory = MEMORIES[names["memory"]].build(self)
        self.stage = STAGES[names["stage"]].build(self)
        if self.memory.splits_layers and not self.stage.brings_layers_back:
            raise UserError("memory=layers leaves layers on the host: it goes with stage=promote or stage=stream")
        return Parts(
            order=ORDERS[names["order"]].build(self),
            memory=self.memory,
            admission=ADMISSIONS[names["admission"]].build(self),
            eviction=EVICTIONS[names["eviction"]].build(self),
            stage=self.stage,
            batching=BATCHINGS[names["batching"]].build(self),
        )

    @property
    def offloading(self) -> OffloadOptions:
        """What is offloaded."""
        options = self.options(OffloadOptions)
        if options.offloads and self.names["batching"] != "unified":
            raise UserError(f"--kv-offloading-size: goes with batching=unified, not {self.names['batching']}")
        return options

    # -- what several need -------------------------------------------------------------------------------------------

    def equations(self) -> Equations:
        """LayerKV's Eq. 3 and 4."""
        return Equations(self.deployment, self.limits.block_size, printed=self.options(LayerKVOptions).printed)

    def layer_blocks(self, wanted_by: str) -> "LayerBlocks":
        """The memory, which must hold layers apart."""
        from sim.parts.memory.layer_blocks import LayerBlocks

        if not isinstance(self.memory, LayerBlocks):
            raise UserError(f"{wanted_by} moves single layers: it goes with memory=layers")
        return self.memory


Part = TypeVar("Part", covariant=True)


class Known(msgspec.Struct, Generic[Part], frozen=True):
    """A part that has a name: how to build it, and the options that it reads."""

    build: Callable[[Builder], Part]
    options: type | None = None


class KnownMemory(Known["Memory"], frozen=True):
    """A memory, and whether it can keep what others may hit."""

    can_cache_prefixes: bool = False
    always_caches: bool = False
    runs_live: bool = True
    """Whether a device can carry out its plans."""
    tells_blocks: bool = False
    """Whether plans can say which blocks are shared, as a device needs to know."""


class KnownEviction(Known["Eviction"], frozen=True):
    """An eviction, and whether it moves sequences whole, whose blocks nobody may share then."""

    moves_whole: bool = False


class KnownBatching(Known["Batching"], frozen=True):
    """A batching and the budget that goes with it."""

    splits_prompts: bool | None = None
    """None: as `--enable-chunked-prefill` says."""
    tokens: Callable[[int, bool], int] = lambda length, chunked: (
        CHUNKED_BATCHED_TOKENS if chunked else max(length, MIN_BATCHED_TOKENS)
    )
    """Default token budget, from the longest context and whether prompts are split."""


def _fcfs(b: Builder) -> "Order":
    from sim.parts.order.fcfs import Fcfs

    return Fcfs()


def _priority(b: Builder) -> "Order":
    from sim.parts.order.priority import Priority

    return Priority()


def _mlfq(b: Builder) -> "Order":
    from sim.parts.order.mlfq import Mlfq

    options = b.options(MlfqOptions)
    return Mlfq(
        b.deployment.cost.prefill_s,
        quantum_s=options.quantum_ms / 1e3,
        factor=options.quantum_factor,
        num_levels=options.num_levels,
        starvation_s=options.starvation_s,
        check_every=options.starvation_check,
    )


def _triage(b: Builder) -> "Order":
    from sim.parts.order.triage import Triage

    options = b.options(AdaptiveOptions)
    return Triage(options.ttft_slo_ms / 1e3, options.tpot_slo_ms / 1e3, options.patience_s)


def _lpm(b: Builder) -> "Order":
    from sim.parts.order.cache_aware import CacheAware

    return CacheAware(longest=b.options(RadixOptions).lpm_longest)


def _dfs_weight(b: Builder) -> "Order":
    from sim.parts.order.cache_aware import CacheAware

    return CacheAware(by_branch=True)


def _radix(b: Builder) -> "Memory":
    if not b.limits.enable_prefix_caching:
        return _paged(b)
    from sim.parts.memory.radix import RadixMemory

    return RadixMemory(b.limits)


def _chunks(b: Builder) -> "Memory":
    if not b.limits.enable_prefix_caching:
        return _paged(b)
    from sim.parts.memory.shared_reads import ChunkMemory

    return ChunkMemory(b.limits)


def _group_memory(b: Builder) -> "Memory":
    if not b.limits.enable_prefix_caching:
        return _paged(b)
    if b.names["order"] != "prefix-groups":
        raise UserError("memory=prefix-groups keeps what order=prefix-groups plans: give both, or neither")
    from sim.parts.memory.shared_reads import GroupMemory

    return GroupMemory(b.limits)


def _prefix_groups(b: Builder) -> "Order":
    from sim.parts.order.prefix_groups import PrefixGroups

    return PrefixGroups()


def _paged(b: Builder) -> "Memory":
    if b.offloading.offloads:
        from sim.parts.memory.offloading import OffloadingMemory, OffloadingPaged

        kind = OffloadingMemory if b.limits.enable_prefix_caching else OffloadingPaged
        return kind(b.limits, _connector(b, b.offloading))
    if b.limits.enable_prefix_caching:
        from sim.parts.memory.prefix import PrefixMemory

        return PrefixMemory(b.limits, in_flight_hits=b.names["batching"] in UNIFIED)
    from sim.parts.memory.paged import PagedMemory

    if b.limits.window is not None and b.limits.window.blocks is not None:
        from sim.parts.memory.windowed import WindowedMemory

        return WindowedMemory(b.limits)
    return PagedMemory(b.limits)


def _tiered(b: Builder) -> "Memory":
    from sim.parts.memory.tiered import TieredMemory
    from sim.parts.offload.worth import Worth

    if b.offloading.offloads:
        raise UserError("--kv-offloading-size: goes with memory=paged, not tiered, which keeps prefixes itself")
    if b.limits.window is not None and b.limits.window.blocks is not None:
        raise UserError(f"memory=tiered: {b.deployment.model.name} has layers that keep a window only")
    worth = Worth(b.deployment.cost, b.limits, b.deployment.model.num_layers)
    options, in_flight_hits = b.options(TieredOptions), b.names["batching"] in UNIFIED
    block_bytes = b.limits.block_bytes * b.deployment.tensor_parallel_size
    num_blocks = options.num_disk_blocks(block_bytes)
    if not num_blocks:
        return TieredMemory(b.limits, worth, in_flight_hits=in_flight_hits)
    from sim.parts.memory.on_disk import DiskTieredMemory
    from sim.parts.offload.disk import Disk

    disk = Disk(
        num_blocks,
        block_bytes,
        read_bytes_per_s=options.disk_read_gb_per_s * 1e9,
        write_bytes_per_s=options.disk_write_gb_per_s * 1e9,
        latency_s=options.disk_latency_us / 1e6,
        s_per_block=options.disk_block_us / 1e6,
    )
    return DiskTieredMemory(b.limits, worth, disk, look_ahead=options.look_ahead, in_flight_hits=in_flight_hits)


def _retained(b: Builder) -> "Memory":
    from sim.parts.memory.retained import RetentionMemory
    from sim.parts.offload.worth import Worth

    if b.limits.window is not None and b.limits.window.blocks is not None:
        raise UserError(f"memory=retained: {b.deployment.model.name} has layers that keep a window only")
    worth = Worth(b.deployment.cost, b.limits, b.deployment.model.num_layers)
    return RetentionMemory(b.limits, worth, b.options(RetentionOptions).swap_out_threshold)


def _saved_states(b: Builder) -> "Memory":
    from sim.parts.memory.saved_states import SavedStates

    if b.names["eviction"] not in ("swap", "recompute"):
        raise UserError("memory=saved-states needs no copies to let go of a sequence: it goes with eviction=swap")
    _each_layer_keeps_all(b)
    split, share, _ = split_of(b.deployment, b.limits)
    return SavedStates(b.limits, split, share)


def _tiered_states(b: Builder) -> "Memory":
    from sim.parts.memory.saved_states import TieredStates
    from sim.parts.offload.worth import Worth

    _each_layer_keeps_all(b)
    cost = b.deployment.cost
    split, share, state = split_of(b.deployment, b.limits)
    limits = replace(b.limits, num_cpu_blocks=int(b.limits.num_cpu_blocks / share))
    return TieredStates(limits, Worth(cost, limits, b.deployment.model.num_layers), cost, split, share, state)


def _each_layer_keeps_all(b: Builder) -> None:
    """UserError for models whose layers share their KV or keep a window."""
    model = b.deployment.model
    if model.num_stored_layers < model.num_layers or b.limits.window is not None:
        raise UserError(f"memory={b.names['memory']}: layers of {model.name} share their KV or keep a window")


def _hosted_layers(b: Builder) -> "Memory":
    from sim.parts.memory.hosted_layers import HostedLayers

    _each_layer_keeps_all(b)
    limits = replace(b.limits, num_cpu_blocks=int(b.limits.num_cpu_blocks / (1.0 + _block_seconds(b).input_share)))
    return HostedLayers(limits, b.deployment.model.num_layers, lambda tokens: 0)


def _block_seconds(b: Builder) -> "BlockSeconds":
    from sim.engine.plan import Direction
    from sim.parts.stage.partial_recompute import BlockSeconds

    model, cost, size = b.deployment.model, b.deployment.cost, b.limits.block_size
    layer_bytes, input_bytes = b.limits.block_bytes / model.num_layers, size * model.hidden_bytes_per_token_layer
    copied_s = (
        cost.copy_s(input_bytes, 0, Direction.H2D) if b.options(PartialRecomputeOptions).partial_recompute else inf
    )
    return BlockSeconds(
        copied_s, cost.project_s(size),
        cost.copy_s(layer_bytes, cost.num_copies(1, 1), Direction.H2D), input_bytes / layer_bytes,
    )  # fmt: skip


def _connector(b: Builder, options: OffloadOptions) -> "OffloadingConnector":
    from sim.parts.offload.connector import OffloadingConnector
    from sim.parts.offload.host_cache import HostCache
    from sim.parts.offload.worth import Worth

    if b.limits.window is not None and b.limits.window.blocks is not None:
        remedy = "--disable-hybrid-kv-cache-manager keeps whole prefixes"
        raise UserError(f"--kv-offloading-size: {b.deployment.model.name} has layers that keep a window only; {remedy}")
    num_chunks = options.num_chunks(b.limits.block_bytes * b.deployment.tensor_parallel_size)
    layers = b.deployment.model.num_layers
    return OffloadingConnector(
        HostCache(num_chunks, options.eviction_policy, options.store_threshold),
        b.limits.block_size,
        blocks_per_chunk=options.blocks_per_chunk,
        prompts_only=not options.offload_outputs,
        shares_loads=b.limits.enable_prefix_caching,
        load_s_per_block=options.load_s_per_block,
        store_s_per_block=options.store_s_per_block,
        worth=Worth(b.deployment.cost, b.limits, layers, options.load_s_per_block),
    )


def _stored(b: Builder) -> "Memory":
    from sim.parts.memory.stored import StoredMemory

    if b.names["stage"] != HAND_OVER or EVICTIONS[b.names["eviction"]].moves_whole:
        raise UserError(
            "memory=stored is for engines that prefill for others: it goes with stage=hand-over and eviction=recompute"
        )
    return StoredMemory(b.limits)


def _mempool(b: Builder) -> "Memory":
    options = b.options(MemPoolOptions)
    if not b.limits.enable_prefix_caching or (b.deployment.role == "decode" and options.caching == "prefill"):
        from sim.parts.memory.paged import PagedMemory

        return PagedMemory(b.limits)
    from sim.parts.memory.mempool import MemPool

    if b.limits.window is not None and b.limits.window.blocks is not None:
        raise UserError(f"memory=mempool: {b.deployment.model.name} has layers that keep a window only")
    return MemPool(b.limits, returns=options.caching == "return", in_flight_hits=b.names["batching"] == "unified")


def _reserved(b: Builder) -> "Memory":
    from sim.parts.memory.reserved import ReservedMemory

    return ReservedMemory(b.limits)


def _layer_blocks(b: Builder) -> "Memory":
    from sim.parts.memory.layer_blocks import LayerBlocks

    model = b.deployment.model
    if model.num_stored_layers < model.num_layers:
        raise UserError(
            f"memory=layers keeps each layer's KV apart, and layers of {model.name} share theirs: use memory=paged"
        )
    return LayerBlocks(b.limits, b.deployment.model.num_layers, remembered(b.equations().minimum_layers))


def _token_wise_memory(b: Builder) -> "Memory":
    from sim.parts.memory.token_wise import Kernels, TokenWiseMemory

    options, model = b.options(TokenWiseOptions), b.deployment.model
    if b.names["admission"] != "token-wise":
        raise UserError("memory=token-wise is told what to leave uncached: it goes with admission=token-wise")
    _each_layer_keeps_all(b)
    times = options.step_times(b.deployment, b.limits.block_size)
    kernels = Kernels(times, options.fused, options.overlapped, options.threads, options.map_lookup_us / 1e6)
    return TokenWiseMemory(
        b.limits, model.num_layers, options.layers_per_block, kernels,
        least_ratio=options.least_uncached_ratio, by_longest=options.printed,
    )  # fmt: skip


def _token_wise_admission(b: Builder) -> "Admission":
    from sim.parts.admission.token_wise import BatchAndRatio

    options = b.options(TokenWiseOptions)
    times = options.step_times(b.deployment, b.limits.block_size)
    return BatchAndRatio(
        times, options.tpot_slo_ms / 1e3,
        printed=options.printed, fused=options.fused, overlapped=options.overlapped,
    )  # fmt: skip


def _watermark(b: Builder) -> "Admission":
    from sim.parts.admission.watermark import Watermark

    return Watermark(b.limits.num_gpu_blocks)


def _memory_alone(b: Builder) -> "Admission":
    from sim.parts.admission.watermark import Watermark

    return Watermark(b.limits.num_gpu_blocks, 0.0)


def _slack(b: Builder) -> "Admission":
    from sim.parts.admission.slack import SlackAdmission

    options = b.options(LayerKVOptions)
    return SlackAdmission(
        b.limits.num_gpu_blocks,
        b.equations().prefill_s,
        options.tpot_slo_ms / 1e3,
        drop_irrecoverable=options.drop_irrecoverable,
        lengths_known=options.lengths_known,
    )


def _recompute(b: Builder) -> "Eviction":
    from sim.parts.eviction.recompute import Recompute

    return Recompute()


def _swap(b: Builder) -> "Eviction":
    from sim.parts.eviction.swap import Swap

    return Swap()


def _layer_offload(b: Builder) -> "Eviction":
    from sim.parts.eviction.layer_offload import LayerOffload
    from sim.parts.stage.promote import Promote

    options = b.options(LayerKVOptions)
    if not isinstance(b.stage, Promote):
        raise UserError("eviction=layer-offload parks whom it offloads: it goes with stage=promote or stage=stream")
    return LayerOffload(
        b.layer_blocks("eviction=layer-offload"),
        b.stage,
        horizon_steps=options.horizon_steps,
        threshold=options.threshold,
        one_block_a_step=options.printed,
        lengths_known=options.lengths_known,
    )


def _proactive_swap(b: Builder) -> "Eviction":
    from sim.parts.eviction.proactive_swap import ProactiveSwap

    return ProactiveSwap(b.options(MlfqOptions).min_free_blocks)


def _park(b: Builder) -> "Eviction":
    from sim.parts.eviction.park import Park

    return Park()


def _direct(b: Builder) -> "Stage":
    from sim.parts.stage.direct import Direct

    return Direct()


def _promote(b: Builder) -> "Stage":
    from sim.parts.stage.promote import Promote

    return Promote(b.layer_blocks("stage=promote"))


def _stream(b: Builder) -> "Stage":
    from sim.parts.stage.stream import Stream

    options = b.options(LayerKVOptions)
    return Stream(b.layer_blocks("stage=stream"), options.tpot_slo_ms / 1e3 if options.slo_aware else None)


def _partial_recompute(b: Builder) -> "Stage":
    from sim.parts.stage.partial_recompute import PartialRecompute

    if b.names["memory"] != "hosted-layers":
        raise UserError("stage=partial-recompute decodes from the host alone: it goes with memory=hosted-layers")
    return PartialRecompute(b.layer_blocks("stage=partial-recompute"), _block_seconds(b))


def _hand_over(b: Builder) -> "Stage":
    role, options = b.deployment.role, b.options(HandOverOptions)
    if role != "both" and b.options(MixedPoolOptions).mixed_pool:
        from sim.parts.stage.mixed import Mixed

        if b.names["memory"] != "paged" or EVICTIONS[b.names["eviction"]].moves_whole:
            raise UserError("mixed-pool: goes with memory=paged and eviction=recompute")
        return Mixed(options.waiting_share, options.layer_wise, options.blocking_pull)
    if role == "prefill":
        from sim.parts.stage.hand_over import HandOver

        return HandOver(options.layer_wise)
    if role == "decode":
        from sim.parts.stage.pull import Pull

        return Pull(options.waiting_share, options.blocking_pull)
    # An engine that does both hands over to itself.
    return _direct(b)


def _vllm055(b: Builder) -> "Batching":
    if b.limits.enable_chunked_prefill:
        from sim.parts.batching.vllm055_chunked import Vllm055Chunked

        return Vllm055Chunked()
    from sim.parts.batching.prefill_first import PrefillFirst

    return PrefillFirst()


def _request_level(b: Builder) -> "Batching":
    from sim.parts.batching.request_level import RequestLevel

    return RequestLevel()


def _iteration_level(b: Builder) -> "Batching":
    from sim.parts.batching.iteration_level import IterationLevel

    return IterationLevel()


def _sarathi(b: Builder) -> "Batching":
    from sim.parts.batching.stall_free import StallFree

    return StallFree(1)


def _fastgen(b: Builder) -> "Batching":
    from sim.parts.batching.stall_free import StallFree

    return StallFree()


def _quanta(b: Builder) -> "Batching":
    from sim.parts.batching.quanta import Quanta

    return Quanta()


def _unified(b: Builder) -> "Batching":
    from sim.parts.batching.unified import Unified

    options = b.options(VllmV1Options)
    if b.offloading.offloads:
        from sim.parts.batching.unified_offloading import UnifiedOffloading as Unified
    return Unified(
        long_prefill_threshold=options.long_prefill_token_threshold,
        adaptive=options.long_prefill_token_threshold_adaptive,
        # vLLM counts its null block.
        watermark_blocks=int(options.watermark * (b.limits.num_gpu_blocks + 1)),
        reserve_whole_prompt=options.scheduler_reserve_full_isl,
        schedules_ahead=options.async_scheduling,
    )


def _paced(b: Builder) -> "Batching":
    from sim.parts.batching.paced import Paced

    return Paced(long_prefill_threshold=0, adaptive=False, watermark_blocks=0, reserve_whole_prompt=True)


def _sglang(b: Builder) -> "Batching":
    from sim.parts.batching.sglang import Sglang

    options = b.options(RadixOptions)
    return Sglang(conservativeness=options.schedule_conservativeness, max_new_tokens=options.max_new_tokens)


ORDERS: "dict[str, Known[Order]]" = {
    "fcfs": Known(_fcfs),
    "priority": Known(_priority),
    "mlfq": Known(_mlfq, MlfqOptions),
    "triage": Known(_triage, AdaptiveOptions),
    "lpm": Known(_lpm, RadixOptions),
    "dfs-weight": Known(_dfs_weight),
    "prefix-groups": Known(_prefix_groups),
}
MEMORIES: dict[str, KnownMemory] = {
    "paged": KnownMemory(_paged, can_cache_prefixes=True, tells_blocks=True),
    "radix": KnownMemory(_radix, can_cache_prefixes=True),
    "chunks": KnownMemory(_chunks, can_cache_prefixes=True),
    "prefix-groups": KnownMemory(_group_memory, can_cache_prefixes=True),
    "tiered": KnownMemory(_tiered, TieredOptions, can_cache_prefixes=True, always_caches=True, runs_live=False),
    "retained": KnownMemory(_retained, RetentionOptions, can_cache_prefixes=True, always_caches=True, runs_live=False),
    "reserved": KnownMemory(_reserved),
    MEMPOOL: KnownMemory(_mempool, MemPoolOptions, can_cache_prefixes=True, runs_live=False),
    STORED: KnownMemory(_stored, ConductorOptions),
    "layers": KnownMemory(_layer_blocks, LayerKVOptions),
    "saved-states": KnownMemory(_saved_states, StatesOptions, runs_live=False),
    "tiered-states": KnownMemory(
        _tiered_states, StatesOptions, runs_live=False, can_cache_prefixes=True, always_caches=True
    ),
    "hosted-layers": KnownMemory(_hosted_layers, PartialRecomputeOptions, runs_live=False),
    "token-wise": KnownMemory(_token_wise_memory, TokenWiseOptions, runs_live=False),
}
ADMISSIONS: "dict[str, Known[Admission]]" = {
    "watermark": Known(_watermark),
    "memory": Known(_memory_alone),
    "slack": Known(_slack, LayerKVOptions),
    "token-wise": Known(_token_wise_admission, TokenWiseOptions),
}
EVICTIONS: dict[str, KnownEviction] = {
    "recompute": KnownEviction(_recompute),
    "swap": KnownEviction(_swap, moves_whole=True),
    "layer-offload": KnownEviction(_layer_offload, LayerKVOptions),
    "park": KnownEviction(_park),
    "proactive-swap": KnownEviction(_proactive_swap, MlfqOptions, moves_whole=True),
}
STAGES: "dict[str, Known[Stage]]" = {
    "direct": Known(_direct),
    "promote": Known(_promote, LayerKVOptions),
    "stream": Known(_stream, LayerKVOptions),
    "partial-recompute": Known(_partial_recompute, PartialRecomputeOptions),
    HAND_OVER: Known(_hand_over, HandOverOptions),
}
BATCHINGS: dict[str, KnownBatching] = {
    "vllm": KnownBatching(_vllm055),
    "request-level": KnownBatching(_request_level, splits_prompts=False),
    "iteration-level": KnownBatching(_iteration_level, splits_prompts=False),
    "sarathi": KnownBatching(_sarathi, splits_prompts=True),
    "fastgen": KnownBatching(_fastgen, splits_prompts=True, tokens=lambda length, chunked: 768),
    "quanta": KnownBatching(_quanta, splits_prompts=False),
    "unified": KnownBatching(_unified, VllmV1Options, splits_prompts=True, tokens=lambda length, chunked: 8192),
    "paced": KnownBatching(_paced, splits_prompts=True, tokens=lambda length, chunked: 8192),
    "sglang": KnownBatching(_sglang, RadixOptions, splits_prompts=True, tokens=lambda length, chunked: 8192),
}
CATALOGUE: dict[str, Mapping[str, Known[object]]] = {
    "order": ORDERS,
    "batching": BATCHINGS,
    "admission": ADMISSIONS,
    "memory": MEMORIES,
    "eviction": EVICTIONS,
    "stage": STAGES,
}
"""Kind -> name -> part."""


def default_tokens(batching: str, max_model_len: int, *, chunked: bool) -> int:
    """The token budget of a batching where the user names none."""
    return BATCHINGS[batching].tokens(max_model_len, chunked)


def known_part(kind: str, name: str) -> Known[object]:
    """The part of that kind and name; UserError with the nearest right one otherwise."""
    found = CATALOGUE[kind].get(name)
    if found is None:
        near = get_close_matches(name, CATALOGUE[kind], n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"{kind}={name}: no such part; {hint}known: {', '.join(CATALOGUE[kind])}")
    return found
