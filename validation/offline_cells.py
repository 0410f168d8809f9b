"""What a scheduler reaches that knows every arrival and length: goodput between `adaptive`'s and the certified bound.

    python validation/offline_cells.py --out offline-cells.csv [--num-prompts 1000] [--link-gb-per-s 1.6]

It chooses which requests to serve: as many as can be done in time one after another, by the bound's prices and a share
of the engine's time, and of those as many as can have their prompts in time. They are simulated with `adaptive`'s
parts: the chosen with least laxity first, the others in what time is left. The best share counts. There may be better
schedules.
"""

import argparse
from bisect import insort
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from adaptive_cells import (
    SEEDS,
    UNIFORM,
    UNIFORM_LINKS_GB_PER_S,
    Cell,
    bound_of,
    figures,
    scenario_of,
    setup_of,
    write,
)
from rich.progress import track

from sim.bounds.goodput import deadlines
from sim.bounds.step_price import step_prices
from sim.bounds.work import Floats, least_work, priced
from sim.engine.sequence import Sequence
from sim.parts.catalogue import PLACES, register_part
from sim.results.goodput import Goodput
from sim.results.result import assemble
from sim.run.prepare import Setup
from sim.run.simulate import build_run, execute
from sim.run.traffic import traffic
from sim.systems.adaptive.options import AdaptiveOptions
from sim.systems.adaptive.preset import Adaptive
from sim.systems.adaptive.triage import HOPELESS, KEPT, Outlook, Triage
from sim.systems.builder import Builder
from traces.request import Request

SHARES_OF_TIME = (0.75, 0.85, 0.95)
PROMPT_MARGIN = 1.1
"""Prompts take so many times what they would alone."""


class ChosenOrder(Triage):
    """The chosen are kept as long as they can be in time; the others are hopeless, and wait behind them."""

    name: ClassVar[str] = "chosen"
    options: ClassVar[type | None] = AdaptiveOptions

    @classmethod
    def build(cls, b: Builder) -> "ChosenOrder":
        assert isinstance(b.policy, Offline)
        return cls(b.policy.chosen, b.policy.ttft_slo_s, b.policy.tpot_slo_s)

    def __init__(self, chosen: frozenset[int], ttft_slo_s: float, tpot_slo_s: float) -> None:
        super().__init__(ttft_slo_s, tpot_slo_s)
        self.chosen = chosen

    def class_of(self, seq: Sequence, outlook: Outlook, laxity_s: float) -> int:
        return KEPT if seq.request.request_id in self.chosen and laxity_s >= 0.0 else HOPELESS

    def rank_s(self, seq: Sequence, outlook: Outlook) -> float:
        """Of those with a first token the one that can wait longest leaves first and returns last."""
        return super().rank_s(seq, outlook) if seq.first_token_s < 0.0 else self.laxity_s(outlook, self.iteration_s())


@dataclass(frozen=True)
class Offline(Adaptive):
    """`adaptive` that is told which requests to serve."""

    composition: ClassVar[dict[str, str]] = Adaptive.composition | {"order": "chosen"}
    chosen: frozenset[int] = frozenset()


@contextmanager
def registered() -> Iterator[None]:
    """Its order is known, for as long as it runs."""
    register_part("order", "chosen", f"{__name__}:ChosenOrder")
    try:
        yield
    finally:
        del PLACES["order"]["chosen"]


def in_time(candidates: list[int], arrivals: Floats, due: Floats, seconds: Floats) -> list[int]:
    """As many as can be done when due, first come first served: when one is late, the longest since idle is left.

    That is Moore and Hodgson's rule, best where all are there at once. Where the next have yet to arrive, it may choose
    too many: the run says which were in time.
    """
    found: list[int] = []
    busy: list[tuple[float, int]] = []
    end_s = 0.0
    for i in candidates:
        if arrivals[i] >= end_s:
            found, busy, end_s = found + [j for _, j in busy], [], float(arrivals[i])
        insort(busy, (float(seconds[i]), i))
        end_s += seconds[i]
        if end_s > due[i]:
            end_s -= busy.pop()[0]
    return found + [i for _, i in busy]


def chosen(requests: list[Request], setup: Setup, slo: Goodput, share_of_time: float) -> frozenset[int]:
    """Requests to serve, were `share_of_time` of the engine's time put to use."""
    limits, cost = setup.limits, setup.cost
    work, _ = least_work(requests, limits, cost)
    prices = step_prices(cost, limits.block_size, limits.num_gpu_blocks)
    prefills, decodes = priced(work, prices, limits, cost, limits.max_num_seqs)
    least_s = (prefills + decodes)[:, (prefills + decodes).sum(axis=0).argmax()]
    arrivals = np.array([request.arrival_s for request in requests])
    first, last = deadlines(arrivals, np.array([request.output_tokens for request in requests]), [slo] * len(requests))
    candidates = [i for i, request in enumerate(requests) if request.prompt_tokens <= limits.max_model_len]
    found = sorted(in_time(candidates, arrivals, last, least_s / share_of_time))
    prompts = np.array([PROMPT_MARGIN * cost.prefill_s(request.prompt_tokens) for request in requests])
    return frozenset(requests[i].request_id for i in in_time(found, arrivals, first, prompts))


def row(cell: Cell, num_prompts: int) -> dict[str, object]:
    """The best of all shares of time."""
    scenario = scenario_of(cell, num_prompts)
    requests, slo = list(traffic(scenario)), Goodput.parse(cell.goodput)
    setup, bound = setup_of(cell, scenario, "adaptive:predictor=oracle"), bound_of(cell, num_prompts)
    runs = []
    for share in SHARES_OF_TIME:
        ids = chosen(requests, setup, slo, share)
        with registered():
            run = build_run(replace(setup, policy=Offline(predictor="oracle", chosen=ids)), requests)
        told = {"share_of_time": share, "chosen": len(ids)}
        runs.append(told | figures(assemble(execute(run)), slo, bound))
    return cell._asdict() | {"num_prompts": num_prompts} | max(runs, key=lambda run: float(str(run["goodput"])))


def main() -> None:
    """All uniform loads, a row each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="CSV to write")
    parser.add_argument("--num-prompts", type=int, default=1000)
    parser.add_argument("--link-gb-per-s", type=float, nargs="+", default=list(UNIFORM_LINKS_GB_PER_S))
    arguments = parser.parse_args()
    cells = [
        Cell(model, gpu, trace, rate, link, SEEDS[0])
        for link in arguments.link_gb_per_s
        for model, gpu, trace, rates in UNIFORM
        for rate in rates
    ]
    found: list[dict[str, object]] = []
    for cell in track(cells, description="cells"):
        found.append(row(cell, arguments.num_prompts))
        write(arguments.out, found)


if __name__ == "__main__":
    main()
