"""In Python as on the command line: what is of the wrong type is refused in a line, by name."""

import json

import pytest

import kvtwin
from kvtwin import Scenario, UserError

SMALL = Scenario(workload="fixed", num_prompts=3, input_len=20, output_len=3, gpu="l20")
STUDY = {"workload": "fixed", "sweep": {"grid": {"seed": [1, 2]}}}


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda out: kvtwin.simulate(None), "scenario: None is not a kvtwin.Scenario"),
        (lambda out: kvtwin.simulate(SMALL, 3), "policy: 3 is not a policy's text"),
        (lambda out: kvtwin.simulate(SMALL, kvtwin.Policy), "policy: <class"),
        (lambda out: kvtwin.compare(SMALL, "layerkv"), "policies: 'layerkv' is not a list"),
        (lambda out: kvtwin.compare(SMALL, [None]), "policy: None is not"),
        (lambda out: kvtwin.compare({}, ["layerkv"]), "scenario: {} is not"),
        (lambda out: kvtwin.sweep(STUDY, out, jobs="a"), "jobs: 'a' is not a number of processes"),
        (lambda out: kvtwin.sweep(STUDY, out, jobs=True), "jobs: True is not"),
        (lambda out: kvtwin.sweep(STUDY, out, max_seconds=-1), "max_seconds: -1 is not greater than 0"),
        (lambda out: kvtwin.sweep(STUDY, out, address=3), "address: 3 is not"),
        (lambda out: kvtwin.sweep(STUDY, None), "out: None is not a path"),
        (lambda out: kvtwin.sweep(None, out), "study: None is not a study file"),
        (lambda out: kvtwin.sweep({1: 2}, out), "study: the key: 1 is not text"),
        (lambda out: kvtwin.sweep({"sweep": {"grid": {1: [2]}}}, out), "study: the key: 1 is not text"),
        (lambda out: kvtwin.tune(3, out), "study: 3 is not"),
        (lambda out: kvtwin.regime_map(STUDY, "a\0b"), r"out: 'a\x00b' names no file"),
        (lambda out: kvtwin.load_result(None), "folder: None is not a path"),
        (lambda out: kvtwin.profile_table("l20-derived", 3), "profiles: 3 is not"),
        (lambda out: kvtwin.profile_errors(None), "profiles: None is not"),
        (lambda out: kvtwin.simulate(Scenario(trace="a\0b")), r"--trace: 'a\x00b' is not text in quotes, without NUL"),
    ],
)
def test_a_wrong_type_is_told(tmp_path, call, told):
    with pytest.raises(UserError) as caught:
        call(tmp_path / "out")
    assert told in str(caught.value) and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_presets_whose_options_have_other_types_are_told():
    from sim.systems.layerkv.preset import LayerKV  # noqa: PLC0415

    for decode in (None, [], "a", 3.0):
        with pytest.raises(UserError, match=r"policy: layerkv decode: .* is not promote or stream"):
            kvtwin.simulate(SMALL, LayerKV(decode=decode))


def test_half_a_character_where_a_number_goes_is_told(tmp_path, capsys):
    """Python reads a lone surrogate out of JSON; as text it cannot be written."""
    rows = {"input_lens": ["\ud800"], "output_lens": [2], "start_times": [0.0], "ttfts": [0.1], "itls": [[0.1]]}
    (tmp_path / "b.json").write_text(json.dumps(rows))
    words = ["validate", "--against", str(tmp_path / "b.json"), "--gpu", "l20", "--out", str(tmp_path / "out")]
    assert kvtwin.main(words) == 2
    assert "b.json: is not the result of a benchmark: half a character" in capsys.readouterr().err


@pytest.mark.parametrize("gbps", ["1e-320", "1e-9", "1e23"])
def test_links_that_are_none_are_told(tmp_path, capsys, gbps):
    words = ["--workload", "fixed", "--num-prompts", "3", "--prefill-replicas", "1", "--decode-replicas", "1"]
    words = ["run", *words, "--policy", "distserve", "--link-gbps", gbps, "--out", str(tmp_path / "out")]
    assert kvtwin.main(words) == 2
    assert "Gbit/s is no link; give 0.001 to 1e9" in capsys.readouterr().err
