"""The Triton kernels against plain torch, on CUDA or, with TRITON_INTERPRET=1, on a CPU. Run by test_runtime_triton."""

import os
import random
from dataclasses import fields, replace
from types import SimpleNamespace

import msgspec
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st
from runtime_small import SMALL, Runner
from triton.runtime import interpreter
from triton_compiles import LAYOUTS, SHAPES

from gpu_runtime.kv.pool import KVPool
from gpu_runtime.kv.stored import FLOAT8
from gpu_runtime.model import backend, decode_graph, torch_attention, triton_attention, triton_layer
from gpu_runtime.model.attention import AttentionBatch
from gpu_runtime.model.config import Experts
from gpu_runtime.model.decoder import Decoder
from gpu_runtime.model.experts import mix_experts
from gpu_runtime.model.kernels import Kernels
from gpu_runtime.model.rotary import RotaryEmbedding

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED and triton.__version__.startswith("3.6."):
    # Its interpreter makes scalars of arrays of one element, which numpy 2.4 refuses; 3.9's squeezes them first.
    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patched
DEVICE = "cpu" if INTERPRETED else "cuda"
# Triton's interpreter multiplies bf16 as if it were integers.
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]


def in_turn(values):
    """Each with every type; interpreted, which takes seconds, with one of them in turn."""
    return [(v, dtype) for i, v in enumerate(values) for dtype in (DTYPES[i % 2 :: 2] if INTERPRETED else DTYPES)]


NUM_NEW, CONTEXT = [1, 20, 1, 3, 1], [150, 0, 0, 70, 33]
"""Decodes, long, new and short; a prompt, and a chunk in the middle of one: how many tokens are new and cached."""
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def on_device(batch: AttentionBatch) -> AttentionBatch:
    values = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return replace(batch, **{n: v.to(DEVICE) for n, v in values.items() if isinstance(v, torch.Tensor)})


def make(shape: str, block_tokens: int, dtype: torch.dtype, num_new: list[int], context: list[int]):
    """A pool of two layers full of noise, a batch with scattered blocks in it, and the config."""
    config = msgspec.structs.replace(SMALL, num_layers=2, **SHAPES[shape])
    counts = [-(-(n + c) // block_tokens) for n, c in zip(num_new, context, strict=True)]
    pool = KVPool(config, sum(counts) + 1, block_tokens, 2, "cpu", dtype)
    noise = torch.randn(pool.data.shape, generator=torch.Generator().manual_seed(1))
    pool.data.copy_(noise.to(dtype))
    ids = pool.ids.allocate(sum(counts))
    random.Random(2).shuffle(ids)
    tables = [[ids.pop() for _ in range(count)] for count in counts]
    return config, pool, AttentionBatch.build(num_new, context, [tables], block_tokens, "cpu")


def close(ours, expected, dtype):
    torch.testing.assert_close(ours.cpu(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("shape", "block_tokens", "dtype", "stored"),
    [
        *((*layout, dtype, None) for layout, dtype in in_turn(LAYOUTS)),
        *(("gqa", 16, dtype, stored) for stored, dtype in in_turn(FLOAT8)),
    ],
)
def test_attention_of_decodes_and_chunks(shape, block_tokens, dtype, stored):
    config, pool, batch = make(shape, block_tokens, stored or dtype, NUM_NEW, CONTEXT)
    query = torch.randn(sum(NUM_NEW), config.num_heads, config.head_dim).to(dtype)
    cache, tables = pool.key_value(1), batch.block_tables[0]
    expected = torch_attention.paged_attention(query, cache, tables, batch, None)
    there = on_device(batch)
    arguments = (query.to(DEVICE), cache.to(DEVICE), tables.to(DEVICE), there)
    chunks = torch.zeros_like(arguments[0])
    triton_attention.attend_chunks(*arguments, there.chunk_seqs, chunks)
    for slots in (3, 12) if INTERPRETED else (3, 5, 60):
        out = chunks.clone()
        triton_attention.attend_decodes(*arguments, out, slots=slots)
        close(out, expected, dtype)


@pytest.mark.parametrize(("window", "dtype"), in_turn([1, 16, 37, 500]))
def test_attention_within_a_window(window, dtype):
    """Blocks that have left it are no more in the table (-1), which plain torch reads from behind."""
    config, pool, batch = make("gqa", 4, dtype, NUM_NEW, CONTEXT)
    for seq, cached in enumerate(CONTEXT):
        batch.block_tables[0, seq, : max(0, cached - window + 1) // 4] = -1
    query = torch.randn(sum(NUM_NEW), config.num_heads, config.head_dim).to(dtype)
    cache, tables = pool.key_value(1), batch.block_tables[0]
    expected = torch_attention.paged_attention(query, cache, tables, batch, None, window)
    there = on_device(batch)
    arguments = (query.to(DEVICE), cache.to(DEVICE), tables.to(DEVICE), there)
    out = torch.zeros_like(arguments[0])
    triton_attention.attend_chunks(*arguments, there.chunk_seqs, out, window)
    triton_attention.attend_decodes(*arguments, out, window, slots=20)
    close(out, expected, dtype)


@triton.jit
def tell_parts(seqs, seq_lens, told, count, slots, WINDOW: tl.constexpr):
    share = triton_attention._share(seqs, seq_lens, count, slots, 64, WINDOW, 4, 4)
    place, part, parts = triton_attention._part(tl.program_id(0), share, seqs, seq_lens, count, 64, WINDOW, 4)
    at = told + tl.program_id(0) * 4
    tl.store(at, share)
    tl.store(at + 1, place)
    tl.store(at + 2, part)
    tl.store(at + 3, parts)


@given(
    lengths=st.lists(st.one_of(st.integers(1, 400), st.integers(1, 20_000)), min_size=1, max_size=9),
    more=st.integers(0, 30),
    window=st.sampled_from([0, 300]),
)
@example(lengths=[32_768, *[100] * 7], more=16, window=0)
@settings(max_examples=3 if INTERPRETED else 200, deadline=None)
def test_parts_are_of_one_length_and_each_context_is_cut_into_them(lengths, more, window):
    """A long context among short ones was one program's work where the others fill the GPU."""
    count, slots = len(lengths), len(lengths) + more
    seqs, seq_lens = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (range(count), lengths))
    told = torch.zeros((slots, 4), dtype=torch.int32, device=DEVICE)
    tell_parts[(slots,)](seqs, seq_lens, told, count, slots, WINDOW=window)
    tiles = [-(-n // 64) - (max(0, n - window) // 64 if window else 0) for n in lengths]
    (share,) = set(told[:, 0].tolist())
    assert share == max(4, -(-sum(tiles) // max(1, more)))
    parts = [-(-n // share) for n in tiles]
    expected = [(place, part, n) for place, n in enumerate(parts) for part in range(n)]
    assert len(expected) <= slots
    found = [tuple(row[1:]) for row in told.tolist()]
    assert found[: len(expected)] == expected and all(n == 0 for _, _, n in found[len(expected) :])


@pytest.mark.parametrize("stored", FLOAT8)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_is_written_as_plain_torch_writes_it(dtype, stored):
    """Cut to the range, too; a value between two others may go either way where fp16 was computed in another order."""
    config, pool, batch = make("gqa", 4, stored, [5, 1, 9], [0, 30, 6])
    projected = torch.randn(15, config.q_size + 2 * config.kv_size).to(dtype)
    projected[2, -1], projected[3, -1] = 6e4, -6e4
    cache = pool.key_value(1).clone().to(DEVICE)
    rotary = RotaryEmbedding(config, "cpu")
    rotary.rotate_and_write(projected, None, None, pool, 1, batch)
    there = [t.to(DEVICE) for t in (rotary.table, batch.positions, batch.slot_mapping[0])]
    triton_layer.rotate_and_write(projected.to(DEVICE), None, config.rms_norm_eps, *there, cache)
    ours, expected = cache.cpu().float(), pool.key_value(1).float()
    assert ours.isfinite().all() and ours.abs().max() == expected.abs().max() > 400
    if INTERPRETED:
        # Triton's interpreter loses the carry where a value is rounded up to a power of two.
        lost = (ours * 2 == expected) & (expected.abs().log2() % 1 == 0)
        assert lost.float().mean() < 0.03
        ours = torch.where(lost, expected, ours)
    step = {torch.float8_e4m3fn: 1 / 8, torch.float8_e5m2: 1 / 4}[stored]
    torch.testing.assert_close(ours, expected, atol=2**-6, rtol=step)
    assert (ours != expected).float().mean() < 0.01


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("shape", ["gqa", "group-of-7"])
def test_rotation_and_write(shape, norm, dtype):
    config, pool, batch = make(shape, 4, dtype, [5, 1, 9], [0, 30, 6])
    projected = torch.randn(15, config.q_size + 2 * config.kv_size).to(dtype)
    norms = (torch.randn(config.head_dim).to(dtype), torch.randn(config.head_dim).to(dtype)) if norm else None
    cache, slots = pool.key_value(1).clone().to(DEVICE), batch.slot_mapping[0].clone()
    rotary = RotaryEmbedding(config, "cpu")
    slots[3] = -1
    skipped = batch.slot_mapping[0][3] // 4, ..., batch.slot_mapping[0][3] % 4, slice(None)
    kept = pool.key_value(1)[skipped].clone()
    expected = rotary.rotate_and_write(projected, *(norms or (None, None)), pool, 1, batch)
    pool.key_value(1)[skipped] = kept
    there = [t.to(DEVICE) for t in (rotary.table, batch.positions, slots)]
    norms = (norms[0].to(DEVICE), norms[1].to(DEVICE)) if norms else None
    ours = triton_layer.rotate_and_write(projected.to(DEVICE), norms, config.rms_norm_eps, *there, cache)
    for one, other in zip((*ours, cache), (*expected, pool.key_value(1)), strict=True):
        close(one, other, dtype)
    only_kv = projected[:, config.q_size :].contiguous().to(DEVICE)
    queries, keys, values = triton_layer.rotate_and_write(only_kv, norms, config.rms_norm_eps, *there, cache)
    assert queries.numel() == 0
    close(keys, expected[1], dtype)
    close(values, expected[2], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul(dtype):
    gate_up = 3 * torch.randn(3, 2 * 1300).to(dtype)
    close(triton_layer.silu_and_mul(gate_up.to(DEVICE)), Kernels().silu_and_mul(gate_up), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 5000])
def test_add_rms_norm(dtype, width):
    """In torch a sum and a norm are two kernels and, between them, one more trip of the residual to memory."""
    hidden, update, weight = (torch.randn(shape).to(dtype) for shape in ((3, width), (3, width), (width,)))
    found = triton_layer.add_rms_norm(hidden.to(DEVICE), update.to(DEVICE), weight.to(DEVICE), 1e-5)
    for ours, theirs in zip(found, Kernels().add_rms_norm(hidden, update, weight, 1e-5), strict=True):
        close(ours, theirs, dtype)


@pytest.mark.parametrize(("tokens", "dtype"), in_turn([1, 7, 90]))
def test_experts(tokens, dtype):
    """Five of which a token takes two, one that no token takes; tiles of 16 and of 32 rows, the last ones not full."""
    experts = Experts(5, 2, 20, renormalised=True, named_as_mixtral=False)
    shapes = {"router": (5, 48), "gate_up": (5, 40, 48), "down": (5, 48, 20)}
    weights = {name: (0.1 * torch.randn(shape)).to(dtype) for name, shape in shapes.items()}
    weights["router"][3] = -10
    hidden = (0.5 + torch.randn(tokens, 48).abs()).to(dtype)
    exact = SimpleNamespace(**{name: matrix.float() for name, matrix in weights.items()})
    expected = mix_experts(hidden.float(), exact, experts, Kernels().silu_and_mul).to(dtype)
    there = SimpleNamespace(**{name: matrix.to(DEVICE) for name, matrix in weights.items()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "uses_triton", lambda tensor: True)
        close(mix_experts(hidden.to(DEVICE), there, experts, triton_layer.silu_and_mul), expected, dtype)


@pytest.mark.skipif(not INTERPRETED, reason="test_runtime_cuda runs the decoder itself")
class TestDecoder:
    """The way a decoder takes on CUDA, with the interpreter in the place of the GPU."""

    @pytest.fixture
    def runners(self, monkeypatch):
        config = msgspec.structs.replace(SMALL, num_layers=2, qk_norm=True, qkv_bias=True, windows=(11, None))
        decoder = Decoder.random(config, device="cpu", dtype=torch.float32, seed=0)
        reference, runner = (Runner(decoder, block_tokens=4, seed=seed) for seed in (1, 2))
        monkeypatch.setattr(triton_attention, "_num_sms", lambda device: 8)
        monkeypatch.setattr(triton_attention, "SPLIT_TOKENS", 16)
        return reference, runner

    def test_logits_are_those_of_plain_torch(self, runners, monkeypatch):
        reference, runner = runners
        for new in (
            {0: range(20), 1: range(3), 2: [5]},
            {1: [7], 0: range(50, 70), 3: range(4)},
            {0: [1], 1: [2], 2: [3]},
        ):
            new = {seq: list(tokens) for seq, tokens in new.items()}
            expected = reference.step(new)
            with monkeypatch.context() as patch:
                patch.setattr(backend, "uses_triton", lambda tensor: True)
                logits = runner.step(new)
            for seq in new:
                torch.testing.assert_close(logits[seq], expected[seq], atol=2e-5, rtol=0)

    def test_a_padded_batch_gives_the_same_and_writes_nothing_else(self, runners, monkeypatch):
        reference, runner = runners
        graph = decode_graph.DecodeGraph(runner.decoder, runner.pool, [1, 4], 12, capture=lambda compute: compute)
        assert list(graph._replays) == [4, 1]
        prompts = {0: list(range(19)), 1: [3], 2: list(range(30, 40))}
        reference.step(prompts)
        runner.step(prompts)
        for new in ({0: [1], 1: [2], 2: [3]}, {1: [4]}, {2: [5], 0: [6]}):
            expected = reference.step(new)
            decodes = runner.decodes(new)
            free = runner.pool.data[runner.pool.ids._free].clone()
            with monkeypatch.context() as patch:
                patch.setattr(backend, "uses_triton", lambda tensor: True)
                logits = graph.run(*decodes).logits
            for row, seq in zip(logits, new, strict=True):
                torch.testing.assert_close(row, expected[seq][0], atol=2e-5, rtol=0)
            assert torch.equal(runner.pool.data[runner.pool.ids._free], free)
        for seq in prompts:
            for mine, theirs in zip(runner.tables[seq], reference.tables[seq], strict=True):
                torch.testing.assert_close(runner.pool.data[mine], reference.pool.data[theirs], atol=1e-5, rtol=1e-5)
