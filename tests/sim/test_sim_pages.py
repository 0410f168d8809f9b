"""The pages: their links lead somewhere, and every system has its paper."""

import re
from pathlib import Path

import pytest

import kvtwin
from sim.systems import POLICIES
from sim.version import VERSION

DOCS = Path(kvtwin.__file__).parents[1] / "docs"


def test_every_policy_has_its_paper_and_file():
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \| `([^`]+)` \|$", (DOCS / "papers.md").read_text(), re.M)
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
        kvtwin.main(["run", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for words in ("llama-3.1-8b", "rtx-4090", "(default: llama-2-7b)", "(default: a100-80g)", "(default: 0.9)"):
        assert words in text
