"""What kvtwin decides, predicts and tells is what is pinned (`pinned.py` says how one reads a difference)."""

import re
import shutil
import subprocess
import sys

import pinned
import pytest

for needed in ("pyarrow", "jinja2", "plotly", "torch", "psutil", "aiohttp"):
    pytest.importorskip(needed)

PINNED = pinned.read()


@pytest.mark.parametrize("name", pinned.configurations())
def test_answers_are_those_pinned(name):
    found = pinned.digests(pinned.ask(name))
    assert found == PINNED.get(name), f"python tests/pins/pinned.py diff HEAD -k '{name}' shows what differs"


def test_nothing_is_pinned_that_is_no_more():
    assert list(PINNED) == pinned.configurations()


SMALL = """
from pinned import Table
TABLES = {"small": Table(["one", "other"], lambda name: {"said": ["first", f"of {name}"], "kept": ["same"]})}
"""


def test_a_difference_is_shown_in_words_and_renewed(tmp_path):
    """Of what differs from a commit, is new or gone, and of nothing else."""

    def run(*words):
        return subprocess.run(words, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    def told(*words):
        return run(sys.executable, "tests/pins/pinned.py", *words)

    folder = tmp_path / "tests/pins"
    folder.mkdir(parents=True)
    shutil.copy(pinned.__file__, folder)
    table = folder / "pinned_small.py"
    table.write_text(SMALL)
    told("renew")
    run("git", "init", "-q")
    run("git", "add", ".")
    run("git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "pins")
    assert told("diff", "HEAD") == ""
    table.write_text(SMALL.replace("of {name}", "of {name[:3]}"))
    changed = [line.rstrip() for line in told("diff", "HEAD").splitlines() if re.match(r"[-+ ]\w|(---|\+\+\+) ", line)]
    sides = "small: other/said.txt"
    assert changed == [f"--- before/{sides}", f"+++ now/{sides}", " first", "-of other", "+of oth"]
    table.write_text(SMALL.replace('["one"', '["new"'))
    sides = {line.rstrip() for line in told("diff", "HEAD").splitlines() if line[:4] in ("--- ", "+++ ")}
    assert sides == {
        "+++ /dev/null", "--- before/small: one/said.txt", "--- before/small: one/kept.txt",
        "--- /dev/null", "+++ now/small: new/said.txt", "+++ now/small: new/kept.txt",
    }  # fmt: skip
    table.write_text(SMALL.replace("of {name}", "of {name[:3]}"))
    before = pinned.read(folder / "pins.txt")
    told("renew", "-k", "small one")
    assert pinned.read(folder / "pins.txt") == before
    told("renew", "-k", "other")
    after = pinned.read(folder / "pins.txt")
    assert [name for name in after if after[name] != before[name]] == ["small: other"]
