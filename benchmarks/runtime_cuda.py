"""What the live runtime reaches on this machine, against what it should: copies, prefills, decodes, overlap.

    python benchmarks/runtime_cuda.py --model llama-2-7b --out runtime-cuda          # a CUDA GPU, two minutes
    python benchmarks/runtime_cuda.py --device cpu --model CONFIG --quick            # only to see that it runs

Sizes are those that the device has memory for; what it has none for is listed. Writes OUT.json after every figure (with
every repeat and the device's name) and prints the table of docs/runtime.md. Random weights.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from msgspec import structs  # noqa: E402

from gpu_runtime.kv.copy_engine import CopyEngine  # noqa: E402
from gpu_runtime.kv.pool import KVPool  # noqa: E402
from gpu_runtime.live import DTYPES, check_device, default_dtype, describe_machine  # noqa: E402
from gpu_runtime.machine.live_memory import check_weights, free_bytes  # noqa: E402
from gpu_runtime.machine.threads import use_fastest_threads  # noqa: E402
from gpu_runtime.model.attention_batch import AttentionBatch  # noqa: E402
from gpu_runtime.model.backend import activate_flash, check_backend  # noqa: E402
from gpu_runtime.model.config import DecoderConfig  # noqa: E402
from gpu_runtime.model.decode_graph import CudaCapture, DecodeGraph  # noqa: E402
from gpu_runtime.model.decoder import Decoder  # noqa: E402
from gpu_runtime.model.flashinfer_kernels import build_kernels  # noqa: E402
from gpu_runtime.model.kernels import Kernels  # noqa: E402
from sim.engine.changes import Direction  # noqa: E402
from sim.errors import UserError  # noqa: E402
from sim.specs.models import load_model  # noqa: E402

BLOCK = 16
REPEATS = 7
POOL_SHARE = {"cuda": 0.8, "cpu": 0.25}
"""Of the device's free memory, for the KV pool: the rest computes."""
HOST_SHARE = 0.25
"""Of the host's free memory, for its pool."""
COPIED_BYTES = {"cuda": 2**31, "cpu": 2**26}
"""Of the copy within the device that tells its bandwidth; far beyond any cache."""
PRODUCT_SIZE = {"cuda": 8192, "cpu": 512}
PARTS = ("copies", "decode", "prefill", "overlap")
Shape = tuple[int, int]
"""(sequences, context tokens)."""
SHAPES: dict[bool, tuple[Sequence[int], Sequence[Shape]]] = {
    True: ((128, 256), ((1, 128), (4, 128))),
    False: ((2048, 4096, 8192, 16384), ((1, 1024), (16, 1024), (64, 1024), (256, 512), (16, 8192), (64, 4096))),
}
"""Prompts' tokens and decodes, quick or not."""


def blocks_of(tokens: int) -> int:
    """Blocks of a layer for so many tokens."""
    return -(-tokens // BLOCK)


def synchronize(device: torch.device) -> None:
    """Wait for everything queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Timed(float):
    """The median of some repeats, s."""

    repeats_s: Sequence[float]


def timed(device: torch.device, work: Callable[[], object], repeats: int = REPEATS) -> Timed:
    """Median seconds, the device idle before and after."""
    seconds = []
    for i in range(repeats + 2):
        synchronize(device)
        begun = perf_counter()
        work()
        synchronize(device)
        if i >= 2:
            seconds.append(perf_counter() - begun)
    found = Timed(median(seconds))
    found.repeats_s = seconds
    return found


def regrouped(pool: KVPool, layers: int) -> KVPool:
    """The memory of a pool of one-layer blocks as blocks of all layers, which share one block table."""
    whole = copy(pool)
    whole.num_blocks, whole.layer_group, whole.num_groups = pool.num_blocks // layers, layers, 1
    whole._places = [(0, layer) for layer in range(layers)]
    whole.data = pool.data[: whole.num_blocks * layers].view(whole.num_blocks, layers, *pool.data.shape[2:])
    return whole


class Rig:
    """One decoder, a pool of one-layer blocks on each tier, a copy engine, and a stream beside the current one."""

    def __init__(self, decoder: Decoder, gpu_blocks: int, host_blocks: int) -> None:
        self.decoder, self.device = decoder, decoder.device
        config, on_cuda = decoder.config, self.device.type == "cuda"
        self.gpu = KVPool(config, gpu_blocks, BLOCK, 1, self.device, decoder.dtype)
        self.whole = regrouped(self.gpu, config.num_layers)
        self.host = KVPool(config, host_blocks, BLOCK, 1, "cpu", decoder.dtype, pin=on_cuda)
        self.copies = CopyEngine(self.device)
        # One for all repeats: the allocator keeps memory for each stream, and a new one would pay for its own.
        self.beside = torch.cuda.Stream(self.device) if on_cuda else None

    def link_peak(self, num_bytes: int) -> dict[str, float]:
        """Bytes/s of one plain pinned copy, the link's measured peak, by direction."""
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        gpu = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        d2h_s = timed(self.device, lambda: host.copy_(gpu, non_blocking=True))
        h2d_s = timed(self.device, lambda: gpu.copy_(host, non_blocking=True))
        return {"d2h": num_bytes / d2h_s, "h2d": num_bytes / h2d_s}

    def copy_s(self, direction: Direction, blocks: int, *, scattered: Sequence[str]) -> Timed:
        """Seconds of the copy engine moving `blocks` blocks, in random order in the pools that `scattered` names."""

        def ids(pool: str, seed: int) -> list[int]:
            shuffled = torch.randperm(blocks, generator=torch.Generator().manual_seed(seed)).tolist()
            return shuffled if pool in scattered else list(range(blocks))

        gpu, host = (self.gpu, ids("gpu", 0)), (self.host, ids("host", 1))
        source, target = (gpu, host) if direction is Direction.D2H else (host, gpu)
        copies = self.copies
        return timed(self.device, lambda: copies.copy_blocks(*source, *target, direction).wait())

    def prefill_s(self, tokens: int, *, offload: bool) -> Timed:
        """Seconds of a prompt; `offload`: every layer leaves for the host through a send buffer of two."""
        layers, blocks = self.decoder.config.num_layers, blocks_of(tokens)
        slots = [list(range(k * blocks, (k + 1) * blocks)) for k in range(2 if offload else layers)]
        host = [list(range(k * blocks, (k + 1) * blocks)) for k in range(layers)] if offload else []
        tables = [[slots[layer % len(slots)]] for layer in range(layers)]
        batch = AttentionBatch.build([tokens], [0], tables, BLOCK, self.device)
        ids = torch.randint(0, self.decoder.config.vocab_size, (tokens,), device=self.device)
        leaving: dict[int, Any] = {}

        def before(layer: int) -> None:
            if layer - 2 in leaving:
                leaving.pop(layer - 2).wait_in_stream()

        def after(layer: int, _: torch.Tensor) -> None:
            leaving[layer] = self.copies.copy_blocks(self.gpu, slots[layer % 2], self.host, host[layer], Direction.D2H)

        def run() -> None:
            hooks: dict[str, Any] = {"before_layer": before, "after_layer": after} if offload else {}
            self.decoder.forward(ids, batch, self.gpu, **hooks)
            leaving.clear()

        return timed(self.device, run, 5)

    def whole_prefill_s(self, tokens: int) -> Timed:
        """Seconds of a prompt that is kept, all layers in one block table."""
        batch = AttentionBatch.build([tokens], [0], [[list(range(blocks_of(tokens)))]], BLOCK, self.device)
        ids = torch.randint(0, self.decoder.config.vocab_size, (tokens,), device=self.device)
        return timed(self.device, lambda: self.decoder.forward(ids, batch, self.whole), 5)

    def decode_s(self, sequences: int, context: int, *, whole: bool = False) -> Timed:
        """Seconds of a decode step, on CUDA as a graph; `whole`: all layers in one block table."""
        pool, blocks = self.whole if whole else self.gpu, blocks_of(context + 1)
        groups = pool.num_groups
        ids = torch.arange(groups * sequences * blocks, dtype=torch.int32).view(groups, sequences, blocks).numpy()
        if self.device.type != "cuda":
            batch = AttentionBatch.build([1] * sequences, [context] * sequences, ids, BLOCK, self.device)
            tokens = torch.zeros(sequences, dtype=torch.int64, device=self.device)
            return timed(self.device, lambda: self.decoder.forward(tokens, batch, pool))
        graph = DecodeGraph(self.decoder, pool, [sequences], blocks, capture=CudaCapture(self.device))
        tables = [ids[:, i] for i in range(sequences)]
        return timed(self.device, lambda: graph.run([0] * sequences, [context + 1] * sequences, tables))

    def memory_rate(self) -> float:
        """Bytes/s read and written by a copy within the device."""
        source = torch.ones(COPIED_BYTES[self.device.type], dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * len(source) / timed(self.device, lambda: target.copy_(source))

    def product_rate(self) -> float:
        """FLOP/s of a large product of matrices of random numbers."""
        size = PRODUCT_SIZE[self.device.type]
        left, right = (torch.randn(size, size, dtype=self.decoder.dtype, device=self.device) for _ in range(2))
        out = torch.empty_like(left)
        return 2 * size**3 / timed(self.device, lambda: torch.mm(left, right, out=out))

    def overlap(self, prefix: int, sequences: int, context: int) -> tuple[Timed, Timed]:
        """Seconds of recomputing a prefix and decoding in turn, and on two streams at once (eLLM's K1 beside K2)."""
        layers = self.decoder.config.num_layers
        prefix_blocks, blocks = blocks_of(prefix), blocks_of(context + 1)
        first = AttentionBatch.build([prefix], [0], [[list(range(prefix_blocks))]] * layers, BLOCK, self.device)
        table = [list(range(prefix_blocks + s * blocks, prefix_blocks + (s + 1) * blocks)) for s in range(sequences)]
        second = AttentionBatch.build([1] * sequences, [context] * sequences, [table] * layers, BLOCK, self.device)
        hidden = self.decoder.config.hidden_size
        states = torch.randn(prefix, hidden, device=self.device, dtype=self.decoder.dtype)
        rows = torch.randn(sequences, hidden, device=self.device, dtype=self.decoder.dtype)

        def run(batch: AttentionBatch, entered: torch.Tensor) -> None:
            for index, layer in enumerate(self.decoder.layers):
                entered = layer.forward(entered, batch, self.gpu, index)

        def in_turn() -> None:
            run(first, states)
            run(second, rows)

        def at_once() -> None:
            if self.beside is None:
                in_turn()
                return
            current = torch.cuda.current_stream(self.device)
            self.beside.wait_stream(current)
            with torch.cuda.stream(self.beside):
                run(first, states)
            run(second, rows)
            current.wait_stream(self.beside)

        return timed(self.device, in_turn), timed(self.device, at_once)


class Figures:
    """What was found, printed and written as it comes: a run that is ended leaves what it has."""

    def __init__(self, path: Path, **about: object) -> None:
        self._path, self.found = path.with_suffix(".json"), dict(about)

    def add(self, name: str, value: float, against: float, unit: str, verdict: str, found: Timed) -> None:
        """A figure, what it is compared with, and the seconds that it comes from."""
        entry = {"value": value, "against": against, "unit": unit, "verdict": verdict, "repeats_s": found.repeats_s}
        self._put(name, entry)
        print(f"| {name} | {value:.4g} {unit} | {against:.4g} {unit} | {verdict} |", flush=True)

    def leave_out(self, name: str, needed: int, there: int) -> None:
        self._put(name, {"left_out": f"needs {needed} bytes of KV blocks, there are {there}"})
        print(f"| {name} | left out: needs {needed / 2**30:.1f} GiB of KV, there are {there / 2**30:.1f} | | |")

    def refuse(self, name: str, why: str) -> None:
        self._put(name, {"left_out": why})
        print(f"| {name} | left out: {why} | | |", flush=True)

    def _put(self, name: str, entry: dict[str, object]) -> None:
        self.found[name] = entry
        self._path.write_text(json.dumps(self.found, indent=2) + "\n")


def build_decoder(model: str, dtype: torch.dtype, device: str, longest: int) -> Decoder:
    """Random weights; positions for the longest sequence, past the model's own if need be: they cost the same."""
    config = DecoderConfig.from_spec(load_model(model))
    config = structs.replace(config, max_position_embeddings=max(config.max_position_embeddings, longest))
    check_weights(config, dtype, device)
    if device == "cpu":
        use_fastest_threads(config, dtype)
    if device == "cuda":
        activate_flash(torch.device(device))
    return Decoder.random(config, device=device, dtype=dtype, seed=0)


def layer_block_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Bytes of a block of one layer."""
    return 2 * BLOCK * config.kv_size * dtype.itemsize


def main() -> None:
    """Run everything that fits, print the table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--model", default="llama-2-7b")
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run (all)")
    parser.add_argument("--out", type=Path, default=Path("runtime-cuda"))
    arguments = parser.parse_args()
    check_device(arguments.device)
    dtype = DTYPES[arguments.dtype or default_dtype(arguments.device)]
    prompts, decodes = SHAPES[arguments.quick]
    longest = max(*prompts, *(context + 1 for _, context in decodes))
    decoder = build_decoder(arguments.model, dtype, arguments.device, longest)
    figures = Figures(arguments.out, machine=structs.asdict(describe_machine(decoder)), model=decoder.config.name)
    with torch.inference_mode():
        measure(decoder, prompts, decodes, figures, arguments.only, quick=arguments.quick)


def measure(
    decoder: Decoder,
    prompts: Sequence[int],
    decodes: Sequence[Shape],
    figures: Figures,
    parts: Sequence[str],
    *,
    quick: bool,
) -> None:
    """Make pools of what is needed and fits, and find the figures."""
    config, device, layers = decoder.config, decoder.device, decoder.config.num_layers
    block_bytes = layer_block_bytes(config, decoder.dtype)
    gpu_room = int(POOL_SHARE[device.type] * free_bytes(device.type)) // block_bytes
    host_room = int(HOST_SHARE * free_bytes("cpu")) // block_bytes
    overlapping = (64, 2, 64) if quick else (1024, 32, 1024)
    copied = min((64 if quick else 1024) * 2**20 // block_bytes, gpu_room, host_room)
    needs: dict[str, tuple[int, int, Callable[[Rig], None]]] = {}
    if "copies" in parts:
        needs["copies"] = copied, copied, lambda rig: copies(rig, copied, figures)
    if "decode" in parts:
        rate: list[float] = []
        for shape in decodes:
            needed = layers * shape[0] * blocks_of(shape[1] + 1)
            needs[f"decode {shape[0]} x {shape[1]}"] = needed, 1, lambda rig, s=shape: decode(rig, *s, rate, figures)
    if "prefill" in parts:
        flops: list[float] = []
        for tokens in prompts:
            blocks = layers * blocks_of(tokens)
            needs[f"prefill {tokens}"] = blocks, blocks, lambda rig, n=tokens: prefill(rig, n, flops, figures)
    if "overlap" in parts:
        prefix, sequences, context = overlapping
        needed = blocks_of(prefix) + sequences * blocks_of(context + 1)
        needs["overlap"] = needed, 1, lambda rig: overlap(rig, overlapping, figures)
    fitting = {name: need for name, need in needs.items() if need[0] <= gpu_room and need[1] <= host_room}
    if fitting:
        rig = Rig(decoder, max(need[0] for need in fitting.values()), max(need[1] for need in fitting.values()))
        for _, _, find in fitting.values():
            find(rig)
        rig.copies.close()
    for name in needs.keys() - fitting.keys():
        on_gpu = needs[name][0] > gpu_room
        needed, there = (needs[name][0], gpu_room) if on_gpu else (needs[name][1], host_room)
        figures.leave_out(f"{name}{'' if on_gpu else ' (host)'}", needed * block_bytes, there * block_bytes)


def copies(rig: Rig, blocks: int, figures: Figures) -> None:
    """The copy engine against one plain pinned copy."""
    peak = rig.link_peak(blocks * rig.gpu.block_bytes)
    for direction in Direction:
        for scattered in ((), ("gpu",), ("gpu", "host")):
            seconds = rig.copy_s(direction, blocks, scattered=scattered)
            rate = blocks * rig.gpu.block_bytes / seconds
            name = f"{direction.value} blocks {'scattered on ' + ' and '.join(scattered) if scattered else 'in a row'}"
            share = rate / peak[direction.value]
            verdict = f"{share:.1%} of the link's peak"
            figures.add(name, rate / 1e9, peak[direction.value] / 1e9, "GB/s", verdict, seconds)


def decode(rig: Rig, sequences: int, context: int, rate: list[float], figures: Figures) -> None:
    """A decode against the time that reading weights and KV cache takes at the rate of a copy (kept in `rate`)."""
    rate[:] = rate or [rig.memory_rate()]
    config, element = rig.decoder.config, rig.decoder.dtype.itemsize
    read = (config.num_layers * layer_weights(config) + config.vocab_size * config.hidden_size) * element
    read += config.num_layers * sequences * (context + 1) * 2 * config.kv_size * element
    seconds, bound_s = rig.decode_s(sequences, context), read / rate[0]
    verdict = f"{seconds / bound_s:.2f}x the bandwidth bound at {rate[0] / 1e12:.2f} TB/s"
    figures.add(f"decode {sequences} x {context}", seconds * 1e3, bound_s * 1e3, "ms", verdict, seconds)
    with_flashinfer(
        rig, figures, f"decode {sequences} x {context}", lambda: rig.decode_s(sequences, context, whole=True)
    )


def prefill(rig: Rig, tokens: int, rate: list[float], figures: Figures) -> None:
    """A prompt against its FLOPs at the rate of a large product (kept in `rate`), and offloaded against kept."""
    rate[:] = rate or [rig.product_rate()]
    config = rig.decoder.config
    flops = 2 * tokens * config.num_layers * layer_weights(config) + 2 * config.vocab_size * config.hidden_size
    flops += config.num_layers * 4 * config.q_size * tokens * (tokens + 1) / 2
    kept_s, bound_s = rig.prefill_s(tokens, offload=False), flops / rate[0]
    verdict = f"{kept_s / bound_s:.2f}x the compute bound at {rate[0] / 1e12:.4g} TFLOP/s"
    figures.add(f"prefill {tokens}", kept_s * 1e3, bound_s * 1e3, "ms", verdict, kept_s)
    with_flashinfer(rig, figures, f"prefill {tokens}", lambda: rig.whole_prefill_s(tokens))
    left_s = rig.prefill_s(tokens, offload=True)
    verdict = f"{left_s / kept_s:.3f}x kept"
    figures.add(f"prefill {tokens}, every layer offloaded", left_s * 1e3, kept_s * 1e3, "ms", verdict, left_s)


def with_flashinfer(rig: Rig, figures: Figures, name: str, measured_s: Callable[[], Timed]) -> None:
    """The same with ours and with flashinfer's kernels, all layers in one block table; where it cannot, why."""
    decoder = rig.decoder
    try:
        check_backend("flashinfer", decoder.device.type, decoder.dtype, decoder.config)
    except UserError as error:
        figures.refuse(f"{name}, flashinfer", str(error))
        return
    ours_s = measured_s()
    decoder.compute_with(build_kernels("flashinfer", decoder.config.num_heads, decoder.dtype, decoder.device))
    try:
        theirs_s = measured_s()
    finally:
        decoder.compute_with(Kernels())
    verdict = f"{ours_s / theirs_s:.2f}x as fast as ours"
    figures.add(f"{name}, flashinfer", theirs_s * 1e3, ours_s * 1e3, "ms", verdict, theirs_s)


def layer_weights(config: DecoderConfig) -> int:
    """Elements of a layer's matrices."""
    return config.hidden_size * (2 * config.q_size + 2 * config.kv_size + 3 * config.intermediate_size)


def overlap(rig: Rig, shape: tuple[int, int, int], figures: Figures) -> None:
    """Recomputation and decodes on two streams against in turn."""
    turn, once = rig.overlap(*shape)
    verdict = f"{turn / once:.2f}x faster than in turn"
    figures.add("recompute beside decode", once * 1e3, turn * 1e3, "ms", verdict, once)


if __name__ == "__main__":
    main()
