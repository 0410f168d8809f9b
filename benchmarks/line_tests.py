"""Which tests execute which line, and how long each takes: coverage with a context for each test.

Every test file runs in a process of its own, so that what one file leaves in caches hides nothing from another.
Seconds are those of processors: on a busy machine too a test has its own.
"""

import json
import os
import shutil
import sqlite3
import time
from collections import defaultdict
from collections.abc import Generator, Iterable
from contextlib import closing, suppress
from difflib import SequenceMatcher
from functools import cache
from hashlib import sha256
from pathlib import Path

import forked_pytest
import pytest
from coverage import Coverage
from coverage.numbits import num_in_numbits, numbits_to_nums, nums_to_numbits

FILE_LIMIT_S = 1200.0
"""What a test file has not begun by then is left out."""
TEST_LIMIT_S = 600
"""Slower tests are left out; coverage makes them some three times slower than they are, and a busy machine again."""
CONTEXT = "KVTWIN_TEST"
"""Environment variable that tells programs which test started them."""


@cache
def digest(path: Path | str) -> str:
    """Of a file's text."""
    return sha256(Path(path).read_bytes()).hexdigest()[:16]


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


def processor_s() -> float:
    """Of this process and of those that it started and that have ended."""
    return sum(os.times()[:4])


class Recorder:
    """Gives each test its context, and keeps the seconds of those that passed."""

    def __init__(self, place: Path, sources: list[str]) -> None:
        self._ends_s = time.monotonic() + FILE_LIMIT_S
        self._place, self._sources = place, sources
        self._seconds: dict[str, float] = {}
        self._failed: set[str] = set()

    def pytest_configure(self) -> None:
        # What a test starts reads its settings here, by way of coverage's own .pth file.
        settings = self._place.with_suffix(".ini")
        folders = "\n    ".join(self._sources)
        settings.write_text(
            f"[run]\nparallel = true\ndata_file = {self._place}\nsource =\n    {folders}\ncontext = ${{{CONTEXT}-}}\n"
        )
        os.environ["COVERAGE_PROCESS_START"] = str(settings)
        self._coverage = Coverage(self._place, data_suffix=True, config_file=False, source=self._sources)
        self._coverage.start()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        os.environ[CONTEXT] = item.nodeid
        self._coverage.switch_context(item.nodeid)
        began_s = processor_s()
        try:
            return (yield)
        finally:
            self._seconds[item.nodeid] = processor_s() - began_s
            self._coverage.switch_context("")
            if time.monotonic() > self._ends_s:
                item.session.shouldstop = "the file takes too long"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self._failed.add(report.nodeid)

    def pytest_unconfigure(self) -> None:
        self._coverage.stop()
        self._coverage.save()
        passed = {test: round(s, 4) for test, s in self._seconds.items() if test not in self._failed}
        sources = {path: digest(Path(path)) for path in self._coverage.get_data().measured_files()}
        for path, text in sources.items():
            if not self._place.with_name(text).exists():
                shutil.copyfile(path, self._place.with_name(text))
        self._place.with_suffix(".json").write_text(json.dumps({"seconds": passed, "sources": sources}))


class LineTests:
    """The map of a tree in a folder: for each text of a test file, what its tests executed and their seconds."""

    def __init__(self, folder: Path, tree: Path, packages: Iterable[str]) -> None:
        self._folder, self._tree = folder.resolve(), tree.resolve()
        self._sources = [str(self._tree / package) for package in packages]
        self._folder.mkdir(parents=True, exist_ok=True)
        self.seconds: dict[str, float] = {}
        self._lines: dict[str, dict[str, list[bytes | None]]] = {}
        """By path and test: bit sets of lines; None where they are not known."""

    def _place(self, test: str) -> Path:
        return self._folder / f"{test.removesuffix('.py').replace('/', '-')}-{digest(self._tree / test)}"

    def gather(self, test: str) -> None:
        """Record a test file that is not known with this text."""
        place = self._place(test)
        notes = place.with_suffix(".json")
        if not notes.exists():
            flags = ("-m", "not gpu", "--timeout", str(TEST_LIMIT_S))
            limit_s = FILE_LIMIT_S + 2 * TEST_LIMIT_S
            forked_pytest.run(self._tree, [test], Recorder(place, self._sources), limit_s, *flags)
            if not notes.exists():
                notes.write_text(json.dumps({"seconds": {}, "sources": {}}))

    def load(self, tests: Iterable[str]) -> None:
        """Read what is known of test files."""
        for test in tests:
            place = self._place(test)
            if place.with_suffix(".json").exists():
                notes = json.loads(place.with_suffix(".json").read_text())
                self.seconds |= notes["seconds"]
                for data in self._folder.glob(f"{place.name}.*.*"):
                    self._read(data, notes["sources"])

    def _read(self, data: Path, sources: dict[str, str]) -> None:
        # What was killed may leave half a file.
        with closing(sqlite3.connect(data)) as database, suppress(sqlite3.DatabaseError):
            for path, test, bits in database.execute(
                "select path, context, numbits from line_bits join file on file.id = file_id "
                "join context on context.id = context_id"
            ):
                if test in self.seconds and Path(path).exists():
                    tests = self._lines.setdefault(os.path.relpath(path, self._tree), {})
                    tests.setdefault(test, []).append(self._now(path, sources.get(path, ""), bits))

    def _now(self, path: str, then: str, bits: bytes) -> bytes | None:
        """Lines of a file as it is now, of those of what it was then."""
        if then in ("", digest(path)):
            return bits
        text = self._folder / then
        if not text.exists():
            return None
        places = moved(text, Path(path))
        return nums_to_numbits({j for i in numbits_to_nums(bits) for j in places[i]})

    def tests_of(self, path: str, lines: Iterable[int] | None = None) -> set[str]:
        """That execute any of the lines, or anything, of a file."""
        return {
            test
            for test, sets in self._lines.get(path, {}).items()
            if lines is None or any(bits is None or any(num_in_numbits(n, bits) for n in lines) for bits in sets)
        }
