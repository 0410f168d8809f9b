"""Prices of passes that bring KV back between their layers and keep none of it (eLLM section 4.3)."""

from sim.cost.model import CostModel
from sim.engine.plan import IterationPlan, Origin, PrefillChunk, Rebuilt


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
    share = record.num_recomputed / layers
    if record.fused_loss is None:
        return compute_s + share * cost.iteration_s(again)
    again.num_decodes, again.decodes = plan.num_decodes, plan.decodes
    again.decode_context_tokens, again.decode_window = plan.decode_context_tokens, plan.decode_window
    return compute_s + share * max(0.0, cost.iteration_s(again) - compute_s) * record.fused_loss
