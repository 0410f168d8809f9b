"""Progress bars for long runs and for many of them, on standard error."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from traces.request import Request

SHOW_AFTER_S = 1.0
EVERY = 256


def track(requests: Iterable[Request], label: str, total: int | None) -> Iterator[Request]:
    """Pass `requests` on; after a second, show how many there were."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    task = progress.add_task(f"{label}: requests arrived", total=total)
    begun_s, started = monotonic(), False
    try:
        for count, request in enumerate(requests):
            if count % EVERY == 0:
                if not started and monotonic() - begun_s > SHOW_AFTER_S:
                    progress.start()
                    started = True
                progress.update(task, completed=count)
            yield request
    finally:
        progress.stop()


class Ended(Protocol):
    """A run of many that has ended."""

    @property
    def error(self) -> str | None:
        """Why it failed."""
        ...


@contextmanager
def runs_bar(label: str) -> Iterator[Callable[[int], Callable[[Ended], None]]]:
    """A bar for many runs: told how many there are, it returns what is called at the end of each."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.2f}/s"), TimeRemainingColumn(), TextColumn("{task.fields[failed]} failed"),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:

        def begin(total: int) -> Callable[[Ended], None]:
            task, begun_s, failed = bar.add_task(label, total=total, rate=0.0, failed=0), monotonic(), 0
            ended = 0

            def told(outcome: Ended) -> None:
                nonlocal failed, ended
                ended += 1
                failed += outcome.error is not None
                bar.update(task, advance=1, rate=ended / max(1e-9, monotonic() - begun_s), failed=failed)

            return told

        yield begin


@contextmanager
def work_bar(label: str) -> Iterator[Callable[[str, float, float], None]]:
    """A bar for work whose amount becomes known on the way: told a stage, what is done, and how much it will be."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"))
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task(label, total=None)

        def told(stage: str, done: float, total: float) -> None:
            bar.update(task, description=f"{label}: {stage}", completed=done, total=max(total, done, 1.0))

        yield told
