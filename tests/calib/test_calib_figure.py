"""Figures of a fit: lines go through like samples, and labels name what stands beside them."""

import numpy as np
import pytest
from calib_small import A100, BASE, HARDWARE, planted, shapes

from calib.figure import draw_fit
from calib.fit import fit_profile


@pytest.fixture(scope="module")
def axes(tmp_path_factory):
    between = {"elementwise_bytes_per_s": 1e12, "elementwise_launch_s": 1e-5}
    chosen = [*shapes(op="products"), *shapes(("llama-2-7b",), "elementwise", batches=())]
    samples = planted(chosen, A100 | between)
    given = {"name": "mine", "status": "measured", "provenance": {}}
    return draw_fit(fit_profile(samples, tmp_path_factory.mktemp("fit"), HARDWARE, BASE, **given)).axes


def test_lines_of_prompts_hold_no_other_operation(axes):
    """Three models, a line and its points each; what lies between products was timed at the same numbers of tokens."""
    lines = axes[0].get_lines()
    assert len(lines) == 6
    for line in lines:
        assert np.all(np.diff(np.asarray(line.get_xdata(), dtype=float)) > 0)
        assert np.all(np.diff(np.asarray(line.get_ydata(), dtype=float)) > 0)


def test_every_constant_has_a_row_and_its_name_beside_it(axes):
    names = [label.get_text().split()[0] for label in axes[3].get_yticklabels()]
    assert len(names) == len(set(names)) == len(axes[3].get_yticks())
    assert {"flops_per_s", "hbm_bytes_per_s", "layer_overhead_s"} <= set(names)
