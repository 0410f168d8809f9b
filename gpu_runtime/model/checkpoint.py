"""Weights from a folder of `*.safetensors` in Hugging Face's names; no other format, since this one cannot run code."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gpu_runtime.model.config import DecoderConfig, Experts
from gpu_runtime.model.fp8 import KEPT_ON, Fp8Matrix, Matrix
from gpu_runtime.model.weights import EndWeights, LayerWeights
from sim.errors import UserError
from sim.specs.json_file import read_json_object

INDEX = "model.safetensors.index.json"
PLAIN = ("F32", "F16", "BF16")
"""Element types that keep weights as they are."""
FP8_NAME = "F8_E4M3"


class Checkpoint:
    """The tensors of one model, checked by name, shape and type when opened, read one by one afterwards."""

    def __init__(self, folder: Path, config: DecoderConfig, device: torch.device | str, dtype: torch.dtype) -> None:
        """Look through the files; UserError for one that cannot be read or a tensor missing, misshapen or unknown."""
        self._config = config
        self._device = torch.device(device)
        self._dtype = dtype
        self._shapes = dict(_expected(config))
        self._keeps_fp8 = config.fp8 and self._device.type in KEPT_ON
        self._files: dict[str, Path] = {}
        self._in_fp8: set[str] = set()
        self._scales: dict[str, Path] = {}
        for path in _files(folder):
            self._list(path)
        missing = [name for name in self._shapes if name not in self._files]
        if missing:
            raise UserError(
                f"{folder}: tensor {missing[0]} and {len(missing) - 1} others are missing: "
                "give the whole checkpoint that config.json describes"
            )
        for name in self._in_fp8:
            if _scale_of(name) not in self._scales:
                raise UserError(f"{self._files[name]}: tensor {name} is FP8 and has no {_scale_of(name)}: add it")

    def _list(self, path: Path) -> None:
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                if name not in self._shapes:
                    if self._config.fp8 and self._is_scale(name):
                        self._scales[name] = path
                        continue
                    if name.endswith("rotary_emb.inv_freq") or (name == _HEAD and self._config.tie_word_embeddings):
                        continue
                    raise UserError(f"{path}: tensor {name} is not part of the model that config.json describes")
                if name in self._files:
                    raise UserError(f"{path}: tensor {name} is in {self._files[name].name} too: keep one of them")
                entry = file.get_slice(name)
                in_fp8 = self._config.fp8 and entry.get_dtype() == FP8_NAME and name.startswith("model.layers.")
                if in_fp8:
                    self._in_fp8.add(name)
                if tuple(entry.get_shape()) != self._shapes[name] or not (in_fp8 or entry.get_dtype() in PLAIN):
                    raise UserError(
                        f"{path}: tensor {name} is {entry.get_dtype()} {entry.get_shape()}, expected one of "
                        f"{', '.join(PLAIN)} and {list(self._shapes[name])}: is config.json that of another model?"
                    )
                self._files[name] = path

    def _is_scale(self, name: str) -> bool:
        """Whether it is a weight's scale; what activations are scaled by is not needed."""
        module, _, kind = name.rpartition(".")
        return kind in ("weight_scale", "input_scale") and f"{module}.weight" in self._shapes

    def layer(self, index: int) -> LayerWeights:
        """The weights of layer `index`, on the device."""
        config, layer = self._config, f"model.layers.{index}."
        attention = layer + "self_attn."
        projections = [f"{attention}{which}_proj" for which in "qkv"]
        return LayerWeights(
            input_norm=self._read(layer + "input_layernorm.weight"),
            qkv=self._matrix(*(f"{name}.weight" for name in projections)),
            qkv_bias=self._read(*(f"{name}.bias" for name in projections)) if config.qkv_bias else None,
            q_norm=self._read(attention + "q_norm.weight") if config.qk_norm else None,
            k_norm=self._read(attention + "k_norm.weight") if config.qk_norm else None,
            output=self._matrix(attention + "o_proj.weight"),
            post_norm=self._read(layer + "post_attention_layernorm.weight"),
            **self._mlp(layer, config.experts),
        )

    def _mlp(self, layer: str, experts: Experts | None) -> dict[str, Any]:
        if experts is None:
            gate, up, down = (f"{layer}mlp.{which}_proj.weight" for which in ("gate", "up", "down"))
            return {"gate_up": self._matrix(gate, up), "down": self._matrix(down)}
        router, names = _expert_names(layer, experts)
        shape = (experts.num, -1, self._config.hidden_size)
        return {
            "gate_up": self._read(*(name for gate, up, _ in names for name in (gate, up))).view(shape),
            "down": self._read(*(down for _, _, down in names)).view(experts.num, -1, experts.width),
            "router": self._read(router),
        }

    def ends(self) -> EndWeights:
        """Embedding, final norm and head."""
        embedding = self._read(_EMBEDDING)
        head = embedding if self._config.tie_word_embeddings else self._read(_HEAD)
        return EndWeights(embedding, self._read(_NORM), head)

    def _matrix(self, *names: str) -> Matrix:
        """Weights below one another: FP8 where all are, on a device that computes with it."""
        if not self._keeps_fp8 or not self._in_fp8.issuperset(names):
            return self._read(*names)
        data, scales = zip(*map(self._scaled, names), strict=True)
        return Fp8Matrix(torch.cat(data).to(self._device), torch.cat(scales).to(self._device))

    def _scaled(self, name: str) -> tuple[Tensor, Tensor]:
        """FP8 weights [out, in] and their scales [out, 1], fp32."""
        data, scale = self._tensor(name), self._tensor(_scale_of(name), self._scales).float()
        if scale.numel() not in (1, len(data)):
            raise UserError(
                f"{self._scales[_scale_of(name)]}: tensor {_scale_of(name)} is {list(scale.shape)}, expected one scale "
                f"or {len(data)}: is it of blocks, which the runtime does not compute?"
            )
        return data, scale.reshape(-1, 1).expand(len(data), 1)

    def _tensor(self, name: str, files: Mapping[str, Path] | None = None) -> Tensor:
        with _opened((files or self._files)[name]) as file:
            return file.get_tensor(name)

    def _read(self, *names: str) -> Tensor:
        """The tensors of these names below one another, converted."""
        rows = [self._shapes[name][0] for name in names]
        whole = torch.empty((sum(rows), *self._shapes[names[0]][1:]), device=self._device, dtype=self._dtype)
        for name, part in zip(names, whole.split(rows), strict=True):
            if name in self._in_fp8:
                data, scales = self._scaled(name)
                part.copy_(data.float() * scales)
            else:
                part.copy_(self._tensor(name))
        return whole


def _scale_of(name: str) -> str:
    return name + "_scale"


_EMBEDDING = "model.embed_tokens.weight"
_NORM = "model.norm.weight"
_HEAD = "lm_head.weight"


def _expert_names(layer: str, experts: Experts) -> tuple[str, list[tuple[str, str, str]]]:
    """The router's matrix of a layer, and gate, up and down of each expert."""
    mlp = layer + ("block_sparse_moe." if experts.named_as_mixtral else "mlp.")
    parts = ("w1", "w3", "w2") if experts.named_as_mixtral else ("gate_proj", "up_proj", "down_proj")
    names = [[f"{mlp}experts.{number}.{part}.weight" for part in parts] for number in range(experts.num)]
    return mlp + "gate.weight", [(gate, up, down) for gate, up, down in names]


def _expected(config: DecoderConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the model and its shape."""
    h, f = config.hidden_size, config.intermediate_size
    widths = {"q": config.q_size, "k": config.kv_size, "v": config.kv_size}
    yield _EMBEDDING, (config.vocab_size, h)
    yield _NORM, (h,)
    if not config.tie_word_embeddings:
        yield _HEAD, (config.vocab_size, h)
    for layer in (f"model.layers.{index}." for index in range(config.num_layers)):
        yield layer + "input_layernorm.weight", (h,)
        yield layer + "post_attention_layernorm.weight", (h,)
        for which, width in widths.items():
            yield f"{layer}self_attn.{which}_proj.weight", (width, h)
            if config.qkv_bias:
                yield f"{layer}self_attn.{which}_proj.bias", (width,)
            if config.qk_norm and which != "v":
                yield f"{layer}self_attn.{which}_norm.weight", (config.head_dim,)
        yield layer + "self_attn.o_proj.weight", (h, config.q_size)
        if config.experts is not None:
            router, names = _expert_names(layer, config.experts)
            yield router, (config.experts.num, h)
            for gate, up, down in names:
                yield from ((gate, (config.experts.width, h)), (up, (config.experts.width, h)))
                yield down, (h, config.experts.width)
            continue
        yield layer + "mlp.gate_proj.weight", (f, h)
        yield layer + "mlp.up_proj.weight", (f, h)
        yield layer + "mlp.down_proj.weight", (h, f)


def _files(folder: Path) -> list[Path]:
    """The files of the model: those its index names, else all beside `config.json`."""
    index = folder / INDEX
    if not index.exists():
        found = sorted(folder.glob("*.safetensors"))
        if not found:
            raise UserError(f"{folder}: no *.safetensors file: give a folder with the model's weights in that format")
        return found
    names = read_json_object(index).get("weight_map")
    if not isinstance(names, dict) or not names or any(not _is_plain(name) for name in names.values()):
        raise UserError(f"{index}: field weight_map must name *.safetensors files of the same folder: correct it")
    return [folder / name for name in sorted(set(names.values()))]


def _is_plain(name: object) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors") and Path(name).name == name


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error}): fetch it again") from error
