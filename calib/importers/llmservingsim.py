"""LLMServingSim's profiler folders (CASYS Lab, KAIST; MIT licence): kernel times of vLLM on one GPU, in us.

A folder `perf/GPU/MODEL/DTYPE/tpN` holds `dense.csv` (one of each kernel, by tokens: embedding, norms, projections,
rotary embedding, activation), `attention.csv` (by tokens of a prefill chunk and of its cached context, by decodes and
their context, both at once included) and `per_sequence.csv` (LM head and sampler). All rows of a tpN folder are of one
GPU of N, without all-reduces.

- `samples` composes layers: matrix products and attention (`products`), what lies between them (`elementwise`), and LM
  head with sampler (`lm_head`). Where `skew.csv` is there, decodes of two lengths become samples too.
- `tables` takes the kernels as they are, for a profile of form `table`.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

from calib.importers.tables import Table, at_tokens
from calib.samples import Sample
from sim.cost.kernels import KernelTables, grid_of, value_at
from sim.errors import UserError
from sim.specs.models import load_model

US = 1e-6
PRODUCTS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
BETWEEN = {"layernorm": 2, "qk_norm": 1, "rotary_emb": 1, "act_fn": 1}
"""Kernels between matrix products, and how often a layer runs them; `qk_norm` only where the model has it."""
ONCE = ("embedding", "final_layernorm")
"""Kernels that an iteration runs once, by its tokens."""
HEAD = ("lm_head", "sampler")
SAMPLED_TOKENS = (1, 8, 32, 64, 128, 256, 512, 768, 1024, 1536, 2048)
SAMPLED_CHUNKS = (16, 32, 64, 128, 256, 512, 1024)
SAMPLED_DECODES = (1, 4, 16, 32, 64, 128)
SAMPLED_CONTEXTS = (0, 128, 1024, 8192)
"""Points of the grids that become samples; the others are there to test a fit on."""

UNLIKE_CHUNKS = (64, 512)
UNLIKE_CONTEXTS = (512, 2048)
"""Chunks, without a context, and shorter of two contexts of which mixed rows of `skew.csv` become samples."""
MOST_APART = 0.1
"""By how much two of the folder's tables may differ where both have timed the same."""

LEAST_CONTEXT_TOKENS = 128
"""Decodes after less than one tile of keys are no samples: they cost as much as after one."""

Curve = Mapping[int, float]
"""Seconds by tokens or sequences."""
Shape = tuple[int, int, int, int]
"""Tokens of the chunk, cached before it, decodes, cached tokens of each."""


def is_whole(shape: Shape) -> bool:
    """Whether decodes have a whole tile of keys, if there are any."""
    return not shape[2] or shape[3] >= LEAST_CONTEXT_TOKENS


def is_sampled(shape: Shape) -> bool:
    """Whether a row of `attention.csv` becomes a sample."""
    chunk, cached, decodes, context = shape
    if not is_whole(shape):
        return False
    if not chunk or not decodes:
        return True
    on_grid = chunk in SAMPLED_CHUNKS and decodes in SAMPLED_DECODES
    return on_grid and cached in SAMPLED_CONTEXTS and context in SAMPLED_CONTEXTS


def import_samples(
    folder: Path, model_name: str, tp: int = 1, chosen: Callable[[Shape], bool] = is_sampled
) -> tuple[list[Sample], dict[str, str]]:
    """Samples of one layer on one GPU of `tp`, and of the LM head; with where they come from.

    Raises:
        UserError: a file or a kernel is missing, or a cell is not a number.
    """
    load_model(model_name)
    kernels, attention, heads = _read(folder)
    products, between = _sum(kernels, dict.fromkeys(PRODUCTS, 1)), _sum(kernels, BETWEEN)
    common = {"model": model_name, "tp": tp}
    samples = [
        Sample(op="elementwise", latency_s=seconds, new_tokens=tokens, **common)
        for tokens, seconds in between.items()
        if tokens in SAMPLED_TOKENS
    ]
    for (chunk, cached, decodes, context), seconds in sorted(attention.items()):
        linear_s = at_tokens(products, chunk + decodes)
        if linear_s is None or not chosen((chunk, cached, decodes, context)):
            continue
        shape = _columns(chunk, cached, decodes, context)
        samples.append(Sample(op="products", latency_s=linear_s + seconds, **shape, **common))
    if (folder / "skew.csv").exists():
        samples += _unlike(folder / "skew.csv", attention, products, common)
    samples += [
        Sample(op="lm_head", latency_s=seconds, batch_size=sequences, new_tokens=1, **common)
        for sequences, seconds in _sum(heads, dict.fromkeys(HEAD, 1)).items()
        if sequences & (sequences - 1) == 0
    ]
    return samples, {
        "tables": "LLMServingSim's profiler, CASYS Lab, KAIST, MIT licence",
        "shapes": f"{model_name}, tensor parallel size {tp}",
        "missing": "all-reduces, PCIe copies, engine overhead: not in the tables",
    }


def _columns(chunk: int, cached: int, decodes: int, context: int) -> dict[str, int]:
    """A `Shape` as samples have it."""
    if not chunk:
        return {"batch_size": decodes, "new_tokens": 1, "context_tokens": context}
    beside = {"decodes": decodes, "decode_context_tokens": context if decodes else 0}
    return {"new_tokens": chunk, "context_tokens": cached, **beside}


def _unlike(
    path: Path, attention: Mapping[Shape, float], products: Curve, common: Mapping[str, str | int]
) -> list[Sample]:
    """Decodes of two lengths, alone and beside a chunk. The file's times are sums over as many runs as were timed.

    Raises:
        UserError: the like decodes among them are not a whole number of times those of `attention.csv`.
    """
    columns = ("n", "pc", "kp", "kvs", "kv_big", "kv_mean")
    table = Table(path, (*columns, "t_mean_us", "t_skew_us"))
    rows = [tuple(table.integer(row, column) for column in columns) for row in range(len(table))]
    grids = {
        bool(chunk): grid_of([(*shape, s) for shape, s in sorted(attention.items()) if bool(shape[0]) == bool(chunk)])
        for chunk in (0, 1)
    }
    shares = []
    for row, (decodes, chunk, cached, _, _, mean) in enumerate(rows):
        known_s = value_at(grids[bool(chunk)], (chunk, cached, decodes, mean))
        shares.append(table.number(row, "t_mean_us") * US / known_s)
    share = median(shares)
    runs = max(1, round(share))
    if abs(share / runs - 1) > MOST_APART:
        raise UserError(f"{path}: its decodes of one length take {share:.2f} times those of attention.csv: other runs")
    found = []
    for row, (decodes, chunk, cached, shortest, longest, mean) in enumerate(rows):
        linear_s = at_tokens(products, chunk + decodes)
        if linear_s is None or (chunk and (chunk not in UNLIKE_CHUNKS or cached or shortest not in UNLIKE_CONTEXTS)):
            continue
        shape = _columns(chunk, cached, decodes, mean)
        seconds = linear_s + table.number(row, "t_skew_us") * US / runs
        found.append(
            Sample(op="products", latency_s=seconds, longest_context_tokens=longest, **shape, **common)  # pyright: ignore[reportArgumentType]
        )
    return found


def import_tables(folder: Path, model_name: str, tp: int = 1) -> KernelTables:
    """The kernels' times as they are: of a layer and of an iteration by tokens, of attention, and of the head."""
    model = load_model(model_name)
    kernels, attention, heads = _read(folder)
    layer = _sum(kernels, dict.fromkeys(PRODUCTS, 1) | BETWEEN)
    once, head = _sum(kernels, dict.fromkeys(ONCE, 1)), _sum(heads, dict.fromkeys(HEAD, 1))
    return KernelTables(
        model=model.name,
        tp=tp,
        weight_bytes=model.linear_weight_bytes / model.num_layers,
        kv_bytes=model.kv_bytes_per_token_layer(),
        layer=sorted(layer.items()),
        iteration=sorted(once.items()),
        head=sorted(head.items()),
        attention=[(*shape, seconds) for shape, seconds in sorted(attention.items())],
    )


def _read(folder: Path) -> tuple[dict[str, dict[int, float]], dict[Shape, float], dict[str, dict[int, float]]]:
    if (folder / "moe.csv").exists():
        raise UserError(f"{folder}: has moe.csv: a mixture of experts cannot be imported, give a dense model's folder")
    below = sorted(path.parent.name for path in folder.glob("tp*/dense.csv"))
    if below and not (folder / "dense.csv").exists():
        raise UserError(f"{folder}: holds no dense.csv but {', '.join(below)}: give one of those")
    kernels = _curves(folder / "dense.csv", "tokens", (*PRODUCTS, "layernorm", "rotary_emb", "act_fn", *ONCE))
    heads = _curves(folder / "per_sequence.csv", "sequences", HEAD)
    columns = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
    table = Table(folder / "attention.csv", columns)
    attention: dict[Shape, float] = {}
    for row in range(len(table)):
        chunk, cached, decodes, context = (table.integer(row, column) for column in columns[:4])
        attention[chunk, cached, decodes, context] = table.number(row, "time_us") * US
    return kernels, attention, heads


def _curves(path: Path, by: str, needed: Sequence[str]) -> dict[str, dict[int, float]]:
    table = Table(path, ("layer", by, "time_us"))
    found: dict[str, dict[int, float]] = {}
    for row in range(len(table)):
        curve = found.setdefault(table.text(row, "layer"), {})
        curve[table.integer(row, by)] = table.number(row, "time_us") * US
    for name in needed:
        if name not in found:
            raise UserError(f"{path}: holds no rows of layer {name!r}: give a tpN folder of LLMServingSim's profiler")
    return found


def _sum(curves: Mapping[str, Curve], times: Mapping[str, int]) -> dict[int, float]:
    """Seconds of several kernels together, at the points that all have."""
    parts = [(curves[name], count) for name, count in times.items() if name in curves]
    points = set.intersection(*(set(curve) for curve, _ in parts))
    return {point: sum(count * curve[point] for curve, count in parts) for point in sorted(points)}
