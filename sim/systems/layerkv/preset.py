"""LayerKV (Xiong et al., "LayerKV: Optimizing LLM Serving with Layer-wise KV Cache Management"), on vLLM 0.5.5.

A prompt is admitted with the KV of as few as x layers on the GPU (Eq. 4); the other layers leave for the host behind
the prefill, so that it need not queue for blocks. Admission follows the TPOT slack of all that decode (Algorithm 1,
Eq. 1-3, part `slack`). A forecast of free blocks (Eq. 5, part `layer-offload`) offloads retained layers in stages
before memory runs out.

What the paper leaves open, and what is done here:
- Decode of a sequence with layers on the host: `promote` (default) parks it until its missing layers fit, copies them
  back once and lets it join; `stream` lets it decode at once and copies the missing layers back every step.
- Eq. 3 printed lacks the layer count in its attention term, Eq. 4 printed takes all heads and a link of one's own;
  `equations="paper"` decides with the printed forms, and forecasts one block a sequence and step instead of the blocks
  that the sequences' lengths say.
- "x/2 layers, then all" is read as half of the retained layers, most recently processed first: parked sequences before
  decoding ones.
- One request that can no longer meet its TPOT would stop every prefill: `drop_irrecoverable` leaves it out of Eq. 2.
- `max_num_seqs` bounds those that decode or are on the way back; parked sequences wait outside it.
- If memory runs out all the same, the last sequence of the batch is offloaded whole before the step (counted), or
  recomputed when the host is full, as vLLM would.
"""

from typing import ClassVar, Literal

from sim.engine.predictor import ACCURACY, LengthPredictor, build_predictor
from sim.frozen import frozen
from sim.parts.admission.watermark import WATERMARK
from sim.parts.options import CheckedOptions, Only, option
from sim.systems.base import Policy
from sim.systems.vllm055 import vllm055_limits


@frozen
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


@frozen
class LayerKV(LayerKVOptions, Policy):
    """The defaults are the paper's system with the corrected equations."""

    name: ClassVar[str] = "layerkv"
    summary: ClassVar[str] = "LayerKV: layer-wise KV blocks, offload behind prefill, SLO-aware admission"
    # The paper's testbed has 2 TB for eight GPUs.
    default_swap_space_gib: ClassVar[float] = 256.0
    composition: ClassVar[dict[str, str]] = {
        "order": "fcfs",
        "batching": "vllm",
        "admission": "slack",
        "memory": "layers",
        "eviction": "layer-offload",
        "stage": "promote",
    }

    @property
    def names(self) -> dict[str, str]:
        """Two options are short for parts: `slo_aware` for the admission, `decode` for the stage."""
        own = {**self.composition, "stage": self.decode, "admission": "slack" if self.slo_aware else "watermark"}
        return own | dict(self.mixed)

    engine_limits = vllm055_limits
