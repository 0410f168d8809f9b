"""What the live runtime reaches on this machine, against what it should: copies, offloaded prefills, decodes, overlap.

    python benchmarks/runtime_cuda.py --model llama-2-7b --out runtime-cuda          # a CUDA GPU, minutes
    python benchmarks/runtime_cuda.py --device cpu --model CONFIG --quick            # only to see that it runs

Writes OUT.json (every figure, with the device's name) and prints the table of docs/runtime.md. Random weights.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
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
from gpu_runtime.live import LiveOptions, describe_machine, load_decoder  # noqa: E402
from gpu_runtime.model.attention_batch import AttentionBatch  # noqa: E402
from gpu_runtime.model.decode_graph import DecodeGraph  # noqa: E402
from gpu_runtime.model.decoder import Decoder  # noqa: E402
from sim.engine.plan import Direction  # noqa: E402

BLOCK = 16
REPEATS = 7


def timed(device: torch.device, work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median seconds, the device idle before and after."""
    seconds = []
    for i in range(repeats + 2):
        synchronize(device)
        begun = perf_counter()
        work()
        synchronize(device)
        if i >= 2:
            seconds.append(perf_counter() - begun)
    return median(seconds)


def synchronize(device: torch.device) -> None:
    """Wait for everything queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Bench:
    """One decoder, a pool of one-layer blocks on each tier, and a copy engine."""

    def __init__(self, decoder: Decoder, gpu_blocks: int, host_blocks: int) -> None:
        self.decoder, self.device = decoder, decoder.device
        config = decoder.config
        pin = self.device.type == "cuda"
        self.gpu = KVPool(config, gpu_blocks, BLOCK, 1, self.device, decoder.dtype)
        self.host = KVPool(config, host_blocks, BLOCK, 1, "cpu", decoder.dtype, pin=pin)
        self.copies = CopyEngine(self.device)

    def link_peak(self, num_bytes: int) -> dict[str, float]:
        """Bytes/s of one plain pinned copy, the link's measured peak, by direction."""
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        gpu = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        d2h_s = timed(self.device, lambda: host.copy_(gpu, non_blocking=True))
        h2d_s = timed(self.device, lambda: gpu.copy_(host, non_blocking=True))
        return {"d2h": num_bytes / d2h_s, "h2d": num_bytes / h2d_s}

    def copy_rate(self, direction: Direction, blocks: int, *, scattered: bool) -> float:
        """Bytes/s of the copy engine moving `blocks` blocks, contiguous or in random order."""
        gpu_ids, host_ids = list(range(blocks)), list(range(blocks))
        if scattered:
            gpu_ids = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).tolist()
        pools = (self.gpu, self.host) if direction is Direction.D2H else (self.host, self.gpu)
        ids = (gpu_ids, host_ids) if direction is Direction.D2H else (host_ids, gpu_ids)

        def copy() -> None:
            self.copies.copy_blocks(pools[0], ids[0], pools[1], ids[1], direction).wait()

        return blocks * self.gpu.block_bytes / timed(self.device, copy)

    def prefill_s(self, tokens: int, *, offload: bool) -> float:
        """Seconds of a prompt; `offload`: every layer leaves for the host through a send buffer of two."""
        layers, blocks = self.decoder.config.num_layers, -(-tokens // BLOCK)
        slots = [list(range(k * blocks, (k + 1) * blocks)) for k in range(2 if offload else layers)]
        host = [list(range(k * blocks, (k + 1) * blocks)) for k in range(layers)] if offload else []
        tables = [[slots[layer % len(slots)]] for layer in range(layers)]
        batch = AttentionBatch.build([tokens], [0], tables, BLOCK, self.device)
        ids = torch.randint(0, self.decoder.config.vocab_size, (tokens,), device=self.device)
        leaving: dict[int, Any] = {}

        def before(layer: int) -> None:
            if layer - 2 in leaving:
                leaving.pop(layer - 2).wait_layer(layer)

        def after(layer: int, _: torch.Tensor) -> None:
            leaving[layer] = self.copies.copy_blocks(self.gpu, slots[layer % 2], self.host, host[layer], Direction.D2H)

        def run() -> None:
            hooks: dict[str, Any] = {"before_layer": before, "after_layer": after} if offload else {}
            self.decoder.forward(ids, batch, self.gpu, **hooks)
            leaving.clear()

        return timed(self.device, run, 5)

    def decode_s(self, sequences: int, context: int) -> tuple[float, float]:
        """Seconds of a decode step, and bytes it must read: weights and KV cache."""
        layers, blocks = self.decoder.config.num_layers, -(-(context + 1) // BLOCK)
        per_layer = sequences * blocks
        tables = [
            [[layer * per_layer + s * blocks + b for b in range(blocks)] for s in range(sequences)]
            for layer in range(layers)
        ]
        batch = AttentionBatch.build([1] * sequences, [context] * sequences, tables, BLOCK, self.device)
        ids = torch.zeros(sequences, dtype=torch.int64, device=self.device)
        run: Callable[[], object] = lambda: self.decoder.forward(ids, batch, self.gpu)  # noqa: E731
        if self.device.type == "cuda":
            graph = DecodeGraph(self.decoder, self.gpu, [sequences], blocks)
            run = lambda: graph.run(ids, batch)  # noqa: E731
        config = self.decoder.config
        element = torch.empty(0, dtype=self.decoder.dtype).element_size()
        per_token = 2 * config.num_kv_heads * config.head_dim * element
        matrices = config.hidden_size * (2 * config.q_size + 2 * config.kv_size + 3 * config.intermediate_size)
        weights = (layers * matrices + config.vocab_size * config.hidden_size) * element
        return timed(self.device, run), weights + layers * sequences * (context + 1) * per_token

    def memory_rate(self) -> float:
        """Bytes/s at which the device reads, from a large reduction."""
        data = torch.ones(2**30 if self.device.type == "cuda" else 2**26, dtype=self.decoder.dtype, device=self.device)
        return data.numel() * data.element_size() / timed(self.device, lambda: data.max())

    def overlap(self, prefix: int, sequences: int, context: int) -> tuple[float, float]:
        """Seconds of recomputing a prefix and decoding in turn, and on two streams at once (eLLM's K1 beside K2)."""
        layers = self.decoder.config.num_layers
        prefix_blocks, blocks = -(-prefix // BLOCK), -(-(context + 1) // BLOCK)
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
            if self.device.type != "cuda":
                in_turn()
                return
            current, other = torch.cuda.current_stream(), torch.cuda.Stream()
            other.wait_stream(current)
            with torch.cuda.stream(other):
                run(first, states)
            run(second, rows)
            current.wait_stream(other)

        return timed(self.device, in_turn), timed(self.device, at_once)


def main() -> None:
    """Run everything that fits, print the table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--model", default="llama-2-7b")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--out", type=Path, default=Path("runtime-cuda"))
    arguments = parser.parse_args()
    dtype = arguments.dtype or ("bfloat16" if arguments.device == "cuda" else "float32")
    decoder = load_decoder(arguments.model, dtype, LiveOptions(arguments.device))
    prompts: Sequence[int] = (128, 256) if arguments.quick else (2048, 4096, 8192, 16384)
    decodes = ((1, 128), (4, 128)) if arguments.quick else ((1, 1024), (16, 1024), (64, 1024), (64, 4096))
    layers = decoder.config.num_layers
    most = max(max(prompts) // BLOCK, max(s * (-(-(c + 1) // BLOCK)) for s, c in decodes))
    bench = Bench(decoder, layers * most + 64, layers * (max(prompts) // BLOCK))
    figures: dict[str, Any] = {"machine": structs.asdict(describe_machine(decoder)), "model": decoder.config.name}
    with torch.inference_mode():
        measure(bench, prompts, decodes, figures, quick=arguments.quick)
    arguments.out.with_suffix(".json").write_text(json.dumps(figures, indent=2) + "\n")
    bench.copies.close()


def measure(
    bench: Bench, prompts: Sequence[int], decodes: Sequence[tuple[int, int]], figures: dict[str, Any], *, quick: bool
) -> None:
    """Fill `figures` and print each as it comes."""
    size = (64 if quick else 1024) << 20
    blocks = min(bench.host.num_blocks, bench.gpu.num_blocks, size // bench.gpu.block_bytes)
    peak = bench.link_peak(blocks * bench.gpu.block_bytes)
    for direction in Direction:
        for scattered in (False, True):
            rate = bench.copy_rate(direction, blocks, scattered=scattered)
            name = f"{direction.value} {'scattered' if scattered else 'contiguous'} blocks"
            _note(figures, name, rate / 1e9, peak[direction.value] / 1e9, "GB/s", f"{rate / peak[direction.value]:.1%}")
    for tokens in prompts:
        kept, left = bench.prefill_s(tokens, offload=False), bench.prefill_s(tokens, offload=True)
        _note(figures, f"prefill {tokens}, every layer offloaded", left * 1e3, kept * 1e3, "ms", f"{left / kept:.3f}x")
    memory = bench.memory_rate()
    for sequences, context in decodes:
        seconds, num_bytes = bench.decode_s(sequences, context)
        bound = num_bytes / memory
        name = f"decode {sequences} x {context}"
        _note(figures, name, seconds * 1e3, bound * 1e3, "ms", f"{seconds / bound:.2f}x the bandwidth bound")
    turn, once = bench.overlap(64 if quick else 1024, 2 if quick else 32, 64 if quick else 1024)
    _note(figures, "recompute beside decode", once * 1e3, turn * 1e3, "ms", f"{turn / once:.2f}x faster than in turn")


def _note(figures: dict[str, Any], name: str, value: float, against: float, unit: str, verdict: str) -> None:
    figures[name] = {"value": value, "against": against, "unit": unit, "verdict": verdict}
    print(f"| {name} | {value:.4g} {unit} | {against:.4g} {unit} | {verdict} |", flush=True)


if __name__ == "__main__":
    main()
