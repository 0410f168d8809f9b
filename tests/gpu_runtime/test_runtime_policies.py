"""No policy changes a token: whatever is evicted, offloaded, streamed or recomputed, outputs are the dense model's."""

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from runtime_live import Served, expected_tokens  # noqa: E402

from kvtwin.testing import limits, requests  # noqa: E402
from sim.engine.sequence import Status  # noqa: E402
from sim.scenario import parse_policy  # noqa: E402
from sim.systems import POLICIES  # noqa: E402

VARIANTS = [
    *POLICIES,
    "layerkv:slo-aware=false",
    "layerkv:decode=stream,slo-aware=false",
    "layerkv:equations=paper",
    "layerkv:threshold=0.3,horizon-steps=40",
]


def check(variant, rows, *, inline=False, **sizes):
    arrivals = requests(*rows)
    served = Served(parse_policy(variant, {})[1], arrivals, limits(block_size=4, **sizes), inline=inline)
    completed = [seq for seq in served.ended if seq.status is Status.FINISHED]
    assert len(served.ended) == len(arrivals)
    for seq in completed:
        assert served.tokens[seq.request.request_id] == expected_tokens(seq.request), seq
    return served, completed


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_are_those_of_each_request_alone(variant, chunked):
    rows = [(0.0, 5 + 7 * i % 23, 4 + 5 * i % 19) for i in range(14)]
    served, completed = check(
        variant, rows, gpu=16, host=60, max_model_len=64, seqs=6, chunked=chunked, tokens=16 if chunked else 128
    )
    assert len(completed) == 14
    if variant in ("vllm-recompute", "vllm-swap"):
        assert served.counters.preemptions > 3


WORKLOADS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.0, 0.01, 0.02]), st.integers(1, 40), st.integers(1, 24)), min_size=1, max_size=12
).map(sorted)


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=12, deadline=None)
@given(
    rows=WORKLOADS,
    gpu=st.integers(17, 30),
    host=st.sampled_from([0, 5, 80]),
    chunked=st.booleans(),
    inline=st.booleans(),
)
def test_no_workload_finds_a_token_that_a_policy_changes(variant, rows, gpu, host, chunked, inline):
    sizes = {"gpu": gpu, "host": host, "max_model_len": 64, "seqs": 5, "tokens": 16 if chunked else 128}
    check(variant, rows, chunked=chunked, inline=inline, **sizes)


def test_host_blocks_given_up_in_a_step_serve_those_offloaded_in_it():
    # Found by hypothesis: who was offloaded came before who was preempted, and the host pool seemed too small.
    rows = [(0.0, 9, 15), (0.0, 9, 24), (0.0, 13, 13), (0.0, 14, 11), (0.0, 21, 7), (0.0, 25, 24), (0.01, 13, 6)]
    rows += [(0.01, 27, 15), (0.01, 29, 8), (0.02, 1, 20), (0.02, 10, 11), (0.02, 12, 2)]
    check(
        "layerkv:decode=stream,slo-aware=false",
        rows,
        gpu=17,
        host=5,
        max_model_len=64,
        seqs=5,
        chunked=True,
        tokens=16,
    )
