"""`read_json_object`: whole numbers are of 64 bits."""

import pytest

from sim.errors import UserError
from sim.specs.json_file import read_json_object


@pytest.mark.parametrize("number", [2**63 - 1, 1 - 2**63])
def test_the_largest_numbers_are_read(tmp_path, number):
    (tmp_path / "a.json").write_text(f'{{"n": {number}}}')
    assert read_json_object(tmp_path / "a.json") == {"n": number}


@pytest.mark.parametrize("number", [2**63, -(2**63)])
def test_larger_ones_are_refused(tmp_path, number):
    (tmp_path / "a.json").write_text(f'{{"n": {number}}}')
    with pytest.raises(UserError, match="more than 64 bits"):
        read_json_object(tmp_path / "a.json")


def test_what_cannot_be_read_says_why(tmp_path):
    with pytest.raises(UserError, match=r"a\.json: cannot be read \(No such file or directory\): check the path"):
        read_json_object(tmp_path / "a.json")
