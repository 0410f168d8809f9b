"""Policies from text: `NAME:option=value,part=name,...`, and their options as flags and keys prefixed by their names.

`--policy layerkv:threshold=0.02` and `--layerkv-threshold 0.02` say the same. A part is replaced by its kind
(`layerkv:batching=sarathi`); options of a part that the preset does not have are given with it
(`sarathi:admission=slack,tpot-slo-ms=100`). Only the presets that are named are imported.
"""

from collections.abc import Mapping
from dataclasses import Field, replace
from typing import Any

import msgspec

from sim.errors import UserError
from sim.options.values import convert, flag, option_fields
from sim.parts.catalogue import KINDS, known_part
from sim.systems import DEFAULT_POLICY, POLICIES, policy_named, read_systems
from sim.systems.base import Policy


class PolicyOption(msgspec.Struct, frozen=True):
    """An option of a policy, its name as flags and scenario files have it, and its type."""

    policy: str
    name: str
    field: Field[Any]
    hint: Any

    @property
    def is_plain(self) -> bool:
        """Whether it is vLLM's, spelled as vLLM spells it. The default policy has all of these."""
        return self.field.metadata.get("plain", False)

    @property
    def full_name(self) -> str:
        """`POLICY_OPTION`, with underscores; `OPTION` alone where it is plain."""
        return self.name if self.is_plain else f"{self.policy.replace('-', '_')}_{self.name}"


def options_of(kind: type[Policy]) -> list[PolicyOption]:
    """The options of one policy."""
    return [PolicyOption(kind.name, f.name, f, hint) for f, hint in option_fields(kind) if "help" in f.metadata]


def owned_option(full_name: str, *, installed: bool = True) -> PolicyOption | None:
    """The option that flags and files call `full_name`; None if no policy has it. Imports no other preset.

    `installed`: of policies too that other distributions bring and that were not asked for yet.
    """
    found = _owners(full_name)
    if not found and installed:
        read_systems()
        found = _owners(full_name)
    if len(found) > 1:
        owners = " and ".join(option.policy for option in found)
        raise UserError(f"{flag(full_name)}: an option of {owners} alike; rename one of them")
    return found[0] if found else None


def _owners(full_name: str) -> list[PolicyOption]:
    return [
        option
        for name in POLICIES
        if full_name.startswith(name.replace("-", "_") + "_") or name == DEFAULT_POLICY
        for option in options_of(POLICIES[name])
        if option.full_name == full_name
    ]


def has_option(name: str, option: PolicyOption) -> bool:
    """Whether the policy of that name has an option: its own, or one of vLLM's that it takes as well."""
    return any(own.field is option.field for own in options_of(policy_named(name)))


def all_policy_options() -> dict[str, PolicyOption]:
    """Every option of every policy, by its full name. UserError where two have the same."""
    found: dict[str, PolicyOption] = {}
    for kind in POLICIES.values():
        for option in options_of(kind):
            other = found.setdefault(option.full_name, option)
            if other.field is not option.field:
                raise UserError(f"{flag(option.full_name)}: an option of {other.policy} and {option.policy} alike")
    return found


def parse_policy(text: str, given: Mapping[str, Any]) -> tuple[str, Policy]:
    """A policy from its text, with those of the options `given` by full name that are its own.

    Returns its label, which is the text itself, and the policy.
    """
    name, _, words = text.partition(":")
    kind = policy_named(name)
    own = {option.name: option for option in options_of(kind)}
    values: dict[str, Any] = {
        option.name: convert(flag(option.full_name), given[option.full_name], option.hint)
        for option in own.values()
        if option.full_name in given
    }
    mixed: dict[str, str] = {}
    others: dict[str, str] = {}
    for word in filter(None, words.split(",")):
        key, equals, value = (piece.strip() for piece in word.partition("="))
        key = key.replace("-", "_")
        if not equals:
            raise UserError(f"--policy {text}: {word!r} is not option=value")
        if key in KINDS:
            known_part(key, value)
            mixed[key] = value
        elif key in own:
            values[key] = convert(f"--policy {text}: {key}", value, own[key].hint)
        else:
            others[key] = value
    preset = kind(**values, mixed=tuple(mixed.items()))
    return text, replace(preset, mixed_options=_part_options(text, preset, mixed, others))


def _part_options(text: str, preset: Policy, mixed: Mapping[str, str], words: Mapping[str, str]) -> tuple[object, ...]:
    """Options of replaced parts of kinds that the preset does not have; UserError for words that no part has.

    What several of them have of one name, and what the preset has of it, is one option: one engine has one predictor of
    output lengths, and one TPOT to meet. The preset's stands, or what is given, or the first's default.
    """
    kind = type(preset)
    kinds = {known_part(part, name).options for part, name in mixed.items()}
    wanted = sorted((k for k in kinds if k is not None and not issubclass(kind, k)), key=lambda k: k.__name__)
    said = {option.name: getattr(preset, option.name) for option in options_of(kind)}
    left, found = dict(words), []
    for options in wanted:
        hints = {f.name: hint for f, hint in option_fields(options)}
        for key in hints.keys() & left.keys():
            said[key] = convert(f"--policy {text}: {key}", left.pop(key), hints[key])
        found.append(options(**{key: said[key] for key in hints.keys() & said.keys() if said[key] is not None}))
        said |= {key: getattr(found[-1], key) for key in hints}
    if left:
        known = [option.name for option in options_of(kind)]
        known += [f.name for options in wanted for f, _ in option_fields(options)]
        key = next(iter(left))
        raise UserError(
            f"--policy {text}: {key!r} is no option of {kind.name}; its options: {', '.join(known) or 'none'}; "
            f"its parts: {', '.join(KINDS)}"
        )
    return tuple(found)
