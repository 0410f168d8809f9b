"""`kvtwin policies`: the systems, what one is made of, and which parts can replace its own."""

import argparse
from collections import defaultdict
from textwrap import wrap
from typing import Any

from sim.errors import UserError
from sim.options.policies import options_of
from sim.options.values import flag
from sim.parts.catalogue import read_parts
from sim.systems import POLICIES, policy_named, read_systems

WIDTH = 110


def add_policies(parser: Any) -> None:  # noqa: ANN401 - the command line's own parser
    """Its arguments."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="one system: its parts and options (default: list all)")
    text = "which parts can replace one of the system's own, and why others cannot; without NAME: a table of all"
    parser.add_argument("--mixes", action="store_true", help=text)
    parser.set_defaults(run=run_policies)


def run_policies(arguments: argparse.Namespace) -> int:
    """Print what is asked for."""
    read_systems()
    read_parts()
    lines = _mixes(arguments.name) if arguments.mixes else _about(arguments.name)
    print("\n".join(lines))
    return 0


def _about(name: str | None) -> list[str]:
    if name is None:
        return [f"{known:<18} {kind.summary}" for known, kind in POLICIES.items()]
    kind = policy_named(name)
    lines = [f"{name}: {kind.summary}", "", *(f"  {part:<10} {own}" for part, own in kind.composition.items())]
    options = options_of(kind)
    lines += ["", "options"] if options else []
    for option in options:
        default = option.field.default
        text = option.field.metadata["help"] + ("" if default is None else f" (default {default})")
        lines += [f"  {flag(option.full_name)}", *_indented(text)]
    return lines


def _mixes(name: str | None) -> list[str]:
    from kvtwin.mixes import single_replacements, table  # noqa: PLC0415 - builds engines

    if name is None:
        return table(list(POLICIES))
    if ":" in name:
        raise UserError(f"--mixes: replaces single parts of a system, and {name} is a mix already; give its name alone")
    policy_named(name)
    mixes = single_replacements(name)
    going: dict[str, list[str]] = defaultdict(list)
    refused: dict[str, list[str]] = defaultdict(list)
    for mix in mixes:
        if mix.refusal:
            refused[mix.refusal].append(f"{mix.kind}={mix.part}")
        else:
            going[mix.kind].append(mix.part)
    count = sum(map(len, going.values()))
    lines = [f"{name}: {count} of {len(mixes)} single replacements assemble", ""]
    lines += [f"  {kind:<10} {', '.join(parts)}" for kind, parts in going.items()]
    lines += ["", "refused"]
    for reason, parts in refused.items():
        lines += [f"  {', '.join(parts)}", *_indented(reason)]
    return lines


def _indented(text: str) -> list[str]:
    return [f"      {line}" for line in wrap(text, WIDTH, break_on_hyphens=False)]
