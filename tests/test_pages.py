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
