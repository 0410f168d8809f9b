"""`HybridMemory` with one group that keeps all is `PrefixMemory`: each is the other's oracle.

The one has a list of blocks a sequence and one LRU order of blocks, the other a radix tree of runs that is brought up
to date at a look-up. Prompts hit as much, as many blocks are free and have been evicted after every iteration.
"""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtwin.testing.conformance import Workload, draw_workload, with_prefix
from kvtwin.testing.engines import simulate
from sim.engine.limits import WindowLimits
from sim.kv.hybrid import HybridMemory
from sim.kv.prefix import PrefixMemory
from sim.options.policies import parse_policy


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Crowds under vLLM v1 whose prompts may begin alike."""
    workload = draw_workload(draw, parse_policy("vllm-v1", {})[1])
    named = draw(st.sampled_from([workload.limits.block_size, 16, 8]))
    arrivals = [with_prefix(request, named, draw) for request in workload.arrivals]
    return Workload(arrivals, replace(workload.limits, enable_prefix_caching=True), workload.machine)


def told(name: str, workload: Workload, memory: type) -> tuple[list[tuple[int, ...]], list[object]]:
    """Of each iteration: blocks free and evicted, decodes, tokens computed; of each request: hits, end; preemptions."""
    _, policy = parse_policy(name, {})
    steps: list[tuple[int, ...]] = []

    def observe(scheduler):
        assert isinstance(scheduler.memory, memory)
        found = scheduler.memory
        return lambda plan, start_s, times: steps.append(
            (found.gpu.free, found.num_evicted, plan.num_decodes, sum(chunk.num_new for chunk in plan.chunks))
        )

    out = simulate(
        policy, workload.arrivals, workload.limits, machine=workload.machine, jump=False, checked=False, observe=observe
    )
    ends = [(i, seq.num_cached_tokens, seq.status) for i, seq in sorted(out.by_id().items())]
    return steps, [*ends, out.scheduler.counters.preemptions, out.scheduler.counters.prefix_rehit_tokens]


@pytest.mark.parametrize("name", ["vllm-v1", "vllm-v1:scheduling-policy=priority"])
def test_one_full_group_is_a_prefix_cache(name: str) -> None:
    num_hits = num_evicted = 0

    @settings(max_examples=60, deadline=None, database=None, suppress_health_check=(HealthCheck.too_slow,))
    @given(workload=workloads())
    def one(workload: Workload) -> None:
        nonlocal num_hits, num_evicted
        limit = workload.limits
        window = WindowLimits(limit.max_model_len, 1, 0, -(-limit.max_model_len // limit.block_size))
        hybrid = Workload(workload.arrivals, replace(limit, window=window), workload.machine)
        steps, ends = told(name, workload, PrefixMemory)
        assert told(name, hybrid, HybridMemory) == (steps, ends)
        num_hits += sum(cached > 0 for _, cached, _ in ends[:-2])  # type: ignore[misc]
        num_evicted += steps[-1][1] if steps else 0

    one()
    assert num_hits > 20 and num_evicted > 20
