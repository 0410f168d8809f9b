"""Options of eLLM's parts, wherever they are mixed in, and the constants that its equations get."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sim.engine.limits import Deployment
from sim.errors import UserError
from sim.parts.options import CheckedOptions, Only, option

if TYPE_CHECKING:
    from sim.systems.ellm.equations import StepCosts


@dataclass(frozen=True)
class TokenWiseOptions(CheckedOptions):
    """What the choice of batch size and uncached ratio, the blocks and the kernels can be told."""

    tpot_slo_ms: float = option(
        200.0, "TPOT that the choice of batch size and uncached ratio keeps to (Eq. 1), ms", within=(1e-3, 1e9)
    )
    equations: Literal["corrected", "paper"] = option("corrected", "Eq. 2-9 corrected, or as printed")
    layer_order: Literal["interleaved", "contiguous"] = option(
        "interleaved",
        "layers that compute uncached KV again: between copied ones, as in the paper, or the first, as a device can",
    )
    layers_per_block: int = option(4, "layers in a block (F)", within=(1, 1000))
    fused: bool = option(True, "compute uncached KV again in the kernels that decode, not before them")
    overlapped: bool = option(True, "copy uncached KV in beside the kernels, not after them")
    threads: int = option(
        1024, "threads a block, split between fused kernels in warps of 32", within=(64, 1 << 20), only=Only("fused")
    )
    map_lookup_us: float = option(
        15.0, "one access of the map table (section 6.7), for each layer group and step, us", within=(0.0, 1e9)
    )
    least_uncached_ratio: float = option(
        0.0, "share of all tokens that is uncached in any case, for study", within=(0.0, 1.0)
    )
    most_uncached_ratio: float = option(
        1.0, "share that may be, for study: else the last to start computes again", within=(0.0, 1.0)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.most_uncached_ratio < self.least_uncached_ratio:
            raise UserError(
                f"ellm most-uncached-ratio: {self.most_uncached_ratio} is less than least-uncached-ratio "
                f"{self.least_uncached_ratio}"
            )
        if self.threads % 32:
            raise UserError(f"ellm threads: {self.threads} is not a multiple of 32, a warp")

    @property
    def printed(self) -> bool:
        """Whether the equations are the paper's as printed."""
        return self.equations == "paper"

    def step_times(self, deployment: Deployment, block_size: int) -> "StepCosts":
        """Eq. 4-7 with a deployment's constants.

        A profile of form `linear` has no rates: both forms then take its coefficients, `block_size` tokens a block.
        """
        from sim.systems.ellm.equations import StepCosts, corrected_times, paper_times  # noqa: PLC0415 - numpy's

        model, gpu, tp = deployment.model, deployment.hardware, deployment.tensor_parallel_size
        linear, value = deployment.profile.linear, deployment.profile.value
        if linear is not None:
            base_s, seq_s, context_s = linear.decode
            _, token_s, square_s = linear.prefill
            swap_s = linear.swap_s_per_block / block_size
            return StepCosts(seq_s, context_s, token_s, square_s, swap_s=swap_s, fixed_s=base_s)
        links = -(-tp // gpu.gpus_per_pcie_link)
        h2d_bytes_per_s = links * value("h2d_bytes_per_s")
        if self.printed:
            times = paper_times(model, tp * gpu.fp16_flops_per_s)
            return times._replace(swap_s=model.kv_bytes_per_token() / h2d_bytes_per_s)
        return corrected_times(
            model,
            flops_per_s=tp * value("flops_per_s"),
            bytes_per_s=tp * value("hbm_bytes_per_s"),
            h2d_bytes_per_s=h2d_bytes_per_s,
            fixed_s=model.num_layers * value("layer_overhead_s"),
        )
