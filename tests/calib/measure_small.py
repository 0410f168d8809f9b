"""A model small enough to calibrate in seconds, and a machine to plan for."""

import json

from calib.measure.capacity import Capacity

GIB = 2**30
SMALL = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 160, "vocab_size": 500, "max_position_embeddings": 512,
}  # fmt: skip
GPU = Capacity(
    device_bytes=44 * GIB, host_bytes=64 * GIB, cache_bytes=96 * 2**20, num_gpus=2, flops_per_s=2e13,
    bytes_per_s=2e11, graphs=True,
)  # fmt: skip


def write_config(folder, **changes):
    """A folder with a small model's config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SMALL | changes))
    return folder


def settings(**changes):
    return {"device": "a chip", "seed": "0"} | changes
