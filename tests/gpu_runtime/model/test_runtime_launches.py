"""How often kernels are launched where there is CUDA, with the kernels themselves pretended; and what warms them up."""

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import msgspec
from runtime_small import SMALL, Runner

from gpu_runtime.kv.pool import KVPool
from gpu_runtime.layers.warm_up import batches
from gpu_runtime.model import attention, backend, torch_attention, triton_attention
from gpu_runtime.model.attention_batch import LONG_PROMPT, AttentionBatch
from gpu_runtime.model.decoder import Decoder
from gpu_runtime.model.kernels import Kernels
from kvtwin.testing import limits


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels, and the sequences that each serves."""
    calls = []
    monkeypatch.setattr(backend, "uses_triton", lambda tensor: True)
    monkeypatch.setattr(torch_attention, "scaled_dot_product_attention", lambda q, *_, **__: calls.append("alone") or q)
    monkeypatch.setattr(
        triton_attention, "attend_chunks", lambda q, c, t, b, seqs, *_: calls.append(("chunks", seqs.tolist()))
    )
    monkeypatch.setattr(
        triton_attention, "attend_decodes", lambda q, c, t, b, *_: calls.append(("decodes", b.decode_seqs.tolist()))
    )
    return calls


class Flash:
    """In the place of `aten::_flash_attention_forward`: what it documents, and the lengths of every call."""

    def __init__(self):
        self.calls = []

    def __call__(self, q, k, v, starts, k_starts, longest, k_longest, dropout, causal, mask, *, scale, **sides):
        lengths = starts.diff().tolist()
        assert starts.equal(k_starts) and starts.dtype == torch.int32 and (dropout, causal, mask) == (0.0, True, False)
        assert longest == k_longest == max(lengths) and len(q) == len(k) == len(v) == sum(lengths)
        self.calls.append(lengths)
        parts = []
        for one in zip(*(part.split(lengths) for part in (q, k, v)), strict=True):
            q_, k_, v_ = (part.transpose(0, 1)[None] for part in one)
            seen = torch.ones(len(one[0]), len(one[0]), dtype=torch.bool).tril(sides.get("window_size_right", 0))
            seen = seen.triu(-sides.get("window_size_left", len(seen)))
            parts.append(REAL_SDPA(q_, k_, v_, attn_mask=seen, scale=scale, enable_gqa=True)[0].transpose(0, 1))
        return torch.cat(parts), None, None, None, None


REAL_SDPA = torch.nn.functional.scaled_dot_product_attention


@pytest.fixture
def flash(launched, monkeypatch):
    """On a GPU for which it is there."""
    found = Flash()
    monkeypatch.setattr(backend, "uses_flash", lambda query: True)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", found)
    return found


def attend(num_new, context, kv_dtype=torch.float32, window=None):
    width = max((n + c + 15) // 16 for n, c in zip(num_new, context, strict=True))
    pool = KVPool(msgspec.structs.replace(SMALL, windows=(window,) * 4), width, 16, 4, "cpu", kv_dtype)
    tables = [[list(range(width))] * len(num_new)]
    batch = AttentionBatch.build(num_new, context, tables, 16, "cpu")
    query, key, value = (torch.randn(sum(num_new), heads, 16) for heads in (6, 2, 2))
    return attention.paged_attention(query, pool, 0, batch, (key, value)), query, key, value, batch


def test_short_prompts_share_a_kernel_with_each_other_and_with_chunks(launched):
    attend([128] * 64, [0] * 64)
    assert launched == [("chunks", list(range(64)))]
    launched.clear()
    attend([20, 1, 30, 9], [0, 7, 16, 0])
    assert launched == [("chunks", [2, 0, 3]), ("decodes", [1])]


def test_a_prompt_that_fills_the_gpu_has_its_own(launched):
    attend([LONG_PROMPT, 40, LONG_PROMPT + 3], [0, 0, 0])
    assert launched == ["alone", "alone", ("chunks", [1])]


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn])
def test_prompts_of_an_iteration_share_one_call_whatever_their_lengths(launched, flash, kv_dtype):
    """A call a prompt through torch's SDPA is cuDNN's on Hopper, whose plan for each new length takes tens of ms."""
    attend([513, 700, 2, 611], [0] * 4, kv_dtype)
    assert flash.calls == [[513, 700, 2, 611]] and launched == []


@pytest.mark.parametrize("window", [None, 3])
def test_prompts_attend_as_in_plain_torch_where_chunks_lie_between_them(launched, flash, window, monkeypatch):
    found, query, key, value, batch = attend([5, 1, 30, 9, 4], [0, 7, 16, 0, 0], window=window)
    assert flash.calls == [[5, 9, 4]] and launched == [("chunks", [2]), ("decodes", [1])]
    assert batch.prompt_rows.tolist() == [*range(5), *range(36, 49)]
    monkeypatch.setattr(torch_attention, "scaled_dot_product_attention", REAL_SDPA)
    expected = torch.empty_like(query)
    torch_attention.attend_prompts(query, key, value, batch, expected, window=window)
    torch.testing.assert_close(found[batch.prompt_rows], expected[batch.prompt_rows])


def test_each_sum_is_one_kernel_with_the_norm_behind_it():
    """Those behind an MLP were two: the sum, and the next layer's norm of it."""

    class Counted(Kernels):
        calls: ClassVar = []

        def rms_norm(self, *facts):
            self.calls.append("norm")
            return super().rms_norm(*facts)

        def add_rms_norm(self, hidden, update, weight, epsilon):
            self.calls.append("sum and norm")
            return hidden + update, Kernels().rms_norm(hidden + update, weight, epsilon)

    runner = Runner(Decoder.random(SMALL, device="cpu", dtype=torch.float32, seed=1))
    expected = runner.step({0: [1, 2]})[0]
    runner.decoder.compute_with(Counted())
    assert torch.equal(runner.step({1: [1, 2]})[1], expected)
    assert Counted.calls == ["norm", *["sum and norm"] * 8]


def test_without_flash_a_long_prompt_never_takes_cudnn(monkeypatch):
    """In fp32, or before Ampere; what torch chooses among is what is allowed when it is asked."""
    allowed = []
    monkeypatch.setattr(
        torch_attention, "_attend_prompts", lambda *_: allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
    )
    torch_attention.attend_prompts(SimpleNamespace(is_cuda=True), None, None, None, None)
    assert allowed == [False] and torch.backends.cuda.cudnn_sdp_enabled()


def test_warming_up_reaches_the_longest_prompt_the_most_tokens_and_the_most_sequences():
    sizes = limits(600, block_size=16, max_model_len=2048, seqs=64, chunked=True, tokens=8192)
    decoder = SimpleNamespace(config=SMALL, device=torch.device("cuda"))
    found = list(batches(decoder, sizes))
    # The model's positions end before the limit.
    assert max(n + c for new, cached in found for n, c in zip(new, cached, strict=True)) == 512
    assert max(sum(new) for new, _ in found) == 8192
    assert ([1], [511]) in found and ([512], [0]) in found
    assert ([128] * 64, [0] * 64) in found and ([1] * 64, [7] * 64) in found
    # What a CPU would be long about is left out there.
    decoder.device = torch.device("cpu")
    assert max(sum(new) for new, _ in batches(decoder, sizes)) < 20
