"""The parts by name, and how a system is built from names: what `composition` and `--policy NAME:part=...` speak.

Memory comes first, then the stage and the eviction that steer it, then the others. A part reads its options from the
preset where that has them, else from options of its own kind given with it, else from their defaults. A part's module
is loaded when somebody builds the part.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING

from sim.errors import UserError
from sim.systems import memory_builders, part_builders
from sim.systems.adaptive_options import AdaptiveOptions
from sim.systems.builder import HAND_OVER, MEMPOOL, STORED, Builder, Known, KnownBatching, KnownEviction, KnownMemory
from sim.systems.ellm_options import TokenWiseOptions
from sim.systems.fastserve_options import MlfqOptions
from sim.systems.hand_over_options import HandOverOptions
from sim.systems.hcache_options import StatesOptions
from sim.systems.kvpr_options import PartialRecomputeOptions
from sim.systems.layerkv_options import LayerKVOptions
from sim.systems.mempool_options import MemPoolOptions
from sim.systems.mooncake_options import ConductorOptions
from sim.systems.radix_options import RadixOptions
from sim.systems.tiered_options import RetentionOptions, TieredOptions
from sim.systems.vllm_v1_options import VllmV1Options

if TYPE_CHECKING:
    from sim.engine.scheduler import Parts
    from sim.parts.base import Admission, Order, Stage

KINDS = ("order", "batching", "admission", "memory", "eviction", "stage")

ORDERS: "dict[str, Known[Order]]" = {
    "fcfs": Known(part_builders.fcfs),
    "priority": Known(part_builders.priority),
    "mlfq": Known(part_builders.mlfq, MlfqOptions),
    "triage": Known(part_builders.triage, AdaptiveOptions),
    "lpm": Known(part_builders.lpm, RadixOptions),
    "dfs-weight": Known(part_builders.dfs_weight),
    "prefix-groups": Known(part_builders.prefix_groups),
}
MEMORIES: dict[str, KnownMemory] = {
    "paged": KnownMemory(memory_builders.paged, can_cache_prefixes=True),
    "radix": KnownMemory(memory_builders.radix, can_cache_prefixes=True),
    "chunks": KnownMemory(memory_builders.chunks, can_cache_prefixes=True),
    "prefix-groups": KnownMemory(memory_builders.group_memory, can_cache_prefixes=True),
    "tiered": KnownMemory(memory_builders.tiered, TieredOptions, can_cache_prefixes=True, always_caches=True),
    "retained": KnownMemory(memory_builders.retained, RetentionOptions, can_cache_prefixes=True, always_caches=True),
    "reserved": KnownMemory(memory_builders.reserved),
    MEMPOOL: KnownMemory(memory_builders.mempool, MemPoolOptions, can_cache_prefixes=True, runs_live=False),
    STORED: KnownMemory(memory_builders.stored, ConductorOptions),
    "layers": KnownMemory(memory_builders.layer_blocks, LayerKVOptions),
    "saved-states": KnownMemory(memory_builders.saved_states, StatesOptions),
    "tiered-states": KnownMemory(
        memory_builders.tiered_states, StatesOptions, can_cache_prefixes=True, always_caches=True
    ),
    "hosted-layers": KnownMemory(memory_builders.hosted_layers, PartialRecomputeOptions),
    "token-wise": KnownMemory(memory_builders.token_wise_memory, TokenWiseOptions),
}
ADMISSIONS: "dict[str, Known[Admission]]" = {
    "watermark": Known(part_builders.watermark),
    "memory": Known(part_builders.memory_alone),
    "slack": Known(part_builders.slack, LayerKVOptions),
    "token-wise": Known(part_builders.token_wise_admission, TokenWiseOptions),
}
EVICTIONS: dict[str, KnownEviction] = {
    "recompute": KnownEviction(part_builders.recompute),
    "swap": KnownEviction(part_builders.swap, moves_whole=True),
    "layer-offload": KnownEviction(part_builders.layer_offload, LayerKVOptions),
    "park": KnownEviction(part_builders.park),
    "proactive-swap": KnownEviction(part_builders.proactive_swap, MlfqOptions, moves_whole=True),
}
STAGES: "dict[str, Known[Stage]]" = {
    "direct": Known(part_builders.direct),
    "promote": Known(part_builders.promote, LayerKVOptions),
    "stream": Known(part_builders.stream, LayerKVOptions),
    "partial-recompute": Known(part_builders.partial_recompute, PartialRecomputeOptions),
    HAND_OVER: Known(part_builders.hand_over, HandOverOptions),
}
BATCHINGS: dict[str, KnownBatching] = {
    "vllm": KnownBatching(part_builders.vllm055),
    "request-level": KnownBatching(part_builders.request_level, splits_prompts=False),
    "iteration-level": KnownBatching(part_builders.iteration_level, splits_prompts=False),
    "sarathi": KnownBatching(part_builders.sarathi, splits_prompts=True),
    "fastgen": KnownBatching(part_builders.fastgen, splits_prompts=True, tokens=lambda length, chunked: 768),
    "quanta": KnownBatching(part_builders.quanta, splits_prompts=False),
    "unified": KnownBatching(
        part_builders.unified, VllmV1Options, splits_prompts=True, tokens=lambda length, chunked: 8192
    ),
    "paced": KnownBatching(part_builders.paced, splits_prompts=True, tokens=lambda length, chunked: 8192),
    "sglang": KnownBatching(
        part_builders.sglang, RadixOptions, splits_prompts=True, tokens=lambda length, chunked: 8192
    ),
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


def build_parts(b: Builder) -> "Parts":
    """One part of each kind. UserError where they do not go together."""
    from sim.engine.scheduler import Parts

    names = b.names
    b.memory = MEMORIES[names["memory"]].build(b)
    b.stage = STAGES[names["stage"]].build(b)
    if b.memory.splits_layers and not b.stage.brings_layers_back:
        raise UserError("memory=layers leaves layers on the host: it goes with stage=promote or stage=stream")
    return Parts(
        order=ORDERS[names["order"]].build(b),
        memory=b.memory,
        admission=ADMISSIONS[names["admission"]].build(b),
        eviction=EVICTIONS[names["eviction"]].build(b),
        stage=b.stage,
        batching=BATCHINGS[names["batching"]].build(b),
    )


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
