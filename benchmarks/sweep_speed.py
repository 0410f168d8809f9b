"""How much faster a sweep is on two cores than on one: `python benchmarks/sweep_speed.py [POINTS]`, on an idle machine.

Prints the wall time of each, in pairs one after the other, and the ratio. At least 1.8 is expected of two cores.
"""

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import kvtwin

PAIRS = 3
STUDY = {
    "workload": "sharegpt",
    "num-prompts": 1000,
    "gpu": "l20",
    "policy": "vllm-v1",
    "sweep": {"grid": {"request-rate": {"log": [1, 8], "num": int(sys.argv[1]) if len(sys.argv) > 1 else 40}}},
}


def wall_s(jobs: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        kvtwin.sweep(STUDY, Path(folder), jobs=jobs)
        return time.perf_counter() - begun


if __name__ == "__main__":
    pairs = [(wall_s(1), wall_s(2)) for _ in range(PAIRS)]
    for one, two in pairs:
        print(f"one core {one:.2f} s, two cores {two:.2f} s, ratio {one / two:.2f}")
    print(f"median ratio {median(one / two for one, two in pairs):.2f}")
