"""Prices of passes that bring KV back between their layers and keep none of it (eLLM section 4.3)."""

from sim.cost.model import CostModel
from sim.engine.changes import Rebuilt
from sim.engine.plan import IterationPlan, Origin, PrefillChunk


def kernels_s(cost: CostModel, plan: IterationPlan, record: Rebuilt, compute_s: float, layers: int) -> float:
    """Kernels that decode (`compute_s` alone) and compute again the KV of `record` in its share of the layers, s.

    Fused they are priced as one batch of prompts and decodes, so that computing fills the time of reading, and last
    longer by what whole warps lose; else the second kernels follow the first.
    """
    again = IterationPlan()
    again.chunks = tuple(PrefillChunk(seq, tokens, 0, Origin.CONTINUED) for seq, tokens in record.tokens)
    for _, tokens in record.tokens:
        again.prefill_tokens += tokens
        again.prefill_pairs += tokens * (tokens + 1) // 2
        again.prefill_squares += tokens * tokens
    share = len(record.recomputed) / layers
    if record.fused_loss is None:
        return compute_s + share * cost.iteration_s(again)
    again.num_decodes, again.decodes = plan.num_decodes, plan.decodes
    again.decode_context_tokens, again.decode_window = plan.decode_context_tokens, plan.decode_window
    again.decode_longest_tokens = plan.decode_longest_tokens
    return compute_s + share * max(0.0, cost.iteration_s(again) - compute_s) * record.fused_loss


def contiguous_s(
    record: Rebuilt, decode_s: float, again_s: float, read_s: float, wait_s: float, layers: int, group_layers: int
) -> float:
    """Duration of a pass whose first layers compute again (`again_s` in all), and whose last ones wait for copies, s.

    Copies follow one another from `wait_s` on, a layer group each (`read_s` in all). They pass in turn through the lots
    of scratch, but for one in which layers compute again where there are more. A group's copy starts once the group
    that had its lot before is computed (`decode_s` in all layers). Tokens that are to be cached need no lots.
    """
    first = len(record.recomputed)
    copied = range(first // group_layers, layers // group_layers)
    done_s = copied.start * group_layers * (decode_s / layers + again_s / first)
    scratch = max(change.num_scratch for change in record.after)
    lots = scratch - 1 if scratch > 1 else scratch or len(copied)
    free_s, arrived_s = [done_s if scratch == 1 else 0.0] * lots, wait_s
    for group in copied:
        arrived_s = max(arrived_s, free_s[-lots]) + read_s / len(copied)
        again = max(0, first - group * group_layers) / first
        done_s = max(done_s, arrived_s) + group_layers * decode_s / layers + again * again_s
        free_s.append(done_s)
    return done_s
