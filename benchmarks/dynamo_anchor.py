"""Replay a trace with the mocker of NVIDIA Dynamo, in `replay_speed.py`'s setting: the anchor of docs/speed.md.

    python -m venv d && d/bin/pip install --no-deps ai-dynamo-runtime==1.6.1
    python benchmarks/replay_speed.py TRACE.csv --anchor-python d/bin/python --anchor benchmarks/dynamo_anchor.py

TRACE is a CSV of `traces.writers`. The first run leaves it in the mocker's own format beside it; later ones, those that
are timed, read that alone. Its iterations take what its default polynomial says: the work is alike, the times are not.
"""

import csv
import json
import sys
from pathlib import Path

from dynamo import _core

MAX_MODEL_LEN = 4096
ENGINE = {
    "num_gpu_blocks": 6500,
    "block_size": 16,
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 512,
    "enable_prefix_caching": False,
    "enable_chunked_prefill": True,
}


def convert(trace: Path, out: Path) -> None:
    """Write the trace as the mocker reads it, clipped as `--clip 4096` does."""
    with trace.open() as lines, out.open("w") as to:
        blocks = 0
        for row in csv.DictReader(lines):
            prompt_tokens, output_tokens = int(row["prompt_tokens"]), int(row["output_tokens"])
            output_tokens = min(output_tokens, max(MAX_MODEL_LEN // 2, MAX_MODEL_LEN - prompt_tokens))
            prompt_tokens = min(prompt_tokens, MAX_MODEL_LEN - output_tokens)
            own = -(-prompt_tokens // 16)
            request = {
                "timestamp": float(row["arrival_s"]) * 1000,
                "input_length": prompt_tokens,
                "output_length": output_tokens,
                "hash_ids": list(range(blocks, blocks + own)),
            }
            blocks += own
            to.write(json.dumps(request) + "\n")


def main() -> None:
    """Replay `sys.argv[1]` and print how many requests ended."""
    trace = Path(sys.argv[1])
    jsonl = trace.with_suffix(".dynamo.jsonl")
    if not jsonl.exists():
        part = jsonl.with_suffix(".part")
        convert(trace, part)
        part.replace(jsonl)
    config = _core._normalize_mocker_config({"engine": ENGINE})
    replayed = _core.run_mocker_trace_replay([str(jsonl)], extra_engine_args=config, trace_block_size=16)
    print(replayed.summary["completed_requests"], "requests")


if __name__ == "__main__":
    main()
