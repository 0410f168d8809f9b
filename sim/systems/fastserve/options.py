"""Options of FastServe's parts, wherever they are mixed in."""

from dataclasses import dataclass

from sim.parts.options import CheckedOptions, option


@dataclass(frozen=True)
class MlfqOptions(CheckedOptions):
    """What the skip-join queue and the proactive swapping can be told."""

    quantum_ms: float = option(10.0, "quantum of the first level, ms", within=(1e-6, 1e9))
    quantum_factor: float = option(2.0, "how much longer each level's quantum is", within=(1.0, 1e3))
    num_levels: int = option(12, "levels; the last has no quantum", within=(1, 64))
    starvation_s: float = option(3.0, "a request that has waited so long goes to the first level", within=(0.0, 1e9))
    starvation_check: int = option(1000, "iterations between looks for requests that starve", within=(1, 1e9))
    min_free_blocks: int = option(
        0, "GPU blocks that proactive swapping keeps free, at least max-num-seqs", within=(0, 1e12)
    )
