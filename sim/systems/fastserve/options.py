"""Options of FastServe's parts, wherever they are mixed in."""

from dataclasses import dataclass

from sim.errors import UserError
from sim.parts.options import option


@dataclass(frozen=True)
class MlfqOptions:
    """What the skip-join queue and the proactive swapping can be told."""

    quantum_ms: float = option(10.0, "quantum of the first level, ms")
    quantum_factor: float = option(2.0, "how much longer each level's quantum is")
    num_levels: int = option(12, "levels; the last has no quantum")
    starvation_s: float = option(3.0, "a request that has waited so long goes to the first level")
    starvation_check: int = option(1000, "iterations between looks for requests that starve")
    min_free_blocks: int = option(0, "GPU blocks that proactive swapping keeps free, at least max-num-seqs")

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("quantum-ms", self.quantum_ms, 1e-6, 1e9),
            ("quantum-factor", self.quantum_factor, 1.0, 1e3),
            ("num-levels", self.num_levels, 1, 64),
            ("starvation-s", self.starvation_s, 0.0, 1e9),
            ("starvation-check", self.starvation_check, 1, 1e9),
            ("min-free-blocks", self.min_free_blocks, 0, 1e12),
        ):
            if not low <= value <= high:
                raise UserError(f"fastserve {name}: {value} is not between {low:g} and {high:g}")
