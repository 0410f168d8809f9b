"""Engines of 2023 as measured and as priced: Llama-2 70B, single prompts and their decodes, on A100 and H100.

python validation/splitwise_measured.py perf_model.csv    # says so and ends where it is not there

The table is Splitwise's (Mutinifni/splitwise-sim, data/perf_model.csv, MIT licence): vLLM without CUDA graphs, 2023.
Prices are the GPU's alone, with shipped constants; nothing is fitted to the table.
"""

import argparse
import csv
from collections import defaultdict
from pathlib import Path
from statistics import median

from sim.cost.forms import build_cost
from sim.cost.profile import default_profile
from sim.specs.hardware import load_hardware
from sim.specs.models import load_model

MODEL, THEIRS = "llama-2-70b", "llama2-70b"
GPUS = {"a100-80gb": "a100-80g", "h100-80gb": "h100"}
"""The table's names and ours."""
LEAST_TOKENS, MOST_TOKENS = 512, 4096

Times = dict[tuple[str, int, int], list[tuple[float, float]]]
"""Milliseconds of prompts and of decodes by GPU, size of the group and prompt tokens."""


def read(path: Path) -> Times:
    """Single prompts of the model."""
    found: Times = defaultdict(list)
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            gpu = GPUS.get(row["hardware"])
            if gpu and row["model"] == THEIRS and row["batch_size"] == "1":
                key = gpu, int(row["tensor_parallel"]), int(row["prompt_size"])
                found[key].append((float(row["prompt_time"]), float(row["token_time"])))
    return found


def main() -> None:
    """Print each size, measured over priced, and the median of the prompts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    path = parser.parse_args().table
    if not path.exists():
        print(f"{path} is not there: nothing to compare with")
        return
    model = load_model(MODEL)
    ratios: dict[str, list[float]] = defaultdict(list)
    print(f"{'':<16}{'prompt, ms':>11}{'priced':>9}{'':>6}{'decode, ms':>13}{'priced':>9}")
    for (gpu, tp, tokens), times in sorted(read(path).items()):
        if not LEAST_TOKENS <= tokens <= MOST_TOKENS:
            continue
        cost = build_cost(model, load_hardware(gpu), default_profile(gpu), tp, 0.0)
        prompt_ms, decode_ms = (median(column) for column in zip(*times, strict=True))
        priced_ms = 1e3 * cost.prefill_s(tokens)
        ratios[gpu].append(prompt_ms / priced_ms)
        line = f"{gpu:<9}{tp:>2}{tokens:>5}{prompt_ms:>11.0f}{priced_ms:>9.0f}{ratios[gpu][-1]:>6.2f}"
        print(f"{line}{decode_ms:>13.1f}{1e3 * cost.decode_run(1, tokens)[0]:>9.1f}")
    for gpu, found in ratios.items():
        print(f"{gpu}: prompts {min(found):.2f} to {max(found):.2f} times the price, median {median(found):.2f}")


if __name__ == "__main__":
    main()
