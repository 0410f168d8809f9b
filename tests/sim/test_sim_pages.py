"""The guides: what they name exists, and every system has its paper."""

import re
from pathlib import Path

import pytest

import kvtwin
from sim.systems import POLICIES
from sim.version import VERSION

DOCS = Path(kvtwin.__file__).parents[1] / "docs"
GUIDES = ("quickstart.md", "reading-results.md", "adding-a-gpu.md", "papers.md")


def test_every_policy_has_its_paper_and_file():
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \| `([^`]+)` \|$", (DOCS / "papers.md").read_text(), re.M)
    assert {name for name, *_ in rows} == set(POLICIES)
    for name, _, path in rows:
        assert POLICIES[name].__module__.replace(".", "/") + ".py" == path
        assert (DOCS.parent / path).is_file()


@pytest.mark.parametrize("guide", GUIDES)
def test_links_and_flags_of_the_guides_exist(guide, capsys):
    text = (DOCS / guide).read_text()
    for link in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (DOCS / link).exists(), link
    known = ""
    for command in ("run", "compare", "report", "explain", "validate", "calibrate"):
        with pytest.raises(SystemExit):
            kvtwin.main([command, "--help"])
        known += capsys.readouterr().out
    own = {"--bench", "--sibling"}
    assert set(re.findall(r"--[a-z][a-z-]+", text)) - own <= set(re.findall(r"--[a-z][a-z-]+", known))


def test_help_names_versions_defaults_models_and_gpus(capsys):
    with pytest.raises(SystemExit):
        kvtwin.main(["--version"])
    assert capsys.readouterr().out == f"kvtwin {VERSION}\n"
    with pytest.raises(SystemExit):
        kvtwin.main(["run", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for words in ("llama-3.1-8b", "rtx-4090", "(default: llama-2-7b)", "(default: a100-80g)", "(default: 0.9)"):
        assert words in text
