"""`Sample`: one measured operating point, and the CSV that holds samples of any origin.

The same file comes out of `kvtwin calibrate`, out of the importers and out of a user's own measurements. A line that
starts with `#` is a comment. Columns (a missing optional column means its default everywhere):

| column | meaning | default |
|---|---|---|
| `op` | what was timed, one of `OPS` | required |
| `latency_s` | median seconds of one execution, all `num_layers` layers or `num_copies` pieces together | required |
| `spread_s` | standard deviation of the repeats (robust: 1.48 times the median absolute deviation), s | 0, not known |
| `repeats` | how many executions the median is of | 1 |
| `model` | built-in name or path of a config.json, seen from the CSV's folder; empty for copies | empty |
| `tp` | GPUs the model was split over; shapes are those of one of them | 1 |
| `num_layers` | layers the timed piece had | 1 |
| `batch_size` | sequences | 1 |
| `new_tokens` | tokens computed, per sequence | 0 |
| `context_tokens` | tokens cached before, per sequence | 0 |
| `decodes` | sequences that decode beside, in the same iteration: one token each | 0 |
| `decode_context_tokens` | tokens cached before, for each of them | 0 |
| `longest_context_tokens` | cached before the longest decode, where the above is their mean | 0, alike |
| `num_bytes` | bytes moved, all pieces together | 0 |
| `num_copies` | pieces they were moved in | 1 |
| `memory` | host memory: `pinned`, `pageable` or `pinned-row`: there in a row, scattered on the device | pinned |
| `beside` | `op` that ran on another stream or lane at the same time; empty: alone | empty |
| `graph` | 1 if replayed from a CUDA graph, 2 if all but attention was, graph by graph | 0 |
| `quantization` | `fp8` or `nvfp4`: weights and activations are, the head not; empty: neither | empty |
| `kv_cache_dtype` | `fp8`: the KV cache is FP8; empty: the model's own | empty |
| `dtype_bytes` | bytes of an element of weights and KV cache, where they were not the model's own | 0, the model's |
"""

import csv
import gzip
import hashlib
import zlib
from collections.abc import Iterable, Sequence
from io import StringIO
from math import isfinite
from pathlib import Path
from statistics import median

import msgspec

from sim.errors import UserError
from sim.files import write_atomically
from sim.specs.quantization import PRODUCT_FORMATS

OPS = {
    "layers": "decoder layers: attention with its KV write, MLP, norms; no LM head, no sampling",
    "products": "matrix products and attention of decoder layers, with nothing of what lies between them",
    "linear": "matrix products of decoder layers, without attention",
    "elementwise": "what lies between them: norms, residual, rotary embedding, activation function",
    "step": "a whole iteration as an engine runs it: all layers, LM head for one token a sequence, its overhead",
    "lm_head": "final projection of batch_size rows onto the vocabulary",
    "recompute": "layers over a prefix whose KV is dropped after use (eLLM's K1)",
    "restore": "K and V projections of stored hidden states of a prefix (HCache, KVPR)",
    "h2d": "copy from host to device",
    "d2h": "copy from device to host",
    "host_memcpy": "copy from pinned to pageable host memory by one thread",
    "all_reduce": "sum over tp GPUs of num_bytes on each",
    "launch": "an empty kernel or operator call: the cost of asking",
}
"""Operations by name, and what each times."""
TOKEN_OPS = frozenset({"layers", "products", "linear", "elementwise", "step", "lm_head", "recompute", "restore"})
PASSES = frozenset({"layers", "products", "step", "recompute"})
"""Operations that take tokens through whole layers."""
COPY_OPS = frozenset({"h2d", "d2h", "host_memcpy", "all_reduce"})
MEMORIES = ("pinned", "pageable", "pinned-row")
QUANTIZATIONS, KV_TYPES = ("", *PRODUCT_FORMATS), ("", "fp8")
EAGER, WHOLE, PIECES = range(3)
"""Kernels launched one by one, from a CUDA graph, and from graphs between which attention is launched."""
MADS = 1.4826
"""Median absolute deviations to a standard deviation, for normal errors."""
LONGEST_S = 600.0
SHORTEST_S = 1e-7
"""No operation here takes longer or shorter: values beyond are milliseconds or nanoseconds under the wrong name."""
FASTEST_BYTES_PER_S = 2e13
"""No copy is faster than this: a rate beyond it is a unit gone wrong."""
MOST_COUNT = 10**9
"""No column counts more tokens, sequences, layers, GPUs, pieces or repeats than this."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One operating point; fields are the CSV's columns (see the module)."""

    op: str
    latency_s: float
    spread_s: float = 0.0
    repeats: int = 1
    model: str = ""
    tp: int = 1
    num_layers: int = 1
    batch_size: int = 1
    new_tokens: int = 0
    context_tokens: int = 0
    decodes: int = 0
    decode_context_tokens: int = 0
    longest_context_tokens: int = 0
    num_bytes: float = 0.0
    num_copies: int = 1
    memory: str = "pinned"
    beside: str = ""
    graph: int = 0
    quantization: str = ""
    kv_cache_dtype: str = ""
    dtype_bytes: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens computed, all sequences together but those that decode beside."""
        return self.batch_size * self.new_tokens

    @property
    def is_quantised(self) -> bool:
        """Whether weights or KV cache are."""
        return bool(self.quantization or self.kv_cache_dtype)

    @property
    def is_decode(self) -> bool:
        """One new token a sequence, after a context."""
        return self.new_tokens == 1 and self.context_tokens > 0

    @property
    def is_prompt(self) -> bool:
        """A pass over prompts or chunks alone."""
        return self.op in PASSES and not self.is_decode and not self.decodes

    @property
    def is_mixed(self) -> bool:
        """A pass over prompts or chunks with decodes beside."""
        return self.op in PASSES and self.decodes > 0


COLUMNS = Sample.__struct_fields__
_TYPES = {field.name: field.type for field in msgspec.structs.fields(Sample)}
_REQUIRED = ("op", "latency_s")


def spread_s(repeats_s: Sequence[float]) -> float:
    """The `spread_s` of repeats: 1.48 times the median absolute deviation from the median, s."""
    middle = median(repeats_s)
    return MADS * median(abs(value - middle) for value in repeats_s)


def write_samples(
    path: Path, samples: Iterable[msgspec.Struct], comments: Iterable[str] = (), kind: type[msgspec.Struct] = Sample
) -> None:
    """Write samples of one `kind`, whole or not at all, gzipped if the path ends in .gz; a `#` is before comments."""
    text = StringIO()
    text.writelines(f"# {comment}\n" for comment in comments)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(kind.__struct_fields__)
    writer.writerows(map(msgspec.structs.astuple, samples))
    data = text.getvalue().encode()
    # Without a date in it, so that the same samples give the same file.
    write_atomically(path, gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def read_samples(path: Path) -> list[Sample]:
    """The samples of a CSV file, plain or gzipped.

    Raises:
        UserError: names the file, the line, the column, the value and the remedy, for anything the schema or physics
            refuses: unknown columns, NaN, negative or zero times, seconds that must be milliseconds.
    """
    rows = list(_records(path))
    if not rows:
        raise UserError(f"{path}: holds no header: begin with a line of columns, at least {', '.join(_REQUIRED)}")
    (first, header), body = rows[0], rows[1:]
    header = [name.strip() for name in header]
    unknown = [name for name in header if name not in COLUMNS]
    if unknown:
        raise UserError(f"{path}: line {first}: column {unknown[0]!r} is not known: known are {', '.join(COLUMNS)}")
    for name in header:
        if header.count(name) > 1:
            raise UserError(f"{path}: line {first}: column {name!r} appears twice: keep one")
    for name in _REQUIRED:
        if name not in header:
            raise UserError(f"{path}: line {first}: column {name!r} is missing: add it (seconds, not milliseconds)")
    if not body:
        raise UserError(f"{path}: holds no samples below its header: give measurements")
    return [_sample(path, line, header, cells) for line, cells in body]


def _records(path: Path) -> Iterable[tuple[int, list[str]]]:
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if line.strip() and not line.startswith("#"):
            # One line at a time: a quotation mark left open must not swallow the lines below.
            try:
                yield number, next(csv.reader([line], strict=True))
            except csv.Error as error:
                raise UserError(f"{path}: line {number}: not CSV ({error}): correct the line") from error


def read_comments(path: Path) -> dict[str, str]:
    """What the comments `# key: value` at the top of a samples file say: where the samples come from."""
    found: dict[str, str] = {}
    for line in read_text(path).splitlines():
        if not line.startswith("#"):
            break
        key, colon, value = line[1:].partition(":")
        if colon and value.strip():
            found[key.strip()] = value.strip()
    return found


def samples_sha256(path: Path) -> str:
    """SHA-256 (hex) of a samples file's text, the same plain or gzipped."""
    return hashlib.sha256(read_text(path).encode()).hexdigest()


def read_text(path: Path) -> str:
    """The text of a file, gzipped or plain; UserError when it cannot be read."""
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}): give a CSV file") from error
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: cannot be read ({reason}): check the path") from error


def _sample(path: Path, line: int, header: Sequence[str], cells: Sequence[str]) -> Sample:
    if len(cells) != len(header):
        raise UserError(f"{path}: line {line}: {len(cells)} values for {len(header)} columns: give one for each")
    values: dict[str, str | int | float] = {}
    for name, cell in zip(header, cells, strict=True):
        cell = cell.strip()
        if cell == "" and _TYPES[name] is not str:
            if name in _REQUIRED:
                raise UserError(f"{path}: line {line}: column {name!r} is empty: give a value")
            continue
        try:
            values[name] = cell if _TYPES[name] is str else _TYPES[name](cell)
        except ValueError as error:
            kind = "a whole number" if _TYPES[name] is int else "a number"
            raise UserError(f"{path}: line {line}: {name} = {cell!r} is not {kind}: correct it") from error
    sample = Sample(**values)  # pyright: ignore[reportArgumentType]
    fault = fault_of(sample)
    if fault:
        raise UserError(f"{path}: line {line}: {fault}")
    return sample


def fault_of(sample: Sample) -> str:
    """What is wrong with a sample, with the remedy; empty if nothing is."""
    if sample.op not in OPS:
        return f"op = {sample.op!r} is not known: use one of {', '.join(OPS)}"
    for name in COLUMNS:
        value = getattr(sample, name)
        if isinstance(value, float) and not isfinite(value):
            return f"{name} = {value} is not a finite number: leave out what was not measured"
        least = 1 if name in ("tp", "num_layers", "batch_size", "num_copies", "repeats") else 0
        if not isinstance(value, str) and value < least:
            return f"{name} = {value} is less than {least}: correct it"
        if isinstance(value, int) and value > MOST_COUNT:
            return f"{name} = {value} is more than {MOST_COUNT:,}: correct it"
    for check in (_time_fault, _word_fault, _shape_fault):
        fault = check(sample)
        if fault:
            return fault
    return ""


def _time_fault(sample: Sample) -> str:
    if sample.latency_s <= 0:
        return f"latency_s = {sample.latency_s} is not above zero: leave out what was not measured"
    if sample.latency_s > LONGEST_S:
        return f"latency_s = {sample.latency_s} is over {LONGEST_S:.0f} s: is it milliseconds? give seconds"
    if sample.latency_s < SHORTEST_S:
        return f"latency_s = {sample.latency_s} is below {SHORTEST_S} s: which unit is it? give seconds"
    if sample.op in COPY_OPS and sample.num_bytes > sample.latency_s * FASTEST_BYTES_PER_S:
        rate = sample.num_bytes / sample.latency_s
        return f"num_bytes = {sample.num_bytes:g} in {sample.latency_s:g} s is {rate:.3g} B/s: is a unit wrong?"
    return ""


def _word_fault(sample: Sample) -> str:
    if sample.memory not in MEMORIES:
        return f"memory = {sample.memory!r}: use one of {', '.join(MEMORIES)}"
    if sample.beside and sample.beside not in OPS:
        return f"beside = {sample.beside!r} is not an op: use one of {', '.join(OPS)}, or leave it empty"
    if sample.quantization not in QUANTIZATIONS:
        return f"quantization = {sample.quantization!r}: use {' or '.join(PRODUCT_FORMATS)}, or leave it empty"
    if sample.kv_cache_dtype not in KV_TYPES:
        return f"kv_cache_dtype = {sample.kv_cache_dtype!r}: use fp8, or leave it empty"
    if sample.graph not in (EAGER, WHOLE, PIECES):
        return f"graph = {sample.graph}: use {EAGER}, {WHOLE} or {PIECES}"
    return ""


def _shape_fault(sample: Sample) -> str:
    if sample.op in TOKEN_OPS:
        if not sample.model:
            return f"model is empty, but op {sample.op!r} needs one: a built-in name or the path of a config.json"
        if sample.decodes and (sample.op not in PASSES or sample.is_decode):
            return (
                f"decodes = {sample.decodes} beside op {sample.op!r}: only prompts and chunks have decodes beside them"
            )
        if sample.decode_context_tokens and not sample.decodes:
            return f"decode_context_tokens = {sample.decode_context_tokens}, but decodes = 0: say how many decode"
        if longest := sample.longest_context_tokens:
            mean = sample.decode_context_tokens if sample.decodes else sample.context_tokens
            if not (sample.decodes or sample.is_decode) or longest < mean:
                return (
                    f"longest_context_tokens = {longest}, but decodes have {mean} in the mean: give the longest, or 0"
                )
        if sample.new_tokens < 1:
            return f"new_tokens = {sample.new_tokens}, but op {sample.op!r} computes tokens: give 1 or more"
    if sample.op in COPY_OPS and sample.num_bytes <= 0:
        return f"num_bytes = {sample.num_bytes}, but op {sample.op!r} moves bytes: give more than 0"
    if sample.op == "all_reduce" and sample.tp < 2:
        return f"tp = {sample.tp}, but an all-reduce needs 2 GPUs or more: give how many took part"
    return ""
