"""Pages of the documentation site that are not files of docs/: those that lie beside it, and the commands' help."""

import argparse
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
BESIDE = {"DESIGN.md": "DESIGN.md", "CHANGELOG.md": "CHANGELOG.md", "validation/README.md": "validation.md"}
"""Files of the repository, and their names in the site."""
COMMANDS = "reference/commands.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what lies outside of docs/."""
    for path, name in BESIDE.items():
        files.append(File.generated(config, name, content=_from_here((ROOT / path).read_text(encoding="utf-8"), path)))
    files.append(File.generated(config, COMMANDS, content=commands()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:  # noqa: ANN401
    """Lead links out of docs/ to the site's own pages; what is no page keeps its words."""

    def led(found: re.Match[str]) -> str:
        name = BESIDE.get(found[2])
        return f"[{found[1]}]({name})" if name else found[1]

    return re.sub(r"\[([^\]]+)\]\(\.\./([\w./-]+)\)", led, markdown)


def _from_here(text: str, path: str) -> str:
    """A page that lies beside docs/, with its links as seen from docs/."""
    inside = re.sub(r"\]\((?:\.\./)?docs/", "](", text)
    return inside if path == "DESIGN.md" else re.sub(r"\[([^\]]+)\]\((?!http|#|[\w-]+\.md)[^)]*\)", r"\1", inside)


def commands() -> str:
    """The help of every command, from the parsers themselves."""
    from kvtwin.command_line import build_parser  # noqa: PLC0415

    os.environ["COLUMNS"] = "110"
    lines = ["# Commands", "", "As `--help` has them."]
    for name, text in _helps(build_parser()):
        lines += ["", f"## {name}", "", "```text", text.rstrip(), "```"]
    return "\n".join(lines) + "\n"


def _helps(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """The name and the help of a command and of those below it; asking for help adds a command's flags."""
    yield parser.prog, parser.format_help()
    for action in parser._actions:  # argparse offers no other way
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _helps(below)
