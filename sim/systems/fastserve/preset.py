"""FastServe (Wu et al., "Fast Distributed Inference Serving for Large Language Models", 2023).

A skip-join multi-level feedback queue over all unfinished requests, preemption at every iteration, and KV that moves to
the host and back ahead of need (parts `mlfq`, `quanta`, `proactive-swap`). Level i has a quantum of 10 ms x 2^i.
A request joins the first level whose quantum is at least its prefill time, is demoted when it has run for its quantum,
and keeps its place when it is overtaken. Thresholds follow the paper's public code where it has them.

Assumed:
- Prompts are computed whole, in one iteration with the decodes (Orca's selective batching, on which FastServe builds).
- Every iteration's whole duration counts against the quantum of each sequence in it.
- What goes out is the last in the queue; the paper estimates the next time each is scheduled, its code does as we do.
- Memory follows the queue: a prompt, or one of the first on the host, takes the blocks that it lacks from those behind
  it, the last first. Those are swapped before the step, which waits.
- It takes nothing where that is not enough, where the host has no room, or from one that fills the GPU and could not
  return; it waits for copies that will free what it lacks. Meanwhile none behind it takes blocks, not even free ones;
  one that has its blocks runs on.
- When decodes find no block, the last in the queue is swapped before the step, or computed again if the host is full.
- A demoted or promoted sequence goes to the tail of its new level; the public code puts it at the front.

Not modelled:
- The public code lets the iteration wait until those of its batch that were on the host are back. Here they return
  beside iterations of those that come next, and run at the first boundary after.
- It runs those at the queue's front only whose blocks fit together beside the blocks that shall be free, and swaps the
  rest of the batch. Here the threshold stops none that runs, and yields to those that return to the first places.
- It takes blocks for the batch from those that do not run beside the computation, up to when they are written. Here
  only leaving ahead of need is beside the computation.
"""

from typing import ClassVar

from sim.frozen import frozen
from sim.parts.options import CheckedOptions, option
from sim.systems.base import Policy, whole_prompt_limits


@frozen
class MlfqOptions(CheckedOptions):
    """What the skip-join queue and the proactive swapping can be told."""

    quantum_ms: float = option(10.0, "quantum of the first level, ms", within=(1e-6, 1e9))
    quantum_factor: float = option(2.0, "how much longer each level's quantum is", within=(1.0, 1e3))
    num_levels: int = option(12, "levels; the last has no quantum", within=(1, 64))
    starvation_s: float = option(3.0, "a request that has waited so long goes to the first level", within=(0.0, 1e9))
    starvation_check: int = option(1000, "iterations between looks for requests that starve", within=(1, 1e9))
    min_free_blocks: int = option(
        0, "GPU blocks that proactive swapping keeps free, at least max-num-seqs", within=(0, 1e12)
    )


@frozen
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

    engine_limits = whole_prompt_limits
