"""Sarathi-Serve (Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", OSDI 2024).

Stall-free batching: each iteration takes one token of each decode, then a chunk of the one half-done prompt,
then a chunk of a new one, up to the chunk size (`--max-num-batched-tokens`, 512). One prompt an iteration, as in its
public code without rolling prefills, its default. Blocks for the whole prompt at admission, above vLLM's watermark;
what finds no block preempts the tail, which is computed again.
"""

from typing import ClassVar

from sim.frozen import frozen
from sim.systems.base import VLLM055, Policy, chunked_limits


@frozen
class Sarathi(Policy):
    """Chunked prefills that no decode waits for."""

    name: ClassVar[str] = "sarathi"
    summary: ClassVar[str] = "Sarathi-Serve: stall-free batches, decodes first, one prompt in chunks"
    composition: ClassVar[dict[str, str]] = {**VLLM055, "batching": "sarathi"}

    engine_limits = chunked_limits
