"""Whole calibrations of five made-up GPUs: the plan's own points, times by planted constants and noise, the real fit.

    python validation/pretended_gpus.py [--quick] [--seed 0]

A made-up GPU follows the profile's form: what is shown is that the points tell its constants apart, not that the form
is a GPU's. Decodes come from graphs, prompts from graphs by piece or layer by layer, copies have a fixed cost. Each
line says how many constants lie in their 95 % intervals, and which do not; the errors of the fit; whether anything was
refused.
"""

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1])]
from calib.copies import copy_s  # noqa: E402
from calib.fit import check_plausible, fit_profile  # noqa: E402
from calib.measure.capacity import Capacity  # noqa: E402
from calib.measure.plan import make_plan  # noqa: E402
from calib.roofline import complete, predict_s  # noqa: E402
from calib.samples import TOKEN_OPS, Sample  # noqa: E402
from calib.terms import terms_of  # noqa: E402
from sim.cost.profile import OPTIONAL, load_profile  # noqa: E402
from sim.errors import UserError  # noqa: E402
from sim.specs.hardware import load_hardware  # noqa: E402
from sim.specs.models import load_model  # noqa: E402

HOST = {
    "eager_layer_s": 1.3e-4, "pieced_layer_s": 8.5e-5, "step_overhead_s": 1.6e-4, "step_s_per_sequence": 2.8e-6,
    "copy_lone_s": 9e-6, "copy_setup_s": 7e-6, "copy_launch_s": 8e-7,
}  # fmt: skip
NAMES = (
    "flops_per_s", "attention_flops_per_s", "hbm_bytes_per_s", "kv_bytes_per_s", "kv_padding_tokens",
    "roofline_exponent", "layer_overhead_s", "h2d_bytes_per_s", "d2h_bytes_per_s",
)  # fmt: skip
GPUS = {
    "a100-80g": ("llama-2-7b", 78, (2.4e14, 1.7e14, 1.6e12, 1.4e12, 40.0, 2.6, 3.5e-5, 2.5e10, 2.4e10)),
    "h100": ("llama-3.1-8b", 78, (6.8e14, 4.5e14, 2.8e12, 2.5e12, 60.0, 3.8, 1.8e-5, 5.5e10, 5.4e10)),
    "h200": ("qwen3-8b", 139, (7.1e14, 5.2e14, 4.0e12, 3.4e12, 80.0, 3.2, 2.0e-5, 5.6e10, 5.1e10)),
    "l40s": ("llama-2-7b", 44, (2.6e14, 1.5e14, 7.4e11, 6.9e11, 25.0, 3.0, 2.6e-5, 2.6e10, 2.5e10)),
    "l20": ("qwen3-0.6b", 44, (1.0e14, 7.0e13, 7.5e11, 7.0e11, 30.0, 3.4, 2.9e-5, 2.4e10, 2.3e10)),
}
"""Model, free memory in GiB, and constants by `NAMES`."""
NOISE = 0.01


def pretended(name: str, *, quick: bool, seed: int) -> tuple[list[Sample], dict[str, float]]:
    """What a calibration of a made-up GPU would have measured, and its constants."""
    model, free_gib, constants = GPUS[name]
    true = HOST | dict(zip(NAMES, constants, strict=True))
    limits = Capacity(
        device_bytes=free_gib << 30, host_bytes=100 << 30, cache_bytes=50 << 20, num_gpus=1,
        flops_per_s=2e13, bytes_per_s=2e11, graphs=True,
    )  # fmt: skip
    models = {model: load_model(model)}
    plan = make_plan(models, limits, quick=quick, element_bytes=2)
    samples = [msgspec.structs.replace(p.sample([1.0]), dtype_bytes=2.0 if p.model else 0.0) for p in plan.points]
    seconds = np.full(len(samples), 1e-5)
    tokens = [i for i, s in enumerate(samples) if s.op in TOKEN_OPS and s.op != "restore"]
    seconds[tokens] = predict_s(complete(true), terms_of([samples[i] for i in tokens], models))
    links = [i for i, s in enumerate(samples) if s.op in ("h2d", "d2h")]
    seconds[links] = copy_s(true, [samples[i] for i in links])
    for i, sample in enumerate(samples):
        if sample.op == "host_memcpy":
            seconds[i] = 1e-6 + sample.num_bytes / 9e9
    rng = np.random.default_rng(seed)
    repeats = seconds[:, None] * (1 + NOISE * np.abs(rng.standard_normal((len(samples), 9))))
    return [
        msgspec.structs.replace(s, latency_s=float(np.median(r))) for s, r in zip(samples, repeats, strict=True)
    ], true


def told(name: str, *, quick: bool, seed: int) -> bool:
    """Fit a made-up GPU and print how its constants came out; whether all lie in their intervals."""
    samples, true = pretended(name, quick=quick, seed=seed)
    # Half-normal noise is on average above what is true.
    bias = 1 + NOISE * 0.6745
    hardware = load_hardware(name)
    base = load_profile(gpu=name).without(OPTIONAL)
    with TemporaryDirectory() as folder:
        try:
            report = fit_profile(
                samples, Path(folder), hardware, base, name="made-up", status="measured", provenance={}
            )
            check_plausible(report, hardware)
        except UserError as error:
            print(f"{name:9} REFUSED: {error}")
            return False
    off, untold = [], []
    for constant, value in true.items():
        found = report.estimates.get(constant)
        if found is None or not found.value:
            untold.append(constant)
            continue
        expected = value / bias if constant.endswith(("bytes_per_s", "flops_per_s")) else value * bias
        if constant in ("roofline_exponent", "kv_padding_tokens"):
            expected = value
        if not found.low <= expected <= found.high:
            off.append(f"{constant} {value:.4g} found {found.value:.4g} ({found.low:.4g} to {found.high:.4g})")
    residuals = report.profile.residuals or {}
    errors = " / ".join(
        f"{100 * residuals.get(f'{phase}_mape', float('nan')):.1f}" for phase in ("prefill", "decode", "mixed")
    )
    copies = report.profile.provenance.get("copies", "")
    known = len(true) - len(untold)
    print(f"{name:9} {known - len(off)} of {known} in their intervals; errors {errors} %; {len(samples)} points")
    print(f"          not told: {', '.join(untold) or 'none'}")
    for line in [*off, *([f"copies {copies}"] if copies else [])]:
        print(f"          {line}", flush=True)
    return not off


def main() -> int:
    """Print a line for each GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the quick grid")
    parser.add_argument("--seed", type=int, default=0, help="of the noise (%(default)s)")
    arguments = parser.parse_args()
    found = [told(name, quick=arguments.quick, seed=arguments.seed) for name in GPUS]
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
