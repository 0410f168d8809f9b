"""How parts other than memories are built, and with what they go."""

from typing import TYPE_CHECKING

from sim.errors import UserError
from sim.systems.adaptive_options import AdaptiveOptions
from sim.systems.builder import Builder
from sim.systems.ellm_options import TokenWiseOptions
from sim.systems.fastserve_options import MlfqOptions
from sim.systems.hand_over_options import HandOverOptions, MixedPoolOptions
from sim.systems.layerkv_options import LayerKVOptions
from sim.systems.memory_builders import block_seconds
from sim.systems.radix_options import RadixOptions
from sim.systems.vllm_v1_options import VllmV1Options

if TYPE_CHECKING:
    from sim.parts.base import Admission, Eviction, Order, Stage
    from sim.parts.batching.base import Batching


def fcfs(b: Builder) -> "Order":
    from sim.parts.order.fcfs import Fcfs

    return Fcfs()


def priority(b: Builder) -> "Order":
    from sim.parts.order.priority import Priority

    return Priority()


def mlfq(b: Builder) -> "Order":
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


def triage(b: Builder) -> "Order":
    from sim.parts.order.triage import Triage

    options = b.options(AdaptiveOptions)
    return Triage(options.ttft_slo_ms / 1e3, options.tpot_slo_ms / 1e3, options.patience_s)


def lpm(b: Builder) -> "Order":
    from sim.parts.order.cache_aware import CacheAware

    return CacheAware(longest=b.options(RadixOptions).lpm_longest)


def dfs_weight(b: Builder) -> "Order":
    from sim.parts.order.cache_aware import CacheAware

    return CacheAware(by_branch=True)


def prefix_groups(b: Builder) -> "Order":
    from sim.parts.order.prefix_groups import PrefixGroups

    return PrefixGroups()


def token_wise_admission(b: Builder) -> "Admission":
    from sim.parts.admission.token_wise import BatchAndRatio

    options = b.options(TokenWiseOptions)
    times = options.step_times(b.deployment, b.limits.block_size)
    return BatchAndRatio(
        times, options.tpot_slo_ms / 1e3,
        printed=options.printed, fused=options.fused, overlapped=options.overlapped,
    )  # fmt: skip


def watermark(b: Builder) -> "Admission":
    from sim.parts.admission.watermark import Watermark

    return Watermark(b.limits.num_gpu_blocks)


def memory_alone(b: Builder) -> "Admission":
    from sim.parts.admission.watermark import Watermark

    return Watermark(b.limits.num_gpu_blocks, 0.0)


def slack(b: Builder) -> "Admission":
    from sim.parts.admission.slack import SlackAdmission

    options = b.options(LayerKVOptions)
    return SlackAdmission(
        b.limits.num_gpu_blocks,
        b.equations().prefill_s,
        options.tpot_slo_ms / 1e3,
        drop_irrecoverable=options.drop_irrecoverable,
        lengths_known=options.lengths_known,
    )


def recompute(b: Builder) -> "Eviction":
    from sim.parts.eviction.recompute import Recompute

    return Recompute()


def swap(b: Builder) -> "Eviction":
    from sim.parts.eviction.swap import Swap

    return Swap()


def layer_offload(b: Builder) -> "Eviction":
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


def proactive_swap(b: Builder) -> "Eviction":
    from sim.parts.eviction.proactive_swap import ProactiveSwap

    return ProactiveSwap(b.options(MlfqOptions).min_free_blocks)


def park(b: Builder) -> "Eviction":
    from sim.parts.eviction.park import Park

    if b.names["batching"] != "paced":
        raise UserError("eviction=park asks whether a prompt is due: it goes with batching=paced")
    if b.names["memory"] != "paged":
        raise UserError("eviction=park moves whole sequences of memory=paged: it goes with that alone")
    return Park(by_price=b.options(AdaptiveOptions).mechanism == "price")


def direct(b: Builder) -> "Stage":
    from sim.parts.stage.direct import Direct

    return Direct()


def promote(b: Builder) -> "Stage":
    from sim.parts.stage.promote import Promote

    return Promote(b.layer_blocks("stage=promote"))


def stream(b: Builder) -> "Stage":
    from sim.parts.stage.stream import Stream

    options = b.options(LayerKVOptions)
    return Stream(b.layer_blocks("stage=stream"), options.tpot_slo_ms / 1e3 if options.slo_aware else None)


def partial_recompute(b: Builder) -> "Stage":
    from sim.parts.stage.partial_recompute import PartialRecompute

    if b.names["memory"] != "hosted-layers":
        raise UserError("stage=partial-recompute decodes from the host alone: it goes with memory=hosted-layers")
    return PartialRecompute(b.layer_blocks("stage=partial-recompute"), block_seconds(b))


def hand_over(b: Builder) -> "Stage":
    role, options = b.deployment.role, b.options(HandOverOptions)
    if role != "both" and b.options(MixedPoolOptions).mixed_pool:
        from sim.parts.stage.mixed import Mixed

        if b.names["memory"] != "paged" or b.moves_whole:
            raise UserError("mixed-pool: goes with memory=paged and eviction=recompute")
        return Mixed(options.waiting_share, options.layer_wise, options.blocking_pull)
    if role == "prefill":
        from sim.parts.stage.hand_over import HandOver

        return HandOver(options.layer_wise)
    if role == "decode":
        from sim.parts.stage.pull import Pull

        return Pull(options.waiting_share, options.blocking_pull)
    # An engine that does both hands over to itself.
    return direct(b)


def vllm055(b: Builder) -> "Batching":
    if b.limits.enable_chunked_prefill:
        from sim.parts.batching.vllm055_chunked import Vllm055Chunked

        return Vllm055Chunked()
    from sim.parts.batching.prefill_first import PrefillFirst

    return PrefillFirst()


def request_level(b: Builder) -> "Batching":
    from sim.parts.batching.request_level import RequestLevel

    return RequestLevel()


def iteration_level(b: Builder) -> "Batching":
    from sim.parts.batching.iteration_level import IterationLevel

    return IterationLevel()


def sarathi(b: Builder) -> "Batching":
    from sim.parts.batching.stall_free import StallFree

    return StallFree(1)


def fastgen(b: Builder) -> "Batching":
    from sim.parts.batching.stall_free import StallFree

    return StallFree()


def quanta(b: Builder) -> "Batching":
    from sim.parts.batching.quanta import Quanta

    return Quanta()


def unified(b: Builder) -> "Batching":
    from sim.parts.batching.unified import Unified

    options = b.options(VllmV1Options)
    if b.offloading.offloads:
        from sim.parts.batching.unified_offloading import UnifiedOffloading as Unified
    return Unified(
        long_prefill_threshold=options.long_prefill_token_threshold,
        adaptive=options.long_prefill_token_threshold_adaptive,
        # vLLM counts its null block.
        watermark_blocks=int(options.watermark * (b.memory.gpu.num_blocks + 1)),
        reserve_whole_prompt=options.scheduler_reserve_full_isl,
        schedules_ahead=b.policy.schedules_ahead,
    )


def paced(b: Builder) -> "Batching":
    from sim.parts.batching.paced import Paced

    return Paced(
        long_prefill_threshold=0,
        adaptive=False,
        watermark_blocks=0,
        reserve_whole_prompt=True,
        schedules_ahead=b.policy.schedules_ahead,
    )


def sglang(b: Builder) -> "Batching":
    from sim.parts.batching.sglang import Sglang

    options = b.options(RadixOptions)
    return Sglang(conservativeness=options.schedule_conservativeness, max_new_tokens=options.max_new_tokens)
