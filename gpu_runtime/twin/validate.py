"""`kvtwin validate --device`: each policy simulated once and executed several times, and the two compared."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gpu_runtime.twin.agreement import TOLERANCE, Validation, agreements, markdown, verdict
from gpu_runtime.twin.figure import draw_twin
from gpu_runtime.twin.iterations import Iteration, IterationLog, PriceOf, compare, in_words, plan_prices, write_csv
from gpu_runtime.twin.probe import Probe
from sim.files import folder_name, write_atomically
from sim.options.scenario import Outputs, Scenario
from sim.results.figures import FigureRun
from sim.results.figures.style import save_figure
from sim.results.schema import Result
from sim.results.timeline import TIMELINE_FILE, merge_timelines
from sim.run.files import Perform, carry_out
from sim.run.prepare import prepare
from sim.run.runs import Run
from sim.systems.base import Policy

ATTEMPTS = 5
"""Live runs at most for each that is to count."""


class BrokenOff(Exception):
    """A run ended early."""

    def __init__(self, run: Run, result: Result, folder: Path) -> None:
        super().__init__(run.error)
        self.run, self.result, self.folder = run, result, folder


@dataclass(frozen=True)
class LiveRun:
    """One that counts."""

    result: Result
    figure: FigureRun
    iterations: list[Iteration]


class Validator:
    """Validates policies one after the other.

    Args:
        folder: where the report goes, and folders of the policies.
        outputs: what the runs leave.
        runs: live runs of each policy that are to count.
        probe: says which do.
        execute: carries a live run out.
    """

    def __init__(self, folder: Path, outputs: Outputs, runs: int, probe: Probe, execute: Perform) -> None:
        self._folder, self._outputs, self._runs, self._probe, self._execute = folder, outputs, runs, probe, execute
        self._parts: list[str] = []
        self._found: list[Validation] = []

    @property
    def text(self) -> str:
        """The report on the policies so far, in Markdown."""
        return "# Simulated and live\n\n" + "\n".join(self._parts)

    @property
    def agrees(self) -> bool:
        """Whether all of them were judged and agree."""
        return all(validation.agrees for validation in self._found)

    def validate(self, scenario: Scenario, label: str, policy: Policy) -> None:
        """Run a policy on both clocks, and write down how they agree; `BrokenOff` where a run ends early."""
        place, twin = self._folder / folder_name(label), IterationLog()
        run, result = carry_out(
            scenario, label, policy, place / "simulated", self._outputs, series=True, watch=twin.observe
        )
        if run.interrupted or run.error:
            raise BrokenOff(run, result, place)
        simulated = FigureRun.of(run, result)
        num_groups = run.engines[0].scheduler.memory.num_groups
        price = plan_prices(prepare(scenario, label, policy), num_groups)
        live = list(self._live_runs(scenario, label, policy, place, price))
        found = agreements(result, [one.result for one in live])
        iterations, pairs = compare(twin.iterations, [one.iterations for one in live])
        agrees = verdict(found, iterations) if len(live) == self._runs else None
        slowness, disturbed = self._probe.slowness, self._probe.disturbed
        self._found.append(Validation(label, agrees, slowness, disturbed, found, iterations))
        self._parts.append(markdown(self._found[-1], self._runs))
        if agrees is not None:
            self._parts.append(in_words(iterations, TOLERANCE))
        write_csv(place / "iterations.csv", pairs)
        if self._outputs.timeline and live:
            merge_timelines(place / TIMELINE_FILE, (place / "simulated", place / "live-1"))
        save_figure(place / "twin.png", draw_twin(label, simulated, [one.figure for one in live], found, pairs))
        # After each policy: what comes later may be interrupted.
        write_atomically(self._folder / "validation.md", self.text.encode())
        write_atomically(self._folder / "validation.json", msgspec.json.format(msgspec.json.encode(self._found)))

    def _live_runs(
        self, scenario: Scenario, label: str, policy: Policy, place: Path, price: PriceOf
    ) -> Iterator[LiveRun]:
        """Run until as many count as are to, or too many did not."""
        counted = 0
        self._probe.begin()
        for _ in range(self._runs if self._probe.max_drift is None else self._runs * ATTEMPTS):
            log, own = IterationLog(price), place / f"live-{counted + 1}"
            run, result = carry_out(
                scenario, label, policy, own, self._outputs, self._execute, series=True, watch=log.observe
            )
            if run.interrupted or run.error:
                raise BrokenOff(run, result, place)
            if not self._probe.counts():
                continue
            yield LiveRun(result, FigureRun.of(run, result), log.iterations)
            counted += 1
            if counted == self._runs:
                return
