"""Numbers that predictions begin with: models' sizes, pools of blocks, seconds of iterations, copies and layers."""

import inspect
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import msgspec
from pinned import L20, T4, Table, rounded

from sim.bounds.step_price import step_prices
from sim.cost.forms import build_cost
from sim.cost.model import CostModel
from sim.cost.profile import Constant, load_profile, read_profile
from sim.engine.changes import Direction
from sim.engine.plan import CONTINUED, IterationPlan, WindowTokens
from sim.engine.sequence import Sequence
from sim.errors import UserError
from sim.specs import hardware
from sim.specs.hardware import load_hardware
from sim.specs.json_file import built_in_names
from sim.specs.kv_format import kv_dtype
from sim.specs.memory import activation_bytes, kv_cache_blocks, peak_bytes
from sim.specs.models import ModelSpec, built_in_models, load_model
from traces.request import Request


def variants(name: str) -> Iterator[tuple[str, ModelSpec]]:
    """A model in its own types and in others."""
    model = load_model(name)
    yield name, model
    if model.expert_dtype_bytes == model.mlp_dtype_bytes == model.dtype_bytes:
        yield f"{name} fp8", model.with_quantization("fp8")
    yield f"{name} fp8 KV", model.with_kv_dtype(kv_dtype("fp8", load_hardware("h100")))
    yield f"{name} float32", model.with_dtype(4.0)


def sizes(name: str) -> Iterator[str]:
    """Every number that a model gives, by the GPUs of a group."""
    for label, model in variants(name):
        yield repr(model)
        for name, kind in inspect.getmembers(ModelSpec):
            if name.startswith(("_", "with_", "check_")) or name in ModelSpec.__struct_fields__:
                continue
            if isinstance(kind, property):
                yield f"{label} {name} = {rounded(getattr(model, name))}"
            elif "tp" in inspect.signature(kind).parameters:
                yield f"{label} {name} = {[rounded(answer_of(getattr(model, name), tp)) for tp in (1, 2, 8)]}"
            elif "num_tokens" in inspect.signature(kind).parameters:
                yield f"{label} {name} = {[rounded(getattr(model, name)(n)) for n in (1, 7, 300, None)]}"
        kv = model.kv_format()
        found = kv.window, kv.num_full_readers, kv.num_window_readers, kv.num_full_stored, kv.num_window_stored
        yield f"{label} window and layers = {found}"


def answer_of(method, tp: int) -> object:
    try:
        return method(tp)
    except UserError as error:
        return str(error)


def pools(name: str) -> Iterator[str]:
    """What of a GPU's memory is taken, and the blocks that are left."""
    model = load_model(name)
    small = msgspec.structs.replace(model, intermediate_size=64)
    for tp in (1, 4):
        for label, kind in ((name, model), (f"{name}, a small MLP", small)):
            taken = activation_bytes(kind, tp, 2048), peak_bytes(kind, tp, 2048, 256), peak_bytes(kind, tp, 16, 900)
            yield f"{label} on {tp} GPUs takes {rounded(taken)}"
        for gpu in built_in_names(Path(hardware.__file__).parent / "gpus"):
            yield f"{name} on {tp} {gpu} has {answer_of(partial(pool_of, model, gpu), tp)}"


def pool_of(model: ModelSpec, gpu: str, tp: int) -> object:
    return kv_cache_blocks(
        model, load_hardware(gpu), tensor_parallel_size=tp, gpu_memory_utilization=0.9, block_size=16,
        max_num_batched_tokens=2048, max_num_seqs=256, swap_space_bytes_per_gpu=3.0 * 2**30,
    )  # fmt: skip


@cache
def costs() -> dict[str, tuple[ModelSpec, CostModel]]:
    """Machines: two profiles that do not change, and shipped ones of other forms."""
    found = dict[str, tuple[ModelSpec, CostModel]]()
    golden = {"l20": read_profile(L20), "t4": read_profile(T4)}
    for name, profile in golden.items():
        for family in ("llama-2-7b", "gemma-2-9b", "deepseek-v2-lite", "qwen3-14b"):
            for label, model in variants(family):
                for tp in (1, 2):
                    cost = build_cost(model, load_hardware(name), profile, tp, 2.0**21)
                    found[f"{label} on {tp} {name}"] = model, cost
    for shipped in ("h100-imported", "rtx-4090-imported", "a100-80g-imported"):
        profile, model = load_profile(shipped), load_model("llama-3.1-8b")
        found[shipped] = model, build_cost(model, load_hardware(profile.gpu), profile, 1, 2.0**21)
    model, gpu = load_model("llama-2-7b"), load_hardware("l20")
    found["paper"] = model, build_cost(model, gpu, golden["l20"], 1, 2.0**23, "paper")
    tiles = {name: Constant(value, None, "", "tests") for name, value in (("attention_tile_tokens", 100.0),
             ("attention_slots", 12.0))}  # fmt: skip
    tiled = msgspec.structs.replace(golden["l20"], constants=golden["l20"].constants | tiles)
    for name in ("llama-2-7b", "llama-3.1-70b"):
        found[f"{name}, tiles"] = load_model(name), build_cost(load_model(name), gpu, tiled, 1, 2.0**21)
    return found


def plan_of(chunks: tuple[tuple[int, int], ...], decodes: int, context: int, window: int | None) -> IterationPlan:
    """Chunks as (computed before, computed now), of prompts that end with them, and decodes."""
    plan = IterationPlan()
    for place, (cached, new) in enumerate(chunks):
        seq = Sequence(Request(place, 0.0, cached + new, 8))
        seq.num_computed = cached
        plan.add_chunk(seq, new, CONTINUED)
    plan.num_decodes, plan.decode_context_tokens = decodes, context
    if window is not None:
        plan.decode_window = WindowTokens(min(context, decodes * window), decodes // 2)
    return plan


PLANS = {
    "a prompt": (((0, 300),), 0, 0), "prompts": (((0, 40), (0, 900)), 0, 0), "a chunk": (((512, 256),), 0, 0),
    "decodes": ((), 16, 9000), "one decode": ((), 1, 20), "both": (((0, 64), (700, 128)), 30, 41000),
    "many": (((0, 6000),), 200, 900000),
}  # fmt: skip


def prices(name: str) -> Iterator[str]:
    """Seconds of iterations, copies and layers."""
    model, cost = costs()[name]
    window = model.kv_format().window
    for name, (chunks, decodes, context) in PLANS.items():
        plan = plan_of(chunks, decodes, context, window)
        yield f"{name} = {rounded((cost.iteration_s(plan), cost.prelude_s(plan)))}"
    for decodes, context in ((1, 30), (40, 30000), (256, 10**6)):
        beside = None if window is None else WindowTokens(min(context, decodes * window), decodes // 2)
        found = (*cost.decode_run(decodes, context, beside), cost.straight_steps(decodes, context))
        yield f"{decodes} decodes over {context} = {rounded(found)}"
    for tokens in (1, 50, 4000):
        found = [of(tokens) for of in (cost.prefill_s, cost.project_s, cost.recompute_s, cost.unread_s)]
        yield f"{tokens} tokens = {rounded([*found, cost.all_reduce_s(tokens)])}"
    for blocks, layers in ((1, 1), (3, 32), (500, 8)):
        count = cost.num_copies(blocks, layers)
        found = [cost.copy_s(blocks * 2.0**20, count, way) for way in Direction]
        yield f"{blocks} blocks of {layers} layers = {count} {rounded(found)}"
    yield from (f"at least {rounded(price)}" for price in step_prices(cost, 16, 900))
    facts = cost.beyond, cost.all_reduce_on_pcie, cost.num_all_reduces, not cost.straight_decodes
    yield f"beyond what was measured, and so on = {rounded(facts)}"


TABLES = {
    "models": Table(built_in_models(), lambda name: {"sizes": [*sizes(name)], "pools": [*pools(name)]}),
    "prices": Table(list(costs()), lambda name: {"prices": [*prices(name)]}),
}
