"""Images of prompts under vLLM v1: steps worked out by hand, one encoder's output for all, what is refused and said."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin import main
from kvtwin.testing import engines
from kvtwin.testing.engines import limits, simulate
from sim.engine.sequence import Sequence
from sim.kv.encoder_cache import EncoderCache
from sim.options.policies import parse_policy
from traces.request import Image, Request

P0, P1, P2 = engines.PREFILL


def chunks_of(words: str, *requests: Request, tokens: int = 32, **options) -> tuple[list[str], engines.Outcome]:
    """What each step computes, as `request:tokens`, with so many batched tokens at most."""
    lines: list[str] = []

    def listen(scheduler):
        scheduler.batching.record = lines.append
        return lambda plan, start_s, times: None

    policy = parse_policy(f"vllm-v1:{words}", {})[1]
    outcome = simulate(policy, requests, limits(chunked=True, tokens=tokens), observe=listen, jump=False, **options)
    return lines, outcome


def test_a_chunk_ends_before_an_image_that_the_step_has_no_budget_for() -> None:
    """60 tokens, images of 24 from 4 and from 30 on, 32 tokens a step, for the encoder too, at 1000/s.

    The first step may compute 32 tokens, which reach into both images: 24 + 24 are more than 32, so it ends at 30.
    The second has room for the other 24 once the first image, all of it computed, is let go.
    """
    request = Request(0, 0.0, 60, 1, images=(Image(4, 24, 1), Image(30, 24, 2)))
    assert chunks_of("", request)[0] == ["0:32", "0:28"]
    lines, outcome = chunks_of("max-tokens-per-image=24,encoder-tokens-per-s=1000", request)
    assert lines == ["0:30", "0:30"]
    step_s = P0 + 30 * P1 + 900 * P2 + 0.024
    assert outcome.by_id()[0].first_token_s == pytest.approx(2 * step_s)
    assert outcome.scheduler.counters.policy == {"encoder_tokens": 48}


def test_an_image_that_may_not_be_split_begins_a_chunk() -> None:
    """20 tokens of text, then 24 of an image: the step's 32 reach into it, or end where it begins."""
    request = Request(0, 0.0, 50, 1, images=(Image(20, 24, 1),))
    assert chunks_of("max-tokens-per-image=24", request)[0] == ["0:32", "0:18"]
    assert chunks_of("max-tokens-per-image=24,disable-chunked-mm-input=true", request)[0] == ["0:20", "0:30"]


def test_one_output_serves_all_prompts_with_the_image_until_room_is_needed() -> None:
    """A cache of 32 tokens. Images 1, 1 again, 2 (which needs the room of 1), 1: three are computed."""
    requests = [Request(i, 10.0 * i, 30, 1, images=(Image(0, 24, one),)) for i, one in enumerate((1, 1, 2, 1))]
    counted = chunks_of("max-tokens-per-image=24", *requests)[1].scheduler.counters.policy
    assert counted == {"encoder_tokens": 3 * 24}


def test_a_request_whose_image_must_wait_is_passed() -> None:
    """8 tokens of each prompt a step. Request 0 has the cache's 32 tokens until its image is computed, after four."""
    requests = [Request(i, 0.0, 32, 1, images=(Image(0, 32, i),)) for i in range(2)] + [Request(2, 0.0, 8, 1)]
    lines, _ = chunks_of("max-tokens-per-image=32,long-prefill-token-threshold=8", *requests)
    assert lines == ["0:8 2:8", "0:8", "0:8", "0:8", "1:32"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("max-tokens-per-image=24", "more tokens than max-tokens-per-image"),
        ("max-tokens-per-image=32,disable-chunked-mm-input=true,long-prefill-token-threshold=16", "may compute"),
    ],
)
def test_an_image_that_would_wait_for_ever_is_ignored(words: str, reason: str) -> None:
    tokens = 33 if "more" in reason else 32
    _, outcome = chunks_of(words, Request(0, 0.0, 40, 1, images=(Image(0, tokens, 1),)), Request(1, 0.0, 40, 1))
    assert reason in outcome.by_id()[0].error and not outcome.by_id()[1].error


places = st.tuples(st.integers(0, 20), st.sampled_from([1, 8, 16, 24]), st.integers(0, 3))
rows = st.tuples(
    st.sampled_from([0.0, 0.05, 0.5]), st.integers(1, 40), st.integers(1, 30), st.sampled_from([1, 2]),
    st.lists(places, max_size=3),
)  # fmt: skip
setting = st.tuples(
    st.sampled_from([16, 32, 48]), st.sampled_from([8, 12, 40]), st.booleans(), st.booleans(), st.booleans()
)


@settings(max_examples=40, deadline=None)
@given(st.lists(rows, min_size=1, max_size=8), setting)
def test_jumped_runs_with_images_equal_stepped_ones(rows: list, setting: tuple) -> None:
    requests, now = [], 0.0
    for i, (gap_s, more, output, stem, drawn) in enumerate(rows):
        now += gap_s
        images, end = [], 0
        for gap, tokens, ident in drawn:
            images.append(Image(end + gap, tokens, ident))
            end += gap + tokens
        prompt = end + more
        ids = tuple(stem if block < 3 else 100 * i + block for block in range(-(-prompt // 16)))
        requests.append(Request(i, now, prompt, output, "", ids, 16, images=tuple(images)))
    tokens, blocks, whole, ahead, caching = setting
    words = f"max-tokens-per-image=24,encoder-tokens-per-s=500,disable-chunked-mm-input={whole and tokens >= 24}"
    policy = parse_policy(f"vllm-v1:{words},async-scheduling={ahead}", {})[1]
    limit = limits(blocks, chunked=True, tokens=tokens, max_model_len=16 * blocks, seqs=4)
    limit = replace(limit, enable_prefix_caching=caching)
    found = []
    for jump in (True, False):
        outcome = simulate(policy, requests, limit, jump=jump, checked=not jump)
        assert not outcome.scheduler.batching.cache.held
        # One that is refused as it arrives may be told later.
        ended = sorted(outcome.ended, key=lambda seq: seq.request.request_id)
        decided = [(seq.error, seq.num_preemptions, seq.num_cached_tokens) for seq in ended]
        found.append((decided, outcome.scheduler.counters.policy, [seq.finish_s for seq in ended if not seq.error]))
    assert found[0][:2] == found[1][:2]
    assert found[0][2] == pytest.approx(found[1][2])


def test_an_image_that_a_prompt_has_twice_is_needed_until_the_last_time() -> None:
    cache, seq = EncoderCache(8), Sequence(Request(0, 0.0, 16, 1, images=(Image(0, 4, 1), Image(8, 4, 1))))
    cache.add(seq, 0)
    cache.refer(seq, 1)
    cache.let_go(seq, 4)
    assert cache.freeable == 4
    cache.let_go(seq, 12)
    assert cache.freeable == 8 and not cache.held


TRACE = "arrival_s,prompt_tokens,output_tokens,images\n0,600,5,10:500:1\n1,600,5,\n"


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("vllm-v1", ["images are read as text"]),
        ("layerkv", ["images are read as text"]),
        ("vllm-v1:max-tokens-per-image=500", ["takes no time", "nothing of the GPU's memory"]),
        ("vllm-v1:max-tokens-per-image=500,encoder-tokens-per-s=1e4", ["nothing of the GPU's memory"]),
        ("sarathi:batching=unified,max-tokens-per-image=500,encoder-tokens-per-s=1e4", ["nothing of the GPU's memory"]),
    ],
)
@pytest.mark.parametrize("num_prompts", [None, 1])
def test_what_is_not_simulated_of_images_is_said(
    tmp_path: Path, policy: str, said: list[str], num_prompts: int | None
) -> None:
    path = tmp_path / "t.csv"
    path.write_text(TRACE)
    told = ["run", "--trace", str(path), "--model", "llama-2-7b", "--gpu", "a100-80g", "--policy", policy, "--quiet"]
    told += ["--out", str(tmp_path / "out"), *(["--num-prompts", str(num_prompts)] if num_prompts else [])]
    assert main(told) == 0
    warnings = json.loads((tmp_path / "out" / "result.json").read_text())["warnings"]
    for words in ("images are read as text", "takes no time", "nothing of the GPU's memory"):
        assert any(words in warning for warning in warnings) == (words in said)
