"""Bars: every request passes through, and after a while it is said how many there were."""

import pytest

from kvtwin.testing import requests
from sim import progress


@pytest.mark.parametrize(("after_s", "is_shown"), [(-1.0, True), (1e9, False)])
def test_requests_pass_through_and_the_bar_comes_late(after_s, is_shown, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(progress, "SHOW_AFTER_S", after_s)
    rows = requests(*[(0.0, 10, 1)] * 300)
    assert list(progress.track(iter(rows), "vllm-swap", len(rows))) == rows
    assert ("vllm-swap: requests arrived" in capsys.readouterr().err) == is_shown
