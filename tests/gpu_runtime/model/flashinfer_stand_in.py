"""What flashinfer 0.7.2 documents of the functions that we call, in plain torch: it refuses what flashinfer does.

Names and order of parameters are flashinfer's; those that we never pass are left out behind them.
"""

import torch
from torch.nn.functional import rms_norm, silu

PARAMETERS = {
    "rmsnorm": ["input", "weight", "eps"],
    "fused_add_rmsnorm": ["input", "residual", "weight", "eps"],
    "silu_and_mul": ["input"],
    "BatchDecodeWithPagedKVCacheWrapper.__init__": [
        "float_workspace_buffer", "kv_layout", "use_cuda_graph", "use_tensor_cores", "paged_kv_indptr_buffer",
        "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer",
    ],
    "BatchDecodeWithPagedKVCacheWrapper.plan": [
        "indptr", "indices", "last_page_len", "num_qo_heads", "num_kv_heads", "head_dim", "page_size",
    ],
    "BatchDecodeWithPagedKVCacheWrapper.run": ["q", "paged_kv_cache"],
    "BatchPrefillWithPagedKVCacheWrapper.__init__": ["float_workspace_buffer", "kv_layout"],
    "BatchPrefillWithPagedKVCacheWrapper.plan": [
        "qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "num_qo_heads", "num_kv_heads",
        "head_dim_qk", "page_size",
    ],
    "BatchPrefillWithPagedKVCacheWrapper.run": ["q", "paged_kv_cache"],
}  # fmt: skip
"""The first parameters of each, as release 0.7.2 has them."""


def rmsnorm(input, weight, eps=1e-6):
    assert input.is_contiguous() and weight.shape == input.shape[-1:]
    return rms_norm(input, weight.shape, weight, eps)


def fused_add_rmsnorm(input, residual, weight, eps=1e-6):
    """In place: `residual` becomes the sum of both, `input` its norm."""
    assert input.is_contiguous() and residual.is_contiguous() and input.shape == residual.shape
    assert input.data_ptr() != residual.data_ptr()
    residual += input
    input.copy_(rmsnorm(residual, weight, eps))


def silu_and_mul(input):
    assert input.is_contiguous()
    gate, up = input.chunk(2, dim=-1)
    return silu(gate) * up


class Wrapper:
    """What both wrappers share: plans, their checks, and attention over the pages that the buffers name at the time."""

    made = 0

    def __init__(self, float_workspace_buffer, kv_layout="NHD"):
        type(self).made += 1
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout in ("NHD", "HND")
        self.layout, self.is_fixed, self.shape = kv_layout, False, None
        self.plans = 0

    def _plan(self, queries, indptr, indices, last_page_len, shape, q_data_type, kv_data_type):
        for tensor in (queries, indptr, indices, last_page_len):
            assert tensor.dtype == torch.int32 and tensor.dim() == 1
        size = len(last_page_len)
        assert len(indptr) == len(queries) == size + 1
        assert indptr[0] == 0 and indptr[-1] == len(indices) and (indptr.diff() >= 1).all()
        num_qo_heads, num_kv_heads, _, page_size = shape
        assert num_qo_heads % num_kv_heads == 0
        assert ((last_page_len >= 1) & (last_page_len <= page_size)).all()
        self.queries, self.shape, self.types = queries, shape, (q_data_type, kv_data_type or q_data_type)
        self.plans += 1
        if not self.is_fixed:
            self.indptr, self.indices, self.last_page_len = indptr.clone(), indices.clone(), last_page_len.clone()
            return
        assert size == len(self.last_page_len), "the batch size is fixed in cudagraph mode"
        assert len(indices) <= len(self.indices), "the size of indices should be at most that of the buffer"
        self.indptr.copy_(indptr)
        self.last_page_len.copy_(last_page_len)
        self.indices[: len(indices)].copy_(indices)

    def run(self, q, paged_kv_cache):
        assert self.shape is not None, "plan before run"
        heads, kv_heads, head_dim, page_size = self.shape
        assert q.shape == (self.queries[-1], heads, head_dim)
        assert (q.dtype, paged_kv_cache.dtype) == self.types
        if self.layout == "HND":
            paged_kv_cache = paged_kv_cache.transpose(2, 3)
        assert paged_kv_cache.shape[1:] == (2, page_size, kv_heads, head_dim)
        out = torch.empty_like(q)
        for seq in range(len(self.last_page_len)):
            pages = self.indices[self.indptr[seq] : self.indptr[seq + 1]].long()
            length = (len(pages) - 1) * page_size + int(self.last_page_len[seq])
            bytes_ = paged_kv_cache.view(torch.uint8) if paged_kv_cache.element_size() == 1 else paged_kv_cache
            held = bytes_[pages].view(paged_kv_cache.dtype).to(q.dtype)
            keys, values = (held[:, part].flatten(0, 1)[:length] for part in (0, 1))
            rows = slice(int(self.queries[seq]), int(self.queries[seq + 1]))
            out[rows] = self._attend(q[rows], keys, values)
        return out

    def _attend(self, q, keys, values):
        group, late = q.shape[1] // keys.shape[1], len(keys) - len(q)
        keys, values = (part.repeat_interleave(group, dim=1) for part in (keys, values))
        scores = torch.einsum("nhd,lhd->hnl", q.float(), keys.float()) * q.shape[2] ** -0.5
        if self.causal:
            scores = scores.masked_fill(~torch.ones(len(q), len(keys)).tril(late).bool(), float("-inf"))
        return torch.einsum("hnl,lhd->nhd", scores.softmax(-1), values.float()).to(q.dtype)


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    causal = False

    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False,
        paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None,
    ):  # fmt: skip
        super().__init__(float_workspace_buffer, kv_layout)
        self.is_fixed = use_cuda_graph
        if use_cuda_graph:
            buffers = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
            assert all(torch.is_tensor(buffer) and buffer.dtype == torch.int32 for buffer in buffers)
            assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
            self.indptr, self.indices, self.last_page_len = buffers

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *,
        q_data_type="float16", kv_data_type=None,
    ):  # fmt: skip
        shape = num_qo_heads, num_kv_heads, head_dim, page_size
        queries = torch.arange(len(indptr), dtype=torch.int32)
        self._plan(queries, indptr, indices, last_page_len, shape, q_data_type, kv_data_type)


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, *, causal=False, q_data_type="float16", kv_data_type=None,
    ):  # fmt: skip
        self.causal = causal
        shape = num_qo_heads, num_kv_heads, head_dim_qk, page_size
        self._plan(
            qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, shape, q_data_type, kv_data_type
        )
