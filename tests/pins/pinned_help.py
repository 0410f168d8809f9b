"""What commands say of themselves: what each is for, its options, their words, and what counts without them."""

import argparse
import os
from collections.abc import Iterator
from unittest.mock import patch

from pinned import Answers, Table

from kvtwin.command_line import Parser, build_parser


def parsers(parser: argparse.ArgumentParser, words: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """A command and those under it."""
    yield words, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from parsers(inner, f"{words} {name}")


COMMANDS = dict(parsers(build_parser(), "kvtwin"))


def ask(name: str) -> Answers:
    """Option by option: versions of Python lay help out differently."""
    parser = COMMANDS[name]
    with patch.dict(os.environ, {"COLUMNS": "110"}):
        if isinstance(parser, Parser):
            parser.format_help()
    lines = [str(parser.description)]
    for action in parser._actions:
        names = "/".join(action.option_strings) or action.dest
        default = "required" if action.required else action.default
        default = default.__name__ if callable(default) else default
        lines.append(f"{names} {action.nargs} {action.metavar} {action.choices and [*action.choices]} = {default}")
        lines.append(str(action.help))
    return {"help": lines}


TABLES = {"help": Table(list(COMMANDS), ask)}
