"""A mixture of experts (Shazeer et al. 2017): each token is computed by the few MLPs that a router ranks first."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from gpu_runtime.model import backend
from gpu_runtime.model.config import Experts
from gpu_runtime.model.fp8 import Fp8Matrix
from gpu_runtime.model.weights import LayerWeights


def mix_experts(hidden: Tensor, weights: LayerWeights, experts: Experts, act: Callable[[Tensor], Tensor]) -> Tensor:
    """[N, h] of [N, h]: what each token's experts give, by their shares of the router's softmax (Mixtral, Jiang 2024).

    On CUDA all experts' products are one kernel; elsewhere expert by expert, each for all its tokens.

    Args:
        hidden: normed.
        weights: of the layer, with `router`.
        experts: how many, and how many a token takes.
        act: [N, f] of gate and up [N, 2 f].
    """
    gate_up, down = weights.gate_up, weights.down
    if weights.router is None or isinstance(gate_up, Fp8Matrix) or isinstance(down, Fp8Matrix):
        raise ValueError("a layer with experts has no router, or FP8 experts")
    shares, chosen = linear(hidden, weights.router).softmax(dim=-1, dtype=torch.float32).topk(experts.per_token)
    if experts.renormalised:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    if backend.uses_triton(hidden):
        from gpu_runtime.model import triton_experts  # noqa: PLC0415 (CUDA only)

        return triton_experts.mix(hidden, gate_up, down, shares, chosen, act)
    out = torch.zeros_like(hidden)
    for expert in chosen.unique().tolist():
        rows, ranks = (chosen == expert).nonzero(as_tuple=True)
        computed = linear(act(linear(hidden[rows], gate_up[expert])), down[expert])
        out.index_add_(0, rows, computed * shares[rows, ranks, None].to(computed.dtype))
    return out
