"""What kvtwin decides, predicts and tells is pinned by digest: a line a configuration, a digest a question.

    python tests/pins/pinned.py renew               # after a change that is meant: writes pins.txt anew
    python tests/pins/pinned.py diff main           # what has changed since a commit, text by text
    python tests/pins/pinned.py texts FOLDER        # writes the texts behind the digests

Each takes `-k WORDS`, for configurations whose table and name have all these words. It says
which decisions, numbers and words a change of the code touches: read them before pins are renewed.

A module `pinned_*.py` beside this one has `TABLES` of configurations. Each is run once and answers all questions of its
table, as lines of text. Numbers have eight digits or fewer: the last digits differ between machines. Where the last of
those eight does, a digest differs too, so nothing is pinned that a solver or a linear algebra library has computed.
"""

import argparse
import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PINS = HERE / "pins.txt"
L20, T4 = HERE / "l20-profile.json", HERE / "t4-profile.json"
"""Profiles that do not change with those that are shipped."""

Answers = Mapping[str, Sequence[str]]
"""Of a configuration: the lines that answer each question, by its name."""


class Table(NamedTuple):
    """Configurations, and what is asked of each."""

    names: Sequence[str]
    ask: Callable[[str], Answers]


@cache
def tables() -> dict[str, Table]:
    """All, by name."""
    found = dict[str, Table]()
    for path in sorted(HERE.glob("pinned_*.py")):
        found |= getattr(importlib.import_module(path.stem), "TABLES", {})
    return found


def configurations(words: str = "") -> list[str]:
    """Those whose table and name have all the words."""
    named = [f"{table}: {name}" for table, (names, _) in tables().items() for name in names]
    return [name for name in named if all(word in name for word in words.split())]


def ask(configuration: str) -> Answers:
    """What it answers."""
    table, _, name = configuration.partition(": ")
    return tables()[table].ask(name)


def digests(answers: Answers) -> str:
    """As they are pinned."""
    return " ".join(f"{question}={digest_of(lines)}" for question, lines in answers.items())


def read(path: Path = PINS) -> dict[str, str]:
    """The digests of each configuration."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {name: found for name, _, found in (line.rpartition(" | ") for line in lines)}


# -- texts -------------------------------------------------------------------------------------------------------------


def rounded(value: object, digits: int = 8) -> object:
    """With so many digits of every number, and 0 for what rounding leaves."""
    if isinstance(value, float):
        return f"{value:.{digits}g}" if abs(value) >= 1e-9 else "0"
    if isinstance(value, dict):
        return {str(name): rounded(item, digits) for name, item in value.items()}
    return [rounded(item, digits) for item in value] if isinstance(value, list | tuple) else value


def lines_of(value: object, name: str = "") -> Iterator[str]:
    """Plain data line by line: a line a row of a table, and a field of a record."""
    if isinstance(value, dict) and name.count(".") < 3:
        for key, item in value.items():
            yield from lines_of(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple) and any(isinstance(item, list | tuple | dict) for item in value):
        yield from (f"{name}[{place}] {json.dumps(rounded(item))}" for place, item in enumerate(value))
    else:
        yield f"{name} {json.dumps(rounded(value))}"


def digest(value: object) -> str:
    """Of plain data."""
    return sha256(json.dumps(rounded(value)).encode()).hexdigest()[:12]


def digest_of(lines: Iterable[str]) -> str:
    """Of a text."""
    return sha256("\n".join(lines).encode()).hexdigest()[:8]


def short(text: str, most: int) -> str:
    """A line as it is, or its beginning and a digest of all of it where it is longer."""
    return text if len(text) < most else f"{text[: most - 20]} {digest(text)}"


# -- commands ----------------------------------------------------------------------------------------------------------


def renew(words: str) -> None:
    """Digests anew of some, and none of those that are no more."""
    known, chosen = read(), set(configurations(words))
    found = {name: digests(ask(name)) if name in chosen else known.get(name) for name in configurations()}
    PINS.write_text("".join(f"{name} | {digest}\n" for name, digest in found.items() if digest is not None))


def write_texts(folder: Path, answers: Mapping[str, Answers]) -> None:
    """A folder for each configuration, a file a question."""
    for name, texts in answers.items():
        own = folder / name.replace("/", "_")
        own.mkdir(parents=True)
        for question, lines in texts.items():
            (own / f"{question}.txt").write_text("\n".join(lines) + "\n")


def diff(commit: str, words: str) -> str:
    """The texts that are others than at a commit, as git shows the differences of two folders."""
    with tempfile.TemporaryDirectory() as name, checked_out(commit, Path(name) / "tree") as tree:
        folder = Path(name)
        before, now = read(tree / PINS.relative_to(ROOT)), dict[str, Answers]()
        for configuration in configurations(words):
            answers = ask(configuration)
            if digests(answers) != before.get(configuration):
                now[configuration] = answers
        known = set(configurations())
        gone = [name for name in before if name not in known and all(word in name for word in words.split())]
        for side in ("before", "now"):
            (folder / side).mkdir()
        write_texts(folder / "now", now)
        script = tree / Path(__file__).relative_to(ROOT)
        (folder / "names").write_text("\n".join([*now, *gone]))
        subprocess.run([sys.executable, script, "texts", folder / "before", "--names", folder / "names"], check=True)
        shown = ["git", "diff", "--no-index", "--no-prefix", "--no-renames", "before", "now"]
        return subprocess.run(shown, cwd=folder, capture_output=True, text=True).stdout


@contextlib.contextmanager
def checked_out(commit: str, tree: Path) -> Iterator[Path]:
    """A commit's files, for as long as they are needed."""
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, commit], cwd=ROOT, check=True)
    try:
        yield tree
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


def main(arguments: Sequence[str]) -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("renew", "diff", "texts"))
    parser.add_argument("where", nargs="?", help="the commit of diff, the folder of texts")
    parser.add_argument("-k", dest="words", default="", help="words that a configuration's table and name have")
    parser.add_argument("--names", type=Path, help="a file of configurations' names instead of -k")
    given = parser.parse_args(arguments)
    if given.what == "renew":
        return renew(given.words)
    if given.where is None:
        parser.error(f"{given.what}: of which commit, or to which folder?")
    if given.what == "diff":
        print(diff(given.where, given.words), end="")
        return None
    chosen = configurations(given.words)
    if given.names is not None:
        named = given.names.read_text().splitlines()
        chosen = [name for name in chosen if name in named]
    for name in chosen:
        write_texts(Path(given.where), {name: ask(name)})
    return None


if __name__ == "__main__":
    # Of the tree that this file is in, wherever it is run.
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/calib")]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Tables import this module: one of that name, not another.
    sys.modules["pinned"] = sys.modules["__main__"]
    main(sys.argv[1:])
