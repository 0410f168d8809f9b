"""The figure of `validate --against`: four panels, each with what its title says."""

from pathlib import Path

import numpy as np
import pytest

from gpu_runtime.twin.against_figure import draw_against
from kvtwin.testing import requests
from sim.run.served import Times
from traces.served import ServedRun


def test_each_panel_has_what_its_title_says():
    rows = requests((0.0, 10, 3), (1.0, 10, 1), (2.0, 10, 2))
    theirs = Times(np.array([0.5, 1.0, 0.25]), np.array([0.25, np.nan, 0.5]), np.array([1.0, 1.0, 0.75]))
    ours = Times(np.array([0.4, 0.9, 0.2]), np.array([0.2, np.nan, 0.4]), np.array([0.8, 0.9, 0.6]))
    served = ServedRun(Path("run.json"), rows, theirs.ttft_s.tolist(), theirs.e2el_s.tolist(), [()] * 3, 0)
    ttft, tpot, over_run, against = axes = draw_against("vllm-v1", served, ours, theirs).axes
    assert [ax.get_title(loc="left") for ax in axes] == [
        "Time to first token", "Time per output token", "TTFT over the run", "Request against request",
    ]  # fmt: skip
    for ax, simulated, measured in ((ttft, [0.2, 0.4, 0.9], [0.25, 0.5, 1.0]), (tpot, [0.2, 0.4], [0.25, 0.5])):
        shares = [100 * (i + 1) / len(measured) for i in range(len(measured))]
        lines = {line.get_label(): line for line in ax.get_lines()}
        for name, values in (("simulated", simulated), ("measured", measured)):
            assert lines[name].get_xdata().tolist() == values
            assert lines[name].get_ydata().tolist() == pytest.approx(shares)
        assert [text.get_text() for text in ax.get_legend().get_texts()] == ["simulated", "measured"]
    shown = {line.get_label(): line.get_ydata().tolist() for line in over_run.get_lines()}
    assert shown == {"measured": [0.5, 1.0, 0.25], "simulated": [0.4, 0.9, 0.2]}
    diagonal, dots = against.get_lines()
    assert list(diagonal.get_xdata()) == list(diagonal.get_ydata()) == [0.6, 1.0]
    assert (dots.get_xdata().tolist(), dots.get_ydata().tolist()) == ([1.0, 1.0, 0.75], [0.8, 0.9, 0.6])
