"""Public traces: where they are, what they may be used for, what to cite; and fetching one, verified."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from traces.download import download
from traces.errors import TraceError

CATALOGUE = Path(__file__).with_name("catalogue.json")


@dataclass(frozen=True, slots=True)
class Entry:
    """One public trace. `sha256`, `bytes` and `rows` are None where the file was never fetched."""

    name: str
    about: str
    url: str
    sha256: str | None
    bytes: int | None
    rows: int | None
    format: str
    licence: str
    citation: str

    @property
    def file_name(self) -> str:
        """The last part of the URL."""
        return self.url.rpartition("/")[2]


def entries() -> tuple[Entry, ...]:
    """Return all entries of the catalogue."""
    return tuple(Entry(**values) for values in json.loads(CATALOGUE.read_text(encoding="utf-8")))


def entry(name: str) -> Entry:
    """Return the entry `name`, or raise the `TraceError` that gives the nearest right name."""
    known = {item.name: item for item in entries()}
    if name not in known:
        close = get_close_matches(name, known, cutoff=0.4)
        hint = f"did you mean {close[0]!r}?" if close else "see `kvtwin trace list`"
        raise TraceError(f"trace {name!r} is not in the catalogue; {hint}")
    return known[name]


def fetch(
    name: str,
    out: str | Path | None = None,
    *,
    url: str | None = None,
    sha256: str | None = None,
    progress: Callable[[int, int | None], None] | None = None,
) -> Path:
    """Download a trace of the catalogue, verify it, and return where it lies.

    `out` is a file or an existing folder (default: the current one). `url` replaces the catalogue's, for mirrors;
    `sha256` its checksum, and is required where it has none: a file that cannot be verified is not fetched.
    `progress` is called with bytes so far and the total where it is known. An interrupted download leaves
    `<out>.part` and is resumed by the next call. Raises `TraceError`.
    """
    item = entry(name)
    wanted = sha256 or item.sha256
    if wanted is None:
        raise TraceError(
            f"trace {name!r} has no checksum in the catalogue, as its authors publish none and it was not at hand to "
            f"compute one; download {url or item.url} yourself, or give --sha256 HEX from a source you trust"
        )
    target = Path(out) if out is not None else Path(item.file_name)
    if target.is_dir():
        target = target / item.file_name
    download(url or item.url, target, wanted, progress)
    return target
