"""`option`: a field of an options dataclass with the text that `--help` shows."""

from dataclasses import field
from typing import Any


def option(default: Any, help_text: str) -> Any:  # noqa: ANN401 - a dataclass default
    """An option of a policy or a part."""
    return field(default=default, metadata={"help": help_text, "metavar": None})
