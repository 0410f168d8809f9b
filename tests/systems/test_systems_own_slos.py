"""SLOs that requests have themselves: counted, kept by `adaptive`, told by class; and what is too late for them."""

import numpy as np
import pytest

import kvtwin
from kvtwin.testing import limits, linear_machine, requests, simulate
from sim.options.scenario import Scenario
from sim.results.goodput import Goodput
from sim.results.metrics import RequestLog
from sim.results.report import OWN, run_lines
from sim.results.schema import Result
from sim.systems.adaptive.preset import Adaptive
from sim.systems.adaptive.triage import Triage
from sim.systems.vllm_v1 import VllmV1
from traces.request import Request
from traces.slos import SLOs

ROOM = limits(gpu=400, host=1000, seqs=64, tokens=512, chunked=True)
SLO = Goodput(ttft_s=2.0, tpot_s=0.1)
MACHINE = linear_machine(prefill=(0.005, 0.0002, 0.0), decode=(0.012, 0.0004, 0.0))
"""On which iterations take longer the more sequences decode."""
TOLD = Adaptive(ttft_slo_ms=2000.0, tpot_slo_ms=100.0)
TIGHT = SLOs(ttft_s=0.4, tpot_s=0.03)


def crowd(tight_share: float, gap_s: float = 0.02, count: int = 600) -> list[Request]:
    """More than `MACHINE` serves in time, some of it in a hurry."""
    rng = np.random.default_rng(3)
    times = np.cumsum(rng.exponential(gap_s, count)).tolist()
    rows = requests(*((time, int(rng.integers(20, 120)), int(rng.integers(5, 60))) for time in times))
    return [row._replace(slos=TIGHT) if rng.random() < tight_share else row for row in rows]


def test_each_request_is_held_to_its_own():
    """Prompts of 16 tokens take the same time; one asks for a microsecond, one for nothing, one leaves it open."""
    rows = requests((0.0, 16, 4), (5.0, 16, 4), (10.0, 16, 4))
    rows[0] = rows[0]._replace(slos=SLOs(ttft_s=1e-6))
    rows[1] = rows[1]._replace(slos=SLOs(e2el_s=60.0))
    log = simulate(VllmV1(), rows, ROOM, goodput=Goodput(ttft_s=1e-6)).log
    assert log.good == 1
    assert log.by_slos == {SLOs(ttft_s=1e-6): (1, 0), SLOs(e2el_s=60.0): (1, 1)}
    # Without --goodput the third has none to miss.
    assert simulate(VllmV1(), rows, ROOM).log.good == 2


def test_own_slos_that_all_share_are_those_of_goodput():
    """One rule, wherever it was said: the same requests end at the same times."""
    rows = crowd(0.0)
    own = SLOs(*SLO)
    said = simulate(TOLD, rows, ROOM, machine=MACHINE, goodput=SLO)
    meant = simulate(TOLD, [row._replace(slos=own) for row in rows], ROOM, machine=MACHINE)
    assert [seq.finish_s for seq in said.ended] == [seq.finish_s for seq in meant.ended]
    assert said.log.good == meant.log.good < len(rows)


def test_more_are_good_when_each_ones_own_are_kept_than_when_all_are_kept_alike():
    """To the loosest, the hurried miss; to the tightest, too few fit."""
    rows = crowd(0.4)
    alike = [row._replace(slos=None) for row in rows]
    good = []
    for ttft_ms, tpot_ms in ((2000.0, 100.0), (400.0, 30.0)):
        log = RequestLog(goodput=SLO)
        for seq in simulate(Adaptive(ttft_slo_ms=ttft_ms, tpot_slo_ms=tpot_ms), alike, ROOM, machine=MACHINE).ended:
            seq.request = rows[seq.request.request_id]
            log.end(seq)
        good.append(log.good)
    own = simulate(TOLD, rows, ROOM, machine=MACHINE, goodput=SLO).log.good
    assert own > max(good)


@pytest.mark.parametrize(("tight_share", "kept_s"), [(0.02, 0.1), (0.98, 0.03)])
def test_the_pace_is_that_which_most_can_be_good_at(tight_share, kept_s):
    """A few in a hurry do not slow down all others, and many do."""
    order = simulate(TOLD, crowd(tight_share), ROOM, machine=MACHINE, goodput=SLO).scheduler.order
    assert isinstance(order, Triage)
    assert order.kept_tpot_s == kept_s


@pytest.mark.parametrize("jump", [True, False])
def test_what_is_too_late_is_refused_and_no_one_else(jump):
    """One seat, taken for 4 s: two would be late (TTFT 1 s) and are turned away, the last is in time."""
    rows = requests((0.0, 16, 200), (0.1, 16, 10), (0.2, 16, 10), (3.9, 16, 10))
    policy = Adaptive(ttft_slo_ms=1000.0, tpot_slo_ms=25.0, predictor="oracle", late="refuse")
    outcome = simulate(policy, rows, limits(seqs=1), jump=jump)
    errors = [seq.error for _, seq in sorted(outcome.by_id().items())]
    assert errors == ["", *["ignored: rejected: its first token would come too late"] * 2, ""]
    # The seat is free for the last as soon as the first has ended.
    assert outcome.log.last_finish_s < 4.5


def test_refusing_ends_soon_after_the_last_arrival():
    """What waits until arrivals end is what goodput over the duration was divided by."""
    rows = crowd(0.3, gap_s=0.01)
    waits, refuses = (
        simulate(
            Adaptive(ttft_slo_ms=2000.0, tpot_slo_ms=100.0, late=late), rows, ROOM, machine=MACHINE, goodput=SLO
        ).log
        for late in ("wait", "refuse")
    )
    assert refuses.ignored > 0 == waits.ignored
    assert refuses.rate(refuses.good) > waits.rate(waits.good)


def run_of(tmp_path, rows: list[tuple[int | float, str]], policy: str, goodput: tuple[str, ...] = ()) -> Result:
    """Of a trace of prompts of 2,000 tokens: when each comes, and its SLOs."""
    path = tmp_path / "t.csv"
    lines = (f"{at_s},2000,20,{slos}\n" for at_s, slos in rows)
    path.write_text("arrival_s,prompt_tokens,output_tokens,slos\n" + "".join(lines))
    scenario = Scenario(trace=str(path), model="llama-2-7b", gpu="l20", goodput=goodput)
    return kvtwin.simulate(scenario, policy).result


def test_a_result_tells_classes_and_what_was_rejected(tmp_path):
    """From the trace's column to the report; a policy that keeps all alike says so."""
    rows = [(0.01 * i, "ttft:200 tpot:30" if i % 3 else "") for i in range(90)]
    refusing, other = (run_of(tmp_path, rows, text, ("ttft:9000",)) for text in ("adaptive:late=refuse", "layerkv"))
    hurried, rest = refusing.slo_classes
    assert (hurried.slos, hurried.num_prompts) == ("ttft:200 tpot:30", 60)
    assert (rest.slos, rest.num_prompts) == ("--goodput", 30)
    assert hurried.good + rest.good == round(refusing.goodput_attainment * 90)
    assert refusing.rejected == refusing.ignored > 0
    text = "\n".join(run_lines(refusing, tmp_path))
    assert "of them rejected:" in text and "of 60: ttft:200 tpot:30" in text
    assert not any("SLOs of their own" in warning for warning in refusing.warnings)
    assert any("60 requests have SLOs of their own" in warning for warning in other.warnings)


def test_without_goodput_those_that_name_no_slos_have_none(tmp_path):
    """All of them are good: a class of its own name, not that of an option that was not given."""
    result = run_of(tmp_path, [(10 * i, "" if i % 3 else "ttft:0.001") for i in range(9)], "vllm-v1")
    classes = [(one.slos, one.num_prompts, one.good) for one in result.slo_classes]
    assert classes == [("none", 6, 6), ("ttft:0.001", 3, 0)]
    assert any(line.split(":", 1)[-1].strip() == OWN for line in run_lines(result, tmp_path))
