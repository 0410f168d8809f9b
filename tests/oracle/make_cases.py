"""Make the stored answers of ``cases/``: hard workloads and what vLLM 0.5.5's scheduler decides for each.

Needs the environment described in ``vllm055_oracle.py``. The cases come out the same each time::

    python make_cases.py            # all
    python make_cases.py s03 x0     # those whose name starts so

A case on which vLLM would loop for ever is reported and not stored.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm055_oracle import Options, Row, ask, write_answer

CASES = Path(__file__).resolve().parent / "cases"
TICK = 1 / 64
"""Binary-exact cost of an iteration, so that arrivals can fall exactly on the boundaries."""

EXACT = (TICK, 0.0, 0.0, TICK, 0.0, 0.0)
REAL = (0.005, 4e-5, 2e-9, 0.02, 2e-5, 6e-7)
FREE_PREFILL = (0.0, 0.0, 0.0, TICK, 0.0, 0.0)
TOKENS_ONLY = (0.0, 4e-5, 0.0, 0.0, 2e-4, 0.0)
SQUARES_ONLY = (0.0, 0.0, 2e-6, 0.0, 0.0, 6e-6)

Gaps = Callable[[random.Random], float]
Sizes = Callable[[random.Random], tuple[int, int]]


@dataclass(frozen=True)
class Case:
    """A workload, the scheduler's options and what the two are meant to bring about."""

    name: str
    covers: str
    requests: int
    gaps: Gaps
    sizes: Sizes
    options: Options


def poisson(rate: float) -> Gaps:
    """Independent arrivals."""
    return lambda rng: rng.expovariate(rate)


def bursts(size: int, gap: float) -> Gaps:
    """About ``size`` requests at the same instant, then a gap; exact if the gap is."""
    return lambda rng: gap if rng.random() < 1 / size else 0.0


def ticks(upto: int) -> Gaps:
    """Arrivals on whole ticks, none to ``upto`` of them apart."""
    return lambda rng: rng.randint(0, upto) * TICK


def idle(rate: float, gap: float) -> Gaps:
    """Independent arrivals with a long silence now and then."""
    return lambda rng: gap if rng.random() < 0.05 else rng.expovariate(rate)


def between(prompt: tuple[int, int], output: tuple[int, int]) -> Sizes:
    """Prompts and outputs uniform in their ranges."""
    return lambda rng: (rng.randint(*prompt), rng.randint(*output))


def multiples(block: int, blocks: tuple[int, int], output: tuple[int, int]) -> Sizes:
    """Prompts that fill whole blocks."""
    return lambda rng: (block * rng.randint(*blocks), rng.randint(*output))


def mixed(*parts: tuple[float, Sizes]) -> Sizes:
    """One of several kinds of requests, by weight."""
    weights, kinds = zip(*parts, strict=True)
    return lambda rng: rng.choices(kinds, weights)[0](rng)


def workload(case: Case) -> list[Row]:
    """Draw the rows of a case."""
    rng = random.Random(f"kvtwin {case.name}")
    rows, now = [], 0.0
    for _ in range(case.requests):
        now += case.gaps(rng)
        rows.append((now, *case.sizes(rng)))
    return rows


def recompute_cases() -> Iterator[Case]:
    """Preemption by recompute, whole prompts."""
    opt = Options
    yield Case(
        "r01-tiny-pool", "many preemptions of the same requests, 12 blocks",
        120, poisson(6), between((4, 110), (4, 70)), opt(12, max_model_len=256, max_num_seqs=8),
    )  # fmt: skip
    yield Case(
        "r02-block-1", "block size 1, watermark of 1 block", 120, poisson(8), between((3, 100), (2, 40)),
        opt(150, block_size=1, max_model_len=256, max_num_seqs=8),
    )  # fmt: skip
    yield Case(
        "r03-lone", "max_num_seqs 1: a lone sequence preempts itself; ignored once it outgrows the pool",
        80, poisson(3), between((1, 90), (1, 60)), opt(10, block_size=8, max_model_len=256, max_num_seqs=1, cost=EXACT),
    )  # fmt: skip
    yield Case(
        "r04-block-32", "4 blocks of 32, prompts that can never fit", 90, poisson(8), between((1, 150), (1, 60)),
        opt(4, block_size=32, max_model_len=256, max_num_seqs=4),
    )  # fmt: skip
    yield Case(
        "r05-ties", "arrivals exactly on iteration boundaries", 150, ticks(12), between((1, 80), (1, 24)),
        opt(14, max_model_len=128, max_num_seqs=4, cost=EXACT),
    )  # fmt: skip
    yield Case(
        "r06-model-len", "prompts over max_model_len; preempted requests ignored for having outgrown it",
        120, bursts(6, 1.0), mixed((4, between((10, 90), (5, 70))), (1, between((97, 140), (1, 9)))),
        opt(18, max_model_len=96, max_num_batched_tokens=96, max_num_seqs=8),
    )  # fmt: skip
    yield Case(
        "r07-budget-64", "budget of 64 tokens, prompts of whole blocks up to beyond it",
        150, bursts(10, 0.75), multiples(16, (1, 5), (1, 20)),
        opt(16, max_model_len=64, max_num_batched_tokens=64, max_num_seqs=8, cost=EXACT),
    )  # fmt: skip
    yield Case(
        "r08-one-token", "one-token outputs and long idle gaps",
        200, idle(40, 30.0), mixed((4, between((1, 200), (1, 1))), (1, between((1, 60), (2, 30)))),
        opt(16, max_model_len=256, max_num_batched_tokens=256, max_num_seqs=6),
    )  # fmt: skip
    yield Case(
        "r09-tokens-only", "costs per token only", 120, poisson(60), between((4, 90), (2, 50)),
        opt(30, block_size=8, max_model_len=256, max_num_seqs=6, cost=TOKENS_ONLY),
    )  # fmt: skip
    yield Case(
        "r10-burst-300", "300 requests at once and max_num_seqs 8", 300, bursts(150, 2.0), between((5, 60), (1, 20)),
        opt(60, max_model_len=128, max_num_batched_tokens=128, max_num_seqs=8),
    )  # fmt: skip
    yield Case(
        "r11-watermark", "prompts at the edge of pool less watermark (250 blocks of 1, watermark 2)",
        90, poisson(4), mixed((2, between((244, 252), (1, 6))), (3, between((5, 120), (5, 60)))),
        opt(250, block_size=1, max_model_len=512, max_num_seqs=5),
    )  # fmt: skip
    yield Case(
        "r12-free-prefill", "prompts cost no time: many iterations at one instant, arrivals on boundaries",
        120, ticks(16), multiples(8, (1, 7), (1, 30)),
        opt(20, block_size=8, max_model_len=128, max_num_seqs=7, cost=FREE_PREFILL),
    )  # fmt: skip
    yield Case(
        "r13-outgrow", "most requests outgrow the pool after dozens of tokens",
        60, bursts(4, 1.5), between((10, 60), (30, 90)), opt(6, max_model_len=256, max_num_seqs=4, cost=EXACT),
    )  # fmt: skip


def swap_cases() -> Iterator[Case]:
    """Preemption by swapping, whole prompts."""
    exact = 1 / 1024

    def opt(blocks: int, cpu_blocks: int = 4000, swap_s_per_block: float = 0.0003, **more: Any) -> Options:
        return Options(blocks, cpu_blocks, mode="swap", swap_s_per_block=swap_s_per_block, **more)

    yield Case(
        "s01-tiny-pool", "many swaps of the same requests, 12 blocks", 120, poisson(6), between((4, 110), (4, 70)),
        opt(12, max_model_len=256, max_num_seqs=8),
    )  # fmt: skip
    yield Case(
        "s02-block-1", "block size 1, watermark of 1 block", 120, poisson(8), between((3, 100), (2, 40)),
        opt(150, block_size=1, max_model_len=256, max_num_seqs=8, swap_s_per_block=2e-5),
    )  # fmt: skip
    yield Case(
        "s03-lone", "max_num_seqs 1: a lone sequence swaps itself out and is ignored; its CPU blocks are leaked",
        80, poisson(3), between((1, 90), (1, 60)),
        opt(10, block_size=8, max_model_len=256, max_num_seqs=1, cost=EXACT, swap_s_per_block=exact),
    )  # fmt: skip
    yield Case(
        "s04-block-32", "4 blocks of 32, prompts that can never fit", 90, poisson(8), between((1, 150), (1, 60)),
        opt(4, block_size=32, max_model_len=256, max_num_seqs=4),
    )  # fmt: skip
    yield Case(
        "s05-ties", "arrivals exactly on iteration boundaries, copies included",
        150, ticks(12), between((1, 80), (1, 24)),
        opt(14, max_model_len=128, max_num_seqs=4, cost=EXACT, swap_s_per_block=TICK),
    )  # fmt: skip
    yield Case(
        "s06-abort", "CPU pool of 6 blocks: vLLM aborts", 120, bursts(6, 0.5), between((10, 60), (5, 40)),
        opt(12, 6, max_model_len=128, max_num_seqs=8),
    )  # fmt: skip
    yield Case(
        "s07-abort-late", "CPU pool eaten by leaked blocks until vLLM aborts",
        150, poisson(4), mixed((5, between((5, 60), (5, 40))), (1, between((40, 70), (60, 80)))),
        opt(8, 50, max_model_len=256, max_num_seqs=3, cost=EXACT, swap_s_per_block=exact),
    )  # fmt: skip
    yield Case(
        "s08-budget-64", "budget of 64 tokens, prompts of whole blocks, copies free",
        150, bursts(10, 0.75), multiples(16, (1, 5), (1, 20)),
        opt(14, max_model_len=64, max_num_batched_tokens=64, max_num_seqs=8, cost=EXACT, swap_s_per_block=0.0),
    )  # fmt: skip
    yield Case(
        "s09-copies-only", "only copies and squares cost time", 100, poisson(20), between((4, 90), (2, 50)),
        opt(24, block_size=8, max_model_len=256, max_num_seqs=6, cost=SQUARES_ONLY, swap_s_per_block=0.002),
    )  # fmt: skip
    yield Case(
        "s10-idle-bursts", "bursts of 12 with long silences, one-token outputs among them",
        180, bursts(12, 20.0), mixed((1, between((1, 100), (1, 1))), (2, between((1, 60), (5, 40)))),
        opt(16, max_model_len=128, max_num_batched_tokens=128, max_num_seqs=8),
    )  # fmt: skip
    yield Case(
        "s11-watermark", "swap-in held back by a watermark of 3 blocks (300 blocks of 1)",
        90, poisson(5), mixed((1, between((150, 200), (5, 40))), (3, between((5, 90), (5, 60)))),
        opt(300, block_size=1, max_model_len=512, max_num_seqs=6, swap_s_per_block=exact, cost=EXACT),
    )  # fmt: skip
    yield Case(
        "s12-outgrow", "most requests outgrow the pool: ignored at swap-in, others wait behind them",
        60, bursts(4, 1.5), between((10, 60), (30, 90)),
        opt(6, max_model_len=256, max_num_seqs=4, cost=EXACT, swap_s_per_block=exact),
    )  # fmt: skip


def chunked_recompute_cases() -> Iterator[Case]:
    """Chunked prefill, preemption by recompute."""

    def opt(blocks: int, budget: int, **more: Any) -> Options:
        return Options(blocks, max_num_batched_tokens=budget, chunked=True, **more)

    yield Case(
        "c01-budget-64", "budget 64: several chunks a prompt, tiny pool", 120, poisson(6), between((4, 150), (4, 50)),
        opt(16, 64, max_model_len=512, max_num_seqs=8),
    )  # fmt: skip
    yield Case(
        "c02-budget-is-seqs", "chunk budget equal to max_num_seqs (8)", 80, poisson(3), between((1, 60), (1, 30)),
        opt(16, 8, block_size=8, max_model_len=256, max_num_seqs=8),
    )  # fmt: skip
    yield Case(
        "c03-no-pressure", "long prompts, budget 64, room for all", 80, bursts(5, 1.0), between((50, 400), (1, 40)),
        opt(400, 64, max_model_len=512, max_num_seqs=8),
    )  # fmt: skip
    yield Case(
        "c04-ties", "arrivals exactly on iteration boundaries, prompts of whole blocks",
        150, ticks(14), multiples(16, (1, 6), (1, 24)), opt(16, 128, max_model_len=256, max_num_seqs=4, cost=EXACT),
    )  # fmt: skip
    yield Case(
        "c05-over-model-len", "prompts over max_model_len 48: ignored or not by what is left of the budget",
        150, bursts(8, 1.0), mixed((2, between((5, 48), (1, 40))), (1, between((49, 140), (1, 12)))),
        opt(16, 128, max_model_len=48, max_num_seqs=8),
    )  # fmt: skip
    yield Case(
        "c06-block-1", "block size 1, watermark of 2 blocks", 100, poisson(8), between((3, 150), (2, 40)),
        opt(240, 64, block_size=1, max_model_len=256, max_num_seqs=6),
    )  # fmt: skip
    yield Case(
        "c07-lone", "max_num_seqs 1, whole pool within the budget: a lone sequence preempts itself",
        80, poisson(3), between((1, 90), (1, 60)),
        opt(10, 80, block_size=8, max_model_len=256, max_num_seqs=1, cost=EXACT),
    )  # fmt: skip
    yield Case(
        "c08-never-fits", "4 blocks of 32, budget of the whole pool, prompts that can never fit",
        90, poisson(8), between((1, 150), (1, 60)), opt(4, 128, block_size=32, max_model_len=256, max_num_seqs=4),
    )  # fmt: skip
    yield Case(
        "c09-tokens-only", "costs per token only, one-token outputs",
        150, idle(300, 15.0), mixed((1, between((1, 150), (1, 1))), (2, between((1, 90), (2, 30)))),
        opt(20, 64, block_size=8, max_model_len=256, max_num_seqs=6, cost=TOKENS_ONLY),
    )  # fmt: skip
    yield Case(
        "c10-half-done", "half-done prompts recomputed, budget 12, block size 1",
        120, poisson(12), between((14, 23), (20, 60)), opt(99, 12, block_size=1, max_model_len=256, max_num_seqs=6),
    )  # fmt: skip
    yield Case(
        "c11-half-done-ties", "half-done prompts recomputed, budget equal to max_num_seqs (8), arrivals on boundaries",
        150, ticks(10), between((9, 15), (1, 40)),
        opt(60, 8, block_size=1, max_model_len=256, max_num_seqs=8, cost=EXACT),
    )  # fmt: skip


def chunked_swap_cases() -> Iterator[Case]:
    """Chunked prefill, preemption by swapping."""
    exact = 1 / 1024

    def opt(blocks: int, budget: int, cpu_blocks: int = 4000, swap_s_per_block: float = 0.0003, **more: Any) -> Options:
        return Options(
            blocks,
            cpu_blocks,
            max_num_batched_tokens=budget,
            chunked=True,
            mode="swap",
            swap_s_per_block=swap_s_per_block,
            **more,
        )

    yield Case(
        "x01-budget-64", "half-done prompts swapped out and in, tiny pool", 120, poisson(6), between((4, 110), (4, 50)),
        opt(14, 64, max_model_len=512, max_num_seqs=8),
    )  # fmt: skip
    yield Case(
        "x02-budget-is-seqs", "chunk budget equal to max_num_seqs (8), short prompts",
        100, poisson(4), between((1, 8), (1, 40)), opt(12, 8, block_size=8, max_model_len=256, max_num_seqs=8),
    )  # fmt: skip
    yield Case(
        "x03-half-done", "half-done prompts swapped out and in, budget 16, block size 2",
        150, poisson(12), between((18, 34), (5, 40)),
        opt(49, 16, block_size=2, max_model_len=256, max_num_seqs=8, swap_s_per_block=2e-5),
    )  # fmt: skip
    yield Case(
        "x04-ties", "arrivals exactly on iteration boundaries, prompts of whole blocks",
        150, ticks(14), multiples(16, (1, 6), (1, 24)),
        opt(14, 128, max_model_len=256, max_num_seqs=4, cost=EXACT, swap_s_per_block=TICK),
    )  # fmt: skip
    yield Case(
        "x05-over-model-len", "prompts over max_model_len 48: ignored or not by what is left of the budget",
        150, bursts(8, 1.0), mixed((2, between((5, 48), (1, 40))), (1, between((49, 120), (1, 12)))),
        opt(16, 128, max_model_len=48, max_num_seqs=8),
    )  # fmt: skip
    yield Case(
        "x06-block-1", "block size 1, watermark of 2 blocks", 100, poisson(8), between((3, 90), (2, 40)),
        opt(200, 64, block_size=1, max_model_len=256, max_num_seqs=6, swap_s_per_block=2e-5),
    )  # fmt: skip
    yield Case(
        "x07-lone", "max_num_seqs 1: a lone sequence swaps itself out and is ignored",
        80, poisson(3), between((1, 90), (1, 60)),
        opt(10, 80, block_size=8, max_model_len=256, max_num_seqs=1, cost=EXACT, swap_s_per_block=exact),
    )  # fmt: skip
    yield Case(
        "x08-abort", "CPU pool of 21 blocks: vLLM aborts", 120, bursts(6, 0.5), between((10, 60), (5, 40)),
        opt(12, 64, 21, max_model_len=128, max_num_seqs=8),
    )  # fmt: skip
    yield Case(
        "x09-never-fits", "4 blocks of 32, prompts that can never fit", 90, poisson(8), between((1, 150), (1, 60)),
        opt(4, 128, block_size=32, max_model_len=256, max_num_seqs=4),
    )  # fmt: skip
    yield Case(
        "x10-half-done-bursts", "half-done prompts swapped out and in, bursts, budget equal to max_num_seqs (8)",
        150, bursts(10, 1.0), between((9, 15), (10, 40)),
        opt(60, 8, block_size=1, max_model_len=256, max_num_seqs=8, cost=EXACT, swap_s_per_block=exact / 16),
    )  # fmt: skip
    yield Case(
        "x11-half-done-ties", "half-done prompts swapped out and in, arrivals on boundaries, copies free",
        120, ticks(24), between((14, 23), (20, 60)),
        opt(99, 12, block_size=1, max_model_len=128, max_num_seqs=6, cost=EXACT, swap_s_per_block=0.0),
    )  # fmt: skip
    yield Case(
        "x12-overtaken", "new requests overtake the swapped ones until the CPU pool is full: vLLM aborts",
        150, poisson(12), between((18, 31), (40, 120)),
        opt(110, 16, 1500, block_size=1, max_model_len=256, max_num_seqs=8, swap_s_per_block=2e-5),
    )  # fmt: skip


def main() -> None:
    """Make the cases named on the command line, or all."""
    CASES.mkdir(exist_ok=True)
    total = 0
    makers = (recompute_cases, swap_cases, chunked_recompute_cases, chunked_swap_cases)
    for case in (case for maker in makers for case in maker()):
        if sys.argv[1:] and not case.name.startswith(tuple(sys.argv[1:])):
            continue
        rows = workload(case)
        answer = ask(rows, case.options)
        if answer["stuck_at"] is not None:
            print(f"{case.name}: vLLM loops for ever from {answer['stuck_at']}; not stored")
            continue
        size = write_answer({"name": case.name, "covers": case.covers, **answer}, CASES / f"{case.name}.json.gz")
        total += size
        per_request = answer["requests"]
        columns = zip(per_request["first"], per_request["ignored_at"], strict=True)
        ignored = [first for first, at in columns if at is not None]
        late = sum(first is not None for first in ignored)
        print(
            f"{case.name}: {len(rows)} requests, {answer['iterations']} iterations, "
            f"{answer['preemptions']} preemptions (at most {max(per_request['preempted'])} of one), "
            f"{len(ignored)} ignored ({late} after tokens), {len(answer['empty_steps'])} empty, "
            f"{case.options.cpu_blocks - answer['free_cpu_blocks']} CPU and "
            f"{case.options.blocks - answer['free_gpu_blocks']} GPU blocks not given back, "
            f"aborted at {answer['aborted_at']}, {size} bytes"
        )
    print(f"{total} bytes")


if __name__ == "__main__":
    main()
