"""`kvtwin completion SHELL`: what a shell completes of `kvtwin`, as a script that shtab writes of the parsers."""

import argparse
import sys
from collections.abc import Iterator

from kvtwin.command_line import Parser, build_parser
from sim.errors import UserError
from sim.specs.hardware import built_in_hardware
from sim.specs.models import built_in_models
from sim.systems import POLICIES, read_systems

SHELLS = ("bash", "zsh", "fish")
HELP = (
    "Print the script by which a shell completes kvtwin's commands, options and names. bash: kvtwin completion bash > "
    "~/.local/share/bash-completion/completions/kvtwin. zsh: kvtwin completion zsh > _kvtwin in a folder of $fpath. "
    "fish: kvtwin completion fish > ~/.config/fish/completions/kvtwin.fish. Needs shtab (extra completion)."
)
FILES, FOLDERS = ("FILE", "FILE.toml", "PATH", "NAME|FILE", "NAME|FILE|own"), ("DIR",)
"""Metavars of what is a file, and a folder."""


def add_completion(parser: Parser) -> None:
    """Fill the parser of `completion`."""
    parser.description = HELP
    parser.set_defaults(run=completion_command)
    parser.add_argument("shell", choices=SHELLS, help="the shell that is to complete")


def completion_command(arguments: argparse.Namespace) -> int:
    """`kvtwin completion`."""
    try:
        import shtab  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise UserError("completion needs shtab: pip install 'kvtwin[completion]'") from error
    read_systems()
    root = build_parser()
    names = {"model": built_in_models(), "gpu": built_in_hardware(), "policy": list(POLICIES)}
    for parser in _filled(root):
        for action in parser._actions:
            shown = action.metavar if isinstance(action.metavar, str) else ""
            if action.dest in names and action.option_strings:
                # To complete, not to check by: files are taken as well.
                action.choices = names[action.dest]
            elif shown in (*FILES, *FOLDERS):
                action.complete = shtab.DIRECTORY if shown in FOLDERS else shtab.FILE  # type: ignore[attr-defined]
    sys.stdout.write(shtab.complete(root, arguments.shell) + "\n")
    return 0


def _filled(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser and those of its commands, with all their flags."""
    if isinstance(parser, Parser):
        parser.format_help()
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _filled(command)
