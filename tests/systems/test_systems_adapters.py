"""Adapters (LoRA): which request is passed over, by hand; jumped and stepped; memory; what is refused and told."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.testing import engines
from kvtwin.testing.engines import limits, simulate
from sim.options.policies import parse_policy
from sim.options.scenario import Scenario
from sim.run.prepare import prepare
from sim.run.simulate import build_run, execute
from sim.run.traffic import requests_of
from sim.specs.adapters import adapter_bytes
from sim.specs.models import load_model
from traces.adapters import apart
from traces.request import Request

P0, P1, P2 = engines.PREFILL
D0, D1, D2 = engines.DECODE
KINDS = ("", ",async-scheduling=on", ",spec-method=ngram,spec-tokens=2,acceptance-rate=0.5", ",kv-offloading-size=1")


def test_a_request_of_another_adapter_waits_and_those_behind_it_go_first() -> None:
    """One slot; `sql`, `chat`, `sql` arrive together, prompts of 16 with 3, 2 and 2 tokens to generate.

    Both of `sql` are prefilled at once; `chat` starts when the last of them has ended, two decodes later.
    """
    rows = [(3, "sql"), (2, "chat"), (2, "sql")]
    arrivals = [Request(i, 0.0, 16, output, lora=lora) for i, (output, lora) in enumerate(rows)]
    policy = parse_policy("vllm-v1:enable-lora=on,async-scheduling=off", {})[1]
    found = simulate(policy, arrivals, limits(chunked=True)).by_id()
    first = P0 + 32 * P1 + 2 * 256 * P2
    one_ends = first + D0 + 2 * D1 + 34 * D2
    both_ended = one_ends + D0 + D1 + 18 * D2
    chat_first = both_ended + P0 + 16 * P1 + 256 * P2
    chat_ends = chat_first + D0 + D1 + 17 * D2
    assert [found[i].first_token_s for i in range(3)] == pytest.approx([first, chat_first, first])
    assert [found[i].finish_s for i in range(3)] == pytest.approx([both_ended, chat_ends, one_ends])


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.floats(0, 0.5), st.integers(1, 60), st.integers(1, 40), st.sampled_from(["", "a", "b", "c", "d"])),
        min_size=1, max_size=25,
    ),
    kind=st.sampled_from(KINDS), max_loras=st.integers(1, 3), gpu=st.integers(8, 40), seats=st.integers(1, 8),
    by_priority=st.booleans(),
)  # fmt: skip
def test_jumped_equals_stepped_and_no_step_runs_too_many(rows, kind, max_loras, gpu, seats, by_priority) -> None:
    """Where some are passed over, an arrival may start at once: a jump must not run through it."""
    order = ",scheduling-policy=priority" if by_priority else ""
    policy = parse_policy(f"vllm-v1:enable-lora=on,max-loras={max_loras}{kind}{order}", {})[1]
    arrivals, now_s = [], 0.0
    for i, (gap_s, prompt, output, lora) in enumerate(rows):
        now_s += gap_s
        ids = apart(lora, tuple(range(-(-prompt // 16))))
        arrivals.append(Request(i, now_s, prompt, output, "", ids, 16, priority=i % 3, lora=lora))
    limit = limits(gpu=gpu, max_model_len=128, seqs=seats, tokens=64, chunked=True)

    def watch(scheduler):
        def see(plan, start_s, times):
            assert len({seq.request.lora for seq in scheduler.batching.running} - {""}) <= max_loras

        return see

    jumped, stepped = (simulate(policy, arrivals, limit, jump=jump, observe=watch) for jump in (True, False))
    times = [
        [(seq.first_token_s, seq.finish_s, seq.num_cached_tokens) for _, seq in sorted(run.by_id().items())]
        for run in (jumped, stepped)
    ]
    assert times[0] == [pytest.approx(row) for row in times[1]]
    assert len(times[0]) == len(rows)


def test_a_slot_takes_what_vllm_allocates_for_it() -> None:
    """llama-3.1-8b at rank 16, by hand: 16 (3 4096 + 4096 + 2 1024) beside queries, keys and values, 16 (4096 + 4096),
    16 2 (4096 + 14336) and 16 (14336 + 4096) elements a layer, and 2 16 (128256 + 4096) beside embeddings and head."""
    model = load_model("llama-3.1-8b")
    layer = 16 * (3 * 4096 + 4096 + 2 * 1024) + 16 * 8192 + 16 * 2 * 18432 + 16 * 18432
    assert layer * 32 == 41_943_040
    assert adapter_bytes(model, 1, 16) == 2 * (41_943_040 + 2 * 16 * (128_256 + 4096))
    # Of two GPUs each has the whole of one side.
    halves = 16 * (3 * 4096 + 2048 + 1024) + 16 * (2048 + 4096) + 16 * 2 * (4096 + 7168) + 16 * (7168 + 4096)
    assert adapter_bytes(model, 2, 16) == 2 * (32 * halves + 2 * 16 * (128_256 + 4096))
    assert adapter_bytes(load_model("qwen2.5-7b"), 1, 8) == 2 * 8 * 28 * (
        3 * 3584 + 3584 + 2 * 512 + 2 * 3584 + 3 * (3584 + 18_944)
    )


def setup_of(words: str, trace: Path | None = None, model: str = "llama-3.1-8b"):
    scenario = Scenario(model=model, gpu="h100", trace=str(trace) if trace else None)
    return prepare(scenario, "vllm-v1", parse_policy(words, {})[1])


def test_slots_are_taken_from_the_pool() -> None:
    plain, four = (setup_of(words).limits for words in ("vllm-v1", "vllm-v1:enable-lora=on,max-loras=4"))
    missing = (plain.num_gpu_blocks - four.num_gpu_blocks) * plain.block_bytes
    assert missing == pytest.approx(4 * 92_356_608, abs=plain.block_bytes)


def test_a_model_whose_adapters_cannot_be_sized_says_so() -> None:
    warnings = setup_of("vllm-v1:enable-lora=on", model="deepseek-v2-lite").warnings
    assert any("deepseek-v2-lite is not known" in text for text in warnings)


@pytest.mark.parametrize(
    ("words", "lora", "told"),
    [
        ("vllm-v1", "sql", "requests name adapters (lora)"),
        ("vllm-recompute", "sql", "requests name adapters (lora)"),
        ("vllm-v1:enable-lora=on", "", "no request names an adapter"),
        ("vllm-v1:enable-lora=on", "sql", ""),
        ("vllm-v1", "", ""),
    ],
)
def test_what_becomes_of_adapters_is_told(tmp_path: Path, words: str, lora: str, told: str) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text(f"arrival_s,prompt_tokens,output_tokens,lora\n0,16,2,{lora}\n")
    setup = setup_of(words, trace)
    execute(build_run(setup, requests_of(setup)))
    found = [text for text in setup.warnings if "adapters (lora)" in text or "an adapter (lora)" in text]
    assert [told in text for text in found] == [True] * bool(told)


def test_a_workload_without_adapters_is_told_of_them_too() -> None:
    scenario = Scenario(model="llama-3.1-8b", gpu="h100", workload="fixed", num_prompts=1)
    setup = prepare(scenario, "vllm-v1", parse_policy("vllm-v1:enable-lora=on", {})[1])
    requests_of(setup)
    assert any("no request names an adapter" in text for text in setup.warnings)
