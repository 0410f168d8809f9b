"""The log that a killed run resumes from."""

import msgspec
import pytest
from measure_small import GPU, settings

from calib.measure.log import Header, Measured, Note, PointLog, Skipped
from calib.measure.points import Point
from sim.errors import UserError

COPY = Point(op="d2h", num_bytes=4096)
LAYERS = Point(op="layers", model="llama-2-7b", num_layers=2, batch_size=4, new_tokens=1, context_tokens=128, graph=1)


def opened(path, **changes):
    return PointLog(path, Header(settings(**changes), GPU, "2026-01-02T03:04:05Z"))


@pytest.fixture
def path(tmp_path):
    """A log with a point measured, one skipped and a note."""
    log = opened(tmp_path / "points.jsonl")
    log.add(Measured(COPY, [1e-6, 3e-6]))
    log.add(Skipped(LAYERS, "out of memory"))
    log.add(Note("2026-01-02T03:05:00Z", {"sm_mhz": 1980.0, "throttled": "no"}))
    log.close()
    return log.path


def test_a_line_is_in_the_file_and_known_as_soon_as_it_is_added(path):
    log = opened(path)
    other, third = Point(op="h2d", num_bytes=8192), Point(op="h2d", num_bytes=4096)
    log.add(Measured(other, [2e-6], {"sm_mhz": 1980.0}))
    log.add(Measured(third, [3e-6]))
    assert log.has(other) and log.readings == {other: {"sm_mhz": 1980.0}}
    again = opened(path)
    assert (again.measured[other], again.measured[third]) == ([2e-6], [3e-6])
    assert again.readings == {other: {"sm_mhz": 1980.0}}


def test_a_log_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "points.jsonl").mkdir()
    with pytest.raises(UserError, match=r"points\.jsonl: cannot be read \(Is a directory\): give another --out"):
        opened(tmp_path / "points.jsonl")


def test_the_first_start_is_remembered(path):
    other = msgspec.structs.replace(GPU, device_bytes=1)
    log = PointLog(path, Header(settings(), other, "2030-01-01T00:00:00Z"))
    assert (log.header.begun, log.header.limits) == ("2026-01-02T03:04:05Z", GPU)


@pytest.mark.parametrize("half", [b'{"line":"skipped","point":{"op":"h2d"},"reason":"' + 500 * b"long", b"\xff\xfe"])
def test_a_half_written_line_is_dropped(path, half):
    whole = path.read_bytes()
    path.write_bytes(whole + half)
    log = opened(path)
    other = Point(op="h2d", num_bytes=8192)
    log.add(Measured(other, [2e-6]))
    log.close()
    assert path.read_bytes().startswith(whole + b'{"line":"point"') and path.read_bytes().endswith(b"}\n")
    assert opened(path).measured == {COPY: [1e-6, 3e-6], other: [2e-6]}


def test_a_half_written_header_is_written_anew(tmp_path):
    path = tmp_path / "points.jsonl"
    path.write_bytes(b'{"line":"header","settin')
    opened(path).close()
    assert opened(path).header.settings == settings()


def test_other_settings_are_refused_by_name_and_the_log_is_left_as_it_was(path):
    before = path.read_bytes() + b"{half"
    path.write_bytes(before)
    with pytest.raises(UserError, match=r"jsonl: holds another calibration \(seed was 0, is 1\).*another --out"):
        opened(path, seed="1")
    with pytest.raises(UserError, match="device was a chip, is another; torch was absent, is 2"):
        opened(path, device="another", torch="2")
    assert path.read_bytes() == before


@pytest.mark.parametrize("line", [b"{}", b"nonsense", b'{"line":"point","point":{"op":"d2h","oops":1},"repeats_s":[]}'])
def test_a_damaged_line_is_named(path, line):
    lines = path.read_bytes().splitlines()
    lines[2] = line
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(UserError, match=r"line 3: .*delete the file"):
        opened(path)


def test_a_log_without_its_header_is_refused(path):
    path.write_bytes(b"\n".join(path.read_bytes().splitlines()[1:]) + b"\n")
    with pytest.raises(UserError, match="line 1: a header belongs on line 1"):
        opened(path)
