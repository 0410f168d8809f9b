"""Notebooks show what they ran, import nothing but kvtwin and pandas, and define nothing. nbmake runs them in CI."""

import json
import re
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
