"""Our `vllm-v1` against vLLM 0.33.0's own scheduler: decisions, times to 1e-6 s, hits, evictions, free blocks.

`cases_v1/` holds its answers on small random workloads (`make_cases_v1.py`, `vllm_v1_oracle.py`); longer ones lie in
the folder `../shared/oracle/v1` of some checkouts.
"""

from pathlib import Path

import pytest
from v1_replay import differences, first_difference, read, read_case, replay

from sim.version import is_compiled

CASES = sorted((Path(__file__).parent / "cases_v1").glob("*.json.gz"))
SHARED = Path(__file__).resolve().parents[3] / "shared" / "oracle" / "v1"
ANSWERS = sorted(SHARED.glob("*.json")) if SHARED.exists() else []

ENDED_FIRST = {"v1_turns.offload3000arc": 452}
"""Of requests that end in one step, the one that the answer's vLLM told the connector of first. vLLM has them in a set,
whose order depends on the process: other runs of it give other answers for this workload."""

jumped_and_stepped = pytest.mark.parametrize("jump", [True, False], ids=["jumped", "stepped"])


@jumped_and_stepped
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_every_decision_is_vllms_on_nasty_workloads(path: Path, jump: bool) -> None:
    answer = read_case(path)
    found = replay(answer, path.parent, jump=jump, checked=not jump)
    assert differences(found, answer, stepped=not jump) == [], first_difference(found, answer)


@pytest.mark.skipif(not ANSWERS, reason="needs the shared answers of vLLM's own scheduler")
@jumped_and_stepped
@pytest.mark.parametrize("path", ANSWERS, ids=lambda path: path.stem)
def test_every_decision_is_vllms_on_the_reference_workloads(path: Path, jump: bool) -> None:
    if path.stem in ENDED_FIRST and is_compiled():
        pytest.skip("the connector's method cannot be replaced where it is compiled")
    answer = read(path)
    found = replay(answer, SHARED, jump=jump, checked=False, ended_first=ENDED_FIRST.get(path.stem))
    assert differences(found, answer, stepped=not jump) == [], first_difference(found, answer)


def test_there_are_cases_of_every_kind() -> None:
    answers = [read_case(path) for path in CASES]
    args = [answer["args"] for answer in answers]
    for flag in ("no_prefix_caching", "no_reserve_full_isl", "long_prefill_adaptive", "async_scheduling"):
        assert {arg[flag] for arg in args} == {False, True}
    assert {(arg["policy"], arg["long_prefill"] > 0) for arg in args} == {
        ("fcfs", False), ("fcfs", True), ("priority", False), ("priority", True),
    }  # fmt: skip
    assert {arg["watermark"] > 0 for arg in args} == {False, True}
    windowed = [arg for arg in args if arg.get("window")]
    assert {arg["window_first"] for arg in windowed} == {arg["async_scheduling"] for arg in windowed} == {False, True}
    assert {0, 1} <= {arg["num_full"] for arg in windowed} and {1, 2} <= {arg["num_window"] for arg in windowed}
    assert sum(answer["hit_tokens"] for answer in answers if answer["args"].get("window")) > 1000
    kept = [arg for arg in args if arg.get("num_state")]
    for flag in ("exports_states", "async_scheduling", "no_prefix_caching"):
        assert {arg[flag] for arg in kept} == {False, True}
    assert {1, 2, 3} == {arg["num_state"] for arg in kept} and min(arg["max_batched"] for arg in kept) < 16
    assert sum(answer["hit_tokens"] for answer in answers if answer["args"].get("num_state")) > 1000
    drafted = [arg for arg in args if arg.get("spec_method")]
    assert {arg["spec_method"] for arg in drafted} == {"ngram", "draft_model", "eagle", "mtp"}
    for flag in ("policy", "no_prefix_caching"):
        assert len({arg[flag] for arg in drafted}) == 2
    with_loras = [arg for arg in args if arg.get("max_loras")]
    assert {arg["async_scheduling"] for arg in with_loras} == {False, True}
    assert {bool(arg.get("cpu_chunks")) for arg in with_loras} == {bool(arg["spec_method"]) for arg in with_loras}
    pictured = [arg for arg in args if arg.get("max_tokens_per_image")]
    for flag in ("whole_images", "async_scheduling"):
        assert {arg[flag] for arg in pictured} == {False, True}
    piped = [arg for arg in args if arg.get("stages", 1) > 1]
    assert {arg["stages"] for arg in piped} == {2, 3, 4}
    for flag in ("async_scheduling", "no_prefix_caching"):
        assert {arg[flag] for arg in piped} == {False, True}
    offloaded = [answer for answer in answers if "copies" in answer]
    args = [answer["args"] for answer in offloaded]
    for name in ("no_prefix_caching", "offload_outputs", "no_reserve_full_isl", "async_scheduling"):
        assert {arg[name] for arg in args} == {False, True}
    assert {arg["eviction_policy"] for arg in args} == {"lru", "arc"}
    assert {arg["blocks_per_chunk"] for arg in args} == {1, 2, 3, 4}
    assert {min(2, arg["store_threshold"]) for arg in args} == {0, 1, 2}
    stored = [arg for arg in args if arg.get("storage")]
    assert {arg["async_scheduling"] for arg in stored} == {False, True}
    words = " ".join(line for answer in offloaded for _, _, line in answer["copies"]).split()
    assert min(words.count(word) for word in ("load", "store", "flush")) > 30
    assert sum(answer["preemptions"] for answer in answers) > 500
    assert sum(answer["rehit_tokens"] for answer in answers) > 1000
    assert any(request["finish"] == "rejected" for answer in answers for request in answer["requests"].values())
