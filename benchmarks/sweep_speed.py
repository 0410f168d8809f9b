"""Sweeps on an idle machine: how much faster two cores are than one, and whether clusters give the same tables.

    python benchmarks/sweep_speed.py [--points 200] [--pairs 3] [--backends dask ray]

Prints wall times in pairs one after the other, with their ratio: at least 1.8 is expected of two cores. Each of the
`--backends` then runs the same points on a cluster of its own; status 1 where its table is not loky's, byte for byte.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import kvtwin


def study(points: int) -> dict[str, object]:
    return {
        "workload": "sharegpt",
        "num-prompts": 1000,
        "gpu": "l20",
        "policy": ["vllm-v1", "layerkv"],
        "sweep": {"grid": {"request-rate": {"log": [1, 8], "num": points // 2}}},
    }


def swept(points: int, **how: object) -> tuple[float, str]:
    """Wall seconds of a sweep, and its table."""
    with tempfile.TemporaryDirectory() as folder:
        begun_s = time.perf_counter()
        found = kvtwin.sweep(study(points), Path(folder), **how)
        return time.perf_counter() - begun_s, found.table.to_csv()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--backends", nargs="*", default=[])
    asked = parser.parse_args()
    ratios, tables = [], set()
    for _ in range(asked.pairs):
        (one_s, first), (two_s, second) = swept(asked.points, jobs=1), swept(asked.points, jobs=2)
        ratios.append(one_s / two_s)
        tables |= {first, second}
        print(f"one core {one_s:.2f} s, two cores {two_s:.2f} s, ratio {ratios[-1]:.2f}", flush=True)
    if ratios:
        print(f"median ratio {median(ratios):.2f}")
    for backend in asked.backends:
        seconds, table = swept(asked.points, backend=backend)
        tables |= {table} if tables else {table, swept(asked.points)[1]}
        print(f"{backend}: {seconds:.2f} s, {'the same table' if len(tables) == 1 else 'ANOTHER TABLE'}", flush=True)
    return int(len(tables) > 1)


if __name__ == "__main__":
    sys.exit(main())
