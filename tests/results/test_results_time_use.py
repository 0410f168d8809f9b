"""Where the time goes: parts that add up to the latency, counted once for all and, here, request by request."""

from collections import defaultdict
from math import isclose

import numpy as np
import pytest
from msgspec import UNSET, structs
from small_results import CROWDED, finished

from sim.engine.sequence import Sequence
from sim.options.policies import parse_policy
from sim.options.scenario import Scenario
from sim.results.result import assemble
from sim.results.time_use import LIMITS
from sim.run.prepare import prepare
from sim.run.runs import Recording
from sim.run.simulate import build_run, execute
from sim.run.traffic import traffic
from sim.systems import POLICIES
from traces.request import Request

SERIES = Recording(series=True)
POOLS = {name for name, kind in POLICIES.items() if kind.composition["stage"] == "hand-over"}
ALONE = [name for name in POLICIES if name not in POOLS]


def options_for(policy, **changes):
    values = {"workload": "sharegpt", "num_prompts": 40, "request_rate": 20.0, "num_gpu_blocks_override": 120}
    values |= {"num_cpu_blocks_override": 600, "max_model_len": 1024, "seed": 1}
    if policy == "pensieve":
        # With fewer it gives a request up on its way, whose time is in no latency.
        values["num_gpu_blocks_override"] = 160
    if policy in POOLS:
        values |= {"prefill_replicas": 1, "decode_replicas": 1, "link_gbps": 100.0}
    return Scenario(**(values | changes))


def total_s(parts):
    return sum(seconds or 0.0 for seconds in structs.astuple(parts))


@pytest.mark.parametrize("policy", POLICIES)
def test_parts_add_up_to_the_latency_and_watching_changes_nothing(policy):
    kept, plain = (assemble(finished(policy, keep, options_for(policy))) for keep in (SERIES, Recording()))
    parts = kept.latency_parts
    assert structs.replace(kept, latency_parts=UNSET) == plain
    assert total_s(parts) == pytest.approx(kept.mean_e2el_ms / 1e3, rel=1e-9)
    assert parts.queue_s == pytest.approx(kept.mean_queue_ms / 1e3, rel=1e-6)
    assert min(seconds or 0.0 for seconds in structs.astuple(parts)) >= -1e-6 * total_s(parts)


def test_time_with_tools_is_a_part_by_itself(tmp_path):
    """Four seconds with tools and no other request: next to nothing is left to be called preempted."""
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens,tool_calls\n0,30,20,5:1.5:8;9:2.5:8\n")
    for policy in ("infercept", "infercept:tool-kv=preserve"):
        parts = assemble(finished(policy, SERIES, Scenario(trace=str(path)))).latency_parts
        assert parts.tool_s == 4.0
        assert parts.preempted_s == pytest.approx(0.0, abs=0.01)


class ByRequest:
    """What `TimeUse` sums up, for every request: seconds in iterations and beside them while it is in the batch."""

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.inside_s, self.passed_s = defaultdict(float), defaultdict(float)
        self.seconds = 0.0

    def observe(self, plan, start_s, times):
        self.seconds += times.end_s - start_s
        in_batch = set(self.scheduler.batch.members)
        computed = {*(plan.decodes if plan.num_decodes else ()), *(chunk.seq for chunk in plan.chunks)}
        for seq in computed:
            self.inside_s[seq.request.request_id] += times.end_s - start_s
        partials = set(self.scheduler.batching.partials)
        for seq in (in_batch | partials) - computed:
            self.passed_s[seq.request.request_id] += times.end_s - start_s
        if self.scheduler.batching.schedules_ahead:
            for seq in {chunk.seq for chunk in plan.chunks if not chunk.seq.num_preemptions} - partials:
                self.passed_s[seq.request.request_id] += start_s - seq.first_scheduled_s


@pytest.mark.parametrize("policy", ALONE)
def test_sums_are_those_over_single_requests_and_jumping_changes_no_part(policy):
    found = []
    for jump in (True, False):
        setup = prepare(options_for(policy), policy, parse_policy(policy, {})[1])
        run = build_run(setup, traffic(setup.scenario), keep=SERIES, jump=jump)
        each = ByRequest(run.engines[0].scheduler)
        watch = run.instances[0].observer
        run.instances[0].observer = lambda *facts, each=each, watch=watch: (each.observe(*facts), watch(*facts))
        result = assemble(execute(run))
        parts = result.latency_parts
        inside_s = parts.prefill_s + parts.decode_s + parts.recompute_s + parts.copies_s + parts.engine_s
        assert inside_s * result.completed == pytest.approx(sum(each.inside_s.values()), rel=1e-9)
        assert parts.passed_s * result.completed == pytest.approx(sum(each.passed_s.values()), rel=1e-9, abs=1e-9)
        # No request has more than its latency, less its queueing.
        for place, request_id in enumerate(result.request_ids):
            spent_s = each.inside_s[request_id] + each.passed_s[request_id] + result.queue_times[place]
            assert spent_s <= result.latencies[place] * (1 + 1e-9)
        assert sum(run.engines[0].series.time_use.bound_s) == pytest.approx(each.seconds, rel=1e-9)
        found.append(structs.astuple(parts))
    for one, other in zip(*found, strict=True):
        assert isclose(one or 0.0, other or 0.0, rel_tol=1e-6, abs_tol=1e-6)


def test_what_is_scheduled_ahead_waits_for_others_and_is_not_preempted():
    roomy = options_for("vllm-v1", num_gpu_blocks_override=4000, request_rate=4.0)
    ahead, serial = (
        assemble(finished(f"vllm-v1:async-scheduling={flag}", SERIES, roomy)) for flag in ("true", "false")
    )
    assert ahead.num_preemptions == 0 and ahead.latency_parts.preempted_s == pytest.approx(0.0, abs=1e-9)
    assert ahead.latency_parts.passed_s > 0.0
    assert serial.latency_parts.passed_s == 0.0


def bound_of(policy="vllm-recompute", engine=0, **changes):
    """The limit that bound an engine for the longest time."""
    run = finished(policy, SERIES, options_for(policy, **changes))
    bound_s = run.engines[engine].series.time_use.bound_s
    return LIMITS[bound_s.index(max(bound_s))]


def test_each_limit_is_found_where_it_binds():
    plenty = {"num_gpu_blocks_override": 4000, "request_rate": 50.0}
    assert bound_of(request_rate=0.5, num_gpu_blocks_override=4000) == "compute"
    assert bound_of(request_rate=50.0) == "memory"
    assert bound_of(**plenty, max_num_seqs=4) == "seats"
    prompts = {"workload": "fixed", "input_len": 512, "output_len": 4}
    assert bound_of("sarathi", **plenty, **prompts, max_num_batched_tokens=64, max_num_seqs=64) == "tokens"
    assert bound_of("vllm-v1", **plenty, **prompts, max_num_batched_tokens=64, max_num_seqs=64) == "tokens"
    assert bound_of("fastertransformer", **plenty) == "policy"
    slow = finished("layerkv:tpot-slo-ms=16,drop-irrecoverable=false", SERIES, options_for("layerkv", **plenty))
    assert slow.engines[0].series.time_use.bound_s[LIMITS.index("slo")] > 0.0


@pytest.mark.parametrize("policy", sorted(POOLS))
def test_what_was_prefilled_elsewhere_waits_for_a_seat_or_the_link_and_lacks_no_memory(policy):
    """4,000 blocks are more than all need: two seats are few, and KV on its way keeps no request from starting."""
    plenty = {"num_gpu_blocks_override": 4000, "max_num_seqs": 2}
    assert bound_of(policy, 1, **plenty) == "seats"
    run = finished(policy, SERIES, options_for(policy, num_gpu_blocks_override=4000, link_gbps=10.0))
    bound_s = dict(zip(LIMITS, run.engines[1].series.time_use.bound_s, strict=True))
    assert bound_s["memory"] == bound_s["seats"] == 0.0 < bound_s["compute"]


def test_layers_on_their_way_back_are_on_the_link_and_lack_no_memory():
    """Of LayerKV's parked sequences those that wait for blocks lack memory; one that has them all does not."""
    run = build_run(prepare(options_for("layerkv"), "layerkv", parse_policy("layerkv", {})[1]), [], keep=SERIES)
    stage = run.engines[0].scheduler.stage
    one, other = (Sequence(Request(number, 0.0, 9, 9)) for number in (0, 1))
    assert stage.waits_for is None
    stage.promoting[one] = None
    assert stage.waits_for == "link"
    stage.waiting[other] = None
    assert stage.waits_for == "memory"


def test_what_cannot_be_told_is_left_out():
    assert assemble(finished("vllm-recompute", Recording(), CROWDED)).latency_parts is UNSET
    piped = options_for("vllm-recompute", pipeline_parallel_size=2)
    assert assemble(finished("vllm-recompute", SERIES, piped)).latency_parts is UNSET


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("vllm-recompute", {}),
        ("layerkv", {"num_gpu_blocks_override": 100}),
        ("vllm-v1:async-scheduling=true", {}),
        ("distserve", {"prefill_replicas": 1, "decode_replicas": 1, "link_gbps": 10.0}),
    ],
)
def test_the_series_of_idle_engines_has_nothing_in_it(text, options):
    quiet = Scenario(workload="fixed", num_prompts=12, request_rate=0.2, gpu="l20", input_len=900, **options)
    setup = prepare(quiet, *parse_policy(text, {}))
    run = execute(build_run(setup, traffic(quiet), keep=SERIES))
    result = assemble(run)
    present_s = 0.0
    for parts in run.engines:
        columns = {name: np.array(values) for name, values in parts.series.columns.items()}
        assert (np.diff(columns["time_s"]) > 0.0).all()
        here = sum(columns[f"num_{what}"] for what in ("waiting", "decoding", "swapped"))
        free = columns["gpu_free_blocks"] + columns["gpu_allocated_blocks"] - columns["gpu_released_blocks"]
        assert here[-1] == 0 and columns["gpu_free_blocks"][-1] == free[-1]
        present_s += float((here[:-1] * np.diff(columns["time_s"])).sum())
    # Little's law: requests present over time are their latencies, but for the front end and what waits for a boundary.
    assert present_s == pytest.approx(result.completed * result.mean_e2el_ms / 1e3, rel=0.05)
