"""Constants fitted to a server's run: planted ones are found again, and runs that do not tell them are refused."""

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from server_small import HIDDEN, LOADS, serve, setup
from test_calib_cli import attempt, refused

from calib.robust import Estimate, Fit
from calib.server import fit as server_fit
from calib.server.constants import chosen_constants, is_told, of_model, parameters_of, with_constants
from calib.server.fit import fit_server
from calib.server.front_end import find_front_end
from calib.server.iterations import predict_steps_s, replay
from calib.server.requests import fit_requests
from sim.cost.profile import read_profile
from sim.errors import UserError
from sim.options.policies import parse_policy
from sim.options.scenario import Scenario
from sim.run.prepare import prepare
from sim.run.served import mean_errors, measured_times, simulated_times
from sim.run.traffic import traffic
from traces.readers import open_trace
from traces.request import Request
from traces.served import ServedRun, read_served

SHARED = Path(__file__).resolve().parents[3] / "shared" / "measured" / "vllm019-rtx4090"
needs_measured = pytest.mark.skipif(not SHARED.exists(), reason="needs a measured run in ../shared (not shipped)")
SERIAL, AHEAD = ("vllm-recompute", "vllm-v1:async-scheduling=false"), "vllm-v1"
POLICIES = (*SERIAL, AHEAD)
CHUNKED = {"enable_chunked_prefill": True, "max_num_batched_tokens": 256}


def found_again(estimates, hidden):
    """Those that miss their hidden value, and by how much."""
    return {name: (estimates[name], value) for name, value in hidden.items()
            if not estimates[name].low <= value <= estimates[name].high}  # fmt: skip


@pytest.mark.parametrize("matched", [0.49, 0.5])
def test_a_server_that_schedules_otherwise_is_fitted_to_requests(monkeypatch, matched):
    monkeypatch.setattr(server_fit, "replay", lambda *_: SimpleNamespace(matched=matched, steps=[None] * 9))
    served = SimpleNamespace(requests=[None] * 3, has_token_times=True)
    found = server_fit._way(SimpleNamespace(label="vllm-v1"), served, [HOST], lambda *_: None)
    if matched == 0.5:
        assert (found[0].func, *found[1:]) == (server_fit._fit_steps, "9 iterations, 50% of those seen", [])
        return
    note = "tokens agree about the end of 49% of the iterations only: the server schedules otherwise than vllm-v1 with "
    note += "these limits, its front end takes another time (front_end_s), or streams in bursts; fitted to requests, "
    note += "not iterations"
    assert found == (fit_requests, "TTFT and TPOT of 3 requests", [note])


@pytest.mark.parametrize(
    ("policy", "changes"), [*((policy, CHUNKED) for policy in POLICIES), (AHEAD, {"num_gpu_blocks_override": 400})]
)
def test_iterations_are_recovered_from_the_times_of_tokens(tmp_path, policy, changes):
    # Whatever the server's speed: the scheduler is replayed on its clock, with prices that are wrong by far.
    described = setup(policy, **changes)
    serve(described, tmp_path / "run.json", unsteady=0.0, late_s=0.0)
    served = read_served(tmp_path / "run.json")
    found = replay(described, served, len(served.requests))
    seconds = np.array([step.seconds for step in found.steps])
    assert found.matched > 0.99
    assert predict_steps_s(with_constants(described, HIDDEN).cost, found.steps) == pytest.approx(seconds, rel=1e-6)
    assert abs(predict_steps_s(described.cost, found.steps) / seconds - 1).max() > 0.05


def test_iterations_of_prompts_only_are_waited_for(tmp_path):
    # A prompt of many chunks alone: nothing is heard of the iterations before its first token.
    described = setup("vllm-v1", workload="fixed", request_rate=0.05, input_len=3000, output_len=3, num_prompts=30)
    described = replace(described, limits=replace(described.limits, max_num_batched_tokens=512))
    serve(described, tmp_path / "run.json", unsteady=0.0, late_s=0.0)
    served = read_served(tmp_path / "run.json")
    steps = replay(described, served, len(served.requests)).steps
    assert max(len(step.plans) for step in steps) == 6
    predicted = predict_steps_s(with_constants(described, HIDDEN).cost, steps)
    assert predicted == pytest.approx([step.seconds for step in steps], rel=1e-6)


def test_what_comes_while_the_host_prepares_an_iteration_is_in_the_next(tmp_path, monkeypatch):
    """Pairs: the second comes within the 50 ms of host time before the GPU begins the first's prompt, or after them."""
    pairs = [(i, 10.0 * (i // 2) + (0.0 if i % 2 == 0 else 0.02 + 0.04 * (i // 2 % 2)), 300, 4) for i in range(12)]
    monkeypatch.setattr("server_small.traffic", lambda _: [Request(*pair) for pair in pairs])
    described = with_constants(setup("vllm-v1"), {"step_overhead_s": 0.05})
    serve(described, tmp_path / "run.json", {}, unsteady=0.0, late_s=0.0)
    served = read_served(tmp_path / "run.json")
    found = replay(described, served, len(pairs))
    assert found.matched == 1.0
    seconds = [step.seconds for step in found.steps]
    assert predict_steps_s(described.cost, found.steps) == pytest.approx(seconds, rel=1e-6)


def test_iterations_that_take_no_time_are_left_out():
    # Three tokens, two of them at once: the third iteration was seen, and says nothing.
    described = setup("vllm-recompute", workload="fixed", request_rate=1.0, input_len=10, output_len=3, num_prompts=1)
    served = ServedRun(Path("run.json"), [Request(0, 0.0, 10, 3)], [1.0], [1.5], [(0.5, 0.0)], 0)
    found = replay(described, served, 1)
    assert found.num_seen == 3
    # The first ends 6.3 ms before its token is seen, and began 1.3 us a token late: the server's front end.
    assert [step.seconds for step in found.steps] == pytest.approx([1.0 - 0.0063 - 10 * 1.3e-6, 0.5])


@pytest.mark.parametrize(
    ("policy", "load"), [(SERIAL[0], "near saturation"), (SERIAL[1], "medium"), (AHEAD, "light"), (AHEAD, "medium")]
)
def test_hidden_constants_are_found_from_tokens(tmp_path, policy, load):
    # At light load an iteration in 85 holds a prompt. In series host time, weights' rate and front end are alike.
    num_prompts = {"near saturation": 60, "medium": 120, "light": 200}[load]
    described = setup(policy, LOADS[load], num_prompts=num_prompts)
    serve(described, tmp_path / "run.json")
    found = fit_server(described, read_served(tmp_path / "run.json"), name="found")
    assert found.method.endswith("of those seen") and "iterations" in found.method
    untold = ["attention_flops_per_s"]
    if policy == AHEAD:
        # Host time shows after a pause alone.
        untold = ["step_overhead_s", *["flops_per_s"] * (load == "light"), *untold]
    # ShareGPT's prompts are too short to tell attention.
    assert found.untold == untold
    hidden = {n: value for n, value in HIDDEN.items() if n not in untold}
    # Clients hear a tenth of a millisecond late, on average.
    assert found_again(found.estimates, hidden | {"front_end_s": 0.0064}) == {}
    assert max(abs(found.estimates[name].value / value - 1) for name, value in hidden.items()) < 0.08
    assert abs(found.held_out["tpot"]) < 0.01 and abs(found.held_out["ttft"]) < 0.08
    assert found.profile.status == "measured-from-server"


def test_a_front_end_that_takes_longer_is_found(tmp_path):
    """Ten milliseconds more on every TTFT: with the engine's own 6.3 ms tokens agree about 8 % of the iterations."""
    described = setup(AHEAD, LOADS["medium"], num_prompts=200)
    hidden = HIDDEN | {"front_end_s": 0.017}
    serve(described, tmp_path / "run.json", hidden)
    served = read_served(tmp_path / "run.json")
    assert replay(described, served, len(served.requests)).matched < 0.1
    names = ["hbm_bytes_per_s", "flops_per_s", "front_end_s"]
    found = fit_server(described, served, name="found", constants=names)
    assert found_again(found.estimates, {"front_end_s": 0.0171}) == {}
    for name, off in zip(names, (0.01, 0.03, 0.1), strict=True):
        assert found.estimates[name].value == pytest.approx(hidden[name], rel=off)
    assert abs(found.held_out["ttft"]) < 0.03
    engine = described.engine_profile.measured_by(found.profile)
    assert engine.constants["front_end_s"].status == "measured"
    assert engine.value("front_end_s") == found.estimates["front_end_s"].value


@pytest.mark.slow
def test_a_tokeniser_is_told_from_the_gpu_where_prefixes_are_cached(tmp_path):
    """The same tokens pass the tokeniser whether or not the GPU has them: 10 ms of 5,000 at 2 us."""
    described = setup(
        AHEAD, workload="sessions", request_rate=2.0, input_len=400, output_len=30, turns=8, max_model_len=32768,
        model="llama-3.1-8b", enable_prefix_caching=True, num_prompts=70,
    )  # fmt: skip
    hidden = HIDDEN | {"front_end_s": 0.012, "front_end_s_per_token": 2e-6}
    serve(described, tmp_path / "run.json", hidden)
    served = read_served(tmp_path / "run.json", list(traffic(described.scenario)))
    names = chosen_constants(described, None, cached=True)
    assert names[-2:] == ["front_end_s", "front_end_s_per_token"]
    found = find_front_end(described, served, len(served.requests), names[-2:])
    for name, (least, most) in found.limits.items():
        assert least <= hidden[name] <= most
    parameters = parameters_of(described, names[1:3] + names[-2:])
    fit = server_fit._fit_steps(lambda *_: found, described, served, len(served.requests), parameters)
    # Its 2 us a token are not taken for the GPU's work.
    assert fit.values["flops_per_s"] == pytest.approx(hidden["flops_per_s"], rel=0.03)
    assert 1e-6 < fit.values["front_end_s_per_token"] < 3e-6


def test_a_rate_of_kv_that_does_not_follow_the_weights_is_found(tmp_path):
    described = setup(SERIAL[1], LOADS["medium"])
    hidden = HIDDEN | {"kv_bytes_per_s": 1.7e12}
    serve(described, tmp_path / "run.json", hidden)
    found = fit_server(described, read_served(tmp_path / "run.json"), name="found")
    assert (found.untold, found_again(found.estimates, hidden)) == (["attention_flops_per_s"], {})


@pytest.mark.parametrize("seed", [3, 4])
def test_what_chance_makes_of_a_rate_of_kv_is_not_taken(tmp_path, seed):
    """Free beside the weights' it left the host's time open, and put the others 20 to 60 % off."""
    described = setup(SERIAL[1], LOADS["medium"], num_prompts=60)
    serve(described, tmp_path / "run.json", seed=seed)
    found = fit_server(described, read_served(tmp_path / "run.json"), name="found")
    assert (found.untold, found_again(found.estimates, HIDDEN)) == (["attention_flops_per_s"], {})


def test_of_a_server_in_fp8_its_own_rates_are_found(tmp_path):
    fp8 = {"model": "llama-3.1-8b", "gpu": "h100", "quantization": "fp8", "kv_cache_dtype": "fp8"}
    described = setup(SERIAL[1], 8.0, workload="uniform", input_len=2000, output_len=100, **fp8)
    hidden = {"step_overhead_s": 0.0012, "hbm_bytes_per_s": 2.4e12, "fp8_flops_per_s": 9e14}
    serve(described, tmp_path / "run.json", hidden)
    found = fit_server(described, read_served(tmp_path / "run.json"), name="found")
    assert (found.untold, found_again(found.estimates, hidden)) == (["attention_flops_per_s"], {})


def test_attention_is_found_where_prompts_are_long(tmp_path):
    hidden = HIDDEN | {"attention_flops_per_s": 1.2e14}
    described = setup(
        SERIAL[1], workload="uniform", input_len=8000, output_len=60, request_rate=0.8, max_model_len=16384
    )
    serve(described, tmp_path / "run.json", hidden)
    found = fit_server(described, read_served(tmp_path / "run.json"), name="found")
    assert (found.untold, found_again(found.estimates, hidden)) == ([], {})


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "load"), [(SERIAL[0], "medium"), (AHEAD, "near saturation")])
def test_what_iterations_take_is_found_from_first_and_last_tokens(tmp_path, policy, load):
    described = setup(policy, LOADS[load], num_prompts=60 if policy != AHEAD else 80)
    # In series first and last tokens do not tell the front end beside the host's time; all tokens do.
    planted = HIDDEN | ({"front_end_s": 0.017} if policy == AHEAD else {})
    # Of four draws the first misses one interval in series, by 1 %.
    serve(described, tmp_path / "run.json", planted, seed=2)
    served = read_served(tmp_path / "run.json")
    hidden = {name: value for name, value in planted.items() if policy != AHEAD or name != "step_overhead_s"}
    parameters = parameters_of(described, list(hidden))
    found = fit_requests(
        described, replace(served, gaps_s=[()] * len(served.requests)), len(served.requests), parameters
    )
    assert all(is_told(found.estimates[name], parameters[name]) for name in hidden)
    assert found_again(found.estimates, hidden) == {}
    # Host time and weights' rate make up for each other: what they cost together is found best.
    ours, real = with_constants(described, found.values).cost, with_constants(described, HIDDEN).cost
    for batch in (1, 4, 16):
        assert ours.decode_steps(batch, batch * 500)[0] == pytest.approx(
            real.decode_steps(batch, batch * 500)[0], rel=0.02
        )
    assert ours.prefill_s(300) == pytest.approx(real.prefill_s(300), rel=0.07)


@pytest.mark.slow
@needs_measured
def test_a_measured_server_is_predicted_from_its_first_third():
    served = read_served(SHARED / "measured.csv", list(open_trace(SHARED / "trace.csv")))
    columns = "requests", "ttft_s", "e2el_s", "gaps_s"
    first = replace(served, **{name: getattr(served, name)[:100] for name in columns})
    scenario = Scenario(
        trace=str(SHARED / "trace.csv"), model="llama-3.1-8b", gpu="rtx-4090", max_num_seqs=256, max_model_len=32768,
        max_num_batched_tokens=2048, num_gpu_blocks_override=2588,
    )  # fmt: skip
    described = prepare(scenario, *parse_policy(SERIAL[1], {}))
    names = ["step_overhead_s", "hbm_bytes_per_s", "flops_per_s"]
    found = fit_requests(described, first, 100, parameters_of(described, names))
    simulated = simulated_times(with_constants(described, found.values), served)[100:]
    errors = mean_errors(simulated, measured_times(served)[100:])
    assert max(map(abs, errors.values())) < 0.05, errors


@pytest.mark.parametrize(("policy", "untold"), [(SERIAL[1], ""), (AHEAD, "step_overhead_s, ")])
def test_a_run_that_tells_nothing_is_refused(tmp_path, policy, untold):
    described = setup(policy, workload="fixed", input_len=100, output_len=40, request_rate=0.1, num_prompts=40)
    serve(described, tmp_path / "run.json")
    served = read_served(tmp_path / "run.json")
    with pytest.raises(UserError, match=rf"does not tell {untold}attention_flops_per_s \(1 to 2 requests in flight\)"):
        fit_server(described, served, name="found", constants=["step_overhead_s", "attention_flops_per_s"])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "run.json"
    serve(setup("vllm-v1"), path)
    return path


ENGINE = ("--gpu", "a100-80g", "--model", "llama-2-7b", "--max-model-len", "4096")


def test_fit_writes_a_profile_that_run_takes(tmp_path, capsys, run):
    status, out, error = attempt(
        capsys, "profile", "fit", "--bench", run, *ENGINE, "--policy", "vllm-v1", "--out", tmp_path
    )
    assert (status, "attention_flops_per_s: carried over" in error) == (0, True)
    assert "step_overhead_s" in out
    name = "a100-80g-measured-from-server"
    assert out.endswith(f"wrote {tmp_path / name}.json and {name}.md\n")
    assert (tmp_path / f"{name}.md").read_text() in out
    path = tmp_path / "a100-80g-measured-from-server.json"
    profile = read_profile(path)
    assert profile.provenance["run"] == "run.json" and len(profile.provenance["run_sha256"]) == 64
    assert "95 % interval" in profile.constants["flops_per_s"].source
    assert profile.constants["roofline_exponent"].source.startswith("carried over")
    assert set(profile.residuals) == {f"unseen_requests_{name}" for name in ("ttft", "tpot", "e2el")}
    words = ["run", "--trace", run, *ENGINE, "--profile", path, "--out", tmp_path / "out", "--quiet"]
    assert attempt(capsys, *words)[0] == 0
    used = json.loads((tmp_path / "out" / "result.json").read_text())["profile"]
    assert (used["name"], used["status"]) == ("a100-80g-measured-from-server", "measured-from-server")


def test_a_fit_starts_from_the_base_or_the_gpus_own_profile(capsys, run, monkeypatch):
    def name_of(setup, served, **options):
        assert options == {"name": "a100-80g-measured-from-server", "constants": None}
        raise UserError(f"from {setup.profile.name}")

    monkeypatch.setattr("calib.server.cli.fit_server", name_of)
    for words, name in (((), "a100-80g-imported"), (("--base", "a100-80g-derived"), "a100-80g-derived")):
        refused(capsys, "profile", "fit", "--bench", run, *ENGINE, *words, parts=[f"from {name}"])


def test_what_cannot_be_fitted_is_refused_by_name(tmp_path, capsys, run):
    data = json.loads(run.read_text())
    short = {k: v[:10] if isinstance(v, list) else v for k, v in data.items()}
    (tmp_path / "short.json").write_text(json.dumps(short))
    (tmp_path / "bare.json").write_text(json.dumps({"completed": 3, "request_throughput": 1.0}))
    fit = ("profile", "fit", *ENGINE, "--out", tmp_path / "out", "--bench")
    refused(capsys, *fit, tmp_path / "short.json", parts=["short.json", "10 requests", "more prompts"])
    refused(capsys, *fit, tmp_path / "bare.json", parts=["bare.json", "input_lens", "--save-detailed"])
    refused(capsys, *fit, run, "--constants", "speed", parts=["--constants", "'speed'", "flops_per_s"])
    # A name near by is enough, of some sixty.
    refused(capsys, *fit, run, "--constants", "front_end", parts=["try front_end_s, front_end_s_per_token ("])
    refused(capsys, *fit, run, "--constants", *parameters(), parts=["--constants", "5 named", "1 to 4"])
    both = ("--policy", "vllm-v1", "--policy", "vllm-swap")
    refused(capsys, *fit, run, *both, parts=["--policy: 2 given; the server ran one"])
    refused(capsys, *fit, run, "--replicas", "2", parts=["--replicas", "2 engines"])
    refused(capsys, *fit, run, "--request-rate", "2", parts=["--request-rate"])
    refused(capsys, *fit, run, "--max-model-len", "100", parts=["run.json", "gives up", "--max-model-len"])
    refused(capsys, *fit, run, "samples.csv", parts=["SAMPLES.csv and --bench", "both"])
    refused(capsys, "profile", "fit", "--gpu", "l20", parts=["SAMPLES.csv and --bench", "neither"])
    assert not (tmp_path / "out").exists()


FITTED_TO = Fit(
    {
        "hbm_bytes_per_s": Estimate(1.5e12, 1e10, 1.48e12, 1.52e12),
        "flops_per_s": Estimate(2e14, 3e14, 1e13, 9e14),
        "attention_flops_per_s": Estimate(1e14, 2e14, 1e13, 9e14),
        "step_overhead_s": Estimate(0.0, None, 0.0, 0.0),
        "layer_overhead_s": Estimate(4e-5, None, 4e-5, 4e-5),
    },
    0.0321,
)
TOGETHER = ["flops_per_s", "attention_flops_per_s"]


def test_a_profile_says_of_each_constant_how_it_is_known(run):
    """Told with its interval, at its limit, told with another only, and carried over: once, however often."""
    described = setup("vllm-v1", trace=str(run.with_name("other.csv")))
    carried = msgspec.structs.replace(described.profile.constants["alpha"], source="carried over from an older one")
    constants = described.profile.constants | {"alpha": carried}
    described = replace(described, profile=msgspec.structs.replace(described.profile, constants=constants))
    run.with_name("other.csv").write_text("rows")
    errors = {"ttft": -0.0123456, "tpot": 0.02}
    found = server_fit._profile(described, read_served(run), FITTED_TO, "mine", "3 iterations", errors, TOGETHER)
    sources = {name: (constant.stderr, constant.source) for name, constant in found.constants.items()}
    fitted = "fitted to a server: "
    assert sources["hbm_bytes_per_s"] == (1e10, f"{fitted}95 % interval 1.48e+12 to 1.52e+12")
    assert sources["flops_per_s"] == (None, f"{fitted}told with attention_flops_per_s only")
    assert sources["attention_flops_per_s"] == (None, f"{fitted}told with flops_per_s only")
    assert sources["layer_overhead_s"] == (None, f"{fitted}at the limit of what it may be")
    assert sources["alpha"][1] == "carried over from an older one"
    base = described.profile
    before = base.constants["roofline_exponent"].source
    assert sources["roofline_exponent"][1] == f"carried over from {base.name}: {before}"
    assert {name: found.value(name) for name in FITTED_TO.estimates} == FITTED_TO.values
    assert found.residuals == {"unseen_requests_ttft": 0.01235, "unseen_requests_tpot": 0.02}
    told = found.provenance
    assert told["trace_sha256"] == sha256(b"rows").hexdigest()
    assert told["run_sha256"] == sha256(run.read_bytes()).hexdigest()
    assert told["held_out"].endswith("mean TTFT -1.2 %, mean TPOT +2.0 %")
    assert (found.form, found.gpu, found.status) == (base.form, "a100-80g", "measured-from-server")
    # The run's own file as the trace is named once.
    own = server_fit._profile(setup("vllm-v1", trace=str(run)), read_served(run), FITTED_TO, "mine", "", {}, [])
    assert not {"trace", "trace_sha256"} & own.provenance.keys()


def test_a_constant_at_its_limit_is_named_but_for_overheads_of_nothing():
    described = setup("vllm-v1")
    limits = parameters_of(described, [HOST, WEIGHTS, PRODUCTS])

    def said(name, value, stderr):
        return [*server_fit._at_limits(described, Fit({name: Estimate(value, stderr, 0.0, 0.0)}, 0.0))]

    assert said(HOST, 0.0, None) == said(HOST, 1e-9, None) == said(WEIGHTS, limits[WEIGHTS].most, 1.0) == []
    (text,) = said(WEIGHTS, limits[WEIGHTS].most, None)
    assert text.startswith(f"{WEIGHTS} stands at 2.039e+12, the most (the GPU's peak or 30 times the base profile's)")
    (text,) = said(PRODUCTS, limits[PRODUCTS].least, None)
    assert "the least (1/30 of the base profile's) that is looked for: it makes up for" in text
    (text,) = said(HOST, limits[HOST].most, None)
    assert "the most (" in text


HOST, WEIGHTS, PRODUCTS, ATTENTION = "step_overhead_s", "hbm_bytes_per_s", "flops_per_s", "attention_flops_per_s"
ALL = (HOST, WEIGHTS, PRODUCTS, ATTENTION)


def fit_of(is_open, is_hidden=()):
    """A fit that leaves some constants open whatever else is fitted, and shows nothing of others; what it was asked."""
    asked = []

    def fit_with(setup, served, known, parameters):
        assert known == len(served.requests)
        asked.append(tuple(parameters))
        shown = [name for name in parameters if name not in is_hidden]
        left = is_open(asked[-1])
        return Fit({name: Estimate(1.0, 1e9 if name in left else 1e-9, 0.0, 2.0) for name in shown}, 0.0)

    return fit_with, asked


@pytest.mark.parametrize(
    ("left_open", "hidden", "asked", "untold", "together"),
    [
        ((), (), [ALL], [], []),
        ((), (ATTENTION,), [ALL], [ATTENTION], []),
        # One is carried over, with what does not show; the rest are fitted again.
        ((PRODUCTS,), (ATTENTION,), [ALL, (HOST, WEIGHTS)], [ATTENTION, PRODUCTS], []),
        # Two make up for each other: both stay.
        ((WEIGHTS, PRODUCTS), (), [ALL], [], [WEIGHTS, PRODUCTS]),
        ((WEIGHTS, PRODUCTS), (ATTENTION,), [ALL], [ATTENTION], [WEIGHTS, PRODUCTS]),
    ],
)
def test_of_constants_that_are_open_one_is_carried_over(run, left_open, hidden, asked, untold, together):
    fit_with, found = fit_of(lambda _: left_open, hidden)
    served = read_served(run)
    fit, left, open_ended = server_fit._fit_told(setup("vllm-v1"), served, list(ALL), fit_with, is_asked=False)
    assert (found, left, open_ended) == (asked, untold, together)
    assert tuple(fit.estimates) == tuple(name for name in asked[-1] if name not in hidden)


def test_where_all_are_open_the_first_is_taken_on_trust(run):
    """Until one is left, which tells nothing alone either; or until the others are told."""
    served = read_served(run)
    fit_with, found = fit_of(lambda names: names if HOST in names else ())
    given = setup("vllm-v1"), served, [HOST, WEIGHTS]
    _, left, open_ended = server_fit._fit_told(*given, fit_with, is_asked=False)
    assert (found, left, open_ended) == ([(HOST, WEIGHTS), (WEIGHTS,)], [HOST], [])
    fit_with, _ = fit_of(lambda names: names)
    with pytest.raises(UserError, match=rf"does not tell {WEIGHTS} \("):
        server_fit._fit_told(*given, fit_with, is_asked=False)
    with pytest.raises(UserError, match=rf"does not tell {HOST}, {WEIGHTS} \("):
        server_fit._fit_told(*given, fit_with, is_asked=True)


def parameters():
    return ["flops_per_s", "hbm_bytes_per_s", "step_overhead_s", "layer_overhead_s", "roofline_exponent"]


def test_of_a_quantised_model_its_own_constants_count():
    """Of products in FP8, of KV in FP8 but no latents, where the profile has them; of all others the plain ones."""
    fp8 = {"gpu": "h100", "quantization": "fp8", "kv_cache_dtype": "fp8"}
    names = ("flops_per_s", "kv_bytes_per_s", "hbm_bytes_per_s", "attention_flops_per_s")
    found = {
        label: [of_model(setup("vllm-v1", **changes), name) for name in names]
        for label, changes in {
            "both": {"model": "llama-3.1-8b", **fp8}, "KV": {**fp8, "model": "llama-3.1-8b", "quantization": None},
            "neither": {"model": "llama-3.1-8b", "gpu": "h100"},
            "not in the profile": {**fp8, "gpu": "l20", "profile": "l20-derived"},
        }.items()
    }  # fmt: skip
    assert found == {
        "both": ["fp8_flops_per_s", "fp8_kv_bytes_per_s", *names[2:]],
        "KV": ["flops_per_s", "fp8_kv_bytes_per_s", *names[2:]],
        "neither": list(names),
        "not in the profile": list(names),
    }
