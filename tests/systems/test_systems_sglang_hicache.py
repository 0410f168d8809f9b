"""What HiCache's copies take, worked out by hand. `tests/oracle` holds its decisions to SGLang's own."""

from dataclasses import replace

import pytest

from kvtwin.testing import engines
from sim.options.policies import parse_policy
from sim.options.scenario import Scenario
from sim.run.prepare import prepare
from sim.run.simulate import build_run, execute_all
from sim.systems.sglang.preset import Sglang
from traces.request import Request

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
    assert [options.num_host_pages(100, 16, 3e6) for options in (by_ratio, by_size)] == [151, 667]
