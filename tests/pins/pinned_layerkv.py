"""LayerKV's decisions where prompts, slack and links contend: each workload of `decisions` needs one of its rules."""

from decisions import CASES, answer
from pinned import Answers, Table, lines_of

CASE = {case.name: case for case in CASES}


def ask(name: str) -> Answers:
    """Of a workload, one iteration after another."""
    found = answer(CASE[name])
    counters = {"preemptions": found["preemptions"], "policy": found["policy"]}
    return {
        "steps": [*lines_of(found["steps"])], "requests": [*lines_of(found["requests"])],
        "counters": [*lines_of(counters)],
    }  # fmt: skip


TABLES = {"layerkv": Table(list(CASE), ask)}
