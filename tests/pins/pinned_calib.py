"""What a calibration times on a machine, in which order, and what it leaves out; what samples are read as."""

import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path

import msgspec
from pinned import ROOT, Table, rounded

sys.path.insert(0, str(ROOT / "tests/calib"))

from measure_small import GIB, GPU

from calib.experts import ExpertSample
from calib.gdn import GdnSample
from calib.kernel_fit import read_kernel_samples
from calib.latents import LatentSample
from calib.measure.capacity import Capacity
from calib.measure.plan import make_plan
from calib.samples import COPY_OPS, OPS, Sample, read_samples
from sim.errors import UserError
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


KERNELS = {"experts": ExpertSample, "gdn": GdnSample, "latents": LatentSample}
CELLS = (
    "",
    "x",
    "-1",
    "0",
    "1",
    "2",
    "3.5",
    "1e9",
    "1000000001",
    "1e-8",
    "601",
    "nan",
    "inf",
    "fp8",
    "h2d",
    "pinned-row",
)


def written(header: list[str], row: list[str], read: Callable[[Path], object]) -> Iterator[str]:
    """What a file of one sample is read as, or how it is refused, with each of its cells another."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples.csv"
        for (place, name), cell in product(enumerate(header), CELLS):
            cells = [*row[:place], cell, *row[place + 1 :]]
            path.write_text(f"{','.join(header)}\n{','.join(cells)}\n")
            try:
                answer = str(read(path))
            except UserError as error:
                answer = str(error).replace(folder, "FOLDER")
            yield f"{name} = {cell}: {answer}"


def samples(name: str) -> Iterator[str]:
    """Of one operation, or the first that ship of a kind of kernels."""
    if name in KERNELS:
        shipped = read_kernel_samples(ROOT / f"calib/data/{name}/h200-imported.csv.gz", KERNELS[name])[0]
        row = [str(value) for value in msgspec.structs.astuple(shipped)]
        kind = KERNELS[name]
        yield from written(list(kind.__struct_fields__), row, lambda path: read_kernel_samples(path, kind))
        return
    sizes = {"num_bytes": 4096.0, "num_copies": 2} if name in COPY_OPS else {"new_tokens": 4, "context_tokens": 9}
    beside = {"decodes": 3, "decode_context_tokens": 50, "longest_context_tokens": 60} if name == "layers" else {}
    sample = Sample(op=name, latency_s=2e-3, model="llama-2-7b", tp=2, **sizes, **beside)
    row = [str(value) for value in msgspec.structs.astuple(sample)]
    yield from written(list(Sample.__struct_fields__), row, read_samples)


NAMES = [f"{machine}, {kind}" for machine in MACHINES for kind in ("quick", "full")]
TABLES = {
    "calibrations": Table(NAMES, lambda name: {"plan": [*planned(name)]}),
    "samples": Table([*OPS, *KERNELS], lambda name: {"read": [*samples(name)]}),
}
