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

from dataclasses import dataclass
from typing import ClassVar

from sim.systems.base import Policy
from sim.systems.layerkv.options import LayerKVOptions
from sim.systems.vllm055 import vllm055_limits


@dataclass(frozen=True)
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
