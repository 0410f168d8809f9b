"""How well the simulated twin agrees with the live one: errors of every metric against the live runs' own spread."""

from collections.abc import Sequence
from statistics import mean

import msgspec

from gpu_runtime.twin.iterations import IterationAgreement, judged_kinds
from sim.results.report import number
from sim.results.schema import Result

METRICS = (
    ("mean_ttft_ms", "mean TTFT", "ms"),
    ("p99_ttft_ms", "P99 TTFT", "ms"),
    ("mean_tpot_ms", "mean TPOT", "ms"),
    ("p99_tpot_ms", "P99 TPOT", "ms"),
    ("mean_itl_ms", "mean ITL", "ms"),
    ("mean_e2el_ms", "mean end to end", "ms"),
    ("request_throughput", "throughput", "requests/s"),
    ("output_throughput", "output throughput", "tokens/s"),
)
"""Fields of a result, their names, their units."""
JUDGED = ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "request_throughput")
"""The metrics that decide whether the twin agrees."""
TOLERANCE = 0.10
"""The twin may be off by this share of the live runs' mean, however much they differ among themselves."""
MOST_SPREAD = TOLERANCE / 2
"""Live runs that differ by more than this share weaken the verdict."""


class Agreement(msgspec.Struct, frozen=True):
    """One metric: what the simulator says, what the live runs say, and by how much they differ."""

    field: str
    """Name in `result.json`."""
    name: str
    """Name for people."""
    unit: str
    """Unit."""
    simulated: float
    """Value of the simulation."""
    live: float
    """Mean of the live runs."""
    spread: float
    """(largest - smallest live run) / their mean."""
    error: float
    """(simulated - live) / live."""

    @property
    def agrees(self) -> bool:
        """Whether the simulator is within what is allowed."""
        return abs(self.error) <= TOLERANCE


class Validation(msgspec.Struct, frozen=True):
    """What `validation.json` says of one policy."""

    policy: str
    """Its label."""
    agrees: bool | None
    """Whether mean and P99 TTFT, mean TPOT and throughput are within 10 % of the live runs' means, and so the median
    price of each kind of iteration. None: too few live runs count."""
    slowness: list[float]
    """A probe's seconds over the profile's, before and after each live run that counts."""
    disturbed_runs: int
    """Live runs that do not count."""
    metrics: list[Agreement]
    """Every metric that all runs have, below."""
    iterations: IterationAgreement
    """How far iterations agree, below."""


def agreements(simulated: Result, live: Sequence[Result]) -> list[Agreement]:
    """Every metric that all runs have; empty where no request completed."""
    found = []
    for field, name, unit in METRICS:
        mine = number(simulated, field)
        numbers = [value for run in live if (value := number(run, field)) is not None]
        if mine is None or len(numbers) != len(live) or not numbers:
            continue
        middle = mean(numbers)
        if middle <= 0:
            continue
        spread = (max(numbers) - min(numbers)) / middle
        found.append(Agreement(field, name, unit, mine, middle, spread, mine / middle - 1))
    return found


def verdict(found: Sequence[Agreement], iterations: IterationAgreement) -> bool:
    """Whether every metric that is judged agrees, and every kind of iteration does with its price, in the median.

    Metrics agree where errors cancel; iterations leave nothing to cancel.
    """
    judged = [agreement for agreement in found if agreement.field in JUDGED]
    kinds = judged_kinds(iterations)
    return (
        bool(judged)
        and all(agreement.agrees for agreement in judged)
        and all(abs(row.median_error) <= TOLERANCE for row in kinds)
    )


def _caution(found: Sequence[Agreement]) -> list[str]:
    """What weakens the verdict: live runs that disagree among themselves."""
    uneven = [a for a in found if a.field in JUDGED and a.spread > MOST_SPREAD]
    if not uneven:
        return []
    names = ", ".join(f"{a.name} ({a.error:+.0%}, spread {a.spread:.0%})" for a in uneven)
    return [f"Live runs differ by more than {MOST_SPREAD:.0%}: {names}. Repeat on a quieter machine to know more."]


def markdown(validation: Validation, runs: int) -> str:
    """A table of the agreement of one policy, of which so many live runs were to count."""
    label, found, slowness = validation.policy, validation.metrics, validation.slowness
    disturbed, counted = validation.disturbed_runs, len(validation.slowness) // 2
    if validation.agrees is None:
        return (
            f"## {label}\n\n**Not judged**: around {disturbed} of {counted + disturbed} live runs a probe was too far "
            "from the profile: calibrate again, find a quieter machine or allow a larger --max-drift.\n"
        )
    machine = f"Around live runs a probe took {min(slowness):.2f} to {max(slowness):.2f} times what the profile says"
    if max(abs(s - 1) for s in slowness) > TOLERANCE:
        machine += ": the machine is not what was calibrated, and what is off below may be off by that"
    machine += f" ({disturbed} more runs were disturbed and do not count)." if disturbed else "."
    lines = [
        f"## {label}",
        "",
        f"The twin {'agrees' if validation.agrees else '**does not agree**'}: judged are metrics marked *, each within "
        f"{TOLERANCE:.0%} of {runs} live runs' mean, and the median price of iterations of each kind.",
        *_caution(found),
        machine,
        "",
        "| metric | simulated | live | spread of live runs | error |",
        "|---|--:|--:|--:|--:|",
    ]
    for a in found:
        star = " *" if a.field in JUDGED else ""
        lines.append(
            f"| {a.name}, {a.unit}{star} | {a.simulated:.4g} | {a.live:.4g} | {a.spread:.1%} | {a.error:+.1%} |"
        )
    return "\n".join(lines) + "\n"
