"""How each memory is built, and with what it goes."""

from dataclasses import replace
from typing import TYPE_CHECKING

from sim.errors import UserError
from sim.kv.offload_options import OffloadOptions
from sim.kv.tiered_options import RetentionOptions, TieredOptions
from sim.parts.batching.unified_options import VllmV1Options
from sim.systems.builder import HAND_OVER, Builder, KnownMemory
from sim.systems.ellm.options import TokenWiseOptions
from sim.systems.hcache.options import StatesOptions, split_of
from sim.systems.kvpr.options import PartialRecomputeOptions
from sim.systems.layerkv.options import Equations, LayerKVOptions, remembered
from sim.systems.memserve.options import MemPoolOptions
from sim.systems.mooncake.options import ConductorOptions

if TYPE_CHECKING:
    from sim.kv.memory import Memory
    from sim.kv.tiers.connector import OffloadingConnector
    from sim.kv.tiers.worth import Worth


def radix(b: Builder) -> "Memory":
    if not b.limits.enable_prefix_caching:
        return paged(b)
    from sim.kv.radix import RadixMemory

    return RadixMemory(b.limits)


def chunks(b: Builder) -> "Memory":
    if not b.limits.enable_prefix_caching:
        return paged(b)
    from sim.kv.shared_reads import ChunkMemory

    return ChunkMemory(b.limits)


def group_memory(b: Builder) -> "Memory":
    if not b.limits.enable_prefix_caching:
        return paged(b)
    if b.names["order"] != "prefix-groups":
        raise UserError("memory=prefix-groups keeps what order=prefix-groups plans: give both, or neither")
    from sim.kv.shared_reads import GroupMemory

    return GroupMemory(b.limits)


def paged(b: Builder) -> "Memory":
    if b.limits.states is not None:
        return states(b)
    if b.offloading.offloads:
        from sim.kv.offloading import OffloadingMemory, OffloadingPaged

        kind = OffloadingMemory if b.limits.enable_prefix_caching else OffloadingPaged
        return kind(b.limits, connector(b, b.offloading))
    if b.policy.has_hybrid_manager and b.limits.has_window_groups:
        from sim.kv.hybrid import HybridMemory

        return HybridMemory(b.limits, schedules_ahead=b.policy.schedules_ahead)
    if b.limits.enable_prefix_caching:
        from sim.kv.prefix import PrefixMemory

        return PrefixMemory(b.limits, in_flight_hits=b.policy.is_unified)
    if b.limits.has_window_groups:
        from sim.kv.windowed import WindowedMemory

        return WindowedMemory(b.limits)
    from sim.kv.paged import PagedMemory

    return PagedMemory(b.limits)


def states(b: Builder) -> "Memory":
    from sim.kv.states import StateMemory

    if b.offloading.offloads:
        raise UserError(f"--kv-offloading-size: {b.deployment.model.name} has layers that keep a state; leave it out")
    threshold = b.options(VllmV1Options).long_prefill_token_threshold
    most = min(b.limits.max_num_batched_tokens, threshold or b.limits.max_num_batched_tokens)
    return StateMemory(b.limits, schedules_ahead=b.policy.schedules_ahead, most_prompt_tokens=most)


def tiered(b: Builder) -> "Memory":
    from sim.kv.tiered import TieredMemory

    if b.offloading.offloads:
        raise UserError("--kv-offloading-size: goes with memory=paged, not tiered, which keeps prefixes itself")
    no_layer_keeps_a_window(b, "memory=tiered")
    worth = worth_of(b)
    options, in_flight_hits = b.options(TieredOptions), b.policy.is_unified
    block_bytes = b.limits.block_bytes * b.deployment.tensor_parallel_size
    num_blocks = options.num_disk_blocks(block_bytes)
    if not num_blocks:
        return TieredMemory(b.limits, worth, in_flight_hits=in_flight_hits)
    from sim.kv.on_disk import DiskTieredMemory
    from sim.kv.tiers.disk import Disk

    disk = Disk(
        num_blocks,
        block_bytes,
        read_bytes_per_s=options.disk_read_gb_per_s * 1e9,
        write_bytes_per_s=options.disk_write_gb_per_s * 1e9,
        latency_s=options.disk_latency_us / 1e6,
        s_per_block=options.disk_block_us / 1e6,
    )
    return DiskTieredMemory(b.limits, worth, disk, look_ahead=options.look_ahead, in_flight_hits=in_flight_hits)


def retained(b: Builder) -> "Memory":
    from sim.kv.retained import RetentionMemory

    no_layer_keeps_a_window(b, "memory=retained")
    return RetentionMemory(b.limits, worth_of(b), b.options(RetentionOptions).swap_out_threshold)


def saved_states(b: Builder) -> "Memory":
    from sim.kv.saved_states import SavedStates

    if b.names["eviction"] not in ("swap", "recompute"):
        raise UserError("memory=saved-states needs no copies to let go of a sequence: it goes with eviction=swap")
    each_layer_keeps_all(b)
    split, share, _ = split_of(b.deployment, b.limits)
    return SavedStates(b.limits, split, share)


def tiered_states(b: Builder) -> "Memory":
    from sim.kv.saved_states import TieredStates

    each_layer_keeps_all(b)
    split, share, state = split_of(b.deployment, b.limits)
    return TieredStates(b.limits, worth_of(b), b.deployment.cost, split, share, state)


def each_layer_keeps_all(b: Builder) -> None:
    """UserError for models whose layers share their KV or keep a window."""
    model = b.deployment.model
    if model.num_stored_layers < model.num_layers or b.limits.window is not None:
        raise UserError(f"memory={b.names['memory']}: layers of {model.name} share their KV or keep a window")


def no_layer_keeps_a_window(b: Builder, asked: str, remedy: str = "") -> None:
    """UserError for models of which some layers have rings of blocks, where `asked` keeps whole prefixes."""
    if b.limits.has_window_groups:
        raise UserError(f"{asked}: {b.deployment.model.name} has layers that keep a window only{remedy}")


def worth_of(b: Builder, load_s_per_block: float | None = None) -> "Worth":
    """Prices of copies to the GPU and of what they replace; `load_s_per_block` in place of the link's."""
    from sim.kv.tiers.worth import Worth

    return Worth(b.deployment.cost, b.limits, b.deployment.model.num_layers, load_s_per_block)


def hosted_layers(b: Builder) -> "Memory":
    from sim.kv.hosted_layers import HostedLayers
    from sim.systems.kvpr.partial_recompute import BlockSeconds

    each_layer_keeps_all(b)
    limits = replace(b.limits, num_cpu_blocks=int(b.limits.num_cpu_blocks / (1.0 + BlockSeconds.of(b).input_share)))
    return HostedLayers(limits, b.deployment.model.num_layers, lambda tokens: 0)


def connector(b: Builder, options: OffloadOptions) -> "OffloadingConnector":
    from sim.kv.tiers.connector import OffloadingConnector
    from sim.kv.tiers.host_cache import HostCache

    no_layer_keeps_a_window(b, "--kv-offloading-size", "; --disable-hybrid-kv-cache-manager keeps whole prefixes")
    num_chunks = options.num_chunks(b.limits.block_bytes * b.deployment.tensor_parallel_size)
    return OffloadingConnector(
        HostCache(num_chunks, options.eviction_policy, options.store_threshold),
        b.limits.block_size,
        blocks_per_chunk=options.blocks_per_chunk,
        prompts_only=not options.offload_outputs,
        shares_loads=b.limits.enable_prefix_caching,
        load_s_per_block=options.load_s_per_block,
        store_s_per_block=options.store_s_per_block,
        worth=worth_of(b, options.load_s_per_block),
    )


def stored(b: Builder) -> "Memory":
    from sim.kv.stored import StoredMemory

    if b.names["stage"] != HAND_OVER or b.moves_whole:
        raise UserError(
            "memory=stored is for engines that prefill for others: it goes with stage=hand-over and eviction=recompute"
        )
    return StoredMemory(b.limits)


def mempool(b: Builder) -> "Memory":
    options = b.options(MemPoolOptions)
    if not b.limits.enable_prefix_caching or (b.deployment.role == "decode" and options.caching == "prefill"):
        from sim.kv.paged import PagedMemory

        return PagedMemory(b.limits)
    from sim.kv.mempool import MemPool

    no_layer_keeps_a_window(b, "memory=mempool")
    return MemPool(b.limits, returns=options.caching == "return", in_flight_hits=b.policy.is_unified)


def reserved(b: Builder) -> "Memory":
    from sim.kv.reserved import ReservedMemory

    return ReservedMemory(b.limits)


def layer_blocks(b: Builder) -> "Memory":
    from sim.kv.layer_blocks import LayerBlocks

    model = b.deployment.model
    if model.num_stored_layers < model.num_layers:
        raise UserError(
            f"memory=layers keeps each layer's KV apart, and layers of {model.name} share theirs: use memory=paged"
        )
    return LayerBlocks(b.limits, b.deployment.model.num_layers, remembered(Equations.of(b).minimum_layers))


def token_wise_memory(b: Builder) -> "Memory":
    from sim.kv.token_wise import Kernels, TokenWiseMemory

    options, model = b.options(TokenWiseOptions), b.deployment.model
    if b.names["admission"] != "token-wise":
        raise UserError("memory=token-wise is told what to leave uncached: it goes with admission=token-wise")
    each_layer_keeps_all(b)
    times = replace(options, equations="corrected").step_times(b.deployment, b.limits.block_size)
    allots = options.step_times(b.deployment, b.limits.block_size)
    lookup_s = options.map_lookup_us / 1e6
    kernels = Kernels(times, allots, options.fused, options.overlapped, options.threads, lookup_s)
    kind = TokenWiseMemory
    if options.layer_order == "contiguous":
        from sim.kv.first_layers import FirstLayersAgain as kind
    return kind(
        b.limits, model.num_layers, options.layers_per_block, kernels,
        least_ratio=options.least_uncached_ratio, most_ratio=options.most_uncached_ratio, by_longest=options.printed,
    )  # fmt: skip


PAGED = KnownMemory(paged, can_cache_prefixes=True, class_place="sim.kv.paged:PagedMemory")
RADIX = KnownMemory(radix, can_cache_prefixes=True, class_place="sim.kv.radix:RadixMemory")
CHUNKS = KnownMemory(chunks, can_cache_prefixes=True, class_place="sim.kv.shared_reads:ChunkMemory")
PREFIX_GROUPS = KnownMemory(group_memory, can_cache_prefixes=True, class_place="sim.kv.shared_reads:GroupMemory")
TIERED = KnownMemory(
    tiered, TieredOptions, can_cache_prefixes=True, always_caches=True, class_place="sim.kv.tiered:TieredMemory"
)
RETAINED = KnownMemory(
    retained,
    RetentionOptions,
    can_cache_prefixes=True,
    always_caches=True,
    class_place="sim.kv.retained:RetentionMemory",
)
RESERVED = KnownMemory(reserved, class_place="sim.kv.reserved:ReservedMemory")
MEMPOOL = KnownMemory(
    mempool, MemPoolOptions, can_cache_prefixes=True, runs_live=False, class_place="sim.kv.mempool:MemPool"
)
STORED = KnownMemory(stored, ConductorOptions, class_place="sim.kv.stored:StoredMemory")
LAYERS = KnownMemory(layer_blocks, LayerKVOptions, class_place="sim.kv.layer_blocks:LayerBlocks")
SAVED_STATES = KnownMemory(saved_states, StatesOptions, class_place="sim.kv.saved_states:SavedStates")
TIERED_STATES = KnownMemory(
    tiered_states,
    StatesOptions,
    can_cache_prefixes=True,
    always_caches=True,
    class_place="sim.kv.saved_states:TieredStates",
)
HOSTED_LAYERS = KnownMemory(hosted_layers, PartialRecomputeOptions, class_place="sim.kv.hosted_layers:HostedLayers")
TOKEN_WISE = KnownMemory(token_wise_memory, TokenWiseOptions, class_place="sim.kv.token_wise:TokenWiseMemory")
