"""A question that changes something, or that has two answers, is noticed (`kvtwin.testing.questions`)."""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from pinned_engines import workload

from kvtwin.testing import build_engine, conformance, limits, linear_machine, requests, simulate
from kvtwin.testing import questions as asking
from sim.engine.limits import Deployment, Limits
from sim.engine.scheduler import Parts
from sim.engine.sequence import Sequence
from sim.kv.memory import Memory
from sim.kv.paged import PagedMemory
from sim.options.policies import parse_policy
from sim.parts.admission.watermark import Watermark
from sim.parts.base import Admission, Eviction, Order, Part, Stage
from sim.parts.batching.base import Batching
from sim.parts.order.fcfs import Fcfs
from sim.systems import POLICIES
from sim.systems.vllm055 import VllmRecompute


@pytest.fixture
def twice(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Each question is asked twice, not one of many; which were, and how often."""
    monkeypatch.setattr(asking, "EVERY", 1)
    monkeypatch.setattr(asking, "BYTES", 1 << 60)
    asked, compare = Counter[str](), asking.Asker.compare

    def count(self: asking.Asker, name: str, question: Any) -> Any:
        asked[name] += 1
        return compare(self, name, question)

    monkeypatch.setattr(asking.Asker, "compare", count)
    return asked


@dataclass(frozen=True)
class With(VllmRecompute):
    """vLLM 0.5.5 with other parts."""

    others: dict[str, Part] = field(default_factory=dict)

    def parts(self, limits: Limits, deployment: Deployment) -> Parts:
        return replace(super().parts(limits, deployment), **self.others)


def run(**others: Part) -> None:
    """Three prompts, two of which wait for blocks."""
    simulate(With(others=others), requests((0.0, 40, 9), (0.0, 40, 9), (0.0, 7, 2)), limits(gpu=4, seqs=2))


class Counting(Watermark):
    """Counts how often it is asked, in an attribute of its own."""

    num_times = 0

    def admits(self, seq: Sequence) -> bool:
        self.num_times += 1
        return super().admits(seq)


class Remembering(Counting):
    memoized = ("num_times",)


class Wavering(Remembering):
    """Refuses every other time."""

    def admits(self, seq: Sequence) -> bool:
        return super().admits(seq) and self.num_times % 2 == 1


class Turning(Fcfs):
    """The head is another after each look: of the same sequences, in another order."""

    def head(self) -> Sequence:
        self._queue.rotate()
        return self._queue[0]


class Marking(PagedMemory):
    """Writes on the sequence."""

    def ever_fits(self, seq: Sequence, keep_free: int) -> bool:
        seq.num_preemptions += 1
        return super().ever_fits(seq, keep_free)


class Peeking(Watermark):
    """A property that changes a collection."""

    def __init__(self, num_gpu_blocks: int) -> None:
        super().__init__(num_gpu_blocks)
        self.seen: dict[float, int] = {}

    @property
    def reason(self) -> str:
        self.seen[self.scheduler.now_s] = len(self.seen)
        return ""

    def prepare(self, now_s: float) -> None:
        assert not self.reason


LIMITS = limits(gpu=4, seqs=2)


@pytest.mark.parametrize(
    ("others", "question"),
    [
        ({"admission": Counting(4)}, r"Counting\.admits"),
        ({"admission": Peeking(4)}, r"Peeking\.reason"),
        ({"order": Turning()}, r"Turning\.head"),
        ({"memory": Marking(LIMITS)}, r"Marking\.ever_fits"),
    ],
)
def test_a_question_that_changes_something_is_noticed(twice: Counter[str], others: Any, question: str) -> None:
    with pytest.raises(AssertionError, match=f"{question} is a question, and changes"):
        run(**others)


def test_a_question_with_two_answers_is_noticed(twice: Counter[str]) -> None:
    with pytest.raises(AssertionError, match=r"Wavering\.admits is True, and False when asked again"):
        run(admission=Wavering(4))


def test_what_only_remembers_an_answer_may_change(twice: Counter[str]) -> None:
    run(admission=Remembering(4))
    assert twice["Remembering.admits"] > 1


def test_conformance_asks_some_questions_twice() -> None:
    """Without a test's help: one of `EVERY`, over runs that ask thousands."""
    with pytest.raises(AssertionError, match=r"Counting\.admits is a question"):
        conformance.check(Fresh(), shrink=False)


@dataclass(frozen=True)
class Fresh(VllmRecompute):
    """Each engine has a part of its own."""

    def parts(self, limits: Limits, deployment: Deployment) -> Parts:
        return replace(super().parts(limits, deployment), admission=Counting(limits.num_gpu_blocks))


@pytest.mark.parametrize("name", POLICIES)
def test_every_question_of_a_crowded_run_is_one(twice: Counter[str], name: str) -> None:
    """Of every preset, and asked of each kind of part that has any."""
    rows = [(0.0, 90, 12), (0.0, 60, 30), (0.0, 75, 5), (0.1, 20, 20), (0.3, 33, 40), (2.0, 100, 3), (2.0, 8, 1)]
    policy = parse_policy(name, {})[1]
    limit = conformance.limits_of(policy, limits(gpu=12, host=10, max_model_len=128), 4, 64)
    simulate(policy, requests(*rows), limit)
    assert sum(twice.values()) > 40


STORAGE = "enable-hierarchical-cache=true,hicache-storage-backend=file,hicache-storage-prefetch-threshold=1"


@pytest.mark.parametrize(
    ("text", "kind", "stages"),
    [
        ("vllm-v1", "windowed", 1),
        ("vllm-v1", "stateful", 1),
        ("vllm-recompute", "windowed", 1),
        ("vllm-v1:async-scheduling=true", "windowed", 2),
        ("vllm-v1", "stateful", 3),
        ("vllm-v1:cpu-chunks=9,store-s-per-block=0.02", "branching", 1),
        ("vllm-v1:spec-method=ngram,spec-tokens=3,acceptance-rate=0.8", "bursts", 1),
        ("cachedattention:disk-space=0.001,disk-block-us=20000", "branching", 1),
        (f"sglang:{STORAGE}", "branching", 1),
        ("hcache:keeps=turns", "branching", 1),
    ],
)
def test_every_question_of_parts_that_presets_leave_out_is_one(
    twice: Counter[str], text: str, kind: str, stages: int
) -> None:
    """Windows, states, pipelines, connectors, drafts, disks, storage."""
    policy = parse_policy(text, {})[1]
    work = workload(policy, 1, kind)
    simulate(policy, work.arrivals, replace(work.limits, stages=stages), machine=work.machine)
    assert sum(twice.values()) > 40


@pytest.mark.parametrize("name", asking.CONTRACT)
def test_a_question_of_a_contract_is_in_one(name: str) -> None:
    assert any(name in vars(kind) for kind in (Part, Order, Memory, Admission, Eviction, Stage, Batching))


def test_an_engine_that_is_asked_twice_is_of_the_same_classes() -> None:
    engine = build_engine(VllmRecompute(), LIMITS, linear_machine(), lambda seq: None)
    memory = engine.scheduler.memory
    assert isinstance(memory, PagedMemory)
    assert type(memory).__name__ == "PagedMemory"
