"""Paged attention over scattered blocks is dense causal attention, for any mix of chunks and decodes."""

import random

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_small import SMALL

from gpu_runtime.kv.pool import KVPool
from gpu_runtime.model import torch_attention
from gpu_runtime.model.attention import AttentionBatch, paged_attention, write_kv


def dense(query, keys, values):
    """[n, heads, d] of the last n tokens over [length, kv_heads, d], in double precision."""
    n, length, group = len(query), len(keys), query.shape[1] // keys.shape[1]
    keys, values = (t.double().repeat_interleave(group, dim=1) for t in (keys, values))
    scores = torch.einsum("nhd,lhd->hnl", query.double(), keys) * query.shape[2] ** -0.5
    future = torch.arange(length) > torch.arange(length - n, length)[:, None]
    weights = scores.masked_fill(future, float("-inf")).softmax(-1)
    return torch.einsum("hnl,lhd->nhd", weights, values).float()


sequences = st.lists(st.tuples(st.one_of(st.just(1), st.integers(1, 20)), st.integers(0, 30)), min_size=1, max_size=6)


@settings(deadline=None, max_examples=60)
@given(
    sequences,
    st.integers(1, 9),
    st.sampled_from([(4, 4, 8), (6, 2, 4), (5, 1, 2)]),
    st.sampled_from([1, 2, 3]),
    st.booleans(),
    st.integers(0, 2**20),
)
def test_any_batch_is_dense_attention(lengths, block_tokens, heads, layer_group, at_hand, seed):
    num_heads, num_kv_heads, head_dim = heads
    dice, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    config = msgspec.structs.replace(
        SMALL, num_layers=3, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
    )
    num_new, context = [n for n, _ in lengths], [c for _, c in lengths]
    counts = [-(-(n + c) // block_tokens) for n, c in lengths]
    groups = -(-3 // layer_group)
    pool = KVPool(config, groups * sum(counts), block_tokens, layer_group, "cpu", torch.float32)
    ids = pool.ids.allocate(pool.num_blocks)
    dice.shuffle(ids)
    tables = [[[ids.pop() for _ in range(count)] for count in counts] for _ in range(groups)]
    layer = dice.randrange(3)
    kept = [torch.randn(2, n + c, num_kv_heads, head_dim, generator=noise) for n, c in lengths]
    for (_, cached), table, (keys, values) in zip(lengths, tables[layer // layer_group], kept, strict=True):
        if cached:
            batch = AttentionBatch.build([cached], [0], [[table]] * groups, block_tokens, "cpu")
            write_kv(keys[:cached], values[:cached], pool, layer, batch)
    batch = AttentionBatch.build(num_new, context, tables, block_tokens, "cpu")
    new = [torch.cat([part[i][cached:] for (_, cached), part in zip(lengths, kept, strict=True)]) for i in (0, 1)]
    write_kv(new[0], new[1], pool, layer, batch)
    query = torch.randn(sum(num_new), num_heads, head_dim, generator=noise)
    out = paged_attention(query, pool, layer, batch, (new[0], new[1]) if at_hand else None)
    for ours, own, (keys, values) in zip(out.split(num_new), query.split(num_new), kept, strict=True):
        torch.testing.assert_close(ours, dense(own, keys, values), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("portion", [1, 5 * 8 * 2 * 4 * 16 * 4])
def test_decodes_gathered_in_several_portions_give_the_same(monkeypatch, portion):
    pool = KVPool(SMALL, 40, 4, 4, "cpu", torch.float32)
    pool.data.normal_()
    context = [0, 11, 30, 3, 17]
    ids = iter(torch.randperm(40).tolist())
    tables = [[[next(ids) for _ in range(-(-(c + 1) // 4))] for c in context]]
    batch = AttentionBatch.build([1] * 5, context, tables, 4, "cpu")
    query = torch.randn(5, SMALL.num_heads, SMALL.head_dim)
    whole = paged_attention(query, pool, 2, batch)
    monkeypatch.setattr(torch_attention, "GATHER_BYTES", portion)
    torch.testing.assert_close(paged_attention(query, pool, 2, batch), whole)


@pytest.mark.parametrize(
    ("num_new", "context", "tables", "message"),
    [
        ([], [], [[]], "must be positive"),
        ([1], [-1], [[[1]]], "not negative"),
        ([1, 1], [0], [[[1]]], "as long"),
        ([3], [2], [[[1]]], "group 0, sequence 0: 1 blocks given, 2 needed"),
        ([1, 1], [0, 0], [[[1]]], "block tables of 1 sequences, the batch has 2"),
        ([3], [2], np.zeros((1, 1, 1), dtype=np.int32), "1 sequences need"),
    ],
)
def test_a_batch_that_does_not_fit_together_is_refused(num_new, context, tables, message):
    with pytest.raises(ValueError, match=message):
        AttentionBatch.build(num_new, context, tables, 4, "cpu")
