"""What fits into this machine's memory: weights first, then pools beside what computing takes.

Pools of a policy's own default size are cut to what is free, those that were asked for are refused if they do not fit.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from gpu_runtime.device_memory import check_executable, scratch_blocks
from gpu_runtime.kv.copy_engine import STAGING_BYTES
from gpu_runtime.model.capture_sizes import LARGEST_CAPTURE, capture_sizes, piece_sizes
from gpu_runtime.model.config import DecoderConfig
from gpu_runtime.model.decode_graph import Metadata
from gpu_runtime.model.decoder import Decoder
from gpu_runtime.model.fp8 import KEPT_ON
from gpu_runtime.model.sampling import WORK_BYTES
from sim.engine.changes import Direction
from sim.engine.limits import Limits
from sim.errors import UserError
from sim.options.scenario import Scenario
from sim.parts.options import GIB
from sim.parts.stage.speculative import Speculative
from sim.run.prepare import prepare
from sim.run.runs import Recording, build_engine
from sim.systems.base import Policy
from sim.systems.hcache.saved_states import TieredStates

DEFAULT_SHARE = 4
"""Unless told otherwise a pool takes at most one part in so many of the memory that is free."""
KEPT_SHARE = 0.05
"""Of a CUDA device's free memory, what pools of default size leave: for loaded code, graphs' nodes, fragments
(assumed)."""
CGROUP = Path("/sys/fs/cgroup")
PRODUCT_WORKSPACE_BYTES = 32 * 2**20
PRODUCT_STREAMS = 2
"""torch gives cuBLAS so much on Hopper, and less before, for each stream that computes: the current one and the one
that captures."""


def free_bytes(device: str) -> int:
    """Bytes that can be taken on a CUDA device, as it says itself, or of the host, as its containers' limits say."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    free = psutil.virtual_memory().available
    # "max" where there is no limit, and no file where there are no control groups of version 2.
    with suppress(OSError, ValueError):
        free = min(free, int((CGROUP / "memory.max").read_text()) - int((CGROUP / "memory.current").read_text()))
    return free


def check_weights(config: DecoderConfig, dtype: torch.dtype, device: str) -> None:
    """UserError unless the weights fit, before anything of them is there."""
    needed, free = config.num_weights * dtype.itemsize, free_bytes(device)
    if device in KEPT_ON:
        needed -= config.num_fp8_weights * (dtype.itemsize - 1)
    if needed > free:
        name = str(dtype).removeprefix("torch.")
        raise UserError(
            f"--model {config.name}: its weights take {needed} bytes ({needed / GIB:.1f} GiB) as {name}, {free} bytes "
            f"({free / GIB:.1f} GiB) are free on {device}: give a smaller --model, a shorter --dtype, or free memory"
        )


def working_bytes(config: DecoderConfig, dtype: torch.dtype, limits: Limits, *, graphs: bool, drafts: int = 0) -> int:
    """Bytes that one iteration computes with beside weights and pools, at most.

    `graphs` keep as much for decodes, and hidden states and logits that all of them write to; those of pieces what lies
    between them.

    A token has its residual, a layer's input and output, and the MLP's gate, up and product or the queries, keys,
    values and what attention gives, whichever is more; a sequence has logits, of its `drafts` as well; and one
    sequence's keys and values of a layer are gathered (`torch_attention`).
    """
    mlp = 3 * config.intermediate_size
    if config.experts is not None:
        # On CUDA a token's experts are computed together, elsewhere one after the other.
        together = config.experts.per_token if graphs else 1
        mlp = together * (3 * config.experts.width + (2 * config.hidden_size if graphs else 0))
    token = 3 * config.hidden_size + max(mlp, 2 * config.q_size + 2 * config.kv_size)
    rows = min(limits.max_num_seqs * (1 + drafts), limits.max_num_batched_tokens)
    elements = limits.max_num_batched_tokens * token + rows * config.vocab_size
    elements += 2 * limits.max_model_len * config.kv_size
    if graphs:
        elements += min(limits.max_num_seqs, LARGEST_CAPTURE) * (token + config.hidden_size + 2 * config.vocab_size)
        sizes = piece_sizes(limits.max_num_seqs, limits.max_num_batched_tokens)
        elements += sizes[-1] * (token + config.hidden_size + 2 * config.q_size + 2 * config.kv_size)
    return elements * dtype.itemsize


def held_bytes(limits: Limits, num_groups: int) -> int:
    """Bytes of a CUDA device that whatever is computed takes: graphs' metadata, copies' buffers, cuBLAS' workspaces,
    and what drawing tokens takes."""
    blocks = -(-limits.max_model_len // limits.block_size)
    metadata = Metadata.elements(capture_sizes(limits.max_num_seqs)[-1], num_groups, blocks) * torch.int32.itemsize
    return metadata + len(Direction) * STAGING_BYTES + PRODUCT_STREAMS * PRODUCT_WORKSPACE_BYTES + WORK_BYTES


@contextmanager
def telling_shortage() -> Iterator[None]:
    """Within, a device without memory for what a run needs before its first request is the user's to mend."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"GPU memory: {str(error).splitlines()[0]}: lower --num-gpu-blocks-override (or "
            "--gpu-memory-utilization), --max-num-seqs or --max-num-batched-tokens"
        ) from error


def fit_to_machine(scenario: Scenario, policy: Policy, device: str, decoder: Decoder | None = None) -> Scenario:
    """The scenario with pools of KV blocks that this machine has memory for beside what computing takes.

    The weights are there already. Pools of the policies' own defaults are made smaller; UserError where those asked for
    do not fit.

    Args:
        decoder: what computes; None: nothing does.
    """
    setup = prepare(scenario, "", policy)
    scheduler = build_engine(setup, None, Recording()).scheduler
    check_executable(scheduler)
    limits, cuda = setup.limits, device == "cuda"
    drafts = scheduler.stage.num_tokens if isinstance(scheduler.stage, Speculative) else 0
    working = 0 if decoder is None else working_bytes(decoder.config, decoder.dtype, limits, graphs=cuda, drafts=drafts)
    groups = scheduler.memory.num_groups
    if decoder is not None and decoder.kernels.one_table and groups > 1:
        raise UserError(
            f"--attention-backend flashinfer: {policy.name} keeps {groups} block tables a sequence, and each would "
            "be planned on the host in every iteration: use triton"
        )
    if cuda and decoder is not None:
        working += decoder.kernels.working_bytes(len(capture_sizes(limits.max_num_seqs))) + held_bytes(limits, groups)
        scratch = scratch_blocks(scheduler) * limits.block_bytes / groups
        scenario = _fit_gpu(scenario, limits, free_bytes(device), working + scratch)
    host_bytes = free_bytes("cpu") - (0 if cuda else working)
    held = [("host", "num_cpu_blocks_override", limits.num_cpu_blocks, scenario.swap_space is not None)]
    if not cuda:
        held.append(("GPU's stand-in", "num_gpu_blocks_override", limits.num_gpu_blocks, False))
    asked = 0
    for name, field, blocks, given in held:
        most = int(host_bytes / DEFAULT_SHARE / limits.block_bytes)
        if not given and getattr(scenario, field) is None and blocks > most:
            if most < 1:
                raise UserError(
                    f"{name} pool: no block of {limits.block_bytes:.0f} bytes fits into a {DEFAULT_SHARE}th of the "
                    f"{host_bytes} bytes that are free beside the {working} to compute with: free some memory, or "
                    "lower --max-num-batched-tokens"
                )
            scenario, blocks = replace(scenario, **{field: most}), most
        asked += blocks
    if asked * limits.block_bytes > host_bytes:
        raise UserError(
            f"KV pools in host memory: {asked * limits.block_bytes / GIB:.1f} GiB asked for, "
            f"{host_bytes / GIB:.1f} GiB are free: lower --swap-space (or --num-cpu-blocks-override)"
            + ("" if cuda else " or --num-gpu-blocks-override")
        )
    if isinstance(scheduler.memory.backing, TieredStates):
        _check_states(scenario, policy)
    return scenario


def _check_states(scenario: Scenario, policy: Policy) -> None:
    """UserError where the host has room for states of what is on the GPU, and none for those of ended turns."""
    memory = build_engine(prepare(scenario, "", policy), None, Recording()).scheduler.memory
    assert isinstance(memory.backing, TieredStates)
    if not memory.backing.cache.num_chunks:
        raise UserError(
            f"memory=tiered-states: states of the GPU's {memory.gpu.num_blocks} blocks leave no host memory to ended "
            "turns: raise --swap-space, or lower --num-gpu-blocks-override"
        )


def _fit_gpu(scenario: Scenario, limits: Limits, free: int, working: float) -> Scenario:
    """The GPU's pool in what a CUDA device has left, which may be less than its kind has."""
    given = scenario.num_gpu_blocks_override is not None
    most = int(((1.0 if given else 1.0 - KEPT_SHARE) * free - working) / limits.block_bytes)
    if limits.num_gpu_blocks <= most:
        return scenario
    if given or most < 1:
        needed = max(limits.num_gpu_blocks if most >= 1 else 1, 1) * limits.block_bytes
        raise UserError(
            f"GPU memory: KV blocks of {needed:.0f} bytes and {working:.0f} bytes to compute with, {free} bytes "
            f"({free / GIB:.1f} GiB) are free: lower --num-gpu-blocks-override or --max-num-batched-tokens"
        )
    return replace(scenario, num_gpu_blocks_override=most)
