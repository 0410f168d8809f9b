"""Factors of matrix products: planted ones come back, none are made up, held-out errors fall where they are kept."""

from pathlib import Path

import numpy as np
import pytest
from calib_small import A100, BASE, HARDWARE, THREE, noisy, planted, shapes, terms, timed

from calib.factors import factors_at, fit_factors
from calib.fit import FitReport, fit_profile
from calib.holdout import Fitted, leave_one_model_out, mean_holdout
from calib.robust import Parameter
from calib.roofline import complete, predict_s

CURVE = [(1, 1.0), (16, 1.0), (64, 1.05), (256, 0.85), (512, 1.2), (8192, 0.95)]


def curved(models=THREE):
    """Samples of a GPU whose products have the factors of `CURVE`."""
    samples = shapes(models)
    return timed(samples, predict_s(complete(A100), terms(samples), CURVE))


def report_of(samples) -> FitReport:
    return fit_profile(samples, Path(), HARDWARE, BASE, name="x", status="imported", provenance={})


def test_factors_by_hand():
    """Half of 2 s at 4 tokens, and 3 s beside: 4 s measured is a factor of 1/2, but for the sample that says 1."""
    assert factors_at([(2, 1.0), (4, 2.0)], np.array([1.0, 2.0, 3.0, 4.0, 9.0])) == pytest.approx([1, 1, 1.5, 2, 2])
    assert factors_at(None, np.array([7.0])) == 1.0
    products, rest, tokens = np.full(40, 2.0), np.full(40, 3.0), np.full(40, 4.0)

    def predict(_, factors):
        return rest + products * factors

    _, ((size, factor),) = fit_factors(predict, tokens, np.full(40, 4.0))
    assert size == 4 and factor == pytest.approx(0.5, rel=0.1)
    # Profiles hold four digits.
    assert fit_factors(predict, tokens, 3.0 + 2.0 * np.full(40, 0.654321))[1] == [(4, 0.6543)]
    # What has no products tells nothing.
    assert fit_factors(predict, np.zeros(40), np.full(40, 4.0))[1] == []


def test_constants_are_found_with_the_factors():
    """Products of a rate of 10 take twice as long at 3 tokens: without a factor there the rate would be 7 or less."""
    tokens = np.repeat([1.0, 2.0, 3.0, 4.0], 10)
    work = 5 * tokens * np.tile(np.arange(1, 11), 4)
    measured = work / 10 * np.where(tokens == 3, 2.0, 1.0) + 0.1

    def predict(values, factors):
        return work / values["rate"] * factors + 0.1

    found, points = fit_factors(predict, tokens, measured, {"rate": Parameter(30.0)})
    assert found.values == {"rate": pytest.approx(10.0, rel=1e-3)}
    assert dict(points) == pytest.approx({1: 1.0, 2: 1.0, 3: 2.0, 4: 1.0}, rel=1e-3)


def test_planted_factors_come_back_and_hold_out_better():
    report = report_of(noisy(curved()))
    found = dict(report.profile.linear_factors or [])
    own = predict_s(complete({n: report.profile.value(n) for n in A100}), report.terms, report.profile.linear_factors)
    true = predict_s(complete(A100), report.terms, CURVE)
    assert np.abs(own / true - 1).mean() < 0.02
    assert found[256] / found[512] == pytest.approx(0.85 / 1.2, rel=0.08)
    exact = report_of(curved())
    without = mean_holdout(leave_one_model_out(Fitted(exact.samples, exact.terms, exact.measured_s)))
    held_out = mean_holdout(exact.by_model)
    assert held_out.prefill < 0.5 * without.prefill and held_out.decode < without.decode
    assert report.profile.fp8_linear_factors is None
    assert not report.by_rows


def test_a_roofline_that_leans_nowhere_gets_no_factors():
    report = report_of(noisy(planted(shapes())))
    assert report.profile.linear_factors is None
    assert b"linear_factors" not in report.profile.to_json()


def test_of_one_model_rows_are_left_out():
    report = report_of(curved(("llama-3.1-8b",)))
    assert report.profile.linear_factors is not None
    assert not report.by_model and len(report.by_rows) == 5
    residuals = report.profile.residuals or {}
    assert residuals["unseen_rows_prefill_mape"] == pytest.approx(mean_holdout(report.by_rows).prefill, abs=1e-5)
