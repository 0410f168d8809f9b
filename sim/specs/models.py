"""Models by name or by Hugging Face config: `load_model`."""

from pathlib import Path

from sim.specs.hf_config import read_hf_config
from sim.specs.json_file import built_in_names, find_file
from sim.specs.model_spec import MlaSpec, ModelSpec, MoeSpec

__all__ = ["MlaSpec", "ModelSpec", "MoeSpec", "built_in_models", "load_model", "read_hf_config"]

BUILT_IN = Path(__file__).parent / "models"
HUB = {
    "deepseek-ai/deepseek-v2-lite": "deepseek-v2-lite",
    "deepseek-ai/deepseek-v3": "deepseek-v3",
    "google/gemma-2-9b": "gemma-2-9b",
    "google/gemma-3-27b-it": "gemma-3-27b",
    "google/gemma-3-27b-pt": "gemma-3-27b",
    "openai/gpt-oss-20b": "gpt-oss-20b",
    "openai/gpt-oss-120b": "gpt-oss-120b",
    "meta-llama/llama-2-7b-hf": "llama-2-7b",
    "meta-llama/llama-2-13b-hf": "llama-2-13b",
    "meta-llama/llama-2-70b-hf": "llama-2-70b",
    "meta-llama/llama-3.1-8b": "llama-3.1-8b",
    "meta-llama/llama-3.1-8b-instruct": "llama-3.1-8b",
    "meta-llama/llama-3.1-70b": "llama-3.1-70b",
    "meta-llama/llama-3.1-70b-instruct": "llama-3.1-70b",
    "meta-llama/llama-3.1-405b": "llama-3.1-405b",
    "mistralai/mistral-7b-v0.1": "mistral-7b-v0.1",
    "mistralai/mixtral-8x7b-v0.1": "mixtral-8x7b-v0.1",
    "facebook/opt-13b": "opt-13b",
    "qwen/qwen2.5-7b": "qwen2.5-7b",
    "qwen/qwen3-0.6b": "qwen3-0.6b",
    "qwen/qwen3-8b": "qwen3-8b",
    "qwen/qwen3-14b": "qwen3-14b",
    "qwen/qwen3-32b": "qwen3-32b",
    "qwen/qwen3-30b-a3b": "qwen3-30b-a3b",
    "qwen/qwen3-235b-a22b": "qwen3-235b-a22b",
    "01-ai/yi-34b-200k": "yi-34b-200k",
}
"""Models as Hugging Face's hub calls them, in small letters, and what they are called here: ids, not owners' names
alone, since what others publish under a like name may be quantised or longer."""


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
    return read_hf_config(find_file(name, BUILT_IN, "model"))
