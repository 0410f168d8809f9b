"""Which tests execute which block of lines (`probes`), and how long each takes.

Every test file runs in a fork of its own, so that what one file leaves in caches hides nothing from another.
Seconds are those of processors: on a busy machine too a test has its own.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable
from difflib import SequenceMatcher
from functools import cache
from hashlib import sha256
from pathlib import Path

from collected import Run, Server
from probes import blocks_of

FILE_LIMIT_S = 1200.0
"""What a test file has not begun by then is left out."""


@cache
def digest(path: Path) -> str:
    """Of a file's text."""
    return sha256(path.read_bytes()).hexdigest()[:16]


@cache
def moved(old: Path, new: Path) -> dict[int, list[int]]:
    """Where lines of a text are in a later one; for those changed, and those next to new ones, all that might be."""
    found: dict[int, list[int]] = defaultdict(list)
    lines = [path.read_text().splitlines() for path in (old, new)]
    for what, i1, i2, j1, j2 in SequenceMatcher(None, *lines, autojunk=False).get_opcodes():
        if what == "equal":
            for i, j in zip(range(i1, i2), range(j1, j2), strict=True):
                found[i + 1].append(j + 1)
        else:
            for i in range(max(i1 - 1, 0), i2 + 1):
                found[i + 1] += range(j1 + 1, j2 + 1)
    return found


@cache
def owners(path: Path) -> tuple[dict[int, int], int]:
    """The block of each line of a text, and how many there are."""
    prober = blocks_of(path.read_text())
    return prober.owner, prober.count


def file_of(test: str) -> str:
    """Of a test."""
    return test.partition("::")[0]


class LineTests:
    """The map of a tree in a folder: for each text of a test file, what its tests executed and their seconds.

    A test that takes more than `most_s` is stopped: it is known to execute what it had executed by then, and its
    seconds are infinite; so are those of a test that failed.
    """

    def __init__(self, folder: Path, root: Path, sources: list[str], most_s: float) -> None:
        self._folder, self._root, self._sources, self._most_s = folder.resolve(), root, sources, most_s
        self._folder.mkdir(parents=True, exist_ok=True)
        self.seconds: dict[str, float] = {}
        self._hits: dict[str, dict[str, dict[str, int]]] = {}
        """By path, digest of its text, and test: a bit for each block."""
        self.first: dict[str, int] = {}
        """The first block of each file among those of all."""
        size = 0
        for name in sources:
            self.first[name] = size
            size += owners(root / name)[1]

    def _place(self, test: str) -> Path:
        name = f"{test.removesuffix('.py').replace('/', '-')}-{digest(self._root / test)}-{self._most_s:g}s.json"
        return self._folder / name

    def is_known(self, test: str, collected: Iterable[str]) -> bool:
        """Whether a file with this text has been recorded, and its tests, whose parameters may be of another file."""
        if not (place := self._place(test)).exists():
            return False
        notes = json.loads(place.read_text())
        # Maps of before say nothing of tests that were skipped.
        known = {*notes["seconds"], *notes.get("skipped", ())}
        return known == {name for name in collected if file_of(name) == test}

    def gather(self, test: str, server: Server) -> None:
        """Record a test file."""
        tests = [name for name in server.tests if file_of(name) == test]
        told = server.ask(Run(tests, self._most_s, FILE_LIMIT_S))[1]
        seconds, skipped = dict.fromkeys(tests, math.inf), [name for name, _, end, _ in told if end == "skipped"]
        hits: dict[str, dict[str, str]] = defaultdict(dict)
        for name, took_s, end, bits in told:
            seconds[name] = round(took_s, 4) if end != "failed" else math.inf
            for path in self._sources if end != "skipped" else ():
                part = bits[self.first[path] : self.first[path] + owners(self._root / path)[1]]
                if any(part):
                    hits[path][name] = f"{int(part[::-1].translate(DIGITS), 2):x}"
        for name in skipped:
            del seconds[name]
        digests = {path: digest(self._root / path) for path in hits}
        for path, text in digests.items():
            if not (self._folder / text).exists():
                (self._folder / text).write_bytes((self._root / path).read_bytes())
        self._place(test).write_text(
            json.dumps({"seconds": seconds, "skipped": skipped, "digests": digests, "hits": hits})
        )

    def load(self, tests: Iterable[str]) -> None:
        """Read what is known of test files."""
        for test in tests:
            if (place := self._place(test)).exists():
                notes = json.loads(place.read_text())
                self.seconds |= notes["seconds"]
                for path, text in notes["digests"].items():
                    found = self._hits.setdefault(path, {}).setdefault(text, {})
                    found |= {name: int(bits, 16) for name, bits in notes["hits"][path].items()}

    def blocks(self, path: str, lines: Iterable[int]) -> tuple[int, ...]:
        """That lines of a file are in."""
        owner = owners(self._root / path)[0]
        return tuple({owner[line] for line in lines if line in owner})

    def tests_of(self, path: str, lines: Iterable[int] | None = None) -> set[str]:
        """That execute any of the lines, or anything, of a file."""
        found: set[str] = set()
        for text, bits_of in self._hits.get(path, {}).items():
            if lines is None:
                found |= bits_of.keys()
                continue
            wanted, owner = set(lines), owners(self._folder / text)[0]
            if text != digest(self._root / path):
                places = moved(self._folder / text, self._root / path)
                wanted = {i for i, now in places.items() if wanted.intersection(now)}
            mask = sum({1 << owner[line] for line in wanted if line in owner})
            found |= {test for test, bits in bits_of.items() if bits & mask}
        return found


DIGITS = bytes([ord("0"), ord("1")]) + bytes(range(2, 256))
"""What bytes 0 and 1 are written as."""
