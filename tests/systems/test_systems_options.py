"""What every option of a system may be: the least and the most are taken, what lies beyond is refused by its name."""

import re
from dataclasses import replace
from math import inf, nan, nextafter
from typing import Any, NamedTuple

import pytest

from sim.errors import UserError
from sim.systems import POLICIES, policy_named, register
from sim.systems.adaptive_options import AdaptiveOptions
from sim.systems.base import Asked
from sim.systems.ellm_options import TokenWiseOptions
from sim.systems.fastserve_options import MlfqOptions
from sim.systems.hand_over_options import HandOverOptions, MixedPoolOptions
from sim.systems.layerkv_options import LayerKVOptions
from sim.systems.mooncake_options import ConductorOptions
from sim.systems.offload_options import OffloadOptions
from sim.systems.radix_options import RadixOptions
from sim.systems.tiered_options import RetentionOptions, TieredOptions
from sim.systems.vllm_v1_options import VllmV1Options


class Allowed(NamedTuple):
    """Values of an option at the ends of what is taken, and those next to them that are not."""

    options: Any
    name: str
    taken: tuple[float, ...]
    refused: tuple[float, ...]


def between(options: Any, name: str, low: float, high: float) -> Allowed:
    """The next numbers beyond are refused."""
    beyond = (low - 1, high + 1) if isinstance(low, int) else (nextafter(low, -inf), nextafter(high, inf))
    return Allowed(options, name, (low, high), (*beyond, nan))


GUESSED = {"predictor": "bucket"}
ALLOWED = [
    between(AdaptiveOptions(), "ttft_slo_ms", 1e-3, 1e9),
    between(AdaptiveOptions(), "tpot_slo_ms", 1e-3, 1e9),
    between(AdaptiveOptions(), "patience_s", 0.0, 1e9),
    between(AdaptiveOptions(), "predictor_accuracy", 0.0, 1.0),
    between(TokenWiseOptions(), "tpot_slo_ms", 1e-3, 1e9),
    between(TokenWiseOptions(), "layers_per_block", 1, 1000),
    Allowed(TokenWiseOptions(), "threads", (64, 96, 1 << 20), (32, 80, (1 << 20) + 32)),
    between(TokenWiseOptions(), "map_lookup_us", 0.0, 1e9),
    between(TokenWiseOptions(), "least_uncached_ratio", 0.0, 1.0),
    between(TokenWiseOptions(least_uncached_ratio=0.25), "most_uncached_ratio", 0.25, 1.0),
    between(MlfqOptions(), "quantum_ms", 1e-6, 1e9),
    between(MlfqOptions(), "quantum_factor", 1.0, 1e3),
    between(MlfqOptions(), "num_levels", 1, 64),
    between(MlfqOptions(), "starvation_s", 0.0, 1e9),
    between(MlfqOptions(), "starvation_check", 1, 10**9),
    between(MlfqOptions(), "min_free_blocks", 0, 10**12),
    Allowed(HandOverOptions(), "waiting_share", (1e-9, 1.0), (0.0, 1.0 + 1e-9, nan)),
    Allowed(MixedPoolOptions(), "max_pending_tokens", (1, 10**9), (0,)),
    between(LayerKVOptions(), "tpot_slo_ms", 1e-3, 1e9),
    between(LayerKVOptions(), "horizon_steps", 1, 10_000),
    between(LayerKVOptions(), "threshold", 0.0, 1.0),
    between(LayerKVOptions(**GUESSED), "predictor_accuracy", 0.0, 1.0),
    Allowed(ConductorOptions(), "balancing_threshold", (1.0, 1e9), (1.0 - 1e-9, nan)),
    *(
        Allowed(ConductorOptions(), name, (1e-9, 1e9), (0.0, -1.0, nan))
        for name in ("ttft_slo_ms", "tbt_slo_ms", "predicted_decode_s")
    ),
    Allowed(OffloadOptions(), "kv_offloading_size", (0.0, 1e9), (-1e-9, nextafter(1e9, inf))),
    Allowed(OffloadOptions(), "cpu_chunks", (0, 10**6), (-1,)),
    Allowed(OffloadOptions(), "blocks_per_chunk", (1, 1000), (0,)),
    Allowed(OffloadOptions(), "store_threshold", (0, 1000), (-1,)),
    Allowed(OffloadOptions(), "load_s_per_block", (0.0, 10.0), (-1e-9, inf, nan)),
    Allowed(OffloadOptions(), "store_s_per_block", (0.0, 10.0), (-1e-9, inf, nan)),
    between(RadixOptions(), "lpm_longest", 0, 10**12),
    between(RadixOptions(), "schedule_conservativeness", 0.0, 1e12),
    between(RadixOptions(), "max_new_tokens", 0, 10**12),
    between(TieredOptions(), "disk_space", 0.0, 1e9),
    Allowed(TieredOptions(), "disk_latency_us", (0.0, 1e9), (-1e-9, inf, nan)),
    Allowed(TieredOptions(), "disk_block_us", (0.0, 1e9), (-1e-9, inf, nan)),
    Allowed(TieredOptions(), "disk_read_gb_per_s", (1e-9, 1e9), (0.0, -1.0, nan)),
    Allowed(TieredOptions(), "disk_write_gb_per_s", (1e-9, 1e9), (0.0, -1.0, nan)),
    between(RetentionOptions(), "swap_out_threshold", 0.0, 1.0),
    Allowed(VllmV1Options(), "long_prefill_token_threshold", (0, 10**6), (-1,)),
    Allowed(VllmV1Options(), "watermark", (0.0, 1.0 - 1e-9), (-1e-9, 1.0, nan)),
]


@pytest.mark.parametrize("allowed", ALLOWED, ids=lambda one: f"{type(one.options).__name__}-{one.name}")
def test_what_an_option_may_be(allowed: Allowed) -> None:
    for value in allowed.taken:
        assert getattr(replace(allowed.options, **{allowed.name: value}), allowed.name) == value
    for value in allowed.refused:
        with pytest.raises(UserError, match=re.escape(f"{allowed.name.replace('_', '-')}: {value} ")):
            replace(allowed.options, **{allowed.name: value})


@pytest.mark.parametrize(
    ("policy", "asked", "limits"),
    [
        # Whole prompts: a budget of the context's length, by default 2,048 at least.
        ("orca", {"max_model_len": 1000}, (256, 2048, False)),
        ("orca", {"max_model_len": 5000}, (256, 5000, False)),
        ("orca", {"max_model_len": 5000, "max_num_batched_tokens": 5000, "max_num_seqs": 9}, (9, 5000, False)),
        (
            "orca",
            {"max_model_len": 300, "max_num_batched_tokens": 300, "enable_chunked_prefill": False},
            (256, 300, False),
        ),
        # Chunks: as many seats as the budget has tokens.
        ("sarathi", {"max_model_len": 5000, "max_num_batched_tokens": 100}, (100, 100, True)),
        ("sarathi", {"max_model_len": 5000, "max_num_batched_tokens": 300}, (256, 300, True)),
        ("sarathi", {"max_model_len": 5000, "max_num_batched_tokens": 64, "max_num_seqs": 64}, (64, 64, True)),
        (
            "sarathi",
            {"max_model_len": 5000, "max_num_batched_tokens": 64, "enable_chunked_prefill": True},
            (64, 64, True),
        ),
        (
            "vllm-v1",
            {"max_model_len": 5000, "max_num_batched_tokens": 100, "gpu_memory_bytes": 180 * 2.0**30},
            (100, 100, True),
        ),
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
    ("policy", "asked", "words"),
    [
        (
            "orca",
            {"enable_chunked_prefill": True},
            "--enable-chunked-prefill: orca computes prompts whole; leave it out",
        ),
        (
            "orca",
            {"max_num_batched_tokens": 4999},
            "--max-num-batched-tokens: 4999 is less than the context length 5000",
        ),
        ("vllm-v1", {"enable_chunked_prefill": False}, "--no-enable-chunked-prefill: vllm-v1 splits prompts as"),
        ("sarathi", {"enable_chunked_prefill": False}, "--no-enable-chunked-prefill: sarathi splits prompts"),
        (
            "sarathi",
            {"max_num_batched_tokens": 63, "max_num_seqs": 64},
            "63 is less than --max-num-seqs 64; raise the one",
        ),
    ],
)
def test_limits_that_a_system_cannot_have(policy, asked, words) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        POLICIES[policy]().engine_limits(Asked(**{"max_model_len": 5000} | asked))


def test_policies_are_known_by_name_before_they_are_imported() -> None:
    assert "orca" in POLICIES and "orka" not in POLICIES
    with pytest.raises(UserError, match=r"unknown policy 'orka'; did you mean 'orca'\? known: vllm-v1, vllm-recompute"):
        policy_named("orka")
    with pytest.raises(UserError, match=r"policy 'orca' is sim\.systems\.orca:Orca already; give a\.b:C another name"):
        register("orca", "a.b:C")
    register("orca", "sim.systems.orca:Orca")
    assert policy_named("orca").name == "orca"


@pytest.mark.parametrize("options", [AdaptiveOptions, LayerKVOptions])
def test_an_accuracy_goes_with_a_predictor_that_has_one(options) -> None:
    assert options(predictor="bucket", predictor_accuracy=0.5).predictor_accuracy == 0.5
    for predictor in ("oracle", "none"):
        with pytest.raises(UserError, match=f"goes with predictor=bucket, not {predictor}"):
            options(predictor=predictor, predictor_accuracy=0.5)


def test_pools_are_as_large_as_asked() -> None:
    """A chunk takes whole pages of 4 KiB: two blocks of 3,000 bytes take two."""
    assert OffloadOptions(kv_offloading_size=1.0, blocks_per_chunk=2).num_chunks(3000.0) == 2**30 // 8192
    assert OffloadOptions(kv_offloading_size=1.0, blocks_per_chunk=2).num_chunks(2048.0) == 2**30 // 4096
    assert OffloadOptions(kv_offloading_size=1.0, cpu_chunks=7).num_chunks(3000.0) == 7
    assert OffloadOptions().num_chunks(3000.0) == 0
    assert [OffloadOptions(**given).offloads for given in ({}, {"cpu_chunks": 0}, {"kv_offloading_size": 0.0})] == [
        False, True, True,
    ]  # fmt: skip
    assert TieredOptions(disk_space=2.0).num_disk_blocks(3 * 2.0**29) == 1
    assert TieredOptions(disk_space=3.0).num_disk_blocks(3 * 2.0**29) == 2
    assert TieredOptions().num_disk_blocks(1.0) == 0
