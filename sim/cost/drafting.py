"""What drafting takes, and what a drafting model keeps: of a model of its own, or of a head on the target (EAGLE, MTP).

After an iteration the drafting model passes over all of its tokens, rejected ones included, for its own KV and the
first drafted token, then once over a token of each sequence for each further one (vLLM's `propose`). A head is priced
as one layer of the target and its LM head; what merges its two inputs is left out. It shares embeddings and LM head,
and keeps that layer and its KV. Where prices are fitted to one model (forms `linear` and `paper`), a pass takes the
share of theirs that its floating-point operations are. N-gram look-up runs on the host and is free.

Or the target drafts by itself, reading a part of each context (`sparse_kv`: TriForce, Sun et al. 2024, without its
small model below; MagicDec, Chen et al. 2024): a pass for each drafted token, over KV that is there.

The target computes a drafted token as it does a decode, which reads KV together with the other rows of its sequence.
"""

from typing import TYPE_CHECKING

import msgspec

from sim.cost.forms import PaperCost
from sim.cost.model import CostModel, run_s
from sim.cost.roofline import RooflineCost
from sim.engine.plan import IterationPlan, WindowTokens
from sim.errors import UserError
from sim.specs.model_spec import ModelSpec
from sim.specs.models import load_model

if TYPE_CHECKING:
    from sim.engine.limits import Deployment
    from sim.parts.stage.speculative_options import SpeculativeOptions


def rows_s(cost: CostModel, verified: IterationPlan, num_sequences: int) -> float:
    """An iteration whose drafted tokens are decodes like others, but read with the others of their sequence, s.

    `num_sequences` are its decodes that are not drafted: KV is read in whole tiles once for each.
    """
    seconds = cost.iteration_s(verified) - cost.unread_s(verified.decode_shared_tokens)
    if type(cost) is RooflineCost:
        seconds -= cost.padding_s(verified.num_decodes) - cost.padding_s(num_sequences)
    return seconds


class Drafter:
    """Prices the passes of a drafting model.

    Args:
        cost: of its passes; or, `share` of 1 excepted, of passes of which its own take that share.
        num_tokens: that are drafted for each sequence.
    """

    def __init__(self, cost: CostModel, share: float, num_tokens: int) -> None:
        self.cost, self.share, self.num_tokens = cost, share, num_tokens

    def seconds(self, verified: IterationPlan, num_sequences: int, context_tokens: int) -> float:
        """Drafting after an iteration of these tokens, for so many sequences of these contexts in all."""
        seconds = rows_s(self.cost, verified, num_sequences)
        if self.num_tokens > 1:
            window = None
            if verified.decode_window and isinstance(self.cost, RooflineCost) and self.cost.kv.window:
                window = WindowTokens(min(context_tokens, num_sequences * self.cost.kv.window), 0)
            first_s, slope_s = self.cost.decode_run(num_sequences, context_tokens, window)
            seconds += (self.num_tokens - 1) * (first_s + slope_s * self.num_tokens / 2)
        return self.share * seconds


class SparseKVDrafter(Drafter):
    """Passes of the target over at most `budget` tokens of each context.

    Assumed: contexts are alike, as far as some are within the budget and some beyond.
    """

    def __init__(self, cost: CostModel, num_tokens: int, budget: int) -> None:
        super().__init__(cost, 1.0, num_tokens)
        self.budget = budget

    def seconds(self, verified: IterationPlan, num_sequences: int, context_tokens: int) -> float:
        most = num_sequences * self.budget
        first_s, slope_s = self.cost.decode_run(num_sequences, min(context_tokens, most))
        return run_s(first_s, slope_s if context_tokens < most else 0.0, self.num_tokens)


def build_drafter(options: "SpeculativeOptions", deployment: "Deployment") -> Drafter | None:
    """The prices of a method; None where drafting is free."""
    if options.spec_kv_budget is not None:
        return SparseKVDrafter(deployment.cost, options.spec_tokens or 0, options.spec_kv_budget)
    model = drafting_model(options, deployment.model)
    if model is None:
        return None
    cost, num_tokens = deployment.cost, options.spec_tokens or 0
    if isinstance(cost, RooflineCost) and not isinstance(cost, PaperCost):
        own = RooflineCost(model, deployment.hardware, deployment.profile, deployment.tensor_parallel_size)
        own.copies_beside_compute, own.padded = cost.copies_beside_compute, cost.padded
        return Drafter(own, 1.0, num_tokens)
    return Drafter(cost, _flops(model) / _flops(deployment.model), num_tokens)


def _flops(model: ModelSpec) -> float:
    return model.linear_flops_per_token + model.head_flops_per_token


def drafting_model(options: "SpeculativeOptions", target: ModelSpec) -> ModelSpec | None:
    """What drafts: the model named, one layer of the target for a head; None where it is no model, or the target.

    UserError where the model named has another vocabulary.
    """
    if options.spec_method in (None, "ngram", "sparse_kv"):
        return None
    if options.spec_model is None:
        return _layers_of(target, 1)
    model = load_model(options.spec_model)
    if model.vocab_size != target.vocab_size:
        raise UserError(
            f"spec-model: {model.name} has {model.vocab_size} words in its vocabulary and {target.name} "
            f"{target.vocab_size}; name one with the target's"
        )
    return model


def drafting_bytes(options: "SpeculativeOptions", target: ModelSpec, tp: int) -> tuple[float, float]:
    """What the method keeps on each GPU beside the target: bytes of weights, and of a token's KV."""
    model = drafting_model(options, target)
    if model is None:
        return 0.0, 0.0
    if options.spec_model is not None:
        return model.weight_bytes(tp), model.kv_bytes_per_token(tp)
    layer = _layers_of(target, 2).weight_bytes(tp) - model.weight_bytes(tp)
    return layer, model.kv_bytes_per_token(tp)


def _layers_of(model: ModelSpec, count: int) -> ModelSpec:
    moe = model.moe and msgspec.structs.replace(model.moe, num_moe_layers=count)
    return msgspec.structs.replace(
        model, name=f"{count} of {model.name}", num_layers=count, moe=moe, kv_layers=(), gdn=None
    )
