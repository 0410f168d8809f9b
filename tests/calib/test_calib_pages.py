"""docs/calibration.md and calibration-tables.md: blocks are those that the script writes; errors are the profiles'."""

import re

import calibration_tables
import pytest
from calibration_tables import FITTED, PAGES, SHIPPED, main

BLOCKS = dict(re.findall(r"<!-- (\w+) -->\n(.*?)\n<!-- end -->", "".join(page.read_text() for page in PAGES), re.S))


def test_every_block_has_its_table_and_every_table_its_block():
    found = [name for page in PAGES for name in re.findall(r"<!-- (\w+) -->", page.read_text()) if name != "end"]
    assert sorted(found) == sorted([*FITTED, *SHIPPED])


@pytest.mark.parametrize("name", ["errors", "kernels", "quantised"])
def test_errors_on_the_page_are_those_of_the_shipped_profiles(name):
    assert SHIPPED[name]() == BLOCKS[name]


def test_the_named_block_alone_is_replaced_on_its_page(tmp_path, monkeypatch):
    first, second = tmp_path / "first.md", tmp_path / "second.md"
    first.write_text("before\n<!-- other -->\nkept\n<!-- end -->\n")
    second.write_text("<!-- errors -->\nold\nlines\n<!-- end -->\nafter\n")
    monkeypatch.setattr(calibration_tables, "PAGES", (first, second))
    monkeypatch.setitem(SHIPPED, "errors", lambda: "new")
    main(["errors"])
    assert first.read_text() == "before\n<!-- other -->\nkept\n<!-- end -->\n"
    assert second.read_text() == "<!-- errors -->\nnew\n<!-- end -->\nafter\n"
    with pytest.raises(SystemExit, match="no page has a block <!-- kernels -->"):
        main(["kernels"])
