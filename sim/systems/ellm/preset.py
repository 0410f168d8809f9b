"""eLLM (Chen et al., "High Throughput and Low Latency LLM Serving via Adaptive KV Caching", EuroSys '26).

A share r of all tokens, the first of each sequence, has no KV on the GPU: every decode step computes it again in some
layers and copies it in from the host in the others (section 4.3, six configurations). Every step chooses the batch
size b and r that promise the least time a token within the TPOT SLO (Eq. 1-5), requests first come, first served.
Blocks hold F layers (section 3.2).

What the paper leaves open, and what is done here:
- Eq. 5 as printed has no cost of a step: b then hangs on the solver's start. `equations="paper"` takes the largest b
  that memory and SLO allow. `corrected` prices reading as well and takes the b, r and configuration with the least T/b.
- WT_max is the longest time since the last token of one that runs: waiting requests exceed any TPOT under load.
- What runs goes on: b is chosen from there up. Where no b keeps to the SLO none is admitted; where memory holds those
  that run with no r whose T keeps to it, the last of them is computed again. One alone always goes on.
- Uncached tokens are computed again in the interleaved layers that the paper draws, though these need the output of the
  layers between. With `layer_order="contiguous"` the first layers compute and the last are copied, in whole blocks.
  That runs live as well, and waits for copies, of which few can run ahead.
- Newly uncached tokens leave before the step; those that are cached again are brought back once more.
- Threads of fused kernels are split by Eq. 8-9 in the form chosen; what a kernel takes is never as printed.
- Sequences lose the rest of their last block and of that at which their uncached tokens end.
"""

from typing import TYPE_CHECKING, ClassVar, Literal

from sim.engine.limits import Deployment
from sim.errors import UserError
from sim.frozen import frozen
from sim.parts.options import CheckedOptions, Only, option
from sim.systems.base import VLLM055, Policy, whole_prompt_limits

if TYPE_CHECKING:
    from sim.systems.ellm.equations import StepCosts


@frozen
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


@frozen
class Ellm(TokenWiseOptions, Policy):
    """The defaults are the paper's system with the corrected equations."""

    name: ClassVar[str] = "ellm"
    summary: ClassVar[str] = "eLLM: a share of all tokens uncached, rebuilt in every decode step"
    # 40 GB for one GPU, 160 for four.
    default_swap_space_gib: ClassVar[float] = 37.25
    composition: ClassVar[dict[str, str]] = {**VLLM055, "admission": "token-wise", "memory": "token-wise"}

    engine_limits = whole_prompt_limits
