"""What fits, counted by hand: a pool of ten blocks of 16 tokens, and a prompt of 100 tokens, which are seven."""

from dataclasses import replace

import pytest

from kvtwin.testing import limits, linear_machine, requests, simulate
from kvtwin.testing.engines import build_engine
from sim.engine.limits import WindowLimits
from sim.engine.sequence import Sequence
from sim.options.policies import parse_policy
from traces.request import Request

RING = WindowLimits(20, num_full=1, num_window=2, blocks=2)
"""Groups: one that keeps all, two that keep two blocks of a window."""


def memory_of(system, *, window=None, caching=False, taken=0):
    """With ten whole blocks, so many of which others have, of sequences of at most 128 tokens."""
    limit = replace(limits(gpu=10, host=12, max_model_len=128, window=window), enable_prefix_caching=caching)
    memory = build_engine(parse_policy(system, {})[1], limit, linear_machine(), lambda seq: None).scheduler.memory
    memory.gpu.allocate(taken)
    return memory


def prompt(tokens=100):
    return Sequence(Request(0, 0.0, tokens, 10))


@pytest.mark.parametrize(
    ("system", "more", "taken", "ever", "now"),
    [
        ("vllm-recompute", {}, 2, 3, 1),
        ("vllm-recompute", {"caching": True}, 2, 3, 1),
        ("vllm-recompute:memory=saved-states", {}, 2, 3, 1),
        # Seven and two of each window: 11 of 30.
        ("vllm-recompute", {"window": RING}, 10, 6, 3),
        # As many as 128 tokens take: eight.
        ("orca", {}, 1, 2, 1),
    ],
    ids=["paged", "prefix", "states", "rings", "reserved"],
)
def test_a_prompt_fits_beside_so_many_whole_blocks(system, more, taken, ever, now):
    empty, memory = memory_of(system, **more), memory_of(system, **more, taken=taken)
    seq = prompt()
    assert [empty.ever_fits(seq, keep_free) for keep_free in (0, ever, ever + 1)] == [True, True, False]
    assert [empty.fits(seq, keep_free) for keep_free in (0, ever, ever + 1)] == [True, True, False]
    assert [memory.fits(seq, keep_free) for keep_free in (0, now, now + 1)] == [True, True, False]
    assert [memory.ever_fits(seq, keep_free) for keep_free in (ever, ever + 1)] == [True, False]


@pytest.mark.parametrize(
    ("system", "more", "blocks", "taken", "most"),
    [
        ("vllm-swap", {}, 7, 1, 1),
        # Eleven pool blocks and three that would have to be free: 14 of 30.
        ("vllm-swap", {"window": RING}, 11, 8, 2),
        # What it will ever need it holds.
        ("vllm-swap:memory=reserved", {}, 8, 1, 1),
    ],
    ids=["paged", "rings", "reserved"],
)
def test_what_returns_wants_a_block_more_and_takes_those_that_it_held(system, more, blocks, taken, most):
    memory = memory_of(system, **more, taken=taken)
    seq = prompt()
    seq.num_blocks = 7
    assert memory.held_blocks(seq) == blocks
    assert [memory.can_swap_in(seq, keep_free) for keep_free in (0, most, most + 1)] == [True, True, False]
    memory.host.allocate(memory.host.num_blocks - blocks)
    assert memory.can_swap_out(seq)
    memory.host.allocate(1)
    assert not memory.can_swap_out(seq)


@pytest.mark.parametrize(("window", "largest"), [(None, 9), (RING, 10)], ids=["paged", "rings"])
def test_what_fills_the_gpu_with_no_block_left_can_never_return(window, largest):
    """Of rings 10 + 2 x 2 pool blocks and three of 30: what has all that the full layers could has not outgrown."""
    memory, seq = memory_of("vllm-swap", window=window), prompt()
    for seq.num_blocks in (largest, largest + 1):
        assert memory.outgrew_gpu(seq) == (window is None and seq.num_blocks > largest)
    seq.num_blocks = 23
    assert not memory_of("vllm-swap", window=RING).outgrew_gpu(seq)
    seq.num_blocks = 24
    assert memory_of("vllm-swap", window=RING).outgrew_gpu(seq)


def test_chunks_in_rings_take_what_their_windows_do_not_hold_yet():
    memory, seq = memory_of("vllm-recompute:batching=sglang", window=RING), prompt()
    # 40 tokens are three blocks, two of which each window keeps; 100 are seven.
    memory.take(seq, 40)
    assert (seq.num_blocks, memory.gpu.free) == (3, 30 - 3 - 2 * 2)
    assert [memory.blocks_missing(seq, tokens) for tokens in (48, 49, 100)] == [0, 1, 4]
    memory.take_chunk(seq, 100)
    assert (seq.num_blocks, memory.gpu.free) == (7, 30 - 7 - 2 * 2)
    assert [memory.blocks_wanted(prompt(16), 16), memory.blocks_wanted(prompt(17), 17)] == [3, 6]


@pytest.mark.parametrize("system", ["vllm-v1:watermark=0.3", "vllm-v1:watermark=0.3,cpu-chunks=20"])
@pytest.mark.parametrize("tokens", [100, 159])
def test_the_watermark_is_kept_beside_others_alone(system, tokens):
    """Three of ten blocks stay free while any runs; alone a prompt may take all ten."""
    policy = parse_policy(f"{system},async-scheduling=false", {})[1]
    limit = limits(gpu=10, max_model_len=160, tokens=2048, chunked=True)
    outcome = simulate(policy, requests((0.0, tokens, 1), (0.0, 17, 1)), limit, jump=False)
    first, second = (outcome.by_id()[i].first_scheduled_s for i in (0, 1))
    assert first == 0.0
    assert second > 0.0


@pytest.mark.parametrize(("batching", "most"), [("unified", 10), ("sglang", 9)])
def test_batchings_with_a_rule_of_their_own_keep_the_admissions_watermark(batching, most):
    """One block of a hundred. Beside a prompt of ninety, `most` blocks start where none is kept, else one less.

    SGLang counts what both are to generate, too: a block.
    """
    limit = limits(gpu=100, max_model_len=1600, tokens=2048, chunked=True)

    def starts_at_once(admission: str, blocks: int) -> bool:
        policy = parse_policy(f"vllm-recompute:batching={batching},admission={admission}", {})[1]
        traffic = requests((0.0, 89 * 16 + 1, 8), (0.001, blocks * 16 - 1, 1))
        seqs = simulate(policy, traffic, limit, jump=False).by_id()
        return seqs[1].first_scheduled_s < seqs[0].finish_s

    found = {name: [starts_at_once(name, most + more) for more in (-1, 0, 1)] for name in ("memory", "watermark")}
    assert found == {"memory": [True, True, False], "watermark": [True, False, False]}
