"""What a calibration times on a machine, in which order, and what it leaves out."""

import sys
from collections.abc import Iterator
from dataclasses import asdict

import msgspec
from pinned import ROOT, Table, rounded

sys.path.insert(0, str(ROOT / "tests/calib"))

from measure_small import GIB, GPU

from calib.measure.capacity import Capacity
from calib.measure.plan import make_plan
from sim.specs.models import load_model

MACHINES = {
    "a GPU": msgspec.structs.replace(GPU, num_gpus=1),
    "large GPUs": msgspec.structs.replace(GPU, device_bytes=180 * GIB, host_bytes=2000 * GIB, num_gpus=8),
    "a CPU": Capacity(
        device_bytes=8 * GIB, host_bytes=8 * GIB, cache_bytes=32 * 2**20, num_gpus=0, flops_per_s=2e11,
        bytes_per_s=2e10, graphs=False,
    ),
}  # fmt: skip


def planned(name: str) -> Iterator[str]:
    """Points and what else a plan says, of a small model and of a large one."""
    machine, kind = name.split(", ")
    models = {model: load_model(model) for model in ("qwen3-0.6b", "llama-2-13b")}
    plan = make_plan(models, MACHINES[machine], quick=kind == "quick", element_bytes=2)
    for what, found in asdict(plan).items():
        rows = found if isinstance(found, list) else found.items() if isinstance(found, dict) else [found]
        yield from (f"{what} {rounded(row) if isinstance(row, tuple) else row}" for row in rows)


NAMES = [f"{machine}, {kind}" for machine in MACHINES for kind in ("quick", "full")]
TABLES = {"calibrations": Table(NAMES, lambda name: {"plan": [*planned(name)]})}
