"""How many threads compute on a CPU: as many as are fastest here and now.

torch takes one a core. Where others use the cores, threads wait for each other at every operation, and a small model's
iterations take many times as long.
"""

import os
from time import perf_counter

import torch

from gpu_runtime.model.config import DecoderConfig

SETTING = "OMP_NUM_THREADS"
TIMED = 15
ROWS = (1, 64)
"""Tokens of the products that are timed: a decode, and a prompt or a batch."""
WORTH = 0.9
"""More threads must take less than this share of the time of fewer."""


def use_fastest_threads(config: DecoderConfig, dtype: torch.dtype) -> None:
    """Compute with the number of threads that a product of the model's MLP is fastest with.

    `OMP_NUM_THREADS`, where set, is kept. Results and reports name the number.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if SETTING in os.environ or cores == 1:
        return
    weight = torch.ones(config.intermediate_size, config.hidden_size, dtype=dtype)
    rows = [torch.ones(count, config.hidden_size, dtype=dtype) for count in ROWS]
    torch.set_num_threads(1)
    best, best_s = 1, _median_s(weight, rows)
    for count in sorted({*(1 << power for power in range(1, cores.bit_length())), cores}):
        torch.set_num_threads(count)
        taken_s = _median_s(weight, rows)
        if taken_s < WORTH * best_s:
            best, best_s = count, taken_s
    torch.set_num_threads(best)


def _median_s(weight: torch.Tensor, rows: list[torch.Tensor]) -> float:
    """Seconds of one product of each, half of the time more."""
    found = []
    for _ in range(TIMED):
        begun_s = perf_counter()
        for tokens in rows:
            torch.nn.functional.linear(tokens, weight)
        found.append(perf_counter() - begun_s)
    return sorted(found)[TIMED // 2]
