"""What a prefix cache costs a run: whole processes with and without one, in interleaved pairs.

    python benchmarks/prefix_cache_speed.py [TRACE] [--pairs 9] [--policy NAME]... [--instructions]

Where nothing is shared (TRACE, in the setting of `replay_speed.py`; without TRACE a workload like Azure's conversation
trace), and where much is: 20,000 requests of conversations whose ids name 16 tokens. Processor time is noisy: the ratio
is taken pair by pair. `--instructions` counts instructions instead (valgrind), once, which takes a minute for each run.
"""

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from replay_speed import AZURE_REQUESTS, ROOT, SETTING

from traces.generators import generate
from traces.writers import write_trace

SESSIONS = "--model llama-2-7b --gpu a100-80g --clip 4096 --quiet --no-async-scheduling"
SERIAL = f"{SETTING} --no-async-scheduling"
SESSION_REQUESTS = 20_000
FLAGS = "--enable-prefix-caching", "--no-enable-prefix-caching"


def processor_s(command: list[str]) -> float:
    """Seconds of a core, user and system, that a whole process takes; it must succeed."""
    before = os.times()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def giga_instructions(command: list[str]) -> float:
    """Billions of instructions of a whole process, which must succeed; hashes are made the same from run to run."""
    counted = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null", *command]
    env = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(counted, check=True, capture_output=True, text=True, cwd=ROOT, env=env)
    found = re.search(r"I\s+refs:\s+([\d,]+)", done.stderr)
    if found is None:
        sys.exit(f"valgrind printed no count: {done.stderr}")
    return float(found[1].replace(",", "")) / 1e9


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--policy", action="append", default=None)
    parser.add_argument("--instructions", action="store_true")
    given = parser.parse_args()
    if given.instructions and shutil.which("valgrind") is None:
        parser.error("--instructions: valgrind is not installed; leave it out to take processor time")
    measure, unit, num_pairs = processor_s, "s", given.pairs
    if given.instructions:
        measure, unit, num_pairs = giga_instructions, "G", 1
    with tempfile.TemporaryDirectory() as folder:
        private, shared = given.trace, Path(folder) / "sessions.csv"
        if private is None:
            private = Path(folder) / "private.csv"
            write_trace(generate("azure-conv-2023", num_prompts=AZURE_REQUESTS), private)
        sessions = generate("sessions", num_prompts=SESSION_REQUESTS, request_rate=4.0, input_len=300, output_len=200)
        write_trace(sessions, shared)
        for policy in given.policy or ["vllm-v1", "vllm-recompute"]:
            for name, trace, setting in (("nothing shared", private, SERIAL), ("sessions", shared, SESSIONS)):
                run = [sys.executable, "-m", "kvtwin", "run", *setting.split(), "--trace", str(trace.resolve())]
                run += ["--policy", policy, "--out", str(Path(folder) / "out")]
                pairs = [[measure([*run, flag]) for flag in FLAGS] for _ in range(num_pairs)]
                ratios = [cached / plain for cached, plain in pairs]
                cached, plain = (statistics.median(found) for found in zip(*pairs, strict=True))
                print(
                    f"{policy:16s} {name:16s} with and without: {cached:.2f} and {plain:.2f} {unit}; "
                    f"ratio {statistics.median(ratios):.3f} ({min(ratios):.2f}-{max(ratios):.2f})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
