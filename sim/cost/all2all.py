"""`DeepEP`: what its kernels take to dispatch tokens to the GPUs of their experts, and to combine what these found.

Every kernel was timed by itself, and takes

    T = launch + experts x a + row_bytes x b + rows x (c + row_bytes / rate)

on each GPU, with `deepep.json`'s constants. A row of a dispatch is a token's hidden state: in FP8 with a scale for each
128 elements where experts are FP8 in blocks, else in 16 bits; of a combine always 16 bits. `validation/deepep.py` fits
the constants to public tables, and says how far rows of shapes left out are off.

- **Low latency**: a row for each expert chosen. Within a node all count; between nodes those that leave it, over RDMA.
- **High throughput**: a row for each GPU that has a chosen expert, the token's own among them; between nodes a row for
  each other node that has one.

Experts are chosen alike and at once: groups of experts (DeepSeek) would send fewer rows. Tables have rows in FP8 alone;
16 bits count as twice the bytes. Nothing is overlapped with computation.
"""

from functools import cache
from math import ceil, comb
from pathlib import Path

import msgspec

from sim.cost.model import ACTIVATION_BYTES
from sim.errors import UserError
from sim.specs.expert_layout import ALL_GATHER, GPUS_OF_A_NODE, HIGH_THROUGHPUT, LOW_LATENCY, ExpertLayout
from sim.specs.json_file import convert, read_json_object
from sim.specs.models import ModelSpec

TABLES = Path(__file__).with_name("deepep.json")
SCALED = 128
"""Elements that share a scale."""
BLOCK_FP8_BYTES = 1 + 4 / SCALED**2
"""Of a weight in FP8 in blocks of 128 by 128."""
HEADER_BYTES = 16
"""Of a row of a low-latency dispatch."""
HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
"""That there are low-latency kernels for; vLLM rounds up."""
ATOM_BYTES = 512
"""Of which the other kernels copy whole ones (vLLM's `maybe_roundup_layer_hidden_size`)."""
BUFFER_BYTES = 1 << 30
REMOVED = ("naive", "pplx")
OTHERS = (
    "deepep_v2", "mori_high_throughput", "mori_low_latency", "moonep", "nixl_ep", "flashinfer_nvlink_two_sided",
    "flashinfer_nvlink_one_sided", "flashinfer_all2allv",
)  # fmt: skip


class Kernel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Constants of one kernel; `bytes_per_s` is the rate of rows, over RDMA between nodes."""

    launch_s: float
    bytes_per_s: float
    s_per_expert: float = 0.0
    s_per_row_byte: float = 0.0
    s_per_row: float = 0.0

    def seconds(self, rows: float, row_bytes: float, num_experts: int) -> float:
        """Of so many rows, s."""
        fixed_s = self.launch_s + num_experts * self.s_per_expert + row_bytes * self.s_per_row_byte
        return fixed_s + rows * (self.s_per_row + row_bytes / self.bytes_per_s)


class Pair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The two kernels of a layer."""

    dispatch: Kernel
    combine: Kernel


class Timed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was timed on a GPU: kernels by backend and number of nodes."""

    gpus_per_node: int
    source: str
    deepep_low_latency: dict[str, Pair]
    deepep_high_throughput: dict[str, Pair]

    def kernels(self, backend: str) -> dict[str, Pair]:
        return self.deepep_low_latency if backend == LOW_LATENCY else self.deepep_high_throughput


@cache
def timed() -> dict[str, Timed]:
    """By the name of the GPU."""
    return convert(read_json_object(TABLES), dict[str, Timed], TABLES)


def check_backend(name: str) -> None:
    """UserError for an all-to-all backend without a price."""
    if name in (ALL_GATHER, HIGH_THROUGHPUT, LOW_LATENCY):
        return
    priced = f"give {ALL_GATHER}, {HIGH_THROUGHPUT} or {LOW_LATENCY}"
    if name in REMOVED:
        raise UserError(f"--all2all-backend {name}: vLLM has removed it and takes {ALL_GATHER} instead; {priced}")
    if name in OTHERS:
        raise UserError(f"--all2all-backend {name}: its kernels are not yet measured; {priced}")
    raise UserError(f"--all2all-backend {name}: vLLM has none of that name; {priced}")


def met(groups: int, num_experts: int, chosen: int) -> float:
    """Of that many equal groups of experts, those that the experts chosen for a token are of: the mean."""
    each = num_experts // groups
    return groups * (1 - comb(num_experts - each, chosen) / comb(num_experts, chosen))


def buffer_bytes(model: ModelSpec, layout: ExpertLayout, max_tokens: int) -> float:
    """On each GPU, of DeepEP's buffers in vLLM, where a rank has up to `max_tokens` in a step.

    High throughput: `VLLM_DEEPEP_BUFFER_SIZE_MB`, and as much again for RDMA. Low latency: two buffers to send from and
    two to receive in, each with a row for every token and expert of the model (`get_low_latency_rdma_size_hint`).
    """
    if layout.backend == HIGH_THROUGHPUT:
        return BUFFER_BYTES * (2 if layout.gpus > GPUS_OF_A_NODE else 1)
    assert model.moe
    hidden = _rounded(model.hidden_size, LOW_LATENCY)
    combined = hidden * ACTIVATION_BYTES + hidden // SCALED * 4
    return 4 * model.moe.num_experts * max_tokens * max(combined, HEADER_BYTES + hidden * ACTIVATION_BYTES)


def _rounded(hidden: int, backend: str) -> int:
    if backend == HIGH_THROUGHPUT:
        atom = ATOM_BYTES // ACTIVATION_BYTES
        return ceil(hidden / atom) * atom
    found = next((size for size in HIDDEN_SIZES if size >= hidden), None)
    if found is None:
        raise UserError(
            f"DeepEP ({backend}): it has kernels for hidden states of up to {HIDDEN_SIZES[-1]} elements, and "
            f"the model has {hidden}; take {HIGH_THROUGHPUT}"
        )
    return found


class DeepEP:
    """Dispatch and combine of one layer of a model; UserError where no such kernels were timed."""

    def __init__(self, backend: str, model: ModelSpec, gpu: str, layout: ExpertLayout) -> None:
        moe = model.moe
        assert moe
        where, known = f"DeepEP ({backend})", timed()
        if gpu not in known:
            raise UserError(
                f"{where}: on {gpu} it is not yet measured; take {ALL_GATHER}, or one of {', '.join(known)}"
            )
        found, gpus = known[gpu], layout.gpus
        nodes = ceil(gpus / found.gpus_per_node)
        kernels = found.kernels(backend)
        if str(nodes) not in kernels or (nodes > 1 and gpus % found.gpus_per_node):
            raise UserError(
                f"{where}: on {gpu} it was measured on {', '.join(kernels)} node(s) of {found.gpus_per_node} GPUs, not "
                f"on {gpus} GPUs; leave it out, or take other --data-parallel-size or --tp"
            )
        if moe.num_experts % gpus:
            raise UserError(f"{where}: {gpus} GPUs do not divide the {moe.num_experts} experts; take fewer or more")
        self.pair, self.tp, self.num_experts = kernels[str(nodes)], layout.tp, moe.num_experts
        hidden, chosen = _rounded(model.hidden_size, backend), moe.experts_per_token
        self.combine_bytes = self.dispatch_bytes = float(hidden * ACTIVATION_BYTES)
        if model.expert_dtype_bytes == BLOCK_FP8_BYTES:
            self.dispatch_bytes = hidden + hidden // SCALED * 4.0
        if backend == LOW_LATENCY:
            self.dispatch_bytes += HEADER_BYTES
            self.rows_per_token = chosen * (1 - 1 / nodes if nodes > 1 else 1)
        elif nodes == 1:
            self.rows_per_token = met(gpus, moe.num_experts, chosen)
        else:
            self.rows_per_token = met(nodes, moe.num_experts, chosen) * (1 - 1 / nodes)

    def seconds(self, tokens: int) -> float:
        """Of a rank's tokens, which its GPUs have a share of each, s."""
        rows = ceil(tokens / self.tp) * self.rows_per_token
        dispatch_s = self.pair.dispatch.seconds(rows, self.dispatch_bytes, self.num_experts)
        return dispatch_s + self.pair.combine.seconds(rows, self.combine_bytes, self.num_experts)
