"""Models by name or by Hugging Face config: `load_model`."""

from pathlib import Path

from sim.specs.hf_config import read_hf_config
from sim.specs.json_file import built_in_names, find_file
from sim.specs.model_spec import MlaSpec, ModelSpec, MoeSpec

__all__ = ["MlaSpec", "ModelSpec", "MoeSpec", "built_in_models", "load_model", "read_hf_config"]

BUILT_IN = Path(__file__).parent / "models"


def built_in_models() -> list[str]:
    """Names that `load_model` knows without a path."""
    return built_in_names(BUILT_IN)


def load_model(name_or_path: str) -> ModelSpec:
    """The spec of a built-in model, or of a Hugging Face `config.json` (or the folder that holds one).

    Raises:
        UserError: unknown name (with the nearest right one), or a config that cannot be sized with certainty.
    """
    return read_hf_config(find_file(name_or_path, BUILT_IN, "model"))
