"""Replay speed of whole processes: Python start, reading the trace, simulating and writing results included.

    python benchmarks/replay_speed.py TRACE [--copies 1] [--runs 5] [--anchor-python PY --anchor SCRIPT]

The setting: requests clipped to 4,096 tokens, Llama-2-7B on one A100-80G, 6,500 blocks, 128 sequences, chunked prefill
of 512 tokens. `--policy "vllm-v1 --no-async-scheduling"` gives one policy flags. Without TRACE a workload like Azure's
conversation trace of 2023 is generated. With an anchor (any script that replays the same trace; we compare with NVIDIA
Dynamo's mocker) runs alternate and ratios are taken pair by pair: machines are noisy, only ratios from one run are
worth quoting. An anchor gets a copy of TRACE of its own, as our CSV in a folder where it may leave files.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from traces.generators import generate
from traces.readers import open_trace
from traces.request import Request
from traces.writers import write_trace

SETTING = """
    --model llama-2-7b --gpu a100-80g --num-gpu-blocks-override 6500 --max-num-seqs 128 --clip 4096 --quiet
    --enable-chunked-prefill --max-num-batched-tokens 512
"""
ROOT = Path(__file__).parents[1]
AZURE_REQUESTS = 19_366


def timed(command: list[str]) -> float:
    """Wall seconds of a whole process, which must succeed: else its last words are this one's."""
    begun_s = time.perf_counter()
    done = subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: status {done.returncode}\n{done.stderr}")
    return time.perf_counter() - begun_s


def end_to_end(requests: list[Request], copies: int) -> list[Request]:
    """`copies` of a trace, one after the other."""
    span_s = requests[-1].arrival_s + 0.2
    rows = ((r, r.arrival_s + copy * span_s) for copy in range(copies) for r in requests)
    return [r._replace(request_id=i, arrival_s=arrival_s) for i, (r, arrival_s) in enumerate(rows)]


def report(name: str, seconds: list[float], anchor: list[float]) -> None:
    """One line: seconds, and ratios to the anchor of the same round."""
    text = f"{name:32s} {statistics.median(seconds):7.2f} s  ({min(seconds):.2f}-{max(seconds):.2f})"
    if anchor and seconds is not anchor:
        ratios = [ours / theirs for ours, theirs in zip(seconds, anchor, strict=True)]
        text += f"   ratio to anchor {statistics.median(ratios):.2f}  ({min(ratios):.2f}-{max(ratios):.2f})"
    print(text, flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--policy", action="append", default=None)
    parser.add_argument("--anchor-python", default=sys.executable)
    parser.add_argument("--anchor", type=Path, default=None)
    given = parser.parse_args()
    policies = given.policy or ["vllm-recompute", "layerkv"]
    with tempfile.TemporaryDirectory() as folder:
        trace = given.trace
        if trace is None or given.copies > 1 or given.anchor:
            source = open_trace(trace) if trace else generate("azure-conv-2023", num_prompts=AZURE_REQUESTS)
            trace = Path(folder) / "trace.csv"
            write_trace(end_to_end(list(source), given.copies), trace)
        trace = trace.resolve()
        run = [sys.executable, "-m", "kvtwin", "run", *SETTING.split(), "--trace", str(trace)]
        outs = {policy: str(Path(folder) / f"run-{i}") for i, policy in enumerate(policies)}
        commands = {policy: [*run, "--policy", *policy.split(), "--out", out] for policy, out in outs.items()}
        if given.anchor:
            commands["anchor"] = [given.anchor_python, str(given.anchor.resolve()), str(trace)]
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for name, command in commands.items():
            print(f"warm-up {name}: {timed(command):.2f} s", flush=True)
        for _ in range(given.runs):
            for name, command in commands.items():
                seconds[name].append(timed(command))
        for name, found in seconds.items():
            report(name, found, seconds.get("anchor", []))


if __name__ == "__main__":
    main()
