"""Rates and counts that traffic has, and how others are refused."""

from math import inf, nan

import pytest

from traces.errors import TraceError
from traces.rates import check_between, check_count, check_rate


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: check_between("share", 0.0, "give more"), "share 0.0 is not positive; give more"),
        (lambda: check_between("share", nan, "give more"), "share nan is not positive; give more"),
        (lambda: check_between("share", 0.9e-9, "more"), "share 9e-10 is not between 1e-09 and 1e+09; more"),
        (lambda: check_between("share", 2.5, "less", -1.0, 2.0), "share 2.5 is not between -1 and 2; less"),
        (lambda: check_between("share", -2.0, "more", -1.0, 2.0), "share -2.0 is not between -1 and 2; more"),
        (lambda: check_rate(-inf, 1.0), "request rate -inf is not positive; give requests per second, or inf"),
        (lambda: check_rate(1.0, 0.9e-4), "burstiness 9e-05 is not between 0.0001 and 1e+09; 1 is Poisson"),
        (lambda: check_count("count", 0), "count 0 is too small; give 1 or more"),
        (lambda: check_count("count", 2 * 10**9), "count 2000000000 is not between 1 and 1e+09; give fewer"),
    ],
)
def test_what_traffic_cannot_have_is_refused(act, words):
    with pytest.raises(TraceError) as error:
        act()
    assert str(error.value).startswith(words)
