"""What is planned for a machine, and what is left out and said so."""

import msgspec
import pytest
from measure_small import GIB, GPU

from calib.measure.capacity import Capacity
from calib.measure.grid import FULL, QUICK
from calib.measure.model_points import ModelPoints
from calib.measure.plan import make_plan
from calib.measure.points import Point
from calib.samples import OPS, fault_of
from sim.specs.models import load_model

MODELS = {name: load_model(name) for name in ("llama-2-7b", "llama-3.1-70b")}
CPU = Capacity(
    device_bytes=8 * GIB, host_bytes=8 * GIB, cache_bytes=32 * 2**20, num_gpus=0, flops_per_s=2e10, bytes_per_s=5e9,
    graphs=False,
)  # fmt: skip


def plan(limits=GPU, models=MODELS, quick=False, element_bytes=2, ops=None):
    return make_plan(models, limits, quick=quick, element_bytes=element_bytes, ops=ops)


@pytest.mark.parametrize("quick", [True, False])
def test_on_gpus_every_operation_is_planned(quick):
    assert {point.op for point in plan(quick=quick).points} == set(OPS) - {"products", "linear", "elementwise"}


@pytest.mark.parametrize("limits", [GPU, CPU])
@pytest.mark.parametrize("quick", [True, False])
def test_a_plan_is_the_same_every_time_and_holds_nothing_twice(limits, quick):
    first, second = plan(limits, quick=quick), plan(limits, quick=quick)
    assert first == second
    assert len(set(first.points)) == len(first.points)
    assert not set(first.points) & set(first.left_out)


@pytest.mark.parametrize("limits", [GPU, CPU])
def test_every_point_makes_a_valid_sample(limits):
    for point in plan(limits).points:
        assert fault_of(point.sample([1.0, 2.0])) == ""


def test_no_decode_needs_more_cache_than_there_is():
    found = plan()
    limit = 0.35 * GPU.device_bytes
    for name, spec in MODELS.items():
        blocks = found.kv_blocks[name] * found.built_layers[name]
        assert 0.5 * limit < blocks * 16 * spec.kv_bytes_per_token_layer() <= limit
    reasons = {reason for point, reason in found.left_out.items() if point.batch_size == 512}
    assert reasons == {"needs more KV cache than 15.4 GiB"}


FAST = {"flops_per_s": 1e30, "bytes_per_s": 1e30}
"""No point takes long on such a machine."""


def shapes(limits, *, quick=False, element_bytes=2, **changes):
    grid = QUICK if quick else FULL
    limits = msgspec.structs.replace(limits, **changes)
    return ModelPoints("llama-2-7b", MODELS["llama-2-7b"], limits, grid, quick, element_bytes)


@pytest.mark.parametrize(
    ("limits", "quick", "element_bytes", "most"),
    [
        # 0.35 x 44 GiB of blocks of 16 tokens x 16 KiB in two layers.
        (GPU, False, 2, 31_539),
        # Of a CPU's memory at most 4 GiB, or 1 GiB; in elements of 4 bytes.
        (CPU, False, 4, 2867), (CPU, True, 4, 1024),
    ],
)  # fmt: skip
def test_as_many_blocks_as_fit_are_used(limits, quick, element_bytes, most):
    found = shapes(limits, quick=quick, element_bytes=element_bytes, **FAST)
    points = [Point(op="layers", model="llama-2-7b", batch_size=most + more, new_tokens=16) for more in (0, 1)]
    assert [found.fault(point).startswith("needs more KV cache than") for point in points] == [False, True]


LAYER = 4 * 4096**2 + 3 * 4096 * 11008
"""Weights of a layer of Llama-2 7B."""


@pytest.mark.parametrize(
    ("point", "flops", "num_bytes"),
    [
        # Hidden state and logits of 512 rows beside the head's weights, two bytes each.
        (Point(op="lm_head", model="llama-2-7b", batch_size=512, new_tokens=1), 512 * 2 * 4096 * 32000,
         2 * (4096 * 32000 + 512 * 36096)),
        (Point(op="layers", model="llama-2-7b", num_layers=2, batch_size=512, new_tokens=1, context_tokens=15),
         2 * 512 * 2 * LAYER, 2 * 2 * LAYER + 512 * 16 * 2 * 16384),
        (Point(op="recompute", model="llama-2-7b", num_layers=2, new_tokens=512),
         2 * (512 * 2 * LAYER + 4 * 4096 * 512 * 513 / 2), 2 * 2 * LAYER),
        (Point(op="step", model="llama-2-7b", num_layers=2, batch_size=512, new_tokens=1, context_tokens=15),
         2 * 512 * 2 * LAYER + 512 * 2 * 4096 * 32000,
         2 * 2 * LAYER + 512 * 16 * 2 * 16384 + 2 * (4096 * 32000 + 512 * 36096)),
    ],
    ids=lambda value: value.op if isinstance(value, Point) else "",
)  # fmt: skip
@pytest.mark.parametrize(("limits", "quick", "most_s"), [(GPU, False, 10.0), (CPU, True, 0.25)])
def test_what_takes_too_long_is_left_out(point, flops, num_bytes, limits, quick, most_s):
    """By both rough rates together, a third of the time with one and two thirds with the other."""
    for share, is_slow in ((1 - 1e-6, False), (1 + 1e-6, True)):
        rates = {"flops_per_s": flops / (most_s / 3 * share), "bytes_per_s": num_bytes / (most_s * 2 / 3 * share)}
        reason = shapes(limits, quick=quick, device_bytes=10**13, **rates).fault(point)
        assert reason == (f"may take more than {most_s:g} s an execution" if is_slow else "")


def test_the_shortest_prompts_are_timed_on_the_slowest_machine():
    slow = shapes(GPU, flops_per_s=1.0, bytes_per_s=1.0)
    reasons = [slow.fault(Point(op="layers", model="llama-2-7b", new_tokens=tokens)) for tokens in (64, 65)]
    assert reasons == ["", "may take more than 10 s an execution"]


@pytest.mark.parametrize("quick", [False, True])
def test_points_come_from_graphs_where_the_runtime_makes_these(quick):
    """Eager rows among them cost launches that no served decode pays."""
    points = plan(quick=quick).points
    decodes = [p for p in points if p.op in ("layers", "step") and p.new_tokens == 1]
    assert {p.op for p in decodes} == {"layers", "step"}
    assert all(p.graph == 1 for p in decodes)
    assert {p.batch_size for p in decodes} >= ({1, 8, 64} if quick else {1, 2, 8, 32, 128, 512})
    others = [p for p in points if p.new_tokens > 1]
    pieced = {p for p in others if p.op in ("layers", "step") and p.batch_size * (p.new_tokens + p.draw) <= 512}
    assert all(p.graph == 2 * (p in pieced) for p in others if not p.decodes)
    # Decodes beside a prompt count, too.
    beside = {(p.new_tokens + p.draw, p.decodes): p.graph for p in others if p.decodes}
    assert beside.items() >= ({(256, 32): 2, (512, 8): 0} if quick else {(256, 128): 2, (1024, 8): 0}).items()
    # What the report's column of mixed iterations is filled from.
    assert {p for p in points if p.sample([1.0]).is_mixed} == {p for p in others if p.decodes}


def test_a_cpu_has_no_graphs_and_no_all_reduces_and_skips_what_is_slow():
    found = plan(CPU, element_bytes=4)
    assert not any(point.graph or point.tp > 1 for point in found.points)
    prompts = sorted(p.new_tokens for p in found.points if p.op == "layers" and not p.context_tokens)
    assert prompts[0] == 16 and prompts[-1] < 1024
    assert any("may take more than 2 s" in reason for reason in found.left_out.values())


def test_copies_have_room_in_the_hosts_memory():
    found = plan(msgspec.structs.replace(GPU, host_bytes=GIB))
    assert max(point.num_bytes for point in found.points if point.op in ("d2h", "h2d", "host_memcpy")) <= GIB // 8
    assert found.copy_bytes == GIB // 8
    assert found.left_out[Point(op="d2h", num_bytes=GIB)] == "the host has room for 128 MiB of copies"


def test_chosen_operations_are_all_that_is_planned():
    found = plan(ops=("lm_head", "recompute"))
    assert {point.op for point in found.points} == {"lm_head", "recompute"}
    assert {point.op for point in found.left_out} <= {"lm_head", "recompute"}
    # Of what is not measured the least is built: one block, one token, no buffers.
    bare = plan(ops=("launch",))
    assert (bare.copy_bytes, bare.kv_blocks, bare.longest) == (0, dict.fromkeys(MODELS, 1), dict.fromkeys(MODELS, 1))
    assert plan(ops=("all_reduce",)).copy_bytes == 0


def test_points_are_told_apart_in_words():
    points = [*plan().points, *plan().left_out]
    labels = [point.label for point in points]
    assert len(set(labels)) > 0.98 * len(labels)
    assert Point(op="d2h", num_bytes=2**24, num_copies=128).label == "d2h 128 x 128 KiB pinned"
    assert Point(op="all_reduce", num_bytes=GIB, tp=2).label == "all_reduce 1 GiB pinned on 2 GPUs"
    decode = Point(op="layers", model="small", batch_size=3, new_tokens=1, context_tokens=1)
    assert decode.label == "layers small, 3 x 1 tokens after 1"
