"""Models by name or by Hugging Face config: `load_model`."""

from pathlib import Path

from sim.specs.hf_config import read_hf_config
from sim.specs.json_file import built_in_names, find_file, once_of
from sim.specs.model_spec import MlaSpec, ModelSpec, MoeSpec

__all__ = ["MlaSpec", "ModelSpec", "MoeSpec", "built_in_models", "load_model", "read_hf_config"]

BUILT_IN = Path(__file__).parent / "models"
HUB_IDS = {
    "deepseek-v2-lite": ("deepseek-ai/DeepSeek-V2-Lite",),
    "deepseek-v3": ("deepseek-ai/DeepSeek-V3",),
    "deepseek-v3.2": ("deepseek-ai/DeepSeek-V3.2", "deepseek-ai/DeepSeek-V3.2-Exp"),
    "gemma-2-9b": ("google/gemma-2-9b-it", "google/gemma-2-9b"),
    "gemma-3-27b": ("google/gemma-3-27b-it", "google/gemma-3-27b-pt"),
    "gpt-oss-20b": ("openai/gpt-oss-20b",),
    "gpt-oss-120b": ("openai/gpt-oss-120b",),
    "llama-2-7b": ("meta-llama/Llama-2-7b-hf",),
    "llama-2-13b": ("meta-llama/Llama-2-13b-hf",),
    "llama-2-70b": ("meta-llama/Llama-2-70b-hf",),
    "llama-3.1-8b": ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
    "llama-3.1-70b": ("meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.1-70B"),
    "llama-3.1-405b": ("meta-llama/Llama-3.1-405B-Instruct", "meta-llama/Llama-3.1-405B"),
    "minimax-m2.5": ("MiniMaxAI/MiniMax-M2.5",),
    "mistral-7b-v0.1": ("mistralai/Mistral-7B-v0.1",),
    "mixtral-8x7b-v0.1": ("mistralai/Mixtral-8x7B-v0.1",),
    "opt-13b": ("facebook/opt-13b",),
    "qwen2.5-7b": ("Qwen/Qwen2.5-7B",),
    "qwen3-0.6b": ("Qwen/Qwen3-0.6B",),
    "qwen3-8b": ("Qwen/Qwen3-8B",),
    "qwen3-14b": ("Qwen/Qwen3-14B",),
    "qwen3-32b": ("Qwen/Qwen3-32B",),
    "qwen3-30b-a3b": ("Qwen/Qwen3-30B-A3B",),
    "qwen3-235b-a22b": ("Qwen/Qwen3-235B-A22B",),
    "yi-34b-200k": ("01-ai/Yi-34B-200K",),
}
"""Models that ship, and what Hugging Face's hub calls checkpoints of their shape, the one that a server is told first:
ids, not owners' names alone, since what others publish under a like name may be quantised or longer."""
HUB = {identifier.lower(): name for name, identifiers in HUB_IDS.items() for identifier in identifiers}
"""Ids of the hub, in small letters, and what they are called here."""


def built_in_models() -> list[str]:
    """Names that `load_model` knows without a path."""
    return built_in_names(BUILT_IN)


def load_model(name_or_path: str) -> ModelSpec:
    """The spec of a built-in model, by its name or its id on the hub, or of a Hugging Face `config.json` (or the folder
    that holds one: a folder of that name comes before the hub's).

    Raises:
        UserError: unknown name (with the nearest right one), or a config that cannot be sized with certainty.
    """
    name = HUB.get(name_or_path.lower(), name_or_path)
    if name != name_or_path and Path(name_or_path).exists():
        name = name_or_path
    return _read(find_file(name, BUILT_IN, "model"))


_read = once_of(BUILT_IN, read_hf_config)
