"""A folder of results is one command's: no other writes there meanwhile, and nothing of an earlier one stays."""

import errno
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from sim.errors import UserError
from sim.files import make_folder, without_links

LOCK_FILE = ".kvtwin.lock"
"""Locked while a command writes; it stays where there are folders below, whose names it holds."""
RESULT_FILES = (
    *("result.json", "series.csv", "timeline.json.gz", "requests.csv", "requests.parquet", "scenario.toml"),
    *("comparison.json", "comparison.md", "report.html", "crash.txt"),
    *("validation.md", "validation.json", "twin.png", "iterations.csv", "against.json", "against.png"),
    *(f"figures/{name}.png" for name in ("ttft_tpot", "queueing", "memory", "lanes", "engines")),
)
"""What `run`, `compare`, `report`, `live`, `serve` and `validate` write into a folder."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

_owned: set[Path] = set()


@contextmanager
def owning(folder: Path, flag: str = "--out") -> Iterator[None]:
    """Within, `folder` is this process's own: made where it is missing, and locked against other commands.

    Args:
        folder: where results go; owning it again, within, changes nothing.
        flag: the option that named it, for messages.

    Raises:
        UserError: another command writes there, or it cannot be written.
    """
    place = without_links(folder)
    if place in _owned:
        yield
        return
    make_folder(folder, flag)
    try:
        lock = _locked(folder, flag)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{flag}: cannot write into {folder} ({reason}); check its rights, or name another") from error
    _owned.add(place)
    try:
        yield
    except OSError as error:
        # Writing tells the reason alone; what has a name elsewhere is no fault of this folder.
        if error.errno not in FULL or not Path(error.filename or folder).resolve().is_relative_to(place):
            raise
        reason = error.strerror or error
        raise UserError(f"{flag}: cannot write into {folder} ({reason}); make room, or name another") from error
    finally:
        _owned.discard(place)
        if not os.fstat(lock).st_size:
            with suppress(OSError):
                (folder / LOCK_FILE).unlink(missing_ok=True)
        os.close(lock)


def _locked(folder: Path, flag: str) -> int:
    """The descriptor of the folder's lock file, locked."""
    path = folder / LOCK_FILE
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        try:
            _lock(lock, folder, flag)
            # The command that had it before may have removed the file in between: then it locks nothing.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), path.stat()):
                    return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _lock(lock: int, folder: Path, flag: str) -> None:
    try:
        import fcntl  # noqa: PLC0415 - POSIX has it
    except ImportError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"{flag}: another command writes into {folder} now; wait until it ends, or name another"
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        print(f"kvtwin: warning: {folder} cannot be locked ({error.strerror}): write no other results", file=sys.stderr)


def clear(folder: Path, below: Sequence[str] = ()) -> None:
    """Remove what earlier commands wrote to a folder that is owned, and nothing else.

    Args:
        folder: what it holds under one of `RESULT_FILES` goes, and so with the folders below that they noted.
        below: folders in it that get results of their own, the deepest first: noted for the next that clears it.
    """
    lock = folder / LOCK_FILE
    for name in lock.read_text(encoding="utf-8").splitlines():
        place = folder / name
        if place.is_dir() and folder.resolve() in place.resolve().parents:
            with owning(place):
                clear(place)
            _remove_empty(place)
    for name in RESULT_FILES:
        for path in (folder / name, folder / f"{name}.part"):
            path.unlink(missing_ok=True)
    _remove_empty(folder / "figures")
    # Emptied in place: the file is locked.
    lock.write_text("".join(f"{name}\n" for name in below), encoding="utf-8")


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()
