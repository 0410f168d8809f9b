"""Compiled, kvtwin writes the bytes that it writes as it stands here. `make fast` compiles it."""

import json
import os
import random
import subprocess
import sys
from filecmp import cmpfiles
from pathlib import Path

import pytest
from pinned_runs import cases

from sim.systems import POLICIES
from sim.version import is_compiled

ROOT = Path(__file__).parents[1]
PYTHON = Path(os.environ.get("KVTWIN_FAST", ROOT / ".fast/bin/python"))
RUN = "import json, sys, kvtwin; print([kvtwin.main(words) for words in json.load(sys.stdin)])"
LOOK = "import sim, sim.version; print(sim.version.is_compiled(), sim.__path__[0])"


def python(python, words, folder, asked=""):
    """What it prints; ours imports from here, the other what is installed with it."""
    environment = os.environ | {"PYTHONPATH": str(ROOT) if python == sys.executable else ""}
    return subprocess.run(
        [python, "-P", "-c", words], cwd=folder, input=asked, env=environment, check=True, text=True, stdout=-1
    ).stdout


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    if not PYTHON.exists():
        pytest.skip("nothing is compiled: `make fast` does that")
    is_fast, path = python(PYTHON, LOOK, tmp_path_factory.mktemp("look")).split()
    assert is_fast == "True", "`make fast` compiled nothing; its output says why"
    sources = [file.relative_to(ROOT / "sim") for file in (ROOT / "sim").rglob("*.py")]
    _, *other = cmpfiles(ROOT / "sim", path, sources, shallow=False)
    if any(other):
        pytest.skip("what is compiled is of another source: `make fast` compiles this one")
    return PYTHON


@pytest.mark.skipif(is_compiled(), reason="both would be compiled")
@pytest.mark.parametrize("policy", POLICIES)
def test_results_have_the_same_bytes(policy, compiled, tmp_path):
    drawn = random.Random(policy)
    words = [text.split() for text in cases().values() if f"--policy {policy} " in text.replace(":", " ")]
    asked = [
        [*text, "--num-prompts", str(drawn.randint(5, 60)), "--seed", str(drawn.randrange(1000)), "--quiet"]
        for text in drawn.sample(words, min(len(words), 3))
    ]
    runs = json.dumps([["run", *text, "--out", f"{i}"] for i, text in enumerate(asked)])

    def told(executable, folder):
        folder.mkdir()
        statuses = python(executable, RUN, folder, runs)
        return statuses, [file.read_bytes() for file in sorted(folder.rglob("result.json"))]

    statuses, results = told(compiled, tmp_path / "compiled")
    assert results and all(b',"compiled":true' in result for result in results)
    as_source = [result.replace(b',"compiled":true', b"") for result in results]
    assert (statuses, as_source) == told(sys.executable, tmp_path / "source")


OVERRIDES = """
from sim.errors import UserError
from sim.parts.batching.unified import Unified
from sim.systems.builder import refuse_unseen

class Mine(Unified):
    name = "mine"
    schedules_ahead = False

try:
    refuse_unseen("mine", Mine)
except UserError as error:
    print(error)
"""


def test_what_compiled_code_would_not_see_is_refused(compiled, tmp_path):
    """A part of another distribution may set an attribute in its class, as Python has it."""
    assert "part mine: Mine defines schedules_ahead in its class" in python(compiled, OVERRIDES, tmp_path)
    assert python(sys.executable, OVERRIDES, tmp_path) == ""
