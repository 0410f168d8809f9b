"""Kernels that a model's layers are made of, as vLLM's compiled graph launches them where no CUDA graph was captured.

Counted in vLLM's models and layers. Norms take the residual along, gate and up are one product, rotary embedding takes
norms of queries and keys along, choosing experts and laying their tokens out are three kernels. Embedding, LM head and
sampler, about ten of an iteration, are not counted.
"""

from sim.specs.models import ModelSpec

ATTENTION = 6
"""Norm, query-key-value product, rotary embedding, cache write, attention, output product."""
LATENT_ATTENTION = 11
"""Norm, down products, norms of both latents, up products, rotary embedding, join, cache write, attention, output."""
GATED_DELTA_NET = 8
"""Norm, two products, convolution, gates, state update, gated norm, output product."""
DENSE_MLP = 4
"""Norm, gate and up product, activation, down product."""
EXPERTS = 9
"""Norm, router product, choice, layout (two), products, activation between them, sum."""
SHARED_EXPERTS = 4
"""Gate and up product, activation, down product, sum with the routed."""
PRODUCTS = 2
"""Products of attention, of an MLP and of experts, whose inputs are quantised by a kernel each."""
ALL_REDUCES = 2
"""Of a layer whose GPUs share it."""
DISPATCH_AND_COMBINE = 2
"""Of a layer with experts whose ranks meet there: tokens, choices and weights are gathered in one group of NCCL, which
is one kernel, and sums are scattered by another (`AgRsAll2AllManager`, vLLM 0.33's default)."""


def num_launches(model: ModelSpec, tp: int, ranks: int) -> int:
    """Kernels of all layers that each of the `tp` GPUs of each data-parallel rank is asked for in an iteration."""
    attention = LATENT_ATTENTION if model.mla else ATTENTION
    kernels = model.num_attention_layers * attention
    kernels += (model.num_layers - model.num_attention_layers) * GATED_DELTA_NET
    expert_layers = model.moe.num_moe_layers if model.moe else 0
    num_mlps = (model.gdn.mlp_layers if model.gdn else 0) or model.num_layers
    kernels += (num_mlps - expert_layers) * DENSE_MLP + expert_layers * EXPERTS
    if model.moe and model.moe.shared_intermediate_size:
        kernels += expert_layers * SHARED_EXPERTS
    if model.product_quantization and model.attention_dtype_bytes < model.dtype_bytes:
        kernels += (2 * model.num_layers - expert_layers) * PRODUCTS
    if model.fp32_flops_per_token:
        kernels += expert_layers  # that makes the router's input one of 32 bits
    if model.expert_quantization in ("fp8", "nvfp4"):
        kernels += expert_layers * PRODUCTS
    kernels += expert_layers * DISPATCH_AND_COMBINE if ranks > 1 else 0
    return kernels + (model.num_layers * ALL_REDUCES if tp > 1 else 0)
