"""`option`: a field of an options dataclass with the text that `--help` shows, and without what it does nothing."""

from collections.abc import Iterable, Iterator
from dataclasses import field, fields
from typing import Any, NamedTuple

from sim.errors import UserError

MOST_GIB = 1e9
"""Larger than any store, and still countable in bytes."""


class Only:
    """When an option does anything: where attribute `name` of its options is one of `values`, or true without any."""

    def __init__(self, name: str, *values: str, told: str = "") -> None:
        self.name, self.values = name, values
        shown = told or name.replace("_", "-")
        self.told = f"{shown}={' or '.join(values)}" if values else shown

    def holds(self, options: object) -> bool:
        """Whether it does, of those options."""
        given = getattr(options, self.name)
        return given in self.values if self.values else bool(given)


def option(default: Any, help_text: str, *, only: Only | None = None) -> Any:  # noqa: ANN401 - a dataclass default
    """An option of a policy or a part."""
    return field(default=default, metadata={"help": help_text, "metavar": None, "only": only})


def vllm_option(default: Any, help_text: str, *, only: Only | None = None) -> Any:  # noqa: ANN401 - a dataclass default
    """An option that vLLM has, whose flag is spelled as vLLM spells it: without the system's name before it."""
    return field(default=default, metadata={"help": help_text, "metavar": None, "plain": True, "only": only})


class Conditional(NamedTuple):
    """An option that was given and acts only where another says so."""

    policy: str
    name: str
    acts: bool
    told: str
    """That it does nothing, and without what."""


def conditional_options(policy: str, several: Iterable[Any]) -> Iterator[Conditional]:
    """Those of the options that are not their defaults."""
    for options in several:
        for each in fields(options):
            only, value = each.metadata.get("only"), getattr(options, each.name)
            if only is not None and value != each.default:
                told = f"{each.name.replace('_', '-')}={value} does nothing without {only.told}"
                yield Conditional(policy, each.name, only.holds(options), told)


def refuse_idle(given: Iterable[Conditional]) -> None:
    """UserError for an option that acts in none of the runs it was given for."""
    given = tuple(given)
    acting = {(one.policy, one.name) for one in given if one.acts}
    for one in given:
        if not one.acts and (one.policy, one.name) not in acting:
            raise UserError(f"--policy {one.policy}: {one.told}; give that, or leave it out")
