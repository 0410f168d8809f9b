"""Folders of many runs on the page: what a sweep, map, search or validation said, drew and counted."""

import csv
from base64 import b64encode
from dataclasses import dataclass
from pathlib import Path

from sim.errors import UserError
from sim.files import read_text
from sim.results.report import METRICS

MOST_ROWS = 200
"""Rows of a table that the page shows; the file has all."""
NAMES = {metric.key: metric.name for metric in METRICS}
COUNTS = ("completed", "ignored", "duration", "num_preemptions")
"""Metrics that say how a sweep went rather than what came of it."""


@dataclass(frozen=True)
class Study:
    """What the page shows of a folder.

    Attributes:
        title: command and folder.
        html: its answer, rendered; what looks like HTML in it is escaped.
        columns, rows: its table as text; no columns where it has none.
        left_out: rows that only the file has.
        pictures: (name, PNG as a data URI).
    """

    title: str
    html: str
    table: str
    columns: list[str]
    rows: list[list[str]]
    left_out: int
    pictures: list[tuple[str, str]]


@dataclass(frozen=True)
class Kind:
    """A command's files: by which its folder is known, with its answer in words, with its table, its pictures."""

    command: str
    known_by: str
    text: str | None
    table: str | None
    pictures: str


KINDS = (
    Kind("plan", "plan.json", "plan.md", None, "*.png"),
    Kind("tune", "tune.json", "tune.txt", "candidates.csv", "tune.png"),
    Kind("map", "map.csv", None, "map.csv", "map.png"),
    Kind("validate", "validation.md", "validation.md", None, "*/*.png"),
    Kind("sweep", "study.json", None, "means.csv", "figures/*.png"),
)


def kind_of(folder: Path) -> Kind | None:
    """Which command wrote the folder; None where it is none of these."""
    return next((kind for kind in KINDS if (folder / kind.known_by).is_file()), None)


def read_study(folder: Path, kind: Kind) -> Study:
    """The folder as the page shows it. UserError names a file that cannot be read."""
    columns, rows = _table(folder / kind.table) if kind.table else ([], [])
    text = read_text(folder / kind.text) if kind.text else ""
    if text and not (kind.text or "").endswith(".md"):
        text = "\n\n".join(f"- {line.strip()}" if line.startswith(" ") else line for line in text.splitlines())
    return Study(
        title=f"{kind.command}: {folder.name or folder.resolve().name}",
        html=_rendered(text) if text else "",
        table=kind.table or "",
        columns=columns,
        rows=rows[:MOST_ROWS],
        left_out=max(0, len(rows) - MOST_ROWS),
        pictures=[
            (
                NAMES.get(path.stem, str(path.relative_to(folder).with_suffix(""))),
                f"data:image/png;base64,{b64encode(_bytes(path)).decode()}",
            )
            for path in sorted(folder.glob(kind.pictures), key=_rank)
        ],
    )


def _rank(path: Path) -> tuple[bool, str]:
    """Latencies and rates first, counts behind them."""
    return path.stem in COUNTS, str(path)


def _rendered(text: str) -> str:
    """Markdown without its first heading, which the page has already; others below the page's own."""
    from markdown_it import MarkdownIt  # noqa: PLC0415 - comes with rich

    heading, _, rest = text.partition("\n")
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = markdown.parse(rest if heading.startswith("# ") else text)
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = "h3"
    found = markdown.renderer.render(tokens, markdown.options, {})
    return found.replace("<table>", '<div class="scroll" tabindex="0"><table>').replace("</table>", "</table></div>")


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error


def _table(path: Path) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a CSV file; columns that are empty throughout are left out."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = list(csv.reader(file))
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{path}: not a table ({error}); give the command again") from error
    if not lines:
        return [], []
    header, rows = lines[0], [line for line in lines[1:] if len(line) == len(lines[0])]
    filled = [place for place in range(len(header)) if any(row[place] for row in rows)]
    return [header[place] for place in filled], [[_short(row[place]) for place in filled] for row in rows]


def _short(text: str) -> str:
    """A number to five digits; other text as it is."""
    try:
        return text if text.lstrip("-").isdigit() else f"{float(text):.5g}"
    except ValueError:
        return text
