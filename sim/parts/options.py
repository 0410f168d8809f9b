"""`option`: a field of an options dataclass with the text that `--help` shows."""

from dataclasses import field
from typing import Any

MOST_GIB = 1e9
"""Larger than any store, and still countable in bytes."""


def option(default: Any, help_text: str) -> Any:  # noqa: ANN401 - a dataclass default
    """An option of a policy or a part."""
    return field(default=default, metadata={"help": help_text, "metavar": None})


def vllm_option(default: Any, help_text: str) -> Any:  # noqa: ANN401 - a dataclass default
    """An option that vLLM has, whose flag is spelled as vLLM spells it: without the system's name before it."""
    return field(default=default, metadata={"help": help_text, "metavar": None, "plain": True})
