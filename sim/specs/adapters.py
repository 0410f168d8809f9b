"""Memory of adapters (LoRA) on a GPU, as vLLM 0.33 takes it when it starts (`vllm/lora/layers`)."""

from sim.specs.model_spec import ModelSpec


def adapter_bytes(model: ModelSpec, tp: int, rank: int) -> float | None:
    """Bytes per GPU of one slot: two matrices of `rank` beside each projection, in the model's own type.

    Columns of outputs are split over `tp` GPUs, and rows of inputs where the projection's are; the other side is whole
    on each. Some models have adapters beside embeddings and head as well, whole on each GPU (`ModelSpec.adapted`). None
    where it is not known what has them.
    """
    if not model.adapted or model.num_stored_layers < model.num_layers:
        return None
    hidden, heads = model.hidden_size, model.num_heads * model.head_dim / tp
    width = model.intermediate_size / tp
    inputs = 2 if model.gated_mlp else 1
    # Queries, keys, values; what attention gives; into the MLP; out of it.
    elements = 3 * hidden + heads + model.kv_elements_per_token_layer(tp)
    elements += heads + hidden
    elements += inputs * (hidden + width)
    elements += width + hidden
    elements *= model.num_layers
    if model.adapted == "all":
        elements += 2 * (model.vocab_size + hidden)
    return rank * elements * model.dtype_bytes
