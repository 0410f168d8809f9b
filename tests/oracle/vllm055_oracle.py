"""Ask vLLM 0.5.5's own scheduler what it decides for a workload, over a virtual clock.

Nothing here re-implements the scheduler: the classes come from the vLLM 0.5.5 wheel, driven on the CPU without a model.
Only needed to make new answers; the tests read the stored ones in ``cases/``.

Setup, in a virtual environment of its own (Python 3.11)::

    pip install "torch>=2.6" msgspec transformers psutil cloudpickle pyzmq gguf "numpy<2"
    pip install --no-deps vllm==0.5.5
    python vllm055_oracle.py workload.csv --blocks 64 --mode swap --cpu-blocks 256 --out answer.json.gz
    python vllm055_oracle.py --again cases/*.json.gz      # stored cases, each by its own workload and options

The workload is a CSV with the columns ``arrival_s, prompt_tokens, output_tokens``, sorted by arrival.

Cost of an iteration, with ``--cost p0,p1,p2,d0,d1,d2`` (seconds)::

    prompt part  p0 + p1 * sum(chunk) + p2 * sum(chunk^2)      if any prompt chunk is in the batch
    decode part  d0 + d1 * sequences + d2 * sum(context)       if any decode is; d0 is dropped beside a prompt chunk
    copies       swap_s_per_block * (blocks swapped in + blocks swapped out)

A decode's context is its prompt and generated tokens, the one being fed included. A prompt chunk's cost knows nothing
of the tokens computed before it. A request arrives in time for an iteration that starts at or after its arrival (with
1e-12 s of slack). The output length is the workload's alone: no stop at max_model_len.

An iteration with nothing scheduled and nothing to copy takes no time and is not counted. If it changed a queue (a
request ignored, the only sequence preempted) the next one follows at once, as in the engine's loop; if not, the clock
jumps to the next arrival.

The answer (JSON, gzip if the name ends in .gz) holds, besides ``args`` and the ``workload`` rows (of a stored case also
its ``name`` and what it ``covers``):

* ``requests``: columns ``arrival``, ``first`` (end of the iteration that gave the first token), ``finish``,
  ``ignored_at`` (clock at which vLLM dropped the request, possibly after some tokens), null for never, and
  ``preempted`` (how many times)
* ``decisions``: one ``[clock at the start, [request numbers in scheduled order], prompt chunks among them]`` each
* ``iterations``, ``preemptions``, ``blocks_swapped_in``, ``blocks_swapped_out``, ``makespan``
* ``free_gpu_blocks``, ``free_cpu_blocks`` at the end (less than the pool: vLLM leaked the rest)
* ``empty_steps``: clocks of the iterations with nothing scheduled and nothing to copy
* ``aborted_at``: clock at which vLLM gave up for "lack of CPU swap space", else null; all else is up to then
* ``stuck_at``: clock from which vLLM would loop for ever without another token, else null
"""

from __future__ import annotations

import argparse
import csv
import gzip
import importlib
import importlib.util
import itertools
import json
import logging
import sys
import types
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ARRIVAL_SLACK = 1e-12
STUCK_STEPS = 2000
"""Scheduler calls in a row that give no token and take no arrival, after which vLLM is held to be looping."""

Row = tuple[float, int, int]
"""Arrival in seconds, prompt tokens, output tokens."""


@dataclass(frozen=True)
class Options:
    """What the scheduler and the cost of an iteration depend on."""

    blocks: int
    cpu_blocks: int = 0
    block_size: int = 16
    max_model_len: int = 4096
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    mode: str = "recompute"
    chunked: bool = False
    cost: tuple[float, float, float, float, float, float] = (0.005, 4e-5, 2e-9, 0.02, 2e-5, 6e-7)
    swap_s_per_block: float = 0.0


def _load_vllm() -> types.SimpleNamespace:
    """Import the scheduler's modules of vLLM without running its package, which needs the CUDA libraries."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.submodule_search_locations is None:
        raise SystemExit("vllm 0.5.5 is not installed here; see the top of this file")
    package = types.ModuleType("vllm")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["vllm"] = package
    logging.disable(logging.CRITICAL)
    find_spec = importlib.util.find_spec

    def without_core(name: str, where: str | None = None) -> Any:
        """Have vLLM take its Python stand-in for the C++ core, whose build is tied to one torch version with CUDA."""
        return None if name == "._core_C" else find_spec(name, where)

    importlib.util.find_spec = without_core
    try:
        names = ("config", "core.scheduler", "sequence", "sampling_params")
        config, scheduler, sequence, sampling = (importlib.import_module(f"vllm.{name}") for name in names)
    finally:
        importlib.util.find_spec = find_spec
    return types.SimpleNamespace(config=config, scheduler=scheduler, sequence=sequence, sampling=sampling)


VLLM = _load_vllm()


class Oracle:
    """One scheduler of vLLM with one workload."""

    def __init__(self, rows: Sequence[Row], options: Options) -> None:
        if any(a[0] > b[0] for a, b in itertools.pairwise(rows)):
            raise ValueError("the workload is not sorted by arrival")
        self.rows = rows
        self.options = options
        self.clock = 0.0
        VLLM.scheduler.time = types.SimpleNamespace(time=lambda: self.clock, perf_counter=lambda: self.clock)
        scheduler_config = VLLM.config.SchedulerConfig(
            options.max_num_batched_tokens,
            options.max_num_seqs,
            options.max_model_len,
            preemption_mode=options.mode,
            enable_chunked_prefill=options.chunked,
        )
        cache_config = VLLM.config.CacheConfig(options.block_size, 0.9, 4, "auto")
        cache_config.num_gpu_blocks = options.blocks
        cache_config.num_cpu_blocks = options.cpu_blocks
        self.scheduler = VLLM.scheduler.Scheduler(scheduler_config, cache_config, None)
        self.sequences: list[Any] = []
        self.first: list[float | None] = [None] * len(rows)
        self.finish: list[float | None] = [None] * len(rows)
        self.ignored_at: list[float | None] = [None] * len(rows)
        self.preempted = [0] * len(rows)
        self.decisions: list[tuple[float, list[int], int]] = []
        self.empty_steps: list[float] = []
        self.swapped_in = self.swapped_out = 0
        self._count_preemptions()

    def _count_preemptions(self) -> None:
        """Note, request by request, every preemption the scheduler makes."""
        preempt = self.scheduler._preempt

        def counted(group: Any, *args: Any, **kwargs: Any) -> Any:
            mode = preempt(group, *args, **kwargs)
            self.preempted[int(group.request_id)] += 1
            return mode

        self.scheduler._preempt = counted

    def _arrivals(self) -> None:
        """Hand the scheduler every request that has arrived by now."""
        while len(self.sequences) < len(self.rows):
            number = len(self.sequences)
            arrival, prompt, output = self.rows[number]
            if arrival > self.clock + ARRIVAL_SLACK:
                return
            inputs = {"prompt_token_ids": [0] * prompt, "prompt": None}
            sequence = VLLM.sequence.Sequence(number, inputs, self.options.block_size)
            sampling = VLLM.sampling.SamplingParams(max_tokens=output, ignore_eos=True)
            self.scheduler.add_seq_group(VLLM.sequence.SequenceGroup(str(number), [sequence], arrival, sampling))
            self.sequences.append(sequence)

    def _seconds(self, outputs: Any) -> float:
        """Time of the iteration that the scheduler decided on."""
        p0, p1, p2, d0, d1, d2 = self.options.cost
        scheduled = outputs.scheduled_seq_groups
        chunks = [s.token_chunk_size for s in scheduled[: outputs.num_prefill_groups]]
        decodes = scheduled[outputs.num_prefill_groups :]
        seconds = 0.0
        if chunks:
            seconds += p0 + p1 * sum(chunks) + p2 * sum(n * n for n in chunks)
        if decodes:
            context = sum(s.seq_group.seqs[0].get_len() for s in decodes)
            seconds += (0 if chunks else d0) + d1 * len(decodes) + d2 * context
        copied = len(outputs.blocks_to_swap_in) + len(outputs.blocks_to_swap_out)
        return seconds + copied * self.options.swap_s_per_block

    def _finish_iteration(self, outputs: Any) -> int:
        """Give every sequence of the batch its tokens; return how many were generated."""
        generated = 0
        for scheduled in outputs.scheduled_seq_groups:
            group = scheduled.seq_group
            group.update_num_computed_tokens(scheduled.token_chunk_size)
            if group.is_prefill():
                continue
            number = int(group.request_id)
            sequence = self.sequences[number]
            sequence.append_token_id(0, {0: VLLM.sequence.Logprob(0.0)})
            generated += 1
            if self.first[number] is None:
                self.first[number] = self.clock
            if sequence.get_output_len() >= self.rows[number][2]:
                sequence.status = VLLM.sequence.SequenceStatus.FINISHED_LENGTH_CAPPED
                self.scheduler.free_seq(sequence)
                self.finish[number] = self.clock
        self.scheduler.free_finished_seq_groups()
        return generated

    def _queues(self) -> tuple[int, int, int]:
        return len(self.scheduler.waiting), len(self.scheduler.running), len(self.scheduler.swapped)

    def run(self) -> dict[str, Any]:
        """Serve the whole workload, or as much of it as vLLM can."""
        aborted_at = stuck_at = None
        idle = 0
        while True:
            known = len(self.sequences)
            self._arrivals()
            upcoming = self.rows[len(self.sequences)][0] if len(self.sequences) < len(self.rows) else None
            if not self.scheduler.has_unfinished_seqs():
                if upcoming is None:
                    break
                self.clock = upcoming
                continue
            idle = 0 if len(self.sequences) > known else idle + 1
            if idle > STUCK_STEPS:
                stuck_at = self.clock
                break
            before = self._queues()
            try:
                _, outputs = self.scheduler.schedule()
            except RuntimeError as error:
                if "lack of CPU swap space" not in str(error):
                    raise
                aborted_at = self.clock
                break
            for group in outputs.ignored_seq_groups:
                self.ignored_at[int(group.request_id)] = self.clock
            if outputs.is_empty():
                self.empty_steps.append(self.clock)
                if self._queues() != before:
                    continue
                if upcoming is None:
                    stuck_at = self.clock
                    break
                self.clock = max(self.clock, upcoming)
                continue
            numbers = [int(s.seq_group.request_id) for s in outputs.scheduled_seq_groups]
            self.decisions.append((self.clock, numbers, outputs.num_prefill_groups))
            self.swapped_in += len(outputs.blocks_to_swap_in)
            self.swapped_out += len(outputs.blocks_to_swap_out)
            self.clock += self._seconds(outputs)
            if self._finish_iteration(outputs):
                idle = 0
        blocks = self.scheduler.block_manager
        return {
            "args": asdict(self.options),
            "workload": self.rows,
            "iterations": len(self.decisions),
            "preemptions": self.scheduler.num_cumulative_preemption,
            "blocks_swapped_in": self.swapped_in,
            "blocks_swapped_out": self.swapped_out,
            "makespan": self.clock,
            "free_gpu_blocks": blocks.get_num_free_gpu_blocks(),
            "free_cpu_blocks": blocks.get_num_free_cpu_blocks(),
            "aborted_at": aborted_at,
            "stuck_at": stuck_at,
            "empty_steps": self.empty_steps,
            "requests": {
                "arrival": [row[0] for row in self.rows],
                "first": self.first,
                "finish": self.finish,
                "ignored_at": self.ignored_at,
                "preempted": self.preempted,
            },
            "decisions": self.decisions,
        }


def ask(rows: Sequence[Row], options: Options) -> dict[str, Any]:
    """Return vLLM's answer for a workload."""
    return Oracle(rows, options).run()


def read_workload(path: Path) -> list[Row]:
    """Read a workload CSV."""
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        return [(float(r["arrival_s"]), int(r["prompt_tokens"]), int(r["output_tokens"])) for r in rows]


def write_answer(answer: dict[str, Any], path: Path) -> None:
    """Write an answer, the same bytes for the same answer."""
    data = json.dumps(answer, separators=(",", ":")).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data, compresslevel=9, mtime=0)
    path.write_bytes(data)


def ask_again(path: Path) -> None:
    """Write vLLM's answer for a stored case in its place."""
    case = json.loads(gzip.decompress(path.read_bytes()))
    options = Options(**case["args"] | {"cost": tuple(case["args"]["cost"])})
    rows = [(arrival_s, prompt, output) for arrival_s, prompt, output in case["workload"]]
    write_answer({"name": case["name"], "covers": case["covers"], **ask(rows, options)}, path)


def _cost(text: str) -> tuple[float, ...]:
    values = tuple(float(part) for part in text.split(","))
    if len(values) != 6:
        raise argparse.ArgumentTypeError("six numbers: p0,p1,p2,d0,d1,d2")
    return values


def main() -> None:
    """Answer one workload from the command line, or stored ones again."""
    if sys.argv[1:2] == ["--again"]:
        for path in sys.argv[2:]:
            ask_again(Path(path))
        return
    parser = argparse.ArgumentParser(description="vLLM 0.5.5's scheduler over a virtual clock")
    parser.add_argument("workload", type=Path, help="CSV with arrival_s, prompt_tokens, output_tokens")
    parser.add_argument("--blocks", type=int, required=True, help="KV blocks on the GPU")
    parser.add_argument("--cpu-blocks", type=int, default=Options.cpu_blocks)
    parser.add_argument("--block-size", type=int, default=Options.block_size)
    parser.add_argument("--max-model-len", type=int, default=Options.max_model_len)
    parser.add_argument("--max-num-seqs", type=int, default=Options.max_num_seqs)
    parser.add_argument("--max-num-batched-tokens", type=int, help="default: vLLM's own")
    parser.add_argument("--mode", choices=("recompute", "swap"), default=Options.mode)
    parser.add_argument("--chunked", action="store_true", help="chunked prefill")
    parser.add_argument("--cost", type=_cost, default=Options.cost, help="p0,p1,p2,d0,d1,d2 in seconds")
    parser.add_argument("--swap-s-per-block", type=float, default=Options.swap_s_per_block)
    parser.add_argument("--out", type=Path, required=True, help="answer, .json or .json.gz")
    values = vars(parser.parse_args())
    workload, out = values.pop("workload"), values.pop("out")
    answer = ask(read_workload(workload), Options(**values))
    write_answer(answer, out)
    shown = ("iterations", "preemptions", "makespan", "aborted_at", "stuck_at")
    print(", ".join(f"{key} {answer[key]}" for key in shown))


if __name__ == "__main__":
    main()
