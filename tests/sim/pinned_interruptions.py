"""What engines decide whose requests are cancelled, fail or end early, as it is pinned in `golden/interruptions.txt`.

    python tests/sim/pinned_interruptions.py      # writes golden/interruptions.txt anew

The workloads are those of `pinned_schedules`; at seeded times something befalls one of those that have not ended. Such
facts come to live engines alone, between two steps.
"""

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from math import inf
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import msgspec
import pinned_schedules
from pinned import GOLDEN, write
from pinned_schedules import teller, workload

from kvtwin.testing.engines import simulate
from sim.clock.arrivals import Arrivals
from sim.engine.engine import Engine
from sim.engine.sequence import Sequence, Status
from sim.policy_options import parse_policy
from traces.request import Request

INTERRUPTIONS = GOLDEN / "interruptions.txt"
RUNS = 3
"""Of each system."""
NAMES = [name for name in dict.fromkeys((*pinned_schedules.POLICIES, *pinned_schedules.MORE)) if ":stage=" not in name]


class Interrupted(Arrivals):
    """Requests, and what befalls some of them."""

    __slots__ = ("_facts", "_rng", "seqs")

    def __init__(self, requests: Iterable[Request], rng: random.Random, last_s: float) -> None:
        self._rng, self.seqs = rng, list[Sequence]()
        self._facts = sorted(rng.uniform(0.0, last_s) for _ in range(12))
        super().__init__(requests)

    def _read(self) -> None:
        super()._read()
        self.next_s = min(self.next_s, self._facts[0] if self._facts else inf)

    def deliver(self, until_s: float, to: Callable[[Request], object]) -> None:
        engine = getattr(to, "__self__")  # noqa: B009 - a method of the engine
        while self.next_s <= until_s:
            if self._next is not None and self._next.arrival_s <= self.next_s:
                seq = to(self._next)
                assert isinstance(seq, Sequence)
                self.seqs.append(seq)
                self._read()
            else:
                self._facts.pop(0)
                self._befall(engine)
                self.next_s = min(self._next.arrival_s if self._next else inf, self._facts[0] if self._facts else inf)

    def _befall(self, engine: Engine) -> None:
        open_ = [seq for seq in self.seqs if seq.status not in (Status.FINISHED, Status.IGNORED)]
        if not open_:
            return
        seq, kind = self._rng.choice(open_), self._rng.choice(("cancel", "fail", "truncate"))
        least = engine.scheduler.num_generated_of(seq) + 1
        if kind == "cancel":
            engine.cancel(seq)
        elif kind == "fail":
            engine.fail(seq, "lost")
        elif least <= seq.output_tokens:
            engine.truncate(seq, self._rng.randint(least, seq.output_tokens))


def answer(name: str, place: int, *, checked: bool = False) -> str:
    """What is pinned of a run."""
    policy = parse_policy(name, {})[1]
    work, told, plans = workload(policy, place), teller(), []
    usual = simulate(policy, work.arrivals, work.limits, machine=work.machine, checked=False, most_plans=20_000)
    last_s = max(seq.finish_s for seq in usual.ended)
    source = Interrupted(work.arrivals, random.Random(f"interrupted {place}"), last_s)
    outcome = simulate(
        policy, source, work.limits, machine=work.machine, checked=checked, most_plans=20_000,
        observe=lambda scheduler: lambda plan, start_s, times: plans.append(told((start_s, times, plan))),
    )  # fmt: skip
    ended = [seq.request.request_id for seq in outcome.ended]
    assert sorted(ended) == sorted(request.request_id for request in work.arrivals), "each ends once"
    assert outcome.scheduler.gpu.free == usual.scheduler.gpu.free, "who has left holds nothing"
    counters = outcome.scheduler.counters
    ends = [
        (number, seq.first_token_s, seq.finish_s, seq.num_generated, seq.num_preemptions, seq.status, seq.error)
        for number, seq in outcome.by_id().items()
    ]
    kept = told((ends, ended, msgspec.structs.asdict(counters)))
    digest = sha256(repr((plans, kept)).encode()).hexdigest()[:12]
    return f"{len(plans)} plans, ignored {counters.ignored}, {digest}"


def interruptions() -> Iterator[str]:
    """Every system."""
    for name in NAMES:
        for place in range(RUNS):
            yield f"{name} #{place}: {answer(name, place)}"


PINNED = {"interruptions": interruptions}


def main() -> None:
    write(INTERRUPTIONS, PINNED)


if __name__ == "__main__":
    main()
