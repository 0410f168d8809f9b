"""FastServe (Wu et al., "Fast Distributed Inference Serving for Large Language Models", 2023).

A skip-join multi-level feedback queue over all unfinished requests, preemption at every iteration, and KV that moves to
the host and back ahead of need (parts `mlfq`, `quanta`, `proactive-swap`). Level i has a quantum of 10 ms x 2^i.
A request joins the first level whose quantum is at least its prefill time, is demoted when it has run for its quantum,
and keeps its place when it is overtaken. Thresholds follow the paper's public code where it has them.

Assumed:
- Prompts are computed whole, in one iteration with the decodes (Orca's selective batching, on which FastServe builds).
- Every iteration's whole duration counts against the quantum of everybody in it.
- Who goes out is the last in the queue; the paper estimates the next time each is scheduled, its code does as we do.
- When blocks run out in spite of it all, the last in the queue is swapped before the step, or computed again.

Not modelled: blocks are taken from nobody for a prompt, or for one on the host, that stands before others; both wait
until blocks are free. The paper's public code swaps the queue's tail out for them; `tests/systems` has both as cases
that are expected to fail.
"""

from dataclasses import dataclass
from typing import ClassVar

from sim.systems.base import Asked, EngineLimits, Policy, whole_prompt_limits
from sim.systems.fastserve_options import MlfqOptions


@dataclass(frozen=True)
class FastServe(MlfqOptions, Policy):
    """Short jobs first without knowing which they are."""

    name: ClassVar[str] = "fastserve"
    summary: ClassVar[str] = "FastServe: skip-join MLFQ, preemption every iteration, proactive swapping"
    # The paper's evaluation swaps up to 56 GB.
    default_swap_space_gib: ClassVar[float] = 56.0
    composition: ClassVar[dict[str, str]] = {
        "order": "mlfq",
        "batching": "quanta",
        "admission": "memory",
        "memory": "paged",
        "eviction": "proactive-swap",
        "stage": "direct",
    }

    def engine_limits(self, asked: Asked) -> EngineLimits:
        return whole_prompt_limits(self, asked)
