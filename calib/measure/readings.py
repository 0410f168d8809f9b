"""`Readings`: clocks, temperature, power and link of a GPU, read through NVML in less than a millisecond.

Read while a point is measured, a few times a second, and when its last repeat has ended: the GPU has not had the time
to clock down yet. Clocks are not locked unless asked for: a served GPU's are not, and the setting is the machine's.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from threading import Event, Thread
from typing import Any

import torch

EVERY_S = 0.2
"""Between two readings of a point."""
CLOCKS = ("sm_mhz", "memory_mhz")
SLOWER = 0.95
"""A clock below this share of the highest is worth a warning."""


class Readings:
    """What NVML says of one device; nothing on a CPU, or without the package nvidia-ml-py."""

    def __init__(self, device: torch.device) -> None:
        self._nvml: Any = None
        if device.type != "cuda" or find_spec("pynvml") is None:
            return
        nvml = import_module("pynvml")
        try:
            nvml.nvmlInit()
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            self._handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
        except nvml.NVMLError:
            return
        self._nvml = nvml

    @contextmanager
    def during(self) -> Iterator[dict[str, float]]:
        """Filled when it is left: what was read last, and the least clocks that were seen on the way (`least_...`)."""
        found: dict[str, float] = {}
        if self._nvml is None:
            yield found
            return
        seen: list[dict[str, float]] = []
        ended = Event()

        def watch() -> None:
            while not ended.wait(EVERY_S):
                seen.append(self.read())

        watcher = Thread(target=watch, name="clocks", daemon=True)
        watcher.start()
        try:
            yield found
        finally:
            last = self.read()
            ended.set()
            watcher.join()
            found |= last
            for name in CLOCKS:
                values = [state[name] for state in (*seen, last) if name in state]
                if values:
                    found[f"least_{name}"] = min(values)

    def read(self) -> dict[str, float]:
        """By name, those that the device tells: MHz, degrees Celsius, W, PCIe's generation and lanes."""
        nvml = self._nvml
        if nvml is None:
            return {}
        handle = self._handle
        asked = {
            "sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "memory_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "pcie_generation": lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle),
            "pcie_lanes": lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
        }
        found: dict[str, float] = {}
        for name, ask in asked.items():
            # Virtual machines hide some.
            with suppress(nvml.NVMLError):
                found[name] = float(ask())
        return found


def ranges(states: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Least and most of each reading over all points."""
    names = dict.fromkeys(name for state in states for name in state)
    values = {name: [state[name] for state in states if name in state] for name in names}
    return {name: [min(found), max(found)] for name, found in values.items()}


def warnings(states: Sequence[Mapping[str, float]]) -> list[str]:
    """What the points' readings say against them."""
    found: list[str] = []
    for name, what in (("sm_mhz", "SM clock"), ("memory_mhz", "memory clock")):
        clocks = [state[name] for state in states if name in state]
        slow = [clock for clock in clocks if clock < SLOWER * max(clocks)]
        if slow:
            found.append(
                f"{len(slow)} of {len(clocks)} points ended with the {what} at {min(slow):g} MHz or more; the highest "
                f"is {max(clocks):g} MHz"
            )
    links = {(state["pcie_generation"], state["pcie_lanes"]) for state in states if "pcie_lanes" in state}
    if len(links) > 1:
        said = ", ".join(f"generation {generation:g} x{lanes:g}" for generation, lanes in sorted(links))
        found.append(f"the PCIe link changed between points: {said}")
    return found
