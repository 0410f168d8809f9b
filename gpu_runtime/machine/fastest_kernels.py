"""`--attention-backend fastest`: the kernels that this model's layers take the least time with, by a measurement."""

from collections.abc import Mapping
from math import prod
from statistics import median
from time import perf_counter

import numpy as np
import torch

from gpu_runtime.device_stream import finish
from gpu_runtime.kv.pool import KVPool
from gpu_runtime.model.attention_batch import AttentionBatch
from gpu_runtime.model.decoder import Decoder
from gpu_runtime.model.kernels import Kernels

BATCHES = (([1] * 16, [496] * 16), ([512], [0]), ([256, *[1] * 8], [256, *[496] * 8]))
"""New and cached tokens: decodes, a prompt, a chunk beside decodes. As often as one another, for want of a trace."""
BLOCK_TOKENS = 16
WARM_UPS, REPEATS = 2, 9
WORTH = 0.97
"""Of the first kernels' time others must take less: what differs by less may be chance."""


def fastest(decoder: Decoder, candidates: Mapping[str, Kernels]) -> Kernels:
    """Those of the candidates that take the least time, the first unless others are clearly faster; they say so.

    Times of batches are compared by their ratios, whose geometric mean counts.
    """
    times_s = {name: [_layer_s(decoder, kernels, *batch) for batch in BATCHES] for name, kernels in candidates.items()}
    if decoder.group is not None:
        # All ranks take the same, by one rank's clock.
        times_s = {name: decoder.group.of_first(found) for name, found in times_s.items()}
    first = next(iter(candidates))
    ratios = {
        name: prod(own / of_first for own, of_first in zip(found, times_s[first], strict=True)) ** (1 / len(found))
        for name, found in times_s.items()
    }
    best = min(ratios, key=ratios.__getitem__)
    chosen = best if ratios[best] < WORTH else first
    longer = {name: ratio / ratios[chosen] for name, ratio in ratios.items() if name != chosen}
    others = ", ".join(f"{name} took {ratio:.2f} times as long" for name, ratio in longer.items())
    candidates[chosen].why = f"chosen by a measurement: {others}" if others else "no others here"
    return candidates[chosen]


def _layer_s(decoder: Decoder, kernels: Kernels, num_new: list[int], context: list[int]) -> float:
    """Median seconds of the first layer on a batch, on noise."""
    longest = decoder.config.max_position_embeddings
    context = [max(0, min(cached, longest - new)) for new, cached in zip(num_new, context, strict=True)]
    num_new = [min(new, longest) for new in num_new]
    device, dtype = decoder.device, decoder.dtype
    widths = [-(-(new + cached) // BLOCK_TOKENS) for new, cached in zip(num_new, context, strict=True)]
    pool = KVPool(decoder.config, sum(widths), BLOCK_TOKENS, decoder.config.num_layers, device, dtype)
    ends = np.cumsum(widths).tolist()
    tables = [[list(range(end - width, end)) for end, width in zip(ends, widths, strict=True)]]
    batch = AttentionBatch.build(num_new, context, tables, BLOCK_TOKENS, device)
    hidden = torch.randn(sum(num_new), decoder.config.hidden_size, device=device, dtype=dtype)
    decoder.compute_with(kernels)
    times_s: list[float] = []
    with torch.inference_mode():
        for _ in range(WARM_UPS + REPEATS):
            finish(device)
            begun_s = perf_counter()
            decoder.layers[0].forward(hidden, batch, pool, 0)
            finish(device)
            times_s.append(perf_counter() - begun_s)
    return median(times_s[WARM_UPS:])
