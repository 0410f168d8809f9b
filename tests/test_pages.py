"""The pages: links lead somewhere, every system has its paper, every `kvtwin ...` shown is a command that there is."""

import re
import shlex
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest

import kvtwin
from kvtwin.command_line import COMMANDS, build_parser
from sim.options.flags import read_options
from sim.systems import DEFAULT_POLICY, POLICIES
from sim.version import VERSION

DOCS = Path(kvtwin.__file__).parents[1] / "docs"


def test_every_policy_has_its_paper_and_file():
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \| `([^`]+)` \|$", (DOCS / "papers.md").read_text(), re.M)
    rows = [row for row in rows if not row[0].startswith("--")]
    assert {name for name, *_ in rows} == set(POLICIES)
    for name, _, path in rows:
        assert POLICIES[name].__module__.replace(".", "/") + ".py" == path
        assert (DOCS.parent / path).is_file()


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.name)
def test_links_of_pages_lead_somewhere(page):
    for link in re.findall(r"\]\((?!http)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists(), link


def test_help_names_versions_defaults_models_and_gpus(capsys):
    with pytest.raises(SystemExit):
        kvtwin.main(["--version"])
    assert capsys.readouterr().out == f"kvtwin {VERSION}\n"
    with pytest.raises(SystemExit):
        kvtwin.main(["run", "--help", "all"])
    text = " ".join(capsys.readouterr().out.split())
    for words in ("llama-3.1-8b", "rtx-4090", "(default: llama-2-7b)", "(default: a100-80g)", "(default: 0.9)"):
        assert words in text


def test_help_is_short_unless_all_or_a_policy_is_asked_for(capsys):
    """Options of the command itself are always there; a topic that is none is told which there are."""

    def told(*words):
        with pytest.raises(SystemExit) as end:
            kvtwin.main([*words])
        found = capsys.readouterr()
        return end.value.code, found.out, found.err

    status, text, _ = told("run", "--help")
    assert status == 0 and "--max-num-seqs" in text and "more options: kvtwin run --help all" in text
    assert not {"--layerkv-threshold", "--burst-factor"} & set(text.replace(",", " ").split())
    _, text, _ = told("run", "--help", "layerkv")
    assert text.startswith("options of layerkv:") and "--layerkv-threshold" in text and "--model" not in text
    assert "[tune]: goal" in " ".join(told("tune", "-h")[1].split())
    assert "--bench" in told("profile", "fit", "--help")[1]
    status, _, error = told("run", "--help", "mine")
    assert (status, error.startswith("kvtwin run: --help mine: no such topic; there are all, vllm-v1, ")) == (2, True)


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
