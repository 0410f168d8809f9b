"""SGLang's pool of layers with a window, by numbers worked by hand; its decisions are `tests/oracle`'s."""

from dataclasses import replace

import pytest

from kvtwin.testing import limits, linear_machine, requests, simulate
from kvtwin.testing.engines import build_engine
from sim.engine.limits import WindowLimits
from sim.engine.sequence import Sequence
from sim.errors import UserError
from sim.options.policies import parse_policy
from sim.options.scenario import Scenario
from sim.run.prepare import prepare
from sim.systems.base import EngineLimits, WindowPool
from sim.systems.sglang.preset import Sglang
from sim.systems.sglang.window_memory import WindowTreeMemory
from traces.request import Request

ENGINE = EngineLimits(8, 2048, True)


def limits_of(pool, window, *, caching=True, own=None, **more):
    """A pool of so many tokens, and one of as many, or `own`, for layers with a window as SGLang counts it."""
    apart = WindowLimits(window + 1, own_blocks=pool if own is None else own)
    found = limits(gpu=pool, host=0, block_size=1, window=apart, **more)
    return replace(found, enable_prefix_caching=caching)


def limits_for(model, asked):
    return prepare(Scenario(model=model, gpu="h100", max_model_len=4096), *parse_policy(asked, {})).limits


def memory_of(limit, asked="sglang"):
    engine = build_engine(parse_policy(asked, {})[1], limit, linear_machine(), lambda seq: None)
    memory = engine.scheduler.memory
    assert isinstance(memory, WindowTreeMemory)
    return memory


def test_pools_are_sized_by_what_a_token_takes_of_both():
    # gpt-oss-20b: 12 layers of each kind, 8 KV heads of 64 elements, twice, in 16 bits: 2,048 bytes a token and layer.
    found = limits_for("gpt-oss-20b", "sglang:swa-full-tokens-ratio=0.5")
    assert found.block_bytes == 12 * 2048 + 0.5 * 12 * 2048
    assert found.window is not None
    assert found.window.own_blocks == int(found.num_gpu_blocks * 0.5)


@pytest.mark.parametrize(
    ("model", "asked"), [("gpt-oss-20b", "sglang:disable-hybrid-swa-memory=true"), ("gemma-3-27b", "sglang")]
)
def test_one_pool_where_sglang_has_one(model, asked):
    found = limits_for(model, asked)
    assert found.window is not None and found.window.own_blocks is None


def test_without_a_cache_the_pool_is_what_running_requests_take_at_most():
    # Each a window, 128 tokens beyond, two pages; two chunks in flight, or one; a page.
    asked = {"disable_radix_cache": True, "max_running_requests": 8}
    assert Sglang(**asked).window_pool(128, 16, ENGINE) == WindowPool(tokens=8 * (127 + 128 + 32) + 2 * 2048 + 16)
    serial = Sglang(**asked, disable_overlap_schedule=True)
    assert serial.window_pool(128, 16, ENGINE) == WindowPool(tokens=8 * (127 + 128 + 32) + 2048 + 16)
    assert WindowPool(tokens=100).blocks(1000, 16) == 7


def test_a_pool_that_would_admit_no_request_is_refused():
    with pytest.raises(UserError, match=r"swa-full-tokens-ratio: .* 120 tokens, and no request .* 128 or fewer"):
        limits_for("gpt-oss-20b", "sglang:max-total-tokens=150")


def test_hicache_has_no_windows():
    with pytest.raises(UserError, match="enable-hierarchical-cache"):
        memory_of(limits_of(500, 127), "sglang:enable-hierarchical-cache=true")


def test_a_prompt_takes_a_window_and_what_of_its_chunk_is_before_it():
    budget = memory_of(limits_of(2000, 127, own=600)).window_budget()
    assert budget.needed(1000, 200, 512) == (512 - 127) + 127 + 1
    assert budget.needed(20, 30, 512) == 20 + 30 + 1
    # 600 tokens hold chunks of 512; of 1,000 they would need 1,001: as many as leave 127 and one.
    assert budget.chunk_of(1000, 200, 512) == 512
    assert budget.chunk_of(1000, 200, 1000) == 600 - 128
    assert budget.chunk_of(1000, 200, float("inf")) == 0


@pytest.mark.parametrize(("overlap", "kept"), [(True, 3 * 16), (False, 2 * 16)], ids=["overlap", "serial"])
def test_windows_of_a_prompt_move_on_without_a_cache(overlap, kept):
    # Before its fifth chunk of 16 a prompt has four, of which a window of 16 is read. With the overlap the fourth may
    # be in flight, and reads what is 16 tokens further back.
    asked = f"sglang:disable-radix-cache=true,disable-overlap-schedule={str(not overlap).lower()}"
    memory = memory_of(limits_of(500, 16, caching=False, tokens=16, chunked=True), asked)
    seq = Sequence(Request(0, 0.0, 80, 10))
    memory.hold(seq)
    for _ in range(5):
        memory.extend([(seq, 16)])
        seq.num_computed += 16
    assert 500 - memory.window_unused == kept


def test_what_finds_no_room_alone_is_ignored_and_others_go_on():
    # Whole prompts: of 100 tokens, 84 are before the window, which the pool of 60 never has.
    found = simulate(
        parse_policy("sglang:chunked-prefill-size=-1", {})[1],
        requests((0.0, 100, 5), (0.0, 20, 5)),
        limits_of(500, 16, own=60),
        checked=True,
    )
    assert {seq.request.request_id: "no room for it" in seq.error for seq in found.ended} == {0: True, 1: False}
