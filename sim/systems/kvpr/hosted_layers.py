"""`HostedLayers`: layer-blocks of which none stays on the GPU: KV is on the host from the prefill on (KVPR)."""

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Self

from sim.engine.layers import SEND_BUFFER_LAYERS
from sim.engine.sequence import Sequence
from sim.systems.kvpr.options import PartialRecomputeOptions
from sim.systems.kvpr.partial_recompute import BlockSeconds
from sim.systems.layerkv.layer_blocks import LayerBlocks

if TYPE_CHECKING:
    from sim.systems.builder import Builder


class HostedLayers(LayerBlocks):
    """A prompt needs its send buffer on the GPU and room for all layers on the host; a full host lets it wait."""

    name: ClassVar[str] = "hosted-layers"
    options: ClassVar[type | None] = PartialRecomputeOptions

    @classmethod
    def build(cls, b: "Builder") -> Self:
        b.refuse_unlike_layers()
        num_cpu_blocks = int(b.limits.num_cpu_blocks / (1.0 + BlockSeconds.of(b).input_share))
        return cls(replace(b.limits, num_cpu_blocks=num_cpu_blocks), b.deployment.model.num_layers, lambda tokens: 0)

    def ever_fits(self, seq: Sequence, keep_free: int) -> bool:
        blocks = -(-seq.num_tokens // self.block_size)
        buffer = min(SEND_BUFFER_LAYERS, self.num_groups) * blocks
        on_host = self.num_groups * blocks <= self.host.num_blocks
        return on_host and self.gpu.num_blocks - keep_free * self.num_groups >= buffer

    def layers_to_keep(self, seq: Sequence, keep_free: int) -> int | None:
        blocks, layers = -(-seq.num_tokens // self.block_size), self.num_groups
        on_gpu = min(SEND_BUFFER_LAYERS, layers) * blocks + keep_free * layers
        return 0 if on_gpu <= self.gpu.free and layers * blocks <= self.host.free else None
