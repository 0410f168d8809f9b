"""Study files: which points their axes span, and every way to write them wrong."""

import tomllib

import pytest

from sim.errors import UserError
from sim.study.axes import options_at, read_study


def study(text, section="sweep", extra=None):
    return read_study(tomllib.loads(text), section, "s.toml", extra)


def test_a_grid_is_every_combination_in_the_files_order():
    found = study(
        'workload = "fixed"\npolicy = ["vllm-v1", "layerkv"]\n[sweep.grid]\nrequest-rate = [1, 2.5]\ntp = [1, 2]\n'
    )
    assert found.axes == ("policy", "request_rate", "tp")
    assert [tuple(point.values()) for point in found.points] == [
        (policy, rate, tp) for policy in ("vllm-v1", "layerkv") for rate in (1.0, 2.5) for tp in (1, 2)
    ]
    assert "policy" not in found.fixed


def test_ranges_are_rounded_and_whole_numbers_are_whole():
    found = study(
        "[sweep.grid]\nrequest-rate = { log = [1, 8], num = 4 }\nmax-num-seqs = { linear = [1, 3], num = 5 }\n"
        "swap-space = { linear = [0, 1], num = 4 }"
    )
    values = {name: list(dict.fromkeys(point[name] for point in found.points)) for name in found.axes}
    assert values == {
        "request_rate": [1.0, 2.0, 4.0, 8.0],
        "max_num_seqs": [1, 2, 3],
        "swap_space": [0.0, 0.333333, 0.666667, 1.0],
    }


def test_zipped_axes_go_together():
    found = study(
        '[[sweep.zip]]\ngpu = ["l20", "h100", "l20"]\ntensor-parallel-size = [2, 1, 1]\n[sweep.grid]\nseed = [1, 2]'
    )
    assert [tuple(point.values()) for point in found.points] == [
        (seed, gpu, tp) for seed in (1, 2) for gpu, tp in (("l20", 2), ("h100", 1), ("l20", 1))
    ]  # fmt: skip
    assert found.axes == ("seed", "gpu", "tp")


def test_random_draws_are_within_their_range_and_repeatable():
    text = "[sweep.random]\nsamples = 50\nrequest-rate = { log = [1, 100] }\nmax-num-seqs = [8, 16]\nseed = [1]"
    found = study(text)
    rates = [point["request_rate"] for point in found.points]
    assert len(rates) == len(set(rates)) == 50 and min(rates) >= 1 and max(rates) <= 100
    # Half of a logarithmic range lies below its geometric mean.
    assert 15 <= sum(rate < 10 for rate in rates) <= 35
    assert {point["max_num_seqs"] for point in found.points} == {8, 16}
    assert found.points == study(text).points != study("seed = 7\n" + text.replace("\nseed = [1]", "")).points
    assert found.drawn == ("request_rate", "max_num_seqs", "seed")


def test_repeats_move_the_seed_and_changed_constants_join_the_profile():
    found = study(
        'seed = 5\nprofile = "l20-derived:beta=2"\n[sweep]\nrepeats = 2\n[sweep.grid]\nprofile-pcie-bytes-per-s = [5e9]'
    )
    (point,) = found.points
    given = [dict(options_at(found, point, repeat)) for repeat in (0, 1)]
    assert [options["seed"] for options in given] == [5, 6]
    assert given[0]["profile"] == "l20-derived:beta=2,pcie_bytes_per_s=5000000000.0"
    plain = study("[sweep.grid]\nprofile-beta = [2]")
    assert dict(options_at(plain, plain.points[0], 0)) == {"profile": ":beta=2.0"}


def test_knobs_that_are_tried_one_by_one_may_have_more_combinations_than_a_study_has_runs():
    found = study(f"[tune]\ntrials = 5\n[tune.grid]\nseed = {[*range(400)]}\nmax-num-seqs = {[*range(1, 301)]}", "tune",
                  {"trials": int})  # fmt: skip
    assert found.values("max_num_seqs") == [*range(1, 301)]


GRID = "[sweep.grid]\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (GRID + "request-rat = [1]", "unknown key 'request-rat'; did you mean 'request-rate'?"),
        ("sweep = 3", "sweep is 3, not a table"),
        ("request-rate = [3, 4]\n[sweep]", "is not a number; several values are an axis, which stands in [sweep.grid]"),
        ("timeline = true\n" + GRID + "tp = [1]", "timeline is said on the command line"),
        ("[sweep.random]\nsamples = 3\nrequest-rate = { log = [1, 8], num = 3 }", "is not a range"),
        ("[sweep.random]\nsamples = 1000000000000\ntp = [1]", "samples = 1000000000000: a study has at most"),
        (
            f"{GRID}seed = {[*range(400)]}\nmax-num-seqs = {[*range(1, 301)]}",
            "400 x 300 points, 1 times each, are 120,000",
        ),
    ],
)
def test_a_wrong_file_is_told_in_one_line(text, words):
    """Axes and tables with other values are pinned (`pinned_setups.py`)."""
    with pytest.raises(UserError) as caught:
        study(text)
    assert words in str(caught.value) and str(caught.value).startswith("s.toml") and "\n" not in str(caught.value)
