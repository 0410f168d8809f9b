"""The real clock's loop without anything real: when failures are reported, and what counts as an iteration."""

from math import inf
from threading import Event, Lock
from types import SimpleNamespace

import pytest
from pretended import PretendedDevice

from gpu_runtime.device import TorchDevice
from gpu_runtime.instance import LiveInstance
from gpu_runtime.kv.block_ids import BlockIds
from gpu_runtime.kv.replay.placement import Placement
from kvtwin.testing import build_engine, limits, linear_machine, live, requests
from kvtwin.testing.engines import CheckedEngine
from sim.clock.arrivals import Arrivals
from sim.errors import InvariantError
from sim.systems.vllm055 import VllmRecompute


class Failing(PretendedDevice):
    """Says that requests failed when it is next asked, but for the first `asked` times."""

    def __init__(self, *words, asked=0):
        super().__init__(*words)
        self.broken, self.asked, self.executed = [], asked, 0

    def failures(self):
        if self.asked:
            self.asked -= 1
            return []
        found, self.broken = self.broken, []
        return found

    def execute(self, plan):
        self.executed += 1
        return super().execute(plan)


class Hearing(LiveInstance):
    """Breaks requests that arrive."""

    def _add(self, request):
        seq = super()._add(request)
        if request.request_id in self.device.fails:
            self.device.broken.append((seq, "the link is down"))
        return seq


def serve(rows, broken=(), *, asked=0):
    """What ended, the instance, and its device, which fails the requests `broken` after it was `asked` so often."""
    ended = []
    machine = linear_machine(prefill=(0.1, 0.0, 0.0), decode=(0.1, 0.0, 0.0))
    engine = build_engine(VllmRecompute(), limits(seqs=1), machine, ended.append)
    device = Failing(machine, engine.scheduler, asked=asked)
    device.fails = broken
    instance = Hearing(engine, device, Arrivals(requests(*rows)))
    instance.serve()
    return {seq.request.request_id: seq for seq in ended}, instance, device


def test_an_engine_that_stands_still_is_a_fault(monkeypatch):
    monkeypatch.setattr(CheckedEngine, "schedule", lambda self, now_s: None)
    with pytest.raises(InvariantError, match=r"the engine stands still at 0\.0 s with requests unfinished"):
        serve([(0.0, 10, 4)])


def test_iterations_are_counted_one_by_one_and_the_last_release_is_none():
    ended, instance, device = serve([(0.0, 10, 4), (0.0, 10, 3)])
    assert instance.iterations == 7
    assert device.executed == instance.iterations + 1
    assert [ended[i].finish_s for i in (0, 1)] == pytest.approx([0.4, 0.7])


def test_what_fails_before_the_first_plan_is_in_none():
    ended, instance, _ = serve([(0.0, 10, 4)], broken=(0,))
    assert instance.iterations == 0
    assert ended[0].error == "failed: the link is down"


@pytest.mark.parametrize(("asked", "iterations"), [(0, 3), (1, 4), (2, 5)])
def test_a_failure_is_heard_of_before_a_plan_and_after_it(asked, iterations):
    """What waits never runs. What runs ends with the first or second iteration; the other request takes three."""
    ended, instance, _ = serve([(0.0, 10, 4), (0.0, 10, 3)], broken=(0,), asked=asked)
    assert ended[0].error and not ended[1].error
    assert instance.iterations == iterations


def placement():
    return Placement(BlockIds(4), BlockIds(4), num_groups=1, block_tokens=4)


def test_a_device_sleeps_until_it_is_time_or_it_is_woken():
    device = live.build_device(build_engine(VllmRecompute(), limits(20, 0), linear_machine(), print).scheduler)
    device.start()
    began_s = device.now_s()
    device.wait(began_s + 0.02)
    assert device.now_s() >= began_s + 0.02
    device.wake()
    # For ever, if it had not been woken.
    device.wait(began_s + 1e6)
    assert device.now_s() < began_s + 1e6
    device.close()


def test_a_first_rank_that_waits_for_requests_is_due_to_nothing(monkeypatch):
    """Else a group without work would be taken for one that hangs."""
    device = live.build_device(build_engine(VllmRecompute(), limits(20, 0), linear_machine(), print).scheduler)
    dues = []
    monkeypatch.setattr(device.decoder, "group", SimpleNamespace(rank=0, due=dues.append))
    device.wait(device._own_s() + 1e-3)
    assert dues == [inf]
    device.close()


@pytest.mark.parametrize(("pending", "naps"), [(True, True), (False, False)])
def test_a_device_that_stays_awake_naps_while_copies_are_queued(pending, naps, monkeypatch):
    """Asking over and over whether it was woken it keeps the interpreter's lock: 200 pieces then took 6 to 63 ms to be
    queued by the copy thread, 1 to 2 beside one that sleeps. At the end it is awake either way, to be in time."""
    waits, clock = [], [0.0]

    class Flag:
        def wait(self, timeout):
            waits.append(timeout)
            clock[0] += max(timeout, 1e-5)

    class Waiting(TorchDevice):
        copies_pending = pending

        def __init__(self):
            self._stays_awake, self._woken = True, Flag()
            self.decoder = SimpleNamespace(group=None)
            self._transfers = type("Transfers", (), {"any_ended": False})()

        def _own_s(self):
            return clock[0]

    Waiting().wait(5e-3)
    early = waits[: len(waits) // 2]
    assert all(timeout > 0 for timeout in early) == naps and waits[-1] == 0.0
    assert clock[0] == pytest.approx(5e-3, abs=2e-5)


def test_an_interrupt_is_one_though_it_comes_as_a_lock_is_let_go():
    class Woken(Event):
        def wait(self, timeout=None):
            try:
                raise KeyboardInterrupt
            finally:
                # As `Condition.__exit__` does where `wait` was interrupted before it had its lock again.
                Lock().release()

    with pytest.raises(KeyboardInterrupt):
        TorchDevice._is_woken_within(SimpleNamespace(_woken=Woken()), 1.0)
