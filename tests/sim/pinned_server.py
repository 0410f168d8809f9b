"""Fits to a server's run as they are pinned: iterations recovered, constants told, constants found from requests."""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
from goldens import digest, rough, rounded
from server_small import serve, setup

from calib.robust import Fit, Parameter
from calib.server import fit, requests
from calib.server.cli import report
from calib.server.iterations import predict_steps_s, replay
from sim.engine.plan import IterationPlan
from sim.prepare import Setup
from sim.served import Times
from traces.served import ServedRun, read_served

SHORT = {"workload": "uniform", "input_len": 500, "output_len": 12, "num_prompts": 24, "request_rate": 6.0}
CROWD = {"num_prompts": 40, "max_model_len": 1024, "request_rate": 20.0, "num_gpu_blocks_override": 120}
SERVERS: dict[str, dict[str, Any]] = {
    "pauses": {"request_rate": 0.3, "num_prompts": 12},
    "chunks": {**SHORT, "max_num_batched_tokens": 200},
    "one after the other": {"policy": "vllm-v1:async-scheduling=false", **SHORT, "request_rate": 30.0},
    "recomputed": {"policy": "vllm-recompute", **CROWD},
    "swapped": {"policy": "vllm-swap", **CROWD, "num_cpu_blocks_override": 200},
    "offloaded": {"policy": "vllm-v1:cpu-chunks=50", **CROWD},
    "streamed": {"policy": "layerkv:decode=stream", **CROWD, "num_cpu_blocks_override": 200},
}


def served_by(label: str, folder: str, **late: float) -> tuple[Setup, ServedRun]:
    """What was set up, and what it did."""
    described, path = setup(**SERVERS[label]), Path(folder) / "run.json"
    serve(described, path, **late)
    return described, read_served(path)


def sums(plan: IterationPlan | None) -> object:
    """What prices read of a plan, and how long its sequences are."""
    if plan is None:
        return None
    chunks = [(c.seq.num_tokens, c.num_new, c.num_cached) for c in plan.chunks]
    return plan.num_decodes, plan.decode_context_tokens, plan.prefill_tokens, plan.prefill_pairs, chunks


def iterations() -> Iterator[str]:
    """Steps recovered, of servers whose tokens come soon, late, and are not all seen."""
    with tempfile.TemporaryDirectory() as folder:
        for label in SERVERS:
            for late_s in (2e-4, 0.01):
                described, served = served_by(label, folder, late_s=late_s)
                half = replace(served, gaps_s=[gaps[: 5 * i] for i, gaps in enumerate(served.gaps_s)])
                count = len(served.requests)
                for seen, run, known in (("all", served, count), ("some", half, count // 2)):
                    found = replay(described, run, known)
                    steps = [
                        ([sums(plan) for plan in step.plans], step.seconds, sums(step.before)) for step in found.steps
                    ]
                    counts = len(found.steps), found.num_seen, found.matched, sum(step.seconds for step in found.steps)
                    priced = predict_steps_s(described.cost, found.steps[:50]).tolist()
                    yield f"{label}, {late_s} s late, {seen}: {rounded(counts)} {digest(steps)} {digest(priced)}"


def told() -> Iterator[str]:
    """What a run tells, and what is said of it."""
    with tempfile.TemporaryDirectory() as folder:
        for label, names in (("chunks", None), ("one after the other", None), ("recomputed", ["hbm_bytes_per_s"])):
            described, served = served_by(label, folder)
            found = fit.fit_server(described, served, name=label, constants=names)
            yield from (rough(line) for line in report(found).splitlines() if line)
            before, now = described.profile.constants, found.profile.constants
            for name, constant in now.items():
                if name not in before or before[name].value != constant.value:
                    yield rough(f"{name}: {float(constant.value)} {constant.unit} {constant.source}")
            yield f"of others {digest([now[name].source for name in before if now[name].value == before[name].value])}"
            yield rough(f"{found.profile.residuals}")


class FakeServer:
    """Requests whose TTFT and TPOT are sums of what each constant costs, and jump by a share as decisions do.

    Args:
        hidden: the constants; of rates 0.05 s is the cost of the mean request.
        jump: by which every other 1/997 s is more.
        scatter: of what is measured, relative.
    """

    def __init__(
        self, hidden: Mapping[str, float], *, jump: float = 0.0, scatter: float = 0.0, count: int = 80
    ) -> None:
        draw = np.random.default_rng(0)
        self.hidden, self.jump = hidden, jump
        self.outputs = draw.integers(1, 9, count)
        self.work = draw.lognormal(0.0, 1.0, (len(hidden), 2, count))
        self.factors = np.exp(scatter * draw.standard_normal((2, count)))

    @property
    def measured(self) -> Times:
        """What its client measured."""
        return self.times(self.hidden, self.factors)

    def times(self, values: Mapping[str, float], factors: np.ndarray | float = 1.0) -> Times:
        """With these constants."""
        found = np.zeros(self.work.shape[1:])
        for name, work in zip(self.hidden, self.work, strict=True):
            value = values[name]
            found += work * (value if name == requests.HOST else 0.05 * self.hidden[name] / value)
        found *= 1.0 + self.jump * (np.floor(997 * found) % 2)
        ttft_s, tpot_s = found * factors
        return Times(ttft_s, np.where(self.outputs > 1, tpot_s, np.nan), ttft_s + tpot_s)

    def fitted(self, known: int, parameters: Mapping[str, Parameter]) -> Fit:
        """`fit_requests` to what was measured."""
        with (
            patch.object(requests, "measured_times", lambda served: served.measured),
            patch.object(requests, "with_constants", lambda setup, values: values),
            patch.object(requests, "simulated_times", lambda values, served: served.times(values)),
        ):
            return requests.fit_requests(cast(Setup, None), cast(ServedRun, self), known, parameters)


HOST, RATE, OTHER = requests.HOST, "hbm_bytes_per_s", "flops_per_s"
HIDDEN = {HOST: 0.004, RATE: 1.5e12, OTHER: 2e14}
LOOKED_FOR = {
    HOST: Parameter(0.001, 0.0, 0.03, log=False),
    RATE: Parameter(9e11, 4e10, 2e12),
    OTHER: Parameter(2.8e14, 1e13, 3e14),
}


def found_from_requests() -> Iterator[str]:
    """Constants that fake servers hide: exactly, with scatter and jumps, at limits, and such as show nowhere."""
    servers = {
        "exact": FakeServer(HIDDEN), "scattered": FakeServer(HIDDEN, scatter=0.05),
        "jumping": FakeServer(HIDDEN, jump=0.1, scatter=0.02), "few": FakeServer(HIDDEN, jump=0.05, count=20),
        "no host": FakeServer(HIDDEN | {HOST: 0.0}), "beyond": FakeServer(HIDDEN | {RATE: 2.4e12}, scatter=0.03),
        "told together": FakeServer(HIDDEN, scatter=0.02), "shown nowhere": FakeServer(HIDDEN, scatter=0.02),
        "alone": FakeServer({RATE: 1.5e12}, jump=0.05, scatter=0.01),
    }  # fmt: skip
    servers["told together"].work[2] = servers["told together"].work[1]
    servers["shown nowhere"].work[2] = 0.0
    for label, server in servers.items():
        for known in (len(server.outputs), len(server.outputs) // 2):
            found = server.fitted(known, {name: LOOKED_FOR[name] for name in server.hidden})
            yield f"{label}, {known}: scatter {max(found.scatter, 1e-3):.3g}"
            for name, estimate in found.estimates.items():
                numbers = [f"{value:.3g}" for value in vars(estimate).values() if value is not None]
                # Where nothing tells a constant, the last digits say where it ends up.
                yield f"{label}, {known}: {name} {'not told' if 'inf' in numbers else numbers}"


PINNED = {"iterations": iterations, "told": told, "requests": found_from_requests}
