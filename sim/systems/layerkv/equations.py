"""LayerKV's equations of single prompts (Eq. 3 and 4)."""

from typing import TYPE_CHECKING, Self

from sim.engine.limits import Deployment
from sim.systems.layerkv.preset import LayerKVOptions

if TYPE_CHECKING:
    from sim.systems.builder import Builder


class Equations:
    """LayerKV's Eq. 3 and 4 with a deployment's constants.

    Eq. 3 corrected is alpha s (2P + 2 L h s) / (G peak); the printed attention term lacks the L. Eq. 4 corrected counts
    KV heads, the links that the group shares, and two launches a layer; printed it takes all heads and a link of one's
    own. A profile of form `linear` has no alpha and beta: then both come from its measured coefficients.
    """

    def __init__(self, deployment: Deployment, block_size: int, *, printed: bool) -> None:
        """`block_size` tokens are what the linear form's seconds a block speak of."""
        model, gpu, tp = deployment.model, deployment.hardware, deployment.tensor_parallel_size
        self.num_layers = model.num_layers
        linear = deployment.profile.linear
        if linear is not None:
            base_s, token_s, square_s = linear.prefill
            self._prefill = (base_s, token_s, 0.0 if printed else square_s)
            self._offload_s_per_token_layer = linear.swap_s_per_block / (block_size * model.num_layers)
            self._launch_s_per_layer = 0.0
            return
        value = deployment.profile.value
        scale = value("alpha") / (tp * gpu.fp16_flops_per_s)
        attention = 2 * model.hidden_size * (1 if printed else model.num_layers)
        self._prefill = (0.0, scale * 2 * model.num_params, scale * attention)
        links = -(-tp // gpu.gpus_per_pcie_link)
        d2h_s_per_byte = tp / links / value("d2h_bytes_per_s")
        if printed:
            all_heads_bytes = 2 * model.num_heads * model.head_dim * model.kv_dtype_bytes
            self._offload_s_per_token_layer = value("beta") * all_heads_bytes / value("d2h_bytes_per_s")
            self._launch_s_per_layer = 0.0
        else:
            kv_bytes = model.kv_bytes_per_token_layer(tp)
            self._offload_s_per_token_layer = value("beta") * kv_bytes * d2h_s_per_byte
            # Keys and values are too few pieces to be asked for together.
            self._launch_s_per_layer = 2 * (value("copy_lone_s") or value("copy_launch_s"))

    @classmethod
    def of(cls, b: "Builder") -> Self:
        """Of the engine whose parts are built, corrected or as printed."""
        return cls(b.deployment, b.limits.block_size, printed=b.options(LayerKVOptions).printed)

    def prefill_s(self, num_tokens: int) -> float:
        """Eq. 3: predicted prefill of one prompt."""
        base_s, token_s, square_s = self._prefill
        return base_s + num_tokens * (token_s + square_s * num_tokens)

    def offload_s(self, num_tokens: int, layers: int) -> float:
        """Eq. 4: predicted copy of `layers` layers of a prompt's KV to the host."""
        return layers * (num_tokens * self._offload_s_per_token_layer + self._launch_s_per_layer)

    def minimum_layers(self, num_tokens: int) -> int:
        """Eq. 4: fewest layers x to keep so that offloading the rest hides behind the prefill."""
        per_layer_s = self.offload_s(num_tokens, 1)
        if per_layer_s <= 0.0:
            return 0
        return max(0, self.num_layers - int(self.prefill_s(num_tokens) / per_layer_s))
