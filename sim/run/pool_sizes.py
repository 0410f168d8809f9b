"""`limits_of`: pools as vLLM sizes them, what their blocks hold, and the engine's limits, of one kind of engine."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec.structs import replace

from sim.engine.limits import Limits, StateLimits, WindowLimits
from sim.errors import UserError
from sim.options.scenario import Scenario
from sim.parts.batching.lora_options import LoraOptions
from sim.parts.catalogue import BATCHINGS, STAGES
from sim.parts.options import GIB
from sim.specs.adapters import adapter_bytes
from sim.specs.expert_layout import ALL_GATHER, ExpertLayout
from sim.specs.hardware import HardwareSpec
from sim.specs.kv_format import KVGroups, hybrid_groups, like_groups
from sim.specs.memory import (
    LEAST_FLASHINFER_CAPABILITY,
    EngineMemory,
    StatePool,
    kv_cache_blocks,
    state_block_size,
)
from sim.specs.models import ModelSpec
from sim.systems.base import EngineLimits, Policy, WindowPool

if TYPE_CHECKING:
    from sim.specs.sparse_attention import SparseAttention


def limits_of(
    scenario: Scenario,
    model: ModelSpec,
    hardware: HardwareSpec,
    policy: Policy,
    max_model_len: int,
    engine: EngineLimits,
    memory: EngineMemory,
    stage_layers: tuple[int, ...],
    experts: ExpertLayout | None,
    sparse: "SparseAttention | None",
    warnings: list[str],
) -> Limits:
    """Pools as vLLM sizes them, of an engine on stages or one of its virtual engines, and the engine's limits."""
    pp = len(stage_layers)
    swap_space = scenario.swap_space
    if swap_space is None:
        swap_space = default_swap_space_gib(scenario, policy, hardware)
    block_size = policy.block_size(scenario.block_size, model, scenario.tp)
    groups, window = _window(scenario, model, policy, block_size)
    cached, states = _prefix_caching(scenario, model, policy, window, sparse, warnings), None
    ranks = scenario.data_parallel_size or 1
    state_pool = policy.state_pool(block_size, engine, cached=cached, ranks=ranks) if model.gdn else None
    if model.gdn and state_pool is None:
        groups, states = _states(scenario, model, hardware, policy)
        block_size = state_block_size(
            model, scenario.tp, block_size, within_chunks=cached and states.exports_within_chunks
        )
    layers = None if groups is None else float(groups.num_groups * groups.layers_per_group)
    further, draft_kv = _drafting_bytes(policy, model, scenario.tp)
    own_bytes = 0.0
    own = policy.window_pool(window.tokens, block_size, engine) if window and model.windows_apart else None
    if own:
        kv = model.kv_format(scenario.tp)
        layers = kv.num_full_stored + own.share * kv.num_window_stored
        own_bytes = kv.num_window_stored * model.kv_bytes_per_token_layer(scenario.tp)
        further += own.tokens * own_bytes
    pool = kv_cache_blocks(
        model,
        hardware,
        tensor_parallel_size=scenario.tp,
        gpu_memory_utilization=scenario.gpu_memory_utilization,
        block_size=block_size,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_seqs=engine.max_num_seqs,
        swap_space_bytes_per_gpu=swap_space * GIB,
        num_gpu_blocks_override=scenario.num_gpu_blocks_override,
        stored_layers=layers,
        stage_layers=stage_layers,
        experts=experts,
        further_weight_bytes=further
        + _adapter_bytes(policy, model, scenario.tp, warnings)
        + _dispatch_bytes(scenario.all2all_backend, model, experts, engine),
        draft_kv_bytes_per_token=draft_kv,
        states=state_pool,
        engine=memory,
    )
    seats = engine.max_num_seqs
    if state_pool and model.gdn:
        states = StateLimits(
            own_slots=pool.num_states,
            own_bytes=model.gdn.state_bytes(model.dtype_bytes, scenario.tp),
            chunk_tokens=model.gdn.scan_tokens or 64,
        )
        seats = _state_seats(state_pool, pool.num_states, model, seats, scenario.max_num_seqs, warnings)
    if own and window:
        own_blocks = _own_blocks(own, pool.num_gpu_blocks, block_size, window, model)
        window = replace(window, own_blocks=own_blocks, own_bytes=block_size * own_bytes)
    host_blocks = scenario.num_cpu_blocks_override
    if host_blocks is None:
        host_blocks = pool.num_cpu_blocks
    batching = BATCHINGS[policy.names["batching"]]
    is_queued = pp > 1 and batching.queues_batches
    # vLLM 0.5.5 gives each virtual engine its share.
    shares = 1 if is_queued else pp
    return Limits(
        num_gpu_blocks=pool.num_gpu_blocks // shares - policy.num_null_blocks,
        num_cpu_blocks=host_blocks // shares,
        block_size=block_size,
        block_bytes=pool.block_bytes,
        max_model_len=max_model_len,
        max_num_seqs=seats,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        enable_chunked_prefill=engine.enable_chunked_prefill,
        enable_prefix_caching=cached,
        window=window,
        states=states,
        kept_of_prompt=sparse.kept_of_prompt if sparse is not None else None,
        stages=pp if is_queued else 1,
        stops_at_max_model_len=batching.stops_at_max_model_len,
    )


def _dispatch_bytes(backend: str | None, model: ModelSpec, experts: ExpertLayout | None, engine: EngineLimits) -> float:
    """On each GPU, of the buffers of vLLM's all-to-all backend. SGLang's are beside the memory that it is given."""
    if experts is None or backend in (None, ALL_GATHER):
        return 0.0
    from sim.cost.all2all import buffer_bytes  # noqa: PLC0415 - few runs have any

    return buffer_bytes(model, experts, engine.max_num_batched_tokens)


def default_swap_space_gib(scenario: Scenario, policy: Policy, hardware: HardwareSpec) -> float:
    """Host memory per GPU that a policy takes where none is asked for: at most half of the host's."""
    return min(policy.default_swap_space_gib, hardware.host_memory_bytes / GIB / scenario.tp / 2)


def _window(
    scenario: Scenario, model: ModelSpec, policy: Policy, block_size: int
) -> tuple[KVGroups | None, WindowLimits | None]:
    """How blocks are cut by layers with and without a window, and what the engine must know of it.

    Memory has rings where it is paged and whole sequences are evicted; else it keeps everything for every layer.
    """
    kv = model.kv_format(scenario.tp)
    if kv.window is None:
        return None, None
    keeps_whole = kv.num_full_stored and scenario.disable_hybrid_kv_cache_manager
    if keeps_whole or not (has_rings(policy.names) and kv.num_window_stored):
        return None, WindowLimits(kv.window)
    groups = hybrid_groups(kv)
    blocks = -(-kv.window // block_size)
    window_first, chosen = kv.layers[0].window is not None, scenario.sparse_attention is not None
    return groups, WindowLimits(kv.window, groups.num_full, groups.num_window, blocks, window_first, chosen)


def _own_blocks(own: WindowPool, num_blocks: int, block_size: int, window: WindowLimits, model: ModelSpec) -> int:
    """Blocks of the pool of layers with a window; UserError where no request would ever be admitted."""
    blocks, least = own.blocks(num_blocks, block_size), window.tokens - 1 + block_size
    if blocks * block_size <= least:
        raise UserError(
            f"sglang swa-full-tokens-ratio: the pool of {model.name}'s layers with a window has {blocks * block_size} "
            f"tokens, and no request is admitted into {least} or fewer; raise it, or --sglang-max-total-tokens"
        )
    return blocks


def _state_seats(
    pool: StatePool, num_states: int, model: ModelSpec, seats: int, asked: int | None, warnings: list[str]
) -> int:
    """Requests that run at most where their states have a pool of their own; UserError where none can."""
    most = num_states // pool.per_request
    what = f"sglang max-mamba-cache-size: of {num_states} states of {model.name} a request may take {pool.per_request}"
    if not most:
        raise UserError(f"{what}, and none can run; raise it, or --sglang-mamba-full-memory-ratio")
    if asked and most < seats:
        warnings.append(f"{what}: {most} run at most, not {seats}; raise it, or --sglang-mamba-full-memory-ratio")
    return min(seats, most)


def has_rings(names: Mapping[str, str]) -> bool:
    """Whether memory can keep a window: it is paged, and whole sequences are evicted."""
    return names["memory"] == "paged" and names["eviction"] in ("recompute", "swap")


def _states(
    scenario: Scenario, model: ModelSpec, hardware: HardwareSpec, policy: Policy
) -> tuple[KVGroups, StateLimits]:
    """How blocks are cut by layers that keep KV and layers that keep a state.

    UserError where the policy is not vLLM v1's: no other has such memory of states.
    """
    assert model.gdn is not None, "asked for models with states alone"
    what = f"{model.name} has layers that keep a state ({model.gdn.kind})"
    if not policy.has_hybrid_manager:
        raise UserError(f"--policy {policy.name}: {what}, whose memory is vLLM v1's; take vllm-v1 or sglang, unmixed")
    if scenario.disable_hybrid_kv_cache_manager:
        raise UserError(f"--disable-hybrid-kv-cache-manager: {what}, which need it; leave it out")
    groups = like_groups(model.num_stored_layers, model.num_layers - model.num_attention_layers)
    # FlashInfer's kernel is Gated DeltaNet's.
    exports = not model.gdn.scan_tokens and (hardware.compute_capability or 0.0) >= LEAST_FLASHINFER_CAPABILITY
    return groups, StateLimits(groups.num_full, groups.num_window, exports)


def _prefix_caching(
    scenario: Scenario,
    model: ModelSpec,
    policy: Policy,
    window: WindowLimits | None,
    sparse: "SparseAttention | None",
    warnings: list[str],
) -> bool:
    """Whether prefixes are cached; UserError where that was asked for and cannot be."""
    cached = policy.prefix_caching(scenario.enable_prefix_caching)
    if cached and sparse is not None and sparse.forgets:
        if scenario.enable_prefix_caching:
            raise UserError(
                f"--enable-prefix-caching: of a prompt --sparse-attention {scenario.sparse_attention} keeps a part "
                "that depends on what follows; leave it out"
            )
        warnings.append("prefixes are not cached: what is kept of a prompt depends on what follows")
        return False
    if not cached or window is None or window.blocks is None or policy.has_hybrid_manager:
        return cached
    remedy = "--policy vllm-v1 caches those"
    if window.num_full:
        remedy += ", --disable-hybrid-kv-cache-manager keeps whole prefixes"
    if scenario.enable_prefix_caching:
        raise UserError(f"--enable-prefix-caching: {model.name} has layers that keep a window only; {remedy}")
    warnings.append(f"prefixes are not cached: {model.name} has layers that keep a window only; {remedy}")
    return False


def _drafting_bytes(policy: Policy, model: ModelSpec, tp: int) -> tuple[float, float]:
    """On each GPU, of what drafts tokens: weights, and KV of a token."""
    if not STAGES[policy.names["stage"]].drafts:
        return 0.0, 0.0
    from sim.cost.drafting import drafting_bytes  # noqa: PLC0415 - few runs draft
    from sim.parts.stage.speculative_options import SpeculativeOptions  # noqa: PLC0415

    return drafting_bytes(policy.options(SpeculativeOptions), model, tp)


def _adapter_bytes(policy: Policy, model: ModelSpec, tp: int, warnings: list[str]) -> float:
    """On each GPU, of slots for adapters; `warnings` get what is not simulated of these."""
    options = policy.options(LoraOptions)
    if not options.enable_lora:
        return 0.0
    warnings.append("--enable-lora: adapters' own products and what loads them have no price: times are the model's")
    slot_bytes = adapter_bytes(model, tp, options.max_lora_rank)
    if slot_bytes is None:
        warnings.append(
            f"--enable-lora: how much memory vLLM takes for adapters of {model.name} is not known, and none is taken; "
            "give --num-gpu-blocks-override as vLLM logs it"
        )
    return options.max_loras * (slot_bytes or 0.0)
