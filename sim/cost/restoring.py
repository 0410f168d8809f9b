"""Bringing a sequence's KV back, each layer in one of three ways (HCache): what it takes, and the best split of layers.

Gao et al., "Fast State Restoration in LLM Serving with HCache", EuroSys '25: layers whose input was saved project keys
and values from it, others copy them or are computed again, so that neither the link nor the GPU waits for the other.
"""

from typing import NamedTuple

from sim.cost.lanes import restored_s
from sim.cost.model import CostModel, LayerTimes, LayerWork


class LayerSplit(NamedTuple):
    """How many layers are computed again (the first), projected from hidden states, and copied (the last)."""

    recomputed: int
    hidden: int
    copied: int


class StateBytes(NamedTuple):
    """What is kept of a layer, per GPU: bytes of a token's hidden state, and of a block of keys and values."""

    hidden_token: float
    kv_block: float


def restore_times(
    cost: CostModel, split: LayerSplit, num_tokens: int, num_blocks: int, state: StateBytes
) -> list[LayerTimes]:
    """What each class of layers takes of the lanes for `num_tokens` tokens, `num_blocks` blocks of KV a layer."""
    copies = cost.num_copies(num_blocks, 1)
    return [
        cost.layer_s(LayerWork(split.recomputed, 0.0, recompute_tokens=num_tokens)),
        cost.layer_s(
            LayerWork(split.hidden, 0.0, num_tokens * state.hidden_token, min(1, num_tokens), project_tokens=num_tokens)
        ),
        cost.layer_s(LayerWork(split.copied, 0.0, num_blocks * state.kv_block, copies)),
    ]


def best_split(cost: CostModel, num_layers: int, num_tokens: int, block_size: int, state: StateBytes) -> LayerSplit:
    """The split that restores `num_tokens` tokens soonest; of equal ones that with most layers copied.

    HCache mixes hidden states with the one other way that fills the lane they leave idle. Where hidden states are no
    smaller than KV (grouped queries), everything is copied or the first layers are computed again.
    """
    blocks = -(-num_tokens // block_size)
    with_copies = [LayerSplit(0, hidden, num_layers - hidden) for hidden in range(num_layers + 1)]
    with_recomputed = [LayerSplit(num_layers - hidden, hidden, 0) for hidden in range(num_layers - 1, 0, -1)]
    # One call prices each class: only the counts differ.
    priced = restore_times(cost, LayerSplit(num_layers, num_layers, num_layers), num_tokens, blocks, state)
    return min(
        with_copies + with_recomputed,
        key=lambda split: restored_s(times._replace(num_layers=n) for times, n in zip(priced, split, strict=True)),
    )


def state_share(split: LayerSplit, block_size: int, state: StateBytes) -> float:
    """Bytes that are kept of a token, of those that its KV takes in all layers."""
    hidden = split.hidden * state.hidden_token * block_size
    return (hidden + split.copied * state.kv_block) / (sum(split) * state.kv_block)
