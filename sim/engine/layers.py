"""Which layers stay on the GPU: even spreads, as LayerKV section 3.1.2 interleaves them."""

from functools import lru_cache

SEND_BUFFER_LAYERS = 2
"""Layers of a prefill whose copies may be on their way while the next layers compute: layer l must be out before layer
l+2 is computed (LayerKV section 3.1.2)."""


@lru_cache(maxsize=1024)
def retained_layers(num_layers: int, kept: int) -> tuple[int, ...]:
    """Indices of `kept` layers spread evenly, the last one included (LayerKV section 3.1.2: 4 of 8 are 1, 3, 5, 7)."""
    return tuple((j + 1) * num_layers // kept - 1 for j in range(kept))


@lru_cache(maxsize=1024)
def offloaded_layers(num_layers: int, kept: int) -> tuple[int, ...]:
    """The layers that `retained_layers` leaves out."""
    return other_layers(num_layers, retained_layers(num_layers, kept))


@lru_cache(maxsize=4096)
def other_layers(num_layers: int, groups: tuple[int, ...]) -> tuple[int, ...]:
    """All layers but `groups`."""
    left_out = set(groups)
    return tuple(layer for layer in range(num_layers) if layer not in left_out)


@lru_cache(maxsize=4096)
def split_evenly(groups: tuple[int, ...], staying: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`staying` of `groups`, spread evenly, and the others."""
    chosen = set(retained_layers(len(groups), staying)) if staying else set()
    stay = tuple(group for i, group in enumerate(groups) if i in chosen)
    return stay, tuple(group for i, group in enumerate(groups) if i not in chosen)
