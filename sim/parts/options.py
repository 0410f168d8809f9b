"""`option`: a field of an options dataclass with the text that `--help` shows, and what is asked of its value."""

from collections.abc import Iterable, Iterator
from dataclasses import field, fields
from functools import partial
from math import inf
from typing import Any, NamedTuple

from sim.errors import UserError

GIB = 1 << 30
MOST_GIB = 1e9
"""Larger than any store, and still countable in bytes."""


class Only:
    """When an option does anything: where attribute `name` of its options is one of `values`, or true without any.

    `of_model`: the attribute is the model's.
    """

    def __init__(self, name: str, *values: str, told: str = "", of_model: bool = False) -> None:
        self.name, self.values, self.of_model = name, values, of_model
        shown = told or name.replace("_", "-")
        self.told = f"{shown}={' or '.join(values)}" if values else shown

    def holds(self, options: object, model: object) -> bool:
        """Whether it does, of those options and with that model."""
        given = getattr(model if self.of_model else options, self.name)
        return given in self.values if self.values else bool(given)


def option(
    default: Any,  # noqa: ANN401 - a dataclass default
    help_text: str,
    *,
    within: tuple[float, float] | None = None,
    only: Only | None = None,
    plain: bool = False,
) -> Any:  # noqa: ANN401
    """An option of a policy or a part.

    `within`: its least and its most, which `CheckedOptions` refuses to leave. `plain`: its flag has no system's name.
    """
    about = {"help": help_text, "metavar": None, "within": within, "only": only, "plain": plain}
    return field(default=default, metadata=about)


vllm_option = partial(option, plain=True)
"""An option that vLLM has: its flag is spelled as vLLM spells it."""


def with_default(owner: type, name: str, default: Any) -> Any:  # noqa: ANN401 - a dataclass default
    """The option of that name which `owner` has, with another default."""
    return field(default=default, metadata=owner.__dataclass_fields__[name].metadata)


class CheckedOptions:
    """Options whose values are `within` their limits. A `__post_init__` of a class's own calls this one."""

    name = ""
    """Of the system that has them, where it is known."""

    def __post_init__(self) -> None:
        """UserError for a value that is not."""
        for each in fields(self):  # pyright: ignore[reportArgumentType]
            within, value = each.metadata.get("within"), getattr(self, each.name)
            if within and value is not None and not within[0] <= value <= within[1]:
                name = each.name.replace("_", "-")
                owner = "--" if each.metadata["plain"] else f"{self.name} " if self.name else ""
                least, most = within
                problem = f"less than {least:g}" if most == inf else f"not between {least:g} and {most:g}"
                raise UserError(f"{owner}{name}: {value} is {problem} ({each.metadata['help']})")


class Conditional(NamedTuple):
    """An option that was given and acts only where another says so."""

    policy: str
    name: str
    acts: bool
    told: str
    """That it does nothing, and without what."""


def conditional_options(policy: str, several: Iterable[Any], model: object) -> Iterator[Conditional]:
    """Those of the options that are not their defaults, in a run of the model."""
    for options in several:
        for each in fields(options):
            only, value = each.metadata.get("only"), getattr(options, each.name)
            if only is not None and value != each.default:
                told = f"{each.name.replace('_', '-')}={value} does nothing without {only.told}"
                yield Conditional(policy, each.name, only.holds(options, model), told)


def refuse_idle(given: Iterable[Conditional]) -> None:
    """UserError for an option that acts in none of the runs it was given for."""
    given = tuple(given)
    acting = {(one.policy, one.name) for one in given if one.acts}
    for one in given:
        if not one.acts and (one.policy, one.name) not in acting:
            raise UserError(f"--policy {one.policy}: {one.told}; give that, or leave it out")
