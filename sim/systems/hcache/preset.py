"""HCache (Gao et al., "Fast State Restoration in LLM Serving with HCache", EuroSys '25), on vLLM 0.5.5.

The input of every layer, its hidden state, is half the size of its keys and values under multi-head attention, and
makes them by one projection. Saved as it is computed, it brings a sequence back sooner than copies of KV or
recomputation; the rest of the layers is copied or computed again, so that link and GPU are busy alike.

`keeps` says whose states: those of all that run, for when they are preempted (as eLLM's authors rebuilt it within
vLLM), or those of ended turns, for the next turn (`turns`, the paper's case).

States leave as they are computed, since KV does not give them back. Under `turns` the host has room for those of all
that the GPU holds: any sequence's, when it ends, are to be kept.

Assumed: the split is the one that restores 1,024 tokens soonest by the run's own prices, and stays; states fill host
memory (`--swap-space`), no SSD; each GPU of a group reads whole hidden states. Where these are larger than the KV
(grouped queries) layers are copied or computed again, by price.
"""

from typing import TYPE_CHECKING, ClassVar, Literal

from sim.engine.limits import Deployment, Limits
from sim.frozen import frozen
from sim.parts.options import option
from sim.systems.base import VLLM055, Policy
from sim.systems.vllm055 import vllm055_limits

if TYPE_CHECKING:
    from sim.cost.restoring import LayerSplit, StateBytes


SPLIT_TOKENS = 1024
"""Tokens for which the split of layers is the best."""


@frozen
class StatesOptions:
    """Whose states are kept."""

    keeps: Literal["running", "turns"] = option(
        "running", "states of what runs, restored after a preemption, or of ended turns, restored for the next"
    )


def split_of(deployment: Deployment, limits: Limits) -> "tuple[LayerSplit, float, StateBytes]":
    """How layers are restored, the bytes kept of a token, of those of its KV, and the bytes that are copied."""
    from sim.cost.restoring import StateBytes, best_split, state_share  # noqa: PLC0415 - one system has it

    model, tp = deployment.model, deployment.tensor_parallel_size
    state = StateBytes(model.hidden_bytes_per_token_layer, limits.block_bytes / model.num_layers)
    split = best_split(deployment.cost, model.num_layers, SPLIT_TOKENS, limits.block_size, state)
    # A group keeps hidden states once.
    kept = state._replace(hidden_token=state.hidden_token / tp)
    return split, state_share(split, limits.block_size, kept), state


@frozen
class HCache(StatesOptions, Policy):
    """States on the host, layers restored in mixed ways."""

    name: ClassVar[str] = "hcache"
    summary: ClassVar[str] = "HCache: hidden states on the host, KV restored from them"
    default_swap_space_gib: ClassVar[float] = 128.0
    composition: ClassVar[dict[str, str]] = {**VLLM055, "memory": "saved-states", "eviction": "swap"}

    @property
    def names(self) -> dict[str, str]:
        """`keeps` is short for memory and eviction."""
        turns = {"memory": "tiered-states", "eviction": "recompute"} if self.keeps == "turns" else {}
        return {**self.composition, **turns, **dict(self.mixed)}

    engine_limits = vllm055_limits
