"""Replays workloads of the NIXL oracle on our two pools and compares with vLLM's answers.

python nixl_replay.py FILE
"""

import gzip
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from clusters import simulate_pools

from kvtwin.testing import linear_machine
from sim.engine.limits import Limits
from sim.options.policies import parse_policy
from traces.request import Request

POLICY = "vllm-v1:stage=nixl,async-scheduling=false"


def read_cases(path: Path) -> list[dict]:
    """Workloads with vLLM's answers."""
    return json.loads(gzip.decompress(path.read_bytes()))


def differences(case: dict, *, jump: bool) -> list[str]:
    """Where our answer is another than vLLM's, in words."""
    args = case["args"]
    limits = Limits(
        num_gpu_blocks=args["blocks"] - 1, num_cpu_blocks=0, block_size=16, block_bytes=1.0,
        max_model_len=args["max_model_len"], max_num_seqs=args["max_num_seqs"],
        max_num_batched_tokens=args["max_batched"], enable_chunked_prefill=True,
        enable_prefix_caching=not args["no_prefix_caching"],
    )  # fmt: skip
    rows = [Request(i, *row[:3], "", tuple(row[3]), 16) for i, row in enumerate(case["workload"])]
    cost = args["cost"]
    reserves = str(not args["no_reserve_full_isl"]).lower()
    words = f"{POLICY},watermark={args['watermark']},scheduler-reserve-full-isl={reserves}"
    words += f",long-prefill-token-threshold={args['long_prefill']}"
    outcome = simulate_pools(
        parse_policy(words, {})[1], rows, limits, bytes_per_s=1 / case["s_per_block"],
        machine=linear_machine(prefill=cost[:3], decode=cost[3:]), jump=jump,
    )  # fmt: skip
    found = outcome.by_id()
    times = {"first": "first_token_s", "finish": "finish_s"}
    wrong = [
        f"{number} {name}: {getattr(found[number], ours)}, vLLM {there}"
        for name, ours in times.items()
        for number, there in enumerate(case[name])
        if getattr(found[number], ours) != pytest.approx(there, abs=1e-6)
    ]
    (link,) = outcome.members[0].lanes.links.values()
    sent = [round((one.end_s - one.start_s) / case["s_per_block"]) for one in link.intervals or ()]
    blocks = [blocks for _, blocks in case["pulled"] if blocks]
    return wrong + ([f"blocks {sent}, vLLM {blocks}"] if sent != blocks else [])


if __name__ == "__main__":
    cases = read_cases(Path(sys.argv[1]))
    found = {case["seed"]: differences(case, jump=True) or differences(case, jump=False) for case in cases}
    for seed, wrong in found.items():
        if wrong:
            print(seed, wrong[0])
    print(f"{len(cases)} cases, {sum(map(bool, found.values()))} differ")
