"""Which layers of a model share a block: its group, and the place in a block of that."""

from collections.abc import Sequence

from gpu_runtime.model.config import DecoderConfig
from sim.engine.limits import WindowLimits
from sim.errors import InvariantError

Places = Sequence[tuple[int, int]]
"""By layer: group, place in a block."""


def places_by_window(config: DecoderConfig, window: WindowLimits, layer_group: int) -> Places:
    """Layers that attend to all in the first groups, those with a window in the others, as `sim.kv.hybrid` counts them.

    A group of each kind may have places that no layer takes.
    """
    found, counts = [], [0, window.num_full * layer_group]
    for layer in range(config.num_layers):
        has_window = config.window(layer) is not None
        found.append(divmod(counts[has_window], layer_group))
        counts[has_window] += 1
    if counts[0] > window.num_full * layer_group or counts[1] > (window.num_full + window.num_window) * layer_group:
        raise InvariantError(
            f"{config.name}: layers end at {counts} of blocks of {layer_group}, with {window.num_full} groups that "
            f"keep all and {window.num_window} that keep a window"
        )
    return found
