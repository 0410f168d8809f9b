"""Our `vllm-v1` against vLLM 0.33.0's own scheduler: every decision, every time to 1e-6 s, hits, evictions."""

from pathlib import Path

import pytest
from v1_replay import differences, first_difference, read, replay

SHARED = Path(__file__).resolve().parents[3] / "shared" / "oracle" / "v1"
ANSWERS = sorted(SHARED.glob("*.json")) if SHARED.exists() else []


def unsupported(answer: dict) -> str:
    args = answer["args"]
    if "cpu_chunks" in args:
        return "the OffloadingConnector is not built yet"
    return "asynchronous scheduling is not built yet" if args["async_scheduling"] else ""


@pytest.mark.skipif(not ANSWERS, reason="needs the shared answers of vLLM's own scheduler")
@pytest.mark.parametrize("jump", [True, False], ids=["jumped", "stepped"])
@pytest.mark.parametrize("path", ANSWERS, ids=lambda path: path.stem)
def test_every_decision_is_vllms(path: Path, jump: bool) -> None:
    answer = read(path)
    if reason := unsupported(answer):
        pytest.skip(reason)
    found = replay(answer, SHARED, jump=jump, checked=not jump)
    assert differences(found, answer) == [], first_difference(found, answer)
