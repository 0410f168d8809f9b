"""What HiCache's copies take, worked out by hand. `tests/oracle` holds its decisions to SGLang's own."""

from dataclasses import replace

import pytest

from kvtwin.testing import engines
from sim.systems.sglang.preset import Sglang
from traces.request import Request

PAGE = 16
OLD, NEW = (1, 2), (3, 4)


def ask(arrival_s: float, number: int, ids: tuple[int, ...]) -> Request:
    """32 tokens of those blocks, for one token."""
    return Request(number, arrival_s, 2 * PAGE, 1, hash_ids=ids, hash_block_tokens=PAGE)


def first_tokens(requests: list[Request], copy_s_per_page: float) -> list[float]:
    """When first tokens come, of a pool of four pages; a token of a prompt takes 1 ms."""
    policy = Sglang(enable_hierarchical_cache=True, disable_overlap_schedule=True)
    limits = replace(engines.limits(4, 0, block_size=PAGE, tokens=512, chunked=True), enable_prefix_caching=True)
    machine = engines.linear_machine(
        prefill=(0.0, 1e-3, 0.0), decode=(0.01, 0.0, 0.0), swap_s_per_block=copy_s_per_page, layers=4
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
