"""What commands print, write and draw.

A picture is told by what is in it (`pictures`).
"""

import contextlib
import io
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from matplotlib.backends.backend_agg import FigureCanvasAgg
from pictures import picture
from pinned import HERE, L20, T4, Answers, Table, lines_of, rounded
from pinned_runs import POOLS, SMALL, TRAFFIC

import kvtwin
from sim.version import VERSION

PROFILE = f"--profile {L20}"
CROWD, TURNS = (f"{SMALL} {TRAFFIC[name]} {PROFILE}" for name in ("crowd", "turns"))
TWO = "--policy vllm-recompute --policy layerkv:slo-aware=false"
STUDY = f"""
workload = "fixed"
num-prompts = 30
output-len = 20
request-rate = 8
gpu = "l20"
profile = "{L20}"
goodput = ["ttft:300"]
policy = ["vllm-v1", "vllm-recompute"]
"""
GRID = "input-len = [100, 800]\nmax-num-seqs = [1, 16]\n"
STUDIES = {
    "sweep": f"[sweep.grid]\n{GRID}seed = [0, 1]",
    "sweep of one axis": "[sweep.grid]\nmax-num-seqs = [1, 3, 9]",
    "map": f'[map]\nmetric = "mean_ttft_ms"\n[map.grid]\n{GRID}',
    "map of goodput": f"[map.grid]\n{GRID}tp = [1, 2]",
    "tune": '[tune]\nslo = ["p99_ttft_ms:400"]\n[tune.grid]\nmax-num-seqs = [1, 64]',
}


WORKLOADS = ("fixed", "uniform", "azure-conv-2023", "sharegpt", "ramp", "burst", "sessions")
SLOW = f"{SMALL} --workload fixed --input-len 300 --output-len 40 {PROFILE} --request-rate 0.0005"
MEASURED = "--model llama-3.1-8b --workload sharegpt --num-prompts 60 --request-rate 20"
COMMANDS: dict[str, tuple[str, ...]] = {
    "run": (f"run --policy vllm-swap {CROWD} --out o --figures",),
    "run of pools": (f"run --policy mooncake {TURNS} {POOLS} --out o --figures",),
    "run of replicas": (f"run --policy vllm-v1 {TURNS} --replicas 2 --out o --figures",),
    "run of nothing": (f"run --policy vllm-swap {CROWD} --num-gpu-blocks-override 4 --out o --figures",),
    "run of hours": (f"run --policy vllm-swap {SLOW} --out o --figures --timeline", "report o"),
    "runs that are measured": (f"run --policy vllm-v1 --gpu h100 {MEASURED} --out o", "report o",
                               f"run --policy vllm-v1 --gpu h100 --tp 2 {MEASURED} --seed 3 --clip 900 --out p "
                               "--max-num-seqs 9 --max-model-len 4000 --block-size 32", "report o p"),
    "compare": (f"compare {TWO} {CROWD} --out o", "report o"),
    "limits": (f"compare {TWO} {TURNS} --out o --bound --lift-limits", "report o"),
    **{name: (f"{name.split()[0]} study.toml --out o --jobs 1", "report o") for name in STUDIES},
    **{f"plan at {rate}": (f"plan --workload uniform --input-len 300 --output-len 20 --request-rate {rate} --jobs 1 "
       f"--num-prompts 60 --model llama-2-7b --gpu l20 {PROFILE} --max-gpus 2 --max-num-batched-tokens 512 --seeds 2 "
       "--kv-cache-dtype auto --slo p99_ttft_ms:900 p99_tpot_ms:60 --out o", "report o") for rate in (8, 30)},
    "trace": ("trace generate sessions --num-prompts 40 --request-rate 3 --turns 3 --seed 2 -o t.jsonl", "trace list",
              "trace inspect t.jsonl", "trace convert t.jsonl -o t.csv --clip 600"),
    "changes of a trace": (
        "trace generate sharegpt --num-prompts 30 --seed 4 --request-rate 4 -o s.csv", *(
            f"trace convert s.csv -o {name}.csv {words}" for name, words in (
                ("part", "--window 1:6.5 --spread-ties"), ("short", "--clip 300 --head 20 --rate-scale 1.5"),
                ("even", "--request-rate 9 --burstiness 100 --seed 2"), ("drawn", "--request-rate 9 --seed 2"),
                ("tools", "--tool-calls 1.5 --tool-call-s 0.4 --tool-call-tokens 9 --seed 5 --head 12"),
                ("some", "--tool-calls 0.7 --head 12"), ("loras", "--loras 4 --lora-skew 1.1"), ("alike", "--loras 3"),
            )
        ), "trace convert part.csv s.csv -o both.csv", "trace inspect both.csv --json",
        f"run --trace tools.csv --policy infercept --gpu l20 {PROFILE} --out t --timeline", "explain t --slowest 2",
        "explain t --beyond 60 --by e2el",
        f"run --trace loras.csv --policy vllm-v1:enable-lora=true,max-loras=2 --gpu l20 {PROFILE} --out l",
    ),
    "workloads": tuple(f"trace generate {name} --num-prompts 9 --seed 3 -o {name}.jsonl" for name in WORKLOADS),
    "policies": ("policies", "policies layerkv", "policies sglang", "policies vllm-v1 --mixes"),
    "profile": (f"profile show {L20}", f"profile diff {L20} {T4} --figure d.png"),
}  # fmt: skip
"""One after another in a folder of their own."""


def ask(name: str) -> Answers:
    """What commands tell, and what is in the files and pictures that they leave."""
    told, drawn = io.StringIO(), {}

    def keep(canvas: FigureCanvasAgg, file: Any, **_: object) -> None:
        path = Path(file if isinstance(file, str | Path) else file.name)
        drawn[path.name.split(".png")[0].strip(".")] = canvas.figure
        if not isinstance(file, str | Path):
            file.write(b"\x89PNG")

    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        contextlib.redirect_stdout(told),
        contextlib.redirect_stderr(told),
        patch.object(FigureCanvasAgg, "print_png", keep),
        patch.dict(os.environ, {"COLUMNS": "110"}),
    ):
        Path("study.toml").write_text(STUDY + STUDIES.get(name, ""))
        for words in COMMANDS[name]:
            print(f"$ kvtwin {words}")
            try:
                print(f"exit status {kvtwin.main(words.split())}")
            except SystemExit as end:
                raise AssertionError(told.getvalue()) from end
        files = [line for path in sorted(Path().rglob("*")) if path.is_file() for line in left(path)]
    pictures = [line for name, figure in drawn.items() for line in (f"== {name}", *picture(figure))]
    found = {"told": told.getvalue().splitlines(), "files": files, "pictures": pictures}
    return {question: [line.replace(str(HERE), "HERE").rstrip() for line in lines] for question, lines in found.items()}


def left(path: Path) -> Iterator[str]:
    """A file's name, and what is in it where that is words."""
    if "points" in path.parts or path.name == "study.toml":
        return
    yield f"-- {path}"
    if path.suffix in (".csv", ".toml", ".jsonl") and path.name != "series.csv":
        text = re.sub(r"\b[0-9a-f]{64}\b", "KEY", path.read_text())
        yield from (",".join(str(rounded(number(word))) for word in line.split(",")) for line in text.splitlines())
    if path.suffix == ".html":
        text = re.sub(r"<(script|style).*?</\1>", "", path.read_text().replace(VERSION, "VERSION"), flags=re.S)
        # What rounding leaves.
        yield from re.sub(r">\d\.?\d*e-1\d<", ">0<", text).splitlines()
    if path.suffix in (".txt", ".md", ".yaml"):
        yield from path.read_text().splitlines()
    if path.name in ("comparison.json", "tune.json", "plan.json"):
        yield from lines_of(json.loads(path.read_text()))


def number(word: str) -> object:
    """Of a cell."""
    try:
        return float(word) if "." in word else word
    except ValueError:
        return word


TABLES = {"commands": Table(list(COMMANDS), ask)}
