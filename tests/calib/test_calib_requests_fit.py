"""Constants of whole runs are looked for on a made-up server whose times are known functions of them."""

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest

from calib.robust import Parameter
from calib.server import requests as fitting
from calib.server.constants import HOST
from sim.run.served import Times

COUNT, KNOWN = 200, 160
HIDDEN = {"prompt_s": 2e-4, "decode_s": 0.02, HOST: 0.004}
TOO_MANY = 1000


@dataclass
class Server:
    """TTFT grows with a prompt and waits for a decode, TPOT with the batch; each request is a little off."""

    hidden: dict[str, float]
    noise: float = 0.02
    jumps: float = 0.0
    simulated: int = 0

    def times(self, values: dict[str, float]) -> Times:
        draw = np.random.default_rng(7)
        prompts, batch = draw.integers(50, 2000, COUNT), draw.integers(1, 40, COUNT)
        ttft_s = values["prompt_s"] * prompts + draw.random(COUNT) * values["decode_s"]
        tpot_s = values["decode_s"] * (1.0 + 0.02 * batch) + values.get(HOST, 0.0) * batch / 40
        # One token, or several at once.
        tpot_s[::9], tpot_s[4::9] = np.nan, 0.0
        return Times(ttft_s, tpot_s, ttft_s + tpot_s)

    def measured(self, _: object) -> Times:
        draw, times = np.random.default_rng(8), self.times(self.hidden)
        off = np.exp(self.noise * draw.standard_normal((2, COUNT)))
        return Times(times.ttft_s * off[0], times.tpot_s * off[1], times.e2el_s)

    def of_constants(self, values: dict[str, float], _: object) -> Times:
        self.simulated += 1
        assert self.simulated < TOO_MANY
        times = self.times(values)
        # A decision taken otherwise moves a request, here and there.
        jump = np.random.default_rng(self.simulated).standard_normal(COUNT) * self.jumps
        return Times(times.ttft_s * np.exp(jump), times.tpot_s, times.e2el_s)


def fit(monkeypatch: pytest.MonkeyPatch, server: Server, **parameters: Parameter):
    monkeypatch.setattr(fitting, "measured_times", server.measured)
    monkeypatch.setattr(fitting, "simulated_times", server.of_constants)
    fixed = {name: server.hidden[name] for name in server.hidden if name not in parameters}
    monkeypatch.setattr(fitting, "with_constants", lambda _, values: fixed | values)
    return fitting.fit_requests(cast("Any", None), cast("Any", None), KNOWN, parameters)


def near(name: str, factor: float, least: float = 1 / 30, most: float = 30.0, **more: bool) -> Parameter:
    start = HIDDEN[name] * factor
    return Parameter(start, least * start, most * start, **more)


@pytest.mark.parametrize(("factor", "jumps"), [(1.2, 0.0), (0.7, 0.0), (0.8, 0.03)])
def test_constants_are_found_within_their_intervals(monkeypatch, factor, jumps):
    server = Server(HIDDEN, jumps=jumps)
    found = fit(
        monkeypatch, server, prompt_s=near("prompt_s", factor), decode_s=near("decode_s", 1 / factor),
        **{HOST: Parameter(0.001, 0.0, 0.1, log=False)},
    )  # fmt: skip
    for name, one in found.estimates.items():
        assert one.low < HIDDEN[name] < one.high, name
        assert one.value == pytest.approx(HIDDEN[name], rel=0.5 if name == HOST else 0.02)
        assert one.stderr is not None and 0.0 < one.stderr < (0.4 if name == HOST else 0.02) * one.value
        # Student's t of nine degrees.
        assert [one.high - one.value, one.value - one.low] == pytest.approx([2.262 * one.stderr] * 2, rel=0.05)
    # Of 160 requests, each 2 % off: the jumps come beside, in the TTFT alone.
    assert found.scatter == pytest.approx(0.02, rel=0.25 if not jumps else 0.5)


def looks(constants: int) -> int:
    """Runs of one look at the surface."""
    return 10 * constants


@pytest.mark.parametrize(("factor", "repeats"), [(1.0, 0), (np.exp(1.0), 3), (np.exp(1.7), 5), (20.0, 6), (1 / 20, 6)])
def test_a_box_is_moved_as_long_as_the_least_is_at_its_edge(monkeypatch, factor, repeats):
    server = Server(HIDDEN, noise=0.0)
    monkeypatch.setattr(fitting, "MOST_FINER", 0)
    monkeypatch.setattr(fitting, "LAST_ROUNDS", 2)
    found = fit(monkeypatch, server, decode_s=near("decode_s", factor))
    # Two boxes, two last rounds: each ten runs; then the best, the median, and the errors that are left.
    assert server.simulated == (2 + repeats + 2) * looks(1) + 3
    # A box of 0.3 once, the repeats, one of 0.15, and in the end the median of two of 0.1.
    farthest = 0.3 * (1 + repeats) + 0.15 + 0.1
    moved = abs(np.log(found.estimates["decode_s"].value / HIDDEN["decode_s"] / factor))
    assert moved == pytest.approx(min(farthest, abs(np.log(factor))), rel=1e-3, abs=1e-3)


def test_a_constant_at_its_limit_has_no_error(monkeypatch):
    found = fit(
        monkeypatch, Server(HIDDEN), prompt_s=near("prompt_s", 1.0), decode_s=near("decode_s", 1.5, least=0.9)
    ).estimates
    assert found["decode_s"].value == found["decode_s"].low == found["decode_s"].high == pytest.approx(1.35 * 0.02)
    assert found["decode_s"].stderr is None and found["prompt_s"].stderr is not None


def test_a_constant_that_changes_nothing_stays_open(monkeypatch):
    found = fit(monkeypatch, Server(HIDDEN), decode_s=near("decode_s", 1.1), unused_s=Parameter(3.0, 0.3, 30.0))
    assert found.estimates["unused_s"].stderr == np.inf
    assert (found.estimates["unused_s"].low, found.estimates["unused_s"].high) == (0.3, 30.0)
    # Alone: of what is looked for beside it is known what there would be without.
    alone = fit(monkeypatch, Server(HIDDEN), decode_s=near("decode_s", 1.1)).estimates["decode_s"]
    assert found.estimates["decode_s"].stderr == pytest.approx(alone.stderr, rel=0.2)
    (nothing,) = fit(monkeypatch, Server(HIDDEN), unused_s=Parameter(3.0, 0.3, 30.0)).estimates.values()
    assert nothing.stderr == np.inf
