"""Statistics, predictions and samples of made-up figures, as they are pinned in `golden/numbers.txt`.

    python tests/sim/pinned_numbers.py      # writes golden/numbers.txt anew

What is folded, cut into pieces or thinned out in long runs alone is so here after a few values.
"""

import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from goldens import GOLDEN, digest, rounded, write
from pinned_engines import workload
from pinned_results import series_of
from small_results import lanes, small_result

from kvtwin.testing.engines import simulate
from sim.cost.pricing import Lanes
from sim.engine import itl
from sim.engine.itl import GapCollector
from sim.engine.predictor import BucketPredictor, build_predictor
from sim.engine.sequence import Sequence, Status
from sim.files import CsvTable, InOrder, folder_name
from sim.policy_options import parse_policy
from sim.results import metrics
from sim.results.figures.data import FigureRun, held, time_unit, together, waiting
from sim.results.figures.lanes import busy_shares
from sim.results.figures.memory import stretches
from sim.results.metrics import PERCENTILES, Goodput, RequestLog, gap_statistics, summary
from sim.results.series import Series
from traces.request import Request

NUMBERS = GOLDEN / "numbers.txt"
RUNS = 40


def gaps() -> Iterator[str]:
    """Exact, and folded some at a time."""
    for place in range(RUNS):
        rng = random.Random(f"gaps {place}")
        collector = GapCollector(rng.choice((3, 1000)), rng.choice((5, 10**6)))
        with patch.object(itl, "PIECE", rng.choice((1, 20, 1000))):
            for _ in range(rng.choice((0, 1, 2, 3, 25))):
                slope_s = rng.choice((0.0, 1e-4))
                collector.add((rng.choice((0.0, 0.01, 0.02, 1.0)), slope_s, rng.choice((1, 2, 30)), rng.choice((1, 7))))
                collector.bound_memory()
            found = collector.statistics(PERCENTILES)
        told = None if found is None else (found.count, bool(found.exact), found.mean, found.std, found.percentiles)
        yield f"gaps {place}: {rounded(told)} {digest(rounded(gap_statistics(found)))}"


def predictions() -> Iterator[str]:
    """Of lengths about the ends of classes."""
    lengths = (1, 2, 15, 16, 31, 32, 33, 63, 64, 100, 127, 128, 255, 256, 511, 512, 1023, 1024, 2047, 2048, 5000, 99999)
    for kind, accuracy in (("oracle", 0.85), ("none", 0.85), ("bucket", 1.0), ("bucket", 0.5), ("bucket", 0.0)):
        predictor = build_predictor(kind, accuracy, 3)
        yield f"{kind} {accuracy}: {[predictor.predict(Request(i, 0.0, 9, n)) for i, n in enumerate(lengths)]}"
    few = BucketPredictor(0.5, 11, (1, 10, 100))
    yield f"few classes: {[few.predict(Request(i, 0.0, 9, n)) for i, n in enumerate(lengths)]}"


def ended(rng: random.Random, place: int) -> Sequence:
    """A request that was completed, given up at once, or broken off."""
    seq = Sequence(Request(place, rng.choice((0.0, 0.5, 2.0, 3.5)), rng.choice((1, 100)), 9))
    arrival_s = seq.request.arrival_s
    seq.num_preemptions, seq.num_generated = rng.choice((0, 0, 2)), rng.choice((1, 1, 2, 9))
    kind = rng.choice(("done", "done", "done", "ignored", "broken"))
    if kind != "ignored":
        seq.first_scheduled_s = arrival_s + rng.choice((0.0, 0.25, 1.0))
        seq.first_token_s = seq.first_scheduled_s + 0.25
        seq.finish_s = seq.first_token_s + 0.125 * (seq.num_generated - 1)
    seq.status = Status.IGNORED if kind == "ignored" else Status.FINISHED
    seq.error = "" if kind == "done" else kind
    return seq


def logs() -> Iterator[str]:
    """Requests that ended, with what passes between client and engine; the most in flight, in pieces."""
    for place in range(RUNS):
        rng = random.Random(f"log {place}")
        rows: list[Any] = []
        table: Any = type("Rows", (), {"write": staticmethod(rows.append)})
        slo = rng.choice((None, Goodput(), Goodput(0.5, 0.125, 1.0), Goodput(ttft_s=0.51), Goodput(e2el_s=0.76)))
        log = RequestLog(rng.choice((None, table)), slo, rng.choice((0.0, 0.01)))
        with patch.object(metrics, "PIECE", rng.choice((1, 3, 100))), patch.object(metrics, "ARRAY_LIMIT", 20):
            for number in range(rng.choice((0, 1, 5, 20, 21))):
                log.end(ended(rng, number), rng.choice(((), (1,), (0, 2))))
            found = (
                log.completed,
                log.ignored,
                log.ended,
                log.num_broken_off,
                log.good,
                log.prompt_tokens,
                log.output_tokens,
            )
            more = log.duration_s, log.rate(7), log.max_concurrent_requests(), dict(log.ended_at), log.latencies()
        yield f"log {place}: {found} {digest(rounded([*more]))} {digest(rounded([log.requests, rows]))}"
    for count in (1, 2, 3, 10):
        yield f"summary of {count}: {rounded(summary(np.arange(count) ** 2.0, 'ttft'))}"


def samples() -> Iterator[str]:
    """Time series that are thinned out, again and again."""
    for name in ("vllm-recompute", "vllm-swap", "layerkv", "vllm-v1"):
        for limit in (2, 5, 16):
            policy, kept = parse_policy(name, {})[1], list[Series]()
            work = workload(policy, 4)

            def observe(scheduler: Any, limit: int = limit, kept: list[Series] = kept) -> Any:
                series = Series(scheduler, Lanes(), limit)
                kept.append(series)

                def hear(plan: Any, start_s: float, times: Any) -> None:
                    series.observe(plan, start_s, times)
                    series.rest(times.end_s + 0.5 * (len(series) % 2))

                return hear

            simulate(policy, work.arrivals, work.limits, machine=work.machine, checked=False, observe=observe)
            columns = {name: list(column) for name, column in kept[0].columns.items()}
            yield f"{name} {limit}: {len(kept[0])} rows {rounded(columns['time_s'])} {digest(rounded(columns))}"


def columns() -> Iterator[str]:
    """Several engines' series together, held between samples and averaged over stretches of time."""
    for place in range(RUNS):
        rng = np.random.default_rng(place)
        engines = [series_of(rng, 100, float(rng.choice((1.0, 90.0)))) for _ in range(int(rng.integers(1, 4)))]
        whole = together(engines)
        at_s = np.array([0.0, 0.3, 1.0, 50.0, 1e4])
        found = [
            held(engines[0], name, at_s).tolist() for name in ("gpu_free_blocks", "host_free_blocks", "num_waiting")
        ]
        yield f"columns {place}: {digest(rounded({name: c.tolist() for name, c in whole.items()}))} {digest(found)}"
        count = int(rng.integers(0, 6))
        arrival_s, queue_s = np.sort(rng.choice((0.0, 1.0, 2.5), count)), rng.choice((0.0, 1.0, 1.5), count)
        result = small_result(makespan_s=float(rng.choice((0.0, 40.0))), lanes=lanes(float(rng.choice((0.0, 30.0)))))
        run = FigureRun("a", result, whole, queue_s, queue_s, queue_s, queue_s, arrival_s if place % 3 else None)
        told = waiting(run)
        yield f"waiting: {None if told is None else [digest(rounded(it.tolist())) for it in told]}"
        if whole["time_s"].size:
            edges = np.linspace(0.0, 60.0, 13)
            busy = busy_shares(run, run.series, "compute_busy_s", "GPU compute", edges).tolist()
            last_s = max(50.0, float(whole["time_s"][-1]))
            parts = [it.tolist() for it in stretches(whole["time_s"], whole["num_waiting"], last_s, edges)]
            yield f"stretches: {digest(rounded(busy))} {digest(rounded(parts))}"
    yield repr([time_unit(span_s) for span_s in (0.0, 600.0, 600.5, 21_600.0, 21_601.0)])


def files() -> Iterator[str]:
    """Rows in order however they come; names of folders."""
    with tempfile.TemporaryDirectory() as folder, patch("sim.files.FLUSH_ROWS", 2):
        path = Path(folder) / "rows.csv"
        table = InOrder(CsvTable(path, ("a", "b", "c")))
        for number in (2, 0, 1, 5, 4):
            table.write((number, number / 3, f"word {number}"))
            yield f"{number}: {path.read_text().splitlines()}"
        table.close()
        yield repr(path.read_text())
    yield repr([folder_name(label) for label in ("a:b=c,d", "a/b c", "é-_.1")])


PINNED = {
    "gaps": gaps,
    "predictions": predictions,
    "logs": logs,
    "samples": samples,
    "columns": columns,
    "files": files,
}


def main() -> None:
    write(NUMBERS, PINNED)


if __name__ == "__main__":
    main()
