"""A run summed up as a `Result`; `result.json` and `series.csv`, written and read back."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, fields
from itertools import accumulate, pairwise, repeat
from math import inf
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, Struct, UnsetType, structs

from sim.cost.pricing import Lanes
from sim.engine.limits import Counters, Limits, TierCounters, TierName
from sim.errors import UserError
from sim.files import write_atomically
from sim.options.policies import options_of
from sim.results.accuracy import accuracy_of
from sim.results.contradictions import contradictions
from sim.results.metrics import ARRAY_LIMIT, PERCENTILES, TABLE_COLUMNS, RequestLog, gap_statistics
from sim.results.schema import Result
from sim.results.sections import (
    Counts,
    EngineUse,
    LanesUse,
    LaneUse,
    LatencyParts,
    ResolvedScenario,
    Scaling,
    SLOClass,
    TierUse,
    UsedEngineProfile,
    UsedProfile,
    Versions,
)
from sim.results.series import Series
from sim.results.time_use import latency_parts
from sim.run.prepare import Setup
from sim.run.runs import Run
from sim.specs.json_file import convert, read_json_object
from sim.version import VERSION, is_compiled

if TYPE_CHECKING:
    from sim.clock.autoscaled import Lifetime

RESULT_FILE = "result.json"
SERIES_FILE = "series.csv"
OPTIONS = {f.name: f.metadata for f in fields(ResolvedScenario)}
"""Fields of a result's scenario: options as `Scenario` declares them, and what they resolved to."""
COUNTED = [f.name for f in structs.fields(Counters) if f.type is int]
"""What engines count that adds up."""
MOST_SLO_CLASSES = 100
"""Of unlike SLOs; a trace that has more is not told class by class."""
OF_GOODPUT = "--goodput"
"""In the place of the SLOs of requests that have none of their own."""
NO_SLOS = "none"
"""The same without `--goodput`: all of them that complete are good."""
REJECTED = "rejected:"
"""How reasons begin for which a policy turns requests away."""
INFINITE = "inf"
"""How vLLM writes an infinite request rate."""


def assemble(run: Run) -> Result:
    """The result of a run that has ended; equal scenarios and seeds give equal ones."""
    setup, log, counters = run.setup, run.log, _together([parts.scheduler.counters for parts in run.engines])
    gaps = run.gaps.statistics(PERCENTILES)
    goodput = log.has_slos
    result = Result(
        backend=run.backend,
        model_id=setup.model.name,
        policy=setup.label,
        num_prompts=log.ended,
        request_rate=setup.scenario.request_rate,
        complete=not (run.interrupted or run.error),
        error=run.error or UNSET,
        duration=log.duration_s,
        completed=log.completed,
        ignored=log.ignored,
        failed=log.ignored,
        total_input_tokens=log.prompt_tokens,
        total_output_tokens=log.output_tokens,
        request_throughput=log.rate(log.completed),
        output_throughput=log.rate(log.output_tokens),
        total_token_throughput=log.rate(log.prompt_tokens + log.output_tokens),
        max_output_tokens_per_s=_most_tokens_per_s(log, run.detailed),
        max_concurrent_requests=log.max_concurrent_requests(),
        request_goodput=log.rate(log.good) if goodput else None,
        goodput_attainment=log.good / log.ended if goodput and log.ended else None,
        slo_classes=_slo_classes(log),
        rejected=sum(n for reason, n in counters.ignored.items() if reason.startswith(REJECTED)) or UNSET,
        **log.latencies(),
        **gap_statistics(gaps),
        itl_percentiles="exact" if gaps is None or gaps.exact else "from bins, within 0.01 %",
        latency_parts=_latency_parts(run),
        makespan_s=log.last_finish_s,
        num_iterations=sum(instance.iterations for instance in run.instances),
        num_preemptions=counters.preemptions,
        counters=Counts(
            **{name: getattr(counters, name) for name in COUNTED if name in Counts.__struct_fields__},
            prefix_evicted_blocks=sum(parts.scheduler.memory.num_evicted for parts in run.engines),
            ignored=dict(sorted(counters.ignored.items())),
            policy=dict(sorted(counters.policy.items())),
        ),
        lanes=_lanes_use([parts.lanes for parts in run.engines]),
        tiers=[TierUse(tier=name, **structs.asdict(tier)) for name, tier in counters.tiers.items()] or UNSET,
        engines=_engines(run) if len(run.engines) > 1 else UNSET,
        scaling=UNSET if run.lives is None else _scaling(run, run.lives),
        warnings=[*setup.warnings, *_warnings(setup, counters), *_grown(log, setup.limits), *_own_slos(setup, log)],
        scenario=_scenario(setup),
        profile=UsedProfile(
            name=setup.profile.name,
            status=setup.profile.status,
            sha256=setup.profile.content_hash,
            beyond_range=setup.cost.beyond or UNSET,
        ),
        engine_profile=_engine_profile(setup),
        versions=Versions(kvtwin=VERSION, compiled=is_compiled() or UNSET),
        machine=UNSET if run.machine is None else run.machine,
        decisions_sha256=_decisions(run),
        **_arrays(log, run.detailed),
    )
    return structs.replace(result, accuracy=accuracy_of(setup, result)) if run.backend == "kvtwin-sim" else result


def _slo_classes(log: RequestLog) -> list[SLOClass] | UnsetType:
    """By the SLOs that requests have, the most requests first."""
    if not log.by_slos or len(log.by_slos) > MOST_SLO_CLASSES:
        return UNSET
    counts = {str(slos): counted for slos, counted in log.by_slos.items()}
    ended, good = map(sum, zip(*counts.values(), strict=True))
    rows = [SLOClass(slos=slos, num_prompts=one.ended, good=one.good) for slos, one in counts.items()]
    if rest := log.ended - ended:
        others = NO_SLOS if log.goodput is None else OF_GOODPUT
        rows.append(SLOClass(slos=others, num_prompts=rest, good=log.good - good))
    return sorted(rows, key=lambda row: (-row.num_prompts, row.slos))


def _most_tokens_per_s(log: RequestLog, detailed: dict[int, list[float]] | None) -> int | UnsetType:
    """As `vllm bench serve` counts them, in seconds since the first arrival of a request that completed."""
    if detailed is None or log.requests is None:
        return UNSET
    done = [row for row in log.requests if not row.error]
    first_s = min((row.arrival_s for row in done), default=0.0)
    # The client's clock, as all times of the log.
    shift_s = log.front_end_s - first_s
    seconds = Counter(int(time_s + shift_s) for row in done for time_s in detailed.get(row.request_id, ()))
    return max(seconds.values(), default=0)


def _latency_parts(run: Run) -> LatencyParts | UnsetType:
    used = [parts.series.time_use for parts in run.engines if parts.series is not None]
    setup = run.setup
    # Iterations of a pipeline's batches overlap.
    is_pipelined = setup.pp > 1 or (setup.decode is not None and setup.decode.pp > 1)
    if not used or is_pipelined or run.interrupted or run.error:
        return UNSET
    return latency_parts(used, run.log, split=run.backend == "kvtwin-sim")


def _engine_profile(setup: Setup) -> UsedEngineProfile | UnsetType:
    used = setup.engine_profile
    return UNSET if used is None else UsedEngineProfile(name=used.name, sha256=used.content_hash, assumed=used.assumed)


def _decisions(run: Run) -> str | UnsetType:
    """The hash of a single engine's decisions, where it was kept."""
    log = run.engines[0].scheduler.decisions
    return UNSET if log is None or len(run.engines) > 1 else log.sha256


def _together(counters: list[Counters]) -> Counters:
    """Sums over the engines."""
    ignored: Counter[str] = Counter()
    policy: Counter[str] = Counter()
    tiers: dict[TierName, TierCounters] = {}
    for one in counters:
        ignored.update(one.ignored)
        policy.update(one.policy)
        for name, tier in one.tiers.items():
            tiers.setdefault(name, TierCounters()).add(tier)
    return Counters(
        **{name: sum(getattr(one, name) for one in counters) for name in COUNTED},
        ignored=dict(ignored),
        tiers=tiers,
        policy=defaultdict(int, policy),
    )


def _lanes_use(lanes: list[Lanes]) -> LanesUse:
    """Means over the engines."""
    every = ((one.compute, one.h2d, one.d2h, one.host, one.disk_read, one.disk_write) for one in lanes)
    uses = [LaneUse(busy_s=sum(lane.busy_s for lane in alike) / len(lanes)) for alike in zip(*every, strict=True)]
    host, read, write = (use if use.busy_s else UNSET for use in uses[3:])
    return LanesUse(compute=uses[0], h2d=uses[1], d2h=uses[2], host=host, disk_read=read, disk_write=write)


def _scaling(run: Run, lives: "list[Lifetime]") -> Scaling:
    """What replicas took, to the last token of any."""
    end_s = max([run.log.last_finish_s, *(life.stopped_s for life in lives if life.stopped_s < inf)])
    spans = [(life.asked_s, min(end_s, life.stopped_s)) for life in lives if life.asked_s < end_s]
    held_s = sum(stop - start for start, stop in spans)
    busy_s = sum(parts.lanes.compute.busy_s for parts in run.engines)
    starting_s = sum(min(life.ready_s, end_s, life.stopped_s) - life.asked_s for life in lives if life.asked_s < end_s)
    # One stops before another starts where both are at once.
    steps = sorted([(start, 1) for start, _ in spans] + [(stop, -1) for _, stop in spans])
    most = max(accumulate(change for _, change in steps), default=0)
    return Scaling(
        gpu_s=held_s * run.setup.tp,
        idle_share=1 - busy_s / held_s if held_s else 0.0,
        starting_share=starting_s / held_s if held_s else 0.0,
        fixed_gpu_s=most * end_s * run.setup.tp,
        num_started=sum(life.asked_s < life.ready_s for life in lives),
        most_replicas=most,
        mean_replicas=held_s / end_s if end_s else 0.0,
        asked_s=[life.asked_s for life in lives],
        ready_s=[life.ready_s for life in lives],
        drained_from_s=[_finite(life.drained_from_s) for life in lives],
        stopped_s=[_finite(life.stopped_s) for life in lives],
    )


def _finite(time_s: float) -> float | None:
    return time_s if time_s < inf else None


def _engines(run: Run) -> list[EngineUse]:
    return [
        EngineUse(
            engine=place,
            role=parts.setup.role,
            gpu=parts.setup.hardware.name,
            tp=parts.setup.tp,
            num_prompts=run.log.ended_at[place] + parts.scheduler.counters.policy.get("handed_over", 0),
            num_gpu_blocks=parts.setup.limits.num_gpu_blocks,
            num_iterations=instance.iterations,
            num_preemptions=parts.scheduler.counters.preemptions,
            lanes=_lanes_use([parts.lanes]),
            links={name: LaneUse(busy_s=lane.busy_s) for name, lane in parts.lanes.links.items()} or UNSET,
        )
        for place, (parts, instance) in enumerate(zip(run.engines, run.instances, strict=True))
    ]


PER_REQUEST = {
    "request_ids": "request_id",
    "start_times": "arrival_s",
    "input_lens": "prompt_tokens",
    "output_lens": "output_tokens",
    "queue_times": "queue_s",
    "ttfts": "ttft_s",
    "latencies": "e2el_s",
    "errors": "error",
}
"""Fields of a result with a value for every request, and the field of `EndedRequest` that it is."""


def _arrays(log: RequestLog, detailed: dict[int, list[float]] | None) -> dict[str, Any]:
    """The per-request arrays, if they were kept, in order of the trace."""
    if log.rows is None:
        return {"per_request": "more than 100000 requests: the arrays are in the per-request table"}
    rows, places = sorted(log.rows, key=itemgetter(0)), list(TABLE_COLUMNS)
    columns = {name: places.index(own) for name, own in PER_REQUEST.items() if own in TABLE_COLUMNS}
    arrays = {name: list(map(itemgetter(place), rows)) for name, place in columns.items()}
    arrays["errors"] = [log.errors.get(one, "") for one in arrays["request_ids"]]
    if detailed is not None:
        arrays["itls"] = [_gaps(detailed.get(one, [])) for one in arrays["request_ids"]]
    return arrays


def _gaps(times_s: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(times_s)]


def _warnings(setup: Setup, counters: Counters) -> list[str]:
    warnings: list[str] = []
    if counters.swap_space_exhausted:
        warnings.append(
            f"host KV blocks ran out {counters.swap_space_exhausted} times and the victims were recomputed "
            "(vLLM 0.5.5 aborts there); raise --swap-space"
        )
    for pool in (setup, setup.decode):
        warnings += _beyond_range(pool) if pool is not None else []
    for reason, count in sorted(counters.ignored.items()):
        warnings.append(f"{count} request{'s' * (count != 1)} ignored: {reason}{_limits_in(reason, setup.limits)}")
    return warnings


def _grown(log: RequestLog, limits: Limits) -> list[str]:
    """What is said where contexts became longer than the engine's limit."""
    most = limits.max_model_len
    if log.longest_tokens <= most or log.rows is None:
        return []
    grown = sum(row.prompt_tokens + row.output_tokens > most for row in log.requests or () if not row.error)
    return [
        f"{grown} context{'s' * (grown != 1)} grew past --max-model-len {most}: output lengths are the trace's; "
        "vLLM would have ended them there"
    ]


def _own_slos(setup: Setup, log: RequestLog) -> list[str]:
    """What is said where a policy keeps all requests to the same SLOs, and some have their own."""
    policy = setup.policy
    told = [one for one in (policy, *policy.mixed_options) if hasattr(one, "tpot_slo_ms")]
    if not log.by_slos or all(getattr(one, "keeps_own_slos", not getattr(one, "slo_aware", True)) for one in told):
        return []
    num = sum(ended for ended, _ in log.by_slos.values())
    return [f"{num:,} requests have SLOs of their own: goodput counts these, and {policy.name} keeps to its options'"]


def _limits_in(reason: str, limits: Limits) -> str:
    """What the limits are that a reason names, as their flags."""
    named = [name for name in ("max_model_len", "max_num_batched_tokens") if name in reason]
    found = ", ".join(f"--{name.replace('_', '-')} {getattr(limits, name)}" for name in named)
    return f" ({found})" if found else ""


def _beyond_range(setup: Setup) -> list[str]:
    """One warning for each quantity that was priced beyond what the constants were fitted on."""
    seen = setup.profile.range
    return [
        f"iterations of up to {most:,.0f} {name.replace('_', ' ')} were predicted, but {setup.profile.name} was fitted "
        f"up to {getattr(seen, name)[1]:,.0f}: those times are extrapolated"
        for name, most in sorted(setup.cost.beyond.items())
    ]


def _scenario(setup: Setup) -> ResolvedScenario:
    limits = {f.name: getattr(setup.limits, f.name) for f in fields(setup.limits) if f.name in OPTIONS}
    return ResolvedScenario(
        **(asdict(setup.scenario) | limits),
        policy=setup.policy.name,
        policy_options={option.name: getattr(setup.policy, option.name) for option in options_of(type(setup.policy))},
        policy_parts=setup.policy.names,
    )


def write_result(folder: Path, result: Result) -> Path:
    """Write `result.json`, in a fixed order; numbers that do not exist are null."""
    path = folder / RESULT_FILE
    write_atomically(path, msgspec.json.encode(result_data(result)) + b"\n")
    return path


def result_data(result: Result) -> dict[str, Any]:
    """What `result.json` holds, ready to be encoded."""
    data = _given(result)
    counts = structs.asdict(result.counters)
    policy = counts.pop("policy")
    data["counters"] = counts | policy
    data["scenario"] = _scenario_data(result.scenario)
    if result.request_rate == float("inf"):
        data["request_rate"] = data["scenario"]["request_rate"] = INFINITE
    return data


def _scenario_data(scenario: ResolvedScenario) -> dict[str, Any]:
    # 0 was given: a workload without a shared prefix.
    return {
        name: value
        for name, option in OPTIONS.items()
        if not (((value := getattr(scenario, name)) is None or value is False or value == ()) and option.get("sparse"))
    }


def _given(struct: Struct) -> dict[str, Any]:
    return {name: value for name, value in structs.asdict(struct).items() if value is not UNSET}


def read_result(path: Path) -> Result:
    """A `result.json`, as `assemble` made it; UserError naming file and field where it is none."""
    return result_from(read_json_object(path, finite=True), path)


def read_requests(folder: Path) -> Result:
    """The result in a run's folder, with its requests one by one. UserError where there is none, or it has them not."""
    path = folder / RESULT_FILE
    if not path.is_file():
        raise UserError(f"{folder}: no {RESULT_FILE}; give the folder of one run (of compare, that of a policy)")
    result = read_result(path)
    if result.request_ids is UNSET:
        raise UserError(f"{path}: {result.per_request}; explain reads runs of up to {ARRAY_LIMIT:,} requests")
    return result


def result_from(data: dict[str, Any], path: Path) -> Result:
    """The result that `result_data` gave; `path`, where it stands, is for the message."""
    for holder in (data, data.get("scenario")):
        if isinstance(holder, dict) and holder.get("request_rate") == INFINITE:
            holder["request_rate"] = float("inf")
    counts = data.get("counters")
    if isinstance(counts, dict):
        own = [name for name in Counts.__struct_fields__ if name != "policy"]
        policy = {name: value for name, value in counts.items() if name not in own}
        data["counters"] = {name: counts[name] for name in own if name in counts} | {"policy": policy}
    _check_options(data.get("scenario"), path)
    result = convert(data, Result, path)
    rows = {len(values) for name in PER_REQUEST if (values := getattr(result, name)) is not UNSET}
    if len(rows) > 1:
        raise UserError(f"{path}: {', '.join(PER_REQUEST)} are not all of one length; run it again")
    if told := next(contradictions(result), None):
        raise UserError(f"{path}: contradicts itself: {told}; run it again")
    return result


def _check_options(scenario: object, path: Path) -> None:
    """UserError where an option is missing: its default would be read instead."""
    for name, option in OPTIONS.items():
        if isinstance(scenario, dict) and name not in scenario and not option.get("sparse"):
            raise UserError(f"{path}: field scenario: Object missing required field `{name}`: correct the field")


def write_series(folder: Path, series: Sequence[Series]) -> None:
    """Write the time series of the engines as CSV: of several with the engine's place, rows in order of time."""
    columns = list(series[0].columns)
    rows = [row for place, one in enumerate(series) for row in zip(*one.columns.values(), repeat(place))]
    rows.sort(key=itemgetter(0))
    if len(series) > 1:
        columns.append("engine")
    line = ",".join(["%.9g"] * len(columns)) + "\n"
    lines = [",".join(columns) + "\n", *(line % row[: len(columns)] for row in rows)]
    write_atomically(folder / SERIES_FILE, "".join(lines).encode())
