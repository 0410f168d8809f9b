"""Models by name or by Hugging Face config: `load_model`."""

from pathlib import Path

from sim.specs.hf_config import read_hf_config
from sim.specs.json_file import nearest
from sim.specs.model_spec import MlaSpec, ModelSpec, MoeSpec

__all__ = ["MlaSpec", "ModelSpec", "MoeSpec", "built_in_models", "load_model", "read_hf_config"]

BUILT_IN = Path(__file__).parent / "models"


def built_in_models() -> list[str]:
    """Names that `load_model` knows without a path."""
    return sorted(path.stem for path in BUILT_IN.glob("*.json"))


def load_model(name_or_path: str) -> ModelSpec:
    """The spec of a built-in model, or of a Hugging Face `config.json` (or the folder that holds one).

    Raises:
        UserError: unknown name (with the nearest right one), or a config that cannot be sized with certainty.
    """
    built_in = BUILT_IN / f"{name_or_path.lower()}.json"
    if built_in.parent == BUILT_IN and built_in.is_file():
        return read_hf_config(built_in, name=built_in.stem)
    if not Path(name_or_path).exists():
        raise nearest(name_or_path, built_in_models(), "model")
    return read_hf_config(Path(name_or_path))
