"""Downloading one file over HTTP(S): resumed where it was cut off, verified by SHA-256, moved into place when right."""

import hashlib
import http.client
import os
import re
from collections.abc import Callable
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request as HttpRequest
from urllib.request import urlopen

from traces.errors import TraceError

Progress = Callable[[int, int | None], None]
TIMEOUT_S = 30.0
_CHUNK_BYTES = 1 << 16


def download(url: str, target: Path, sha256: str, progress: Progress | None = None) -> None:
    """Fetch `url` to `target`, whose SHA-256 must be `sha256` (hex).

    Bytes go to `<target>.part`; one left by an earlier, interrupted call is continued where the server can (HTTP
    Range) and begun anew where it cannot. A `target` that is already right is left alone. Raises `TraceError`: on a
    cut-off, keeping the part for the next call; on a wrong checksum, saying where the wrong bytes lie, and without
    touching `target`.
    """
    if not re.fullmatch(r"[0-9a-fA-F]{64}", sha256):
        raise TraceError(f"checksum {sha256!r} is not a SHA-256; give its 64 hexadecimal digits")
    if not url.startswith(("http://", "https://")):
        raise TraceError(f"URL {url!r} is not of http or https; give one that is")
    if target.exists() and not target.is_file():
        raise TraceError(f"{target}: is no file, and what comes must be verified first; name a file")
    wanted = sha256.lower()
    part = target.with_name(target.name + ".part")
    try:
        if target.exists() and _digest(target) == wanted:
            return
        if not (part.exists() and _digest(part) == wanted):  # else only the last step of an earlier call was missing
            _transfer(url, part, progress)
        found = _digest(part)
        if found != wanted:
            wrong = target.with_name(target.name + ".wrong")
            os.replace(part, wrong)  # noqa: PTH105
            raise TraceError(
                f"{url}: SHA-256 is {found} where {wanted} is wanted; {target} was not written, what came is kept as "
                f"{wrong}: look at it (an error page?), or give --sha256 if the file was rightly changed"
            )
        os.replace(part, target)  # noqa: PTH105
    except OSError as error:
        raise TraceError(f"{target}: cannot be written ({error.strerror or error}); check the folder") from None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _transfer(url: str, part: Path, progress: Progress | None) -> None:
    """Bring `part` to its full length, continuing after the bytes that it has."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "kvtwin", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        with urlopen(HttpRequest(url, headers=headers), timeout=TIMEOUT_S) as response:
            resumed = response.status == 206 and _starts_at(response.headers.get("Content-Range", "")) == have
            if not resumed:
                have = 0  # the server ignored the range: what comes is the whole file
            _receive(url, response, part, have, progress)
    except HTTPError as error:
        if error.code == 416 and have:  # nothing after what we have: it is whole, or not of this file
            return
        raise TraceError(
            f"{url}: the server answers {error.code} {error.reason}; check the URL, or give --url"
        ) from None
    except (URLError, TimeoutError, ConnectionError, http.client.HTTPException, ValueError) as error:
        # ValueError: a URL of no host.
        reason = getattr(error, "reason", None) or error
        raise TraceError(f"{url}: {reason}; check the connection and run the command again to resume") from None


def _starts_at(content_range: str) -> int | None:
    match = re.match(r"bytes (\d+)-", content_range)
    return int(match[1]) if match else None


def _receive(url: str, response: http.client.HTTPResponse, part: Path, have: int, progress: Progress | None) -> None:
    total = None if response.length is None else have + response.length
    with part.open("ab" if have else "wb") as file:
        while chunk := response.read(_CHUNK_BYTES):
            file.write(chunk)
            have += len(chunk)
            if progress is not None:
                progress(have, total)
    if total is not None and have < total:
        raise TraceError(f"{url}: cut off after {have} of {total} bytes; run the command again to resume")
