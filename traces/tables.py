"""What `kvtwin trace` shows on a terminal."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Column, Table

from traces.catalogue import Entry
from traces.readers import Trace
from traces.summary import LengthSummary, TraceSummary


def print_summary(trace: Trace, summary: TraceSummary) -> None:
    """Print the statistics of a trace as two small tables."""
    console = Console()
    overall = Table(title=f"{trace.path} ({trace.format})", title_justify="left", show_header=False)
    rows = [
        ("requests", f"{summary.requests:,}"),
        ("duration", f"{summary.duration_s:,.1f} s"),
        ("request rate", f"{summary.request_rate:.4g} /s"),
        ("interval mean, CV", f"{summary.interval_mean_s * 1000:.4g} ms, {summary.interval_cv:.3g}"),
        ("correlation of lengths", f"{summary.correlation:.3f}"),
    ]
    if summary.shared_stamps:
        rows.append(("arrive with the one before", f"{summary.shared_stamps:.1%} (see convert --spread-ties)"))
    if summary.sessions:
        rows.append(("sessions", f"{summary.sessions:,}"))
    if summary.infinite_cache_token_hits is not None:
        rows.append(("prompt tokens in an infinite prefix cache", f"{summary.infinite_cache_token_hits:.1%}"))
        rows.append(("prefix blocks in it", f"{summary.infinite_cache_block_hits:.1%}"))
    if trace.skipped:
        rows.append(("rows skipped", f"{trace.skipped:,}"))
    for row in rows:
        overall.add_row(*row)
    console.print(overall)
    heads = (Column(name, justify="right") for name in ("mean", "p50", "p90", "p99", "max", "total"))
    lengths = Table("tokens", *heads)
    for name, length in (("prompt", summary.prompt_tokens), ("output", summary.output_tokens)):
        lengths.add_row(name, *_cells(length))
    console.print(lengths)


def _cells(length: LengthSummary) -> list[str]:
    return [f"{value:,.0f}" for value in (length.mean, length.p50, length.p90, length.p99, length.max, length.total)]


def print_catalogue(entries: Sequence[Entry]) -> None:
    """Print the public traces, their licences and whether they can be verified."""
    console = Console()
    for entry in entries:
        rows = f"{entry.rows:,} requests, " if entry.rows else ""
        checksum = "can be verified" if entry.sha256 else "needs --sha256"
        console.print(f"[bold]{entry.name}[/]: {rows}{entry.licence}, {checksum}", highlight=False)
        console.print(Padding(entry.about, (0, 0, 0, 2)))
    console.print("URLs, citations and checksums: kvtwin trace list --json")


@contextmanager
def download_bar(name: str, *, shown: bool) -> Iterator[Callable[[int, int | None], None] | None]:
    """Show a progress bar on stderr while the block runs; yields what to call with (bytes so far, total or None)."""
    if not shown:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
