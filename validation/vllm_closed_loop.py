"""vLLM and SGLang as measured in closed loop and as simulated, with shipped constants.

python validation/vllm_closed_loop.py FILE --served qwen3-32b-h100    # says so and ends where FILE is not there

FILE is ai-dynamo/aiconfigurator's silicon_sample.csv (Apache-2.0) or rows of it. Of an engine's rows of a model it
takes parallelism, input and output length, concurrency, TTFT and TPOT; `SERVED` has whose rows those are and how each
was measured. Nothing is fitted to them. Left out are rows of several engines and of Kimi on B200, and vLLM's of
Llama-3.1-8B on H200: with as many clients as they say, prompts alone would take up to 1,707 TFLOP/s of a GPU of 1,979.
So many were found in a prefix cache, and nothing says how many.
"""

import argparse
import csv
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from random import Random
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from errors import summary

from sim.cost.engine_profile import TODAYS, load_engine_profile
from sim.options.policies import parse_policy
from sim.options.scenario import Scenario
from sim.run.prepare import prepare
from sim.run.runs import Run
from sim.run.simulate import build_run, execute_all
from traces.request import Request

PROMPTS_PER_CLIENT = 10
TTFT_TARGET, TPOT_TARGET = 0.20, 0.08
"""Median absolute errors aimed at."""
MEMORY_BOUND = 1.0
"""Where the KV of all clients at their longest is more than so many pools, requests wait for memory."""


@dataclass(frozen=True)
class Client:
    """The program that measured: ten prompts a client, lengths uniform between `least_share` of those asked for and
    these."""

    least_share: float

    def requests(self, row: "Row") -> list[Request]:
        """The requests of a row: all there from the start, sent as the clients become free."""
        random = Random(row.concurrency)

        def length(longest: int) -> int:
            return random.randint(round(self.least_share * longest), longest)

        return [
            Request(i, 0.0, length(row.input_tokens), length(row.output_tokens))
            for i in range(PROMPTS_PER_CLIENT * row.concurrency)
        ]


INFERENCEMAX = Client(least_share=0.8)
"""SemiAnalysisAI/InferenceX (Apache-2.0): its `benchmark_serving.py`, random prompts, greedy (temperature 0). Warm-ups,
since 2026, change nothing here without a prefix cache."""
AIPERF = Client(least_share=1.0)
"""aiconfigurator's own way (`eval/benchmarks/genai_perf_runner.py`, January 2026): AIPerf, no temperature given. The
rows do not say so; but Qwen3-32B's means, times ten for each client, are whole nanoseconds."""


@dataclass(frozen=True)
class Row:
    """A measured row."""

    tp: int
    input_tokens: int
    output_tokens: int
    concurrency: int
    ttft_ms: float
    tpot_ms: float

    @property
    def name(self) -> str:
        """As people write it."""
        return f"TP{self.tp} {self.input_tokens}/{self.output_tokens} c{self.concurrency}"


def _nothing(_: Row) -> dict[str, Any]:
    """No settings that differ by row."""
    return {}


def _seqs_as_clients(row: Row) -> dict[str, Any]:
    """As InferenceMAX's scripts ask for: as many sequences as there are clients."""
    return {"max_num_seqs": row.concurrency}


def _two_prompts(row: Row) -> dict[str, Any]:
    """An iteration computes as many tokens as two prompts have."""
    return {"max_num_batched_tokens": 2 * row.input_tokens}


def _generated(row: Row) -> dict[str, Any]:
    """As aiconfigurator's generator set vLLM up in January 2026 (`generator/rule_plugin/vllm.rule`)."""
    return {
        "max_num_seqs": row.concurrency,
        "max_num_batched_tokens": row.concurrency + row.input_tokens + 1500,
        "max_model_len": row.input_tokens + row.output_tokens + 1500,
    }


@dataclass(frozen=True)
class Served:
    """Rows of one model on one GPU, and the settings of the server that they are of.

    Attributes:
        columns: what the rows' columns say.
        options: of the `Scenario`, beside what the row says.
        asynchronous: whether vLLM schedules ahead.
        graphs_of: what iterations its CUDA graphs are of, where they are not of all.
        options_of: those that differ by row.
        layout: `group`: tensor-parallel, experts too; `experts`: the same with whole experts on each GPU
            (`--enable-expert-parallel`); `ranks`: each GPU is a data-parallel rank, with whole experts.
        sglang: options of SGLang's server by row; None: it is vLLM.
    """

    columns: dict[str, str]
    client: Client
    options: dict[str, Any]
    asynchronous: bool = True
    options_of: Callable[[Row], dict[str, Any]] = _nothing
    graphs_of: str = "all"
    layout: str = "group"
    sglang: Callable[[Row], dict[str, Any]] | None = None


def _llama_70b(system: str, max_num_seqs: int | None = None, precision: str = "fp8") -> Served:
    """Labelled as Llama-3.1-70B, of Llama-3.3-70B: the shapes are the same. vLLM about 0.10.2; `70b_fp8_*.sh`, and
    `70b_fp4_b200_docker.sh` with NVIDIA's checkpoint in NVFP4. Those of B200 ask for graphs of decodes alone."""
    columns = {"model_path": "meta-llama/Llama-3.1-70B", "system": system, "precision": precision}
    quantization = {"fp8": "fp8", "fp4": "modelopt_fp4"}[precision]
    options = {"model": "llama-3.1-70b", "quantization": quantization, "kv_cache_dtype": "fp8"}
    options |= {"max_num_batched_tokens": 8192, "max_num_seqs": max_num_seqs, "enable_prefix_caching": False}
    graphs_of = "decodes" if system == "b200_sxm" else "all"
    options_of = _nothing if max_num_seqs else _seqs_as_clients
    return Served(columns, INFERENCEMAX, options, options_of=options_of, graphs_of=graphs_of)


def _gpt_oss(system: str) -> Served:
    """vLLM 0.18, MXFP4 experts by Marlin's kernels; `gptoss_fp4_*.sh` of spring 2026.

    The profiles' kernels are Triton's, which vLLM 0.33 chooses. AISimulate's tables have Marlin's of one other model
    (vLLM 0.24, 896 experts, 16 a token): its FLOP/s are taken, all else is Triton's.
    """
    profile = f"{system.removesuffix('_sxm')}-imported:mxfp4_expert_flops_per_s=270e12"
    columns = {"model_path": "openai/gpt-oss-120b", "system": system, "backend_version": "0.18.0"}
    options = {"model": "gpt-oss-120b", "max_num_batched_tokens": 8192, "enable_prefix_caching": False}
    options |= {"max_cudagraph_capture_size": 2048, "profile": profile}
    return Served(columns, INFERENCEMAX, options, options_of=_seqs_as_clients)


def _gpt_oss_b200() -> Served:
    """vLLM 0.15.1, MXFP4 experts over activations in MXFP8 (FlashInfer's kernels); `gptoss_fp4_b200.sh` of February
    2026."""
    columns = {"model_path": "openai/gpt-oss-120b", "system": "b200_sxm", "backend_version": "0.15.1"}
    options = {"model": "gpt-oss-120b", "kv_cache_dtype": "fp8", "max_num_batched_tokens": 8192, "max_num_seqs": 512}
    options |= {"max_cudagraph_capture_size": 2048}
    return Served(columns, INFERENCEMAX, options | {"enable_prefix_caching": False})


def _kimi(system: str) -> Served:
    """vLLM 0.16, experts in int4 by Marlin's kernels; `kimik2.5_int4_h200.sh` of March 2026."""
    columns = {"model_path": "moonshotai/Kimi-K2.5", "system": system, "precision": "int4"}
    options = {"model": "kimi-k2.5", "gpu_memory_utilization": 0.95, "enable_prefix_caching": False}
    return Served(columns, INFERENCEMAX, options, options_of=_seqs_as_clients)


def _minimax(system: str, version: str, precision: str = "fp8", **options: str | float) -> Served:
    """`minimaxm2.5_fp8_h100.sh`, `..._h200.sh`, `..._b200.sh` and `..._fp4_b200.sh` of spring 2026, FP4 with NVIDIA's
    checkpoint, whose experts alone are in NVFP4.

    The first ones left the prefix cache on, in which a warm-up left one of the prompts. Routers were products of 32
    bits on Blackwell too, until vLLM's PR 55899.
    """
    options["profile"] = f"{system.removesuffix('_sxm')}-imported:fp32_flops_per_s=40e12"
    columns = {"model_path": "MiniMaxAI/MiniMax-M2.5", "system": system, "precision": precision}
    columns |= {"backend_version": version}
    model = {"fp8": "minimax-m2.5", "fp4": "minimax-m2.5-nvfp4"}[precision]
    if not system.startswith("h"):
        options["max_cudagraph_capture_size"] = 2048
    return Served(columns, INFERENCEMAX, {"model": model, "enable_prefix_caching": False, **options})


def _sglang(model: str, path: str, system: str, version: str, **options: str) -> Served:
    """SGLang with its own defaults: the rows do not say how their servers were started."""
    columns = {"model_path": path, "system": system, "backend_version": version}
    return Served(columns, AIPERF, {"model": model, "engine_profile": "own", **options}, sglang=_nothing)


def _generated_sglang(row: Row) -> dict[str, Any]:
    """As aiconfigurator's generator set SGLang 0.5.6 up in January 2026 (`generator/rule_plugin/sglang.rule`)."""
    tokens = row.input_tokens + 1500
    return {"enable_mixed_chunk": True, "max_prefill_tokens": tokens, "max_running_requests": row.concurrency}


def _deepseek_sglang(row: Row) -> dict[str, Any]:
    """`dsr1_fp8_h200.sh` of spring 2026."""
    seats = 512 if row.input_tokens == row.output_tokens else 256
    chunk = {"chunked_prefill_size": 32768, "max_prefill_tokens": 32768}
    return {"disable_radix_cache": True, "max_running_requests": seats, **chunk}


SERVED = {
    "llama-3.3-70b-h100": _llama_70b("h100_sxm"),
    "llama-3.3-70b-h200": _llama_70b("h200_sxm"),
    "llama-3.3-70b-b200": _llama_70b("b200_sxm", max_num_seqs=512),
    "llama-3.3-70b-b200-nvfp4": _llama_70b("b200_sxm", max_num_seqs=512, precision="fp4"),
    # vLLM 0.12 schedules in series unless asked (`SchedulerConfig.async_scheduling`), and sorts to sample: both models'
    # `generation_config.json` has top-k and top-p. The rows do not say how the servers were started. Other rows of the
    # same folder are of Dynamo 0.8.0, 23 January 2026: the settings assumed are those that its generator wrote then.
    "qwen3-32b-h100": Served(
        {"model_path": "Qwen/Qwen3-32B", "system": "h100_sxm", "precision": ""},
        AIPERF,
        {"model": "qwen3-32b", "engine_profile": "vllm-0.12-top-p"},
        asynchronous=False,
        options_of=_generated,
    ),
    "qwen3-235b-a22b-h200": Served(
        {"model_path": "Qwen/Qwen3-235B-A22B-FP8", "system": "h200_sxm"},
        AIPERF,
        {"model": "qwen3-235b-a22b", "quantization": "fp8", "engine_profile": "vllm-0.12-top-p"},
        asynchronous=False,
        options_of=_generated,
    ),
    "gpt-oss-120b-h100": _gpt_oss("h100_sxm"),
    "gpt-oss-120b-h200": _gpt_oss("h200_sxm"),
    "gpt-oss-120b-b200": _gpt_oss_b200(),
    "minimax-m2.5-h100": replace(_minimax("h100_sxm", "0.18.0", max_num_seqs=256), layout="experts"),
    "minimax-m2.5-h200": _minimax("h200_sxm", "0.18.0", gpu_memory_utilization=0.95),
    "minimax-m2.5-h200-vllm-0.16": _minimax("h200_sxm", "0.16.0", gpu_memory_utilization=0.95),
    "minimax-m2.5-b200-vllm-0.17": _minimax("b200_sxm", "0.17.0", gpu_memory_utilization=0.95, block_size=32),
    "minimax-m2.5-b200-vllm-0.19": replace(
        _minimax("b200_sxm", "0.19.0", block_size=32, kv_cache_dtype="fp8"), options_of=_two_prompts
    ),
    "minimax-m2.5-b300-vllm-0.19": replace(
        _minimax("b300_sxm", "0.19.0", block_size=32, kv_cache_dtype="fp8"), options_of=_two_prompts
    ),
    "minimax-m2.5-b200-nvfp4": replace(_minimax("b200_sxm", "0.19.0", "fp4"), options_of=_two_prompts),
    "minimax-m2.5-b300-nvfp4": replace(_minimax("b300_sxm", "0.19.0", "fp4"), options_of=_two_prompts),
    "kimi-k2.5-h200": _kimi("h200_sxm"),
    "qwen3-32b-h100-sglang": _sglang("qwen3-32b", "Qwen/Qwen3-32B", "h100_sxm", "0.5.1.post1"),
    "qwen3-32b-h100-sglang-0.5.8": _sglang("qwen3-32b", "Qwen/Qwen3-32B", "h100_sxm", "0.5.8.post1"),
    "qwen3-235b-a22b-h200-sglang": _sglang(
        "qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B-FP8", "h200_sxm", "0.5.6.post2", quantization="fp8"
    ),
    "llama-3.1-8b-h200-sglang": replace(
        _sglang("llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", "h200_sxm", "0.5.6.post2", quantization="fp8"),
        sglang=_generated_sglang,
    ),
    "deepseek-r1-h200-sglang": replace(
        _sglang("deepseek-v3", "deepseek-ai/DeepSeek-R1", "h200_sxm", "0.5.9"),
        client=INFERENCEMAX,
        sglang=_deepseek_sglang,
    ),
}
# Rows whose `attention_dp_size` is above 1 were asked for with `DP_ATTENTION=true`. Scripts of FP4 have a branch for
# it, `--data-parallel-size=$TP --enable-expert-parallel` without tensor parallelism. Those of FP8 never had one, and
# take `--enable-expert-parallel` alone: their rows are those of whole experts in a group, to 1.5 % in TPOT. The file's
# `tp_size` is $TP, and so is the number of GPUs.
SERVED["qwen3-235b-a22b-h200-experts"] = replace(SERVED["qwen3-235b-a22b-h200"], layout="experts")
for _gpu in ("b200", "b300"):
    _name = f"minimax-m2.5-{_gpu}-vllm-0.19"
    SERVED[f"{_name}-experts"] = replace(SERVED[_name], layout="experts")
    _name = f"minimax-m2.5-{_gpu}-nvfp4"
    SERVED[f"{_name}-ranks"] = replace(SERVED[_name], layout="ranks")


@dataclass(frozen=True)
class Simulated:
    """What a run gave: medians and means, and what explains them."""

    ttft_ms: tuple[float, float]
    tpot_ms: tuple[float, float]
    preemptions: int
    blocks_needed: float
    """KV blocks of all clients at their longest, over those that there are."""


def read(path: Path, served: Served) -> list[Row]:
    """vLLM's rows of one engine whose GPUs all share every layer, each once, in order of their settings.

    A row measured again counts again.
    """
    wanted = {"backend": "sglang" if served.sglang else "vllm", "mode": "agg", **served.columns}
    with path.open(encoding="utf-8") as file:
        found = {
            Row(
                int(float(row["tp_size"])),
                int(row["isl"]),
                int(row["osl"]),
                _concurrency(row),
                # Copies of a row differ in digits.
                round(float(row["silicon_ttft_ms"]), 1),
                round(float(row["silicon_tpot_ms"]), 2),
            )
            for row in csv.DictReader(file)
            if all(row.get(name, value) == value for name, value in wanted.items()) and OF_LAYOUT[served.layout](row)
        }
    return sorted(found, key=lambda row: (row.tp, row.input_tokens, row.output_tokens, row.concurrency))


def is_counted(name: str, row: Row) -> bool:
    """Whether a row of SGLang is of the half that nothing was chosen by: drawn by the hash of its server and name."""
    return sha256(f"{name} {row.name}".encode()).digest()[0] % 2 == 1


def _concurrency(row: dict[str, str]) -> int:
    said = re.search(r"silicon_concurrency=(\d+)", row.get("silicon_data_source", ""))
    return int(said[1]) if said else int(float(row["batch_size"]))


def _gpus_of_experts(row: dict[str, str]) -> tuple[int, int]:
    """GPUs that share an expert's width, and that share the experts; 0 where the row does not say."""
    return int(float(row.get("moe_tp_size") or 0)), int(float(row.get("moe_ep_size") or 0))


def _in_one_group(row: dict[str, str]) -> bool:
    width, experts = _gpus_of_experts(row)
    return experts <= 1 and width in (0, 1, int(float(row["tp_size"])))


OF_LAYOUT: dict[str, Callable[[dict[str, str]], bool]] = {
    "group": _in_one_group,
    "experts": lambda row: _gpus_of_experts(row)[1] > 1,
    "ranks": lambda row: float(row.get("attention_dp_size") or 1) > 1,
}
"""Whether a row is of a layout."""


def engine_with_graphs_of(graphs_of: str, folder: Path) -> str:
    """Today's engine profile with graphs of other iterations, as a file in `folder`."""
    profile = msgspec.structs.replace(load_engine_profile(TODAYS), graphs_of=graphs_of)
    path = folder / f"{graphs_of}.json"
    path.write_bytes(msgspec.json.encode(profile))
    return str(path)


def with_graphs(served: Served, folder: Path) -> Served:
    """With an engine profile whose graphs are of the iterations that the server's were of."""
    if served.graphs_of == "all":
        return served
    return replace(served, options=served.options | {"engine_profile": engine_with_graphs_of(served.graphs_of, folder)})


def replay(row: Row, served: Served) -> Run:
    """A row's run, ended."""
    options = {"max_model_len": row.input_tokens + row.output_tokens + 256} | served.options | served.options_of(row)
    scenario = Scenario(
        workload="fixed",
        gpu=served.columns["system"].removesuffix("_sxm"),
        tp=1 if served.layout == "ranks" else row.tp,
        data_parallel_size=row.tp if served.layout == "ranks" else None,
        enable_expert_parallel=served.layout != "group",
        max_concurrency=row.concurrency,
        **options,
    )
    policy = f"vllm-v1:async-scheduling={str(served.asynchronous).lower()}"
    if served.sglang:
        options = [f"{name.replace('_', '-')}={str(value).lower()}" for name, value in served.sglang(row).items()]
        policy = ":".join(filter(None, ("sglang", ",".join(options))))
    setup = prepare(scenario, policy, parse_policy(policy, {})[1])
    return execute_all(build_run(setup, served.client.requests(row)))


def simulate(row: Row, served: Served) -> Simulated:
    """Replay a row and sum it up."""
    run = replay(row, served)
    limits = run.setup.limits
    ttft_ms, tpot_ms = ([s * 1e3 for s in values] for values in (run.log.ttft_s, run.log.tpot_s))
    tokens = row.concurrency * (row.input_tokens + row.output_tokens) / len(run.engines)
    blocks = tokens / limits.block_size / limits.num_gpu_blocks
    preemptions = sum(parts.scheduler.counters.preemptions for parts in run.engines)
    return Simulated((median(ttft_ms), fmean(ttft_ms)), (median(tpot_ms), fmean(tpot_ms)), preemptions, blocks)


def error(found: float, measured: float) -> float:
    """Found over measured, less one."""
    return found / measured - 1


def line(row: Row, found: Simulated) -> str:
    """A line of the table: measured, simulated, errors."""
    text = f"{row.name:<22}"
    for there, here in ((row.ttft_ms, found.ttft_ms[1]), (row.tpot_ms, found.tpot_ms[1])):
        text += f"{there:>11,.1f}{here:>11,.1f}{100 * error(here, there):>+7.0f} %"
    notes = [f"KV of all clients {found.blocks_needed:.1f}x the pool"] if found.blocks_needed > MEMORY_BOUND else []
    notes += [f"{found.preemptions} preemptions"] if found.preemptions else []
    return f"{text}   {', '.join(notes)}".rstrip()


GROUPS: tuple[tuple[str, Callable[[Row], Any]], ...] = (
    ("TP", lambda row: row.tp),
    ("lengths", lambda row: f"{row.input_tokens}/{row.output_tokens}"),
    ("clients", lambda row: row.concurrency),
)


def groups(pairs: Iterable[tuple[Row, Simulated]], which: int) -> list[str]:
    """Median errors of the rows that share GPUs, lengths or clients."""
    pairs, lines = list(pairs), []
    for name, key in GROUPS:
        for value in sorted({key(row) for row, _ in pairs}):
            group = [(row, found) for row, found in pairs if key(row) == value]
            ttft = median(error(found.ttft_ms[which], row.ttft_ms) for row, found in group)
            tpot = median(error(found.tpot_ms[which], row.tpot_ms) for row, found in group)
            lines.append(
                f"  {name} {value}: median error TTFT {100 * ttft:+.0f} %, TPOT {100 * tpot:+.0f} %, {len(group)} rows"
            )
    return lines


def main() -> None:
    """Print every row, and how far off they are together."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--served", choices=SERVED, default="llama-3.3-70b-h100")
    parser.add_argument("--kv-cache-dtype", choices=("fp8", "auto"), help="another than the settings have")
    parser.add_argument("--engine-profile", help="another than the settings have")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="every N-th row alone")
    parser.add_argument("--counted", action="store_true", help="SGLang's rows that nothing was chosen by")
    parser.add_argument(
        "--most-clients", type=int, default=1 << 30, metavar="N", help="rows of at most so many clients"
    )
    arguments = parser.parse_args()
    if not arguments.file.exists():
        print(f"{arguments.file} is not there: nothing to compare with")
        return
    served = SERVED[arguments.served]
    if arguments.kv_cache_dtype:
        served = replace(served, options=served.options | {"kv_cache_dtype": arguments.kv_cache_dtype})
    if arguments.engine_profile:
        served = replace(served, options=served.options | {"engine_profile": arguments.engine_profile})
    with TemporaryDirectory() as folder:
        if not arguments.engine_profile:
            served = with_graphs(served, Path(folder))
        rows = [row for row in read(arguments.file, served) if row.concurrency <= arguments.most_clients]
        if arguments.counted:
            rows = [row for row in rows if is_counted(arguments.served, row)]
        compare(rows[:: arguments.every], served)


def compare(rows: Iterable[Row], served: Served) -> None:
    """Print rows, and how far off they are together."""
    print("Simulated: means over all requests of a row, the burst at its start included.")
    print(f"{'row':<22}{'TTFT, ms':>11}{'simulated':>11}{'':>9}{'TPOT, ms':>11}{'simulated':>11}")
    pairs: list[tuple[Row, Simulated]] = []
    for row in rows:
        # What was measured twice lies together, and is simulated once.
        again = bool(pairs) and pairs[-1][0].name == row.name
        pairs.append((row, pairs[-1][1] if again else simulate(row, served)))
        print(line(*pairs[-1]), flush=True)
    for which, kind in enumerate(("medians", "means")):
        print(f"\nsimulated {kind}:")
        print(summary("TTFT", (error(f.ttft_ms[which], row.ttft_ms) for row, f in pairs), "rows", TTFT_TARGET))
        print(summary("TPOT", (error(f.tpot_ms[which], row.tpot_ms) for row, f in pairs), "rows", TPOT_TARGET))
        print("\n".join(groups(pairs, which)))


if __name__ == "__main__":
    main()
