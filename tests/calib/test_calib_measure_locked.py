"""Clocks locked while measuring, by an nvidia-smi that only pretends."""

import json
from types import SimpleNamespace

import pytest
import torch
from measure_small import write_config

from calib.measure import bench, machine, run
from sim.errors import UserError

CUDA = torch.device("cuda", 0)
LOCK, RELEASE = "-lgc {0},{0} -i GPU-12", "-rgc -i GPU-12"
QUERY = "--query-gpu=clocks.default_applications.graphics --format=csv,noheader,nounits -i GPU-12"
REFUSED = "The current user does not have permission to change clocks for GPU 00000000:01:00.0."
UNLOCKABLE = "Setting locked GPU clocks is not supported for GPU 00000000:01:00.0."


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Puts a program on the path, given its answers in shell; returns what it was asked for so far."""
    locked = machine.locked_clocks
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12"))
    # Measured is the CPU.
    monkeypatch.setattr(machine, "locked_clocks", lambda _, mhz: locked(CUDA, mhz))
    asked, folder = tmp_path / "asked", tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def put(lgc="", rgc="", query="echo 1275"):
        program = folder / "nvidia-smi"
        cases = f"--query*) {query} ;; -lgc) {lgc or 'echo set'} ;; -rgc) {rgc or 'echo reset'} ;;"
        program.write_text(f'#!/bin/sh\necho "$*" >>{asked}\ncase $1 in {cases} esac\n')
        program.chmod(0o755)
        return lambda: asked.read_text().splitlines() if asked.exists() else []

    return put


def calibrate(tmp_path, lock_mhz):
    """Returns what the provenance says of the clocks."""
    model, out = write_config(tmp_path / "small"), tmp_path / "out"
    run.calibrate("cpu", [str(model)], out, quick=True, ops=["launch"], lock_mhz=lock_mhz)
    return json.loads((out / "provenance.json").read_text())["clocks"]


@pytest.mark.parametrize(
    ("mhz", "asked", "told"),
    [
        (None, [], "not locked"),
        (0, [QUERY, LOCK.format(1275), RELEASE], "locked at 1275 MHz"),
        (1400, [LOCK.format(1400), RELEASE], "locked at 1400 MHz"),
    ],
)
def test_clocks_are_locked_where_asked_and_released_at_the_end(smi, tmp_path, capsys, mhz, asked, told):
    asked_of = smi()
    assert calibrate(tmp_path, mhz) == told
    assert asked_of() == asked and "--lock-clocks" not in capsys.readouterr().err


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_whatever_ends_a_run_releases_them(smi, tmp_path, monkeypatch, error):
    asked = smi()

    def broken(*_):
        assert asked() == [LOCK.format(1400)]
        raise error

    monkeypatch.setattr(bench.Bench, "measure", broken)
    with pytest.raises(error):
        calibrate(tmp_path, 1400)
    assert asked() == [LOCK.format(1400), RELEASE]


@pytest.mark.parametrize(
    ("answers", "mhz", "told"),
    [
        ({"lgc": f"echo '{REFUSED}'; exit 4"}, 1400, REFUSED),
        ({"lgc": f"echo '{UNLOCKABLE}'; echo 'Treating as warning and moving on.'"}, 1400, UNLOCKABLE),
        ({"query": "echo '[N/A]'"}, 0, "the GPU tells no default clock ([N/A]): give --lock-clocks MHZ"),
        (None, 0, "nvidia-smi is not installed"),
    ],
)
def test_where_they_cannot_be_locked_the_run_says_so_once_and_goes_on(smi, tmp_path, capsys, answers, mhz, told):
    asked = smi(**answers) if answers is not None else list
    assert calibrate(tmp_path, mhz) == "not locked"
    said = [line for line in capsys.readouterr().err.splitlines() if "clocks" in line]
    assert said == [f"--lock-clocks: not locked, clocks stay as they are: {told}"]
    # A lock of before is another's.
    assert RELEASE not in asked()


def test_a_lock_that_was_answered_too_late_is_released(smi, tmp_path, monkeypatch):
    """It may hold all the same."""
    asked = smi(lgc="exec /bin/sleep 9")
    monkeypatch.setattr(machine, "SMI_TIMEOUT_S", 2.0)
    assert calibrate(tmp_path, 1400) == "not locked"
    assert asked() == [LOCK.format(1400), RELEASE]


def test_clocks_that_stay_locked_are_told(smi, tmp_path, capsys):
    smi(rgc="echo busy; exit 3")
    calibrate(tmp_path, 1400)
    assert "--lock-clocks: still locked, run nvidia-smi -rgc yourself: busy" in capsys.readouterr().err


def test_points_of_other_clocks_are_not_added_to_a_folder(smi, tmp_path):
    smi()
    calibrate(tmp_path, 1400)
    with pytest.raises(UserError, match="clocks was locked at 1400 MHz, is not locked"):
        calibrate(tmp_path, None)


@pytest.mark.parametrize(("place", "mhz", "words"), [("cpu", 0, "a CPU's cannot be"), ("cuda", -5, "-5 is no clock")])
def test_what_is_no_clock_is_refused(place, mhz, words):
    with pytest.raises(UserError, match=f"^--lock-clocks: {words}"), machine.locked_clocks(torch.device(place), mhz):
        pass
