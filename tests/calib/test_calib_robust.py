"""Standard errors and limits of fits, worked by hand."""

from math import sqrt

import numpy as np
import pytest

from calib.robust import Estimate, Parameter, _sandwich, estimates_of
from calib.roofline import with_exponent


def test_errors_are_known_from_points_that_hide_half_of_their_own():
    """Two points of one mean: each has leverage 1/2. Of an error of half the scale Cauchy's loss keeps 4/5."""
    influence, curvature = 0.5 / 1.25 / (1 - 1 / 2), 0.75 / 1.25**2
    found = _sandwich(np.ones((2, 1)), np.array([0.5, -0.5]), 1.0, np.array([True]))
    assert found == pytest.approx([sqrt(2) * influence / (2 * curvature)])
    # In units of the scale; one point alone hides all but a thousandth.
    assert _sandwich(np.ones((2, 1)), np.array([1.0, -1.0]), 2.0, np.array([True])) == pytest.approx(2 * found)
    assert _sandwich(np.ones((1, 1)), np.array([0.5]), 1.0, np.array([True])) == pytest.approx([0.4 / 1e-3 / curvature])


def test_what_changes_nothing_is_open_and_what_stands_at_a_limit_has_no_error():
    slopes = np.array([[1.0, 0.0, 1.0, np.inf], [1.0, 1e-6, -1.0, 0.0]])
    found = _sandwich(slopes, np.array([0.5, -0.5]), 1.0, np.array([True, True, False, True]))
    alone = _sandwich(slopes[:, :1], np.array([0.5, -0.5]), 1.0, np.array([True]))
    assert found[0] == alone[0] and found[1] == found[3] == np.inf and np.isnan(found[2])


@pytest.mark.parametrize(("points", "wide"), [(2, 12.706), (3, 12.706), (4, 4.303)])
def test_intervals_are_as_wide_as_the_points_left_say(points, wide):
    """Two found from three points leave one degree of freedom, which is also the least."""
    parameters = {"rate": Parameter(9.0), "s": Parameter(2.0, 1.0, 100.0, log=False)}

    def values(x):
        return {"rate": float(np.exp(x[0])), "s": 2.0 * x[1]}

    found = estimates_of(parameters, np.array([0.0, 3.0]), np.array([0.01, 0.1]), points - 2, values)
    assert (found["rate"].value, found["rate"].stderr) == (1.0, 0.01)
    assert (found["s"].value, found["s"].stderr) == (6.0, pytest.approx(0.2))
    assert np.log([found["rate"].low, found["rate"].high]) == pytest.approx([-0.01 * wide, 0.01 * wide], rel=1e-4)
    assert [found["s"].low, found["s"].high] == pytest.approx([6 - 0.2 * wide, 6 + 0.2 * wide], rel=1e-4)


@pytest.mark.parametrize(("value", "limit"), [(4.0, 2.0), (5.0, 8.0), (7.0, 8.0)])
def test_a_value_at_a_limit_is_the_nearer_one(value, limit):
    parameters = {"s": Parameter(1.0, 2.0, 8.0, log=False)}
    found = estimates_of(parameters, np.array([value]), np.array([np.nan]), 8, lambda x: {"s": float(x[0])})
    assert found == {"s": Estimate(limit, None, limit, limit)}


def test_an_estimate_is_told_where_it_is_known_better_than_by_its_size():
    told = [Estimate(2.0, stderr, 0.0, 9.0).told for stderr in (1.999, 2.0, None, np.inf)]
    assert told == [True, False, True, False]
    assert not Estimate(np.inf, None, 0.0, 9.0).told


# -- the roofline's parts ----------------------------------------------------------------------------------------------


def test_an_exponent_is_one_over_the_overlap_with_its_interval_turned_round():
    found = with_exponent({"overlap": Estimate(0.4, 0.01, 0.25, 0.5), "other": Estimate(1.0, None, 1.0, 1.0)}, "p")
    assert list(found) == ["other", "p"]
    p = found["p"]
    assert (p.value, p.stderr, p.low, p.high) == pytest.approx((2.5, 0.0625, 2.0, 4.0))
    open_ended = with_exponent({"overlap": Estimate(1.0, None, 0.0, 1.0)}, "p")["p"]
    assert open_ended.stderr is None and (open_ended.low, open_ended.high) == pytest.approx((1.0, 1e9))
    assert with_exponent({}, "p") == {}
