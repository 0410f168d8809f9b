"""A client that is not ours: AIPerf drives `kvtwin serve`, and both must tell the same TTFT and ITL.

    python validation/aiperf_client.py [--aiperf PATH] [--requests 100] [--request-rate 6] [--policy layerkv ...]

AIPerf comes from `pip install aiperf`, best into an environment of its own. Without --model a small Llama with random
weights is served, whose vocabulary is the 256 bytes, so that AIPerf counts tokens as the server does. The status is 1
if the mean TTFT or the mean ITL that AIPerf saw differs from the server's result.json by more than 5 ms.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from sim.results.report import number  # noqa: E402
from sim.results.result import read_result  # noqa: E402
from sim.results.schema import Result  # noqa: E402

TOLERANCE_MS = 5.0
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}
MEASURED = {
    "mean TTFT": ("time_to_first_token", "avg", "mean_ttft_ms"),
    "p50 TTFT": ("time_to_first_token", "p50", "median_ttft_ms"),
    "p99 TTFT": ("time_to_first_token", "p99", "p99_ttft_ms"),
    # AIPerf's inter-token latency is a mean over each request: what vLLM's benchmark calls TPOT.
    "mean ITL": ("inter_token_latency", "avg", "mean_tpot_ms"),
    "p50 ITL": ("inter_token_latency", "p50", "median_tpot_ms"),
    "p99 ITL": ("inter_token_latency", "p99", "p99_tpot_ms"),
    "mean latency": ("request_latency", "avg", "mean_e2el_ms"),
}
"""What is compared: AIPerf's metric and statistic, and the server's figure."""
JUDGED = ("mean TTFT", "mean ITL")


def byte_alphabet() -> dict[str, int]:
    """A letter for every byte, as byte-level tokenizers write them."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return {letters[byte]: byte for byte in range(256)}


def write_model(folder: Path) -> None:
    """A config and a tokenizer whose tokens are bytes."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": byte_alphabet(), "merges": [], "dropout": None, "unk_token": None},
    }
    files = {
        "config.json": CONFIG,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


def start_server(arguments: argparse.Namespace, model: str, out: Path, more: list[str]) -> tuple[Any, str]:
    """The server's process and address."""
    command = [sys.executable, "-m", "kvtwin", "serve", "--model", model, "--device", arguments.device]
    command += ["--policy", arguments.policy, "--port", "0", "--served-model-name", "kvtwin", *more, "--out", str(out)]
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    # The server's other thread and AIPerf want processors as well; without any free, both wait for the scheduler.
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    line = process.stdout.readline() if process.stdout else ""
    found = re.search(r"http://\S+", line)
    if found is None:
        raise SystemExit(f"the server did not start: {line or process.wait()}")
    print(line, end="", flush=True)
    return process, found[0]


def drive(aiperf: str, url: str, tokenizer: Path, artifacts: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """AIPerf's own summary of one run."""
    load = {
        "--model": "kvtwin",
        "--url": url,
        "--endpoint-type": "completions" if arguments.completions else "chat",
        "--tokenizer": str(tokenizer),
        **({"--concurrency": arguments.concurrency} if arguments.concurrency else {}),
        **({} if arguments.concurrency else {"--request-rate": arguments.request_rate}),
        "--request-count": arguments.requests,
        "--isl": arguments.isl,
        "--isl-stddev": 0,
        "--osl": arguments.osl,
        "--osl-stddev": 0,
        "--extra-inputs": "ignore_eos:true",
        "--random-seed": 1,
        "--workers-max": arguments.workers,
        "--artifact-dir": str(artifacts),
        "--ui": "none",
    }
    command = [aiperf, "profile", "--streaming", "--no-gpu-telemetry", "--no-server-metrics"]
    command += [str(word) for pair in load.items() for word in pair]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = sorted(artifacts.rglob("profile_export_aiperf.json"))
    if done.returncode or not found:
        raise SystemExit(f"AIPerf failed with status {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return json.loads(found[-1].read_text())


def compare(client: dict[str, Any], server: Result) -> bool:
    """Print both sides; whether they agree."""
    agreed = True
    print(f"{'ms':14s} {'AIPerf':>10s} {'server':>10s} {'difference':>11s}")
    for name, (metric, statistic, key) in MEASURED.items():
        seen, told = client[metric][statistic], number(server, key)
        if told is None:
            raise SystemExit(f"the server's result has no {key}: it completed no request")
        agreed = agreed and (name not in JUDGED or abs(seen - told) <= TOLERANCE_MS)
        print(f"{name:14s} {seen:10.3f} {told:10.3f} {seen - told:+11.3f}")
    requests = client["request_count"]["avg"]
    print(f"{'requests':14s} {requests:10.0f} {server.completed:10d}")
    outputs = client.get("total_output_tokens", {}).get("avg", float("nan"))
    print(f"{'output tokens':14s} {outputs:10.0f} {server.total_output_tokens:10d}")
    return agreed and requests == server.completed


def main() -> int:
    """Serve, drive, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aiperf", default=shutil.which("aiperf"), metavar="PATH", help="default: the one on PATH")
    parser.add_argument("--policy", default="vllm-recompute")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--model", help="model to serve with random weights (default: a small one)")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--request-rate", type=float, default=6.0, help="Poisson arrivals a second")
    parser.add_argument("--concurrency", type=int, help="requests in flight, instead of a rate")
    parser.add_argument("--isl", type=int, default=200, help="prompt tokens")
    parser.add_argument("--osl", type=int, default=50, help="output tokens")
    parser.add_argument("--workers", type=int, default=1, help="processes of AIPerf that send requests")
    parser.add_argument("--completions", action="store_true", help="drive /v1/completions instead of chats")
    parser.add_argument("--out", type=Path, help="folder to keep the results in")
    arguments, more = parser.parse_known_args()
    if not arguments.aiperf:
        parser.error("aiperf is not on PATH; install it or give --aiperf PATH")
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.out or Path(temporary)
        model, out, artifacts = folder / "model", folder / "server", folder / "aiperf"
        model.mkdir(parents=True, exist_ok=True)
        write_model(model)
        if arguments.model is None:
            more = ["--gpu", "cpu", "--num-gpu-blocks-override", "500", "--num-cpu-blocks-override", "500", *more]
        process, url = start_server(arguments, arguments.model or str(model / "config.json"), out, more)
        try:
            client = drive(arguments.aiperf, url, model, artifacts, arguments)
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
        finally:
            process.kill()
        return 0 if compare(client, read_result(out / "result.json")) else 1


if __name__ == "__main__":
    sys.exit(main())
