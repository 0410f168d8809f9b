"""Options of LayerKV's parts, wherever they are mixed in."""

from dataclasses import dataclass
from typing import Literal

from sim.engine.predictor import ACCURACY, LengthPredictor, build_predictor
from sim.parts.admission.watermark import WATERMARK
from sim.parts.options import CheckedOptions, Only, option


@dataclass(frozen=True)
class LayerKVOptions(CheckedOptions):
    """What slack admission, layer-blocks, forecast and the stages between prefill and decode can be told."""

    slo_aware: bool = option(True, "admit prefills only within the TPOT slack of decodes (Algorithm 1)")
    tpot_slo_ms: float = option(200.0, "TPOT that Algorithm 1 defends, ms", within=(1e-3, 1e9), only=Only("slo_aware"))
    decode: Literal["promote", "stream"] = option(
        "promote", "sequences with layers on the host wait and copy them back once, or stream them every step"
    )
    equations: Literal["corrected", "paper"] = option("corrected", "Eq. 3-5 corrected, or as printed")
    horizon_steps: int = option(8, "iterations that the Eq. 5 forecast looks ahead", within=(1, 10_000))
    threshold: float = option(
        WATERMARK, "share of the GPU's layer-blocks under which the forecast offloads", within=(0.0, 1.0)
    )
    drop_irrecoverable: bool = option(
        True, "leave requests that can no longer meet their TPOT out of Eq. 2", only=Only("slo_aware")
    )
    predictor: Literal["oracle", "bucket", "none"] = option(
        "oracle", "output lengths are known, predicted by class with predictor-accuracy, or unknown"
    )
    predictor_accuracy: float = option(
        ACCURACY,
        "probability that the predictor names the right class",
        within=(0.0, 1.0),
        only=Only("predictor", "bucket"),
    )

    def length_predictor(self, seed: int) -> LengthPredictor:
        """What slack and forecast are to know of output lengths."""
        return build_predictor(self.predictor, self.predictor_accuracy, seed)

    @property
    def printed(self) -> bool:
        """Whether the equations are the paper's as printed."""
        return self.equations == "paper"

    @property
    def lengths_known(self) -> bool:
        """Whether predictions are the lengths themselves."""
        return self.predictor == "oracle"
