"""vLLM 0.19 on RTX PRO 6000 as measured and as simulated: Llama-3.1 8B on one, Qwen3 32B on two.

    python validation/vllm019_rtx_pro_6000.py FOLDER    # a checkout of casys-kaist/LLMServingSim

The folder (CASYS Lab, KAIST, MIT licence) has 300 requests of each server, the tokens that were sent, and times of
vLLM's kernels on the same card. Prices are the shipped `rtx-pro-6000-imported`, fitted to those kernels of both models,
and the tables themselves (form `table`). Nothing is fitted to the runs. The all-reduce of two cards is in no table: its
rate and latency are those of LLMServingSim's own configuration. The rest is as in `vllm019_rtx4090.py`.
"""

import argparse
import csv
import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from vllm019_rtx4090 import compare, read_measured, with_tables

from calib.importers.llmservingsim import import_tables
from sim.cost.profile import load_profile
from sim.options.scenario import Scenario

SERVERS = {"Llama-3.1-8B": ("llama-3.1-8b", "meta-llama", 1), "Qwen3-32B": ("qwen3-32b", "Qwen", 2)}
"""By their folders: our model, whose tables, GPUs."""
GPU = "rtx-pro-6000"
EXAMPLES, TABLES = "bench/examples/RTXPRO6000", "profiler/perf/RTXPRO6000"
WORKLOAD = "workloads/sharegpt-{}-300-sps10.jsonl"
BLOCK_TOKENS = 16


def convert(folder: Path, name: str, scratch: Path, traffic: str = "") -> None:
    """Write a server's run as `trace.csv` and `measured.csv`: one clock, ids of blocks for ids of tokens.

    `traffic` is what its workload's file is called by, where that is not `name`.
    """
    served = [json.loads(line) for line in (folder / EXAMPLES / name / "vllm/requests.jsonl").open(encoding="utf-8")]
    served.sort(key=lambda row: int(row["request_id"].rpartition("-")[2]))
    sent = [json.loads(line) for line in (folder / WORKLOAD.format(traffic or name.lower())).open(encoding="utf-8")]
    # Arrivals are by the wall clock, tokens by another: the least that one is ahead of the other.
    ahead_s = min(row["queued_ts"] - row["arrival_time"] for row in served)
    origin_s = ahead_s + min(row["arrival_time"] for row in served)
    known: dict[tuple[int, ...], int] = {}
    with (
        (scratch / "trace.csv").open("w", newline="", encoding="utf-8") as trace,
        (scratch / "measured.csv").open("w", newline="", encoding="utf-8") as measured,
    ):
        requests, times = csv.writer(trace), csv.writer(measured)
        requests.writerow(
            ("arrival_s", "prompt_tokens", "output_tokens", "hash_ids", "hash_block_tokens", "output_hash_ids")
        )
        times.writerow(("arrival_s", "first_token_s", "last_token_s"))
        # Ranks queue what they are sent each in its own time.
        pairs = sorted(zip(served, sent, strict=True), key=lambda pair: pair[0]["queued_ts"])
        for row, request in pairs:
            tokens = (*request["input_tok_ids"], *request["output_tok_ids"])
            before, ids = -1, []
            for start in range(0, len(tokens), BLOCK_TOKENS):
                before = known.setdefault((before, *tokens[start : start + BLOCK_TOKENS]), len(known))
                ids.append(str(before))
            of_prompt = -(-row["input_toks"] // BLOCK_TOKENS)
            blocks = " ".join(ids[:of_prompt]), BLOCK_TOKENS, " ".join(ids[of_prompt:])
            arrival_s = row["queued_ts"] - origin_s
            requests.writerow((arrival_s, row["input_toks"], row["output_toks"], *blocks))
            times.writerow((arrival_s, row["first_token_ts"] - origin_s, row["last_token_ts"] - origin_s))


def asked_folder(description: str | None) -> Path | None:
    """The checkout that the command line names; None, and a line says so, where it has no runs."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    if (folder / EXAMPLES).is_dir():
        return folder
    print(f"{folder / EXAMPLES} is not there: nothing to compare with")
    return None


def main() -> None:
    """Print measured and simulated figures of each server side by side."""
    folder = asked_folder(__doc__)
    if folder is None:
        return
    with TemporaryDirectory() as name:
        scratch = Path(name)
        shipped = load_profile(f"{GPU}-imported")
        for server, (model, owner, tp) in SERVERS.items():
            print(f"{server} on {tp}")
            convert(folder, server, scratch)
            tables = folder / TABLES / owner / server / "bf16" / f"tp{tp}"
            setup = Scenario(
                trace=str(scratch / "trace.csv"),
                model=model,
                gpu=GPU,
                tp=tp,
                max_num_seqs=128,
                max_num_batched_tokens=2048,
            )
            found = [shipped, with_tables(shipped, import_tables(tables, model, tp))]
            compare(read_measured(scratch), found, lambda profile, setup=setup: replace(setup, profile=str(profile)))


if __name__ == "__main__":
    main()
