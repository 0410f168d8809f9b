"""Commands print and draw what is pinned in `golden/commands/` (`pinned_commands.py` renews it)."""

import importlib

import pytest
from pinned_commands import COMMANDS, STUDIES, STUDY, answer, commands, picture

DRAWN = "drawing of "


def test_every_command_is_pinned():
    assert {path.stem for path in COMMANDS.iterdir() if not path.stem.startswith(DRAWN)} == set(commands())


def test_drawings_are_those_pinned():
    pytest.importorskip("torch")
    drawings = importlib.import_module("pinned_drawings").DRAWINGS
    assert {path.stem for path in COMMANDS.iterdir() if path.stem.startswith(DRAWN)} == set(drawings)
    for name, draw in drawings.items():
        assert picture(draw()) == (COMMANDS / f"{name}.txt").read_text().splitlines(), "if that is meant: make pins"


@pytest.mark.parametrize(("name", "given"), commands().items())
def test_commands_tell_and_draw_what_is_pinned(name, given):
    for needed in ("pyarrow", "jinja2", "plotly"):
        pytest.importorskip(needed)
    found = answer(STUDY + STUDIES.get(name, ""), *given)
    assert found == (COMMANDS / f"{name}.txt").read_text().splitlines(), "if that is meant: make pins"
