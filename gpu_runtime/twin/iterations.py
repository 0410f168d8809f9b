"""Iteration against iteration: what the twin says of those that a live run decided alike, and what was measured.

Means agree by luck where errors cancel, and disagree where waiting magnifies small ones. An iteration does neither.
"""

import csv
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from io import StringIO
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.cost.pricing import Lanes, Pricer
from sim.engine.plan import IterationPlan, StepTimes
from sim.files import write_atomically
from sim.run.prepare import Setup

KINDS = ("decode", "prefill", "mixed")
LEAST_JUDGED = 20
"""Priced iterations of a kind, below which their median says little."""
NAMED = 5
"""Requests that a difference lists."""
COLUMNS = {
    "live_run": "Which live run, from 1.",
    "live_iteration": "Which of its iterations, from 1.",
    "simulated_iteration": "Which of the twin's, from 1.",
    "kind": "`decode`, `prefill`, `mixed`.",
    "num_decodes": "Sequences that decode.",
    "prefill_tokens": "Prompt tokens computed.",
    "context_tokens": "Contexts of all sequences that decode, tokens.",
    "simulated_context_tokens": "That, in the twin.",
    "start_s": "Start of the live iteration, s.",
    "measured_s": "From its decision to its tokens, s.",
    "simulated_s": "That, in the twin, s.",
    "error": "(simulated - measured) / measured.",
    "priced_s": "What the twin's costs say of this very plan, s; empty where not asked for.",
}
"""Columns of iterations.csv, and what they are."""

PriceOf = Callable[[IterationPlan], float | None]


class Decision(NamedTuple):
    """What an iteration computes of each request, and what it waits for; contexts of decodes are left out."""

    decodes: tuple[int, ...]
    """Request ids."""
    prefills: tuple[tuple[int, int, int], ...]
    """Request id, prompt tokens to compute, tokens before them that are there already."""
    copied_blocks: tuple[int, int, int]
    """Swapped out, swapped in, sent behind the prefills."""
    streamed_groups: tuple[int, ...]
    """Layer groups that pass through the GPU."""

    @property
    def request_ids(self) -> set[int]:
        """Of the requests that it computes."""
        return {*self.decodes, *(request_id for request_id, _, _ in self.prefills)}

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens in all."""
        return sum(num_new for _, num_new, _ in self.prefills)

    def __str__(self) -> str:
        parts = [f"{len(self.prefills)} of {self.prefill_tokens} prompt tokens"] if self.prefills else []
        parts += [f"{len(self.decodes)} decoding"] if self.decodes else []
        parts += [f"{sum(self.copied_blocks)} blocks copied"] if any(self.copied_blocks) else []
        return " and ".join(parts)


class Iteration(NamedTuple):
    """One iteration of a run on either clock, from its decision to its tokens."""

    decision: Decision
    kind: str
    context_tokens: int
    """Of all sequences that decode."""
    start_s: float
    duration_s: float
    priced_s: float | None = None
    """What the twin's costs say of this very plan, with nothing else on the machine; None where not asked for."""


def plan_prices(setup: Setup, num_groups: int) -> PriceOf:
    """What prices a plan: s from its decision to its tokens, by the setup's costs, with nothing else on the lanes.

    None for plans that wait for copies of earlier ones, whose ends no plan tells. `num_groups` are those of layers that
    a whole block is divided into (`Memory.num_groups`).
    """

    def price(plan: IterationPlan) -> float | None:
        if plan.awaited:
            return None
        pricer = Pricer(
            setup.cost, Lanes(), lambda end_s, move: None, layers=setup.model.num_layers, num_groups=num_groups,
            block_bytes=setup.limits.block_bytes, hidden_bytes=setup.model.hidden_bytes_per_token_layer,
        )  # fmt: skip
        return pricer.step(plan, 0.0).first_end_s

    return price


class IterationLog:
    """Keeps every iteration of a run that computes anything, with what `price` says of it."""

    def __init__(self, price: PriceOf = lambda plan: None) -> None:
        self._price = price
        self.iterations: list[Iteration] = []

    def observe(self, plan: IterationPlan, start_s: float, times: StepTimes) -> None:
        """`plan` was carried out, and is yet to be committed."""
        if not plan.chunks and not plan.num_decodes:
            return
        decision = Decision(
            tuple(sorted(seq.request.request_id for seq in plan.decodes)),
            tuple((chunk.seq.request.request_id, chunk.num_new, chunk.num_cached) for chunk in plan.chunks),
            (plan.swapped_out_blocks, plan.swapped_in_blocks, plan.behind_blocks),
            tuple(streamed.num_groups for streamed in plan.streamed),
        )
        duration_s, context, priced_s = times.first_end_s - start_s, plan.decode_context_tokens, self._price(plan)
        for number in range(times.iterations):
            if number:
                duration_s = times.second_s + times.slope_s * (number - 1)
            self.iterations.append(Iteration(decision, plan.kind, context, start_s, duration_s, priced_s))
            start_s += duration_s
            context += plan.num_decodes


class Pair(NamedTuple):
    """A live iteration, and the twin's that was decided alike; places count from 0."""

    live_run: int
    live_place: int
    live: Iteration
    simulated_place: int | None
    simulated: Iteration | None

    @property
    def error(self) -> float | None:
        """(simulated - measured) / measured; None where the twin has no such iteration."""
        return None if self.simulated is None else self.simulated.duration_s / self.live.duration_s - 1


def align(simulated: Sequence[Iteration], live: Sequence[Iteration], live_run: int = 0) -> list[Pair]:
    """Every live iteration beside the simulated one of the same decision; of several the n-th beside the n-th."""
    places: defaultdict[Decision, deque[int]] = defaultdict(deque)
    for place, iteration in enumerate(simulated):
        places[iteration.decision].append(place)
    pairs = []
    for place, iteration in enumerate(live):
        alike = places.get(iteration.decision)
        found = alike.popleft() if alike else None
        pairs.append(Pair(live_run, place, iteration, found, None if found is None else simulated[found]))
    return pairs


class KindAgreement(msgspec.Struct, frozen=True):
    """Iterations of one kind, aligned or priced; errors are (simulated - measured) / measured."""

    kind: str
    """`decode`, `prefill`, `mixed`, `all`."""
    aligned: int
    """How many, of `prices` too."""
    simulated_s: float
    """Their time in all, from decision to tokens, simulated, s; of `prices` by price."""
    measured_s: float
    """That, live, s."""
    median_error: float
    """Median of (simulated - measured) / measured."""
    p95_error: float
    """95 % of these errors are no further from 0."""


class Difference(msgspec.Struct, frozen=True):
    """The first decision of a live run that is not the twin's at the same place, which counts from 1."""

    live_run: int
    """Which live run, from 1."""
    iteration: int
    """Which of its iterations, from 1."""
    live: str
    """The live decision, in words."""
    simulated: str
    """The twin's."""


class IterationAgreement(msgspec.Struct, frozen=True):
    """How far a twin's iterations are those of the live runs."""

    simulated: int
    """Iterations of the twin."""
    live: int
    """Iterations of all live runs."""
    aligned: int
    """Live iterations that the twin has, too."""
    kinds: list[KindAgreement]
    """Of aligned iterations that `decode`, `prefill`, do both (`mixed`), and of `all`, below."""
    prices: list[KindAgreement]
    """The same of all live iterations, simulated being what the twin's costs say of the live plan, alone on the
    machine; plans that wait for copies of earlier ones are left out. Kinds of 20 or more are judged."""
    differences: list[Difference]
    """The first decision of each live run that is not the twin's at the same place, below; runs that never leave the
    twin's are not among them."""


def compare(
    simulated: Sequence[Iteration], live: Sequence[Sequence[Iteration]]
) -> tuple[IterationAgreement, list[Pair]]:
    """The agreement of a twin's iterations with those of live runs, and the pairs that it is made of."""
    pairs = [pair for number, run in enumerate(live) for pair in align(simulated, run, number)]
    aligned = [(pair.live.kind, pair.simulated.duration_s, pair.live.duration_s) for pair in pairs if pair.simulated]
    priced = [(one.kind, one.priced_s, one.duration_s) for run in live for one in run if one.priced_s is not None]
    differences = [found for number, run in enumerate(live) if (found := _first_difference(simulated, run, number))]
    return IterationAgreement(
        simulated=len(simulated),
        live=len(pairs),
        aligned=len(aligned),
        kinds=_by_kind(aligned),
        prices=_by_kind(priced),
        differences=differences,
    ), pairs


def _by_kind(found: Sequence[tuple[str, float, float]]) -> list[KindAgreement]:
    """Of (kind, simulated, measured)."""
    kinds = [(kind, [times for name, *times in found if name == kind]) for kind in KINDS]
    kinds.append(("all", [times for _, *times in found]))
    return [_agreement(kind, np.array(times)) for kind, times in kinds if times]


def _agreement(kind: str, times_s: NDArray[np.float64]) -> KindAgreement:
    """Of an array of (simulated, measured) durations."""
    simulated_s, measured_s = times_s.T
    errors = simulated_s / measured_s - 1
    p95 = float(np.quantile(np.abs(errors), 0.95))
    return KindAgreement(
        kind, len(errors), float(simulated_s.sum()), float(measured_s.sum()), float(np.median(errors)), p95
    )


def _first_difference(simulated: Sequence[Iteration], live: Sequence[Iteration], number: int) -> Difference | None:
    for place, (theirs, ours) in enumerate(zip_longest(live, simulated), start=1):
        if theirs is None or ours is None or theirs.decision != ours.decision:
            return Difference(number + 1, place, _said(theirs, ours), _said(ours, theirs))
    return None


def _said(iteration: Iteration | None, other: Iteration | None) -> str:
    """The decision of an iteration in words, with those that the other one leaves out."""
    if iteration is None:
        return "nothing more"
    decision = iteration.decision
    alone = sorted(decision.request_ids - other.decision.request_ids) if other is not None else []
    shown = ", ".join(map(str, alone[:NAMED])) + (" ..." if len(alone) > NAMED else "")
    return f"{decision} (requests {shown} here alone)" if alone else str(decision)


def judged_kinds(found: IterationAgreement) -> list[KindAgreement]:
    """The kinds of priced iterations that are enough for a median to say something."""
    return [row for row in found.prices if row.kind in KINDS and row.aligned >= LEAST_JUDGED]


def in_words(found: IterationAgreement, tolerance: float) -> str:
    """What to read of it; kinds that are off by more than `tolerance` in the median are named."""
    share = found.aligned / found.live if found.live else 0.0
    lines = [
        f"Iteration by iteration: the twin took the decision of {found.aligned} of {found.live} live iterations "
        f"({share:.0%}): the same sequences computed as many tokens."
    ]
    if found.differences:
        first = min(found.differences, key=lambda difference: difference.iteration)
        lines.append(
            f"Decisions first differ at iteration {first.iteration} of live run {first.live_run}: live "
            f"{first.live}; simulated {first.simulated}."
        )
    lines += [*_off(found.kinds, tolerance), *_table("aligned", found.kinds)]
    if found.prices:
        lines += [
            "",
            "By price: every live iteration's own plan, by the twin's costs, alone on the machine. Judged are kinds of "
            f"{LEAST_JUDGED} iterations or more, each median within {tolerance:.0%}.",
            *_off(judged_kinds(found), tolerance),
            *_table("priced", found.prices),
        ]
    return "\n".join(lines) + "\n"


def _off(rows: Iterable[KindAgreement], tolerance: float) -> list[str]:
    off = [f"{row.kind} ({row.median_error:+.0%})" for row in rows if abs(row.median_error) > tolerance]
    return [f"**Off by more than {tolerance:.0%} in the median**: {', '.join(off)}."] if off else []


def _table(counted: str, rows: Iterable[KindAgreement]) -> list[str]:
    return [
        "",
        f"| iterations | {counted} | simulated, s | live, s | median error | P95 of errors |",
        "|---|--:|--:|--:|--:|--:|",
        *(
            f"| {row.kind} | {row.aligned} | {row.simulated_s:.4g} | {row.measured_s:.4g} | {row.median_error:+.1%} | "
            f"{row.p95_error:.1%} |"
            for row in rows
        ),
    ]


def write_csv(path: Path, pairs: Iterable[Pair]) -> None:
    """Every live iteration as a row of `COLUMNS`."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(_rows(pairs))
    write_atomically(path, text.getvalue().encode())


def _rows(pairs: Iterable[Pair]) -> Iterable[tuple[object, ...]]:
    """Places count from 1, and what the twin does not have is empty."""
    for pair in pairs:
        live, ours = pair.live, pair.simulated
        yield (
            pair.live_run + 1, pair.live_place + 1, "" if pair.simulated_place is None else pair.simulated_place + 1,
            live.kind, len(live.decision.decodes), live.decision.prefill_tokens, live.context_tokens,
            *("" if ours is None else ours.context_tokens, live.start_s, live.duration_s),
            *("" if ours is None else ours.duration_s, "" if ours is None else pair.error),
            "" if live.priced_s is None else live.priced_s,
        )  # fmt: skip
