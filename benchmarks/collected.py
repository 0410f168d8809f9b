"""A process that has collected all tests and forks for each run of some: without a start, and without an import.

A fault inside functions is put into those of the fork; what a fork imports or starts itself finds it in the file.
"""

import ast
import gc
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from mmap import mmap
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FunctionType
from typing import NamedTuple

import forked_pytest
import hypothesis
import probes
import pytest
from hypothesis import Phase


class Run(NamedTuple):
    """Of some tests, in a fork."""

    tests: list[str]
    test_s: float
    """What a test may take, of a processor; then it is stopped."""
    most_s: float
    """What they may take together."""


class Change(NamedTuple):
    """Of a module's text, in functions."""

    path: Path
    old: str
    new: ast.Module
    first: int
    """Of its blocks."""
    blocks: tuple[int, ...]
    """Of the change: where one has run already it comes too late."""


class Told(NamedTuple):
    """Of a test."""

    test: str
    seconds: float
    end: str
    hits: bytes
    """A byte for each block."""


class TooSlowError(BaseException):
    """No test may catch it."""


def fix_hypothesis() -> None:
    """A failure is enough, and need not be a small one."""
    phases = (Phase.explicit, Phase.generate)
    hypothesis.settings.register_profile("mutants", hypothesis.settings.default, phases=phases)
    hypothesis.settings.load_profile("mutants")


# -- a fault in functions that exist -----------------------------------------------------------------------------------


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Of a module and all functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def swap(change: Change) -> bool:
    """Give a module's functions their new code, where each has one of its place, name and closure."""
    codes: list[dict[tuple[str, int], list[CodeType]]] = []
    for tree in (ast.parse(change.old), change.new):
        probes.Prober(tree, change.first)
        codes.append(defaultdict(list))
        for code in codes_in(compile(tree, str(change.path), "exec", dont_inherit=True)):
            codes[-1][code.co_qualname, code.co_firstlineno].append(code)
    old, new = codes
    if {key: len(found) for key, found in old.items()} != {key: len(found) for key, found in new.items()}:
        return False
    pairs = {a: b for key, found in old.items() for a, b in zip(found, new[key], strict=True) if a != b}
    for function in [it for it in gc.get_objects() if type(it) is FunctionType]:
        if function.__code__.co_filename == str(change.path) and function.__code__ in pairs:
            after = pairs[function.__code__]
            if after.co_freevars != function.__code__.co_freevars:
                return False
            function.__code__ = after
    return True


# -- the process -------------------------------------------------------------------------------------------------------


class Plugin:
    """Where pytest would run what it has collected, it waits to be asked."""

    def __init__(self, connection: Connection, hits: mmap) -> None:
        self._connection, self._hits = connection, hits
        self._ends: set[str] = set()

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        fix_hypothesis()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._ends.add(report.outcome)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        early = self._hits[:]
        gc.collect()
        gc.freeze()
        self._connection.send(list(items))
        while True:
            try:
                run, change = self._connection.recv()
            except EOFError:
                os._exit(0)
            if change is not None and any(early[change.first + block] for block in change.blocks):
                self._connection.send(("cannot", []))
            else:
                self._connection.send(self._fork(run, [items[test] for test in run.tests if test in items], change))

    def _fork(self, run: Run, items: list[pytest.Item], change: Change | None) -> tuple[str, list[Told]]:
        receiver, sender = multiprocessing.Pipe(False)
        parent, ends_s = os.getppid(), time.monotonic() + 60.0 + forked_pytest.WALL * run.most_s
        child = os.fork()
        if child == 0:
            try:
                os.setpgrp()
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                self._connection.close()
                self._child(run, items, change, sender)
            finally:
                os._exit(0)
        sender.close()
        told: list[Told] = []
        try:
            while time.monotonic() < ends_s and os.getppid() == parent:
                if receiver.poll(0.2):
                    message = receiver.recv()
                    if isinstance(message, str):
                        return message, told
                    told.append(message)
        except EOFError:
            return "failed", told
        finally:
            receiver.close()
            forked_pytest.end(child)
        return "late", told

    def _child(self, run: Run, items: list[pytest.Item], change: Change | None, sender: Connection) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (forked_pytest.MOST_BYTES, forked_pytest.MOST_BYTES))
        gc.unfreeze()
        if change is not None and not swap(change):
            sender.send("cannot")
            return
        gc.freeze()
        signal.signal(signal.SIGPROF, self._stop)
        ends_s = time.process_time() + run.most_s
        for item, following in zip(items, [*items[1:], None], strict=True):
            self._ends.clear()
            self._hits[:] = bytes(len(self._hits))
            left_s = min(run.test_s, max(ends_s - time.process_time(), 0.05))
            began_s = forked_pytest.processor_s()
            signal.setitimer(signal.ITIMER_PROF, left_s, 1.0)
            try:
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            except TooSlowError:
                self._ends.add("failed")
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            seconds, end = (
                forked_pytest.processor_s() - began_s,
                max(self._ends, key=["passed", "skipped", "failed"].index),
            )
            sender.send(Told(item.nodeid, seconds, end, self._hits[:] if change is None else b""))
            if change is not None and end == "failed":
                sender.send("failed" if seconds < left_s else "late")
                return
        sender.send("passed")

    def _stop(self, *_: object) -> None:
        raise TooSlowError


class Server:
    """The process, of a tree, for its parent."""

    def __init__(self, tree: Path, files: list[str], table: Path) -> None:
        self.tree = tree
        self._connection, theirs = multiprocessing.Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._connection.close()
                forked_pytest.become_quiet(tree)
                # Whoever is told to end ends its fork first.
                signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
                os.environ[probes.TABLE] = str(table)
                flags = ["-q", "-s", "-p", "no:cacheprovider", "-m", "not gpu", "--timeout=900"]
                plugin = Plugin(theirs, probes.install(str(table)))
                flags += ["--continue-on-collection-errors", f"--basetemp={tree.with_suffix('.tmp')}"]
                pytest.main([*flags, *files], plugins=[plugin])
            finally:
                os._exit(1)
        theirs.close()
        self.tests: list[str] = self._connection.recv()

    def ask(self, run: Run, change: Change | None = None) -> tuple[str, list[Told]]:
        """How a run ends, and of each test what it did."""
        self._connection.send((run, change))
        return self._connection.recv()

    def close(self) -> None:
        """End it, and what it has started."""
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGTERM)
            os.waitpid(self.pid, 0)
