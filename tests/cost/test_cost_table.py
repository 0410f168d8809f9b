"""Form `table`: points by hand, straight lines between them, the roofline beyond, and exact jumps."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.testing import Machine, limits, requests
from kvtwin.testing.conformance import Workload, check_jumps
from sim.cost.forms import build_cost
from sim.cost.kernels import KernelTables, coordinates, edge, grid_of, value_at
from sim.cost.profile import FittedRange, load_profile, read_profile
from sim.cost.table import TableCost
from sim.engine.plan import IterationPlan
from sim.engine.sequence import Sequence
from sim.errors import UserError
from sim.specs.hardware import load_hardware
from sim.specs.models import load_model
from sim.systems.vllm055 import VllmRecompute
from traces.request import Request

MODEL = load_model("llama-3.1-8b")
HARDWARE = load_hardware("rtx-4090")
LAYERS = 32
US = 1e-6


def attention_us(chunk: int, cached: int, decodes: int, context: int) -> float:
    """Bends at every context of the grid, and costs half as much again beside a chunk."""
    return 10.0 + chunk * (cached + chunk) / 1000 + decodes * context**0.8 / 30 * (1.5 if chunk else 1.0)


def tables() -> KernelTables:
    shapes = [(0, 0, n, c) for n in (1, 4, 16) for c in (16, 64, 256, 1024)]
    shapes += [(chunk, cached, 0, 0) for chunk in (16, 128, 512) for cached in (0, 512)]
    shapes += [
        (chunk, cached, n, c)
        for chunk in (16, 128, 512) for cached in (0, 512) for n in (1, 4, 16) for c in (16, 256, 1024)
    ]  # fmt: skip
    return KernelTables(
        model=MODEL.name,
        tp=1,
        weight_bytes=MODEL.linear_weight_bytes / LAYERS,
        kv_bytes=MODEL.kv_bytes_per_token_layer(),
        layer=[(n, (500 + n) * US) for n in (1, 64, 512, 1024)],
        iteration=[(1, 4 * US), (1024, 40 * US)],
        head=[(1, 1000 * US), (16, 1100 * US)],
        attention=[(*shape, attention_us(*shape) * US) for shape in shapes],
    )


def profile():
    base = load_profile("rtx-4090-imported")
    return msgspec.structs.replace(base, form="table", kernels=tables())


def machine() -> Machine:
    found = profile()
    return Machine(MODEL, build_cost(MODEL, HARDWARE, found, 1, 16 * 131072.0), found, HARDWARE, 1)


def plan_of(chunks: list[tuple[int, int]], decodes: int = 0, context_tokens: int = 0) -> IterationPlan:
    plan = IterationPlan()
    for new, cached in chunks:
        seq = Sequence(Request(0, 0.0, 10_000, 5))
        seq.num_computed = cached
        plan.add_chunk(seq, new, None)  # type: ignore[arg-type]
    plan.num_decodes, plan.decode_context_tokens = decodes, context_tokens
    return plan


def test_a_grid_is_linear_between_points_and_flat_beyond() -> None:
    grid = grid_of([(1, 10, 1.0), (1, 20, 3.0), (4, 10, 4.0), (4, 40, 10.0)])
    assert value_at(grid, (1, 15)) == 2.0
    assert value_at(grid, (2, 10)) == pytest.approx(2.0)
    # Half-way between 3 (beyond the first row's last point) and 7.
    assert value_at(grid, (2.5, 25)) == pytest.approx((3.0 + 7.0) / 2)
    assert value_at(grid, (9, 99)) == 10.0 and edge(grid, (9, 99)) == (4, 40)


def test_iterations_by_hand() -> None:
    """A decode batch of 4 over 256 tokens each, and a chunk of 128 after 512 beside it."""
    cost = machine().cost
    base = 32 * 504 + (4 + 36 * 3 / 1023) + (1000 + 100 * 3 / 15)
    alone = base + 32 * attention_us(0, 0, 4, 256)
    assert cost.decode_run(4, 4 * 257)[0] == pytest.approx(alone * US)
    slope = 32 * (attention_us(0, 0, 4, 1024) - attention_us(0, 0, 4, 256)) / (1024 - 256)
    assert cost.decode_run(4, 4 * 257)[1] == pytest.approx(slope * US)
    mixed = 32 * (500 + 132) + 32 * attention_us(128, 512, 4, 256) + 4 + 36 * 131 / 1023 + 1020
    assert cost.iteration_s(plan_of([(128, 512)], 4, 4 * 257)) == pytest.approx(mixed * US)
    # Two prompts do not attend to each other: what each adds to the least that a launch takes.
    launch = min(us for *_, us in ((*row[:4], row[4] / US) for row in tables().attention))
    pair = 32 * (500 + 256) + 32 * (2 * attention_us(128, 0, 0, 0) - launch) + 4 + 36 * 255 / 1023
    assert cost.iteration_s(plan_of([(128, 0), (128, 0)])) == pytest.approx(pair * US)


def test_a_prompt_alone_is_an_iteration_of_its_own() -> None:
    """A first token is an output head of one row more than a chunk that does not end its prompt."""
    for tokens in (16, 100, 128, 700):
        assert COST.prefill_s(tokens) == pytest.approx(COST.iteration_s(plan_of([(tokens, 0)])) + 1000 * US)
    lone = 32 * (500 + 128) + 32 * attention_us(128, 0, 0, 0) + 4 + 36 * 127 / 1023 + 1000
    assert COST.prefill_s(128) == pytest.approx(lone * US)


def test_an_engines_sampler_is_on_top_of_the_head() -> None:
    """Beyond the table's 16 rows the head grows as the roofline's does, the sampler by the token."""
    plain, sampling = machine().cost, machine().cost
    assert isinstance(plain, TableCost) and isinstance(sampling, TableCost)
    sampling.sampling_s_per_sample = 7 * US
    for sampled in (1, 8, 16, 40):
        assert sampling.head_s(sampled) == pytest.approx(plain.head_s(sampled) + sampled * 7 * US)


@settings(max_examples=60, deadline=None)
@given(decodes=st.integers(1, 40), context=st.integers(1, 3000))
def test_durations_are_straight_for_as_many_iterations_as_it_says(decodes: int, context: int) -> None:
    cost = COST
    first_s, slope_s = cost.decode_run(decodes, decodes * context)
    steps = min(cost.straight_steps(decodes, decodes * context), 500)
    assert steps >= 1
    for i in range(int(steps)):
        assert cost.decode_run(decodes, decodes * (context + i))[0] == pytest.approx(first_s + i * slope_s, rel=1e-9)


COST = machine().cost


def test_beyond_the_tables_times_grow_as_the_rooflines_do() -> None:
    cost = COST
    assert isinstance(cost, TableCost)
    roofline = build_cost(MODEL, HARDWARE, profile(), 1, 1.0, "roofline")
    ratio = roofline.linear_s(4096) / roofline.linear_s(1024)  # type: ignore[attr-defined]
    assert cost.linear_s(4096) == pytest.approx(ratio * cost.linear_s(1024))
    attention = [cost.decode_run(16, 16 * c)[0] for c in (1025, 2049, 3073)]
    assert attention[2] - attention[1] == pytest.approx(attention[1] - attention[0])
    assert cost.decode_run(64, 64 * 257)[0] > cost.decode_run(16, 16 * 257)[0]


@pytest.mark.parametrize(
    ("new", "cached", "at_edge", "growth"),
    [(1024, 512, (512, 512), 1024 * (512 + 1025 / 2) / (512 * (512 + 513 / 2))), (128, 2048, (128, 512), 2176 / 640)],
    ids=["pairs", "walk"],
)
def test_beyond_the_tables_a_chunk_alone_grows_as_the_roofline(new, cached, at_edge, growth) -> None:
    """A long chunk as its query-context pairs do; a short one as the keys that it walks over."""
    linear = 32 * (500 + new) + 4 + 36 * (new - 1) / 1023
    attention = 32 * attention_us(*at_edge, 0, 0)
    assert COST.iteration_s(plan_of([(new, cached)])) == pytest.approx((linear + growth * attention) * US)


def test_where_no_mix_was_timed_decodes_add_what_they_take_alone_less_the_launch() -> None:
    """A launch of 10.256 us, the least of all rows: a chunk of 16 alone."""
    rows = [row for row in tables().attention if not (row[0] and row[2])]
    found = msgspec.structs.replace(profile(), kernels=msgspec.structs.replace(tables(), attention=rows))
    cost = build_cost(MODEL, HARDWARE, found, 1, 1.0)
    assert min(seconds for *_, seconds in rows) == pytest.approx(10.256 * US)
    attention = attention_us(128, 512, 0, 0) + attention_us(0, 0, 4, 256) - 10.256
    by_hand = 32 * (500 + 132 + attention) + 4 + 36 * 131 / 1023 + 1020
    assert cost.iteration_s(plan_of([(128, 512)], 4, 4 * 257)) == pytest.approx(by_hand * US)


def test_chunks_that_attend_like_one_are_one() -> None:
    """16 tokens alone and 16 after 16: as many pairs as a prompt of 32. One more cached token each is a half of one."""
    attention = [attention_us(n, 0, 0, 0) for n in (16, 128)]
    base = 32 * (500 + 32) + 4 + 36 * 31 / 1023
    whole = 32 * (attention[0] + (attention[1] - attention[0]) * 16 / 112)
    assert COST.iteration_s(plan_of([(16, 0), (16, 16)])) == pytest.approx((base + whole) * US)
    # 512 cached tokens more cost a chunk of 32 16.384 us.
    assert COST.iteration_s(plan_of([(16, 0), (16, 17)])) == pytest.approx((base + whole + 32 * 0.5 * 0.032) * US)


def test_what_lies_beyond_the_profiles_range_is_noted() -> None:
    """Each end itself lies within."""
    bounded = FittedRange(tokens=(1, 128), batch=(1, 4), context_tokens=(1, 1028))

    def beyond(chunks, decodes, context_tokens) -> dict[str, float]:
        cost = build_cost(MODEL, HARDWARE, msgspec.structs.replace(profile(), range=bounded), 1, 1.0)
        cost.iteration_s(plan_of(chunks, decodes, context_tokens))
        return cost.beyond

    assert beyond([(128, 0)], 4, 1028) == beyond([], 4, 1028) == {}
    assert beyond([(129, 0)], 4, 1028) == {"tokens": 129}
    assert beyond([(128, 0)], 5, 1028) == beyond([], 5, 1028) == {"batch": 5}
    assert beyond([(128, 0)], 4, 1029) == beyond([], 4, 1029) == {"context_tokens": 1029}


@pytest.mark.parametrize(
    ("model", "kernels", "told"),
    [
        ("gemma-3-27b", tables(), "prices layers that are alike: gemma-3-27b's are not"),
        ("qwen3.5-35b-a3b", tables(), "prices layers that are alike: qwen3.5-35b-a3b's are not"),
        ("qwen3-8b", tables(), r"its kernels are those of llama-3.1-8b on 1 GPUs .* use a roofline"),
        (MODEL.name, None, "field kernels is missing: form table needs measured kernels"),
    ],
)
def test_what_the_tables_are_not_of_is_refused(model, kernels, told) -> None:
    found = msgspec.structs.replace(load_profile("h200-imported"), form="table", kernels=kernels)
    with pytest.raises(UserError, match=told):
        build_cost(load_model(model), load_hardware("h200"), found, 1, 1.0)


def test_jumps_are_exact_across_the_bends() -> None:
    rows = requests(*((0.01 * i, 20 + 37 * i % 300, 30 + 61 * i % 400) for i in range(24)))
    limit = limits(gpu=600, seqs=16, block_bytes=16 * 131072.0)
    check_jumps(VllmRecompute(), Workload(rows, limit, machine()))


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        *(({name: points}, f"{name}: give points") for name in ("layer", "iteration", "head")
          for points in ([], [(0, 1.0)], [(1, 0.0)], [(1, 600.0)])),
        *(({"attention": [(*shape, seconds)]}, "attention: row") for shape, seconds in (
            ((1, -1, 0, 0), 1.0), ((0, 9, 0, 9), 1.0), ((1, 0, 0, 0), 0.0), ((1, 0, 0, 0), 600.0))),
        ({"attention": [(1, 0, 0, 0, 1.0)]}, "attention: needs rows of decodes alone"),
        ({"attention": [(0, 0, 1, 0, 1.0)]}, "attention: needs rows of decodes alone"),
        ({"layer": [(1, 599.0)], "attention": [(1, 0, 0, 0, 599.0), (0, 0, 1, 0, 599.0)]}, ""),
    ],
)  # fmt: skip
def test_tables_that_cannot_be_are_told(given, fault) -> None:
    found = msgspec.structs.replace(tables(), **given).fault()
    assert found.startswith(fault) and bool(found) == bool(fault)


def test_values_bend_where_either_neighbour_bends() -> None:
    """Rows of 1, 4 and 9 with points of their own; at 4 itself and beyond it those of 9 count as well."""
    grid = grid_of([(1, 10, 1.0), (1, 20, 1.0), (4, 15, 1.0), (9, 30, 1.0)])
    found = {x: coordinates(grid, x) for x in (0, 1, 3, 4, 9, 12)}
    assert found == {0: [10, 20], 1: [10, 15, 20], 3: [10, 15, 20], 4: [15, 30], 9: [30], 12: [30]}
    # Below the table too the edge counts.
    assert (edge(grid, (0, 5)), edge(grid, (3, 25)), edge(grid, (4, 1))) == ((1, 10), (3, 20), (4, 15))
    assert (value_at(grid, (0, 5)), value_at(grid_of([(2, 5.0), (4, 7.0)]), (1,))) == (1.0, 5.0)


def test_tables_come_back_from_their_file_and_belong_to_their_form(tmp_path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(profile().to_json())
    assert read_profile(path) == profile()
    # Of chunks beside decodes only; contexts of none are no chunks alone.
    beside = msgspec.structs.replace(tables(), attention=[(0, 0, 4, 0, 1e-5), (16, 0, 4, 0, 1e-5)])
    for change, match in (
        ({"kernels": None}, "field kernels belongs to form table"),
        ({"form": "roofline"}, "field kernels belongs to form table"),
        ({"kernels": beside}, "and of chunks alone"),
    ):
        path.write_bytes(msgspec.structs.replace(profile(), **change).to_json())
        with pytest.raises(UserError, match=match):
            read_profile(path)
