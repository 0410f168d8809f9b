"""Whole runs as a user makes them: every system, option and kind of traffic, small and crowded.

What `kvtwin run` tells and writes, what `kvtwin explain` says of some requests, and what the page's figures draw.
"""

import contextlib
import csv
import gzip
import io
import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from pinned import L20, Answers, Table, lines_of, rounded

import kvtwin
from sim.results.page.charts import charts
from sim.results.page.saved import read_sections
from sim.systems import POLICIES

SMALL = "--max-model-len 1024 --gpu l20 --goodput ttft:3000 tpot:100 --seed 1 --num-prompts 30"
TRAFFIC = {
    "crowd": "--workload sharegpt --request-rate 20 --num-gpu-blocks-override 110 --num-cpu-blocks-override 150",
    "turns": "--workload sessions --turns 4 --think-time 2 --shared-prefix 100 --prefix-groups 2 --max-context 900 "
    "--input-len 90 --output-len 40 --request-rate 8 --num-gpu-blocks-override 90 --num-cpu-blocks-override 120",
}
POOLS = "--prefill-replicas 2 --decode-replicas 2 --link-gbps 20"
ONE_TOKEN = "--num-gpu-blocks-override 1600 --num-cpu-blocks-override 2400"
"""Blocks have one."""
OF_TURNS = ("vllm-v1", "hcache", "cachedattention", "pensieve", "radix", "sarathi", "memserve", "mooncake")
"""Systems that keep what a conversation comes back to: their options matter then."""
WITH_POOLS = ("distserve", "splitwise", "memserve", "mooncake")
VARIANTS = {
    "layerkv": (
        "slo-aware=false", "tpot-slo-ms=80", "decode=stream", "decode=stream,slo-aware=false,horizon-steps=40",
        "equations=paper,predictor=bucket", "predictor=none,drop-irrecoverable=false,tpot-slo-ms=70", "order=mlfq",
        "batching=sarathi", "batching=iteration-level", "threshold=0.2,predictor=bucket,predictor-accuracy=0.6",
    ),
    "vllm-v1": (
        "scheduling-policy=priority", "long-prefill-token-threshold=20", "watermark=0.1", "async-scheduling=false",
        "scheduler-reserve-full-isl=false", "cpu-chunks=50",
        "cpu-chunks=30,blocks-per-chunk=2,offload-outputs=true,store-s-per-block=0.01,load-s-per-block=0.005",
        "cpu-chunks=40,eviction-policy=arc,store-threshold=2,async-scheduling=true", "memory=radix", "memory=tiered",
        "memory=chunks,async-scheduling=true",
        "long-prefill-token-threshold=7,long-prefill-token-threshold-adaptive=true",
    ),
    "ellm": ("tpot-slo-ms=80", "equations=paper,fused=false", "layer-order=contiguous", "overlapped=false"),
    "hcache": ("keeps=turns", "keeps=turns,batching=sarathi"),
    "kvpr": ("partial-recompute=false",),
    "fastserve": ("quantum-ms=40,starvation-s=2,starvation-check=7", "eviction=recompute", "admission=slack"),
    "cachedattention": (
        "disk-space=0.5", "disk-space=0.3,look-ahead=false,disk-read-gb-per-s=1,disk-latency-us=300,disk-block-us=50",
    ),
    "pensieve": ("swap-out-threshold=0.6",),
    "radix": ("schedule-policy=dfs-weight", "schedule-policy=fcfs,max-new-tokens=100", "lpm-longest=3",
              "schedule-conservativeness=0.3"),
    "adaptive": ("ttft-slo-ms=900,tpot-slo-ms=60", "predictor=none,ttft-slo-ms=3000,tpot-slo-ms=80,patience-s=0.7",
                 "predictor=bucket,predictor-accuracy=0.7,ttft-slo-ms=400"),
    "sarathi": ("eviction=swap", "order=mlfq", "memory=radix,order=lpm", "memory=tiered",
                "memory=retained,swap-out-threshold=0.5"),
    "fastgen": ("eviction=swap",),
    "orca": ("memory=paged", "eviction=swap"),
    "vllm-swap": ("memory=reserved", "order=priority"),
    "splitwise": ("mixed-pool=true,max-pending-tokens=300", "layer-wise=false,waiting-share=0.2"),
    "distserve": ("blocking-pull=true", "layer-wise=true"),
    "memserve": ("caching=prefill", "caching=return"),
    "mooncake": ("rejection=early,ttft-slo-ms=900,tbt-slo-ms=60", "balancing-threshold=1.1,rejection=predicted,"
                 "predicted-decode-s=2,ttft-slo-ms=700", "blocking-pull=true"),
}  # fmt: skip
SWAP, V1 = "--policy vllm-swap ", "--policy vllm-v1 "
DEPLOYMENTS = {
    "replicas": V1 + TRAFFIC["turns"] + " --replicas 3",
    **{
        f"router {name}": V1 + TRAFFIC["turns"] + f" --replicas 3 --router {name}"
        for name in ("least-loaded", "power-of-two", "session-affinity", "prefix-affinity")
    },
    "tp 2": SWAP + TRAFFIC["crowd"] + " --tp 2",
    "pp 2": SWAP + TRAFFIC["crowd"] + " --pipeline-parallel-size 2 --max-num-seqs 8",
    "pp 4, chunked": "--policy sarathi "
    + TRAFFIC["turns"]
    + " --pipeline-parallel-size 4 --num-gpu-blocks-override 99",
    "two kinds of engines": "--policy distserve " + TRAFFIC["crowd"] + f" {POOLS} --prefill-tp 2 --decode-gpu a100-80g",
    "closed sessions": V1 + TRAFFIC["turns"] + " --closed-sessions",
    "few at a time": SWAP + TRAFFIC["crowd"] + " --max-concurrency 5",
    "window": V1 + TRAFFIC["crowd"] + " --model mistral-7b-v0.1",
    "hybrid layers": V1 + TRAFFIC["turns"] + " --model gemma-2-9b --num-gpu-blocks-override 150",
    "hybrid layers, crowded": V1 + TRAFFIC["crowd"] + " --model gemma-2-9b --num-gpu-blocks-override 170",
    "many windowed layers": V1 + TRAFFIC["turns"] + " --model gemma-3-27b --num-gpu-blocks-override 210",
    "no hybrid": V1 + TRAFFIC["turns"] + " --model gemma-2-9b --disable-hybrid-kv-cache-manager",
    "latent": SWAP + TRAFFIC["crowd"] + " --model deepseek-v2-lite",
    "grouped queries, FP8 KV": SWAP + TRAFFIC["crowd"] + " --model llama-3.1-8b --kv-cache-dtype fp8",
    "FP8 weights": V1 + TRAFFIC["crowd"] + " --model qwen3-8b --quantization fp8",
    "INT8 KV": SWAP + TRAFFIC["crowd"] + " --kv-cache-dtype int8",
    "4 bytes": SWAP + TRAFFIC["crowd"] + " --dtype float32",
    "block size": SWAP + TRAFFIC["crowd"] + " --block-size 8",
    "chunked": SWAP + TRAFFIC["crowd"] + " --enable-chunked-prefill --max-num-batched-tokens 96 --max-num-seqs 9",
    "cached prefixes": "--policy vllm-recompute " + TRAFFIC["turns"] + " --enable-prefix-caching",
    "no cached prefixes": V1 + TRAFFIC["turns"] + " --no-enable-prefix-caching",
    "engine profile": SWAP + TRAFFIC["crowd"] + " --engine-profile kvtwin",
    "ramp": SWAP + "--workload ramp --request-rate 2 --end-rate 40 --input-len 60 --output-len 30",
    "burst": SWAP + "--workload burst --request-rate 4 --burst-factor 6 --burst-period 3 --burst-duration 0.5 "
    "--input-len 60 --output-len 30 --rate-scale 1.5",
    "uniform": SWAP + "--workload uniform --request-rate 9 --burstiness 0.4 --input-len 90 --output-len 50 "
    "--range-ratio 0.3 --clip 120",
    "azure": SWAP + "--workload azure-conv-2023 --request-rate 9 --num-gpu-blocks-override 300 --clip 1000",
    "autoscaled": V1 + TRAFFIC["turns"] + " --autoscale hpa:target=3,max=4,start-s=1,interval-s=2,down-window-s=4",
    "autoscaled by SLOs": V1 + TRAFFIC["turns"] + " --router least-loaded "
    "--autoscale dynamo:max=5,ttft-ms=20,itl-ms=21,interval-s=0.7,sensitivity=70,start-s=0.5",
    "ranks that share experts": V1 + TRAFFIC["turns"] + " --model qwen3-30b-a3b --data-parallel-size 2 "
    "--enable-expert-parallel",
    "drafts": "--policy vllm-v1:spec-method=eagle3,spec-tokens=3,acceptance-rate=0.6 " + TRAFFIC["turns"],
    "tiers": "--policy vllm-v1:cpu-chunks=30,storage-space=0.05,storage-read-gb-per-s=2,storage-latency-us=900 "
    + TRAFFIC["turns"],
    "fixed": SWAP + "--workload fixed --request-rate inf --input-len 100 --output-len 20",
}


EXPLAINED = (3, 12, 25)
"""Requests."""


def cases() -> dict[str, str]:
    """The words of every run by its name."""
    found = {}
    for policy in POLICIES:
        more = POOLS if policy in WITH_POOLS else ONE_TOKEN if policy == "radix" else ""
        for traffic in TRAFFIC:
            found[f"{policy} {traffic}"] = f"--policy {policy} {TRAFFIC[traffic]} {more}"
        for options in VARIANTS.get(policy, ()):
            traffic = "turns" if policy in OF_TURNS else "crowd"
            found[f"{policy}:{options} {traffic}"] = f"--policy {policy}:{options} {TRAFFIC[traffic]} {more}"
    return found | DEPLOYMENTS


def numbers(rows: Iterable[dict[str, str]]) -> list[list[object]]:
    """Rows of a table, numbers as such."""

    def read(text: str) -> object:
        try:
            return float(text)
        except ValueError:
            return text

    return [[(name, read(text)) for name, text in row.items()] for row in rows]


def requests_of(folder: Path) -> list[object]:
    """Whichever of the two files has them."""
    if (folder / "requests.csv").exists():
        with (folder / "requests.csv").open() as file:
            return list(numbers(csv.DictReader(file)))
    parquet = pytest.importorskip("pyarrow.parquet")
    return [list(row.items()) for row in parquet.read_table(folder / "requests.parquet").to_pylist()]


def heard(words: list[str], folder: str) -> list[str]:
    """What a command tells."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        assert kvtwin.main(words) == 0, words
    return told.getvalue().replace(folder, "OUT").replace("requests.csv", "requests.parquet").splitlines()


def drawn(folder: Path) -> Iterator[str]:
    """The figures of a page."""
    for section in read_sections([folder]):
        for chart in charts(section.runs):
            yield from (f"{chart.name} {chart.title!r} {chart.caption!r}", repr(chart.columns), *map(repr, chart.rows))
            yield from lines_of(rounded([chart.data, chart.layout], 5))


def ask(name: str) -> Answers:
    """A run's files and words."""
    command = ["run", *SMALL.split(), *cases()[name].split(), "--profile", str(L20)]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        told = heard([*command, "--out", folder, "--timeline", "--save-detailed"], folder)
        result = json.loads((out / "result.json").read_text())
        del result["versions"]
        result["scenario"].pop("profile")
        with (out / "series.csv").open() as file:
            series = numbers(csv.DictReader(file))
        timeline = json.loads(gzip.decompress((out / "timeline.json.gz").read_bytes()))
        explained = [line for i in EXPLAINED for line in heard(["explain", folder, "--request", str(i)], folder)]
        return {
            "result": [*lines_of(result)], "requests": [*lines_of(requests_of(out))], "series": [*lines_of(series)],
            "timeline": [*lines_of(timeline)], "told": told, "explained": explained, "figures": [*drawn(out)],
        }  # fmt: skip


TABLES = {"runs": Table(list(cases()), ask)}
