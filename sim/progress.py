"""A progress bar for long runs, on standard error."""

from collections.abc import Iterable, Iterator
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

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
