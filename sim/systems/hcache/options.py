"""Options of HCache's memories, and the split of layers that a deployment's prices ask for."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sim.engine.limits import Deployment, Limits
from sim.parts.options import option

if TYPE_CHECKING:
    from sim.cost.restoring import LayerSplit, StateBytes

SPLIT_TOKENS = 1024
"""Tokens for which the split of layers is the best."""


@dataclass(frozen=True)
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
