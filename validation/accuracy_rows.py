"""Every comparable row of a measured server, simulated over measured: `sim/results/accuracy.csv`, made anew.

    python validation/accuracy_rows.py FOLDER [--part 0/2] [--out FILE]

FOLDER has what the other scripts here take: `silicon_sample.csv` (ai-dynamo/aiconfigurator, Apache-2.0), a checkout
`training` (inference-sim/training), a checkout `LLMServingSim` (casys-kaist/LLMServingSim, MIT) and
`vllm019-rtx4090` (of the same). Only our own ratios are written, beside what says which row is like which; nothing
measured is. `sim.results.accuracy` draws intervals from them. `--part I/N` takes every N-th row.

Medians and 99th percentiles are there where whole distributions were measured. Of closed-loop rows, which are means,
end to end is TTFT + (tokens - 1) x TPOT, and tokens/s is clients x tokens over that (Little's law), on both sides.
"""

import argparse
import csv
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import numpy as np
import vllm015_h100_stages as stages
import vllm019_dp_ep as over_ranks
import vllm019_rtx4090 as rtx4090
import vllm019_rtx_pro_6000 as rtx_pro_6000
import vllm_closed_loop as closed_loop
from numpy.typing import NDArray

from sim.cost.profile import SHIPPED
from sim.options.policies import parse_policy
from sim.options.scenario import Scenario
from sim.results.accuracy import METRICS, ROWS_FILE, kind_of
from sim.results.load import overload
from sim.results.result import assemble
from sim.run.prepare import prepare
from sim.run.runs import Run
from sim.run.simulate import build_run, execute_all
from sim.run.traffic import traffic

MOST_CLIENTS = 512
"""Rows of more clients are left out: they take minutes each."""
PERCENTS = {"median": 50, "p99": 99}
HEAD = ("server", "num_gpus", "layers", "gpu", "weights", "parallelism", "decoding", *METRICS)


def row_of(server: str, run: Run, ratios: dict[str, float], decoding: float) -> dict[str, str]:
    """A line of the file; `decoding` requests were past their first token in each engine, on average."""
    kind = kind_of(run.setup, decoding)
    num_gpus = str(run.setup.tp * len(run.engines))
    cells = {"server": server, "num_gpus": num_gpus, **kind._asdict(), "decoding": f"{decoding:.1f}"}
    del cells["load"]
    return cells | {name: f"{ratio:.4f}" for name, ratio in ratios.items()}


def decoding_in(run: Run) -> float:
    """Little's law over the whole run, for each engine."""
    log = run.log
    return (sum(log.e2el_s) - sum(log.ttft_s)) / log.duration_s / len(run.engines)


def statistic(name: str, times: dict[str, NDArray[np.float64]]) -> float:
    """The metric that results call `name`, such as `p99_ttft_ms`, of times by latency."""
    which, latency, _ = name.split("_")
    return float(times[latency].mean() if which == "mean" else np.percentile(times[latency], PERCENTS[which]))


def of_closed_loop(file: Path, part: int, parts: int) -> Iterator[dict[str, str]]:
    """Rows of `vllm_closed_loop.py`, each setting once."""
    with TemporaryDirectory() as folder:
        for name, asked in closed_loop.SERVED.items():
            if asked.sglang:
                continue  # intervals are of vLLM's runs
            served = closed_loop.with_graphs(asked, Path(folder))
            rows = {row.name: row for row in closed_loop.read(file, served) if row.concurrency <= MOST_CLIENTS}
            for row in list(rows.values())[part::parts]:
                run = closed_loop.replay(row, served)
                log = run.log
                tokens = log.output_tokens / log.completed
                ttft_ms, tpot_ms = 1e3 * fmean(log.ttft_s), 1e3 * fmean(log.tpot_s)
                e2el = (ttft_ms + (tokens - 1) * tpot_ms) / (row.ttft_ms + (tokens - 1) * row.tpot_ms)
                ratios = {
                    "mean_ttft_ms": ttft_ms / row.ttft_ms,
                    "mean_tpot_ms": tpot_ms / row.tpot_ms,
                    "mean_e2el_ms": e2el,
                    "output_throughput": 1 / e2el,
                }
                yield row_of(name, run, ratios, decoding_in(run))


def of_stages(folder: Path) -> Iterator[dict[str, str]]:
    """Rows of `vllm015_h100_stages.py`; of a stage whose queue grew to its end, TPOT alone."""
    for server in stages.read(folder):
        if any(stage.failed > stages.MOST_FAILED * stage.count for stage in server.stages):
            continue
        run = stages.replay(server, 0, hidden=True)
        log = run.log
        behind = overload(assemble(run)) is not None
        order, first = np.argsort(np.array(log.arrival_s), kind="stable"), 0
        for stage in server.stages:
            those = order[first : first + stage.count]
            first += stage.count
            times_ms = {
                "ttft": 1e3 * np.array(log.ttft_s)[those],
                "tpot": 1e3 * np.array(log.tpot_s)[those],
                "e2el": 1e3 * np.array(log.e2el_s)[those],
            }
            ratios = {name: statistic(name, times_ms) / measured_ms for name, measured_ms in stage.named.items()}
            if behind:
                ratios = {"mean_tpot_ms": ratios["mean_tpot_ms"]}
            decoding = stage.rate * float((times_ms["e2el"] - times_ms["ttft"]).mean()) / 1e3
            # Two checkpoints of one model have names of their own.
            name = server.name.rsplit("-", 1)[0].replace("-hf", "")
            yield row_of(name, run, ratios, decoding)


def of_requests(folder: Path, our4090: Path) -> Iterator[dict[str, str]]:
    """Rows of the three scripts of LLMServingSim's runs, request by request."""
    meta = json.loads((our4090 / "meta.json").read_text(encoding="utf-8"))
    yield _of_run("llama-3.1-8b-rtx-4090", our4090, rtx4090.scenario(our4090, meta, SHIPPED / "rtx-4090-imported.json"))
    gpu = rtx_pro_6000.GPU
    for server, (model, _, tp) in rtx_pro_6000.SERVERS.items():
        with TemporaryDirectory() as name:
            scratch = Path(name)
            rtx_pro_6000.convert(folder, server, scratch)
            asked = Scenario(
                trace=str(scratch / "trace.csv"), model=model, gpu=gpu, tp=tp, max_num_seqs=128,
                max_num_batched_tokens=2048,
            )  # fmt: skip
            yield _of_run(f"{model}-{gpu}", scratch, asked)
    with TemporaryDirectory() as name:
        scratch = Path(name)
        yield _of_run(f"{over_ranks.MODEL}-{gpu}-ranks", scratch, over_ranks.scenario(folder, scratch))


def _of_run(server: str, measured: Path, asked: Scenario) -> dict[str, str]:
    setup = prepare(asked, rtx4090.POLICY, parse_policy(rtx4090.POLICY, {})[1])
    run = execute_all(build_run(setup, traffic(asked)))
    there, log = rtx4090.read_measured(measured), run.log
    found_s = {"ttft": np.array(log.ttft_s), "tpot": np.array(log.tpot_s), "e2el": np.array(log.e2el_s)}
    measured_s = {"ttft": np.array(there["TTFT"]), "tpot": np.array(there["TPOT"]), "e2el": np.array(there["latency"])}
    ratios = {name: statistic(name, found_s) / statistic(name, measured_s) for name in METRICS if name.endswith("_ms")}
    return row_of(server, run, ratios, decoding_in(run))


def main() -> None:
    """Write the file, row by row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--part", default="0/1", help="I/N: every N-th row from the I-th on")
    parser.add_argument("--out", type=Path, default=ROWS_FILE)
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    sources = [folder / name for name in ("silicon_sample.csv", "training", "LLMServingSim", "vllm019-rtx4090")]
    if missing := [str(path) for path in sources if not path.exists()]:
        print(f"{', '.join(missing)}: not there, nothing to compare with")
        return
    silicon, training, llmservingsim, our4090 = sources
    part, parts = map(int, arguments.part.split("/"))
    with arguments.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, HEAD, restval="", lineterminator="\n")
        writer.writeheader()
        if part == 0:
            for row in (*of_requests(llmservingsim, our4090), *of_stages(training)):
                writer.writerow(row)
        for row in of_closed_loop(silicon, part, parts):
            writer.writerow(row)
            file.flush()


if __name__ == "__main__":
    main()
