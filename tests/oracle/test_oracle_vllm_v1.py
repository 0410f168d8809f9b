"""Our `vllm-v1` against vLLM 0.33.0's own scheduler: decisions, times to 1e-6 s, hits, evictions, free blocks.

`cases_v1/` holds its answers on small random workloads (`make_cases_v1.py`, `vllm_v1_oracle.py`); longer ones lie in
the folder `../shared/oracle/v1` of some checkouts.
"""

from pathlib import Path

import pytest
from v1_replay import differences, first_difference, read, read_case, replay

CASES = sorted((Path(__file__).parent / "cases_v1").glob("*.json.gz"))
SHARED = Path(__file__).resolve().parents[3] / "shared" / "oracle" / "v1"
ANSWERS = sorted(SHARED.glob("*.json")) if SHARED.exists() else []

jumped_and_stepped = pytest.mark.parametrize("jump", [True, False], ids=["jumped", "stepped"])


@jumped_and_stepped
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_every_decision_is_vllms_on_nasty_workloads(path: Path, jump: bool) -> None:
    answer = read_case(path)
    found = replay(answer, path.parent, jump=jump, checked=not jump)
    assert differences(found, answer) == [], first_difference(found, answer)


@pytest.mark.skipif(not ANSWERS, reason="needs the shared answers of vLLM's own scheduler")
@jumped_and_stepped
@pytest.mark.parametrize("path", ANSWERS, ids=lambda path: path.stem)
def test_every_decision_is_vllms_on_the_reference_workloads(path: Path, jump: bool) -> None:
    answer = read(path)
    if "cpu_chunks" in answer["args"]:
        pytest.skip("the OffloadingConnector is not built yet")
    found = replay(answer, SHARED, jump=jump, checked=not jump)
    assert differences(found, answer) == [], first_difference(found, answer)


def test_there_are_cases_of_every_kind() -> None:
    answers = [read_case(path) for path in CASES]
    args = [answer["args"] for answer in answers]
    for flag in ("no_prefix_caching", "no_reserve_full_isl", "long_prefill_adaptive", "async_scheduling"):
        assert {arg[flag] for arg in args} == {False, True}
    assert {(arg["policy"], arg["long_prefill"] > 0) for arg in args} == {
        ("fcfs", False), ("fcfs", True), ("priority", False), ("priority", True),
    }  # fmt: skip
    assert {arg["watermark"] > 0 for arg in args} == {False, True}
    assert sum(answer["preemptions"] for answer in answers) > 500
    assert sum(answer["rehit_tokens"] for answer in answers) > 1000
    assert any(request["finish"] == "rejected" for answer in answers for request in answer["requests"].values())
