"""Decodes of unlike contexts: what the longest adds, and which batches follow it."""

from dataclasses import replace

import pytest
from msgspec import structs

from kvtwin.testing import limits
from kvtwin.testing.engines import roofline_machine
from sim.cost.profile import load_profile, read_profile
from sim.cost.roofline import RooflineCost
from sim.engine.batch import DecodeBatch
from sim.engine.itl import GapCollector
from sim.engine.plan import IterationPlan, Origin, PrefillChunk
from sim.engine.ranked_batch import RankedBatch
from sim.engine.sequence import Sequence
from sim.errors import UserError
from sim.specs.hardware import load_hardware
from sim.specs.models import load_model
from sim.systems import POLICIES
from traces.request import Request

HARDWARE = load_hardware("rtx-4090")
PROFILE = load_profile("rtx-4090-imported")


def cost_of(slots: float = 16.0, model: str = "llama-3.1-8b", without: str = "") -> RooflineCost:
    """Few slots: then contexts of small batches are not split."""
    constants = {name: constant for name, constant in PROFILE.constants.items() if name != without}
    constants["attention_slots"] = structs.replace(constants["attention_slots"], value=slots)
    return RooflineCost(load_model(model), HARDWARE, structs.replace(PROFILE, constants=constants), 1)


def test_the_longest_decode_adds_what_it_has_beyond_the_mean():
    """Eight decodes of 8 KV heads are 64 blocks, beyond 1.6 of 16 slots; 512 bytes a token of a head and layer."""
    cost, rate = cost_of(), PROFILE.value("longest_kv_bytes_per_s")
    alike, slope_s = cost.decode_run(8, 8000)
    assert cost.decode_run(8, 8000, longest_tokens=1000) == (alike, slope_s)
    assert cost.decode_run(8, 8000, longest_tokens=3000) == pytest.approx((alike + 32 * 2000 * 512 / rate, slope_s))
    # As they grow, what they differ by stays.
    later = [cost.decode_run(8, 8080, longest_tokens=n)[0] for n in (0, 3010)]
    assert later[1] - later[0] == pytest.approx(32 * 2000 * 512 / rate)
    # Split among blocks, none waits for the longest.
    assert cost.decode_run(3, 3000, longest_tokens=2000) == cost.decode_run(3, 3000)


def test_beside_a_chunk_it_adds_what_its_tile_walks_beyond_the_chunk():
    cost, plan = cost_of(), IterationPlan()
    plan.chunks = (PrefillChunk(Sequence(Request(0, 0.0, 1, 1)), 500, 1000, Origin.ADMITTED),)
    plan.prefill_tokens, plan.prefill_pairs = 500, 500 * 1000 + 500 * 501 // 2
    plan.num_decodes, plan.decode_context_tokens = 8, 8000
    alike = cost.iteration_s(plan)
    plan.decode_longest_tokens = 1400
    assert cost.iteration_s(plan) == alike
    plan.decode_longest_tokens = 3500
    tile, flops = PROFILE.value("attention_tile_tokens"), PROFILE.value("attention_flops_per_s")
    assert cost.iteration_s(plan) - alike == pytest.approx(32 * tile * 16 * 2000 * 4 * 128 / flops)


def test_idle_tiles_of_several_chunks():
    """Chunks of 2 and 4 tiles beside 8 decodes: a grid of 4 by 10, of which 2 + 4 + 8 tiles work."""
    tile, seq = PROFILE.value("attention_tile_tokens"), Sequence(Request(0, 0.0, 1, 1))
    cost, without = cost_of(), cost_of(without="attention_idle_tile_s")
    found = []
    for price in (cost, without):
        price.tile_tokens = 64.0
        plan = IterationPlan()
        plan.chunks = tuple(PrefillChunk(seq, n, 0, Origin.ADMITTED) for n in (128, 256))
        plan.prefill_tokens, plan.prefill_pairs = 384, 128 * 129 // 2 + 256 * 257 // 2
        found.append(price.iteration_s(plan))
    assert tile == pytest.approx(64.0, rel=0.05)
    assert found[0] - found[1] == pytest.approx((4 * 2 - 6) * 32 * 32 / 16 * 3.3e-7)
    plan.num_decodes, plan.decode_context_tokens = 8, 80
    # Short contexts: computing decides, and reading beside it hardly counts.
    with_it, alone = cost.iteration_s(plan), without.iteration_s(plan)
    assert with_it - alone == pytest.approx((4 * 10 - 14) * 32 * 32 / 16 * 3.3e-7, rel=1e-3)


@pytest.mark.parametrize(
    ("cost", "batch"),
    [
        (cost_of(), RankedBatch),
        (cost_of(without="longest_kv_bytes_per_s"), DecodeBatch),
        (cost_of(without="attention_tile_tokens"), DecodeBatch),
    ],
)
def test_contexts_are_followed_where_the_price_asks(cost, batch):
    machine = replace(roofline_machine("rtx-4090", 1.0), cost=cost)
    scheduler = POLICIES["vllm-v1"]().scheduler(limits(gpu=60), GapCollector(), machine.deployment)
    assert type(scheduler.batch) is batch


@pytest.mark.parametrize("missing", ["attention_tile_tokens", "attention_slots"])
def test_a_longest_context_without_its_kernel_is_refused(tmp_path, missing):
    """It was read and never counted."""
    path = tmp_path / "p.json"
    path.write_bytes(PROFILE.without({missing}).to_json())
    with pytest.raises(UserError, match=rf"p\.json: field constants\.longest_kv_bytes_per_s .*: give {missing} as"):
        read_profile(path)
