"""SGLang's pool of windowed layers and HiCache's copies, by numbers worked by hand; decisions are `tests/oracle`'s."""

from dataclasses import replace

import pytest

from kvtwin.testing import engines, limits, linear_machine, requests, simulate
from kvtwin.testing.engines import build_engine
from sim.engine.limits import StateLimits, WindowLimits
from sim.engine.sequence import Sequence
from sim.errors import UserError
from sim.options.policies import parse_policy
from sim.options.scenario import Scenario
from sim.run.prepare import prepare
from sim.run.simulate import build_run, execute_all
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


def test_storage_of_windows_has_no_bounds():
    asked = "sglang:enable-hierarchical-cache=true,hicache-storage-backend=file,hicache-storage-space=1"
    with pytest.raises(UserError, match=r"hicache-storage-space: .* keeps all that is written"):
        memory_of(limits_of(500, 127), asked)


def test_a_prompt_takes_a_window_and_what_of_its_chunk_is_before_it():
    budget = memory_of(limits_of(2000, 127, own=600)).window_budget()
    assert budget.needed(1000, 200, 512) == (512 - 127) + 127 + 1
    assert budget.needed(20, 30, 512) == 20 + 30 + 1
    # What of its window comes from the host is counted beside.
    assert budget.needed(20, 30, 512, loaded=64) == 20 + 30 + 1 + 64
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


PAGE = 16
OLD, NEW = (1, 2), (3, 4)


def ask(arrival_s: float, number: int, ids: tuple[int, ...]) -> Request:
    """32 tokens of those blocks, for one token."""
    return Request(number, arrival_s, 2 * PAGE, 1, hash_ids=ids, hash_block_tokens=PAGE)


def first_tokens(requests: list[Request], copy_s_per_page: float, **options: object) -> list[float]:
    """When first tokens come, of a pool of four pages; a token of a prompt takes 1 ms."""
    policy = Sglang(enable_hierarchical_cache=True, disable_overlap_schedule=True, **options)  # pyright: ignore[reportArgumentType]
    limits = replace(engines.limits(4, 0, block_size=PAGE, tokens=512, chunked=True), enable_prefix_caching=True)
    limits = replace(limits, block_bytes=1e6)
    machine = engines.linear_machine(
        1e6, prefill=(0.0, 1e-3, 0.0), decode=(0.01, 0.0, 0.0), swap_s_per_block=copy_s_per_page, layers=4
    )
    outcome = engines.simulate(policy, requests, limits, machine=machine)
    return [outcome.by_id()[request.request_id].first_token_s for request in requests]


def test_a_prompt_waits_for_its_pages_layer_by_layer() -> None:
    # The last page is computed all the same: 16 ms, beside 2 ms for one page from the host. The first layer waits for
    # its quarter of that, the others for nothing.
    requests = [ask(0.0, 0, OLD), ask(1.0, 1, NEW), ask(2.0, 2, OLD)]
    assert first_tokens(requests, 2e-3) == pytest.approx([0.032, 1.032, 2.0 + 0.016 + 2e-3 / 4])
    assert first_tokens(requests, 0.0) == pytest.approx([0.032, 1.032, 2.016])


def test_pages_stay_on_the_gpu_until_they_are_written() -> None:
    # Two pages take 2 s from 0.032 s on. Until then the pool has 32 tokens of room, and the request asks for 49.
    assert first_tokens([ask(0.0, 0, OLD), ask(0.1, 1, NEW)], 1.0) == pytest.approx([0.032, 2.032 + 0.032])


STORES = {
    "hicache_ratio": 0.5,
    "hicache_storage_backend": "file",
    "hicache_storage_prefetch_threshold": PAGE,
    "hicache_storage_read_gb_per_s": 0.1,
    "hicache_storage_latency_us": 1000.0,
}
"""Room for two pages and one more on the host; a page of 1 MB is read in 10 ms, after 1 ms."""


def test_an_admission_waits_for_what_storage_has() -> None:
    # The first prompt has left GPU and host when it comes again. Its first page is asked for (1 ms) and read (11 ms).
    requests = [ask(0.0, 0, OLD), ask(1.0, 1, NEW), ask(2.0, 2, (5, 6)), ask(3.0, 3, OLD)]
    *_, waited = first_tokens(requests, 0.0, hicache_storage_prefetch_policy="wait_complete", **STORES)
    assert waited == pytest.approx(3.0 + 0.001 + 0.011 + 0.016)
    # It may also take what there is when it is its turn, which is nothing.
    *_, hurried = first_tokens(requests, 0.0, hicache_storage_prefetch_policy="best_effort", **STORES)
    assert hurried == pytest.approx(3.0 + 0.032)


def test_it_waits_no_longer_than_it_may() -> None:
    requests = [ask(0.0, 0, OLD), ask(1.0, 1, NEW), ask(2.0, 2, (5, 6)), ask(3.0, 3, OLD)]
    late = {"hicache_storage_prefetch_timeout_base": 0.005, "hicache_storage_prefetch_timeout_per_ki_token": 0.0}
    *_, first_s = first_tokens(requests, 0.0, **STORES, **late)
    assert first_s == pytest.approx(3.0 + 0.005 + 0.032)


@pytest.mark.parametrize("shared", [True, False])
def test_replicas_that_share_storage_hit_what_another_has_written(shared: bool) -> None:
    ids = tuple(range(8))
    rows = [ids, (90, 91), (92, 93), ids]
    requests = [
        Request(i, float(i), 16 * len(row), 1, hash_ids=row, hash_block_tokens=16) for i, row in enumerate(rows)
    ]
    policy = "sglang:page-size=16,enable-hierarchical-cache=true,hicache-storage-backend=mooncake"
    policy += f",hicache-storage-prefetch-threshold=16,hicache-storage-shared={str(shared).lower()}"
    scenario = Scenario(
        workload="fixed", model="llama-3.1-8b", gpu="h100", replicas=2, router="round-robin",
        num_gpu_blocks_override=20, max_model_len=200,
    )  # fmt: skip
    ended = execute_all(build_run(prepare(scenario, policy, parse_policy(policy, {})[1]), requests))
    hits = [parts.scheduler.counters.tiers["disk"].hit_tokens for parts in ended.engines]
    assert hits == [0, 7 * 16 if shared else 0]


def test_the_host_is_sized_by_the_ratio_or_in_gigabytes() -> None:
    # 2 GB hold 10,666 tokens of 3 MB for 16: 666 whole pages, and SGLang takes one more.
    by_ratio = Sglang(enable_hierarchical_cache=True, hicache_ratio=1.5)
    by_size = replace(by_ratio, hicache_size=2)
    sizes = limits(100, block_size=16, block_bytes=3e6)
    assert [options.num_on_host(sizes) for options in (by_ratio, by_size)] == [(151, 0), (667, 0)]
    # 3 GB are five times the GPU's 300 MB of pages and 30 states of 10 MB; those of the host are one more of each.
    sizes = replace(sizes, states=StateLimits(own_slots=30, own_bytes=10e6))
    assert [options.num_on_host(sizes) for options in (by_ratio, replace(by_size, hicache_size=3))] == [
        (151, 46),
        (501, 151),
    ]
