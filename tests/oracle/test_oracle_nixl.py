"""`vllm-v1:stage=nixl` against two of vLLM 0.33.0's own schedulers with its NixlConnector: times to 1e-6 s, blocks.

`cases_nixl.json.gz` holds their answers on small random workloads (`vllm_v1_nixl_oracle.py`).
"""

from pathlib import Path

import pytest
from nixl_replay import differences, read_cases

CASES = read_cases(Path(__file__).with_name("cases_nixl.json.gz"))


@pytest.mark.parametrize("jump", [True, False], ids=["jumped", "stepped"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["seed"])
def test_what_is_pulled_and_when_requests_start_and_end_is_vllms(case: dict, jump: bool) -> None:
    assert differences(case, jump=jump) == []


def test_there_are_cases_of_every_kind() -> None:
    args = [case["args"] for case in CASES]
    assert {arg["no_prefix_caching"] for arg in args} == {False, True}
    assert {arg["watermark"] for arg in args} == {0.0, 0.1}
    assert {arg["max_num_seqs"] for arg in args} == {2, 4, 32, 256}
    assert {arg["long_prefill"] for arg in args} == {0, 8}
    assert any(row[1] % 16 == 1 for case in CASES for row in case["workload"])
    hits = [blocks < -(-case["workload"][number][1] // 16) for case in CASES for number, blocks in case["pulled"]]
    assert sum(hits) > 10
