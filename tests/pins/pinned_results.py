"""What is told and drawn of results that no run has left.

Their numbers are drawn from those at which words change: nothing, limits that are met exactly, missing values, ties,
one request and thousands, seconds and hours.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from msgspec import UNSET, structs
from pictures import picture
from pinned import Answers, Table, lines_of, rounded
from small_results import LATENCIES, counts, lanes, scenario, small_result

from sim.results.comparison import comparison_lines, markdown_lines
from sim.results.comparison_sentences import bound_sentences
from sim.results.figures import FIGURES
from sim.results.figures.data import FigureRun, Floats, together
from sim.results.load import offered, overload
from sim.results.metrics import names
from sim.results.page.charts import charts
from sim.results.report import metric_values, run_lines
from sim.results.schema import OVER_DRAWS, Bounds, Result, Spread
from sim.results.sections import EngineUse, LaneUse, LatencyParts, Machine, TierUse, UsedEngineProfile, UsedProfile
from sim.results.series import COLUMNS
from sim.results.time_use import LIMITS

SAID, CHARTS, PICTURES = 100, 30, 6
"""Comparisons that are told, and runs whose charts and pictures are drawn."""
LABELS = (
    "vllm-recompute", "layerkv:slo_aware=false,drop_irrecoverable=false,horizon_steps=16", "vllm-swap", "a|b",
    "sarathi", "orca", "kvpr", "radix:schedule-policy=dfs-weight", "hcache",
)  # fmt: skip
MS = (None, 0.0, 0.0123, 1.0, 40.0, 99.95, 100.0, 200.0, 999.4, 999.5, 5100.0, 12345.0, 999_499.0, 999_500.0, 3.6e6)
CHANGES = (1.0, 1.0, 1.01, 0.99, 1.0099, 0.985, 1.02, 2.0, 0.094, 0.095, 0.0949, 99.9, 100.0, 1e-4, 0.0)


def latencies(rng: random.Random) -> dict[str, float | None]:
    return {name: rng.choice(MS) for latency in LATENCIES for name in names(latency)}


def requests_of(rng: random.Random) -> dict[str, object]:
    """Times of each, on a grid, so that some are alike: few, many, all at once, an engine that keeps up or does not."""
    count, apart_s, late = rng.choice((0, 1, 2, 3, 30, 60, 200)), rng.choice((0.0, 0.25, 1.0)), rng.choice((0, 0, 1, 4))
    stay_s = rng.choice((0.5, 4.0, 16.0))
    begin_s = rng.choice((0.0, 3.0))
    starts = [begin_s + apart_s * place for place in range(count)]
    queues = [0.125 * late * place for place in range(count)]
    errors = [rng.choice(("", "", "", "too long")) if rng.random() < 0.3 else "" for _ in range(count)]
    return {
        "start_times": starts, "queue_times": queues, "latencies": [queue_s + stay_s for queue_s in queues],
        "ttfts": [queue_s + 0.25 for queue_s in queues], "errors": errors,
    }  # fmt: skip


def engine_of(rng: random.Random, place: int) -> EngineUse:
    links = rng.choice((UNSET, {}, {"a": LaneUse(busy_s=1.5), "b": LaneUse(busy_s=4.0)}))
    return EngineUse(
        engine=place, role=rng.choice(("both", "prefill", "decode")), gpu="l20", tp=rng.choice((1, 2)),
        num_prompts=rng.choice((0, 7, 12345)), num_gpu_blocks=3467, num_iterations=rng.choice((1, 99999)),
        num_preemptions=rng.choice((0, 1234)), lanes=lanes(rng.choice((0.0, 12.5, 300.0))), links=links,
    )  # fmt: skip


def machine_of(rng: random.Random, changes: dict[str, object]) -> dict[str, object]:
    """What ran, on what, and how it was used."""
    engines = rng.choice((UNSET, UNSET, 1, 2, 16, 17, 19))
    hits, busy = rng.choice((0, 90)), rng.choice((0.0, 50.5, 200.0))
    counted = structs.replace(
        counts(parked=rng.choice((0, 0, 1, 2, 1234))), prefix_query_tokens=rng.choice((0, 360)), prefix_hit_tokens=hits,
        prefix_rehit_tokens=rng.choice((0, 10)), swap_out_blocks=rng.choice((0, 0, 1234)),
        swap_in_blocks=rng.choice((0, 1)),
    )  # fmt: skip
    used = lanes(busy, busy / 4, busy / 8)
    if rng.random() < 0.4:
        used = structs.replace(used, host=LaneUse(busy_s=1.0), disk_read=LaneUse(busy_s=300.0))
    tiers = [
        TierUse(tier=tier, num_blocks=10_241, hit_tokens=rng.choice((0, 25)), num_loads=1, stored_blocks=1,
                evicted_blocks=0, saved_s=1234.5, lost_s=0.125)
        for tier in rng.choice(((), ("disk",), ("disk", "host"), ("host",)))
    ]  # fmt: skip
    asked = scenario(
        tp=rng.choice((1, 1, 2)), quantization=rng.choice((UNSET, "fp8")), kv_cache_dtype=rng.choice(("auto", "fp8")),
        request_rate=rng.choice((None, 2.5, float("inf"))), gpu=rng.choice(("l20", "l20", "cpu")),
        policy_options=rng.choice(({}, {"async_scheduling": False})), num_cpu_blocks=rng.choice((0, 512)),
        block_bytes=rng.choice((2**23, 7e5)),
        router=rng.choice((UNSET, "least-loaded")), enable_chunked_prefill=rng.random() < 0.5,
        policy_parts={"order": "fcfs"}, max_num_seqs=rng.choice((8, 4096)), num_gpu_blocks=rng.choice((100, 3467)),
        goodput=rng.choice(([], ["ttft:3000", "tpot:200"], ["ttft:0.5"], ["tpot:100000"])),
        prefill_replicas=rng.choice((UNSET, UNSET, 3)), decode_replicas=2, link_gbps=12.5,
        workload=rng.choice((None, "sharegpt")), trace=rng.choice((None, "a/folder/t.jsonl")),
    )  # fmt: skip
    profile = UsedProfile(
        name="l20", status=rng.choice(("measured", "derived", "measured-from-server")), sha256="09" * 32
    )
    assumed = rng.choice(([], ["step_s", "token_s"]))
    return changes | {
        "backend": rng.choice(("kvtwin-sim", "kvtwin-sim", "kvtwin-live")), "complete": rng.random() < 0.8,
        "error": rng.choice((UNSET, "it broke")), "counters": counted, "lanes": used,
        "tiers": tiers or rng.choice((UNSET, [])), "scenario": asked, "profile": profile,
        "engines": engines if engines is UNSET else [engine_of(rng, place) for place in range(engines)],
        "engine_profile": rng.choice((UNSET, UsedEngineProfile(name="e", sha256="ab" * 32, assumed=assumed))),
        "machine": rng.choice((UNSET, Machine(device="a card", torch="2", dtype="bfloat16", threads="4"))),
        "warnings": rng.choice(([], ["mind this", "and that"])),
    }  # fmt: skip


def result_of(rng: random.Random) -> Result:
    part_s = (None, 0.0, 5e-8, 1e-7, -2e-7, 0.25, 3.0)
    parts = {
        name: rng.choice(part_s[1:] if name[:2] not in ("co", "en") else part_s)
        for name in LatencyParts.__struct_fields__
        if name != "tool_s"
    }
    attained = rng.choice((None, 0.0, 0.0004, 0.5, 0.75, 1.0))
    changes: dict[str, object] = {
        "duration": rng.choice((0.0, 100.0)), "completed": rng.choice((0, 200, 200, 1234)),
        "ignored": rng.choice((0, 1, 2345)), "output_throughput": rng.choice((0.0, 400.0, 12345.0)),
        "request_goodput": None if attained is None else 2.0 * attained, "goodput_attainment": attained,
        "num_preemptions": rng.choice((0, 40, 4000)), "makespan_s": rng.choice((0.0, 101.0)),
        "num_prompts": rng.choice((200, 12345)), "latency_parts": rng.choice((UNSET, LatencyParts(**parts))),
    }  # fmt: skip
    changes |= {f"{name}_throughput": rng.choice((0.0, 2.0, 1400.0)) for name in ("request", "total_token")}
    changes |= requests_of(rng) if rng.random() < 0.8 else {}
    return small_result(**machine_of(rng, changes), **latencies(rng))


def beside(rng: random.Random, base: Result, label: str) -> Result:
    """Another of the same: each figure as it is, a little or far away, or missing."""
    other = structs.replace(result_of(rng), policy=label, scenario=base.scenario)
    if rng.random() < 0.3:
        return other
    figures = [name for name in base.__struct_fields__ if name.endswith(("_ms", "_throughput"))]
    factor = rng.choice((*CHANGES, None))
    kept = {}
    for name in (*figures, "goodput_attainment"):
        value, change = getattr(base, name), rng.choice(CHANGES) if factor is None else factor
        kept[name] = None if value is None or rng.random() < 0.03 else value * change
    for name in ("completed", "duration", "num_preemptions", "request_goodput"):
        kept[name] = getattr(base if rng.random() < 0.8 else other, name)
    return structs.replace(other, complete=rng.random() < 0.9, **kept)


def bounds_of(rng: random.Random, results: Sequence[Result]) -> Bounds:
    lifted = {
        "mean_ttft_ms": rng.choice(MS),
        "mean_tpot_ms": rng.choice(MS),
        "request_goodput": rng.choice((None, 0.0, 2.3456)),
    }
    return Bounds(
        goodput_bound=rng.choice((None, 0.0, 12.3456)),
        bound_shares={result.policy: rng.choice((0.0, 0.98765, 1.0)) for result in results[: rng.choice((0, 1, 9))]},
        lifted={result.policy: {"infinite PCIe": lifted} for result in results[: rng.choice((0, 1, 2))]},
        draws=5,
        over_draws={r.policy: dict(spreads_of(rng)) for r in results[1 : rng.choice((1, 2, 3))]},
    )


def spreads_of(rng: random.Random) -> Iterator[tuple[str, Spread]]:
    for name in rng.sample([*OVER_DRAWS], rng.randint(1, 3)):
        ratio, half = rng.choice((0.0123, 0.9, 1.0, 345.6)), rng.choice((0.0, 0.2))
        yield name, Spread(ratio, ratio * (1 - half), ratio * (1 + half))


def told_of(place: int) -> Iterator[str]:
    """What is said of one result or several."""
    rng = random.Random(f"words {place}")
    folder = Path("nowhere")
    base = structs.replace(result_of(rng), policy=LABELS[place % 9])
    results = [base, *(beside(rng, base, LABELS[i]) for i in range(rng.choice((0, 1, 1, 2, 3, 8))))]
    bounds = rng.choice((None, bounds_of(rng, results)))
    yield from run_lines(base, folder)
    yield from comparison_lines(results, folder, bounds, figures=place % 2 == 0)
    yield from markdown_lines(results, bounds, figures=place % 3 == 0)
    yield from bound_sentences(bounds or Bounds())
    for result in results:
        found = overload(result)
        yield f"{result.policy}: {rounded(metric_values(result))} {rounded(offered(result))} {found}"


# -- what is drawn -----------------------------------------------------------------------------------------------------


def times_of(rng: np.random.Generator, count: int) -> Floats:
    """On a grid, so that some are alike; of each kind of run another length."""
    scale_s = rng.choice((1e-3, 0.01, 0.25, 30.0))
    found = np.round(rng.exponential(4.0, count)) * scale_s
    return found if rng.random() < 0.4 else found + scale_s


def series_of(rng: np.random.Generator, total: int, span_s: float) -> dict[str, Floats]:
    """Of an engine: rows at times of which some are alike, or no row."""
    rows = int(rng.choice((0, 1, 2, 50, 700), p=(0.1, 0.15, 0.15, 0.4, 0.2)))
    found = {name: np.zeros(rows) for name in COLUMNS}
    step_s = span_s / max(1, rows)
    gaps_s = rng.choice((0.0, 0.5, 1.0, 1.5), rows) * step_s
    found["time_s"] = np.cumsum(gaps_s)
    used = rng.integers(0, total + 1, rows) * (rng.random() < 0.8)
    found["gpu_free_blocks"] = (total - used).astype(float)
    found["gpu_allocated_blocks"] = np.cumsum(np.r_[0, np.maximum(0, np.diff(used))])[:rows] + (
        used[0] if rows else 0.0
    )
    found["gpu_released_blocks"] = found["gpu_allocated_blocks"] - used
    found["host_free_blocks"] = rng.integers(300, 513, rows) * 1.0
    for name in ("num_waiting", "num_decoding", "num_swapped"):
        found[name] = rng.integers(0, 9, rows) * float(rng.random() < 0.7)
    for name, most in (("compute_busy_s", 1.2), ("h2d_busy_s", 0.3), ("d2h_busy_s", 0.02)):
        found[name] = np.cumsum(gaps_s * rng.uniform(0.0, most, rows)) * float(rng.random() < 0.7)
    limit = rng.integers(0, len(LIMITS), rows)
    for place, name in enumerate(LIMITS):
        found[f"bound_{name}_s"] = np.cumsum(np.where(limit == place, gaps_s, 0.0))
    return found


def figure_run(place: int, number: int, label: str) -> FigureRun:
    """One that could be: or one without requests, arrivals, samples or several engines."""
    words, rng = random.Random(f"drawn {place} {number}"), np.random.default_rng((place, number))
    result = structs.replace(result_of(words), policy=label)
    count = int(rng.choice((0, 1, 2, 40, 400, 5000), p=(0.1, 0.1, 0.1, 0.4, 0.2, 0.1)))
    span_s = float(rng.choice((0.0, 0.4, 90.0, 601.0, 30_000.0), p=(0.1, 0.1, 0.4, 0.2, 0.2)))
    queue_s, own_s, tpot_s = (times_of(rng, count) for _ in range(3))
    arrival_s = np.sort(np.round(rng.uniform(0.0, span_s, count), 1))
    total = result.scenario.num_gpu_blocks * words.choice((1, 1, 2))
    engines = tuple(series_of(rng, total, span_s) for _ in range(words.choice((1, 1, 1, 2, 3))))
    several = engines if len(engines) > 1 else ()
    series = together(engines)
    series = None if words.random() < 0.15 or not series["time_s"].size else series
    result = structs.replace(result, makespan_s=words.choice((0.0, span_s, span_s * 1.1)))
    run = FigureRun(label, result, series, queue_s + own_s, tpot_s, queue_s, arrival_s, several)
    return replace(run, arrival_s=None) if words.random() < 0.1 else run


def runs_of(place: int) -> list[FigureRun]:
    """One, some, or more than there are colours."""
    return [figure_run(place, number, LABELS[number]) for number in range(8 if place == 4 else 1 + place % 3)]


def pictures_of(place: int) -> Iterator[str]:
    """Of some runs."""
    runs = runs_of(place)
    for name, draw in FIGURES.items():
        yield from (name, *picture(draw(runs)))


def charts_of(place: int) -> Iterator[str]:
    """Those of a page."""
    for chart in charts(runs_of(place)):
        yield f"chart {chart.name} {chart.title!r} {chart.caption!r}"
        yield from (repr(chart.columns), *map(repr, chart.rows), *lines_of(rounded([chart.data, chart.layout], 5)))


KINDS = {"said": (SAID, told_of), "charts": (CHARTS, charts_of), "pictures": (PICTURES, pictures_of)}
TOGETHER = 10


def ask(name: str) -> Answers:
    """Several results, a question each."""
    kind, first = name.split()
    count, of = KINDS[kind]
    places = range(int(first), min(count, int(first) + TOGETHER))
    return {str(place): [line.rstrip() for line in of(place)] for place in places}


NAMES = [f"{kind} {first}" for kind, (count, _) in KINDS.items() for first in range(0, count, TOGETHER)]
TABLES = {"results": Table(NAMES, ask)}
