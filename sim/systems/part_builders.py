"""How parts other than memories are built, and with what they go."""

from typing import TYPE_CHECKING

from sim.errors import UserError
from sim.systems.adaptive_options import AdaptiveOptions
from sim.systems.builder import Builder, Known, KnownEviction
from sim.systems.ellm_options import TokenWiseOptions
from sim.systems.fastserve_options import MlfqOptions
from sim.systems.hand_over_options import HandOverOptions, MixedPoolOptions
from sim.systems.kvpr_options import PartialRecomputeOptions
from sim.systems.layerkv_options import LayerKVOptions
from sim.systems.memory_builders import block_seconds
from sim.systems.radix_options import RadixOptions

if TYPE_CHECKING:
    from sim.parts.base import Admission, Eviction, Order, Stage


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
    from sim.parts.stage.direct import Direct

    return Direct()


MLFQ = Known(mlfq, MlfqOptions)
TRIAGE = Known(triage, AdaptiveOptions)
LPM = Known(lpm, RadixOptions)
DFS_WEIGHT = Known(dfs_weight)
PREFIX_GROUPS = Known(prefix_groups)
SLACK = Known(slack, LayerKVOptions)
TOKEN_WISE = Known(token_wise_admission, TokenWiseOptions)
LAYER_OFFLOAD = KnownEviction(layer_offload, LayerKVOptions)
PARK = KnownEviction(park)
PROACTIVE_SWAP = KnownEviction(proactive_swap, MlfqOptions, moves_whole=True)
PROMOTE = Known(promote, LayerKVOptions)
STREAM = Known(stream, LayerKVOptions)
PARTIAL_RECOMPUTE = Known(partial_recompute, PartialRecomputeOptions)
HAND_OVER_STAGE = Known(hand_over, HandOverOptions)
