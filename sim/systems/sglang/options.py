"""Options of SGLang's server, by SGLang's own names (`sglang.launch_server`, 0.5.23)."""

import json
from typing import Literal

from sim.engine.limits import Limits
from sim.errors import UserError
from sim.frozen import frozen
from sim.kv.tiers.drive import Drive
from sim.parts.options import MOST_GIB, CheckedOptions, Only, option

PRIORITIES = Only("enable_priority_scheduling")
DP_ATTENTION = Only("enable_dp_attention")
DEEPEP = Only("moe_a2a_backend", "deepep")
HICACHE = Only("enable_hierarchical_cache")
STORES = Only("hicache_storage_backend")
WINDOWS = Only("windows_apart", told="a model whose layers with a window have a pool of their own", of_model=True)
STATES = Only("gdn", told="a model whose layers keep a state", of_model=True)
GIB = 1 << 30
MOST_TOKENS = 1 << 40
"""And most of other numbers."""
RULES: dict[str, dict[str, int]] = {
    "slru": {"protected_threshold": 2},
    "tlru": {"threshold": 0, "next_prompt_estimate": 0},
}
"""What policies of eviction take from `radix_eviction_policy_config`, and what it is by default."""
AGREED = {"prefill_decode_interval": 0, "scheduler_recv_interval": 1}
"""What ranks that share experts count together, and what it is by default."""
SLIDE_TOKENS = 128
"""Tokens beyond the window from which a decode gives their pages back (`SGLANG_SWA_EVICTION_INTERVAL`)."""


@frozen
class SglangOptions(CheckedOptions):
    """What is batched, in what order, what is cached and where; defaults are SGLang's."""

    schedule_policy: Literal["fcfs", "lpm", "dfs-weight", "lof", "hrrn", "shortest-prefill-first"] = option(
        "fcfs",
        "what comes first: arrivals, the longest cached prefix, the heaviest branch, the longest output, the longest "
        "wait for its tokens, the fewest tokens to compute",
    )
    schedule_conservativeness: float = option(
        1.0, "multiplies the share of what runs that is kept room for", within=(0.0, 1e6)
    )
    chunked_prefill_size: int = option(
        0, "prompt tokens of a step; -1: prompts whole; 0: SGLang's, by the GPU", within=(-1, MOST_TOKENS)
    )
    max_prefill_tokens: int = option(
        16384, "prompt tokens of a step beyond which no further request is looked at", within=(1, MOST_TOKENS)
    )
    prefill_max_requests: int = option(
        0, "requests that a step prefills at most; 0: any number", within=(0, MOST_TOKENS)
    )
    prefill_decode_interval: int = option(
        0, "steps after one that prefilled in which decodes come first", within=(0, MOST_TOKENS)
    )
    prefill_decode_interval_min_bs: int = option(
        0, "decodes below which they do not", within=(0, MOST_TOKENS), only=Only("prefill_decode_interval")
    )
    enable_mixed_chunk: bool = option(False, "decode in the steps that prefill, too")
    disable_overlap_schedule: bool = option(False, "schedule a step when the one before it has ended")
    max_running_requests: int = option(
        0, "requests that run at most; 0: --max-num-seqs, or 2048", within=(0, MOST_TOKENS)
    )
    max_queued_requests: int = option(
        0, "requests that wait at most: others are refused, the least urgent first; 0: any", within=(0, MOST_TOKENS)
    )
    min_free_slots_delay: int = option(
        0, "seats that must be free before prompts start where others run", within=(0, MOST_TOKENS)
    )
    scheduler_recv_interval: int = option(
        1,
        "steps from one look at what has arrived to the next; a step that prefills counts for 1,000",
        within=(1, MOST_TOKENS),
    )
    max_total_tokens: int = option(
        0, "tokens of the GPU's pool; 0: as many as there is memory for", within=(0, MOST_TOKENS)
    )
    swa_full_tokens_ratio: float = option(
        0.8,
        "of the pool's tokens, those of the pool of layers with a window (gpt-oss)",
        within=(1e-6, 1.0),
        only=WINDOWS,
    )
    disable_hybrid_swa_memory: bool = option(
        False, "layers with a window keep everything, like the others", only=WINDOWS
    )
    max_mamba_cache_size: int = option(
        0,
        "states of the pool of layers that keep one (Qwen 3.5); 0: by the ratio below",
        within=(0, MOST_TOKENS),
        only=STATES,
    )
    mamba_full_memory_ratio: float = option(
        0.9, "memory for these states, in that for the KV of the other layers", within=(1e-6, 1e6), only=STATES
    )
    mamba_radix_cache_strategy: Literal["auto", "no_buffer", "extra_buffer"] = option(
        "auto", "whether requests track states for the tree in slots of their own (extra_buffer)", only=STATES
    )
    mamba_track_interval: int = option(
        256, "tokens from one state that a decode tracks to the next", within=(1, MOST_TOKENS), only=STATES
    )
    enable_dp_attention: bool = option(
        False, "ranks of --data-parallel-size share the experts; chunk, seats and conservativeness are divided"
    )
    moe_a2a_backend: Literal["none", "deepep"] = option(
        "none", "what dispatches tokens to experts: collectives, or DeepEP to whole ones on each GPU", only=DP_ATTENTION
    )
    deepep_mode: Literal["auto", "normal", "low_latency"] = option(
        "auto", "DeepEP's kernels: auto has those of low latency where all ranks decode", only=DEEPEP
    )
    load_balance_method: Literal["round_robin", "total_requests", "total_tokens"] = option(
        "round_robin", "which rank gets a request: the next, or that with the fewest requests or tokens"
    )
    page_size: int = option(0, "tokens of a page; 0: --block-size, or 1", within=(0, 1 << 20))
    disable_radix_cache: bool = option(False, "cache no prefixes")
    max_new_tokens: int = option(
        0, "tokens that requests ask for, and may stop before; 0: what they generate", within=(0, MOST_TOKENS)
    )
    ignore_eos: bool = option(False, "requests never stop before: all that they ask for is kept room for")
    enable_priority_scheduling: bool = option(False, "the trace's priorities order the queue and preempt")
    disable_priority_preemption: bool = option(False, "they order the queue alone", only=PRIORITIES)
    schedule_low_priority_values_first: bool = option(
        False, "small numbers are urgent, not large ones", only=PRIORITIES
    )
    priority_scheduling_preemption_threshold: int = option(
        10, "difference beyond which priorities preempt", within=(0, MOST_TOKENS), only=PRIORITIES
    )
    retraction_policy: Literal["length", "priority"] = option(
        "length", "which decode is retracted first: that with the fewest tokens, or of those the least urgent"
    )
    radix_eviction_policy: Literal["lru", "lfu", "fifo", "mru", "filo", "slru", "priority", "tlru"] = option(
        "lru", "which leaf of the tree goes first"
    )
    radix_eviction_policy_config: str | None = option(
        None,
        'JSON: {"protected_threshold": 2} of slru, {"threshold": 4096, "next_prompt_estimate": 512} of tlru, tokens',
        only=Only("radix_eviction_policy", *RULES),
    )
    enable_hierarchical_cache: bool = option(False, "HiCache: the host keeps what leaves the GPU")
    hicache_ratio: float = option(2.0, "the host's pool, in sizes of the GPU's", within=(0.0, 1e6), only=HICACHE)
    hicache_size: int = option(
        0, "GB of the host's pool, for each GPU; 0: by the ratio above", within=(0, MOST_TOKENS), only=HICACHE
    )
    hicache_write_policy: Literal["write_through", "write_through_selective", "write_back"] = option(
        "write_through", "when a node of the tree is copied to the host", only=HICACHE
    )
    hicache_storage_backend: Literal["file", "mooncake", "hf3fs", "nixl", "aibrix", "eic", "simm", "sim"] | None = (
        option(None, "storage behind the host; they differ by the bandwidths and the latency below alone", only=HICACHE)
    )
    hicache_storage_prefetch_policy: Literal["best_effort", "wait_complete", "timeout"] = option(
        "timeout", "how long an admission waits for what storage has of its prompt", only=STORES
    )
    hicache_storage_prefetch_threshold: int = option(
        256,
        "tokens below which storage is not asked, and a hit there is not read",
        within=(1, MOST_TOKENS),
        only=STORES,
    )
    hicache_storage_prefetch_timeout_base: float = option(
        1.0, "seconds that policy timeout waits", within=(0.0, 1e9), only=STORES
    )
    hicache_storage_prefetch_timeout_per_ki_token: float = option(
        0.25, "seconds that it waits longer for every 1,024 tokens asked for", within=(0.0, 1e9), only=STORES
    )
    hicache_storage_prefetch_retry_poll_interval: int = option(
        8, "steps after which a request that found nothing asks again; 0: never", within=(0, MOST_TOKENS), only=STORES
    )
    hicache_storage_prefetch_retry_max_attempts: int = option(
        8, "times that a request asks again", within=(0, MOST_TOKENS), only=STORES
    )
    hicache_storage_space: float | None = option(
        None, "GiB of storage (default: as many as are written)", within=(0.0, MOST_GIB), only=STORES
    )
    hicache_storage_shared: bool = option(False, "replicas share it, each at the bandwidths below", only=STORES)
    hicache_storage_read_gb_per_s: float = option(
        5.0, "bandwidth from storage to the host, GB/s", within=(1e-3, 1e6), only=STORES
    )
    hicache_storage_write_gb_per_s: float = option(
        3.0, "bandwidth from the host to storage, GB/s", within=(1e-3, 1e6), only=STORES
    )
    hicache_storage_latency_us: float = option(
        100.0, "time before each answer and each batch of pages, us", within=(0.0, 1e12), only=STORES
    )

    def tracked_states(self, page: int) -> int:
        """Slots in which a request of a model with states tracks some for the tree, in pages of so many tokens.

        UserError where SGLang has no such strategy.
        """
        overlaps, strategy = not self.disable_overlap_schedule, self.mamba_radix_cache_strategy
        if strategy == "no_buffer" and (overlaps or page > 1):
            raise UserError(
                "sglang mamba-radix-cache-strategy: no_buffer goes with disable-overlap-schedule and pages of one "
                "token, as in SGLang; give these, or take extra_buffer"
            )
        if strategy == "no_buffer" or (strategy == "auto" and not overlaps and page == 1):
            return 0
        if self.mamba_track_interval % page:
            raise UserError(
                f"sglang mamba-track-interval: {self.mamba_track_interval} is no multiple of a page of {page}; take "
                f"{-(-self.mamba_track_interval // page) * page}"
            )
        return 1 + overlaps

    def eviction_rules(self, page: int) -> tuple[int, int]:
        """Insertions from which `slru` protects, and pages of a conversation's end that `tlru` can do without.

        UserError for a config that is none of its policy's.
        """
        name = "sglang radix-eviction-policy-config"
        known = RULES.get(self.radix_eviction_policy, {})
        try:
            given = json.loads(self.radix_eviction_policy_config or "{}")
        except json.JSONDecodeError as error:
            raise UserError(f"{name}: {self.radix_eviction_policy_config} is no JSON: {error}") from None
        if not isinstance(given, dict) or not all(key in known and type(value) is int for key, value in given.items()):
            raise UserError(f"{name}: {given} is no object of whole numbers named {' or '.join(known)}")
        rules = known | given
        spared = rules.get("threshold", 0) - rules.get("next_prompt_estimate", 0)
        if self.radix_eviction_policy == "tlru" and (spared <= 0 or min(rules.values()) < 0):
            raise UserError(f"{name}: tlru needs a threshold above next_prompt_estimate, as in SGLang; give them")
        return rules.get("protected_threshold", 0), spared // page

    def page_and_mark_bytes(self, limits: Limits) -> tuple[float, float]:
        """Bytes of a page of the layers that keep all, and of a page or state of those with a pool of their own."""
        if limits.states is not None:
            return limits.block_bytes, limits.states.own_bytes
        own_bytes = limits.window.own_bytes if limits.window is not None else 0.0
        return limits.block_bytes - self.swa_full_tokens_ratio * own_bytes, own_bytes

    def num_on_host(self, limits: Limits) -> tuple[int, int]:
        """Pages of the host's pool, and of the layers with a pool of their own; 0: there is none."""
        if not self.enable_hierarchical_cache:
            return 0, 0
        pages, size, ratio = limits.num_gpu_blocks, limits.block_size, self.hicache_ratio
        marks, mark_tokens = limits.window.own_blocks if limits.window else None, size
        if limits.states is not None:
            marks, mark_tokens = limits.states.own_slots, 1
        if self.hicache_size:
            page_bytes, mark_bytes = self.page_and_mark_bytes(limits)
            ratio = self.hicache_size * 1e9 / (pages * page_bytes + (marks or 0) * mark_bytes)
        host_marks = int(marks * mark_tokens * ratio) // mark_tokens + 1 if marks else 0
        return int(pages * size * ratio) // size + 1, host_marks

    def num_stored_pages(self, page_bytes: float) -> int | None:
        """Pages that storage holds, of `page_bytes` on all GPUs together; None: as many as are written."""
        space = self.hicache_storage_space
        return None if space is None else int(space * GIB / page_bytes)

    def drive(self, page_bytes: float) -> Drive:
        """What reads and writes of such pages take."""
        return Drive(
            page_bytes,
            read_bytes_per_s=self.hicache_storage_read_gb_per_s * 1e9,
            write_bytes_per_s=self.hicache_storage_write_gb_per_s * 1e9,
            latency_s=self.hicache_storage_latency_us / 1e6,
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.eviction_rules(1)
        if self.enable_priority_scheduling and self.schedule_policy not in ("fcfs", "lof"):
            raise UserError(
                "sglang enable-priority-scheduling: goes with schedule-policy fcfs or lof, not "
                f"{self.schedule_policy}, as in SGLang"
            )
        for name, default in AGREED.items():
            if self.enable_dp_attention and getattr(self, name) != default:
                raise UserError(
                    f"sglang {name.replace('_', '-')}: ranks of enable-dp-attention agree on it in SGLang; that is "
                    "not simulated; leave one of them out"
                )
        if self.retraction_policy == "priority" and not self.enable_priority_scheduling:
            raise UserError("sglang retraction-policy: priority goes with enable-priority-scheduling, as in SGLang")
        if self.ignore_eos and self.max_new_tokens:
            raise UserError(
                f"sglang max-new-tokens: {self.max_new_tokens} is what requests ask for, and with ignore-eos they "
                "generate all of it, not what the trace says; leave one of them out"
            )
        if self.enable_mixed_chunk and self.chunked_prefill_size < 0:
            raise UserError(
                "sglang enable-mixed-chunk: decodes ride along with chunks; leave chunked-prefill-size -1 out"
            )
        if self.enable_hierarchical_cache and self.disable_radix_cache:
            raise UserError("sglang enable-hierarchical-cache: keeps the radix tree; leave disable-radix-cache out")
        if self.hicache_storage_backend is not None and not self.enable_hierarchical_cache:
            raise UserError("sglang hicache-storage-backend: is behind the host; give enable-hierarchical-cache, too")
