"""What every option of a system may be: the least and the most are taken, what lies beyond is refused by its name."""

from dataclasses import replace
from math import inf, nan
from typing import Any, NamedTuple

import pytest

from sim.errors import UserError
from sim.systems.adaptive_options import AdaptiveOptions
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
    """For whole numbers the next beyond are one off."""
    step = 1 if isinstance(low, int) else 1e-6 * abs(low) or 1e-9
    return Allowed(options, name, (low, high), (low - step, high + (1 if isinstance(high, int) else 1e-6 * high), nan))


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
    Allowed(OffloadOptions(), "kv_offloading_size", (0.0, 1e9), (-1e-9, 1e9 + 1)),
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
        with pytest.raises(UserError, match=rf"(?i){allowed.name.replace('_', '-')}: {value} "):
            replace(allowed.options, **{allowed.name: value})


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
