"""What is planned for a machine, and what is left out and said so."""

import msgspec
import pytest
from measure_small import GIB, GPU

from calib.measure.capacity import Capacity
from calib.measure.plan import make_plan
from calib.measure.points import Point
from calib.samples import OPS, fault_of
from sim.specs.models import load_model

MODELS = {name: load_model(name) for name in ("llama-2-7b", "llama-3.1-70b")}
CPU = Capacity(
    device_bytes=8 * GIB,
    host_bytes=8 * GIB,
    cache_bytes=32 * 2**20,
    num_gpus=0,
    flops_per_s=2e10,
    bytes_per_s=5e9,
    graphs=False,
)


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


def test_layers_are_built_until_the_cache_cannot_hold_them():
    small = {"qwen3-0.6b": load_model("qwen3-0.6b")}
    assert plan(models=small).built_layers == {"qwen3-0.6b": 8}
    assert plan().built_layers == {"llama-2-7b": 2, "llama-3.1-70b": 2}


def test_only_quick_layers_run_in_a_long_row():
    layers = {p.tokens: p.num_layers for p in plan().points if p.op == "layers" and p.model == "llama-2-7b"}
    assert (layers[1], layers[256], layers[512], layers[32768]) == (8, 8, 2, 2)
    assert {p.num_layers for p in plan().points if p.model == "llama-3.1-70b" and p.op == "layers"} == {2}


@pytest.mark.parametrize("quick", [False, True])
def test_every_decode_is_a_graph_where_the_runtime_makes_one(quick):
    """Eager rows among them cost launches that no served decode pays."""
    points = plan(quick=quick).points
    decodes = [p for p in points if p.op in ("layers", "step") and p.new_tokens == 1]
    assert {p.op for p in decodes} == {"layers", "step"}
    assert all(p.graph == 1 for p in decodes)
    assert {p.batch_size for p in decodes} >= ({1, 8, 64} if quick else {1, 2, 8, 32, 128, 512})
    assert not any(p.graph for p in points if p.new_tokens > 1)


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


def test_points_are_told_apart_in_words():
    points = [*plan().points, *plan().left_out]
    labels = [point.label for point in points]
    assert len(set(labels)) > 0.98 * len(labels)
    assert Point(op="d2h", num_bytes=2**24, num_copies=128).label == "d2h 128 x 128 KiB pinned"
