"""NVIDIA aiconfigurator-core's tables of operators (Apache-2.0, package `aiconfigurator-core`), composed into layers.

The tables hold latencies in ms of GEMMs (m, n, k), of attention over prompts and of attention over a KV cache, measured
by several engines' collectors. A decoder layer is the sum of its four GEMMs (QKV, output, gate and up, down) and its
attention (`products`): norms, rotary embedding and activation are not in the tables.

- A GEMM that several collectors timed counts with the median of them: they call the same library, and the median of
  three machines is steadier than any.
- Widths between two of the grid are interpolated linearly in n and k (Llama's MLP widths are not on the grid); numbers
  of tokens are not: only those on the grid become samples.
- Attention is that of one engine, whose kernels it is. So are FP8 and NVFP4 GEMMs, each with the quantisation of its
  input by a given scale (those of NVFP4 repeated on one matrix, yet no faster where the L2 cache holds it), attention
  over FP8 KV, whose queries come in FP8 already, and all-reduces, as the engine's CUDA graphs do them (its own kernel
  for small messages, NCCL's beyond). vLLM fuses small ones with the norm behind them.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec

from calib.importers.tables import neighbours
from calib.samples import Sample, spread_s
from sim.errors import UserError
from sim.specs.models import ModelSpec, load_model
from sim.specs.quantization import PRODUCT_FORMATS

PACKAGE = "aiconfigurator_core"
MODELS = ("llama-2-7b", "llama-2-13b", "llama-2-70b", "llama-3.1-8b", "qwen3-14b", "qwen3-32b")
"""Models whose heads are in the tables and whose shapes differ from each other."""
DTYPE, FP8 = "bfloat16", "fp8"
GRAPHED = ("vllm", "sglang")
"""Engines whose all-reduces were timed in CUDA graphs."""
GEMMS, OWN_ALL_REDUCE = "gemm_perf.parquet", "custom_allreduce_perf.parquet"
HEAD_DIM = 128
MS = 1e-3
MOST_DECODES = 512
LEAST_CONTEXT_TOKENS = 127
LEAST_PROMPT_TOKENS = 128
"""Shorter prompts cost what decodes of as many tokens do."""
ELEMENT_BYTES = 2
"""Of all-reduced messages, whose sizes the tables count in elements."""
LEAST_REDUCED_BYTES, MOST_REDUCED_BYTES = 8 << 10, 256 << 20
"""Messages of a tensor-parallel layer, from one token to a long prompt."""
FUSING_ENGINE = "trtllm"
"""vLLM fuses small all-reduces with the norm behind them. FlashInfer's kernel does that, which is TensorRT-LLM's."""
FUSED_HOPPER, FUSED_BLACKWELL, FUSED_BLACKWELL_ULTRA = (
    {2: 64 << 20, 4: 2 << 20, 8: 1 << 19},
    {2: 64 << 20, 4: 32 << 20, 8: 1 << 20},
    {2: 64 << 20, 4: 64 << 20, 8: 4 << 20},
)
"""By GPUs: messages up to which it does (vLLM, `FI_ALLREDUCE_FUSION_MAX_SIZE_MB`; on by default at level O2)."""


class System(NamedTuple):
    """A system of the package.

    Attributes:
        gpu: the GPU of ours that it is.
        l2_bytes: of its L2 cache: NVIDIA's whitepapers of the Ampere, Ada and Hopper architectures; the B200's as
            `cudaDeviceProp` has it, and taken for all of Blackwell.
        fused_bytes: one of the tables above; none where vLLM does not fuse.
        reducing_gpus: group sizes whose all-reduces are taken.
    """

    gpu: str
    l2_bytes: float
    fused_bytes: dict[int, int] | None = None
    reducing_gpus: tuple[int, ...] = (2, 4, 8)


SYSTEMS = {
    "a100_sxm": System("a100-80g", 40e6),
    # Over PCIe, NCCL's rate per byte falls 4- and 13-fold at 4 and 8 GPUs in the table: that machine's, not the GPU's.
    "l40s": System("l40s", 96e6, reducing_gpus=(2,)),
    "h100_sxm": System("h100", 50e6, FUSED_HOPPER),
    "h200_sxm": System("h200", 50e6, FUSED_HOPPER),
    "b200_sxm": System("b200", 126e6, FUSED_BLACKWELL),
    "b300_sxm": System("b300", 126e6, FUSED_BLACKWELL_ULTRA),
    "gb200": System("gb200", 126e6, FUSED_BLACKWELL),
    # Over PCIe, as the L40S: what groups reach is the machine's.
    "rtx_pro_6000_server": System("rtx-pro-6000", 128e6, reducing_gpus=(2,)),
}


class Gemm(NamedTuple):
    """Rows, output width, inner width."""

    m: int
    n: int
    k: int


class Timing(NamedTuple):
    """Median s, robust standard deviation s, how many collectors timed it."""

    latency_s: float
    spread_s: float
    repeats: int


def import_samples(
    system: str, models: Sequence[str] = MODELS, engine: str = "vllm", folder: Path | None = None
) -> tuple[list[Sample], dict[str, str]]:
    """Samples of one layer per model, prompt and decode, and all-reduces; with where they come from.

    Args:
        system: a key of `SYSTEMS`.
        models: names or config paths; their head counts must be in the tables.
        engine: whose attention kernels: vllm, sglang or trtllm.
        folder: the package's `systems/data`; by default that of the installed package.
    """
    if system not in SYSTEMS:
        raise UserError(f"aiconfigurator: system {system!r} is not known: use one of {', '.join(SYSTEMS)}")
    root = (folder or package_data()) / system
    gemms = _gemm_table(_newest(root / "gemm", GEMMS))
    attention = {kv: [_attention_table(root, engine, kind, kv) for kind in KINDS] for kv in (DTYPE, FP8)}
    samples: list[Sample] = []
    for name in models:
        model = load_model(name)
        if model.mla or model.moe or model.head_dim != HEAD_DIM:
            raise UserError(
                f"aiconfigurator: model {name} is not four matrices and attention over heads of {HEAD_DIM}: omit it"
            )
        found = list(_layers(name, model, _linear(model, gemms), attention[DTYPE]))
        if not found:
            raise UserError(
                f"aiconfigurator: {system} has no attention of {model.num_heads} query and {model.num_kv_heads} KV "
                f"heads, or no matrices of its widths (model {name}): leave it out"
            )
        samples += found
    quantised = list(_quantised_layers(root, models, engine, attention))
    samples += quantised
    samples += _all_reduces(root, engine)
    return samples, _provenance(root, engine, {s.quantization for s in quantised})


def package_data() -> Path:
    """The folder `systems/data` of the installed package. UserError where it is not."""
    found = find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise UserError("aiconfigurator-core is not installed: pip install 'aiconfigurator-core==0.12.*' pyarrow")
    return Path(found.origin).parent / "systems" / "data"


def read_rows(path: Path, columns: Sequence[str], optional: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Rows of a parquet file: `columns`, and those of `optional` that it has."""
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError as error:
        raise UserError("reading parquet needs pyarrow: pip install pyarrow") from error
    try:
        known = set(parquet.read_schema(path).names)
        for name in columns:
            if name not in known:
                raise UserError(f"{path}: column {name!r} is missing: give the package's own tables")
        return parquet.read_table(path, columns=[*columns, *(c for c in optional if c in known)]).to_pylist()
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as parquet ({error}): give the package's own tables") from error


def _newest(folder: Path, name: str) -> list[Path]:
    """The file `name` of the newest version of each collector (or of `folder` itself) under a folder."""
    found: list[Path] = []
    for collector in sorted(folder.glob("*")):
        versions = sorted(
            collector.glob(f"*/{name}"), key=lambda path: [*map(int, re.findall(r"\d+", path.parent.name))]
        )
        found += versions[-1:]
    if not found:
        raise UserError(f"{folder}: holds no {name}: give the package's systems/data folder")
    return found


def newest_of_engine(folder: Path, name: str, engine: str) -> Path:
    """The file `name` of the newest version of one engine's collector under a folder. UserError where it has none."""
    found = _of_engine(_newest(folder, name), engine)
    if not found:
        raise UserError(f"{folder}: holds no {name} of engine {engine!r}: give the package's systems/data folder")
    return found[0]


def _gemm_table(paths: Iterable[Path], dtype: str = DTYPE) -> dict[Gemm, Timing]:
    times: defaultdict[Gemm, list[float]] = defaultdict(list)
    for path in paths:
        once: defaultdict[Gemm, list[float]] = defaultdict(list)
        for row in read_rows(path, ("gemm_dtype", "m", "n", "k", "latency")):
            if row["gemm_dtype"] == dtype:
                once[Gemm(row["m"], row["n"], row["k"])].append(row["latency"] * MS)
        for shape, values in once.items():
            times[shape].append(median(values))
    return {shape: Timing(median(values), spread_s(values), len(values)) for shape, values in times.items()}


AttentionKey = tuple[int, int, int, int, int]
"""Sequences, new tokens, cached tokens, query heads, KV heads."""
AttentionTable = Mapping[AttentionKey, Sequence[float]]
KINDS = ("context", "generation")
"""Tables of attention: of prompts, of decodes."""


def _attention_table(root: Path, engine: str, kind: str, kv_dtype: str) -> dict[AttentionKey, list[float]]:
    name = f"{kind}_attention_perf.parquet"
    paths = _of_engine(_newest(root / "attention", name), engine)
    if not paths:
        raise UserError(f"{root / 'attention'}: holds no tables of engine {engine!r}: use vllm, sglang or trtllm")
    columns = ("batch_size", "isl", "step", "num_heads", "num_key_value_heads", "head_dim", "attn_dtype")
    found: defaultdict[AttentionKey, list[float]] = defaultdict(list)
    for row in read_rows(paths[0], (*columns, "kv_cache_dtype", "latency"), ("window_size",)):
        if (
            (row["attn_dtype"], row["kv_cache_dtype"]) == (DTYPE, kv_dtype)
            and row["head_dim"] == HEAD_DIM
            and not row.get("window_size")
        ):
            key = (row["batch_size"], row["isl"], row["step"], row["num_heads"], row["num_key_value_heads"])
            found[key].append(row["latency"] * MS)
    return found


def _layers(
    name: str, model: ModelSpec, linear: Mapping[int, Timing], attention: Sequence[AttentionTable], tp: int = 1
) -> Iterator[Sample]:
    """Samples of one layer of `model` on one GPU of `tp`: prompts, then decodes."""
    heads = (model.num_heads // tp, max(1, model.num_kv_heads // tp))
    prompts, decodes = attention
    for table in (prompts, decodes):
        for (batch, new, cached, *shape), times in sorted(table.items()):
            tokens = batch * new
            if tuple(shape) != heads or tokens not in linear:
                continue
            if table is prompts and tokens < LEAST_PROMPT_TOKENS:
                continue
            if table is decodes and (batch > MOST_DECODES or cached < LEAST_CONTEXT_TOKENS):
                continue
            timing = linear[tokens]
            yield Sample(
                op="products",
                latency_s=timing.latency_s + median(times),
                spread_s=timing.spread_s,
                repeats=timing.repeats,
                model=name,
                tp=tp,
                batch_size=batch,
                new_tokens=new,
                context_tokens=cached,
            )


def _linear(model: ModelSpec, gemms: Mapping[Gemm, Timing], tp: int = 1) -> dict[int, Timing]:
    """The four GEMMs of a layer together on one GPU of `tp`, by number of tokens."""
    h, f, d = model.hidden_size, model.intermediate_size // tp, model.head_dim
    heads, kv_heads = model.num_heads // tp, max(1, model.num_kv_heads // tp)
    into_mlp = (2 if model.gated_mlp else 1) * f
    shapes = [((heads + 2 * kv_heads) * d, h), (h, heads * d), (into_mlp, h), (h, f)]
    widths = sorted({shape.n for shape in gemms}), sorted({shape.k for shape in gemms})
    found: dict[int, Timing] = {}
    for m in sorted({shape.m for shape in gemms}):
        parts = [_interpolated(m, n, k, gemms, widths) for n, k in shapes]
        known = [part for part in parts if part is not None]
        if len(known) == len(shapes):
            variance = sum(part.spread_s**2 for part in known)
            repeats = min(part.repeats for part in known)
            found[m] = Timing(sum(part.latency_s for part in known), variance**0.5, repeats)
    return found


def _interpolated(
    m: int, n: int, k: int, gemms: Mapping[Gemm, Timing], widths: tuple[Sequence[int], Sequence[int]]
) -> Timing | None:
    latency_s = spread_s = 0.0
    repeats: list[int] = []
    for (n_near, n_weight), (k_near, k_weight) in product(neighbours(n, widths[0]), neighbours(k, widths[1])):
        timing = gemms.get(Gemm(m, n_near, k_near))
        if timing is None:
            return None
        latency_s += n_weight * k_weight * timing.latency_s
        spread_s += n_weight * k_weight * timing.spread_s
        repeats.append(timing.repeats)
    return Timing(latency_s, spread_s, min(repeats)) if repeats else None


def _quantised_layers(
    root: Path, models: Sequence[str], engine: str, attention: Mapping[str, Sequence[AttentionTable]]
) -> Iterator[Sample]:
    """A layer's quantised GEMMs alone, over 16-bit KV and, of FP8, over FP8 KV, on every size of group.

    GEMMs alone are of all sizes in the table, since each may have a kernel of its own. Of attention, powers of four
    are enough.
    """
    for quantization in PRODUCT_FORMATS:
        gemms = _gemm_table(_of_engine(_newest(root / "gemm", GEMMS), engine), quantization)
        for name, tp in product(models, (1, *SYSTEMS[root.name].reducing_gpus)):
            model = load_model(name)
            if not gemms or model.num_heads % tp:
                continue
            linear = _linear(model, gemms, tp)
            for tokens, timing in sorted(linear.items()):
                whole = {"model": name, "tp": tp, "new_tokens": tokens, "quantization": quantization}
                yield Sample(op="linear", latency_s=timing.latency_s, **whole)
            for kv_dtype, tables in attention.items():
                if kv_dtype == FP8 != quantization:
                    continue
                for sample in _layers(name, model, linear, tables, tp):
                    length = sample.context_tokens + 1 if sample.is_decode else sample.new_tokens
                    if _is_power_of_four(sample.batch_size) and _is_power_of_four(length):
                        kept = {"quantization": quantization, "kv_cache_dtype": FP8 if kv_dtype == FP8 else ""}
                        yield msgspec.structs.replace(sample, **kept)


def _is_power_of_four(value: int) -> bool:
    return value.bit_count() == 1 and value.bit_length() % 2 == 1


def _of_engine(paths: Iterable[Path], engine: str) -> list[Path]:
    return [path for path in paths if path.parent.parent.name == engine]


class _Reducing(NamedTuple):
    """A table of all-reduces."""

    path: Path
    words: str
    wanted: Mapping[str, str]
    """What its rows must say."""
    most_bytes: Mapping[int, int] = {}
    """The largest messages by GPUs, where not all are taken."""


def _reducing(root: Path, engine: str) -> list[_Reducing]:
    """The newest table of all-reduces, the engine's or else NCCL's; and of those that vLLM fuses with norms."""
    tables = _newest(root / "comm", OWN_ALL_REDUCE) if any((root / "comm").glob(f"*/*/{OWN_ALL_REDUCE}")) else []
    if engine in GRAPHED and (own := _of_engine(tables, engine)):
        path, wanted = own[0], {"backend": f"{engine}_graph"}
        words = f"{engine} {path.parent.name}, in CUDA graphs"
    else:
        path, wanted = _newest(root / "comm", "nccl_perf.parquet")[0], {"op_name": "all_reduce", "nccl_dtype": "half"}
        words = f"NCCL {path.parent.name}, half precision"
    found = [_Reducing(path, words, wanted)]
    fused_bytes = SYSTEMS[root.name].fused_bytes
    if engine == "vllm" and fused_bytes:
        for path in _of_engine(tables, FUSING_ENGINE):
            words = f"what it fuses with norms: {FUSING_ENGINE} {path.parent.name}"
            found.append(_Reducing(path, words, {}, fused_bytes))
    return found


def _all_reduces(root: Path, engine: str) -> Iterator[Sample]:
    allowed = SYSTEMS[root.name].reducing_gpus
    for path, _, wanted, most_bytes in _reducing(root, engine):
        for row in read_rows(path, (*wanted, "num_gpus", "message_size", "latency")):
            gpus, num_bytes = row["num_gpus"], row["message_size"] * ELEMENT_BYTES
            most = most_bytes.get(gpus, MOST_REDUCED_BYTES)
            matches = all(row[name] == value for name, value in wanted.items())
            if matches and gpus in allowed and LEAST_REDUCED_BYTES <= num_bytes <= most:
                yield Sample(op="all_reduce", latency_s=row["latency"] * MS, tp=gpus, num_bytes=float(num_bytes))


def _provenance(root: Path, engine: str, quantisations: Collection[str]) -> dict[str, str]:
    gemm = ", ".join(f"{p.parent.parent.name} {p.parent.name}" for p in _newest(root / "gemm", GEMMS))
    attention = _of_engine(_newest(root / "attention", "context_attention_perf.parquet"), engine)
    gemms = _of_engine(_newest(root / "gemm", GEMMS), engine)
    device = read_rows(_newest(root / "gemm", GEMMS)[0], ("device",))[0]["device"]
    return {
        "tables": "aiconfigurator-core 0.12, NVIDIA, Apache-2.0",
        "system": root.name,
        "device": str(device),
        "dtype": DTYPE,
        "gemm": f"median over the collectors {gemm}",
        "attention": f"{engine} {attention[0].parent.name}",
        **{
            kind: f"GEMMs of {engine} {gemms[0].parent.name}" if kind in quantisations else "none in the tables"
            for kind in PRODUCT_FORMATS
        },
        "all_reduce": "; ".join(table.words for table in _reducing(root, engine)),
        "missing": "norms, rotary embedding, activation, LM head, PCIe copies, engine overhead: not in the tables",
    }
