"""Defaults, mixes of parts, models' sizes and prices as they are pinned in `golden/facts/`, a line each.

    python tests/sim/pinned_facts.py      # writes golden/facts/*.txt anew

Whoever leaves an option out, sizes a model or prices an iteration gets what is written there.
"""

import argparse
import inspect
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "calib"))

import msgspec
import pinned_configs
import pinned_pricing
from goldens import GOLDEN, digest, rounded
from pinned_mixes import mixes

from kvtwin.command_line import Parser, build_parser
from kvtwin.testing import linear_machine
from sim.bounds.goodput import goodput_bound
from sim.bounds.step_price import step_prices
from sim.bounds.work import least_work
from sim.cost.forms import build_cost
from sim.cost.model import CostModel
from sim.cost.profile import Constant, load_profile, read_profile
from sim.engine.changes import Direction
from sim.engine.limits import Limits, WindowLimits
from sim.engine.plan import CONTINUED, IterationPlan, WindowTokens
from sim.engine.sequence import Sequence
from sim.errors import UserError
from sim.results.metrics import Goodput
from sim.specs import hardware
from sim.specs.hardware import load_hardware
from sim.specs.json_file import built_in_names
from sim.specs.kv_format import kv_dtype
from sim.specs.memory import activation_bytes, kv_cache_blocks, peak_bytes
from sim.specs.models import ModelSpec, built_in_models, load_model
from traces.request import Request

FACTS = GOLDEN / "facts"


def parts_of(value: object) -> object:
    """What records hold; of anything else itself."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return msgspec.structs.asdict(value) if isinstance(value, msgspec.Struct) else value


def told(value: object) -> str:
    """Numbers and words; of others their class."""
    value = parts_of(value)
    if isinstance(value, dict):
        return f"{{{', '.join(f'{told(name)}: {told(item)}' for name, item in value.items())}}}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(told, value))}]"
    if isinstance(value, set | frozenset):
        return told(sorted(value))
    return repr(value) if isinstance(value, int | float | str | None) else type(value).__name__


def flags() -> Iterator[str]:
    """Of every command: what it is for, its options, and what counts where they are not given."""

    def of(parser: argparse.ArgumentParser, words: str) -> Iterator[str]:
        if isinstance(parser, Parser):
            parser.format_help()
        if parser.description:
            yield f"{words}: {parser.description.split('. ')[0]}"
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, inner in action.choices.items():
                    yield from of(inner, f"{words} {name}")
            else:
                names = "/".join(action.option_strings) or action.dest
                choices = action.choices and [*action.choices]
                shape = [type(action).__name__.strip("_"), action.nargs, action.metavar, choices]
                default = "required" if action.required else action.default
                yield f"{words} {names} {told(shape)} = {default if not callable(default) else default.__name__}"

    yield from of(build_parser(), "kvtwin")


def variants() -> Iterator[tuple[str, ModelSpec]]:
    """Models in their own types and in others."""
    for name in built_in_models():
        model = load_model(name)
        yield name, model
        if model.expert_dtype_bytes == model.mlp_dtype_bytes == model.dtype_bytes:
            yield f"{name} fp8", model.with_quantization("fp8")
        yield f"{name} fp8 KV", model.with_kv_dtype(kv_dtype("fp8", load_hardware("h100")))
        yield f"{name} float32", model.with_dtype(4.0)


def models() -> Iterator[str]:
    """Every number that a model gives, by the GPUs of a group."""
    for label, model in variants():
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


def costs() -> Iterator[tuple[str, ModelSpec, CostModel]]:
    """Machines: two profiles that do not change, and shipped ones of other forms."""
    golden = {name: read_profile(GOLDEN / f"{name}-profile.json") for name in ("l20", "t4")}
    for name, profile in golden.items():
        for label, model in variants():
            for tp in (1, 2):
                if label.split()[0] in ("llama-2-7b", "gemma-2-9b", "deepseek-v2-lite", "qwen3-14b"):
                    gpu = load_hardware(name)
                    yield f"{label} on {tp} {name}", model, build_cost(model, gpu, profile, tp, 2.0**21)
    for shipped in ("h100-imported", "rtx-4090-imported", "a100-80g-imported"):
        profile, model = load_profile(shipped), load_model("llama-3.1-8b")
        yield shipped, model, build_cost(model, load_hardware(profile.gpu), profile, 1, 2.0**21)
    model, gpu = load_model("llama-2-7b"), load_hardware("l20")
    yield "paper", model, build_cost(model, gpu, golden["l20"], 1, 2.0**23, "paper")
    tiles = {name: Constant(value, None, "", "tests") for name, value in (("attention_tile_tokens", 100.0),
             ("attention_slots", 12.0))}  # fmt: skip
    tiled = msgspec.structs.replace(golden["l20"], constants=golden["l20"].constants | tiles)
    for name in ("llama-2-7b", "llama-3.1-70b"):
        yield f"{name}, tiles", load_model(name), build_cost(load_model(name), gpu, tiled, 1, 2.0**21)


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


def prices() -> Iterator[str]:
    """Seconds of iterations, copies and layers."""
    plans = {
        "a prompt": (((0, 300),), 0, 0), "prompts": (((0, 40), (0, 900)), 0, 0), "a chunk": (((512, 256),), 0, 0),
        "decodes": ((), 16, 9000), "one decode": ((), 1, 20), "both": (((0, 64), (700, 128)), 30, 41000),
        "many": (((0, 6000),), 200, 900000),
    }  # fmt: skip
    for label, model, cost in costs():
        window = model.kv_format().window
        for name, (chunks, decodes, context) in plans.items():
            plan = plan_of(chunks, decodes, context, window)
            yield f"{label}: {name} = {rounded((cost.iteration_s(plan), cost.prelude_s(plan)))}"
        for decodes, context in ((1, 30), (40, 30000), (256, 10**6)):
            beside = None if window is None else WindowTokens(min(context, decodes * window), decodes // 2)
            found = (*cost.decode_run(decodes, context, beside), cost.straight_steps(decodes, context))
            yield f"{label}: {decodes} decodes over {context} = {rounded(found)}"
        for tokens in (1, 50, 4000):
            found = [of(tokens) for of in (cost.prefill_s, cost.project_s, cost.recompute_s, cost.unread_s)]
            yield f"{label}: {tokens} tokens = {rounded([*found, cost.all_reduce_s(tokens)])}"
        for blocks, layers in ((1, 1), (3, 32), (500, 8)):
            count = cost.num_copies(blocks, layers)
            found = [cost.copy_s(blocks * 2.0**20, count, way) for way in Direction]
            yield f"{label}: {blocks} blocks of {layers} layers = {count} {rounded(found)}"
        bounds = [rounded(price) for price in step_prices(cost, 16, 900)]
        yield f"{label}: at least {bounds[:1]} to {bounds[-1:]}, {len(bounds)} {digest(bounds)}"
        facts = cost.beyond, cost.all_reduce_on_pcie, cost.num_all_reduces, cost.has_kinks
        yield f"{label}: beyond what was measured, and so on = {rounded(facts)}"


def pools() -> Iterator[str]:
    """What of a GPU's memory is taken, and the blocks that are left."""
    for name in built_in_models():
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


SERVED = {
    "both": Goodput(ttft_s=0.2, tpot_s=0.03), "first tokens": Goodput(ttft_s=0.08), "last tokens": Goodput(e2el_s=0.9),
    "tokens": Goodput(tpot_s=0.02),
}  # fmt: skip


def crowd() -> list[Request]:
    """A hundred of all lengths, more than can be served in time; a third shares a prefix with another."""
    found = []
    for i in range(100):
        prompt, ids = 1 + 37 * i * i % 700, (1, 2 + i % 5, 100 + i) if i % 3 == 0 else ()
        found.append(
            Request(i, 7.0 + 0.03 * i + (1.5 if i > 60 else 0.0), prompt, 1 + 13 * i % 90, "", ids, 16 * bool(ids))
        )
    ends = (1024, 1), (1023, 1), (1025, 4), (1000, 30), (9, 2000), (1000, 400), (1000, 410)
    return found + [Request(100 + i, 11.0, *lengths) for i, lengths in enumerate(ends)]


def bounds() -> Iterator[str]:
    """What requests need at least, and the goodput that nobody exceeds."""
    requests, known = crowd(), {label: (model, cost) for label, model, cost in costs()}
    machine = linear_machine()
    known["linear"] = machine.model, machine.cost
    for label in ("linear", "llama-2-7b on 1 t4", "gemma-2-9b on 2 t4", "llama-3.1-70b, tiles"):
        model, cost = known[label]
        tokens = model.kv_format().window
        window = None if tokens is None else WindowLimits(tokens)
        for blocks, seats in ((90, 256), (2000, 16)):
            limit = Limits(blocks, 0, 16, 2.0**21, 1024, seats, 2048, window=window)
            work, may_fail = least_work(requests, limit, cost)
            sums = [round(float(column.sum()), 6) for column in work]
            yield f"{label}, {blocks} blocks: work {rounded(sums)}, {int(may_fail.sum())} may fail"
            for name, slo in SERVED.items():
                for engines in (1, 2) if name == "both" else (1,):
                    found = goodput_bound(requests, limit, cost, slo, engines)
                    told = None if found is None else [f"{value:.5g}" for value in found]
                    yield f"{label}, {blocks} blocks, {engines} engines, {name}: {told}"


PINNED = {
    "bounds": bounds,
    "flags": flags, "mixes": mixes, "models": models, "pools": pools,
    "prices": prices, **pinned_configs.PINNED, **pinned_pricing.PINNED,
}  # fmt: skip


def main() -> None:
    FACTS.mkdir(exist_ok=True)
    for name, lines in PINNED.items():
        (FACTS / f"{name}.txt").write_text("\n".join(lines()) + "\n")
        print(name)


if __name__ == "__main__":
    main()
