"""Layers with a sliding window keep no more than it, block by block as the simulator counts, and no token changes."""

from dataclasses import replace

import msgspec
import pytest
import torch
from runtime_small import GRAPHED, Warm

from gpu_runtime.model.decoder import Decoder
from kvtwin.testing.engines import requests
from kvtwin.testing.live import GROWING, ROWS, SMALL, check_tokens, serve, tight_limits
from sim.engine.limits import WindowLimits
from sim.errors import UserError
from sim.kv.hybrid import HybridMemory
from sim.specs.kv_format import like_groups
from sim.systems import POLICIES

GPU_BLOCKS = 14
"""Whole ones, fewer than the longest request has without windows."""


def windowed(*windows):
    config = msgspec.structs.replace(SMALL, num_layers=len(windows), windows=windows)
    return Decoder.random(config, device="cpu", dtype=torch.float32, seed=3)


def limits_of(decoder, policy, **sizes):
    windows, size = decoder.config.windows, 4
    (tokens,) = {window for window in windows if window}
    groups = like_groups(windows.count(None), len(windows) - windows.count(None))
    window = WindowLimits(tokens, groups.num_full, groups.num_window, -(-tokens // size), bool(windows[0]))
    return replace(tight_limits(policy, **sizes), window=window)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("windows", [(9, None, 9, 9), (None, 6, 6, None), (5, 5, None, 5, None), (7, 7, 7, 7)], ids=str)
def test_what_has_left_a_window_serves_others(windows, ahead):
    """Groups of one layer and of two, with one left over, and without a full one; requests outgrow the pool.

    Scheduled ahead, the step under way still reads what the next one has left.
    """
    policy, decoder = POLICIES["vllm-v1"](async_scheduling=ahead), windowed(*windows)
    arrivals, preemptions = requests(*GROWING), 0
    for chunked in (False, True):
        served = serve(policy, arrivals, limits_of(decoder, policy, chunked=chunked, gpu=GPU_BLOCKS), decoder=decoder)
        assert isinstance(served.scheduler.memory, HybridMemory)
        assert len(check_tokens(served, arrivals)) == len(arrivals)
        preemptions += served.counters.preemptions
    assert preemptions


def test_graphs_have_a_table_for_each_group():
    """Captured once, they read blocks that move on and leave out those that are given back."""
    policy, decoder, arrivals = POLICIES["vllm-v1"](async_scheduling=True), windowed(9, None, 9, 9), requests(*GROWING)
    served = serve(policy, arrivals, limits_of(decoder, policy, gpu=GPU_BLOCKS), decoder=decoder, kind=Warm, **GRAPHED)
    assert len(check_tokens(served, arrivals)) == len(arrivals)


def test_the_window_is_what_makes_these_tokens():
    """Else the test above would hold of a decoder that attends to all."""
    policy, arrivals = POLICIES["vllm-v1"](async_scheduling=False), requests(*ROWS)
    both = []
    for decoder in (windowed(9, None, 9, 9), windowed(500, None, 500, 500)):
        both.append(serve(policy, arrivals, limits_of(decoder, policy, gpu=60), decoder=decoder).tokens)
    assert both[0] != both[1]


def test_memories_that_keep_no_windows_are_refused():
    decoder = windowed(9, None, 9, 9)
    limit = limits_of(decoder, POLICIES["vllm-recompute"]())
    with pytest.raises(UserError, match="serve with --policy vllm-v1"):
        serve(POLICIES["vllm-recompute"](), requests(*ROWS), limit, decoder=decoder)
    with pytest.raises(UserError, match="give --no-enable-prefix-caching"):
        serve(
            POLICIES["vllm-v1"](async_scheduling=False),
            requests(*ROWS),
            replace(limit, enable_prefix_caching=True),
            decoder=decoder,
        )
