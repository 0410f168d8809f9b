"""Notebooks run from the first cell to the last, show what they ran, and hold no logic of their own."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
BOOKS = sorted(FOLDER.glob("*.ipynb"))
MOST_BYTES = 600_000


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_its_figures_and_holds_no_logic(path):
    assert path.stat().st_size < MOST_BYTES
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    text = "\n".join("".join(cell["source"]) for cell in code)
    assert set(re.findall(r"^(?:import|from) (\w+)", text, re.M)) <= {"kvtwin", "pandas"}
    assert not re.search(r"^\s*(def|class|for|while|if) ", text, re.M)
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))


def test_every_notebook_is_listed():
    listed = re.findall(r"\((.+?)\.ipynb\)", (FOLDER / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == [path.stem for path in BOOKS] and len(listed) >= 5


RUN = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
from calib.measure import run
from gpu_runtime.twin import probe

class Shell(InteractiveShell):
    def enable_gui(self, gui=None):
        pass

# Few repeats a point, and no run again on a machine that is busy with other tests.
run.HURRY_S[True] = 0.0
probe.machine_slowness = lambda *_: 1.0
shell = Shell.instance()
for name in sys.argv[1:]:
    shell.reset(new_session=False)
    with open(name, encoding="utf-8") as file:
        cells = json.load(file)["cells"]
    for source in ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"):
        print(name, source, flush=True)
        shell.run_cell(source).raise_error()
"""
FEWER = ((r"(num.prompts\W+)\d{2,}\b(?! \*)", r"\g<1>24"), (r"(num\W+)\d+", r"\g<1>2"), (r"10 \* count", "2 * count"))
"""Requests, points of an axis, and requests a client that are enough to run every cell."""


@pytest.mark.slow
def test_notebooks_run(tmp_path):
    """All in one process, which imports once; in a copy, where no study of before is taken up, on less traffic."""
    for needed in ("IPython", "matplotlib_inline", "torch"):
        pytest.importorskip(needed)
    folder = shutil.copytree(FOLDER, tmp_path / "notebooks", ignore=shutil.ignore_patterns("out"))
    for path in (*folder.glob("*.ipynb"), folder / "data/twin.toml"):
        text = path.read_text(encoding="utf-8")
        for long, short in FEWER:
            text = re.sub(long, short, text)
        path.write_text(text, encoding="utf-8")
    command = [sys.executable, "-c", RUN, *(path.name for path in BOOKS)]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
