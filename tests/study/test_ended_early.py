"""Runs that searches ask for are ended once they are sure to miss the SLOs, and no answer changes with that."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.study.points import Most
from sim.study.search import Slo, runs
from sim.study.sweep import Means, Store


@pytest.mark.parametrize("metric", ["p99_ttft_ms", "p90_tpot_ms", "median_e2el_ms"])
@pytest.mark.parametrize("engines", [{}, {"replicas": 2, "router": "least-loaded"}])
def test_a_run_ended_early_would_have_missed_its_bound_and_one_that_is_not_is_the_same(metric, engines, tmp_path):
    """At bounds on both sides of what the whole run has; a run cut short is none that another command finds."""
    traffic = {"workload": "uniform", "num_prompts": 120, "request_rate": 20.0, "input_len": 300, "range_ratio": 0.5}
    options = {**traffic, "output_len": 60, "gpu": "l20", **engines}
    store, means = Store(tmp_path), Means(jobs=1)
    (whole,) = runs([options], store, means)
    assert whole.result is not None
    for factor in (0.3, 0.99, 1.0, 1.01):
        slo = Slo(metric, whole.result[metric] * factor)
        (ran,) = runs([options], store, means, until=[slo])
        if ran.result is None:
            assert factor < 1 and ran.outcome.error is None and 0 < ran.outcome.missed_s < whole.result["duration"]
        else:
            assert ran.result == whole.result
        assert factor != 0.3 or ran.result is None, "far beyond the bound there is much to save"


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=200), st.sampled_from([50.0, 90.0, 99.0]), st.data())
def test_so_many_beyond_a_bound_put_the_percentile_beyond_it_also_of_fewer_requests(values, percent, data):
    bound = data.draw(st.sampled_from(values))
    count = len(values) + data.draw(st.integers(0, 3))
    if sum(value > bound for value in values) >= Most("ttft_s", percent, bound).misses(count):
        assert np.percentile(values, percent) > bound
