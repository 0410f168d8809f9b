"""The LayerKV paper's figures from simulations: every table and figure of docs/reproduction.md.

    python benchmarks/layerkv_figures.py            # all of it, minutes: rewrites docs/reproduction.md's tables
    python benchmarks/layerkv_figures.py --quick    # fewer points and requests, only printed

Every number is from `kvtwin compare`, started as a user would. A table replaces what stands in the page between
`<!-- table NAME -->` and `<!-- end -->`. Runs are kept under --work and not repeated when the same command is there.
"""

import argparse
import csv
import hashlib
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sim.cost.engine_profile import load_engine_profile  # noqa: E402
from sim.results.report import number  # noqa: E402
from sim.results.result import read_result  # noqa: E402
from sim.results.schema import Result  # noqa: E402

DOC = ROOT / "docs" / "reproduction.md"
FIGURES = ROOT / "docs" / "figures"
PROFILE = ROOT / "calib" / "profiles" / "l20-derived.json"

VLLM, LAYERKV, UNAWARE = "vllm-recompute", "layerkv", "layerkv:slo-aware=false"
STREAM, STREAM_UNAWARE = "layerkv:decode=stream", "layerkv:decode=stream,slo-aware=false"
PAPER, LITERAL = "layerkv:equations=paper", "layerkv:drop-irrecoverable=false"
BOTH = (VLLM, LAYERKV)
GPUS = {"llama-2-7b": 1, "yi-34b-200k": 2, "llama-3.1-70b": 4}
NAMES = {"llama-2-7b": "Llama-2-7B, 1 GPU", "yi-34b-200k": "Yi-34B, 2 GPUs", "llama-3.1-70b": "Llama-3.1-70B, 4 GPUs"}
RATES = {"llama-2-7b": (4.0, 7.0), "yi-34b-200k": (3.0, 6.0), "llama-3.1-70b": (3.0, 6.0)}
TTFT_SLO_S, TPOT_SLO_S = 3.0, 0.2
GOODPUT = ("--goodput", "ttft:3000", "tpot:200")
FIXED_MODEL_LEN, CHAT_MODEL_LEN = 17408, 4096
COLOURS = {VLLM: "#0072B2", LAYERKV: "#D55E00", STREAM_UNAWARE: "#009E73", LITERAL: "#CC79A7"}
LABELS = {
    VLLM: "vLLM",
    LAYERKV: "LayerKV",
    STREAM_UNAWARE: "LayerKV, stream, no SLO-aware scheduler",
    LITERAL: "LayerKV, Algorithm 1 as printed",
}

Rows = list[list[str]]


@dataclass(frozen=True)
class Outcome:
    """What one policy did in one comparison."""

    result: Result
    folder: Path

    def __getitem__(self, field: str) -> float:
        value = number(self.result, field)
        assert value is not None, f"{self.folder} has no {field}"
        return value

    @property
    def ttft_s(self) -> float:
        return self["mean_ttft_ms"] / 1e3

    @property
    def p99_ttft_s(self) -> float:
        return self["p99_ttft_ms"] / 1e3

    @property
    def queue_s(self) -> float:
        return self["mean_queue_ms"] / 1e3

    @property
    def prefill_s(self) -> float:
        return self.ttft_s - self.queue_s

    @property
    def tpot_ms(self) -> float:
        return self["mean_tpot_ms"]

    @property
    def rate(self) -> float:
        return self["request_throughput"]

    @property
    def blocks(self) -> int:
        return self.result.scenario.num_gpu_blocks

    def violations(self) -> tuple[float, float, float]:
        """Shares of requests, %, that violate either SLO, that of TTFT, that of TPOT."""
        rows = self.requests()
        ttft = [row["ttft_s"] > TTFT_SLO_S for row in rows]
        tpot = [row["tpot_s"] > TPOT_SLO_S for row in rows]
        either = sum(a or b for a, b in zip(ttft, tpot, strict=True))
        return either / len(rows) * 100, sum(ttft) / len(rows) * 100, sum(tpot) / len(rows) * 100

    def requests(self) -> list[dict[str, float]]:
        """The per-request table's numbers; a TPOT that a one-token answer lacks is 0."""
        columns = ("request_id", "arrival_s", "prompt_tokens", "output_tokens", "ttft_s", "tpot_s")
        if find_spec("pyarrow"):
            import pyarrow.parquet as parquet  # noqa: PLC0415 - an optional dependency

            rows = parquet.read_table(self.folder / "requests.parquet", columns=list(columns)).to_pylist()
        else:
            with (self.folder / "requests.csv").open(newline="") as file:
                rows = list(csv.DictReader(file))
        return [{name: float(row[name] or 0.0) for name in columns} for row in rows]


@dataclass
class Runner:
    """Runs comparisons, each once."""

    work: Path
    quick: bool
    done: dict[tuple[str, ...], dict[str, Outcome]] = field(default_factory=dict)

    def compare(self, policies: Sequence[str], *options: object) -> dict[str, Outcome]:
        """`kvtwin compare` with these options; outcomes by policy. Policies already run alike are not repeated."""
        words = tuple(str(option) for option in options)
        known = self.done.setdefault(words, {})
        missing = [policy for policy in policies if policy not in known]
        if missing:
            known |= self._run(missing, words)
        return known

    def _run(self, policies: Sequence[str], words: Sequence[str]) -> dict[str, Outcome]:
        arguments = [*(word for policy in policies for word in ("--policy", policy)), *words]
        folder = self.work / hashlib.sha256(" ".join(arguments).encode()).hexdigest()[:16]
        finished = folder / "comparison.json"
        start = time.monotonic()
        if not finished.exists():
            command = [sys.executable, "-W", "ignore", "-m", "kvtwin", "compare", "--quiet", *arguments]
            run = subprocess.run([*command, "--out", str(folder)], cwd=ROOT, capture_output=True, text=True)
            if run.returncode:
                raise SystemExit(f"kvtwin compare {' '.join(arguments)}\n{run.stderr}")
        print(f"[{len(self.done):3}] {time.monotonic() - start:5.1f} s  compare {' '.join(arguments)}", flush=True)
        outcomes = {}
        for path in folder.glob("*/result.json"):
            result = read_result(path)
            outcomes[result.policy] = Outcome(result, path.parent)
        return outcomes

    # -- the two kinds of traffic ------------------------------------------------------------------------------------

    def fixed(
        self,
        model: str,
        prompt: int,
        *options: object,
        policies: Sequence[str] = BOTH,
        tp: int | None = None,
        requests: int = 100,
        model_len: int | None = FIXED_MODEL_LEN,
    ) -> dict[str, Outcome]:
        """100 requests of one prompt length and 512 output tokens at 1 request/s."""
        limit = () if model_len is None else ("--max-model-len", model_len)
        traffic = ("--workload", "fixed", "--input-len", prompt, "--output-len", 512, "--request-rate", 1)
        served = ("--model", model, "--gpu", "l20", "--tp", tp or GPUS[model], *limit)
        return self.compare(policies, *traffic, "--num-prompts", requests, *served, *options)

    def chat(
        self,
        model: str,
        rate: float,
        *options: object,
        policies: Sequence[str] = BOTH,
        requests: int = 1000,
        seed: int = 0,
        model_len: int = CHAT_MODEL_LEN,
        workload: Sequence[object] = ("--workload", "sharegpt"),
    ) -> dict[str, Outcome]:
        """ShareGPT-like requests."""
        if self.quick:
            requests = min(requests, 200)
        arrivals = () if "--trace" in workload else ("--request-rate", rate)
        traffic = (*workload, *arrivals, "--num-prompts", requests, "--seed", seed)
        served = ("--model", model, "--gpu", "l20", "--tp", GPUS[model], "--max-model-len", model_len)
        return self.compare(policies, *traffic, *served, *GOODPUT, *options)

    def rates(self, model: str) -> list[float]:
        low, high = RATES[model]
        step = 1.5 if self.quick else 0.5
        return [low + step * i for i in range(round((high - low) / step) + 1)]

    def prompts(self, *lengths: int) -> list[int]:
        return [lengths[0], lengths[-1]] if self.quick else list(lengths)


# -- writing -----------------------------------------------------------------------------------------------------------


def digits(value: float, count: int = 3) -> str:
    """`count` significant digits, no exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = max(0, count - 1 - math.floor(math.log10(abs(value))))
    return f"{round(value, places):,.{places}f}"


def times(value: float) -> str:
    return f"{digits(value, 2 if value < 10 else 3)}x"


def loss(base: Outcome, other: Outcome) -> str:
    """Throughput lost against the base, %; a gain is negative."""
    value = (1.0 - other.rate / base.rate) * 100
    return f"{value:.1f} %" if abs(value) >= 0.05 else "0.0 %"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|:--|{'--:|' * (len(head) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def save(name: str, columns: int, rows: int, draw: Callable[[Any], None], folder: Path) -> None:
    """Draw one PNG of `columns` x `rows` axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - slow to import
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(3.6 * columns + 0.4, 2.7 * rows + 0.5), dpi=96, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
        axis.title.set_fontsize(9)
    draw(axes)
    for axis in axes.flat:
        axis.title.set_fontsize(9.5)
        axis.xaxis.label.set_fontsize(8.5)
        axis.yaxis.label.set_fontsize(8.5)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"reproduction-{name}.png"
    figure.savefig(path, metadata={"Software": None})
    print(f"      {path} ({path.stat().st_size / 1e3:.0f} kB)", flush=True)


def lengths_axis(axis: Any, lengths: Sequence[int]) -> None:  # noqa: ANN401 - matplotlib's
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
    axis.minorticks_off()
    axis.set_xlabel("prompt tokens")


def line(axis: Any, x: Sequence[float], y: Sequence[float], policy: str, label: str | None = None) -> None:  # noqa: ANN401
    axis.plot(x, y, marker="o", markersize=3.5, color=COLOURS[policy], label=label or LABELS[policy])


# -- the figures of the paper ------------------------------------------------------------------------------------------

Tables = dict[str, str]
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def figure_1(runner: Runner, folder: Path) -> Tables:
    model = "llama-2-7b"
    lengths = runner.prompts(*LENGTHS)
    found = [runner.fixed(model, n)[VLLM] for n in lengths]
    rows: Rows = []
    for i, (n, o) in enumerate(zip(lengths, found, strict=True)):
        slope = ""
        if i:
            before, ratio = found[i - 1], math.log(n / lengths[i - 1])
            slope = " / ".join(
                f"{math.log(b / a) / ratio:.1f}"
                for a, b in ((before.ttft_s, o.ttft_s), (before.prefill_s, o.prefill_s), (before.tpot_ms, o.tpot_ms))
            )
        share = f"{o.queue_s / o.ttft_s * 100:.0f} %"
        alone_s = runner.fixed(model, n, requests=1)[VLLM].prefill_s
        cells = (digits(o.ttft_s), digits(o.queue_s), digits(o.prefill_s), digits(alone_s), share, digits(o.tpot_ms))
        cells = (*cells, slope)
        rows.append([f"{n:,}", *cells])
    head = ["prompt", "TTFT (s)", "queueing (s)", "prefill (s)", "one prefill alone (s)", "queueing / TTFT"]
    tables = {"fig1": markdown([*head, "TPOT (ms)", "exponent of TTFT / prefill / TPOT"], rows)}

    sizes = (None, 2500, 2000, 1500)
    rows = []
    for n in runner.prompts(1024, 2048):
        for size in sizes:
            o = runner.fixed(model, n, *(() if size is None else ("--num-gpu-blocks-override", size)))[VLLM]
            share = f"{o.queue_s / o.ttft_s * 100:.0f} %"
            rows.append([f"{n:,}", f"{o.blocks:,}", digits(o.ttft_s), share, digits(o["mean_e2el_ms"] / 1e3)])
    tables["fig1-pool"] = markdown(["prompt", "KV blocks", "TTFT (s)", "queueing / TTFT", "end to end (s)"], rows)

    def draw(axes: Any) -> None:  # noqa: ANN401
        left, right = axes[0]
        left.plot(lengths, [o.ttft_s * 1e3 for o in found], marker="o", markersize=3.5, label="TTFT", color="#0072B2")
        left.plot(lengths, [o.tpot_ms for o in found], marker="s", markersize=3.5, label="TPOT", color="#D55E00")
        left.set_yscale("log")
        left.set_ylabel("mean, ms")
        left.set_title("(a) TTFT and TPOT, vLLM")
        queue, prefill = [o.queue_s * 1e3 for o in found], [o.prefill_s * 1e3 for o in found]
        right.plot(lengths, queue, marker="o", markersize=3.5, label="queueing", color="#0072B2")
        right.plot(lengths, prefill, marker="s", markersize=3.5, label="prefill", color="#009E73")
        right.set_yscale("log")
        right.set_title("(b) parts of TTFT, vLLM")
        for axis in (left, right):
            lengths_axis(axis, lengths)
            axis.legend(fontsize=8, frameon=False)

    save("fig1", 2, 1, draw, folder)
    return tables


def comparison_row(vllm: Outcome, layerkv: Outcome) -> list[str]:
    return [
        digits(vllm.ttft_s),
        digits(layerkv.ttft_s),
        times(vllm.ttft_s / layerkv.ttft_s),
        digits(vllm.rate),
        digits(layerkv.rate),
        loss(vllm, layerkv),
        digits(vllm.tpot_ms),
        digits(layerkv.tpot_ms),
    ]


COMPARISON = [
    "TTFT vLLM (s)",
    "TTFT LayerKV (s)",
    "vLLM / LayerKV",
    "vLLM (req/s)",
    "LayerKV (req/s)",
    "throughput lost",
    "TPOT vLLM (ms)",
    "TPOT LayerKV (ms)",
]


def figure_4(runner: Runner, folder: Path) -> Tables:
    lengths = runner.prompts(128, 512, 1024, 2048, 4096, 8192, 16384)
    policies = (*BOTH, UNAWARE)
    found = {model: [runner.fixed(model, n, policies=policies) for n in lengths] for model in GPUS}
    tables = {}
    for model, outcomes in found.items():
        rows = [
            [f"{n:,}", *comparison_row(o[VLLM], o[LAYERKV]), digits(o[UNAWARE].ttft_s)]
            for n, o in zip(lengths, outcomes, strict=True)
        ]
        head = ["prompt", *COMPARISON, "TTFT without SLO-aware scheduler (s)"]
        tables[f"fig4-{model}"] = markdown(head, rows)

    rows = []
    for model in ("yi-34b-200k", "llama-3.1-70b"):
        for n in runner.prompts(1024, 4096, 16384):
            o = runner.fixed(model, n, "--enable-chunked-prefill", policies=(*BOTH, UNAWARE), model_len=None)
            cells = (*comparison_row(o[VLLM], o[LAYERKV]), digits(o[UNAWARE].ttft_s))
            rows.append([f"{model}, {n:,}", f"{o[VLLM].blocks:,}", *cells])
    head = ["model, prompt", "KV blocks", *COMPARISON, "TTFT without SLO-aware scheduler (s)"]
    tables["fig4-chunked"] = markdown(head, rows)

    variants: dict[str, tuple[Sequence[str], tuple[object, ...], str]] = {
        "as above": (BOTH, (), LAYERKV),
        "1,500 GiB of host memory": (BOTH, ("--swap-space", 1500), LAYERKV),
        "1,500 GiB, no SLO-aware scheduler": ((VLLM, UNAWARE), ("--swap-space", 1500), UNAWARE),
        "no SLO-aware scheduler": ((VLLM, UNAWARE), (), UNAWARE),
        "`drop-irrecoverable=false`": ((VLLM, LITERAL), (), LITERAL),
        "`decode=stream`": ((VLLM, STREAM), (), STREAM),
        "`decode=stream`, no SLO-aware scheduler": ((VLLM, STREAM_UNAWARE), (), STREAM_UNAWARE),
        "`equations=paper`": ((VLLM, PAPER), (), PAPER),
    }
    rows = []
    for n in runner.prompts(4096, 16384):
        for name, (policies, options, shown) in variants.items():
            o = runner.fixed("llama-2-7b", n, *options, policies=policies)
            rows.append([f"{n:,}: {name}", *comparison_row(o[VLLM], o[shown])])
    for count in (50, 200, 400):
        o = runner.fixed("llama-2-7b", 16384, requests=count)
        rows.append([f"16,384: {count} requests", *comparison_row(o[VLLM], o[LAYERKV])])
    tables["fig4-variants"] = markdown(["prompt, variant", *COMPARISON], rows)

    # Eq. 4: copies of all layers against the prefill that is to hide them, each alone on its lane.
    rows = []
    for model in GPUS:
        counters = (o := found[model][-1][LAYERKV]).result.counters.policy
        moved = sum(counters.get(f"offloaded_{by}_layer_blocks", 0) for by in ("at_prefill", "by_forecast"))
        per_block_s = o.result.lanes.d2h.busy_s / moved
        for n in runner.prompts(128, 1024, 16384):
            prefill_s = runner.fixed(model, n, requests=1)[VLLM].prefill_s
            layers = {"llama-2-7b": 32, "yi-34b-200k": 60, "llama-3.1-70b": 80}[model]
            copy_s = per_block_s * layers * math.ceil(n / 16)
            cells = (digits(prefill_s * 1e3), digits(copy_s * 1e3), digits(copy_s / prefill_s, 2))
            rows.append([f"{model}, {n:,}", *cells])
    tables["eq4"] = markdown(["model, prompt", "prefill (ms)", "copy of all layers (ms)", "copy / prefill"], rows)

    def draw(axes: Any) -> None:  # noqa: ANN401
        for column, (model, outcomes) in enumerate(found.items()):
            top, bottom = axes[0][column], axes[1][column]
            for policy in BOTH:
                line(top, lengths, [o[policy].ttft_s for o in outcomes], policy)
            places = range(len(lengths))
            for shift, policy in ((-0.2, VLLM), (0.2, LAYERKV)):
                bars = [o[policy].rate for o in outcomes]
                bottom.bar([x + shift for x in places], bars, 0.38, color=COLOURS[policy], label=LABELS[policy])
            bottom.set_xticks(places, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
            bottom.set_xlabel("prompt tokens")
            top.set_yscale("log")
            top.set_title(NAMES[model])
            lengths_axis(top, lengths)
        axes[0][0].set_ylabel("mean TTFT, s")
        axes[1][0].set_ylabel("throughput, requests/s")
        axes[0][0].legend(fontsize=8, frameon=False)

    save("fig4", 3, 2, draw, folder)
    return tables


def figure_5(runner: Runner, folder: Path) -> Tables:
    model, groups = "yi-34b-200k", (2, 4, 8)
    lengths = runner.prompts(1024, 2048, 4096, 8192, 16384)
    policies = (*BOTH, UNAWARE)
    found = {tp: [runner.fixed(model, n, policies=policies, tp=tp) for n in lengths] for tp in groups}
    rows = [
        [f"{tp}, {n:,}", *comparison_row(o[VLLM], o[LAYERKV]), digits(o[UNAWARE].ttft_s)]
        for tp, outcomes in found.items()
        for n, o in zip(lengths, outcomes, strict=True)
    ]
    head = ["GPUs, prompt", *COMPARISON, "TTFT without SLO-aware scheduler (s)"]

    def draw(axes: Any) -> None:  # noqa: ANN401
        for axis, (tp, outcomes) in zip(axes[0], found.items(), strict=True):
            for policy in BOTH:
                line(axis, lengths, [o[policy].ttft_s for o in outcomes], policy)
            axis.set_yscale("log")
            axis.set_title(f"Yi-34B, {tp} GPUs")
            lengths_axis(axis, lengths)
        axes[0][0].set_ylabel("mean TTFT, s")
        axes[0][0].legend(fontsize=8, frameon=False)

    save("fig5", 3, 1, draw, folder)
    return {"fig5": markdown(head, rows), "regimes": regimes(runner)}


def regimes(runner: Runner) -> str:
    """TTFT of vLLM over LayerKV's, and LayerKV's TPOT, where small changes of the constants turn the scheduler over."""
    setups = (("llama-3.1-70b", 4, 2048), ("llama-3.1-70b", 4, 16384))
    setups = (*setups, ("yi-34b-200k", 4, 8192), ("yi-34b-200k", 4, 16384), ("yi-34b-200k", 8, 4096))
    profiles = {name: ("--profile", profile(runner.work, name, factors)) for name, factors in RATES_CHANGED.items()}
    rows: Rows = []
    for model, tp, n in setups[-1:] if runner.quick else setups:
        found = [
            runner.fixed(model, n, *options, policies=(*BOTH, UNAWARE), tp=tp) for options in ((), *profiles.values())
        ]
        for policy, name in ((LAYERKV, "with"), (UNAWARE, "without")):
            cells = [f"{times(o[VLLM].ttft_s / o[policy].ttft_s)}, {digits(o[policy].tpot_ms)} ms" for o in found]
            rows.append([f"{model}, {tp} GPUs, {n:,}: {name}", *cells])
    return markdown(["vLLM / LayerKV, LayerKV's TPOT", "as above", *profiles], rows)


def figure_6_7(runner: Runner, folder: Path) -> Tables:
    policies = (*BOTH, UNAWARE)
    found = {model: [runner.chat(model, rate, policies=policies) for rate in runner.rates(model)] for model in GPUS}
    tables = {}
    for model, outcomes in found.items():
        rows: Rows = []
        for rate, o in zip(runner.rates(model), outcomes, strict=True):
            vllm, layerkv = o[VLLM], o[LAYERKV]
            tails = (digits(vllm.p99_ttft_s), digits(layerkv.p99_ttft_s), times(vllm.p99_ttft_s / layerkv.p99_ttft_s))
            means = comparison_row(vllm, layerkv)
            rows.append([f"{rate:g}", *means[:3], *tails, *means[3:], digits(o[UNAWARE].ttft_s)])
        head = ["req/s", *COMPARISON[:3], "P99 vLLM (s)", "P99 LayerKV (s)", "vLLM / LayerKV", *COMPARISON[3:]]
        head.append("TTFT without SLO-aware scheduler (s)")
        tables[f"fig6-{model}"] = markdown(head, rows)

    rows = []
    for rate in (5.0, 6.0, 7.0):
        for count in (200, 500, 700, 1000, 2000, 5000):
            o = runner.chat("llama-2-7b", rate, requests=count)
            vllm, layerkv = o[VLLM], o[LAYERKV]
            cells = (digits(vllm.ttft_s), digits(layerkv.ttft_s), times(vllm.ttft_s / layerkv.ttft_s))
            tails = times(vllm.p99_ttft_s / layerkv.p99_ttft_s)
            rest = (loss(vllm, layerkv), digits(vllm.tpot_ms), digits(layerkv.tpot_ms))
            rows.append([f"{rate:g}, {count:,}", *cells, tails, *rest])
    head = ["req/s, requests", *COMPARISON[:3], "P99 vLLM / LayerKV", *COMPARISON[5:]]
    tables["run-length"] = markdown(head, rows)

    rows = []
    for model, rate in (("llama-2-7b", 6.0), ("yi-34b-200k", 4.0), ("llama-3.1-70b", 4.0)):
        for limit in (4096, 8192, 16384, 32768):
            o = runner.chat(model, rate, model_len=limit)
            vllm, layerkv = o[VLLM], o[LAYERKV]
            cells = (digits(vllm.ttft_s), digits(layerkv.ttft_s), digits(vllm.rate), digits(layerkv.rate))
            rows.append([f"{model}, {rate:g} req/s, {limit:,}", f"{vllm.blocks:,}", *cells])
    head = ["model, rate, --max-model-len", "KV blocks", *COMPARISON[:2], *COMPARISON[3:5]]
    tables["pool"] = markdown(head, rows)

    def draw(axes: Any) -> None:  # noqa: ANN401
        for column, (model, outcomes) in enumerate(found.items()):
            rates = runner.rates(model)
            for policy in BOTH:
                line(axes[0][column], rates, [o[policy].ttft_s for o in outcomes], policy)
                line(axes[1][column], rates, [o[policy].p99_ttft_s for o in outcomes], policy)
                line(axes[2][column], rates, [o[policy].rate for o in outcomes], policy)
            axes[0][column].set_title(NAMES[model])
            axes[0][column].set_yscale("log")
            axes[1][column].set_yscale("log")
            axes[2][column].set_ylim(0, 1.1 * max(o[policy].rate for o in outcomes for policy in BOTH))
            axes[2][column].set_xlabel("arrivals, requests/s")
        for row, name in zip(axes, ("mean TTFT, s", "P99 TTFT, s", "throughput, requests/s"), strict=True):
            row[0].set_ylabel(name)
        axes[0][0].legend(fontsize=8, frameon=False)

    save("fig6-7", 3, 3, draw, folder)
    return tables


def figure_8(runner: Runner, folder: Path) -> Tables:
    model, counts = "llama-2-7b", (500, 1000)
    policies = (VLLM, LAYERKV, UNAWARE, LITERAL, STREAM, STREAM_UNAWARE)
    rates = runner.rates(model)
    found = {count: [runner.chat(model, r, policies=policies, requests=count) for r in rates] for count in counts}
    rows: Rows = []
    for count, outcomes in found.items():
        for rate, o in zip(rates, outcomes, strict=True):
            shares = {policy: o[policy].violations() for policy in policies}
            vllm, layerkv = shares[VLLM], shares[LAYERKV]
            cells = [f"{either:.1f} ({ttft:.1f} / {tpot:.1f})" for either, ttft, tpot in (vllm, layerkv)]
            cells += [f"{vllm[0] - layerkv[0]:.1f}", *(f"{shares[policy][0]:.1f}" for policy in policies[2:])]
            rows.append([f"{count:,}, {rate:g}", *cells])
    head = [
        "requests, req/s",
        "vLLM (TTFT / TPOT)",
        "LayerKV (TTFT / TPOT)",
        "vLLM - LayerKV",
        "no SLO-aware scheduler",
    ]
    head += ["Algorithm 1 as printed", "stream", "stream, no SLO-aware scheduler"]
    tables = {"fig8": markdown(head, rows)}

    variants = (VLLM, LAYERKV, UNAWARE, LITERAL, STREAM, STREAM_UNAWARE, PAPER, "layerkv:predictor=bucket")
    variants = (*variants, "layerkv:equations=paper,slo-aware=false", "layerkv:predictor=none", "vllm-swap")
    rows = []
    for rate in (5.5, 6.0):
        o = runner.chat(model, rate, policies=variants)
        rows += [variant_row(f"{rate:g}: `{policy}`", o[policy], o[VLLM]) for policy in variants]
    tables["variants"] = markdown(["req/s: policy", *VARIANT], rows)

    def draw(axes: Any) -> None:  # noqa: ANN401
        for axis, (count, outcomes) in zip(axes[0], found.items(), strict=True):
            for policy in (VLLM, LAYERKV, STREAM_UNAWARE, LITERAL):
                line(axis, rates, [o[policy].violations()[0] for o in outcomes], policy)
            axis.set_title(f"Llama-2-7B, {count:,} requests a point")
            axis.set_xlabel("arrivals, requests/s")
            axis.set_ylim(0, 100)
        axes[0][0].set_ylabel("requests violating an SLO, %")
        axes[0][0].legend(fontsize=8, frameon=False)

    save("fig8", 2, 1, draw, folder)
    return tables


VARIANT = [
    "TTFT (s)",
    "P99 (s)",
    "vLLM / this",
    "TPOT (ms)",
    "P99 (ms)",
    "req/s",
    "throughput lost",
    "violations % (TTFT / TPOT)",
]


def variant_row(name: str, outcome: Outcome, base: Outcome) -> list[str]:
    ttft = (digits(outcome.ttft_s), digits(outcome.p99_ttft_s), times(base.ttft_s / outcome.ttft_s))
    tpot = (digits(outcome.tpot_ms), digits(outcome["p99_tpot_ms"]))
    either, late, slow = outcome.violations()
    return [name, *ttft, *tpot, digits(outcome.rate), loss(base, outcome), f"{either:.1f} ({late:.1f} / {slow:.1f})"]


def sensitivities(runner: Runner, folder: Path) -> Tables:
    """7B, 6 requests/s: what the numbers hang on that is not LayerKV's."""
    model, rate = "llama-2-7b", 6.0
    rows: Rows = []

    def add(
        name: str, *options: object, seed: int = 0, workload: Sequence[object] = ("--workload", "sharegpt")
    ) -> None:
        o = runner.chat(model, rate, *options, seed=seed, workload=workload)
        vllm, layerkv = o[VLLM], o[LAYERKV]
        shares = (f"{vllm.violations()[0]:.1f}", f"{layerkv.violations()[0]:.1f}")
        rows.append([name, *comparison_row(vllm, layerkv), *shares])

    add("as above (seed 0)")
    for seed in (1, 2, 3, 4):
        add(f"seed {seed}", seed=seed)
    for name, factors in {
        **RATES_CHANGED,
        "FLOP rate -20 %": {"flops_per_s": 0.8, "attention_flops_per_s": 0.8},
        "PCIe rate halved": {"h2d_bytes_per_s": 0.5, "d2h_bytes_per_s": 0.5},
    }.items():
        add(name, "--profile", profile(runner.work, name, factors))
    add("no host time", "--engine-profile", no_host_time(runner.work))
    # The roofline's corner unrounded: reading overlaps computing perfectly.
    add("roofline exponent 50", "--profile", profile(runner.work, "roofline exponent 50", {}, roofline_exponent=50.0))
    for blocks in (2800, 4200):
        add(f"{blocks:,} KV blocks", "--num-gpu-blocks-override", blocks)
    outcome = runner.chat(model, rate)[VLLM]
    add(
        "lengths fully correlated",
        workload=("--trace", ranked_trace(runner.work, outcome)),
    )
    add("all 161 and 338 tokens", workload=("--workload", "fixed", "--input-len", 161, "--output-len", 338))
    add("burstiness 0.5", "--burstiness", 0.5)
    return {"sensitivities": markdown(["7B, 6 req/s", *COMPARISON, "violations vLLM (%)", "LayerKV (%)"], rows)}


def no_host_time(work: Path) -> Path:
    """vLLM 0.5 as an engine whose own processes take no time."""
    engine = load_engine_profile("vllm-0.5")
    free = {name: structs.replace(constant, value=0.0) for name, constant in engine.constants.items()}
    path = work / "no-host-time.json"
    path.write_bytes(msgspec.json.encode(structs.replace(engine, name="no-host-time", constants=free)))
    return path


RATES_CHANGED: dict[str, dict[str, float]] = {
    "HBM rate +10 %": {"hbm_bytes_per_s": 1.1},
    "HBM rate -10 %": {"hbm_bytes_per_s": 0.9},
    "FLOP rate +10 %": {"flops_per_s": 1.1, "attention_flops_per_s": 1.1},
    "FLOP rate -10 %": {"flops_per_s": 0.9, "attention_flops_per_s": 0.9},
}


def profile(work: Path, name: str, factors: dict[str, float], **constants: float) -> Path:
    """The shipped profile with some constants times a factor and others as given, as a file."""
    values = json.loads(PROFILE.read_text())
    slug = "".join(c if c.isalnum() else "-" for c in name.lower().replace("-1", "minus 1"))
    for key, factor in factors.items():
        values["constants"][key]["value"] *= factor
    for key, value in constants.items():
        values["constants"][key]["value"] = value
    values["name"] = f"l20-derived-{slug}"
    path = work / f"{values['name']}.json"
    path.write_text(json.dumps(values))
    return path


def ranked_trace(work: Path, outcome: Outcome) -> Path:
    """The same arrivals, prompt and output lengths, but the longest prompt with the longest output and so on."""
    rows = sorted(outcome.requests(), key=lambda row: row["request_id"])
    outputs = sorted(row["output_tokens"] for row in rows)
    order = sorted(range(len(rows)), key=lambda i: rows[i]["prompt_tokens"])
    paired = dict(zip(order, outputs, strict=True))
    path = work / f"correlated-{len(rows)}.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("arrival_s", "prompt_tokens", "output_tokens"))
        writer.writerows((row["arrival_s"], int(row["prompt_tokens"]), int(paired[i])) for i, row in enumerate(rows))
    return path


# -- the command -------------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Runner, Path], Tables]] = {
    "fig1": figure_1,
    "fig4": figure_4,
    "fig5": figure_5,
    "fig6-7": figure_6_7,
    "fig8": figure_8,
    "sensitivities": sensitivities,
}


def fill_in(text: str, tables: Tables) -> str:
    """The page with its tables replaced."""
    for name, table in tables.items():
        start, end = f"<!-- table {name} -->", "<!-- end -->"
        before, mark, rest = text.partition(start)
        _, closing, after = rest.partition(end)
        if not mark or not closing:
            raise SystemExit(f"{DOC}: no {start} ... {end}")
        text = f"{before}{start}\n{table}\n{end}{after}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description="Reproduce the LayerKV paper's figures with kvtwin compare.")
    parser.add_argument("--quick", action="store_true", help="fewer points and requests; docs/ is not touched")
    parser.add_argument("--only", action="append", choices=PARTS, help="only these parts")
    parser.add_argument("--work", type=Path, help="keep the runs here and reuse them (default: a temporary folder)")
    arguments = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvtwin-layerkv-") as scratch:
        work = (arguments.work or Path(scratch)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        runner = Runner(work, arguments.quick)
        folder = work / "figures" if arguments.quick else FIGURES
        for name in arguments.only or PARTS:
            print(f"---- {name}", flush=True)
            tables = PARTS[name](runner, folder)
            if arguments.quick or not DOC.exists():
                for key, table in tables.items():
                    print(f"\n{key}\n{table}\n")
            else:
                DOC.write_text(fill_in(DOC.read_text(), tables))
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
