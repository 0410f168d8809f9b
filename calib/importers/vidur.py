"""Vidur's profiles (MIT, its `data/profiling`): one CSV of operators, one of attention, one of all-reduces.

Medians in ms, resolved to a microsecond, per layer and GPU: `mlp.csv` by number of tokens (projections, MLP, norms,
rotary embedding, activation, residual), `attention.csv` by chunk, batch and KV cache, `all_reduce.csv` by bytes. A
layer is an attention row plus the operators at its number of tokens, interpolated linearly between neighbours of the
dense grid. Without the attention table (in Vidur's repository they are large files that not every copy holds) there are
no layers: then the matrix products and what lies between them become samples by themselves.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from calib.importers.tables import Table, at_tokens
from calib.samples import Sample
from sim.errors import UserError
from sim.specs.models import ModelSpec, load_model

MS = 1e-3
OPERATORS = (
    "input_layernorm", "attn_pre_proj", "attn_rope", "attn_post_proj", "post_attention_layernorm", "mlp_up_proj",
    "mlp_act", "mlp_down_proj", "add",
)  # fmt: skip
"""Operators of a layer; models with parallel attention and MLP lack the second norm."""
PRODUCTS = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
BETWEEN = tuple(name for name in OPERATORS if name not in PRODUCTS)
MAY_LACK = ("post_attention_layernorm",)
SAMPLED_TOKENS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096)
LEAST_BETWEEN_TOKENS = 64
"""Points of the operators' grid that become samples by themselves; below, the timer's microseconds are too coarse for
what lies between products."""
ATTENTION = ("attn_input_reshape", "attn_output_reshape", "attn_kv_cache_save")


def import_samples(
    model_name: str, mlp: Path, attention: Path | None = None, all_reduce: Path | None = None
) -> tuple[list[Sample], dict[str, str]]:
    """Samples of one layer of a model on one GPU of every tensor-parallel size in the tables; with where from."""
    model = load_model(model_name)
    if attention is None:
        samples = _parts(mlp, model_name, model)
    else:
        samples = _layers(attention, model_name, model, _operators(mlp, model))
    if not samples and attention is not None:
        raise UserError(f"{attention}: has no attention of {model_name}'s shape: give the model's own table")
    if all_reduce is not None:
        samples += _all_reduces(all_reduce)
    return samples, {
        "tables": "Vidur's data/profiling, Microsoft, MIT licence",
        "files": ", ".join(path.name for path in (mlp, attention, all_reduce) if path is not None),
        "missing": f"{'attention, ' if attention is None else ''}LM head, PCIe copies, engine overhead",
    }


def _has_shape(table: Table, row: int, shape: Mapping[str, int]) -> bool:
    return all(table.integer(row, column) == value for column, value in shape.items())


def _parts(path: Path, model_name: str, model: ModelSpec) -> list[Sample]:
    """Matrix products, and what lies between them, each alone."""
    return [
        Sample(op=op, latency_s=seconds, model=model_name, tp=tp, new_tokens=tokens)
        for op, names in (("linear", PRODUCTS), ("elementwise", BETWEEN))
        for tp, by_tokens in sorted(_operators(path, model, names).items())
        for tokens, seconds in sorted(by_tokens.items())
        if tokens in SAMPLED_TOKENS and (op == "linear" or tokens >= LEAST_BETWEEN_TOKENS)
    ]


def _operators(path: Path, model: ModelSpec, names: Sequence[str] = OPERATORS) -> dict[int, dict[int, float]]:
    """Seconds of some of a layer's operators together, by tensor-parallel size and tokens."""
    needed = [f"time_stats.{name}.median" for name in OPERATORS if name not in MAY_LACK]
    shape = {"n_head": model.num_heads, "n_kv_head": model.num_kv_heads, "n_embd": model.hidden_size}
    shape["n_expanded_embd"] = model.intermediate_size
    table = Table(path, [*needed, "num_tokens", "num_tensor_parallel_workers", *shape])
    times: defaultdict[int, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in range(len(table)):
        if not _has_shape(table, row, shape):
            continue
        total = sum(table.number(row, f"time_stats.{name}.median", 0.0) for name in names)
        tp, tokens = table.integer(row, "num_tensor_parallel_workers"), table.integer(row, "num_tokens")
        times[tp][tokens].append(total * MS)
    if not times:
        wanted = ", ".join(f"{column} {value}" for column, value in shape.items())
        raise UserError(f"{path}: has no rows of {model.name} ({wanted}): give the model's own table")
    return {tp: {n: median(values) for n, values in by_tokens.items()} for tp, by_tokens in times.items()}


def _layers(path: Path, model_name: str, model: ModelSpec, linear: Mapping[int, Mapping[int, float]]) -> list[Sample]:
    required = ("is_prefill", "batch_size", "prefill_chunk_size", "kv_cache_size", "num_tensor_parallel_workers")
    shape = {"n_q_head": model.num_heads, "n_kv_head": model.num_kv_heads, "n_embd": model.hidden_size}
    table = Table(path, (*required, *shape, "time_stats.attn_prefill.median", "time_stats.attn_decode.median"))
    times: defaultdict[tuple[int, int, int, int], list[float]] = defaultdict(list)
    for row in range(len(table)):
        tp = table.integer(row, "num_tensor_parallel_workers")
        if tp not in linear or not _has_shape(table, row, shape):
            continue
        prompt = table.text(row, "is_prefill").lower() == "true"
        batch, cached = table.integer(row, "batch_size"), table.integer(row, "kv_cache_size")
        new = table.integer(row, "prefill_chunk_size") if prompt else 1
        linear_s = at_tokens(linear[tp], batch * new)
        if linear_s is None or new < 1:
            continue
        kernel = "attn_prefill" if prompt else "attn_decode"
        total = table.number(row, f"time_stats.{kernel}.median")
        total += sum(table.number(row, f"time_stats.{name}.median", 0.0) for name in ATTENTION)
        times[tp, batch, new, cached].append(linear_s + total * MS)
    return [
        Sample(
            op="layers",
            latency_s=median(values),
            repeats=len(values),
            model=model_name,
            tp=tp,
            batch_size=batch,
            new_tokens=new,
            context_tokens=cached,
        )
        for (tp, batch, new, cached), values in sorted(times.items())
    ]


def _all_reduces(path: Path) -> list[Sample]:
    table = Table(path, ("time_stats.all_reduce.median", "num_workers", "size"))
    times: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for row in range(len(table)):
        key = table.integer(row, "num_workers"), table.integer(row, "size")
        times[key].append(table.number(row, "time_stats.all_reduce.median") * MS)
    return [
        Sample(op="all_reduce", latency_s=median(values), repeats=len(values), tp=workers, num_bytes=float(size))
        for (workers, size), values in sorted(times.items())
        if workers > 1
    ]
