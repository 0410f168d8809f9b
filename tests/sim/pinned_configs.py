"""Configs of models and files of GPUs as they are pinned: what is read of those shipped with every field changed."""

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from goldens import digest, rounded

from sim.cost.engine_profile import SHIPPED as ENGINES
from sim.cost.engine_profile import load_engine_profile
from sim.cost.profile import read_profile
from sim.errors import UserError
from sim.specs import hardware
from sim.specs.hf_families import FAMILIES, REFUSED, WRAPPERS
from sim.specs.hf_fields import KNOWN_SHAPES
from sim.specs.models import BUILT_IN, read_hf_config

MODELS = (
    "deepseek-v2-lite", "gemma-2-9b", "gemma-3-27b", "gpt-oss-20b", "kimi-k2.5", "llama-3.1-8b", "minimax-m2.5-nvfp4",
    "minimax-m2.5", "mistral-7b-v0.1", "mixtral-8x7b-v0.1", "opt-13b", "qwen2.5-7b", "qwen3-30b-a3b", "qwen3.5-35b-a3b",
)  # fmt: skip
OF_OTHERS = ("llama-3.1-8b", "deepseek-v2-lite", "mixtral-8x7b-v0.1", "qwen3.5-35b-a3b")
"""Models that are given the fields of all others too."""
MORE = {"bias", "dtype", "gate_size", "max_position_embeddings", "model_type", "tie_word_embeddings", "torch_dtype",
        "use_cache", "vocab_size", "yoco"}  # fmt: skip
VALUES = (None, 0, 1, 2, 64, 10**9, True, False, "x", 0.5, [1, 0])
WORDS = {
    "model_type": (*FAMILIES, *REFUSED, *sorted(WRAPPERS)),
    "torch_dtype": ("torch.float16", "float32", "float64", "half"), "dtype": ("bfloat16", "float8"),
    "mamba_ssm_dtype": ("float32", "bfloat16", "float64"),
}  # fmt: skip
"""What else some fields may say."""
GROUP = {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 8, "group_size": 32}}
QUANTIZATIONS: tuple[dict[str, Any], ...] = (
    {"quant_method": "fp8", "weight_block_size": [128, 64], "ignored_layers": ["lm_head", "model.layers.0.self_attn"]},
    {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["re:.*o_proj", "*layers.1.*"]},
    {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn"]},
    {"quant_method": "gptq", "bits": 4, "group_size": 128}, {"quant_method": "awq", "bits": 8, "group_size": -1},
    {"quant_method": "bitsandbytes", "load_in_4bit": True},
    {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": {"num_bits": 8}, "ignore": ["q_proj"]},
    {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["*mlp*"]},
    {"quant_method": "compressed-tensors", "config_groups": {"group_0": GROUP}},
    {
        "quant_method": "compressed-tensors", "kv_cache_scheme": "nvfp4",
        "config_groups": {"group_0": GROUP | {"weights": {"type": "int", "num_bits": 4, "group_size": 32}}},
    },
    {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"], "weights": {"type": "float", "num_bits": 4},
                "input_activations": {"type": "float", "num_bits": 4},
            }
        },
    },
)  # fmt: skip


VARYING = re.compile(r"field \S+|\{.*?\}|(= |value ).*?(: |,? (?=must|is|cannot|differs|does))|\d+|None")
"""What like refusals differ in."""


class Reader:
    """Reads changed files, and keeps what was refused."""

    def __init__(self, folder: Path, read: Callable[[Path], msgspec.Struct], name: str) -> None:
        self.path, self.read = folder / name, read
        self.path.parent.mkdir(exist_ok=True)
        self.refused: set[str] = set()

    def of(self, data: object) -> object:
        """What is read, or why not."""
        self.path.write_text(json.dumps(data))
        try:
            return rounded(msgspec.to_builtins(self.read(self.path)))
        except UserError as error:
            words = str(error).replace(str(self.path), "FILE")
            self.refused.add(words)
            return words

    def told(self) -> Iterator[str]:
        """Every kind of refusal, and how many there are, as one field's first value has it."""
        kinds: dict[str, list[str]] = defaultdict(list)
        for words in sorted(self.refused):
            kinds[VARYING.sub("", words)].append(words)
        yield from (f"{found[0]} ({len(found)})" for found in kinds.values())


def with_field(data: object, path: tuple[str, ...], value: object) -> object:
    """The same with a field, maybe of an inner object, of another value; `...`: without it."""
    if not isinstance(data, dict):
        return data
    first, *rest = path
    if rest:
        return data | {first: with_field(data.get(first), tuple(rest), value)}
    return {key: old for key, old in data.items() if key != first} | ({} if value is ... else {first: value})


def configs() -> Iterator[str]:
    """Of every family a shipped config, its fields and those of others with other values."""
    with tempfile.TemporaryDirectory() as folder:
        reader = Reader(Path(folder), read_hf_config, "small_config.json")
        for name in MODELS:
            config = json.loads((BUILT_IN / f"{name}.json").read_text())
            inner = "text_config" in config
            own = config["text_config"] if inner else config
            shape = {field: min(own[field], 12) for field in ("num_hidden_layers",) if field in own}
            lists = {field: value[:12] for field, value in own.items() if isinstance(value, list) and len(value) > 12}
            for field, value in (shape | lists).items():
                config = with_field(config, ("text_config", field) if inner else (field,), value)
            yield f"{name}: {digest(reader.of(config))}"
            chosen = KNOWN_SHAPES if name in OF_OTHERS else KNOWN_SHAPES & own.keys()
            for field in sorted(chosen | MORE):
                path = ("text_config", field) if inner else (field,)
                found = [reader.of(with_field(config, path, ...))]
                layers = own.get("num_hidden_layers", 12)
                for value in (*VALUES, layers // 3 + 1, ["full_attention"] * 12, *WORDS.get(field, ())):
                    found.append(reader.of(with_field(config, path, value)))
                yield f"{name} {field}: {digest(found)}"
        yield from reader.told()


def quantized() -> Iterator[str]:
    """Of models with and without experts, and with states, whose checkpoints are quantised in every way."""
    with tempfile.TemporaryDirectory() as folder:
        reader = Reader(Path(folder), read_hf_config, "small/config.json")
        for name in ("llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v2-lite", "qwen3.5-35b-a3b"):
            config = json.loads((BUILT_IN / f"{name}.json").read_text())
            place = ("text_config",) if "text_config" in config else ()
            for quantization in QUANTIZATIONS:
                found = [reader.of(with_field(config, (*place, "quantization_config"), quantization))]
                if not place:
                    for field in quantization:
                        for value in (..., None, 0, 3, 4, 8, "int8", [0, 1], ["a", 1], ["re:("], [64, 64], {"a": 1}):
                            changed = with_field(quantization, (field,), value)
                            found.append(reader.of(config | {"quantization_config": changed}))
                yield f"{name} {list(quantization.values())}: {digest(found)}"
            beside = Path(folder) / "small/hf_quant_config.json"
            for quantization in ({"quant_algo": "FP8"}, {"quant_algo": "INT2"}, [1], None):
                beside.write_text(json.dumps({"quantization": quantization}))
                yield f"{name}, beside it {quantization}: {digest(reader.of(config))}"
            beside.unlink()
        yield from reader.told()


def files() -> Iterator[str]:
    """Of GPUs, engines and profiles: every field absent, of other types, and at its limits."""
    shipped: dict[str, tuple[Path, Callable[[Path], msgspec.Struct]]] = {
        "gpu": (Path(hardware.__file__).parent / "gpus/h100.json", lambda path: hardware.load_hardware(str(path))),
        "engine": (ENGINES / "vllm-v1.json", lambda path: load_engine_profile(str(path))),
        "profile": (Path(__file__).parent / "golden/l20-profile.json", read_profile),
    }
    with tempfile.TemporaryDirectory() as folder:
        for kind, (path, read) in shipped.items():
            data = json.loads(path.read_text())
            reader = Reader(Path(folder), read, "file.json")
            paths = [(field,) for field in [*data, "other"]]
            inner = {field: [*value, "other"] for field, value in data.items() if isinstance(value, dict)}
            paths += [(field, name) for field, names in inner.items() for name in names]
            paths += [
                ("constants", name, field) for name, value in data.get("constants", {}).items() for field in value
            ]
            values = (
                ...,
                None,
                0,
                1,
                -1,
                0.5,
                1.5,
                1e-9,
                3601.0,
                1e25,
                "x",
                "",
                [1, 2],
                [2, 1],
                [[1, 0.5], [2, 1.5]],
                {},
            )
            found = defaultdict(list)
            for place in paths:
                found[place[0]] += [reader.of(with_field(data, place, value)) for value in values]
            yield from (f"{kind} {field}: {len(read)} {digest(read)}" for field, read in found.items())
            yield from reader.told()


PINNED = {"configs": configs, "quantized": quantized, "files": files}
