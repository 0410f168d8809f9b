"""`HostedLayers`: layer-blocks of which none stays on the GPU: KV is on the host from the prefill on (KVPR)."""

from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING, ClassVar, Self

from sim.engine.layers import SEND_BUFFER_LAYERS
from sim.engine.sequence import Sequence
from sim.systems.kvpr.partial_recompute import BlockSeconds
from sim.systems.kvpr.preset import PartialRecomputeOptions
from sim.systems.layerkv.layer_blocks import LayerBlocks

if TYPE_CHECKING:
    from sim.systems.builder import Builder


class HostedLayers(LayerBlocks):
    """A prompt needs its send buffer on the GPU and room for all layers on the host; a full host lets it wait.

    Where a part of the KV is attended to (`--sparse-attention`), the index that finds it stays on the GPU, too: half of
    the GPU's pool may be for those of all that the host can hold, and it holds no more.
    """

    name: ClassVar[str] = "hosted-layers"
    options: ClassVar[type | None] = PartialRecomputeOptions

    @classmethod
    def build(cls, b: "Builder") -> Self:
        # Other stages stream all that is there.
        b.refuse_unlike_layers(selected=b.names["stage"] == "partial-recompute")
        seconds, gpu = BlockSeconds.of(b), b.limits.num_gpu_blocks
        host = int(b.limits.num_cpu_blocks / (1.0 + seconds.input_share))
        if seconds.index_share:
            host = min(host, int(gpu / 2 / seconds.index_share))
            gpu -= ceil(host * seconds.index_share)
        limits = replace(b.limits, num_gpu_blocks=gpu, num_cpu_blocks=host)
        return cls(limits, b.deployment.model.num_layers, lambda tokens: 0)

    def ever_fits(self, seq: Sequence, keep_free: int) -> bool:
        blocks = -(-seq.num_tokens // self.block_size)
        buffer = min(SEND_BUFFER_LAYERS, self.num_groups) * blocks
        on_host = self.num_groups * blocks <= self.host.num_blocks
        return on_host and self.gpu.num_blocks - keep_free * self.num_groups >= buffer

    def layers_to_keep(self, seq: Sequence, keep_free: int) -> int | None:
        blocks, layers = -(-seq.num_tokens // self.block_size), self.num_groups
        on_gpu = min(SEND_BUFFER_LAYERS, layers) * blocks + keep_free * layers
        return 0 if on_gpu <= self.gpu.free and layers * blocks <= self.host.free else None
