"""How many KV blocks fit: the pool as vLLM sizes it, `kv_cache_blocks`.

vLLM loads the weights, computes one dummy batch of max_num_batched_tokens tokens in max_num_seqs sequences, reads from
CUDA how much memory is gone, and gives the rest of gpu_memory_utilization to KV blocks:

    num_gpu_blocks = floor((utilization * total - peak) / block_bytes),  num_cpu_blocks = floor(swap / block_bytes)

There is no GPU here, so the peak is estimated: weights + max(forward, sampler) + what the engine takes beside them
(`EngineMemory`). Forward and sampler do not add up because PyTorch's allocator reuses the first's memory for the
second. `validation/kv_pools.py` compares with public logs of vLLM 0.5 to 0.19.
"""

from math import ceil, floor, lcm

import msgspec

from sim.errors import UserError
from sim.specs.expert_layout import ExpertLayout
from sim.specs.hardware import HardwareSpec
from sim.specs.model_spec import ModelSpec
from sim.specs.quantization import MXFP4_BYTES

ACTIVATION_BYTES = 2
"""Bytes of an activation element (fp16/bf16)."""
COLLECTIVE_BYTES_WITHOUT_NVLINK = 0.4e9
"""Most of `collective_bytes` where GPUs talk over PCIe: vLLM's own all-reduces need peers' memory (estimate)."""
LEAST_FLASHINFER_CAPABILITY = 9.0
"""CUDA compute capability from which vLLM 0.33 computes prompts of Gated DeltaNet with FlashInfer's kernel."""
HOPPER = 9.0
"""CUDA compute capability of the GPUs on which vLLM computes experts in MXFP4 with OpenAI's Triton kernels."""
EXPORT_TOKENS = 64
"""That kernel writes states out at multiples of so many tokens (vLLM's `FLASHINFER_GDN_CHECKPOINT_ALIGNMENT`)."""


class EngineMemory(msgspec.Struct, frozen=True):
    """What an engine takes of each GPU beside weights, activations and KV, bytes; the defaults are vLLM 0.5's."""

    sampler_bytes_per_logit: float = 38.0
    """Peak of sampling per (sequence, vocabulary entry). 38: half-precision logits 2, fp32 logits 4, sorted values 4
    and indices 8, probabilities 4, their sums 4, masks 2, the result 4; 6 for sorting fit logs of 0.5 and 0.6."""
    runtime_bytes: float = 0.1e9
    """cuBLAS workspaces, kernels, allocator rounding and fragmentation (fits the same logs)."""
    collective_bytes: float = 0.4e9
    """Buffers of NCCL and of all-reduces, where a group shares layers (0.42 GiB more on two H100 in a log of 0.11)."""
    graph_bytes_per_layer: float = 0.0
    """CUDA graphs, where they are counted before the pool is sized."""
    mxfp4_left_bytes: float = 0.0
    """On Hopper, per weight of experts in MXFP4: scales that were re-ordered for the kernels, and kept beside."""


OLDER = EngineMemory()
"""vLLM 0.5 to 0.13."""


class PoolSize(msgspec.Struct, frozen=True):
    """KV blocks of a tensor-parallel group. A block spans all layers; every GPU of the group holds its share of it."""

    num_gpu_blocks: int
    num_cpu_blocks: int
    block_bytes: float
    """Bytes of one block on one GPU."""
    num_states: int = 0
    """Of the pool beside (`StatePool`)."""


class StatePool(msgspec.Struct, frozen=True):
    """A pool for layers that keep a state, beside that of KV (SGLang's).

    Attributes:
        per_request: states that a request which runs may take.
        share: of the memory for both.
        num_states: of the pool; None: what its share holds, one less for padding.
    """

    per_request: int
    share: float = 0.0
    num_states: int | None = None


def activation_bytes(
    model: ModelSpec, tensor_parallel_size: int, max_num_batched_tokens: int, experts: ExpertLayout | None = None
) -> float:
    """Peak of the forward pass's tensors on one GPU, bytes: the larger of attention and MLP in one layer.

    Alive at the MLP's down projection: residual, input and output (h elements a token each), gate and up together
    and their product (3 f, split over the group; 2 f without a gate). At attention's output projection: residual,
    input and output, the projected queries, keys and values and the heads' result. Experts keep their inputs and
    outputs once per token and activated expert; data-parallel ranks gather those of all. Layers that keep a state:
    what is between their projections.
    """
    tp, heads = tensor_parallel_size, model.num_heads + model.num_kv_heads
    matrices = 3 if model.gated_mlp else 2
    hidden = 3 * model.hidden_size
    attention = hidden + 2 * heads * model.head_dim / tp
    if model.gdn:
        attention = max(attention, hidden + (model.gdn.conv_width + model.gdn.inner_width) / tp)
    mlp = hidden + matrices * model.intermediate_size / tp
    if model.moe:
        split, ranks = (tp, 1) if experts is None else (experts.width_split, experts.ranks)
        per_expert = matrices * model.moe.moe_intermediate_size / split + model.hidden_size
        mlp = max(mlp, hidden + ranks * model.moe.experts_per_token * per_expert)
    return max_num_batched_tokens * max(attention, mlp) * ACTIVATION_BYTES


def mxfp4_bytes(model: ModelSpec, hardware: HardwareSpec, experts: ExpertLayout, engine: EngineMemory) -> float:
    """Bytes that routed experts in MXFP4 take of a GPU beyond their share of the checkpoint; 0: in another format.

    vLLM 0.33 pads them to its kernels' tiles (`mxfp4_round_up_hidden_size_and_intermediate_size`): on Hopper a GPU's
    share of the width to multiples of 64, elsewhere (Marlin, TensorRT-LLM) of 128 and the hidden size of 256.
    """
    if model.moe is None or model.quantization != "mxfp4" or hardware.compute_capability is None:
        return 0.0
    on_hopper = floor(hardware.compute_capability) == HOPPER
    width_tile, hidden_tile = (64, 1) if on_hopper else (128, 256)
    width, hidden = model.moe.moe_intermediate_size / experts.width_split, model.hidden_size
    padded = ceil(width / width_tile) * width_tile / width * (ceil(hidden / hidden_tile) * hidden_tile / hidden)
    left = engine.mxfp4_left_bytes / MXFP4_BYTES if on_hopper else 0.0
    return (padded - 1 + left) * model.routed_weight_bytes / experts.gpus


def peak_bytes(
    model: ModelSpec,
    tensor_parallel_size: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    experts: ExpertLayout | None = None,
    engine: EngineMemory = OLDER,
) -> float:
    """Estimated memory in use on one GPU after vLLM's profiling run, bytes."""
    rows = min(max_num_seqs, max_num_batched_tokens)
    working = max(
        activation_bytes(model, tensor_parallel_size, max_num_batched_tokens, experts),
        # The first GPU of the group gathers the whole vocabulary and samples.
        # What went into the last norm and came out of it is still there.
        float(rows * model.vocab_size * engine.sampler_bytes_per_logit)
        + 2 * max_num_batched_tokens * model.hidden_size * ACTIVATION_BYTES,
    )
    gpus = tensor_parallel_size if experts is None else experts.gpus
    collective = engine.collective_bytes if gpus > 1 else 0.0
    return model.weight_bytes(tensor_parallel_size, gpus) + working + engine.runtime_bytes + collective


def kv_cache_blocks(
    model: ModelSpec,
    hardware: HardwareSpec,
    *,
    tensor_parallel_size: int,
    gpu_memory_utilization: float,
    block_size: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    swap_space_bytes_per_gpu: float,
    num_gpu_blocks_override: int | None = None,
    stored_layers: float | None = None,
    stage_layers: tuple[int, ...] = (),
    experts: ExpertLayout | None = None,
    further_weight_bytes: float = 0.0,
    draft_kv_bytes_per_token: float = 0.0,
    states: StatePool | None = None,
    engine: EngineMemory = OLDER,
) -> PoolSize:
    """The KV pool of groups of `tensor_parallel_size` GPUs, the stages of a pipeline: that of the one with most layers.

    Args:
        model: the model served.
        hardware: one GPU of the group and its host.
        tensor_parallel_size: GPUs in the group.
        gpu_memory_utilization: share of each GPU's memory that vLLM may use (its default is 0.9).
        block_size: tokens per block (vLLM: 16).
        max_num_batched_tokens: tokens of the profiled prefill.
        max_num_seqs: sequences of the profiled prefill.
        swap_space_bytes_per_gpu: host memory for swapped blocks per GPU (vLLM: 4 GiB).
        num_gpu_blocks_override: that many GPU blocks, whatever would fit (vLLM: --num-gpu-blocks-override).
        stored_layers: layers' worth of KV that a whole block has; None: all of the model's.
        stage_layers: layers of each stage (vLLM: --pipeline-parallel-size); none: one has all.
        experts: which GPUs share the routed experts; None: those of the group.
        further_weight_bytes: on each GPU, of what drafts tokens and of adapters.
        draft_kv_bytes_per_token: on each GPU, of the KV of what drafts, which the same blocks hold.
        states: a pool of states beside.
        engine: what the engine takes beside.

    Raises:
        UserError: an argument out of range, or not one block fits beside the weights.
    """
    _check(gpu_memory_utilization, tensor_parallel_size, block_size, max_num_batched_tokens, max_num_seqs)
    if not 0 <= swap_space_bytes_per_gpu * tensor_parallel_size <= hardware.host_memory_bytes:
        raise UserError(
            f"--swap-space (swap_space_bytes_per_gpu): {swap_space_bytes_per_gpu:g} times {tensor_parallel_size} GPUs "
            f"must be 0 to the host's {hardware.host_memory_bytes / 1e9:.0f} GB: choose less"
        )
    block_bytes = block_size * model.kv_bytes_per_token(tensor_parallel_size)
    if stored_layers is not None:
        block_bytes = block_size * stored_layers * model.kv_bytes_per_token_layer(tensor_parallel_size)
    block_bytes += block_size * draft_kv_bytes_per_token
    # The largest stage has one of so many equal parts of the model.
    parts = model.num_layers / max(stage_layers, default=model.num_layers)
    block_bytes /= parts
    num_cpu_blocks = int(swap_space_bytes_per_gpu // block_bytes)
    num_states = states.num_states if states else 0
    if num_gpu_blocks_override is not None and num_states is not None:
        return PoolSize(num_gpu_blocks_override, num_cpu_blocks, block_bytes, num_states)
    if hardware.nvlink_bytes_per_s is None:
        collective = min(engine.collective_bytes, COLLECTIVE_BYTES_WITHOUT_NVLINK)
        engine = msgspec.structs.replace(engine, collective_bytes=collective)
    peak = peak_bytes(model, tensor_parallel_size, max_num_batched_tokens, max_num_seqs, experts, engine)
    peak += engine.graph_bytes_per_layer * model.num_layers / parts
    whole = model.weight_bytes(tensor_parallel_size, experts.gpus if experts else None)
    kept = mxfp4_bytes(model, hardware, experts or ExpertLayout(tensor_parallel_size), engine)
    weights = (whole + kept) / parts
    peak += weights - whole + further_weight_bytes
    # A seat has its sequence's last tokens, whatever its blocks hold.
    peak += max_num_seqs * model.kv_residual_bytes(tensor_parallel_size) / parts
    usable = gpu_memory_utilization * hardware.memory_bytes
    if states and model.gdn:
        state_bytes = model.gdn.state_bytes(model.dtype_bytes, tensor_parallel_size) / parts
        if num_states is None:
            num_states = max(0, int((usable - peak) * states.share // state_bytes) - 1)
        peak += (num_states + 1) * state_bytes
    num_gpu_blocks = num_gpu_blocks_override or int((usable - peak) // block_bytes)
    if num_gpu_blocks < 1:
        raise _too_large(model, hardware, tensor_parallel_size, weights, peak + block_bytes, usable)
    return PoolSize(num_gpu_blocks, num_cpu_blocks, block_bytes, num_states or 0)


def state_block_size(model: ModelSpec, tp: int, block_size: int, *, within_chunks: bool) -> int:
    """Tokens of a block of a model with layers that keep a state (vLLM 0.33's `_align_hybrid_block_size`).

    The least multiple of `block_size` whose KV in one layer takes as many bytes as a state; of 64 as well where kernels
    write states out `within_chunks` of prompts.
    """
    if model.gdn is None:
        return block_size
    step = lcm(block_size, EXPORT_TOKENS if within_chunks else 1)
    page_bytes = model.gdn.page_bytes(model.dtype_bytes, tp)
    return step * ceil(page_bytes / (step * model.kv_bytes_per_token_layer(tp)))


def _check(utilization: float, tp: int, block_size: int, max_num_batched_tokens: int, max_num_seqs: int) -> None:
    if not 0 < utilization <= 1:
        raise UserError(f"gpu_memory_utilization: {utilization} is not between 0 and 1: vLLM's default is 0.9")
    counts = {
        "tensor_parallel_size": tp,
        "block_size": block_size,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_num_seqs": max_num_seqs,
    }
    for name, value in counts.items():
        if value < 1:
            raise UserError(f"{name}: {value} must be at least 1: correct the value")


def _too_large(
    model: ModelSpec, hardware: HardwareSpec, tp: int, weights: float, needed: float, usable: float
) -> UserError:
    """Of what one GPU needs and may use (bytes); `weights`: its share."""
    if weights < usable:
        remedy = "lower --max-num-batched-tokens or --max-num-seqs, or raise --tp (tensor_parallel_size)"
    else:
        remedy = "raise --tp (tensor_parallel_size), or take a GPU with more memory"
    share = ceil(100 * needed / hardware.memory_bytes) / 100
    if share <= 1.0:
        remedy = f"raise --gpu-memory-utilization to {share:.2f} or more, or {remedy.partition(', or take')[0]}"
    return UserError(
        f"{model.name} does not fit on {hardware.name} with tensor_parallel_size {tp}: needs "
        f"{needed / 1e9:.1f} GB per GPU ({weights / 1e9:.1f} GB of weights), may use {usable / 1e9:.1f} GB: {remedy}"
    )
