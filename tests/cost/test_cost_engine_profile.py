"""Engine profiles: host time, CUDA graphs and front end, against hand-worked numbers and the iterations one by one."""

import json
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_results import CROWDED, finished

import kvtwin
from kvtwin import main
from kvtwin.testing import limits, linear_machine, requests, simulate
from sim.clock.arrivals import Arrivals
from sim.clock.tokeniser import Tokeniser
from sim.cost.changed_profile import profile_named
from sim.cost.engine_profile import MEMORY_UNITS, OPTIONAL_UNITS, SHIPPED, UNITS, load_engine_profile, shipped_engines
from sim.cost.forms import build_cost
from sim.cost.host import Host
from sim.cost.launches import num_launches
from sim.cost.pricing import Lanes, Pricer
from sim.cost.profile import Constant, load_profile
from sim.engine.changes import Direction
from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence
from sim.errors import UserError
from sim.options.policies import parse_policy
from sim.options.scenario import Scenario
from sim.results.comparison_sentences import all_sentences
from sim.results.result import assemble
from sim.run.prepare import prepare
from sim.specs.hardware import load_hardware
from sim.specs.memory import OLDER
from sim.specs.models import load_model
from sim.study.sweep import engines_of_runs_differ
from sim.systems.vllm055 import VllmRecompute
from sim.systems.vllm_v1 import VllmV1
from traces.request import Request

# -- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shipped_engines())
def test_every_shipped_engine_says_where_each_constant_comes_from(name):
    profile = load_engine_profile(name)
    assert profile.name == name
    assert profile.constants.keys() - OPTIONAL_UNITS - MEMORY_UNITS.keys() == set(UNITS)
    for constant in profile.constants.values():
        assert len(constant.source) > 20
        assert (constant.status == "assumed") == constant.source.startswith("assumed: ")


def test_decode_batches_are_padded_to_the_next_captured_size():
    old, new = (load_engine_profile(name).padding() for name in ("vllm-0.5", "vllm-v1"))
    for padded in (old, new):
        assert [padded(n) for n in (1, 2, 3, 4, 5, 8, 9, 250, 256)] == [1, 2, 4, 4, 8, 8, 16, 256, 256]
    # Beyond the largest captured size nothing is padded.
    assert [old(n) for n in (257, 300)] == [257, 300]
    assert [new(n) for n in (257, 272, 273, 512, 513)] == [272, 272, 288, 512, 513]


PER_TOKEN = "front_end_s_per_token"


def edited(tmp_path, edit):
    data = json.loads((SHIPPED / "vllm-v1.json").read_text())
    edit(data)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data))
    return str(path)


def test_the_ends_of_what_is_allowed_are_taken(tmp_path):
    def edit(data):
        data["constants"]["host_base_s"]["value"], data["constants"]["front_end_s"]["value"] = 3600.0, 0.0
        data["graph_batch_sizes"] = [1, 2, 5]

    profile = load_engine_profile(edited(tmp_path, edit))
    assert (profile.value("host_base_s"), profile.value("front_end_s")) == (3600.0, 0.0)
    assert [profile.padding()(n) for n in (1, 2, 3, 4, 5, 6)] == [1, 2, 5, 5, 5, 6]
    # Without captured sizes nothing is padded.
    assert [msgspec.structs.replace(profile, graph_batch_sizes=()).padding()(n) for n in (1, 9)] == [1, 9]


def test_a_release_takes_the_memory_that_it_took():
    """vLLM samples without sorting from 0.17 on, counts graphs from 0.21 and drops MXFP4's scales from 0.24 on."""
    older, sorts_not, counts, todays = (
        load_engine_profile(f"vllm=={release}").memory() for release in ("0.16", "0.17", "0.21", "0.24")
    )
    left = 1 / 32
    assert older == load_engine_profile("vllm==0.11").memory() == msgspec.structs.replace(OLDER, mxfp4_left_bytes=left)
    assert todays == load_engine_profile("vllm-v1").memory() == load_engine_profile("vllm-v1-async").memory()
    assert counts == msgspec.structs.replace(todays, mxfp4_left_bytes=left)
    assert sorts_not == msgspec.structs.replace(counts, graph_bytes_per_layer=0.0) != counts


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(
        UserError, match=r"engine profile: 'vllm-v2' is neither a built-in name.*did you mean 'vllm-v1'"
    ):
        load_engine_profile("vllm-v2")


# -- host time, by hand ----------------------------------------------------------------------------------------------

PREFILL, DECODE = (0.010, 0.0, 0.0), (0.020, 0.0, 0.0)


def ends(host, policy=None, jump=True):
    """When the tokens of one request of four came, and the instance's lanes."""
    machine = linear_machine(1.0, prefill=PREFILL, decode=DECODE, host=host)
    outcome = simulate(
        policy or VllmRecompute(), requests((1.0, 8, 4)), limits(gpu=50), machine=machine, jump=jump, record=True
    )
    return outcome.tokens[0], outcome.lanes


@pytest.mark.parametrize("jump", [True, False])
def test_serial_host_time_is_added_to_every_iteration(jump):
    host = Host(0.004, 0.001, hidden=False)
    found, lanes = ends(host, jump=jump)
    assert found == pytest.approx([1.015, 1.040, 1.065, 1.090])
    assert lanes.compute.busy_s == pytest.approx(0.010 + 3 * 0.020)
    assert lanes.host.busy_s == pytest.approx(4 * 0.005)


@pytest.mark.parametrize("jump", [True, False])
@pytest.mark.parametrize(
    "policy", [VllmRecompute(), VllmV1(), VllmV1(async_scheduling=True)], ids=["v0", "v1", "async"]
)
def test_hidden_host_time_shows_at_first_and_where_the_gpu_is_faster(jump, policy):
    # The prefill takes 10 ms while the host prepares the next for 12: then 20 ms hide them.
    found, lanes = ends(Host(0.012, 0.0, hidden=True), policy, jump)
    assert found == pytest.approx([1.022, 1.044, 1.064, 1.084])
    assert lanes.compute.busy_s == pytest.approx(0.070)
    # Of 25 ms none is hidden whole: begins are 25 ms apart.
    found, _ = ends(Host(0.025, 0.0, hidden=True), policy, jump)
    assert found == pytest.approx([1.035, 1.070, 1.095, 1.120])


@settings(max_examples=300, deadline=None)
@given(
    gpu_ms=st.floats(1.0, 30.0),
    slope_us=st.sampled_from([0.0, 1.0, 300.0, 2000.0]),
    host_ms=st.floats(0.0, 40.0),
    hidden=st.booleans(),
    steps=st.integers(2, 60),
    until_ms=st.one_of(st.none(), st.floats(0.1, 900.0)),
)
def test_runs_of_iterations_are_the_iterations_one_by_one(gpu_ms, slope_us, host_ms, hidden, steps, until_ms):
    """Jumped and stepped, with the breakpoint where the GPU becomes slower than the host."""
    decode = (gpu_ms / 1e3, 0.0, slope_us / 1e6)
    until_s = float("inf") if until_ms is None else until_ms / 1e3

    def pricer():
        cost = linear_machine(decode=decode, host=Host(host_ms / 1e3, 0.0, hidden=hidden)).cost
        return Pricer(cost, Lanes(), lambda *_: None, layers=4, num_groups=1, block_bytes=1.0)

    def plan(done):
        found = IterationPlan()
        found.num_decodes, found.decode_context_tokens, found.max_steps = 1, done, steps - done
        return found

    jumping, stepping = pricer(), pricer()
    done, now_s = 0, 0.0
    while done < steps and now_s < until_s:
        times = jumping.run(plan(done), now_s, until_s)
        gaps = [times.first_end_s - now_s]
        gaps += [times.second_s + times.slope_s * i for i in range(times.iterations - 1)]
        for gap_s in gaps:
            one = stepping.step(plan(done), now_s)
            assert one.end_s - now_s == pytest.approx(gap_s, abs=1e-12)
            done, now_s = done + 1, one.end_s
        assert now_s == pytest.approx(times.end_s, abs=1e-12)
        assert done == steps or now_s >= until_s or host_ms > gpu_ms
    for name in ("compute", "host"):
        here, there = getattr(jumping.lanes, name), getattr(stepping.lanes, name)
        assert here.busy_s == pytest.approx(there.busy_s, abs=1e-9)
    assert jumping.lanes.host.free_s == pytest.approx(stepping.lanes.host.free_s, abs=1e-12) or not hidden


# -- CUDA graphs and predictions -------------------------------------------------------------------------------------


def roofline(engine, gpu="a100-80g"):
    hardware = load_hardware(gpu)
    return build_cost(load_model("llama-2-7b"), hardware, load_profile(None, hardware), 1, 1.0, engine=engine)


def test_padded_tokens_cost_linear_layers_and_nothing_else():
    plain, padded = roofline(None), roofline(load_engine_profile("vllm-0.5"))
    for batch, tokens in ((5, 8), (8, 8), (250, 256), (300, 300)):
        more = plain.linear_s(tokens) - plain.linear_s(batch)
        assert padded.decode_run(batch, 1000)[0] == pytest.approx(plain.decode_run(batch, 1000)[0] + more, rel=1e-12)
        assert padded.decode_run(batch, 1000)[1] == plain.decode_run(batch, 1000)[1]
    # A CPU has no graphs.
    plain, ours = roofline(None, "cpu"), roofline(load_engine_profile("kvtwin"), "cpu")
    assert ours.decode_run(5, 1000) == plain.decode_run(5, 1000)


def test_predictions_hold_serial_host_time():
    plain, serial = roofline(None), roofline(load_engine_profile("vllm-0.5"))
    assert serial.prefill_s(100) == pytest.approx(plain.prefill_s(100) + 0.005 + 5.5e-5)
    first_s, slope_s = plain.decode_run(8, 1000)
    assert serial.decode_steps(8, 1000) == pytest.approx((first_s + 0.005 + 8 * 5.5e-5, slope_s))
    hidden = roofline(load_engine_profile("vllm-v1-async"))
    assert hidden.decode_steps(8, 1000) == pytest.approx((first_s, slope_s))


def test_sampling_costs_by_token_and_vocabulary():
    """57.59 ms for 2,048 sequences and 131,072 entries, of which 128 sequences and 32,000 entries are 1/64."""
    sampling, greedy = (roofline(load_engine_profile(name)) for name in ("vllm-0.12-top-p", "vllm-v1"))
    assert sampling.decode_run(128, 1000)[0] - greedy.decode_run(128, 1000)[0] == pytest.approx(
        57.59e-3 / 16 * 32000 / 131072, rel=1e-3
    )
    assert sampling.decode_run(128, 1000)[1] == greedy.decode_run(128, 1000)[1]
    plan = IterationPlan()
    for new, prompt in ((40, 40), (40, 90)):
        plan.add_chunk(Sequence(Request(0, 0.0, prompt, 2)), new, None)  # type: ignore[arg-type]
    # A prompt's last chunk samples a token, others do not; decodes do.
    plan.num_decodes, plan.decode_context_tokens = 3, 300
    more_s = sampling.iteration_s(plan) - greedy.iteration_s(plan)
    assert more_s == pytest.approx(4 * 32000 * 2.145e-10)
    assert sampling.prefill_s(100) - greedy.prefill_s(100) == pytest.approx(32000 * 2.145e-10)


# -- runs ------------------------------------------------------------------------------------------------------------


def test_a_result_says_which_engine_priced_it_and_what_of_it_is_assumed():
    result = assemble(finished("vllm-recompute", options=replace(CROWDED, engine_profile="own")))
    used, shipped = result.engine_profile, load_engine_profile("vllm-0.5")
    assert (used.name, used.sha256, used.assumed) == (
        "vllm-0.5",
        shipped.content_hash,
        ["host_s_per_sequence", "front_end_s", "front_end_s_per_token"],
    )
    assert result.lanes.host.busy_s > 0
    other = assemble(finished("vllm-recompute", options=replace(CROWDED, engine_profile="kvtwin")))
    assert (other.engine_profile.name, other.scenario.engine_profile) == ("kvtwin", "kvtwin")
    assert other.engine_profile.sha256 != used.sha256


def test_one_engine_prices_all_policies_unless_each_is_to_have_its_own(tmp_path):
    """A profile fitted to a server brings that of the server; no host time hides behind batches in flight."""

    def engine(policy="layerkv", **options):
        options = {"workload": "fixed", "gpu": "a100-80g", **options}
        setup = prepare(Scenario(**options), *parse_policy(policy, {}))
        return setup.engine_profile.name

    assert [engine(name) for name in ("layerkv", "vllm-recompute", "vllm-v1")] == ["vllm-v1-async"] * 3
    own = [engine(name, engine_profile="own") for name in ("layerkv", "vllm-v1", "vllm-v1:async-scheduling=false")]
    assert own == ["vllm-0.5", "vllm-v1-async", "vllm-v1"]
    assert engine("vllm-recompute", pipeline_parallel_size=2) == "vllm-v1"
    assert engine("sglang:disable-overlap-schedule=true") == engine("vllm-v1:async-scheduling=false") == "vllm-v1"
    fitted = msgspec.structs.replace(load_profile("a100-80g-imported"), name="mine", engine_profile="vllm-0.5")
    (path := tmp_path / "mine.json").write_bytes(fitted.to_json())
    assert [engine(name, profile=str(path)) for name in ("layerkv", "vllm-v1")] == ["vllm-0.5"] * 2


def test_a_comparison_on_several_engines_says_so_first():
    own = replace(CROWDED, engine_profile="own")
    old, new = assemble(finished("vllm-recompute", options=own)), assemble(finished("vllm-v1", options=own))
    differ = "The engines differ (vllm-recompute on vllm-0.5; vllm-v1 on vllm-v1-async)"
    assert all_sentences([old, new], None)[0].startswith(differ)
    dumped = [json.loads(msgspec.json.encode(result)) for result in (old, new)]
    assert engines_of_runs_differ([None, *dumped]).startswith(differ)
    assert engines_of_runs_differ(dumped[:1] * 2) is None
    one = [assemble(finished(name)) for name in ("vllm-recompute", "vllm-v1")]
    assert all_sentences(one, None)[0] == "All on the engine vllm-v1-async."


LINEAR = {"form": "linear", "prefill": [0.01, 1e-5, 0.0], "decode": [0.02, 0.0, 0.0], "swap_s_per_block": 1e-3}


def test_linear_prices_are_all_there_is(tmp_path, capsys):
    path = tmp_path / "linear.json"
    path.write_text(json.dumps(LINEAR))
    result = assemble(finished("vllm-recompute", options=replace(CROWDED, profile=str(path))))
    assert result.engine_profile is msgspec.UNSET
    assert result.lanes.host is msgspec.UNSET
    words = [
        "run", "--workload", "fixed", "--profile", str(path), "--engine-profile", "vllm-v1", "--out", str(tmp_path),
    ]  # fmt: skip
    assert main(words) == 2
    assert "--engine-profile vllm-v1: prices of form linear are all there is" in capsys.readouterr().err


def with_front_end(tmp_path, seconds):
    def edit(data):
        data["constants"]["front_end_s"]["value"] = seconds

    return edited(tmp_path, edit)


def test_the_front_end_shifts_what_clients_see_and_no_decision(tmp_path):
    runs = [
        assemble(finished("vllm-v1", options=replace(CROWDED, engine_profile=with_front_end(tmp_path, seconds))))
        for seconds in (0.0, 0.25)
    ]
    for name in ("ttfts", "latencies", "queue_times"):
        for without, with_it in zip(*(getattr(run, name) for run in runs), strict=True):
            assert with_it == pytest.approx(without + 0.25)
    assert runs[1].mean_tpot_ms == pytest.approx(runs[0].mean_tpot_ms)
    assert runs[1].makespan_s == pytest.approx(runs[0].makespan_s + 0.25)


@pytest.mark.parametrize("closed", [{}, {"max_concurrency": 3}])
def test_prompts_wait_for_one_tokeniser(tmp_path, closed):
    """Short prompts sent after a long one reach the engine after it; clients measure from when they sent them."""
    path, prompts = tmp_path / "trace.csv", (1000, 500, 500, 500)

    def seen(s_per_token, arrivals_s):
        rows = [f"{arrival_s},{tokens},4" for arrival_s, tokens in zip(arrivals_s, prompts, strict=True)]
        path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]))
        constant = {"value": s_per_token, "unit": "s/token", "status": "assumed", "source": "made up"}
        profile = edited(tmp_path, lambda d: d["constants"].update(front_end_s_per_token=constant))
        changes = {"workload": None, "num_prompts": None, "request_rate": None, "trace": str(path), **closed}
        return assemble(finished("vllm-v1", options=replace(CROWDED, engine_profile=profile, **changes)))

    delayed = seen(2e-3, (0.0, 0.5, 0.625, 9.0))
    # By hand: 1,000 tokens take 2 s, and each of the others waits for those before it.
    plain = seen(0.0, (2.0, 3.0, 4.0, 10.0))
    assert delayed.start_times == pytest.approx([0.0, 0.5, 0.625, 9.0])
    for name in ("ttfts", "queue_times", "latencies"):
        waited = [a - b for a, b in zip(getattr(delayed, name), getattr(plain, name), strict=True)]
        assert waited == pytest.approx([2.0, 2.5, 3.375, 1.0])


@pytest.mark.parametrize(
    ("policy", "changes", "waited_s"),
    [
        ("vllm-v1", {"data_parallel_size": 2}, [2.0, 2.0]),
        ("sglang", {"data_parallel_size": 2}, [2.0, 4.0]),
        ("sglang", {"replicas": 2}, [2.0, 2.0]),
    ],
)
def test_ranks_of_sglang_share_a_tokeniser(tmp_path, policy, changes, waited_s):
    """Two prompts of 50 tokens at 40 ms each, one for either engine."""
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,50,4\n0,50,4\n")

    def ttfts(s_per_token):
        constant = {"value": s_per_token, "unit": "s/token", "status": "assumed", "source": "made up"}
        profile = edited(tmp_path, lambda d: d.update(host="hidden", constants=d["constants"] | {PER_TOKEN: constant}))
        shape = {"workload": None, "num_prompts": None, "request_rate": None, "trace": str(path), **changes}
        return assemble(finished(policy, options=replace(CROWDED, engine_profile=profile, **shape))).ttfts

    assert [a - b for a, b in zip(ttfts(0.04), ttfts(0.0), strict=True)] == pytest.approx(waited_s)


def test_each_server_tokenises_one_prompt_at_a_time():
    """Of two the one that is free first takes the next: a short prompt overtakes a long one, and waits for a short."""
    sent = [Request(0, 0.0, 1000, 1), Request(1, 0.5, 500, 1), Request(2, 0.625, 500, 1), Request(3, 9.0, 500, 1)]
    tokeniser, handed = Tokeniser(Arrivals(sent), 2e-3, num_servers=2), []
    while tokeniser.next_s < inf:
        tokeniser.deliver(tokeniser.next_s, handed.append)
    assert [(one.request_id, one.arrival_s) for one in handed] == [(1, 1.5), (0, 2.0), (2, 2.5), (3, 10.0)]


def test_clients_in_a_closed_loop_wait_for_the_front_end(tmp_path):
    """One at a time: each is sent when the answer before has come, front end included."""
    options = replace(
        CROWDED, workload="fixed", num_prompts=5, input_len=32, output_len=4, request_rate=float("inf"),
        max_concurrency=1, engine_profile=with_front_end(tmp_path, 0.25),
    )  # fmt: skip
    result = assemble(finished("vllm-v1", options=options))
    for (start_s, latency_s), (next_s, _) in pairwise(zip(result.start_times, result.latencies, strict=True)):
        assert latency_s > 0.25
        assert next_s == pytest.approx(start_s + latency_s)


def test_host_time_given_in_a_profile_is_refused_where_another_engine_prices_the_run():
    """It would change nothing, without a word."""
    told = "pieced_layer_s is of the engine that the profile was measured with, and vllm-v1 prices this run"
    with pytest.raises(UserError, match=told):
        load_engine_profile("vllm-v1").measured_by(profile_named("a100-80g-imported:pieced-layer-s=1e-3"))
    # A factor on all that the GPU does has the kernels to change.
    assert load_engine_profile("vllm-v1").measured_by(profile_named("a100-80g-imported:gpu_speed=2"))


def test_our_own_engine_takes_the_host_time_that_its_calibration_found():
    """But for what was carried over from another profile, which was not measured here; another engine's is not ours."""
    engine, profile = load_engine_profile("kvtwin"), load_profile("a100-80g-imported")
    assert engine.measured_by(profile) is engine

    def measured(base, each):
        found = {
            "step_overhead_s": Constant(0.003, 1e-5, "s", base),
            "step_s_per_sequence": Constant(4e-6, 1e-8, "s/sequence", each),
        }
        return msgspec.structs.replace(profile, status="measured", constants={**profile.constants, **found})

    ours = engine.measured_by(measured("fitted jointly", "fitted jointly"))
    assert ours.host_time().added_s(64) == pytest.approx(0.003 + 64 * 4e-6)
    assert ours.assumed == [] and ours.content_hash != engine.content_hash
    assert engine.measured_by(measured("carried over from x", "fitted jointly")).assumed == ["host_base_s"]
    assert engine.measured_by(measured("fitted jointly", "carried over from x")).assumed == ["host_s_per_sequence"]
    other = load_engine_profile("vllm-v1")
    assert other.measured_by(measured("fitted jointly", "fitted jointly")) is other


def test_layers_with_prompts_last_as_long_as_our_engine_takes_to_launch_them():
    """By piece up to 512 tokens; those of decodes come from a graph; of long prompts the GPU takes longer; another
    engine's launches are its own."""
    profile = load_profile("h100-imported")
    found = {
        "step_overhead_s": Constant(0.0, None, "s", "fitted"),
        "eager_layer_s": Constant(2e-4, None, "s", "fitted"),
        "pieced_layer_s": Constant(1e-4, None, "s", "fitted"),
    }
    profile = msgspec.structs.replace(profile, status="measured", constants={**profile.constants, **found})
    model, hardware = load_model("qwen3-0.6b"), load_hardware("h100")

    def prompt_s(engine, tokens):
        engine = load_engine_profile(engine).measured_by(profile)
        cost = build_cost(model, hardware, profile, 1, 1e6, None, engine)
        return cost.prefill_s(tokens) - cost.head_s(1) - cost.added_host_s(1)

    ours, other = prompt_s("kvtwin", 16), prompt_s("vllm-v1", 16)
    assert ours == prompt_s("kvtwin", 512) == pytest.approx(28 * 1e-4) and other < ours
    assert prompt_s("kvtwin", 513) == pytest.approx(28 * 2e-4)
    long_s = prompt_s("kvtwin", 16_384)
    assert long_s == pytest.approx(prompt_s("vllm-v1", 16_384)) and long_s > ours


@pytest.mark.parametrize(("engine", "pieces"), [("kvtwin", 5), ("vllm-0.5", 2 * 32 * 5)])
def test_blocks_are_copied_in_the_pieces_that_the_engine_asks_for(engine, pieces):
    hardware = load_hardware("a100-80g")
    profile = load_profile("a100-80g-imported")
    model = load_model("llama-2-7b")
    cost = build_cost(model, hardware, profile, 1, 2.0**23, engine=load_engine_profile(engine))
    assert cost.num_copies(5, 32) == pieces
    # Too short to be on their way longer than it takes to ask for them.
    assert cost.copy_s(1.0, pieces, Direction.H2D) == pieces * profile.value("copy_launch_s")


def test_the_page_has_the_constants_of_every_shipped_engine():
    page = (Path(kvtwin.__file__).parents[1] / "docs" / "accuracy.md").read_text(encoding="utf-8")
    for name in shipped_engines():
        profile = load_engine_profile(name)
        cells = (
            next(line for line in page.splitlines() if line.startswith(f"| `{name}` |")).strip("| ").split(" | ")[2:]
        )
        shown = [profile.host]
        for constant, scale, unit in (
            ("host_base_s", 1e3, "ms"),
            ("host_s_per_sequence", 1e6, "us"),
            ("front_end_s", 1e3, "ms"),
            ("front_end_s_per_token", 1e6, "us"),
        ):
            marked = " (assumed)" if constant in profile.assumed else ""
            shown.append(f"{profile.value(constant) * scale:g} {unit}{marked}")
        assert cells == shown


# -- iterations that no graph was captured for ------------------------------------------------------------------------

LAUNCHES_S = 48 * 17 * 4.2e-5
"""Of Qwen3-30B-A3B over two GPUs: attention 6, experts 9 and two all-reduces a layer."""


def launched(max_num_seqs=256, asked=None, model="qwen3-30b-a3b", tp=2):
    hardware, engine = load_hardware("h100"), load_engine_profile("vllm-v1-async").sized(max_num_seqs, asked)
    return build_cost(load_model(model), hardware, load_profile(None, hardware), tp, 1.0, engine=engine)


@pytest.mark.parametrize(("max_num_seqs", "asked", "largest"), [(256, None, 512), (4, None, 8), (4, 2048, 2048)])
def test_the_host_launches_prompts_beyond_the_largest_graph(max_num_seqs, asked, largest):
    cost = launched(max_num_seqs, asked)
    assert cost.prefill_s(largest) < LAUNCHES_S
    assert cost.prefill_s(largest + 1) == pytest.approx(max(LAUNCHES_S, launched(asked=4096).prefill_s(largest + 1)))
    assert cost.prefill_s(8192) == launched(asked=16_384).prefill_s(8192) > LAUNCHES_S


def test_decodes_beyond_the_largest_graph_last_as_long_as_launching_until_the_gpu_takes_longer():
    cost, free = launched(), launched(asked=4096)
    assert cost.decode_run(512, 512) == free.decode_run(512, 512) and cost.straight_steps(512, 512) == inf
    assert cost.decode_run(528, 528 * 10) == (pytest.approx(LAUNCHES_S), 0.0)
    steps = cost.straight_steps(528, 528 * 10)
    first_s, slope_s = free.decode_run(528, 528 * 10)
    assert first_s + slope_s * (steps - 1) < LAUNCHES_S <= first_s + slope_s * steps
    later = 528 * (10 + steps)
    assert cost.decode_run(528, later) == free.decode_run(528, later) and cost.straight_steps(528, later) == inf


@pytest.mark.parametrize(
    ("model", "tp", "ranks", "kernels"),
    [
        ("llama-3.1-8b", 1, 1, 10),
        ("llama-3.1-70b", 4, 1, 12),
        ("gpt-oss-120b", 1, 1, 15),
        ("gpt-oss-120b", 1, 2, 17),
        ("qwen3-235b-a22b", 2, 1, 17),
        ("minimax-m2.5", 1, 1, 20),
    ],
)
def test_kernels_of_a_layer(model, tp, ranks, kernels):
    spec = load_model(model)
    assert num_launches(spec, tp, ranks) == kernels * spec.num_layers


@pytest.mark.parametrize(
    ("release", "profile", "ahead"),
    [("0.11", "vllm-v1", False), ("0.10.2", "vllm-v1", False), ("0.14", "vllm-v1-async", True)],
)
def test_a_release_of_vllm_says_how_it_schedules(release, profile, ahead):
    scenario = Scenario(workload="fixed", model="llama-3.1-8b", gpu="h100", engine_profile=f"vllm=={release}")
    setup = prepare(scenario, "vllm-v1", parse_policy("vllm-v1", {})[1])
    assert setup.engine_profile is not None
    assert (setup.engine_profile.name, setup.policy.schedules_ahead) == (profile, ahead)
    told = next(
        words for words in setup.warnings if words.startswith(f"--engine vllm=={release}: priced as {profile};")
    )
    assert ("vllm-0.12-top-p" in told) == (not ahead)


@pytest.mark.parametrize(
    ("name", "words"), [("vllm==new", "is no release"), ("vllm==0.6.3", "no engine profile is of")]
)
def test_a_release_that_no_profile_is_of_is_refused(name, words):
    with pytest.raises(UserError, match=f"--engine {name}: {words}"):
        load_engine_profile(name)
