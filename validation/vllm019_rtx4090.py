"""vLLM 0.19 serving Llama-3.1-8B on one RTX 4090, as measured and as simulated from its kernels' times.

    python validation/vllm019_rtx4090.py FOLDER    # says so and ends where FOLDER is not there

FOLDER has what LLMServingSim (CASYS Lab, KAIST, MIT licence) published: `measured.csv` and `trace.csv`, 300 requests
of a real server, row by row; `dense.csv`, `attention.csv` and `per_sequence.csv`, times of vLLM's kernels on the same
card. The trace is replayed with vLLM v1's rules, its prefix cache and the server's limits; prices come from the kernel
tables, as they are (form `table`), through the shipped `rtx-4090-imported`, which is fitted to a ninth of their rows,
and through a roofline fitted to all of them. Nothing is fitted to the run. The engine's host is hidden behind the GPU:
vLLM 0.19 schedules while it computes.
"""

import argparse
import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from calib.fit import fit_profile
from calib.importers.llmservingsim import import_samples, import_tables, is_whole
from sim.cost.kernels import KernelTables
from sim.cost.profile import Profile, load_profile
from sim.options.policies import parse_policy
from sim.options.scenario import Scenario
from sim.run.prepare import prepare
from sim.run.simulate import build_run, execute
from sim.run.traffic import traffic
from sim.specs.hardware import load_hardware

GPU, MODEL = "rtx-4090", "llama-3.1-8b"
POLICY, SERIAL = "vllm-v1:async-scheduling=true", "vllm-v1:async-scheduling=false"
"""As vLLM 0.19 comes: the host schedules while the GPU computes (engine profile `vllm-v1-async`); and in series."""


def profiles(folder: Path) -> list[Profile]:
    """The shipped roofline, one fitted to all rows of the tables, and the tables themselves."""
    samples, provenance = import_samples(folder, MODEL, chosen=is_whole)
    base = load_profile(f"{GPU}-derived")
    report = fit_profile(
        samples, folder, load_hardware(GPU), base, name="roofline, all rows", status="imported", provenance=provenance
    )
    return [load_profile(f"{GPU}-imported"), report.profile, with_tables(report.profile, import_tables(folder, MODEL))]


def with_tables(profile: Profile, tables: KernelTables) -> Profile:
    """The profile in form `table`."""
    return msgspec.structs.replace(profile, name="table", form="table", kernels=tables)


def scenario(folder: Path, meta: dict[str, Any], profile: Path) -> Scenario:
    """The server and its traffic."""
    arguments, cache = meta["engine_kwargs"], meta["kv_cache"]
    return Scenario(
        trace=str(folder / "trace.csv"),
        model=MODEL,
        gpu=GPU,
        profile=str(profile),
        num_gpu_blocks_override=cache["num_gpu_blocks"],
        block_size=cache["block_size"],
        enable_prefix_caching=cache["enable_prefix_caching"],
        max_num_batched_tokens=arguments["max_num_batched_tokens"],
        max_num_seqs=arguments["max_num_seqs"],
        max_model_len=arguments["max_model_len"],
    )


def read_measured(folder: Path) -> dict[str, list[float]]:
    """TTFT, TPOT and latency of each request, s, and the time of the last token."""
    with (folder / "measured.csv").open(encoding="utf-8") as file:
        rows = [{name: float(cell) for name, cell in row.items()} for row in csv.DictReader(file)]
    with (folder / "trace.csv").open(encoding="utf-8") as file:
        outputs = [int(row["output_tokens"]) for row in csv.DictReader(file)]
    return {
        "TTFT": [row["first_token_s"] - row["arrival_s"] for row in rows],
        "TPOT": [
            (row["last_token_s"] - row["first_token_s"]) / (tokens - 1)
            for row, tokens in zip(rows, outputs, strict=True)
            if tokens > 1
        ],
        "latency": [row["last_token_s"] - row["arrival_s"] for row in rows],
        "makespan": [max(row["last_token_s"] for row in rows)],
    }


def simulate(setup: Scenario, policy: str = POLICY) -> dict[str, list[float]]:
    """The same of a simulation."""
    run = execute(build_run(prepare(setup, policy, parse_policy(policy, {})[1]), traffic(setup)))
    log = run.log
    return {
        "TTFT": list(log.ttft_s),
        "TPOT": list(log.tpot_s),
        "latency": list(log.e2el_s),
        "makespan": [log.last_finish_s],
    }


def summary(found: dict[str, Sequence[float]]) -> dict[str, float]:
    """Means, and the 99th percentile of TPOT; s. Throughput goes with the inverse of the makespan."""
    means = {f"mean {name}": fmean(values) for name, values in found.items() if name != "makespan"}
    return {**means, "P99 TPOT": quantiles(found["TPOT"], n=100)[98], "makespan": found["makespan"][0]}


def compare(
    measured: dict[str, list[float]],
    found: list[Profile],
    setup: Callable[[Path], Scenario],
    policies: Sequence[str] = (POLICY,),
) -> None:
    """Print what was measured, and beside it what the run of each profile gives; `setup` makes it of a profile."""
    there = summary(measured)
    print(f"{'':<26}" + "".join(f"{name:>22}" for name in there))
    print(f"{'measured':<26}" + "".join(f"{seconds:>13.4g} s       " for seconds in there.values()))
    with TemporaryDirectory() as scratch:
        for profile in found:
            path = Path(scratch) / "profile.json"
            path.write_bytes(profile.to_json())
            for policy in policies:
                here = summary(simulate(setup(path), policy))
                cells = (f"{here[name]:>13.4g} s {100 * (here[name] / there[name] - 1):>+5.1f}%" for name in there)
                name = profile.name + ", serial" * (policy == SERIAL)
                print(f"{name:<26}" + "".join(f"{cell:>22}" for cell in cells), flush=True)


def main() -> None:
    """Print measured and simulated figures side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    if not (folder / "measured.csv").exists():
        print(f"{folder} is not there: nothing to compare with")
        return
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    compare(read_measured(folder), profiles(folder), lambda profile: scenario(folder, meta, profile), (POLICY, SERIAL))


if __name__ == "__main__":
    main()
