"""What options are read as, refused for and prepared into.

Every option of every policy at values about its limits, scenarios with options that do and do not go together, and a
seeded grid of models, GPUs, policies and limits with their pools, warnings and errors.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args

from pinned import Answers, Table, rounded

from sim.errors import UserError
from sim.options.policies import options_of, parse_policy
from sim.options.scenario import Scenario, build_scenario
from sim.options.values import base_type, option_fields
from sim.run.prepare import Setup, prepare, with_one_swap_space
from sim.specs import hardware
from sim.specs.json_file import built_in_names
from sim.specs.models import built_in_models
from sim.study.axes import read_study
from sim.study.plan import read_plan
from sim.study.regimes import read_map
from sim.study.serve_commands import manifest, run_command, serve_commands
from sim.study.tune import read_tune
from sim.systems import POLICIES
from sim.systems.base import Asked
from sim.topology.autoscalers import parse_autoscale

PREPARED, TOGETHER = 200, 20
"""Setups, and those of them that are one configuration."""
NUMBERS = (
    "-1", "0", "1e-3", "0.01", "0.5", "1", "1.5", "2", "3", "16", "100", "10000", "10001", "1e9", "1e13", "inf",
    "nan",
)  # fmt: skip
WORKLOAD = {"workload": "sharegpt"}


def attempt(of: Callable[..., object], *given: object, **named: object) -> object:
    """What a function gives, or how it refuses."""
    try:
        return of(*given, **named)
    except UserError as error:
        return str(error)


def of_policy(name: str) -> Answers:
    """Its options about their limits, and the limits of its engine as they are asked for."""
    options = list[str]()
    for option in options_of(POLICIES[name]):
        hint = base_type(option.hint)
        for word in (*(get_args(hint) or ("true", "off")), "x") if hint not in (int, float) else NUMBERS:
            answer = attempt(parse_policy, f"{name}:{option.name}={word}", {})
            options.append(f"{option.full_name}={word}: {answer if isinstance(answer, str) else 'taken'}")
    policy = parse_policy(name, {})[1]
    limits = [f"{asked}: {attempt(policy.engine_limits, asked)}" for asked in ASKED]
    limits += [f"caches prefixes, {asked}: {attempt(policy.prefix_caching, asked)}" for asked in (None, True, False)]
    return {"options": options, "limits": limits}


ASKED = [
    Asked(length, seqs, tokens, chunked, gpu, memory)
    for length in (100, 2048, 40_000) for seqs in (None, 7, 300) for tokens in (None, 5, 512, 50_000)
    for chunked in (None, True, False) for gpu, memory in (("l20", 48e9), ("h100", 80e9), ("cpu", 3e11))
]  # fmt: skip
TEXTS = (
    "nobody", "vllm-v2", "sarathi:order", "sarathi:order=nobody", "sarathi:order=fcf", "sarathi:nobody=3",
    "orca:x=1", *(f"layerkv:predictor=bucket,predictor-accuracy={share}" for share in (-0.01, 0, 1, 1.01)),
    "sarathi:admission=slack,tpot-slo-ms=100", "sarathi:tpot-slo-ms=100", "layerkv: threshold = 0.5 , order=mlfq",
    "sarathi:batching=sglang,schedule-conservativeness=0.3,order=mlfq,quantum-ms=3", "layerkv:", "layerkv:,,", "",
)  # fmt: skip
BESIDE: dict[str, dict[str, object]] = {
    "nothing": {}, "a workload": WORKLOAD, "sessions": {"workload": "sessions"}, "a trace": {"trace": "t.jsonl"},
    "an unknown workload": {"workload": "nobody"},
    "pools": {**WORKLOAD, "prefill_replicas": 2, "decode_replicas": 1, "link_gbps": 25.0},
    "engines": {**WORKLOAD, "replicas": 2},
}  # fmt: skip


def of_texts(name: str) -> Answers:
    """Policies as they are written."""
    return {"texts": [f"{text!r}: {attempt(parse_policy, text, {'layerkv_threshold': '0.25'})!r}" for text in TEXTS]}


def of_scenarios(label: str) -> Answers:
    """Each option alone at values about its limits, beside options that it goes with."""
    given, found = BESIDE[label], [f"{attempt(build_scenario, BESIDE[label])}"]
    for one, hint in option_fields(Scenario):
        kind = base_type(hint)
        words: tuple[object, ...] = (0.0, -1.0, 1e-3, 1.0, 1.5, float("inf")) if kind is float else ("x",)
        words = (0, -1, 1, 2, 100_001, 10**9 + 1) if kind is int else (True, False) if kind is bool else words
        if kind == tuple[str, ...] or one.name in given:
            continue
        for word in get_args(kind)[:1] or words:
            answer = attempt(build_scenario, {**given, one.name: word})
            found.append(f"{one.name}={word}: {answer if isinstance(answer, str) else 'taken'}")
    return {"options": found}


def scenario_of(rng: random.Random) -> Scenario:
    """Mostly what can be prepared."""
    gpus, models = built_in_names(Path(hardware.__file__).parent / "gpus"), built_in_models()
    given: dict[str, object] = {
        **WORKLOAD,
        "model": rng.choice(models),
        "gpu": rng.choice(gpus),
        "tp": rng.choice((1, 1, 2, 8)),
    }
    choices: dict[str, tuple[object, ...]] = {
        "max_model_len": (None, 700, 200_000), "max_num_seqs": (None, None, 64, 3000),
        "max_num_batched_tokens": (None, None, 128, 9000), "enable_chunked_prefill": (None, None, None, True, False),
        "enable_prefix_caching": (None, None, None, True, False), "gpu_memory_utilization": (0.9, 0.9, 0.5, 0.05, 1.0),
        "swap_space": (None, None, 0.0, 8.5), "num_gpu_blocks_override": (None, 500, 3), "block_size": (None, 32),
        "num_cpu_blocks_override": (None, None, 11), "kv_cache_dtype": ("auto", "auto", "fp8", "fp8_e5m2", "int8"),
        "quantization": (None, None, "fp8", "modelopt_fp4"), "dtype": ("auto", "auto", "float32", "half"),
        "cost_form": (None, None, None, "paper", "linear", "roofline"), "goodput": ((), ("ttft:300", "tpot:50")),
        "engine_profile": (None, None, None, "vllm-0.5", "vllm-v1-async"), "replicas": (None, None, 2),
        "disable_hybrid_kv_cache_manager": (False, False, True), "pipeline_parallel_size": (None, None, None, 2, 3),
    }  # fmt: skip
    given["max_model_len"] = 1000
    given |= {name: rng.choice(choices[name]) for name in rng.sample(sorted(choices), rng.randint(0, 6))}
    if given.get("num_cpu_blocks_override") is not None:
        # One of the two says what the host has.
        given["swap_space"] = None
    if given.get("num_gpu_blocks_override") is not None:
        # And what the GPU has.
        given["gpu_memory_utilization"] = 0.9
    if rng.random() < 0.25:
        given |= {"replicas": None, "prefill_replicas": 2, "decode_replicas": rng.choice((1, 3)), "link_gbps": 50.0}
        given |= {
            "prefill_tp": rng.choice((None, 2)),
            "decode_tp": rng.choice((None, 4)),
            "decode_gpu": rng.choice((None, "l20")),
        }
        given |= {"decode_pipeline_parallel_size": rng.choice((None, None, 2))}
    engines = given.get("replicas") or given.get("prefill_replicas")
    given["router"] = rng.choice((None, "least-loaded", "prefix-affinity")) if engines else None
    return build_scenario(given)


def policy_of(rng: random.Random, scenario: Scenario) -> str:
    """Mostly one that goes with pools where there are any."""
    pools = ("distserve", "splitwise", "splitwise:mixed-pool=true", "memserve", "mooncake", "vllm-v1:stage=hand-over")
    if scenario.prefill_replicas is not None and rng.random() < 0.8:
        return rng.choice(pools)
    own = ("layerkv:tpot-slo-ms=50", "layerkv:slo-aware=false", "vllm-v1:async-scheduling=true",
           "sarathi:memory=tiered", "vllm-v1:async-scheduling=false", "vllm-recompute", "vllm-swap",
           "sarathi:admission=slack,tpot-slo-ms=20")  # fmt: skip
    return rng.choice((*own, *POLICIES, *(["vllm-v1"] * 6)))


def told(setup: Setup) -> str:
    """What a setup resolves to."""
    pools = [setup] if setup.decode is None else [setup, setup.decode]
    found = [
        (pool.role, pool.hardware.name, pool.profile.name, pool.tp, pool.pp,
         pool.engine_profile and pool.engine_profile.name, pool.cost.__class__.__name__,
         *(rounded(getattr(pool.limits, field.name)) for field in fields(pool.limits)))
        for pool in pools
    ]  # fmt: skip
    return f"{found} {setup.policy.scheduling} {setup.warnings}"


def setup_of(place: int) -> Iterator[str]:
    """What is asked for, and what becomes of it."""
    rng = random.Random(f"setup {place}")
    scenario = scenario_of(rng)
    text = policy_of(rng, scenario)
    label, policy = parse_policy(text, {})
    found = attempt(prepare, scenario, label, policy)
    answer = told(found) if isinstance(found, Setup) else str(found)
    yield f"{place} {text} {scenario.model} on {scenario.gpu}: {answer}"
    if place < 60:
        others = [parse_policy(name, {})[1] for name in rng.sample(sorted(POLICIES), 2)]
        given = with_one_swap_space(replace(scenario, swap_space=None), [policy, *others])
        yield f"{place} swap space: {given.swap_space}"


def of_setups(name: str) -> Answers:
    """Several together."""
    first = int(name.split()[0])
    return {"setups": [line for place in range(first, first + TOGETHER) for line in setup_of(place)]}


ENGINES: dict[str, dict[str, object]] = {
    "one engine": {},
    "a large one": {"tp": 4, "pipeline_parallel_size": 2, "max_num_seqs": 64, "enable_prefix_caching": False,
                    "gpu_memory_utilization": 0.8, "swap_space": 2.0, "max_num_batched_tokens": 512, "dtype": "half"},
    "several": {"replicas": 3, "router": "prefix-affinity", "kv_cache_dtype": "fp8", "block_size": 32},
    "ranks": {"model": "qwen3-30b-a3b", "data_parallel_size": 2, "enable_expert_parallel": True, "max_model_len": 900},
    "pools": {"prefill_replicas": 2, "decode_replicas": 3, "prefill_tp": 2, "decode_tp": 4, "link_gbps": 50.0},
}  # fmt: skip
SERVED = (
    *POLICIES, "vllm-v1:async-scheduling=false,watermark=0.1,long-prefill-token-threshold=64",
    "vllm-v1:kv-offloading-size=8,offload-outputs=true", "vllm-v1:stage=hand-over", "vllm-v1:stage=nixl",
    "vllm-v1:spec-method=ngram,spec-tokens=3", "vllm-v1:spec-method=eagle3,spec-tokens=2,acceptance-rate=0.7",
    "vllm-v1:spec-method=draft_model,spec-tokens=4,spec-model=llama-2-7b,acceptance-rate=0.7", "vllm-v1:order=priority",
    "vllm-v1:enable-lora=true,max-loras=2,max-lora-rank=32", "sglang:schedule-policy=fcfs,max-new-tokens=99",
    "sglang:enable-dp-attention=true", "sglang:schedule-conservativeness=0.4,radix-eviction-policy=filo",
)  # fmt: skip


def of_servers(label: str) -> Answers:
    """How servers are started that do what was simulated, as commands and for Kubernetes; and the run's own command."""
    found = list[str]()
    for policy in SERVED:
        # A scenario has a list of policies.
        named = [policy] if label == "several" else policy
        options = {"model": "llama-2-7b", "gpu": "h100", "policy": named, **ENGINES[label], **WORKLOAD}
        for of in (serve_commands, manifest):
            answer = attempt(of, options)
            lines = answer.splitlines() if isinstance(answer, str) else answer or [None]
            found += [f"{policy}: {line}" for line in lines]  # pyright: ignore[reportGeneralTypeIssues]
    return {"servers": found, "run": [run_command({**WORKLOAD, **ENGINES[label], "goodput": ("ttft:300",)}, "o")]}


AXES: tuple[object, ...] = (
    [1], [2, 4], [2, 2], [], 3, ["x"], [True], [0.5, "auto"], {"log": [1, 8], "num": 4}, {"log": [0, 8], "num": 2},
    {"linear": [0, 9], "num": 5}, {"linear": [9, 9], "num": 2}, {"log": [1, 8]}, {"log": [1, 8], "num": 100_001},
    {"log": [1], "num": 2}, {"log": [1, 8], "linear": [1, 8], "num": 2}, {"linear": [0.1, float("inf")], "num": 2},
    {"linear": [1, 3], "num": 9}, {"log": [1, 8], "num": 1, "base": 2},
)  # fmt: skip
TRAFFIC = {**WORKLOAD, "num-prompts": 9, "policy": ["vllm-v1", "layerkv"], "goodput": ["ttft:300"]}
OF_STUDIES: tuple[dict[str, object], ...] = (
    {}, {"repeats": 0}, {"repeats": 100_001}, {"repeats": 50_000}, {"what": 1}, {"grid": 3}, {"metric": "tpot"},
    {"grid": {"seed": [1]}, "repeats": 2}, {"grid": {"num-prompts": [1, 2]}}, {"grid": {"quiet": [True]}},
    {"grid": {"request-rate": [1, 2]}, "zip": {"request-rate": [1, 2]}}, {"grid": {"hcache-keeps": ["turns"]}},
    {"zip": [{"tp": [1, 2], "seed": [3, 4]}, {"block-size": [16]}]}, {"zip": {"tp": [1, 2], "seed": [3]}},
    {"random": {"samples": 4, "tp": [1, 2, 4], "request-rate": {"log": [1, 9]}, "swap-space": {"linear": [0, 9]}}},
    {"random": {"samples": 0, "tp": [1]}}, {"random": {"tp": [1]}}, {"random": {"samples": 2, "tp": {"log": [1]}}},
    {"goal": "cost"}, {"goal": "goodput"}, {"slo": ["ttft:3"]}, {"slo": ["p99_ttft_ms:0"]}, {"trials": 0},
    {"trials": 100_001}, {"storage": "sqlite:///a.db"}, {"trials": 3, "storage": "sqlite:///a.db"},
    {"grid": {"tp": [1, 2], "seed": [0, 1], "block-size": [16, 32], "request-rate": [1, 2]}},
)  # fmt: skip
QUESTIONS: tuple[dict[str, object], ...] = (
    {}, {"slo": ("p99_ttft_ms:9",), "gpu": ("l20", "h100")}, {"objective": "cost"}, {"objective": "energy"},
    {"objective": "cost", "gpu_hour_usd": ("2.5",)}, {"gpu_hour_usd": ("h100=2",)}, {"gpu_hour_usd": ("0",)},
    {"gpu": ("l20", "h100"), "gpu_hour_usd": ("h100=2",)}, {"objective": "price"}, {"max_gpus": 0}, {"max_gpus": 64},
    {"max_gpus": 65}, {"seeds": 0}, {"seeds": 100}, {"seeds": 101}, {"layouts": "none"}, {"replicas": 2},
    {"data_parallel_size": 2}, {"enable_expert_parallel": True}, {"slo": ("goodput_attainment:0.9",)}, {"tp": 2},
)  # fmt: skip
RULES = (
    "hpa", "hpa:max=3", "hpa:max=1,target=2", "hpa:max=4,target=0", "hpa:max=4,target=1e5,min=5",
    "hpa:max=4.5,target=1", "hpa:max=4,target=2,metric=queue", "hpa:max=4,target=2,metric=waiting", "dynamo:max=2",
    "dynamo:max=2,itl-ms=0", "dynamo:max=100001", "dynamo:max=9,min=0", "dynamo:max=1", "dynamo", "keda:max=2",
    "hpa:target=nan,max=4", "hpa:target=1,max=4,tolerance=-1", "hpa:max=2,target=1,speed=1",
    "",
)  # fmt: skip


def of_studies(name: str) -> Answers:
    """What is read of axes, tables of studies, questions to plan, and rules of autoscalers, or how it is refused."""
    found = list[str]()
    if name == "axes":
        for axis in ("request-rate", "tp", "kv-cache-dtype", "enable-prefix-caching", "profile-gpu-speed", "router"):
            for given in AXES:
                study = attempt(read_study, {**TRAFFIC, "sweep": {"grid": {axis: given}}}, "sweep", "study.toml")
                found.append(
                    f"{axis} {given}: {study if isinstance(study, str) else study.values(axis.replace('-', '_'))}"
                )
    elif name == "tables":
        for given in OF_STUDIES:
            for section, read in (("map", read_map), ("tune", read_tune)):
                study = attempt(read, {**TRAFFIC, section: given}, "study.toml")
                found.append(f"{section} {given}: {study}")
            found.append(f"sweep {given}: {attempt(read_study, {**TRAFFIC, 'sweep': given}, 'sweep', 'study.toml')}")
    else:
        asked = {"workload": "sharegpt", "goodput": ("ttft:300",)}
        found += [f"{given}: {attempt(read_plan, {**asked, **given})}" for given in QUESTIONS]
        found += [f"{text}: {attempt(parse_autoscale, text)}" for text in RULES]
    return {"read": found}


TABLES = {
    "policies": Table(list(POLICIES), of_policy),
    "policies as written": Table(["odd"], of_texts),
    "scenarios": Table(list(BESIDE), of_scenarios),
    "studies": Table(["axes", "tables", "questions"], of_studies),
    "servers": Table(list(ENGINES), of_servers),
    "setups": Table([f"{place} to {place + TOGETHER - 1}" for place in range(0, PREPARED, TOGETHER)], of_setups),
}
