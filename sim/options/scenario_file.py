"""Scenario files: TOML with the flags' names. `read_scenario` reads one, `write_asked` leaves one beside a result."""

import json
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from sim.errors import UserError
from sim.files import read_text, write_atomically
from sim.options.policies import all_policy_options, owned_option
from sim.options.scenario import ALIASES, Outputs, Scenario
from sim.options.values import convert, flag, option_fields

ASKED_FILE = "scenario.toml"
"""What was asked for, to run it again."""


def read_scenario(path: Path) -> dict[str, Any]:
    """A scenario file: TOML with the flags' names (dashes or underscores), its values as the types the options have.

    Unknown keys are refused.
    """
    return scenario_values(read_toml(path, "--scenario"), str(path))


def read_toml(path: Path, option: str) -> dict[str, Any]:
    """The table in a TOML file that `option` names."""
    import tomllib  # noqa: PLC0415 - few runs read a scenario file

    try:
        return tomllib.loads(read_text(path))
    except OSError as error:
        raise UserError(f"{option}: cannot read {path} ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        # ValueError, of which TOML's own is one: a number of thousands of digits.
        raise UserError(f"{path}: not a TOML file: {error}") from error


def scenario_values(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Options by their fields' names, each as the type it has; `where` they stand is for the message."""
    values: dict[str, Any] = {}
    for key, value in table.items():
        name, hint = option_named(key, where)
        if name in values:
            raise UserError(f"{where}: key {key!r} stands twice, in two spellings; keep one")
        values[name] = convert(f"{where}: {key}", value, hint)
    return values


def option_named(key: str, where: str) -> tuple[str, Any]:
    """The field and the type of an option as files spell it; UserError with the nearest right one."""
    name = key.replace("-", "_")
    name = ALIASES.get(name, name)
    known = scenario_keys()
    if name in known:
        return name, known[name]
    owned = owned_option(name)
    if owned is None:
        near = get_close_matches(name, [*known, *all_policy_options()], n=1)
        hint = f"; did you mean {near[0].replace('_', '-')!r}?" if near else ""
        raise UserError(f"{where}: unknown key {key!r}{hint}")
    return name, owned.hint


def write_asked(folder: Path, values: Mapping[str, Any]) -> None:
    """Write the options of a run, but where it goes and what it prints, as a scenario file."""
    keys = scenario_keys()
    lines = []
    for name, value in values.items():
        hint = keys[name] if name in keys else option.hint if (option := owned_option(name, installed=False)) else None
        if hint is not None and name not in ("out", "quiet"):
            lines.append(f"{name.replace('_', '-')} = {_toml(convert(flag(name), value, hint))}\n")
    write_atomically(folder / ASKED_FILE, "".join(lines).encode())


def _toml(value: Any) -> str:  # noqa: ANN401
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):
        # TOML's basic strings are JSON's.
        return json.dumps(value, ensure_ascii=False)
    return str(value).lower() if isinstance(value, bool) else repr(value)


@cache
def scenario_keys() -> Mapping[str, Any]:
    """Every key of a scenario file and its type, but for the policies' options (`owned_option`)."""
    keys: dict[str, Any] = {f.name: hint for owner in (Outputs, Scenario) for f, hint in option_fields(owner)}
    return keys | {"policy": tuple[str, ...], "out": str}
