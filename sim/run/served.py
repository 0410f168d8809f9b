"""A server's run beside its simulation: the same requests, and what each took there and here."""

from collections.abc import Iterator
from dataclasses import replace
from operator import itemgetter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sim.cost.engine_profile import OF_POLICY
from sim.errors import UserError
from sim.frozen import frozen
from sim.options.scenario import SHAPING, Scenario
from sim.options.values import flag
from sim.results.metrics import RequestLog
from sim.run.prepare import Setup
from sim.run.simulate import build_run, execute_all
from sim.run.traffic import traffic
from traces.served import ServedRun, read_served

Array = NDArray[np.float64]


@frozen
class Times:
    """TTFT, TPOT (NaN of one token) and end-to-end latency of each request, s, shape (requests,)."""

    ttft_s: Array
    tpot_s: Array
    e2el_s: Array

    def __getitem__(self, chosen: slice) -> "Times":
        return Times(self.ttft_s[chosen], self.tpot_s[chosen], self.e2el_s[chosen])

    def by_name(self) -> Iterator[tuple[str, Array]]:
        """`ttft`, `tpot` of those that have one, and `e2el`."""
        yield "ttft", self.ttft_s
        yield "tpot", self.tpot_s[np.isfinite(self.tpot_s)]
        yield "e2el", self.e2el_s


def read_run(path: Path, scenario: Scenario) -> ServedRun:
    """The run in a file, with its scenario's trace beside it where that is another file.

    UserError where the scenario changes the traffic.
    """
    plain = Scenario()
    for name in SHAPING:
        if getattr(scenario, name) != getattr(plain, name):
            value = getattr(scenario, name)
            raise UserError(f"{flag(name)}: {value} changes the traffic, but {path} is of what was sent: leave it out")
    own = scenario.trace is None or Path(scenario.trace) == path
    return read_served(path, None if own else list(traffic(scenario)))


def as_served(scenario: Scenario) -> Scenario:
    """With the engine of the policy's own time, unless another is asked for: policies are what the server ran."""
    return replace(scenario, engine_profile=scenario.engine_profile or OF_POLICY)


def measured_times(served: ServedRun) -> Times:
    """What the client measured."""
    return _times(np.array(served.ttft_s), np.array(served.e2el_s), served)


def simulated_times(setup: Setup, served: ServedRun) -> Times:
    """What the simulator says of the same requests. UserError where it does not serve them all."""
    return times_in(execute_all(build_run(setup, served.requests)).log, served)


def times_in(log: RequestLog, served: ServedRun) -> Times:
    """The times in a simulated run's log, as `simulated_times`."""
    if log.requests is None:
        raise UserError(f"{served.path}: {len(served.requests):,} requests are too many to compare one by one")
    rows = sorted(log.requests, key=itemgetter(0))
    lost = [row for row in rows if row.error]
    if lost:
        raise UserError(
            f"{served.path}: the engine described gives up {len(lost)} requests that the server answered, the first is "
            f"{lost[0].request_id} ({lost[0].error}): check --max-model-len, --num-gpu-blocks-override and the other "
            "limits"
        )
    return _times(np.array([row.ttft_s for row in rows]), np.array([row.e2el_s for row in rows]), served)


def _times(ttft_s: Array, e2el_s: Array, served: ServedRun) -> Times:
    outputs = np.array([request.output_tokens for request in served.requests])
    gaps = np.where(outputs > 1, outputs - 1.0, np.nan)
    return Times(ttft_s, (e2el_s - ttft_s) / gaps, e2el_s)


def mean_errors(simulated: Times, measured: Times) -> dict[str, float]:
    """Mean of the simulated over that of the measured, minus 1, of `Times.by_name`; None without a TPOT."""
    pairs = zip(simulated.by_name(), measured.by_name(), strict=True)
    return {name: float(np.mean(ours) / np.mean(theirs)) - 1 for (name, ours), (_, theirs) in pairs if theirs.size}
