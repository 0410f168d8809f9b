"""`--enable-prefix-caching` from the command line: what it saves, what can have it, and what is left without it."""

import json

import pytest

from kvtwin import main
from sim.run.traffic import note_shared_prefixes
from traces.request import Request

# Four prompts of 64 tokens, arriving far apart. The second begins like the first for two blocks of 16; the third is the
# first again, whose last token must be computed all the same; the fourth goes on where the first one's answer ended.
ROWS = """arrival_s,prompt_tokens,output_tokens,hash_ids,hash_block_tokens,output_hash_ids
0,64,33,1 2 3 4,16,11 12
10,64,4,1 2 7 8,16,
20,64,4,1 2 3 4,16,
30,112,4,1 2 3 4 11 12 13,16,
"""


def run(tmp_path, *words):
    trace = tmp_path / "trace.csv"
    trace.write_text(ROWS)
    out = tmp_path / "out"
    base = ["run", "--trace", str(trace), "--model", "llama-2-7b", "--gpu", "a100-80g", "--out", str(out), "--quiet"]
    assert main([*base, *words]) == 0
    return json.loads((out / "result.json").read_text())


@pytest.mark.parametrize("policy", ["vllm-v1", "vllm-recompute", "sarathi"])
def test_hits_are_those_worked_by_hand(tmp_path, policy):
    """0 + 2 blocks + 3 of 4 blocks (the last token is computed) + 4 of the prompt and 2 of the answer: 176 tokens."""
    result = run(tmp_path, "--policy", policy, "--enable-prefix-caching")
    assert result["counters"]["prefix_hit_tokens"] == 0 + 32 + 48 + 96
    assert result["scenario"]["enable_prefix_caching"] is True
    assert result["warnings"] == []


def test_a_cached_prompt_is_answered_sooner(tmp_path):
    cached = run(tmp_path, "--policy", "sarathi", "--enable-prefix-caching")["ttfts"]
    whole = run(tmp_path, "--policy", "sarathi")["ttfts"]
    assert cached[0] == whole[0]
    assert all(one < other for one, other in zip(cached[1:], whole[1:], strict=True))


def test_vllm_v1_caches_unless_told_not_to(tmp_path):
    assert run(tmp_path)["counters"]["prefix_hit_tokens"] == 176
    assert run(tmp_path, "--no-enable-prefix-caching")["counters"]["prefix_hit_tokens"] == 0


def test_shared_prefixes_that_are_computed_again_are_told(tmp_path):
    """32 + 63 + 96 of 304 prompt tokens."""
    (warning,) = run(tmp_path, "--policy", "vllm-recompute")["warnings"]
    assert "63% of the prompt tokens" in warning and "--enable-prefix-caching" in warning


def test_nothing_is_said_where_nothing_is_shared():
    warnings: list[str] = []
    # The last has blocks of the first, but no prefix.
    requests = [Request(i, 0.0, 32, 4, "", ids, 16) for i, ids in enumerate([(0, 1), (2, 3), (1, 0)])]
    assert list(note_shared_prefixes(requests, warnings)) == requests
    assert warnings == []
