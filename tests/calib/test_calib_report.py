"""Tables of a fit's report, of errors given here, and its figures: lines go through like samples."""

from types import SimpleNamespace

import numpy as np
import pytest
from calib_small import A100, BASE, HARDWARE, planted, shapes

from calib.figure import draw_fit
from calib.fit import fit_profile
from calib.holdout import Holdout
from calib.report import errors_table, readable
from calib.samples import Sample


def rows(*given: str) -> str:
    return "\n".join(("| predicting | prefill | decode | mixed | samples |", "| --- | --- | --- | --- | --- |", *given))


def report(**more) -> SimpleNamespace:
    """Two scored prompts, one that is too short, two decodes, and a prompt with decodes beside it."""
    common = {"model": "m", "latency_s": 1.0, "op": "layers"}
    samples = [Sample(new_tokens=n, **common) for n in (512, 2048, 2)]
    samples += [Sample(new_tokens=1, context_tokens=n, **common) for n in (10, 20)]
    samples.append(Sample(new_tokens=512, decodes=3, decode_context_tokens=9, **common))
    nothing = {"by_model": {}, "by_rows": {}, "small_to_large": Holdout(0.0, 0.0, 0)}
    return SimpleNamespace(samples=samples, errors=np.array([0.1, -0.3, 9.0, -0.02, 0.06, 0.5]), **nothing | more)


def test_what_was_not_left_out_has_no_row():
    own = "| the samples fitted | 20.0 % | 4.0 % | 50.0 % | 6 |"
    assert errors_table(report()) == rows(own)
    one = {"a": Holdout(0.25, float("nan"), 7)}
    assert errors_table(report(by_model=one)) == rows(own, "| a left out | 25.0 % | - | - | 7 |")
    two = {**one, "b": Holdout(0.35, 0.1, 9, 0.2)}
    assert errors_table(report(by_model=two, small_to_large=Holdout(0.4, 0.5, 1))).splitlines()[3:] == [
        "| a model left out (mean) | 30.0 % | 10.0 % | 20.0 % | 16 |", "| a left out | 25.0 % | - | - | 7 |",
        "| b left out | 35.0 % | 10.0 % | 20.0 % | 9 |",
        "| the longer half from the shorter | 40.0 % | 50.0 % | - | 1 |",
    ]  # fmt: skip


def test_values_have_units_one_reads():
    assert readable(2.5e14, "FLOP/s") == "250 TFLOP/s"
    assert readable(0.3, "parsec") == "0.3 parsec"


@pytest.fixture(scope="module")
def fitted_report(tmp_path_factory):
    between = {"elementwise_bytes_per_s": 1e12, "elementwise_launch_s": 1e-5}
    chosen = [*shapes(op="products"), *shapes(("llama-2-7b",), "elementwise", batches=())]
    samples = planted(chosen, A100 | between)
    given = {"name": "mine", "status": "measured", "provenance": {}}
    return fit_profile(samples, tmp_path_factory.mktemp("fit"), HARDWARE, BASE, **given)


@pytest.fixture(scope="module")
def axes(fitted_report):
    return draw_fit(fitted_report).axes
