"""The systems that tests of the live half run over: every preset that a device can carry out, LayerKV's ways, mixes."""

from hypothesis import strategies as st

from sim.options.policies import parse_policy
from sim.parts.catalogue import MEMORIES
from sim.systems import POLICIES
from sim.systems.base import Policy

STREAM = "layerkv:decode=stream,slo-aware=false"
CONTIGUOUS = "ellm:layer-order=contiguous"
EXECUTABLE = {"cachedattention": "cachedattention:disk-space=0", "ellm": CONTIGUOUS}
"""What of a preset has no place on a device is left out."""
MEMORY_OF = {name: MEMORIES[kind.composition["memory"]] for name, kind in POLICIES.items()}
LIVE = [
    EXECUTABLE.get(name, name) for name, memory in MEMORY_OF.items() if name in EXECUTABLE or not memory.unexecutable
]
VARIANTS = [
    *LIVE,
    "layerkv:slo-aware=false",
    "layerkv:decode=stream",
    STREAM,
    "layerkv:equations=paper",
    "layerkv:threshold=0.3,horizon-steps=40",
    "layerkv:batching=sarathi",
    "fastserve:memory=reserved",
    "hcache:keeps=turns",
    "vllm-v1:spec-method=ngram,spec-tokens=3,acceptance-rate=0.5",
    "adaptive:ttft-slo-ms=300,tpot-slo-ms=30",
]
TIERED = ["cachedattention:disk-space=0", "vllm-v1:memory=tiered", "sarathi:memory=tiered", "ragcache"]
"""Those that keep prefixes on the host."""
RETAINED = ["pensieve:swap-out-threshold=0.8"]
RETAINED += [f"{system}:memory=retained,swap-out-threshold=0.8" for system in ("sarathi", "vllm-v1")]
"""Those that keep chunks of conversations there."""
TREES = ["radix", "vllm-v1:memory=radix", "chunkattention", "batchllm"]
"""Those that keep content once, in a tree."""
COPYING = ["vllm-swap", "fastserve", "layerkv", STREAM]
"""Those that copy KV between the tiers on small contended workloads."""
FEW = ["vllm-v1", "layerkv", STREAM]
"""For what a policy has little to do with: blocks shared, swapped by layers, streamed between them."""
WORKLOADS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.0, 0.01]), st.integers(1, 40), st.integers(1, 24)), min_size=1, max_size=12
).map(sorted)
"""Arrivals, s, with tokens of prompt and output that fit the tight limits."""


def policy_of(variant: str) -> Policy:
    """`NAME` or `NAME:option=value,...`."""
    return parse_policy(variant, {})[1]
