"""Opening trace files: gzip or plain, in blocks of whole lines, every failure told as one `TraceError`."""

import gzip
import zlib
from codecs import getincrementaldecoder
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import IO, TextIO, cast

from traces.errors import TraceError

MOST_LINE_CHARS = 1 << 24  # one request with a million tokens of prompt in words is a third of it
BLOCK_CHARS = 1 << 16  # small enough that the first request comes at once, large enough that a block's overhead is not


def _open_binary(path: Path) -> IO[bytes]:
    """Open `path` for reading, decompressing where its first bytes say gzip, whatever its name says."""
    with path.open("rb") as raw:
        is_gzip = raw.read(2) == b"\x1f\x8b"
    return cast(IO[bytes], gzip.open(path)) if is_gzip else path.open("rb")


def _open_text(path: Path) -> TextIO:
    """Without a byte-order mark, and with `\\n` for whatever ends lines."""
    return TextIOWrapper(_open_binary(path), encoding="utf-8-sig")


def _undecodable(path: Path) -> TraceError:
    """Name the line that is not UTF-8: the text layer reads ahead and cannot tell."""
    decoder, number, column = getincrementaldecoder("utf-8")(), 1, 1
    with _open_binary(path) as file:
        while piece := file.readline(BLOCK_CHARS):
            try:
                decoder.decode(piece)
            except UnicodeDecodeError as error:
                byte, place = error.object[error.start], column + error.start - (len(error.object) - len(piece))
                return TraceError(
                    f"{path}, line {number}: byte 0x{byte:02x} at column {place} is not UTF-8 text; "
                    "re-encode the file (`iconv -t UTF-8`) or check that it is a trace at all"
                )
            number, column = (number + 1, 1) if piece.endswith(b"\n") else (number, column + len(piece))
    return TraceError(f"{path}: not UTF-8 text; re-encode the file (`iconv -t UTF-8`)")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what the operating system, gzip or the decoder raises into a `TraceError` that names `path`.

    Pipes and devices are refused: a trace is read more than once, and they may have no end.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise TraceError(
                f"{path}: is a pipe or a device, and a trace is read more than once; write it to a file first"
            )
        yield
    except FileNotFoundError:
        raise TraceError(
            f"{path}: no such file; check the path, or get a public trace with `kvtwin trace fetch`"
        ) from None
    except IsADirectoryError:
        raise TraceError(f"{path}: is a directory; name one trace file in it") from None
    except UnicodeDecodeError:
        raise _undecodable(path) from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{path}: damaged gzip file ({error}); download it again") from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror or error}); check the path and its rights") from None


def text_blocks(path: Path, chars: int = BLOCK_CHARS) -> Iterator[tuple[int, str]]:
    """Yield (number of the first line, text) for blocks of whole lines; newlines are `\\n`, no byte-order mark.

    Line numbers start at 1. The last block may lack its final newline. Raises `TraceError` as `reading` does, and for
    a line of more than `MOST_LINE_CHARS`.
    """
    with reading(path), _open_text(path) as file:
        number = 1
        while text := file.read(chars):
            rest = file.readline(MOST_LINE_CHARS)
            if len(rest) == MOST_LINE_CHARS and not rest.endswith("\n"):
                number += text.count("\n")
                raise TraceError(
                    f"{path}, line {number}: is longer than {MOST_LINE_CHARS} characters; is it a trace, with a line "
                    "a request?"
                )
            text += rest
            yield number, text
            number += text.count("\n")


def pieces(path: Path) -> Iterator[str]:
    """Yield the text of a file, BLOCK_CHARS at a time wherever lines end, as `text_blocks` does."""
    with reading(path), _open_text(path) as file:
        while text := file.read(BLOCK_CHARS):
            yield text
