"""Clocks, temperature and link are read with every point, and what they say against a calibration is said."""

from threading import Event
from types import SimpleNamespace

import pytest
import torch

from calib.measure import clocks, readings
from calib.measure.clocks import CudaClock, HostClock
from calib.measure.readings import Readings, ranges, warnings

STATE = {
    "sm_mhz": 1980.0, "memory_mhz": 3201.0, "temperature_c": 61.0, "power_w": 612.5, "pcie_generation": 5.0,
    "pcie_lanes": 16.0,
}  # fmt: skip


class NVMLError(Exception):
    pass


def nvml(**changes):
    """What nvidia-ml-py answers for the device it was asked for; a raised answer is an error of NVML's."""

    def answering(value):
        def answer(handle, *_):
            assert handle == "GPU-12"
            if isinstance(value, Exception):
                raise value
            return value

        return answer

    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetClockInfo=lambda handle, kind: {1: 1980, 2: 3201}[kind],
        nvmlDeviceGetTemperature=answering(changes.get("temperature", 61)),
        nvmlDeviceGetPowerUsage=answering(changes.get("power", 612_500)),
        nvmlDeviceGetCurrPcieLinkGeneration=answering(5),
        nvmlDeviceGetCurrPcieLinkWidth=answering(16),
    )


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(readings, "find_spec", lambda name: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="12"))

    def made(module):
        monkeypatch.setattr(readings, "import_module", lambda name: module)
        return Readings(torch.device("cuda"))

    return made


def test_what_the_device_tells_is_read(device):
    assert device(nvml()).read() == STATE
    hidden = device(nvml(power=NVMLError("not supported"))).read()
    assert hidden == {name: value for name, value in STATE.items() if name != "power_w"}


def test_clocks_are_read_while_a_point_is_measured(device, monkeypatch):
    """A GPU that slows down and comes back before the last repeat ends would else leave no trace."""
    monkeypatch.setattr(readings, "EVERY_S", 1e-4)
    module, asked = nvml(), Event()
    answers = iter([1980, 1200])

    def clock(handle, kind):
        if kind == 2:
            return 3201
        found = next(answers, 1980)
        if found == 1200:
            asked.set()
        return found

    module.nvmlDeviceGetClockInfo = clock
    with device(module).during() as states:
        assert asked.wait(300)
    assert states == {**STATE, "least_sm_mhz": 1200.0, "least_memory_mhz": 3201.0}


def test_a_cpu_and_a_driver_without_nvml_tell_nothing(device):
    assert Readings(torch.device("cpu")).read() == {}
    broken = nvml()
    broken.nvmlInit = lambda: (_ for _ in ()).throw(NVMLError("no driver"))
    assert device(broken).read() == {}


def test_clocks_that_differ_between_points_are_warned_of():
    slow = STATE | {"sm_mhz": 1410.0, "pcie_generation": 1.0}
    assert warnings([STATE, STATE | {"sm_mhz": 1900.0}]) == []
    clock, link = warnings([STATE, slow, STATE])
    assert clock == "1 of 3 points ended with the SM clock at 1410 MHz or more; the highest is 1980 MHz"
    assert link == "the PCIe link changed between points: generation 1 x16, generation 5 x16"
    assert ranges([STATE, slow])["sm_mhz"] == [1410.0, 1980.0]
    assert warnings([{}, {}]) == [] and ranges([]) == {}
    # A twentieth slower is no warning yet.
    assert warnings([{"sm_mhz": 2000.0, "memory_mhz": 4000.0}, {"sm_mhz": 1900.0, "memory_mhz": 3800.0}]) == []


def test_a_gpu_is_kept_busy_without_a_pause_and_one_execution_ahead(monkeypatch):
    """Each execution takes 10 ms of the device; the host asks for the next before the last has ended."""
    now, done, begun = [0.0], [], []

    class Event:
        def record(self):
            done.append(max([now[0], *done]) + 0.01)
            self.at = done[-1]

        def synchronize(self):
            now[0] = max(now[0], getattr(self, "at", 0.0))

    monkeypatch.setattr(clocks, "_event", Event)
    monkeypatch.setattr(clocks, "perf_counter", lambda: now[0])
    CudaClock.keep_busy(object.__new__(CudaClock), lambda: begun.append(now[0]), 0.1)
    assert 10 <= len(begun) <= 12
    # Never idle: when one ends, the next has been asked for.
    assert all(asked <= ended for asked, ended in zip(begun[1:], done, strict=False))
    assert all(len([end for end in done[:i] if end > asked]) <= 1 for i, asked in enumerate(begun))
    HostClock().keep_busy(lambda: begun.append(0), 5.0)
    assert len(begun) <= 12
