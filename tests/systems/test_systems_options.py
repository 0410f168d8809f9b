"""Options of systems: the least and the most are taken, what lies beyond is refused by its name; limits left open."""

import pytest
from msgspec.structs import replace

from sim.engine.predictor import BucketPredictor, NoPredictor, OraclePredictor
from sim.errors import UserError
from sim.options.policies import parse_policy
from sim.options.scenario import Scenario
from sim.run.prepare import prepare
from sim.systems import POLICIES, policy_named, register
from sim.systems.base import Asked

ALLOWED = [
    # system, option, values at the ends of what is taken, values just beyond
    ("ellm", "threads", ("64", "96"), ("80", "32")),
    ("ellm", "most-uncached-ratio", ("0", "1"), ("1.1", "-0.1")),
    ("fastserve", "num-levels", ("1", "64"), ("0", "65")),
    ("memserve", "caching", ("prefill",), ("4",)),
    ("vllm-v1", "watermark", ("0", "0.99"), ("1", "nan")),
    ("sglang:max-new-tokens=5", "ignore-eos", ("false",), ("true",)),
    ("sglang:schedule-policy=lpm", "enable-priority-scheduling", ("false",), ("true",)),
    ("sglang:chunked-prefill-size=-1", "enable-mixed-chunk", ("false",), ("true",)),
    ("sglang:disable-radix-cache=true", "enable-hierarchical-cache", ("false",), ("true",)),
    ("sarathi:memory=tiered", "disk-latency-us", ("0",), ("inf",)),
]
"""A kind of limit each; all options of all systems about their limits are pinned (`tests/pins/pinned_setups.py`)."""


@pytest.mark.parametrize(("system", "option", "taken", "refused"), ALLOWED)
def test_what_an_option_may_be(system: str, option: str, taken: tuple[str, ...], refused: tuple[str, ...]) -> None:
    text = f"{system}{',' if ':' in system else ':'}{option}="
    for value in taken:
        parse_policy(text + value, {})
    for value in refused:
        with pytest.raises(UserError, match=option):
            parse_policy(text + value, {})


@pytest.mark.parametrize(
    ("policy", "asked", "limits"),
    [
        # Whole prompts: a budget of the context's length, by default 2,048 at least.
        ("orca", {"max_model_len": 1000}, (256, 2048, False)),
        ("orca", {"max_model_len": 5000}, (256, 5000, False)),
        # Chunks: as many seats as the budget has tokens.
        ("sarathi", {"max_model_len": 5000, "max_num_batched_tokens": 100}, (100, 100, True)),
        ("sarathi", {"max_model_len": 5000, "max_num_batched_tokens": 300}, (256, 300, True)),
        # vLLM's own: 2,048 tokens, and 8,192 with 1,024 seats from 70 GiB on, but on an A100; 16,384 from 160.
        *(
            ("vllm-v1", {"max_model_len": 5000, "gpu_name": name, "gpu_memory_bytes": gib * 2.0**30}, (*found, True))
            for name, gib, found in (
                ("h100", 69.9, (256, 2048)),
                ("h100", 70, (1024, 8192)),
                ("a100-80g", 80, (256, 2048)),
                ("b200", 159.9, (1024, 8192)),
                ("b200", 160, (1024, 16384)),
            )
        ),
    ],
)
def test_limits_where_they_are_left_open(policy, asked, limits) -> None:
    found = POLICIES[policy]().engine_limits(Asked(**asked))
    assert (found.max_num_seqs, found.max_num_batched_tokens, found.enable_chunked_prefill) == limits


@pytest.mark.parametrize(
    ("policy", "least"),
    [("orca", {"max_num_batched_tokens": 5000}), ("sarathi", {"max_num_batched_tokens": 64, "max_num_seqs": 64})],
)
def test_a_budget_of_one_token_less_is_refused(policy, least) -> None:
    """Of the context's length where prompts are computed whole, of the seats where they are not."""
    asked = Asked(max_model_len=5000, **least)
    POLICIES[policy]().engine_limits(asked)
    with pytest.raises(UserError, match=r"max-num-batched-tokens: .* is less than "):
        POLICIES[policy]().engine_limits(replace(asked, max_num_batched_tokens=least["max_num_batched_tokens"] - 1))


def test_sglangs_own_words_set_the_limits_of_every_system() -> None:
    """Its pool is counted in tokens, and its pages are our blocks."""
    words = "page-size=8,max-total-tokens=4003,max-running-requests=7,chunked-prefill-size=64"
    setup = prepare(Scenario(workload="fixed"), *parse_policy(f"sglang:{words}", {}))
    assert (setup.limits.block_size, setup.limits.num_gpu_blocks) == (8, 500)
    assert (setup.limits.max_num_seqs, setup.limits.max_num_batched_tokens) == (7, 64)


def test_policies_are_known_by_name_before_they_are_imported() -> None:
    assert "orca" in POLICIES and "orka" not in POLICIES
    with pytest.raises(UserError, match=r"unknown policy 'orka'; did you mean 'orca'\? known: vllm-v1, vllm-recompute"):
        policy_named("orka")
    with pytest.raises(UserError, match=r"policy 'orca' is sim\.systems\.orca:Orca already; give a\.b:C another name"):
        register("orca", "a.b:C")
    register("orca", "sim.systems.orca:Orca")
    assert policy_named("orca").name == "orca"


def test_an_engine_has_the_predictor_that_a_part_mixed_in_asks_for() -> None:
    """Whichever system the part is of: those of `adaptive` were told nothing under another preset."""
    for text, kind in (
        ("vllm-v1", NoPredictor),
        ("vllm-v1:order=triage", BucketPredictor),
        ("vllm-v1:order=triage,predictor=oracle", OraclePredictor),
        ("vllm-v1:order=triage,predictor=none", NoPredictor),
        ("sarathi:admission=slack", OraclePredictor),
        ("layerkv:order=triage", OraclePredictor),
    ):
        assert isinstance(parse_policy(text, {})[1].length_predictor(0), kind), text


@pytest.mark.parametrize(
    ("text", "predictor", "tpot_slo_ms"),
    [
        ("layerkv:order=triage,predictor=none,tpot-slo-ms=30", "none", 30.0),
        ("vllm-recompute:order=triage,admission=slack", "bucket", 200.0),
        ("vllm-recompute:order=triage,admission=slack,predictor=oracle,tpot-slo-ms=30", "oracle", 30.0),
    ],
)
def test_options_of_one_name_are_one(text: str, predictor: str, tpot_slo_ms: float) -> None:
    """Slack took lengths for known where the engine's predictor was another's, and words reached one part of two."""
    policy = parse_policy(text, {})[1]
    for options in (policy, *policy.mixed_options) if "layerkv" in text else policy.mixed_options:
        assert (options.predictor, options.tpot_slo_ms or 200.0) == (predictor, tpot_slo_ms)


def test_the_hosts_pool_is_as_large_as_asked() -> None:
    """A chunk takes whole pages of 4 KiB: two blocks of 3,000 bytes take two."""
    for more, block_bytes, chunks in (
        ("kv-offloading-size=1,blocks-per-chunk=2", 3000.0, 2**30 // 8192),
        ("kv-offloading-size=1,blocks-per-chunk=2", 2048.0, 2**30 // 4096),
        ("kv-offloading-size=1,cpu-chunks=7", 3000.0, 7),
    ):
        assert parse_policy(f"vllm-v1:{more}", {})[1].num_chunks(block_bytes) == chunks
