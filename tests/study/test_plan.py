"""`plan`: planted optima are found, one by one and jointly; intervals, refusals, commands."""

import json
import shlex
from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvtwin
from kvtwin.command_line import build_parser
from sim.errors import UserError
from sim.options.flags import read_options
from sim.study import race, search
from sim.study.deployments import Deployment, Layouts, Space
from sim.study.limits import changes
from sim.study.plan import Held, plan, read_plan
from sim.study.plan_report import _paragraphs, error_sentences, front, lines
from sim.study.points import Outcome
from sim.study.search import PRECISION, Ran, Reached, Slo
from sim.study.serve_commands import manifest, run_command, serve_commands
from sim.study.sweep import Means, Place

ASKED = {"model": "llama-2-7b", "gpu": ["h100"], "workload": "fixed", "request_rate": 2.0, "num_prompts": 500,
         "slo": ["p99_ttft_ms:100"], "seeds": 2}  # fmt: skip
SESSIONS = {"workload": "sessions", "request_rate": 1.0, "layouts": "engines"}


def planted(monkeypatch, capacity):
    """No run is simulated: a deployment sustains `capacity(options)` times the traffic, and not more."""

    def place_of(options, point):
        return Place({}, 0, options, Outcome(f"{abs(hash(json.dumps(options, sort_keys=True)))}"), 1)

    def perform(planned, store, means, begin=None, *_):
        ended = begin(len(planned)) if begin is not None else lambda _: None
        for place in planned:
            if store.get(place.outcome.key) is not None:
                continue
            options = place.options
            ttft_ms = 50.0 if options["rate_scale"] <= capacity(options) else 150.0
            result = {"p99_ttft_ms": ttft_ms, "completed": 9, "num_prompts": 9, "arrival_span_s": 1e3}
            result |= {"mean_e2el_ms": 1.0, "mean_ttft_ms": capacity(options), "profile": {}}
            result |= dict.fromkeys(("mean_tpot_ms", "p99_tpot_ms", "duration"), 1.0)
            store.put(Outcome(place.outcome.key, result))
            ended(place)

    monkeypatch.setattr(search, "place_of", place_of)
    monkeypatch.setattr(search, "perform_missing", perform)


def engines(options):
    """How many GPUs a deployment has."""
    if "prefill_replicas" in options:
        tp = options["tp"]
        return options["prefill_replicas"] * tp + options["decode_replicas"] * options.get("decode_tp", tp)
    return options.get("replicas", 1) * options["tp"] * options.get("pipeline_parallel_size", 1)


def pays(**wanted):
    """Twice the load where all of these are so; 0.4 of the traffic a GPU else."""
    return lambda options: 0.4 * engines(options) * (2 if all(options.get(n) == v for n, v in wanted.items()) else 1)


OPTIMA = {
    "tensor parallelism": ({}, {"tp": 4}),
    "replicas": ({}, {"replicas": 2}),
    "pools": ({}, {"prefill_replicas": 3, "decode_replicas": 1}),
    "unlike pools": ({}, {"tp": 2, "decode_tp": 1}),
    "token budget": ({}, {"max_num_batched_tokens": 16384}),
    "seats": ({}, {"max_num_seqs": 64}),
    "KV type": ({}, {"kv_cache_dtype": "fp8"}),
    "no prefix caching": (SESSIONS, {"enable_prefix_caching": False}),
    "offload": (SESSIONS, {"kv_offloading_size": 64.0}),
    "router": (SESSIONS, {"router": "prefix-affinity"}),
    "a split that pays with a large budget alone": (
        {}, {"prefill_replicas": 1, "decode_replicas": 2, "max_num_batched_tokens": 16384},
    ),
    "a group that pays with FP8 KV and few seats alone": (
        {}, {"tp": 2, "kv_cache_dtype": "fp8", "max_num_seqs": 256},
    ),
}  # fmt: skip


@pytest.mark.parametrize("optimum", OPTIMA)
def test_the_planted_optimum_is_found(optimum, monkeypatch, tmp_path):
    """It sustains 0.8 times the traffic a GPU, so 2 do where it has 2; nothing else does with less than 3."""
    traffic, wanted = OPTIMA[optimum]
    capacity = pays(**wanted)
    planted(monkeypatch, capacity)
    found = plan(read_plan({**ASKED, **traffic, "max_gpus": 4, "objective": "goodput"}), tmp_path, Means())
    assert found.best is not None and found.best.deployment.options.items() >= wanted.items()
    most = capacity(found.best.deployment.options)
    assert most / (1 + PRECISION) <= found.best.mean <= most and found.best.interval[1] >= most
    assert len(found.best.deployment.changed) <= len(wanted)


def test_the_fewest_gpus_are_found_whatever_the_next_ones_do(monkeypatch, tmp_path):
    """Two are enough in pools, which sustain 0.55 of the traffic a GPU; like engines sustain 0.3."""
    planted(monkeypatch, lambda options: engines(options) * (0.55 if "prefill_replicas" in options else 0.3))
    found = plan(read_plan({**ASKED, "max_gpus": 8, "max_num_seqs": 256, "kv_cache_dtype": "auto"}), tmp_path, Means())
    assert found.answer is not None and found.answer.num_gpus == 2 and found.best is not None
    assert found.best.deployment.is_pooled and (found.fewest, found.most) == (2, 2)
    told = list(lines(found))
    assert told[0].startswith("2 h100 (2): 1 prefill engine of 1 GPU and 1 decode engine of 1 GPU, with p99_ttft_ms")
    assert "Like engines instead: 0.59 times the traffic (1 engine of 2 GPUs)." in told
    assert [row["num_gpus"] for row in front(found) if row["pareto"]] == sorted({s.num_gpus for s in found.sizes})


@pytest.mark.parametrize("objective", ["gpus", "goodput"])
def test_the_bar_knows_how_much_is_to_do(objective, monkeypatch, tmp_path):
    """So that the time left is true: to a factor of two from the beginning, whichever the objective."""
    planted(monkeypatch, lambda options: 1.5 * engines(options))
    heard = []
    asked = read_plan({**ASKED, "max_gpus": 4, "objective": objective})
    plan(asked, tmp_path, Means(), lambda stage, done, total: heard.append((done, total)))
    took, _ = heard[-1]
    assert took > 0 and all(took / 2 < total < 2 * took for _, total in heard)


def test_what_makes_no_difference_is_not_changed(monkeypatch, tmp_path):
    """Nor are pools taken: all sustain the same."""
    planted(monkeypatch, lambda options: 0.7 * engines(options))
    found = plan(read_plan({**ASKED, "max_gpus": 2}), tmp_path, Means())
    assert found.best is not None and found.best.deployment.changed == () and not found.best.deployment.is_pooled
    tied = next(line for line in lines(found) if line.startswith("As good, as far as these draws tell"))
    names = tied.partition(": ")[2].partition(". Of these")[0].split("; ")
    assert found.best.deployment.name not in names, "it is as good as others, not as itself"


@pytest.mark.parametrize(
    ("objective", "fp8", "gpus", "taken", "told"),
    [
        # Two GPUs sustain 1.4 times the traffic in 16 bits; with FP8 1.75, less than a third GPU would; or 2.24.
        ("gpus", 1.25, 2, "auto", "FP8 KV instead: "),
        ("goodput", 1.25, 2, "auto", "FP8 KV instead: "),
        ("goodput", 1.6, 2, "fp8", "KV in 16 bits instead: "),
        ("gpus", 1.6, 1, "fp8", "KV in 16 bits instead: "),
    ],
)
def test_kv_of_fewer_bits_is_taken_only_where_it_saves_a_gpu(objective, fp8, gpus, taken, told, monkeypatch, tmp_path):
    """It changes what the model answers: a GPU less is worth that, some percent of load are not."""
    planted(monkeypatch, lambda options: 0.7 * engines(options) * (fp8 if "kv_cache_dtype" in options else 1))
    asked = {**ASKED, "max_gpus": 2, "objective": objective, "layouts": "engines", "max_num_seqs": 256}
    found = plan(read_plan({**asked, "max_num_batched_tokens": 2048}), tmp_path, Means())
    assert found.answer is not None and found.best is not None and found.answer.num_gpus == gpus
    assert found.best.deployment.options.get("kv_cache_dtype", "auto") == taken
    said = list(lines(found))
    assert any(line.startswith(told) for line in said), said
    assert any("changes what the model computes" in line for line in said)


def test_draws_that_differ_make_an_interval_of_gpus(monkeypatch, tmp_path):
    """0.55, 0.5 and 0.45 of the traffic a GPU by seed: two are enough in two draws of three, and three in all."""
    share = {0: 0.55, 1: 0.50, 2: 0.45, 3: 0.5}
    planted(monkeypatch, lambda options: share[options["seed"]] * engines(options))
    asked = {**ASKED, "max_gpus": 8, "seeds": 3, "layouts": "engines", "tp": 1, "max_num_seqs": 256}
    found = plan(read_plan({**asked, "kv_cache_dtype": "auto"}), tmp_path, Means())
    assert found.answer is not None and found.answer.num_gpus == 3
    assert found.fewest == 2 and found.most is not None and found.most >= 3


@pytest.mark.parametrize(
    ("objective", "told"),
    [
        ({"objective": "cost", "gpu_hour_usd": ["h100=4", "l20=1"]}, "5.00 USD an hour, 5 l20 (5)"),
        # Boards of 700 and 275 W; 1.375 kW at 1.82 requests/s.
        ({"objective": "energy"}, "1.38 kW of boards, at most 0.21 kWh a thousand requests, 5 l20 (5)"),
    ],
)
def test_the_cheapest_kind_is_taken_and_not_the_fewest(objective, told, monkeypatch, tmp_path):
    """An H100 sustains as much as three L20s, costs as much as four, and draws more than two and a half."""
    planted(monkeypatch, lambda options: engines(options) * (0.7 if options["gpu"] == "h100" else 0.7 / 3))
    narrow = {"layouts": "engines", "tp": 1, "max_num_seqs": 256, "kv_cache_dtype": "auto"}
    asked = {**ASKED, **narrow, "gpu": ["h100", "l20"], "max_gpus": 8}
    fewest = plan(read_plan(asked), tmp_path, Means())
    cheapest = plan(read_plan({**asked, **objective}), tmp_path, Means())
    assert fewest.answer is not None and (fewest.answer.gpu, fewest.answer.num_gpus) == ("h100", 2)
    assert cheapest.answer is not None and (cheapest.answer.gpu, cheapest.answer.num_gpus) == ("l20", 5)
    assert next(lines(cheapest)).startswith(told)
    assert all(row["pareto"] for row in front(cheapest) if row["gpu"] == "l20")


def test_what_nothing_sustains_is_told_with_the_most_there_is(monkeypatch, tmp_path):
    planted(monkeypatch, lambda options: 0.1 * engines(options))
    found = plan(read_plan({**ASKED, "max_gpus": 2, "kv_cache_dtype": "auto"}), tmp_path, Means())
    first, second, *_ = lines(found)
    assert found.answer is None
    assert first == "No deployment on up to 2 h100 sustains this traffic with p99_ttft_ms <= 100."
    assert second.startswith("The most is 0.20 times the traffic: ")


def held(*loads):
    nothing = Deployment({}, 1, "1 engine", False, ())
    return Held(nothing, tuple(Reached(load, None, None, None) for load in loads))


@given(st.lists(st.floats(0.1, 10.0), min_size=2, max_size=9))
def test_the_interval_has_all_that_was_seen_but_the_outermost_of_many(loads):
    """Student's t with n - 1 degrees, widened by a draw: beyond any of two or three."""
    low, high = held(*loads).interval
    assert low < held(*loads).mean < high
    if len(loads) <= 3:
        assert low <= min(loads) and max(loads) <= high


def test_ties_are_by_draws_side_by_side():
    """All draws say 5 % less: no tie, though each differs by more from draw to draw."""
    best = held(1.0, 2.0, 4.0)
    assert not held(0.95, 1.9, 3.8).ties(best)
    assert held(0.99, 1.98, 3.96).ties(best) and held(0.9, 2.1, 3.9).ties(best)
    assert log(2.0) > 0.05 and not held(0.0, 2.0, 4.0).ties(best)


# -- what is searched -------------------------------------------------------------------------------------------------


def space(shares_prefixes=False, layouts: Layouts = "both", gpu="h100", **fixed):
    base = {"model": "qwen3-32b"} | fixed
    return Space(base, gpu, ("vllm-v1",), layouts, shares_prefixes=shares_prefixes, link_gbps=400.0)


def test_deployments_have_just_so_many_gpus_and_each_is_there_once():
    for count in (1, 3, 4):
        found = space().of(count)
        assert found and all(engines(one.options) == count for one in found)
        assert len({json.dumps(one.options, sort_keys=True) for one in found}) == len(found)


def test_pipelines_are_tried_where_groups_have_no_nvlink():
    narrow = {"layouts": "engines", "shares_prefixes": True, "max_num_batched_tokens": 2048, "max_num_seqs": 64}
    assert not any("stages" in one.layout for one in space(**narrow).of(4))
    found = [one for one in space(gpu="l40s", **narrow).of(4) if "stages" in one.layout]
    assert {one.layout for one in found} == {
        "1 engine of 1 GPU x 4 stages", "1 engine of 2 GPUs x 2 stages", "2 engines of 1 GPU x 2 stages",
    }  # fmt: skip
    assert all(engines(one.options) == 4 and "kv_offloading_size" not in one.changed for one in found)


def test_what_the_user_said_is_not_searched_and_what_cannot_matter_neither():
    narrow = space(max_num_batched_tokens=2048, kv_cache_dtype="fp8", layouts="engines", tp=2)
    found = narrow.of(4)
    assert {one.changed for one in found} == {(), ("max_num_seqs",)}
    assert {one.layout for one in found} == {"2 engines of 2 GPUs"}
    shared = {name for one in space(shares_prefixes=True).of(2) for name in one.changed}
    alone = {name for one in space().of(2) for name in one.changed}
    assert shared - alone == {"enable_prefix_caching", "kv_offloading_size", "router"}


def test_an_option_is_left_out_where_it_does_nothing_and_refused_where_that_is_everywhere(monkeypatch, tmp_path):
    """As of candidates of `tune`: else the search would go on for minutes, and the answer's run be refused."""
    found = space(shares_prefixes=True, layouts="engines", vllm_v1_store_threshold=2, kv_cache_dtype="auto").of(2)
    assert all(("vllm_v1_store_threshold" in o.options) == ("kv_offloading_size" in o.options) for o in found)
    assert len({"kv_offloading_size" in one.options for one in found}) == 2
    planted(monkeypatch, engines)
    with pytest.raises(UserError, match="store-threshold=2 does nothing without kv-offloading-size"):
        plan(read_plan({**ASKED, "max_gpus": 1, "vllm_v1_store_threshold": 2}), tmp_path, Means())


def test_kv_memory_is_raised_where_one_number_of_blocks_fits_all_engines():
    """Half as much again of a prefill engine's blocks was a tenth of a decode engine's: -87 % load."""
    pools = {"model": "qwen3-32b", "gpu": "h100", "policy": "vllm-v1:stage=nixl", "link_gbps": 400.0,
             "prefill_replicas": 1, "decode_replicas": 1, "workload": "fixed"}  # fmt: skip
    names = {tp: {one.name for one in changes({**pools, "decode_tp": tp})} for tp in (1, 2)}
    assert names[1] - names[2] == {"KV memory", "10 GB more KV memory a GPU"} and names[2] < names[1]


def test_what_cannot_be_laid_out_is_told_by_its_reason():
    big = Space({"model": "llama-3.1-70b"}, "h100", ("vllm-v1",), "both", shares_prefixes=False, link_gbps=400.0)
    assert big.of(1) == [] and big.of(4)
    assert any("does not fit on h100" in reason and names == ["tp 1"] for reason, names in big.refused.items())


# -- refusals and commands ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"request_rate": float("inf")}, "all requests arrive at once"),
        ({"max_concurrency": 3}, "wait for answers"),
        ({"workload": None, "trace": "none.csv"}, "none.csv: no such file"),
        ({"model": "llama-3.1-70b", "max_gpus": 1}, "nothing can be deployed on up to 1 GPUs: .* does not fit on h100"),
    ],
)
def test_traffic_that_cannot_be_planned_for_is_refused(more, told, tmp_path):
    with pytest.raises(UserError, match=told):
        plan(read_plan({**ASKED, **more}), tmp_path, Means())


BASE = {"model": "qwen3-32b", "gpu": "h100", "policy": "vllm-v1", "tp": 2, "kv_cache_dtype": "fp8"}
POOLS = {**BASE, "policy": "vllm-v1:stage=hand-over", "prefill_replicas": 1, "decode_replicas": 2, "decode_tp": 1,
         "link_gbps": 400.0}  # fmt: skip


def test_the_commands_that_serve_say_what_the_deployment_does():
    vllm = "vllm serve Qwen/Qwen3-32B --tensor-parallel-size 2 --kv-cache-dtype fp8"
    assert serve_commands(BASE) == [vllm]
    assert serve_commands({**BASE, "replicas": 2, "router": "least-loaded"}) == [f"{vllm} --data-parallel-size 2"]
    first, second, router = serve_commands({**BASE, "replicas": 2, "router": "prefix-affinity"})
    assert (first, second) == tuple(
        f"CUDA_VISIBLE_DEVICES={devices} {vllm} --port {port} &" for devices, port in (("0,1", 8001), ("2,3", 8002))
    )
    assert "--policy cache_aware" in router and router.count("http://localhost:800") == 2
    more = {"kv_offloading_size": 128.0, "enable_prefix_caching": False, "max_num_seqs": 64}
    assert serve_commands({**BASE, **more}) == [
        "vllm serve Qwen/Qwen3-32B --tensor-parallel-size 2 --max-num-seqs 64 --kv-cache-dtype fp8 "
        "--no-enable-prefix-caching --kv-offloading-size 128"
    ]
    # Replicas are servers of their own: SGLang's ranks would share one's tokeniser.
    told = {"policy": "radix", "replicas": 2, "data_parallel_size": 3, "max_num_batched_tokens": 4096}
    sglang = (
        "python -m sglang.launch_server --model-path Qwen/Qwen3-32B --tp 2 --dp-size 3 --chunked-prefill-size 4096 "
        "--kv-cache-dtype fp8_e4m3"
    )
    assert serve_commands({**BASE, **told}) == [
        f"CUDA_VISIBLE_DEVICES=0,1,2,3,4,5 {sglang} --port 8001 &",
        f"CUDA_VISIBLE_DEVICES=6,7,8,9,10,11 {sglang} --port 8002 &",
        "python -m sglang_router.launch_router --policy power_of_two --port 8000 --worker-urls http://localhost:8001 "
        "http://localhost:8002",
    ]
    vllm_ranks = serve_commands({**BASE, "replicas": 2, "data_parallel_size": 3})
    assert [line.count("--data-parallel-size") for line in vllm_ranks] == [1, 1, 0]
    ranks = {"model": "deepseek-v3", "tp": 2, "data_parallel_size": 4}
    deepep = "sglang:enable-dp-attention=true,moe-a2a-backend=deepep"
    assert serve_commands({**ranks, "policy": deepep}) == [
        "python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 --tp 8 --dp-size 4 --enable-dp-attention "
        "--moe-a2a-backend deepep"
    ]
    whole = {"policy": "sglang:enable-dp-attention=true", "enable_expert_parallel": True}
    assert serve_commands({**ranks, **whole}) == [
        "python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 --tp 8 --dp-size 4 --ep-size 8 "
        "--enable-dp-attention"
    ]
    uneven = {"pipeline_parallel_size": 2, "pp_layer_partition": "30,31", "enable_expert_parallel": True}
    assert serve_commands({**ranks, **uneven, "all2all_backend": "deepep_low_latency"}) == [
        "env VLLM_PP_LAYER_PARTITION=30,31 vllm serve deepseek-ai/DeepSeek-V3 --tensor-parallel-size 2 "
        "--pipeline-parallel-size 2 --data-parallel-size 4 --enable-expert-parallel "
        "--all2all-backend deepep_low_latency"
    ]
    assert serve_commands({**BASE, "policy": "layerkv"})[0].startswith("# no server of today runs layerkv")


@pytest.mark.parametrize(
    ("drafting", "config"),
    [
        ("spec-method=ngram,spec-tokens=4", {"method": "ngram", "num_speculative_tokens": 4}),
        ("spec-method=mtp,spec-tokens=1,acceptance-rate=0.8", {"method": "mtp", "num_speculative_tokens": 1}),
        (
            "spec-method=draft_model,spec-tokens=3,spec-model=qwen3-8b",
            {"method": "draft_model", "num_speculative_tokens": 3, "model": "Qwen/Qwen3-8B"},
        ),
        ("spec-method=eagle3,spec-tokens=3", {"method": "eagle3", "num_speculative_tokens": 3, "model": "HEAD"}),
    ],
)
def test_servers_draft_as_the_deployment_does(drafting, config):
    """A plan's answer that drafts is not served by a command that does not; what only the user knows is said."""
    options = {**BASE, "policy": f"vllm-v1:{drafting}"}
    *said, command = serve_commands(options)
    words = shlex.split(command)
    assert json.loads(words[words.index("--speculative-config") + 1]) == config
    text = manifest(options)
    assert text is not None and "--speculative-config" in text
    assert [line.startswith("# HEAD: ") for line in said] == [True] * ("model" in config and config["model"] == "HEAD")
    assert text.startswith("".join(said))


@pytest.mark.parametrize(
    ("policy", "more", "told", "untold"),
    [
        ("vllm-v1:scheduling-policy=priority,watermark=0.02,scheduler-reserve-full-isl=false", {},
         "--scheduling-policy priority --watermark 0.02 --no-scheduler-reserve-full-isl", ""),
        ("vllm-v1:kv-offloading-size=64,blocks-per-chunk=4", {"num_gpu_blocks_override": 900},
         "--num-gpu-blocks-override 900 --kv-offloading-size 64", "--blocks-per-chunk 4"),
        ("sglang:schedule-policy=lpm,page-size=16,max-new-tokens=512", {"gpu_memory_utilization": 0.8},
         "--schedule-policy lpm --page-size 16", "--gpu-memory-utilization 0.8 --max-new-tokens 512"),
    ],
)  # fmt: skip
def test_a_server_is_told_all_that_was_asked_for_or_a_comment_says_what_is_not(policy, more, told, untold):
    """What runs is what was simulated: an option in the policy's text is as much asked for as a flag."""
    *comments, command = serve_commands({"model": "qwen3-32b", "gpu": "h100", "policy": policy, **more})
    assert command.endswith(f"Qwen/Qwen3-32B {told}")
    assert [f" says {untold}: " in line for line in comments] == [True] * bool(untold)


def test_an_engine_over_several_gpus_has_them_to_itself():
    engines = {**BASE, "pipeline_parallel_size": 2, "replicas": 2, "router": "prefix-affinity"}
    first, second, _ = serve_commands(engines)
    assert first.startswith("CUDA_VISIBLE_DEVICES=0,1,2,3 ") and second.startswith("CUDA_VISIBLE_DEVICES=4,5,6,7 ")


def test_no_server_drafts_with_its_own_model_at_a_budget_of_kv():
    options = {**BASE, "policy": "vllm-v1:spec-method=sparse_kv,spec-tokens=4,spec-kv-budget=4096"}
    (said,) = serve_commands(options)
    assert said.startswith("# no server of today runs vllm-v1:spec-method=sparse_kv")
    assert manifest(options) is None


@pytest.mark.parametrize("options", [BASE, {**BASE, "replicas": 3}, POOLS, {**BASE, "policy": "radix"}])
def test_the_manifest_is_yaml_with_the_engines_and_their_gpus(options):
    yaml = pytest.importorskip("yaml")
    text = manifest(options)
    assert text is not None
    found = [one for one in yaml.safe_load_all(text) if one["kind"] == "Deployment"]
    gpus = [
        one["spec"]["replicas"]
        * one["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
        for one in found
    ]
    assert sum(gpus) == engines({"replicas": 1, **options})


def test_the_run_command_is_the_run():
    options = {**POOLS, "workload": "fixed", "num_prompts": 20, "request_rate": 2.0, "seed": 3, "rate_scale": 1.25,
               "goodput": ("ttft:300", "tpot:50"), "enable_prefix_caching": False}  # fmt: skip
    words = shlex.split(run_command(options, "o"))
    scenario, policies, folder, _ = read_options(build_parser().parse_args(words[1:]), "vllm-v1")
    assert {name: getattr(scenario, name) for name in options if name != "policy"} == {
        name: value for name, value in options.items() if name != "policy"
    }
    assert policies[0][0] == POOLS["policy"] and str(folder) == "o"


# -- as a user has it -------------------------------------------------------------------------------------------------

COMMAND = (
    "plan --workload uniform --request-rate 6 --num-prompts 200 --input-len 300 --output-len 20 --model llama-2-7b "
    "--gpu l20 --max-gpus 2 --layouts engines --max-num-batched-tokens 2048 --kv-cache-dtype auto --seeds 2 --jobs 1 "
    "--slo p99_ttft_ms:1500 p99_tpot_ms:150 --out p"
)


def test_a_plan_of_simulated_runs_goes_on_where_it_was_and_is_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert kvtwin.main(COMMAND.split()) == 0
    told = capsys.readouterr().out
    assert "l20 (" in told and "What binds it: " in told and "\nvllm serve meta-llama/Llama-2-7b-hf" in told
    again = next(line for line in told.splitlines() if line.startswith("kvtwin run "))
    found = json.loads((tmp_path / "p" / "plan.json").read_bytes())
    saved = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "p" / "points").iterdir()}
    assert kvtwin.main(COMMAND.split()) == 0
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "p" / "points").iterdir()} == saved
    assert json.loads((tmp_path / "p" / "plan.json").read_bytes()) == found
    assert kvtwin.main([*shlex.split(again)[1:-1], "again", "--quiet"]) == 0
    ours, theirs = (kvtwin.load_result(tmp_path / name).result for name in ("p/answer", "again"))
    assert ours.p99_ttft_ms == theirs.p99_ttft_ms
    pytest.importorskip("plotly")
    assert kvtwin.main(["report", "p"]) == 0
    assert "What binds it: " in (tmp_path / "p" / "report.html").read_text(encoding="utf-8")


def test_how_far_off_the_slos_metrics_may_be_is_told_by_measured_rows():
    of_rows = {"median_ratio": 1.0, "rows": 9, "configurations": 6, "alike": "dense"}
    interval = {"low": 80.0, "high": 125.0, **of_rows}
    known = {"p99_ttft_ms": 100.0, "accuracy": {"share": 0.8, "intervals": {"p99_ttft_ms": interval}}}
    unlike = {"p99_ttft_ms": 100.0, "accuracy": {"share": 0.8, "intervals": {}, "unknown": "no measured rows"}}
    assert [*error_sentences(["p99_ttft_ms", "p99_tpot_ms"], [known])] == [
        "Measured over simulated, of 80% of servers like it: p99_ttft_ms 0.80 to 1.25.",
        "Error of p99_tpot_ms: unknown (too few measured rows).",
    ]
    assert [*error_sentences(["p99_ttft_ms"], [unlike])] == ["Error of p99_ttft_ms: unknown (no measured rows)."]
    # A run that an earlier version left.
    assert [*error_sentences(["p99_ttft_ms"], [{"p99_ttft_ms": 1.0}])] == [
        "Error of p99_ttft_ms: unknown (too few measured rows)."
    ]


def test_a_page_has_a_paragraph_a_sentence_and_lists_that_stand_apart():
    told = ["first", "  one", "  two", "last"]
    assert [*_paragraphs(told)] == ["", "first", "", "- one", "- two", "", "last"]


def test_deployments_are_alike_only_if_they_were_so_at_the_loads_near_the_best(monkeypatch):
    """All are given up at the same time one load above: those that sustained the best one at unlike TTFTs come on."""
    deployments = [Deployment({"ttft_ms": ttft_ms}, 1, "one engine", False, ()) for ttft_ms in (10.0, 20.0, 20.0)]

    def runs(asked, *_):
        return [
            Ran(options, 1, Outcome("k", missed_s=5.0) if options["rate_scale"] > 1.0 else Outcome("k", told(options)))
            for options in asked
        ]

    def told(options):
        return {"mean_ttft_ms": options["ttft_ms"], "completed": 40, "num_prompts": 40} | dict.fromkeys(
            ("mean_tpot_ms", "p99_ttft_ms", "p99_tpot_ms", "duration"), 1.0
        )

    monkeypatch.setattr(race, "runs", runs)
    monkeypatch.setattr(race, "_second", lambda raced, ground: raced)
    ground = race.Ground(lambda span_s, load: {}, [Slo("p99_ttft_ms", 100.0)], None, None, race.Work(None))
    found, refused = race.race(deployments, ground, 1.0)
    assert [one.deployment.options["ttft_ms"] for one in found] == [10.0, 20.0] and not refused
