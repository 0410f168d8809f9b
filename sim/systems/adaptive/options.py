"""Options of `adaptive`'s parts, wherever they are mixed in."""

from typing import ClassVar, Literal

from sim.engine.predictor import ACCURACY, LengthPredictor, build_predictor
from sim.frozen import frozen
from sim.parts.batching.async_scheduling import AsyncScheduling
from sim.parts.options import Only, option

TTFT_MS, TPOT_MS = 3000.0, 200.0
"""What is to be met where neither its own options nor goodput say so."""


@frozen
class AdaptiveOptions(AsyncScheduling):
    """What is to be met, and what is known of output lengths."""

    keeps_own_slos: ClassVar[bool] = True
    """Each request's, where the trace has them."""
    ttft_slo_ms: float | None = option(
        None, f"TTFT to meet, ms (default: that of --goodput, else {TTFT_MS:g})", within=(1e-3, 1e9)
    )
    tpot_slo_ms: float | None = option(
        None, f"TPOT to meet, ms (default: that of --goodput, else {TPOT_MS:g})", within=(1e-3, 1e9)
    )
    patience_s: float = option(
        0.0,
        "what has waited so long is served whatever it costs, s; 0: nothing is",
        within=(0.0, 1e9),
        only=Only("late", "wait"),
    )
    late: Literal["wait", "refuse"] = option(
        "wait", "what cannot have its first token in time waits for the time that is left, or is turned away (refuse)"
    )
    mechanism: Literal["price", "swap"] = option(
        "price", "what leaves is swapped, or computed again where that costs less (price), or always swapped (swap)"
    )
    predictor: Literal["oracle", "bucket", "none"] = option(
        "bucket", "output lengths are known, predicted by class with predictor-accuracy, or unknown"
    )
    predictor_accuracy: float = option(
        ACCURACY,
        "probability that the predictor names the right class",
        within=(0.0, 1.0),
        only=Only("predictor", "bucket"),
    )

    @property
    def ttft_slo_s(self) -> float:
        """TTFT to meet, s."""
        return (TTFT_MS if self.ttft_slo_ms is None else self.ttft_slo_ms) / 1e3

    @property
    def tpot_slo_s(self) -> float:
        """TPOT to meet, s."""
        return (TPOT_MS if self.tpot_slo_ms is None else self.tpot_slo_ms) / 1e3

    def length_predictor(self, seed: int) -> LengthPredictor:
        """What order and eviction are to know of output lengths."""
        return build_predictor(self.predictor, self.predictor_accuracy, seed)
