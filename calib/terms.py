"""`Terms`: what a sample computes and moves, as the roofline counts it. Samples in, arrays of FLOPs and bytes out.

The counts are `ModelSpec`'s; `sim.cost.roofline.RooflineCost` prices the same ones, and a test holds the two together.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from calib.kernel_fit import KernelTerms
from calib.robust import Array
from calib.samples import EAGER, PIECES, Sample
from sim.cost.model import ACTIVATION_BYTES
from sim.errors import UserError
from sim.specs.json_file import built_in_names
from sim.specs.kv_format import KV_DTYPES
from sim.specs.models import BUILT_IN, ModelSpec, load_model

NO_ATTENTION = (0.0,) * 10 + (1.0, 1.0)
"""`Terms.row_flops` to `Terms.heads_per_kv` of what attends to nothing."""


@dataclass(frozen=True)
class Terms(KernelTerms):
    """Per sample and per GPU of its group, arrays of shape (samples,).

    Attributes:
        tokens: rows of the matrix products; 0 where none ran, and of mixtures of experts, whose experts have fewer.
        linear_flops: projections and MLP of the timed layers.
        weight_bytes, activation_bytes: what those read of weights, and read and write of activations.
        quantized_bytes: what quantising their inputs reads and writes.
        elementwise_bytes: what lies between them reads and writes, where it was timed.
        row_flops, new_tokens: attention of prompts and chunks for each row of queries, and rows of each sequence.
        decode_row_flops, decodes: the same of those that decode beside them, a row each, and how many there are.
        walk_flops: one row of one head over the longest context of such a sample.
        kv_bytes, padding_bytes: KV cache read by decodes, and one token of each of them.
        head_kv_bytes: what one KV head of one layer has of `kv_bytes`.
        longest_bytes, longest_flops: what one KV head of the timed layers has, and one row of one head computes, of the
            longest decode beyond their mean; beside prompts, beyond the longest of these too.
        kv_heads, heads_per_kv: heads of keys and values on a GPU, and query heads that share one; 0 of the latter for
            latents, whose kernels have other tiles.
        head_flops, head_bytes: LM head, where it was timed.
        reduced_bytes, gpus: per all-reduce of a whole step, two a layer; none where a single GPU's layers were timed.
        layers, elementwise_layers, steps: how often the overhead per layer and per step was paid.
        step_sequences: sequences of a whole step.
        eager_layers, pieced_layers: layers whose kernels the host launched one by one, and those between whose graphs
            it launched attention.
    """

    tokens: Array
    linear_flops: Array
    weight_bytes: Array
    activation_bytes: Array
    quantized_bytes: Array
    elementwise_bytes: Array
    row_flops: Array
    new_tokens: Array
    decode_row_flops: Array
    decodes: Array
    walk_flops: Array
    kv_bytes: Array
    padding_bytes: Array
    head_kv_bytes: Array
    longest_bytes: Array
    longest_flops: Array
    kv_heads: Array
    heads_per_kv: Array
    head_flops: Array
    head_bytes: Array
    reduced_bytes: Array
    gpus: Array
    layers: Array
    elementwise_layers: Array
    steps: Array
    step_sequences: Array
    eager_layers: Array
    pieced_layers: Array

    @property
    def attention_flops(self) -> Array:
        """Attention of prompts and chunks over query-context pairs."""
        return self.row_flops * self.new_tokens

    def __len__(self) -> int:
        return len(self.layers)


def load_models(samples: Iterable[Sample], folder: Path) -> dict[str, ModelSpec]:
    """The spec of every model the samples name; paths are seen from the samples' folder. UserError for an unknown."""
    found: dict[str, ModelSpec] = {}
    for name in sorted({sample.model for sample in samples if sample.model}):
        beside = folder / name
        known = name.lower() in built_in_names(BUILT_IN)
        found[name] = load_model(str(beside) if not known and beside.exists() else name)
    return found


def terms_of(samples: Sequence[Sample], models: Mapping[str, ModelSpec]) -> Terms:
    """The terms of samples whose op computes tokens."""
    rows = [_row(sample, _as_timed(models[sample.model], sample)) for sample in samples]
    columns = np.array(rows, dtype=np.float64).reshape(len(rows), len(fields(Terms))).T
    return Terms(*columns)


def _as_timed(model: ModelSpec, sample: Sample) -> ModelSpec:
    """The model in the type its weights had."""
    if sample.dtype_bytes not in (0.0, model.dtype_bytes):
        model = model.with_dtype(sample.dtype_bytes)
    if sample.quantization:
        model = model.with_quantization(sample.quantization)
    return model.with_kv_dtype(KV_DTYPES[sample.kv_cache_dtype]) if sample.kv_cache_dtype else model


def _row(sample: Sample, model: ModelSpec) -> tuple[float, ...]:
    tp, layers = sample.tp, sample.num_layers
    tokens = sample.tokens + sample.decodes
    if model.moe and layers != model.num_layers:
        raise UserError(f"model {model.name}: samples of {layers} layers cannot be priced: its layers differ; time all")
    share = layers / model.num_layers
    elementwise = share * tokens * model.elementwise_bytes_per_token(tp)
    head_rows = sample.batch_size + sample.decodes if sample.op in ("step", "lm_head") else 0
    head = (
        head_rows * model.head_flops_per_token / tp,
        (model.head_weight_bytes + head_rows * model.head_activation_bytes_per_token) / tp if head_rows else 0.0,
    )
    if sample.op == "lm_head":
        return (*[0.0] * 6, *NO_ATTENTION, *head, 0.0, 1.0, *[0.0] * 6)
    if sample.op == "elementwise":
        return (*[0.0] * 5, elementwise, *NO_ATTENTION, *head, 0.0, 1.0, 0.0, float(layers), *[0.0] * 4)
    if (model.kv_layers or model.gdn or model.indexer) and sample.op != "linear":
        what = "layers differ in their KV, or select of it"
        raise UserError(f"model {model.name}: samples cannot be priced: {what}; time another model")
    if model.mla and (sample.is_decode or sample.decodes):
        raise UserError(f"model {model.name}: decodes over latents cannot be priced: they compute as well as read")
    is_whole = sample.op not in ("products", "linear")
    return (
        0.0 if model.moe else float(tokens),
        share * tokens * model.linear_flops_per_token / tp,
        share * model.linear_weight_bytes_read(tokens) / tp,
        share * tokens * model.linear_activation_bytes_per_token(tp),
        share * tokens * model.quantised_input_bytes_per_token(tp),
        elementwise if is_whole else 0.0,
        *(_attention(sample, model, share) if sample.op != "linear" else NO_ATTENTION),
        *head,
        tokens * model.hidden_size * ACTIVATION_BYTES if sample.op == "step" else 0.0,
        float(tp) if sample.op == "step" else 1.0,
        float(layers),
        float(layers) if is_whole else 0.0,
        1.0 if sample.op == "step" else 0.0,
        float(sample.batch_size + sample.decodes) if sample.op == "step" else 0.0,
        float(layers) if sample.graph == EAGER and is_whole else 0.0,
        float(layers) if sample.graph == PIECES and is_whole else 0.0,
    )


def _attention(sample: Sample, model: ModelSpec, share: float) -> tuple[float, ...]:
    """`row_flops` to `heads_per_kv` of a sample."""
    tp, heads = sample.tp, model.num_heads / sample.tp
    pair_flops = share * model.attention_flops_per_token_pair / tp
    decodes = sample.batch_size if sample.is_decode else sample.decodes
    context = (sample.context_tokens if sample.is_decode else sample.decode_context_tokens) + 1
    layer_bytes, kv_heads = model.kv_bytes_per_token_layer(tp), max(1, model.num_kv_heads // tp)
    token_bytes = sample.num_layers * layer_bytes
    chunks = 0 if sample.is_decode else sample.batch_size
    longest = max((sample.context_tokens + sample.new_tokens) if chunks else 0, context if decodes else 0)
    beyond = max(0, sample.longest_context_tokens + 1 - longest) if sample.longest_context_tokens else 0
    return (
        chunks * (sample.context_tokens + (sample.new_tokens + 1) / 2) * pair_flops,
        float(sample.new_tokens),
        decodes * context * pair_flops if chunks else 0.0,
        float(decodes),
        longest * pair_flops / heads if chunks else 0.0,
        decodes * context * token_bytes,
        decodes * token_bytes,
        decodes * context * layer_bytes / kv_heads,
        beyond * token_bytes / kv_heads,
        beyond * pair_flops / heads,
        float(kv_heads),
        0.0 if model.mla else heads / kv_heads,
    )
