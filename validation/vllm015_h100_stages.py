"""vLLM 0.15 on H100 as measured and as simulated: four models of 7B to 70B, stage by stage, with shipped constants.

python validation/vllm015_h100_stages.py FOLDER    # a checkout of inference-sim/training

The folder has what inference-perf reported of vLLM 0.15.1 with its defaults (prefix cache, async scheduling): the
distributions of each load stage, not single requests. So arrivals are drawn as its client draws them: exponential gaps,
scaled to fill the stage. Its 10 x 10 prompts, ten to a system prompt, come in one shuffled order again and again, so
that from the second round on a prompt is in the cache whole. Nothing is fitted to these runs. Stages in which requests
failed (the client gives up after 300 s) are left out: simulated requests wait.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean, median

from errors import summary

from sim.options.policies import parse_policy
from sim.options.scenario import Scenario
from sim.run.prepare import prepare
from sim.run.runs import Run as Simulated
from sim.run.simulate import build_run, execute
from traces.request import Request

POLICY = "vllm-v1:async-scheduling={}"
GROUPS, PROMPTS_PER_GROUP = 10, 10
"""Defaults of inference-perf, which did not know the names in the runs' profiles; `results/config.yaml` has them."""
HASH_TOKENS = 16
PAUSE_S = 60.0
"""Between two stages: the client waits until all requests have ended."""
MOST_FAILED = 0.01
METRICS = ("mean TTFT", "median TTFT", "mean TPOT")


@dataclass(frozen=True)
class Stage:
    """A load stage: what was sent, and what was measured."""

    rate: float
    count: int
    failed: int
    prompt_tokens: list[tuple[float, float]]
    """Quantiles: share of prompts, length."""
    measured: dict[str, float]
    """By `METRICS`, ms."""
    named: dict[str, float]
    """These and others that were reported, ms, by their names in result.json."""


@dataclass(frozen=True)
class Run:
    """A server and the stages it was put through."""

    name: str
    config: Path
    tp: int
    limits: dict[str, int]
    system_tokens: int
    output_tokens: int
    stages: list[Stage]


def _settings(path: Path) -> dict[str, str]:
    """The flat YAML of `exp-config.yaml`."""
    return dict(line.split(": ", 1) for line in path.read_text(encoding="utf-8").splitlines())


def _stage(path: Path, output_tokens: int) -> Stage:
    """One report. TPOT is worked out of means: the client's own counts every token's chunk twice."""
    report = json.loads(path.read_text(encoding="utf-8"))
    done, load = report["successes"], report["load_summary"]
    levels = {"min": 0.0, "median": 0.5, "max": 1.0}
    lengths = done["prompt_len"]
    quantiles = {levels.get(key, float(key[1:]) / 100 if key[0] == "p" else -1.0): lengths[key] for key in lengths}
    latency_s, ttft_s = (done["latency"][key] for key in ("request_latency", "time_to_first_token"))
    tpot_s = (latency_s["mean"] - ttft_s["mean"]) / (output_tokens - 1)
    return Stage(
        load["requested_rate"],
        load["count"],
        report["failures"]["count"],
        sorted((share, tokens) for share, tokens in quantiles.items() if share >= 0),
        dict(zip(METRICS, (1e3 * ttft_s["mean"], 1e3 * ttft_s["median"], 1e3 * tpot_s), strict=True)),
        {
            **{f"{name}_ttft_ms": 1e3 * ttft_s[name] for name in ("mean", "median", "p99")},
            "mean_tpot_ms": 1e3 * tpot_s,
            **{f"{name}_e2el_ms": 1e3 * latency_s[name] for name in ("mean", "median", "p99")},
        },
    )


def read(folder: Path) -> Iterator[Run]:
    """The runs, by model and name."""
    paths = sorted((folder / "default_args").iterdir(), key=lambda path: path.name.split("-", 2)[2])
    for path in paths:
        settings = _settings(path / "exp-config.yaml")
        data = json.loads((path / "profile.yaml").read_text(encoding="utf-8"))["data"]["shared_prefix"]
        output_tokens = data["output_len"]
        yield Run(
            path.name.split("-", 2)[2],
            folder / "model_configs" / settings["model"].rpartition("/")[2] / "config.json",
            int(settings["tensor_parallelism"]),
            {name: int(settings[name]) for name in ("max_model_len", "max_num_batched_tokens", "max_num_seqs")},
            data["system_prompt_len"],
            output_tokens,
            [_stage(found, output_tokens) for found in sorted((path / "results").glob("stage_*"))],
        )


def _length(quantiles: list[tuple[float, float]], share: float) -> int:
    """The length at a share, on the line between the quantiles about it."""
    for (low, short), (high, long) in pairwise(quantiles):
        if share <= high:
            return round(short + (long - short) * (share - low) / (high - low))
    return round(quantiles[-1][1])


def requests(run: Run, random: Random) -> list[Request]:
    """What the client sent: drawn anew, since only distributions are known."""
    prompts = []
    for group in range(GROUPS):
        for _ in range(PROMPTS_PER_GROUP):
            tokens = _length(run.stages[0].prompt_tokens, random.random())
            shared = run.system_tokens // HASH_TOKENS
            own = range(shared, -(-tokens // HASH_TOKENS))
            first = GROUPS * shared + 1_000 * len(prompts)
            prompts.append((tokens, (*range(group * shared, (group + 1) * shared), *(first + i for i in own))))
    random.shuffle(prompts)
    sent: list[Request] = []
    start_s = 0.0
    for stage in run.stages:
        gaps = [random.expovariate(1.0) for _ in range(stage.count)]
        scale = stage.count / stage.rate / sum(gaps)
        for gap in gaps:
            start_s += scale * gap
            tokens, hash_ids = prompts[len(sent) % len(prompts)]
            sent.append(Request(len(sent), start_s, tokens, run.output_tokens, "", hash_ids, HASH_TOKENS))
        start_s += PAUSE_S
    return sent


def replay(run: Run, seed: int, hidden: bool) -> Simulated:
    """All its stages in one run, ended."""
    policy = POLICY.format(str(hidden).lower())
    deployed = replace(Scenario(workload="fixed", model=str(run.config), gpu="h100", tp=run.tp), **run.limits)
    return execute(build_run(prepare(deployed, policy, parse_policy(policy, {})[1]), requests(run, Random(seed))))


def simulate(run: Run, seed: int, hidden: bool) -> list[dict[str, float]]:
    """The same of each stage, simulated."""
    log = replay(run, seed, hidden).log
    order = sorted(range(log.completed), key=lambda i: log.arrival_s[i])
    ttft_ms, tpot_ms = ([1e3 * values[i] for i in order] for values in (log.ttft_s, log.tpot_s))
    found, first = [], 0
    for stage in run.stages:
        those = slice(first, first + stage.count)
        values = fmean(ttft_ms[those]), median(ttft_ms[those]), fmean(tpot_ms[those])
        found.append(dict(zip(METRICS, values, strict=True)))
        first += stage.count
    return found


def main() -> None:
    """Print every stage, and how far off they are together."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serial", action="store_true", help="without async scheduling")
    arguments = parser.parse_args()
    if not (arguments.folder / "default_args").is_dir():
        print(f"{arguments.folder / 'default_args'} is not there: nothing to compare with")
        return
    print(f"{'model, GPUs and load':<34}{'1/s':>4}" + "".join(f"{f'{name}, ms':>27}" for name in METRICS))
    errors: dict[str, list[dict[str, float]]] = {"dense": [], "mixture of experts": []}
    for run in read(arguments.folder):
        if any(stage.failed > MOST_FAILED * stage.count for stage in run.stages):
            print(f"{run.name:<34}{'':>4}   left out: requests failed")
            continue
        for stage, found in zip(run.stages, simulate(run, arguments.seed, not arguments.serial), strict=True):
            error = {name: found[name] / stage.measured[name] - 1 for name in METRICS}
            errors["mixture of experts" if run.name.startswith("mixtral") else "dense"].append(error)
            cells = (
                f"{stage.measured[name]:,.1f} / {found[name]:,.1f} {100 * error[name]:+6.1f} %" for name in METRICS
            )
            print(f"{run.name:<34}{stage.rate:>4g}" + "".join(f"{cell:>27}" for cell in cells), flush=True)
    for kind, those in errors.items():
        print(f"\n{kind}:")
        for name in METRICS:
            print(summary(name, [error[name] for error in those], "stages"))


if __name__ == "__main__":
    main()
