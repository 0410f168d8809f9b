"""KV stored in 8 bits: what is read back, how far logits move, and that blocks travel as they are."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_small import SMALL, Runner

from gpu_runtime.kv.pool import KVPool
from gpu_runtime.kv.stored import FLOAT8, raw, to_stored
from gpu_runtime.model.attention import AttentionBatch, write_kv
from gpu_runtime.model.decoder import Decoder
from kvtwin.testing.engines import limits, requests
from kvtwin.testing.live import BLOCK_SIZE, ROWS, serve, tight_limits
from sim.options.policies import parse_policy

E4M3, E5M2 = FLOAT8
# Half a step between neighbours, relative: three and two bits of mantissa.
ROUNDING = {E4M3: 2**-4, E5M2: 2**-3}


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=30), st.sampled_from(FLOAT8))
def test_what_is_stored_is_the_nearest_value_or_the_largest(values, dtype):
    there = torch.tensor(values)
    back = to_stored(there, dtype).view(dtype).float()
    limit = torch.finfo(dtype).max
    assert back.isfinite().all()
    cut = there.clamp(-limit, limit)
    # Below the smallest normal number the steps are equal.
    least = torch.finfo(dtype).tiny
    assert ((back - cut).abs() <= cut.abs().clamp(min=least) * ROUNDING[dtype]).all()


def test_by_hand():
    """e4m3 has 448 as its largest value, and 16 and 18 as neighbours; e5m2 16 and 20."""
    values = torch.tensor([17.5, 500.0, -1e9, 0.0])
    assert to_stored(values, E4M3).view(E4M3).tolist() == [18.0, 448.0, -448.0, 0.0]
    assert to_stored(values, E5M2).view(E5M2).tolist() == [16.0, 512.0, -57344.0, 0.0]
    assert raw(values) is values
    assert to_stored(values, torch.bfloat16).dtype is torch.bfloat16


@pytest.mark.parametrize("dtype", [*FLOAT8, torch.bfloat16])
@pytest.mark.parametrize("layer_group", [1, SMALL.num_layers])
def test_logits_move_little(dtype, layer_group):
    """Keys and values are off by 2^-4 (e4m3) of themselves at most. Over prompts, chunks and decodes, logits are off by
    less than that share of how much they vary, since errors of many elements cancel."""
    decoder = Decoder.random(SMALL, device="cpu", dtype=torch.float32, seed=0)
    exact, stored = Runner(decoder, layer_group), Runner(decoder, layer_group, kv_dtype=dtype)
    bound = {E4M3: 2**-4, E5M2: 2**-3, torch.bfloat16: 2**-8}[dtype]
    worst = 0.0
    for new in (
        {0: list(range(40)), 1: [3, 5], 2: [9]},
        {0: list(range(50, 70)), 1: [7], 3: list(range(5))},
        {0: [1], 1: [2], 2: [3], 3: [4]},
        {0: [4], 1: [3], 2: [2], 3: [1]},
    ):
        expected, found = exact.step(new), stored.step(new)
        for seq in new:
            error = (found[seq] - expected[seq]).square().mean().sqrt() / expected[seq].std()
            worst = max(worst, float(error))
    assert 0.0 < worst < bound
    assert stored.pool.data.dtype is dtype
    assert stored.pool.block_bytes * 4 // dtype.itemsize == exact.pool.block_bytes


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**20), st.sampled_from(FLOAT8))
def test_blocks_hold_what_was_written(seed, dtype):
    """To the slots of the new tokens and nowhere else."""
    noise = torch.Generator().manual_seed(seed)
    pool = KVPool(SMALL, 4, 3, SMALL.num_layers, "cpu", dtype)
    batch = AttentionBatch.build([4], [1], [[[2, 0]]], 3, "cpu")
    keys, values = torch.randn(2, 4, SMALL.num_kv_heads, SMALL.head_dim, generator=noise)
    write_kv(keys, values, pool, 1, batch)
    held = pool.key_value(1).float()
    for token, (block, offset) in enumerate([(2, 1), (2, 2), (0, 0), (0, 1)]):
        torch.testing.assert_close(held[block, 0, :, offset], keys[token], rtol=ROUNDING[dtype], atol=2e-3)
        torch.testing.assert_close(held[block, 1, :, offset], values[token], rtol=ROUNDING[dtype], atol=2e-3)
    assert int((pool.raw != 0).sum()) <= 2 * 4 * SMALL.num_kv_heads * SMALL.head_dim


@pytest.mark.parametrize("policy", ["vllm-swap", "layerkv"])
@pytest.mark.parametrize("dtype", FLOAT8)
def test_tokens_survive_the_way_to_the_host_and_back(policy, dtype):
    """Bytes travel: what was swapped out, or offloaded layer by layer, has the tokens of a run with room for all."""
    preset, arrivals = parse_policy(policy, {})[1], requests(*ROWS)
    ample = limits(400, 400, block_size=BLOCK_SIZE, max_model_len=64)
    alone, tight = (serve(preset, arrivals, limit, dtype=dtype) for limit in (ample, tight_limits(preset)))
    assert tight.tokens == alone.tokens
    assert tight.device.memory.gpu.data.dtype is tight.device.memory.host.data.dtype is dtype
    counters = tight.counters
    assert counters.swap_out_blocks or counters.policy["prefills_offloaded"]
    assert not alone.counters.swap_out_blocks
