"""The machine as torch and the driver describe it: names, versions, limits, clocks under load, and locking these."""

import csv
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from math import ceil
from pathlib import Path
from time import perf_counter

import psutil
import torch

from calib.measure.capacity import Capacity
from gpu_runtime.model.backend import OF_DEVICE, activate_flash
from sim.errors import UserError

REASONS = {
    0x4: "power cap", 0x8: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"
}  # fmt: skip
"""Bits of NVML's clocksEventReasons that mean less than the chip could do."""
QUERY = {
    "clocks.sm": "sm_mhz", "clocks.mem": "memory_mhz", "power.draw": "power_w", "temperature.gpu": "temperature_c"
}  # fmt: skip
"""Fields of nvidia-smi, and what they are called here."""
LOAD_S = 1.5
"""Matrix products run so long while the clocks are read: an idle GPU clocks down."""
LOAD_SIZE = {"cuda": 8192, "cpu": 512}
PRODUCTS = {"cuda": 5, "cpu": 50}
"""How many products the best is of; on a CPU others take turns."""
SMI_TIMEOUT_S = 20.0
PLAIN = "--format=csv,noheader,nounits"
DEFAULT_CLOCK = "clocks.default_applications.graphics"
"""Field of nvidia-smi: MHz that the driver computes at by default. The highest clock is no choice: few hold it."""
CPU_CACHE_BYTES = 32 * 2**20
CPU_RATES = (2e10, 5e9)
CUDA_RATES = (2e13, 2e11)
"""FLOP/s and bytes/s of a slow machine of each kind."""


def now_utc() -> str:
    """Date and time, UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def device_facts(device: torch.device) -> dict[str, str]:
    """What identifies device and software; a calibration resumes only where all of it is the same."""
    facts = {
        "device": device_name(device.type),
        "torch": str(torch.__version__),
        "cpu": cpu_name(),
        "cpus": str(os.cpu_count()),
        "cpu_threads": str(torch.get_num_threads()),
        # That of `--attention-backend auto`: no other is timed.
        "attention_backend": OF_DEVICE[device.type][2],
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "gpus": str(torch.cuda.device_count()),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda": str(torch.version.cuda),
            # As the live runtime has it: other kernels would be timed than serve.
            "flash_attention": activate_flash(device),
            "driver": _smi(device, "driver_version") or "unknown: no nvidia-smi",
        }
    return facts


def device_name(kind: str) -> str:
    """Name of the first CUDA device, or of the processor."""
    return torch.cuda.get_device_name(0) if kind == "cuda" else cpu_name()


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (names or [platform.processor() or platform.machine()])[0]


def capacity_of(device: torch.device) -> Capacity:
    """What decides which shapes are worth planning, as of now."""
    host = psutil.virtual_memory().available
    cuda = device.type == "cuda"
    flops, rate = CUDA_RATES if cuda else CPU_RATES
    return Capacity(
        device_bytes=torch.cuda.mem_get_info(device)[0] if cuda else host,
        host_bytes=host,
        cache_bytes=torch.cuda.get_device_properties(device).L2_cache_size if cuda else CPU_CACHE_BYTES,
        num_gpus=torch.cuda.device_count() if cuda else 0,
        flops_per_s=flops,
        bytes_per_s=rate,
        graphs=cuda,
    )


def state_under_load(device: torch.device, dtype: torch.dtype) -> dict[str, str | float]:
    """The host's load, seconds of a matrix product and, on a GPU with nvidia-smi, clocks while such products run."""
    # Before our own work: what others do.
    load = os.getloadavg()[0]
    size = LOAD_SIZE[device.type]
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product_s = _product_s(left, right, 3)
    found: dict[str, str | float] = {"load_average": load, "matmul_size": float(size)}
    if device.type == "cuda":
        count = ceil(LOAD_S / product_s)
        # Queued, and running while nvidia-smi looks.
        out = torch.empty_like(left)
        for _ in range(count):
            torch.mm(left, right, out=out)
        found |= _clocks(device)
        torch.cuda.synchronize(device)
    found["matmul_s"] = _product_s(left, right, PRODUCTS[device.type])
    return found


def _product_s(left: torch.Tensor, right: torch.Tensor, repeats: int) -> float:
    """Best seconds of a few products, with nothing else queued."""
    times: list[float] = []
    for _ in range(repeats):
        begun = perf_counter()
        torch.mm(left, right)
        if left.is_cuda:
            torch.cuda.synchronize(left.device)
        times.append(perf_counter() - begun)
    return min(times)


def _clocks(device: torch.device) -> dict[str, str | float]:
    found: dict[str, str | float] = {}
    cells = next(csv.reader([_smi(device, ",".join(QUERY))]), [])
    for name, cell in zip(QUERY.values(), cells, strict=False):
        try:
            found[name] = float(cell)
        except ValueError:
            found[name] = cell.strip()
    # Drivers since 535 call them event reasons, older ones know only the other name.
    bits = _smi(device, "clocks_event_reasons.active") or _smi(device, "clocks_throttle_reasons.active")
    try:
        active = int(bits, 16)
        found["throttled"] = ", ".join(reason for bit, reason in REASONS.items() if active & bit) or "no"
    except ValueError:
        found["throttled"] = "unknown"
    return found


@contextmanager
def locked_clocks(device: torch.device, mhz: int | None) -> Iterator[str]:
    """Hold the graphics clock of a GPU within; yields how the clocks are, for the provenance.

    What cannot be locked is said on standard error, and stays as it is.

    Args:
        device: a GPU, alone: others keep their clocks.
        mhz: the clock; 0: the GPU's default; None: no setting is touched.

    Raises:
        UserError: `device` is a CPU, or the clock is negative.
    """
    if mhz is None:
        yield "not locked"
        return
    if device.type == "cpu" or mhz < 0:
        wrong = "a CPU's cannot be locked: leave it out" if mhz >= 0 else f"{mhz} is no clock in MHz: give one above 0"
        raise UserError(f"--lock-clocks: {wrong}")
    works, told = (True, str(mhz)) if mhz else _ask(device, f"--query-gpu={DEFAULT_CLOCK}", PLAIN)
    if works and not told.isdigit():
        works, told = False, f"the GPU tells no default clock ({told}): give --lock-clocks MHZ"
    clock, may_be_locked = told, works
    try:
        if works:
            works, told = _ask(device, "-lgc", f"{clock},{clock}")
            # It ends with 0 where the GPU cannot.
            works = works and "not supported" not in told
            # Refused, a lock of before is still another's; too late an answer leaves it open.
            may_be_locked = works or "timed out" in told
        if not works:
            print(f"--lock-clocks: not locked, clocks stay as they are: {told}", file=sys.stderr)
        yield f"locked at {clock} MHz" if works else "not locked"
    finally:
        # An interrupt may have come before it answered.
        if may_be_locked:
            released, told = _ask(device, "-rgc")
            if works and not released:
                print(f"--lock-clocks: still locked, run nvidia-smi -rgc yourself: {told}", file=sys.stderr)


def _smi(device: torch.device, fields: str) -> str:
    """One line of nvidia-smi for a device; empty where it cannot be had."""
    works, told = _ask(device, f"--query-gpu={fields}", PLAIN)
    return told if works else ""


def _ask(device: torch.device, *words: str) -> tuple[bool, str]:
    """Whether nvidia-smi did for a device what it was asked for, and the first line that it, or the failure, told."""
    program = shutil.which("nvidia-smi")
    if not program:
        return False, "nvidia-smi is not installed"
    index = device.index or 0
    uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
    # CUDA counts only the devices it may see, nvidia-smi all.
    which = (f"GPU-{uuid.removeprefix('GPU-')}") if uuid else str(index)
    command = [program, *words, "-i", which]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, str(error)
    return done.returncode == 0, (done.stdout or done.stderr).strip().partition("\n")[0].strip()
