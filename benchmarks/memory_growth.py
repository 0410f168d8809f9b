"""Memory of long runs: bytes that each further finished request costs, and seconds per million.

    python benchmarks/memory_growth.py [--requests 1000000 5000000]

Requests are generated as they are needed (128 tokens in, 8 out, 50 a second, an H200 that keeps up), so that what grows
with the run is what is kept of finished requests: 36 bytes each, and 16 more while their statistics are found.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORKLOAD = (
    "--workload fixed --input-len 128 --output-len 8 --request-rate 50 --gpu h200 --policy vllm-recompute --quiet"
)

CHILD = """
import resource, sys
import kvtwin
status = kvtwin.main(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
sys.exit(status)
"""


def measure(requests: int, folder: str) -> tuple[float, int]:
    """Wall seconds and peak bytes of one run."""
    command = [sys.executable, "-c", CHILD, "run", *WORKLOAD.split()]
    command += ["--num-prompts", str(requests), "--out", folder]
    begun_s = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    return time.perf_counter() - begun_s, int(done.stdout.split()[-1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1_000_000, 5_000_000])
    before: tuple[int, float, int] | None = None
    for requests in parser.parse_args().requests:
        with tempfile.TemporaryDirectory() as folder:
            seconds, peak = measure(requests, folder)
        print(f"{requests:>10,} requests: {seconds:7.1f} s, peak {peak / 1e6:7.1f} MB", flush=True)
        if before is not None:
            more = requests - before[0]
            grown, slower = (peak - before[2]) / more, (seconds - before[1]) / more * 1e6
            print(f"{'':>10} each further request: {grown:.1f} bytes; {slower:.1f} s a million")
        before = requests, seconds, peak


if __name__ == "__main__":
    main()
