"""What options are read as, refused for and prepared into, as it is pinned in `golden/setups.txt`.

    python tests/sim/pinned_setups.py      # writes golden/setups.txt anew

Every option of every policy at values about its limits, scenarios with options that do and do not go together, and a
seeded grid of models, GPUs, policies and limits with their pools, warnings and errors.
"""

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Literal, get_args

sys.path.insert(0, str(Path(__file__).parents[2]))

from goldens import GOLDEN, attempt, digest, rounded, write

from sim.option_values import base_type, convert, option_fields
from sim.parts.catalogue import CATALOGUE
from sim.policy_options import options_of, parse_policy, with_preemption_mode
from sim.prepare import Setup, prepare, with_one_swap_space
from sim.scenario import Scenario, build_scenario
from sim.specs import hardware
from sim.specs.json_file import built_in_names
from sim.specs.models import built_in_models
from sim.systems import POLICIES
from sim.systems.base import Asked

SETUPS = GOLDEN / "setups.txt"
PREPARED, IN_FULL = 700, 60
"""Setups, and those of them that stand with all their numbers."""
NUMBERS = (
    "-1",
    "0",
    "1e-3",
    "0.01",
    "0.5",
    "1",
    "1.5",
    "2",
    "3",
    "16",
    "100",
    "10000",
    "10001",
    "1e9",
    "1e13",
    "inf",
    "nan",
)
WORKLOAD = {"workload": "sharegpt"}


def values() -> Iterator[str]:
    """Values from flags and files, as each type of option reads them."""
    given = (
        True, False, 0, 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 1.0, 1.5, float("nan"), float("inf"), None, [],
        ["a"], [1], ("a", "b"), {}, "", "a", "a b", "true", "TRUE", "yes", "on", "1", "0", "no", "off", "false", "1e3",
        "1.5", "nan", "inf", str(2**53 + 1), " 7 ", "-3",
    )  # fmt: skip
    for hint in (int, float, bool, str, tuple[str, ...], Literal["a", "b"], int | None, Literal["a"] | None):
        yield f"{hint}: {[attempt(convert, '--it', value, hint) for value in given]}"


def summed(words: Sequence[object], answers: Sequence[object]) -> str:
    """Which of the words are taken, and how others are refused."""
    taken = [word for word, answer in zip(words, answers, strict=True) if not isinstance(answer, str)]
    refused = [answer for answer in answers if isinstance(answer, str)]
    return f"takes {taken}, refuses {len(refused)} {digest(refused)} {refused[-1:]}"


def options() -> Iterator[str]:
    """Every option of every policy, and of every part, about its limits."""
    owners = {name: (f"{name}:", kind) for name, kind in POLICIES.items()}
    kinds = {part.options for parts in CATALOGUE.values() for part in parts.values() if part.options is not None}
    for name, (head, kind) in owners.items():
        for option in options_of(kind):
            hint = base_type(option.hint)
            words = (*(get_args(hint) or ("true", "off")), "x") if hint not in (int, float) else NUMBERS
            answers = [attempt(parse_policy, f"{head}{option.name}={word}", {}) for word in words]
            yield f"{name} {option.full_name} = {option.field.default!r}: {summed(words, answers)}"
    for kind in sorted(kinds, key=lambda kind: kind.__name__):
        for one, hint in option_fields(kind):
            hint = base_type(hint)
            if hint in (int, float):
                read = [
                    convert("", word, hint) for word in NUMBERS if (hint is float and word != "nan") or word.isdigit()
                ]
                answers = [attempt(kind, **{one.name: value}) for value in read]
                yield f"{kind.__name__}.{one.name}: {summed(read, answers)}"
    for text in (
        "nobody", "vllm-v2", "sarathi:order", "sarathi:order=nobody", "sarathi:order=fcf", "sarathi:nobody=3",
        "orca:x=1", *(f"layerkv:predictor=bucket,predictor-accuracy={share}" for share in (-0.01, 0, 1, 1.01)),
        "sarathi:admission=slack,tpot-slo-ms=100", "sarathi:tpot-slo-ms=100", "layerkv: threshold = 0.5 , order=mlfq",
        "sarathi:batching=sglang,schedule-conservativeness=0.3,order=mlfq,quantum-ms=3", "layerkv:", "layerkv:,,", "",
    ):  # fmt: skip
        yield f"{text!r}: {attempt(parse_policy, text, {'layerkv_threshold': '0.25'})!r}"
    for text, mode in (
        ("vllm-swap:order=mlfq", "recompute"),
        ("vllm-recompute", "swap"),
        ("orca", "swap"),
        ("vllm-swap", "x"),
    ):
        yield f"{text} {mode}: {attempt(with_preemption_mode, text, mode)}"


def engines() -> Iterator[str]:
    """Limits of each policy's engine, as they are asked for."""
    grid = [
        Asked(length, seqs, tokens, chunked, gpu, memory)
        for length in (100, 2048, 40_000) for seqs in (None, 7, 300) for tokens in (None, 5, 512, 50_000)
        for chunked in (None, True, False) for gpu, memory in (("l20", 48e9), ("h100", 80e9), ("cpu", 3e11))
    ]  # fmt: skip
    for name in POLICIES:
        policy = parse_policy(name, {})[1]
        found: dict[str, int] = {}
        answers = [str(attempt(policy.engine_limits, asked)) for asked in grid]
        for answer in answers:
            found[answer] = found.get(answer, 0) + 1
        yield f"{name}: {digest(answers)} {len(found)} {[*found][:3]}"
        caching = [attempt(policy.prefix_caching, asked) for asked in (None, True, False)]
        yield f"{name} caches prefixes: {caching}"


def scenarios() -> Iterator[str]:
    """Each option alone at values about its limits, and beside options that it goes with."""
    beside: dict[str, dict[str, object]] = {
        "nothing": {}, "a workload": WORKLOAD, "sessions": {"workload": "sessions"}, "a trace": {"trace": "t.jsonl"},
        "an unknown workload": {"workload": "nobody"},
        "pools": {**WORKLOAD, "prefill_replicas": 2, "decode_replicas": 1, "link_gbps": 25.0},
        "engines": {**WORKLOAD, "replicas": 2},
    }  # fmt: skip
    for label, given in beside.items():
        yield f"{label}: {attempt(build_scenario, given)}"
        for one, hint in option_fields(Scenario):
            kind = base_type(hint)
            words: tuple[object, ...] = (0.0, -1.0, 1e-3, 1.0, 1.5, float("inf")) if kind is float else ("x",)
            words = (0, -1, 1, 2, 100_001, 10**9 + 1) if kind is int else (True, False) if kind is bool else words
            if kind == tuple[str, ...] or one.name in given:
                continue
            words = get_args(kind)[:1] or words
            answers = [attempt(build_scenario, {**given, one.name: word}) for word in words]
            yield f"{label}, {one.name}: {summed(words, answers)}"


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


def setups() -> Iterator[str]:
    """A grid of what is asked for, and what becomes of it."""
    two = {"prefill_replicas": 1, "decode_replicas": 1, "link_gbps": 50.0}
    for model, more in product(("gemma-2-9b", "mistral-7b-v0.1", "llama-2-7b"), ({}, {"enable_prefix_caching": True})):
        label, policy = parse_policy("vllm-v1:stage=hand-over", {})
        found = attempt(prepare, build_scenario({**WORKLOAD, **two, "model": model, **more}), label, policy)
        yield f"{model} {more}: {found.warnings if isinstance(found, Setup) else found}"
    for place in range(PREPARED):
        rng = random.Random(f"setup {place}")
        scenario = scenario_of(rng)
        text = policy_of(rng, scenario)
        label, policy = parse_policy(text, {})
        found = attempt(prepare, scenario, label, policy)
        answer = told(found) if isinstance(found, Setup) else str(found)
        yield f"{place} {text} {scenario.model} on {scenario.gpu}: {answer if place < IN_FULL else digest(answer)}"
        if place < IN_FULL:
            others = [parse_policy(name, {})[1] for name in rng.sample(sorted(POLICIES), 2)]
            given = with_one_swap_space(replace(scenario, swap_space=None), [policy, *others])
            yield f"{place} swap space: {given.swap_space}"


PINNED = {"values": values, "options": options, "engines": engines, "scenarios": scenarios, "setups": setups}


def main() -> None:
    write(SETUPS, PINNED)


if __name__ == "__main__":
    main()
