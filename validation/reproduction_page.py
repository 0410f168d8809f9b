"""Writes the tables of docs/reproduction.md anew: `python validation/reproduction_page.py OUT`.

A paper's table stands from `<!-- reproduce NAME -->` to `<!-- end -->`. Runs that OUT has already are not made again:
it may be the folder of `kvtwin reproduce --out OUT`.
"""

import argparse
from pathlib import Path

from sim.run.folders import owning
from sim.study.reproduce import run_setups, table
from sim.study.setup_files import read_setups
from sim.study.sweep import Means

PAGE = Path(__file__).parents[1] / "docs" / "reproduction.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    folder, page = parser.parse_args().out, PAGE.read_text(encoding="utf-8")
    with owning(folder):
        found = run_setups(read_setups(), folder, Means())
    for name in dict.fromkeys(one.setup.name for one in found):
        lines = table([one for one in found if one.setup.name == name])
        mark = f"<!-- reproduce {name} -->"
        before, start, rest = page.partition(mark)
        _, end, after = rest.partition("<!-- end -->")
        if not (start and end):
            raise SystemExit(f"{PAGE}: no {mark} ... <!-- end --> in it; add them where the table is to stand")
        page = f"{before}{start}\n{lines}\n{end}{after}"
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
