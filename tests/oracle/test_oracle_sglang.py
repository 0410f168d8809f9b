"""Our `sglang` against SGLang 0.5.23's own scheduler: decisions, times to 1e-6 s, hits, evictions, loads.

`cases_sglang/` holds its answers on small random workloads (`make_cases_sglang.py`, `sglang_ask.py`), and
`cases_sglang_copying/` such where HiCache's copies take time (`sglang_copies.py`), some with storage,
`cases_sglang_windowed/` such where a layer has a window and a pool of its own, `cases_sglang_stateful/` such where one
keeps a state, some of both with HiCache; longer ones lie in the folder `../shared/oracle/sglang` of some checkouts.
"""

import json
from pathlib import Path

import pytest
from sglang_replay import differences, first_difference, read, replay

CASES = sorted((Path(__file__).parent / "cases_sglang").glob("*.json.gz"))
COPYING = sorted((Path(__file__).parent / "cases_sglang_copying").glob("*.json.gz"))
WINDOWED = sorted((Path(__file__).parent / "cases_sglang_windowed").glob("*.json.gz"))
STATEFUL = sorted((Path(__file__).parent / "cases_sglang_stateful").glob("*.json.gz"))
SHARED = Path(__file__).resolve().parents[3] / "shared" / "oracle" / "sglang"
HICACHE = {"write_through", "write_through_selective", "write_back"}
ANSWERS = sorted((SHARED / "answers").glob("*.json"))

jumped_and_stepped = pytest.mark.parametrize("jump", [True, False], ids=["jumped", "stepped"])


@jumped_and_stepped
@pytest.mark.parametrize(
    "path", [*CASES, *COPYING, *WINDOWED, *STATEFUL], ids=lambda path: path.name.removesuffix(".json.gz")
)
def test_every_decision_is_sglangs_on_nasty_workloads(path: Path, jump: bool) -> None:
    answer = read(path)
    found = replay(answer, path.parent, jump=jump)
    assert differences(found, answer) == [], first_difference(found, answer)


@pytest.mark.parametrize("seed", ["20121", "20155", "20180", "60007", "60055", "60100", "71035", "71069"])
def test_the_books_of_both_pools_are_those_of_their_sequences(seed: str) -> None:
    [path] = [path for path in [*WINDOWED, *STATEFUL] if seed in path.name]
    answer = read(path)
    assert differences(replay(answer, path.parent, jump=True, checked=True), answer) == []


@pytest.mark.skipif(not ANSWERS, reason="needs the shared answers of SGLang's own scheduler")
@jumped_and_stepped
@pytest.mark.parametrize("path", ANSWERS, ids=lambda path: path.stem)
def test_every_decision_is_sglangs_on_the_reference_workloads(path: Path, jump: bool) -> None:
    answer = read(path)
    found = replay(answer, SHARED, jump=jump)
    assert differences(found, answer) == [], first_difference(found, answer)


def test_there_are_cases_of_every_kind() -> None:
    answers = [read(path) for path in CASES]
    args = [answer["args"] for answer in answers]
    for flag in ("overlap", "mixed", "priority", "low_first", "no_radix", "ignore_eos"):
        assert {arg[flag] for arg in args} == {False, True}
    assert {arg["policy"] for arg in args} == {"fcfs", "lof", "lpm", "dfs-weight", "hrrn", "shortest-prefill-first"}
    assert {arg["hicache"] for arg in args} == {"", "write_through", "write_through_selective", "write_back"}
    assert {arg["eviction"] for arg in args} >= {"lru", "lfu", "fifo", "mru", "filo", "slru", "priority", "tlru"}
    assert {1, 16} <= {arg["page"] for arg in args} and -1 in {arg["chunk"] for arg in args}
    # Retracted while a token is in flight, and while none is; ended by a token that the scheduler did not expect.
    assert {answer["args"]["overlap"] for answer in answers if answer["preemptions"] > 3} == {False, True}
    assert {arg["overlap"] for arg in args if arg["declared"]} == {False, True}
    for total in ("hit_tokens", "rehit_tokens", "evicted_tokens", "loaded_tokens"):
        assert sum(answer[total] for answer in answers) > 300


def test_there_are_windowed_cases_of_every_kind() -> None:
    answers = [read(path) for path in WINDOWED]
    for setting in ("overlap", "no_radix"):
        assert {answer["args"][setting] for answer in answers} == {False, True}
    assert {answer["args"]["hicache"] for answer in answers if answer["loaded_tokens"]} == HICACHE
    # Retracted for the windows' sake; out of room alone.
    assert any(answer["preemptions"] > 3 for answer in answers)
    assert any("output" not in request for answer in answers for request in answer["requests"].values())


def test_there_are_stateful_cases_of_every_kind() -> None:
    answers = [read(path) for path in STATEFUL]
    for setting in ("overlap", "mixed", "no_radix"):
        assert {answer["args"][setting] for answer in answers} == {False, True}
    extras = [json.loads(answer["args"]["extra"]) for answer in answers]
    assert {extra["mamba_radix_cache_strategy"] for extra in extras} == {"auto", "no_buffer", "extra_buffer"}
    assert {answer["args"]["hicache"] for answer in answers if answer["loaded_tokens"]} == HICACHE
    # Pages as long as the chunks of kernels, and shorter ones; retracted.
    assert {answer["args"]["page"] >= answer["args"]["state_chunk"] for answer in answers} == {False, True}
    assert any(answer["preemptions"] for answer in answers)
