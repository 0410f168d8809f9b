"""vAttention: how many tokens a page holds, what is mapped when, and what a page wastes."""

import pytest

from kvtwin.testing import conformance, limits, linear_machine, requests, simulate
from kvtwin.testing.engines import Outcome
from sim.kv.page_options import PageOptions
from sim.options.policies import parse_policy
from sim.options.scenario import Scenario
from sim.run.prepare import prepare
from sim.specs.models import load_model
from sim.systems.vattention import VAttention


@pytest.mark.parametrize(
    ("model", "tp", "page_kib", "tokens"),
    [
        # 32 heads of 128 elements of 2 bytes are 8 KiB; 8 heads are 2 KiB, 1 KiB on each of two GPUs.
        ("llama-2-7b", 1, 2048, 256),
        ("llama-3.1-8b", 1, 2048, 1024),
        ("llama-3.1-8b", 1, 64, 32),
        ("llama-3.1-8b", 2, 64, 64),
    ],
)
def test_a_page_holds_the_keys_of_as_many_tokens_in_one_layer(model, tp, page_kib, tokens):
    assert PageOptions(page_kib=page_kib).tokens(load_model(model), tp) == tokens


def run(*rows: tuple[float, int, int], gpu: int = 8, jump: bool = True) -> Outcome:
    """Blocks of 16 tokens, each of 8 pages (four layers) of 125 us: a block is 1 ms; a millisecond a token."""
    machine = linear_machine(prefill=(0.0, 1e-3, 0.0), decode=(1e-3, 0.0, 0.0))
    return simulate(VAttention(map_us=125.0), requests(*rows), limits(gpu=gpu), machine=machine, jump=jump)


@pytest.mark.parametrize("jump", [True, False])
def test_a_prompt_waits_for_pages_unless_one_that_ended_left_them(jump):
    """40 tokens are three blocks. The next finds them mapped; one of 70 tokens lacks two of its five blocks."""
    outcome = run((0.0, 40, 1), (1.0, 40, 1), (2.0, 70, 1), jump=jump)
    times = [seq.first_token_s - seq.request.arrival_s for seq in outcome.by_id().values()]
    assert times == pytest.approx([0.040 + 0.003, 0.040, 0.070 + 0.002])
    assert outcome.scheduler.counters.policy["mapped_blocks"] == 5


def test_the_place_that_fits_best_is_taken():
    """Two at once leave five and three blocks. A prompt of two takes the latter, so that one of four finds all."""
    outcome = run((0.0, 64, 9), (0.0, 32, 9), (1.0, 32, 9), (1.01, 64, 9))
    assert outcome.by_id()[3].first_scheduled_s < outcome.by_id()[2].finish_s
    assert outcome.scheduler.counters.policy["mapped_blocks"] == 6


def test_pages_that_others_need_are_unmapped():
    """Of eight blocks one sequence leaves five. The next takes them and two more; a third lacks what these had."""
    outcome = run((0.0, 80, 1), (1.0, 112, 1), (2.0, 16, 40), (2.0, 96, 1))
    # Seven are left. The third takes that place and keeps one of its blocks; what it leaves is mapped anew: six.
    assert outcome.scheduler.counters.policy["mapped_blocks"] == 5 + 2 + 6


def test_decodes_find_their_pages_mapped():
    outcome = run((0.0, 16, 49))
    assert outcome.by_id()[0].finish_s == pytest.approx(0.016 + 0.001 + 48e-3)


@pytest.mark.parametrize("text", ["vattention:map-us=100", "vllm-v1:memory=mapped,async-scheduling=true"])
def test_pages_keep_to_what_every_system_must(text):
    conformance.check(parse_policy(text, {})[1], examples=25)


def test_pools_are_counted_in_pages():
    """The same memory in blocks of 1,024 tokens, not 16: as many bytes, but for less than a block."""
    paged, mapped = (
        prepare(Scenario(model="llama-3.1-8b"), *parse_policy(text, {})) for text in ("sarathi", "vattention")
    )
    assert mapped.limits.block_size == 1024 and paged.limits.block_size == 16
    assert mapped.limits.num_gpu_blocks == paged.limits.num_gpu_blocks // 64
