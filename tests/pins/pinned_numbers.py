"""Numbers that predictions begin with: models' sizes, pools of blocks, seconds of iterations, copies and layers."""

import inspect
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from pathlib import Path

import msgspec
from pinned import L20, ROOT, T4, Table, digest, rounded
from pinned_traces import GONE, ODD, changed, places

sys.path.insert(0, str(ROOT / "tests/cost"))
sys.path.insert(0, str(ROOT / "tests/specs"))

import test_cost_table as table
import test_specs_hf_config as hf

from gpu_runtime.model.config import DecoderConfig
from sim.bounds.step_price import step_prices
from sim.cost.engine_profile import load_engine_profile
from sim.cost.forms import build_cost
from sim.cost.model import CostModel
from sim.cost.profile import Constant, load_profile, read_profile
from sim.cost.spread_experts import SpreadExpertsCost
from sim.engine.changes import Direction
from sim.engine.plan import CONTINUED, IterationPlan, WindowTokens
from sim.engine.sequence import Sequence
from sim.errors import UserError
from sim.specs import hardware
from sim.specs.expert_layout import ExpertLayout
from sim.specs.hardware import load_hardware
from sim.specs.hf_families import FAMILIES
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


CONFIGS = {
    "dense": (hf.LLAMA, lambda family: True), "experts": (hf.EXPERTS, lambda family: family.moe),
    "latent": (hf.LATENT, lambda family: family.mla), "states": (hf.STATES, lambda family: family.gdn),
}  # fmt: skip
"""A config of each kind, and the families that may have it."""
OTHERWISE = (
    {}, {"num_experts": 6, "n_routed_experts": 6, "num_experts_per_tok": 2}, {"num_local_experts": 4, "head_dim": 16},
    {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, {"attention_bias": True},
    {"tie_word_embeddings": True, "num_shared_experts": 2, "shared_expert_intermediate_size": 40},
    {"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 16]}},
    {"quantization_config": {"quant_method": "gptq", "bits": 3, "group_size": 32}},
    {"quantization_config": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}},
    {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}, {"index_topk": 64},
    {"index_topk": 64, "index_n_heads": 4, "index_head_dim": 32}, {"num_nextn_predict_layers": 0},
)  # fmt: skip
"""What configs may have beside the fields that all of a kind have."""


def configs(kind: str) -> Iterator[str]:
    """What models of each family are read as, or why they are refused."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a-model.json"

        def read(_: int) -> ModelSpec:
            return load_model(str(path))

        config, may_have = CONFIGS[kind]
        families = [name for name, family in FAMILIES.items() if may_have(family)]
        for family, more in product(families, OTHERWISE):
            path.write_text(json.dumps({**config, "model_type": family, **more}))
            yield f"{family} {more}: {answer_of(read, 1)!r}".replace(folder, "FOLDER")
        if kind == "dense":
            for more, _ in hf.REFUSED:
                path.write_text(json.dumps({**config, **more}))
                yield f"{more}: {answer_of(read, 1)}".replace(folder, "FOLDER")


READERS: dict[str, tuple[Path, Callable[[str], object]]] = {
    "a profile": (L20, lambda path: read_profile(Path(path))),
    "an engine's profile": (ROOT / "sim/cost/engines/vllm-v1.json", load_engine_profile),
    "a GPU": (ROOT / "sim/specs/gpus/l20.json", load_hardware),
}
"""Files that users may write, one that is right of each."""


def written(kind: str) -> Iterator[str]:
    """What a file is read as, or how it is refused, with each of its values gone or another."""
    path, read = READERS[kind]
    document = json.loads(path.read_text())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "file.json"
        for at, value in product(places(document), (GONE, *ODD)):
            file.write_text(json.dumps(changed(document, at, value)))
            found = answer_of(lambda _: read(str(file)), 1)
            answer = found if isinstance(found, str) else f"taken {digest(repr(found).replace(folder, ''))}"
            yield f"{list(at)} {'gone' if value is GONE else repr(value)[:20]}: {answer}".replace(folder, "FOLDER")


ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
WHOLE: dict[str, dict[str, object]] = {
    "dense": {"rope_scaling": {**ROPE, "original_max_position_embeddings": 64}, "hidden_act": "silu"},
    "experts": {"num_experts": 6, "head_dim": 16, "rms_norm_eps": 1e-6, "norm_topk_prob": True, "rope_scaling": None},
}
"""What a decoder needs beside what sizes do."""


def odd_configs(kind: str) -> Iterator[str]:
    """What a config is read as with each of its values gone or another: its sizes, and the decoder that computes it."""
    config = {**CONFIGS[kind][0], **WHOLE.get(kind, {})}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a-model.json"
        for at, value in product(places(config), (GONE, *ODD, 0, 1, 2.5, False)):
            path.write_text(json.dumps(changed(config, at, value)))
            words = f"{list(at)} {'gone' if value is GONE else repr(value)[:20]}"
            for read in (load_model, DecoderConfig.from_hf):
                answer = answer_of(lambda _, read=read: read(str(path)), 1)
                yield f"{words}: {answer if isinstance(answer, str) else digest(repr(answer))}".replace(
                    folder, "FOLDER"
                )


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
    for shipped, name in SHIPPED:
        profile, model = load_profile(f"{shipped}-imported"), load_model(name)
        found[f"{name} on {shipped}"] = model, build_cost(model, load_hardware(profile.gpu), profile, 1, 2.0**21)
    model, gpu = load_model("llama-2-7b"), load_hardware("l20")
    found["paper"] = model, build_cost(model, gpu, golden["l20"], 1, 2.0**23, "paper")
    tiles = {name: Constant(value, None, "", "tests") for name, value in (("attention_tile_tokens", 100.0),
             ("attention_slots", 12.0))}  # fmt: skip
    tiled = msgspec.structs.replace(golden["l20"], constants=golden["l20"].constants | tiles)
    for name in ("llama-2-7b", "llama-3.1-70b"):
        found[f"{name}, tiles"] = load_model(name), build_cost(load_model(name), gpu, tiled, 1, 2.0**21)
    found["tables"] = table.MODEL, table.machine().cost
    # A profile without kernels of experts and one with them; with an engine's graphs and without.
    ends = (golden["l20"], None), (load_profile("h100-imported"), load_engine_profile("vllm-v1"))
    for (kind, layout), (profile, host) in product(LAYOUTS.items(), ends):
        model = load_model("qwen3-30b-a3b")
        hardware = load_hardware(profile.gpu)
        cost = build_cost(model, hardware, profile, layout.tp, 2.0**21, engine=host, experts=layout)
        found[f"{kind} on {layout.gpus} {profile.gpu}"] = model, cost
    return found


SHIPPED = [(gpu, "llama-3.1-8b") for gpu in ("h100", "rtx-4090", "a100-80g")]
SHIPPED += [("h200", name) for name in ("qwen3.5-35b-a3b", "deepseek-v3.2", "gpt-oss-20b", "qwen3-30b-a3b")]
LAYOUTS = {
    "shares of experts": ExpertLayout(2, 4), "shares in a group": ExpertLayout(4),
    "whole experts": ExpertLayout(1, 8, expert_parallel=True, skew=0.6),
}  # fmt: skip


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
    if isinstance(cost, SpreadExpertsCost):
        yield from ranks(cost)
    facts = cost.beyond, cost.all_reduce_on_pcie, cost.num_all_reduces, not cost.straight_decodes
    yield f"beyond what was measured, and so on = {rounded(facts)}"


def ranks(cost: SpreadExpertsCost) -> Iterator[str]:
    """What data-parallel ranks wait for one another, and iterations of those that do."""
    plans = {name: plan_of(*given, window=None) for name, given in PLANS.items()}
    for one, other in product(plans, ("one decode", "decodes", "a chunk", None)):
        others_s = cost.set_together([plans[one], None if other is None else plans[other]])
        cost.others_s = 1e-3
        yield f"{one} beside {other} = {rounded(others_s)}, later {rounded(cost.iteration_s(plans[one]))}"
        cost.others_s = 0.0
    for tokens in (0, 1, 30, 33, 5000, 10**7):
        yield f"experts over {tokens} = {rounded((cost.experts_s(tokens), cost.spread_s(tokens, tokens)))}"


TABLES = {
    "models": Table(built_in_models(), lambda name: {"sizes": [*sizes(name)], "pools": [*pools(name)]}),
    "odd configs": Table(list(CONFIGS), lambda name: {"read": [*odd_configs(name)]}),
    "files": Table(list(READERS), lambda name: {"read": [*written(name)]}),
    "configs": Table(list(CONFIGS), lambda name: {"read": [*configs(name)]}),
    "prices": Table(list(costs()), lambda name: {"prices": [*prices(name)]}),
}
