"""`HostedLayers`: layer-blocks of which none stays on the GPU: KV is on the host from the prefill on (KVPR)."""

from sim.engine.layers import SEND_BUFFER_LAYERS
from sim.engine.sequence import Sequence
from sim.kv.layer_blocks import LayerBlocks


class HostedLayers(LayerBlocks):
    """A prompt needs its send buffer on the GPU and room for all layers on the host; a full host lets it wait."""

    def ever_fits(self, seq: Sequence, keep_free: int) -> bool:
        blocks = -(-seq.num_tokens // self.block_size)
        buffer = min(SEND_BUFFER_LAYERS, self.num_groups) * blocks
        on_host = self.num_groups * blocks <= self.host.num_blocks
        return on_host and self.gpu.num_blocks - keep_free * self.num_groups >= buffer

    def layers_to_keep(self, seq: Sequence, keep_free: int) -> int | None:
        blocks, layers = -(-seq.num_tokens // self.block_size), self.num_groups
        on_gpu = min(SEND_BUFFER_LAYERS, layers) * blocks + keep_free * layers
        return 0 if on_gpu <= self.gpu.free and layers * blocks <= self.host.free else None
