"""Every `kvtwin ...` that README and docs show is a command that there is, and runs have options that fit together."""

import re
import shlex
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest

from kvtwin.command_line import COMMANDS, build_parser
from sim.options.flags import read_options
from sim.systems import DEFAULT_POLICY

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def in_blocks(text: str) -> list[list[str]]:
    """The words after `kvtwin` of each command in a page's code blocks, but of those with `...` for readers to fill."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    found = [match[1] for line in lines if (match := re.match(r"(?:\$ )?kvtwin +(.*)", line))]
    # [--flag] is given or not.
    return [shlex.split(re.sub(r"[][]", "", words), comments=True) for words in found if "..." not in words]


def in_sentences(text: str) -> list[list[str]]:
    """The same of commands with flags that stand in a page's sentences."""
    found = re.findall(r"`kvtwin\s([^`]*--[^`]*)`", text)
    return [words.split() for words in found if "..." not in words]


def of_pages(commands_of):
    found = [(page, words) for page in PAGES for words in commands_of(page.read_text(encoding="utf-8"))]
    return [pytest.param(words, id=f"{page.name}: {' '.join(words)[:50]}") for page, words in found]


def test_commands_go_over_lines_and_have_comments():
    text = (
        "```bash\nkvtwin run --tp 2 \\\n  [--seed 1]   # twice\nls\n$ kvtwin live ... --tp 1\n```\n"
        "So `kvtwin live\n--tp 3` and `kvtwin run ... --tp 4`, not `kvtwin serve`."
    )
    assert in_blocks(text) == [["run", "--tp", "2", "--seed", "1"]]
    assert in_sentences(text) == [["live", "--tp", "3"]]


@pytest.mark.parametrize("words", of_pages(in_blocks))
def test_commands_in_blocks_parse(words, monkeypatch):
    monkeypatch.chdir(ROOT)
    arguments = build_parser().parse_args(words)
    if words[0] in ("run", "compare"):
        read_options(arguments, DEFAULT_POLICY)


@pytest.mark.parametrize("words", of_pages(in_sentences))
def test_commands_in_sentences_have_flags_that_exist(words, capsys):
    """A sentence may leave out what a command requires."""
    command = takewhile(lambda word: word.isalpha() and word.islower(), words)
    with pytest.raises(SystemExit) as end:
        build_parser().parse_args([*command, "--help", "all"])
    assert end.value.code == 0
    known = set(re.findall(r"--[a-z][a-z0-9-]*", capsys.readouterr().out))
    assert {word for word in words if word.startswith("--")} <= known


HELPS = [[], *([name] for name in COMMANDS), ["profile", "fit"], ["trace", "generate"]]


def test_help_imports_no_slow_package():
    """In a process of its own: this one has them all."""
    slow = {"numpy", "scipy", "pandas", "pyarrow", "matplotlib", "simpy", "torch", "rich"}
    ask = "import sys\nfrom kvtwin import main\n"
    ask += f"for words in {HELPS}:\n    try:\n        main([*words, '--help'])\n"
    ask += "    except SystemExit as end:\n        assert not end.code\n"
    ask += f"    assert not {slow!r} & set(sys.modules), words"
    told = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    assert (told.returncode, told.stderr) == (0, "")
    assert told.stdout.count("usage: kvtwin") == len(HELPS)
