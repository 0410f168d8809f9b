"""Bars: every request passes through, and after a while it is said how many there were."""

from types import SimpleNamespace

import pytest
from rich.progress import Progress

from kvtwin.testing import requests
from sim.run import progress


@pytest.mark.parametrize(("after_s", "is_shown"), [(-1.0, True), (1e9, False)])
def test_requests_pass_through_and_the_bar_comes_late(after_s, is_shown, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(progress, "SHOW_AFTER_S", after_s)
    rows = requests(*[(0.0, 10, 1)] * 300)
    assert list(progress.track(iter(rows), "vllm-swap", len(rows))) == rows
    assert ("vllm-swap: requests arrived" in capsys.readouterr().err) == is_shown


def test_a_bar_of_runs_counts_those_that_ended_and_failed(monkeypatch):
    """Three in two seconds, one of which failed; before any time has passed there is a rate, too."""
    now_s, bars = [5.0], []
    monkeypatch.setattr(progress, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(Progress, "start", lambda bar: bars.append(bar))
    with progress.runs_bar("sweep") as begin:
        told = begin(4)
        (bar,) = bars
        assert bar.console.stderr and bar.live.transient
        (task,) = bar.tasks
        assert (task.description, task.total, task.completed) == ("sweep", 4, 0)
        assert task.fields == {"rate": 0.0, "failed": 0}
        told(SimpleNamespace(error=None))
        assert task.fields["rate"] == pytest.approx(1e9)
        now_s[0] = 7.0
        told(SimpleNamespace(error="no such GPU"))
        told(SimpleNamespace(error=None))
        assert task.completed == 3 and task.fields == {"rate": 1.5, "failed": 1}
