"""A folder of results is one command's: no other writes there meanwhile, and it changes as a whole or not at all."""

import errno
import os
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import sleep

from msgspec import MsgspecError, Struct, json

from sim.errors import UserError
from sim.files import make_folder, without_links, write_atomically

LOCK_FILE = ".kvtwin.lock"
"""Locked while a command writes; it stays where there are folders below, whose names it holds."""
NEW = ".kvtwin.new"
"""Where a command writes what is to replace the results of before."""
WHOLE_FILE = "whole.json"
"""In it when nothing is missing any more: from then on the results are put in place, by the next command if need be."""
UNFINISHED = "unfinished"
"""Folder below for what had finished of a run that ended early, where there are results that it must not replace."""
RESULT_FILES = (
    *("result.json", "series.csv", "timeline.json.gz", "requests.csv", "requests.parquet", "scenario.toml"),
    *("comparison.json", "comparison.md", "report.html", "crash.txt"),
    *("validation.md", "validation.json", "twin.png", "iterations.csv", "against.json", "against.png"),
    *(f"figures/{name}.png" for name in ("ttft_tpot", "queueing", "memory", "lanes", "engines")),
)
"""What `run`, `compare`, `report`, `live`, `serve` and `validate` write into a folder."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
LEVELS = 2
"""Of folders below one: `validate` has DIR/POLICY/live-1."""
ATTEMPTS, PAUSE_S = 3, 0.02
"""To lock: another command holds a lock for a moment to see whether it is free."""

_owned: dict[Path, int] = {}
"""Folders of this process, and the threads whose they are."""


@contextmanager
def owning(folder: Path, flag: str = "--out") -> Iterator[None]:
    """Within, `folder` is this process's own: made where it is missing, and locked against other commands.

    So are the folders above and below it: a command that writes into one of them is refused, and refuses this one. What
    a killed command left half put in place is put in place first.

    Args:
        folder: where results go; owning it again, within, changes nothing.
        flag: the option that named it, for messages.

    Raises:
        UserError: another command writes there, or it cannot be written.
    """
    place = without_links(folder)
    if _is_ours(place):
        yield
        return
    make_folder(folder, flag)
    try:
        lock = _locked(folder, flag)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{flag}: cannot write into {folder} ({reason}); check its rights, or name another") from error
    try:
        _refuse_others(place, flag)
        _owned[place] = threading.get_ident()
        _settle(folder)
        yield
    except OSError as error:
        # Writing tells the reason alone; what has a name elsewhere is no fault of this folder.
        if error.errno not in FULL or not Path(error.filename or folder).resolve().is_relative_to(place):
            raise
        reason = error.strerror or error
        raise UserError(f"{flag}: cannot write into {folder} ({reason}); make room, or name another") from error
    finally:
        _owned.pop(place, None)
        try:
            if not os.fstat(lock).st_size:
                with suppress(OSError):
                    (folder / LOCK_FILE).unlink(missing_ok=True)
        finally:
            os.close(lock)


def _is_ours(place: Path) -> bool:
    return _owned.get(place) == threading.get_ident()


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
    for attempt in range(ATTEMPTS):
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if attempt < ATTEMPTS - 1:
                sleep(PAUSE_S)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            why = error.strerror
            print(f"kvtwin: warning: {folder} cannot be locked ({why}): write no other results", file=sys.stderr)
            return None
    raise _is_anothers(folder, flag)


def _is_anothers(folder: Path, flag: str) -> UserError:
    return UserError(f"{flag}: another command writes into {folder} now; wait until it ends, or name another")


def _refuse_others(place: Path, flag: str) -> None:
    """UserError where another command owns a folder above `place`, or one below."""
    for folder in (*place.parents, *_below(place, LEVELS)):
        if not _is_ours(folder) and _is_held(folder / LOCK_FILE):
            raise _is_anothers(folder, flag)


def _below(folder: Path, levels: int) -> Iterator[Path]:
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield Path(entry.path)
                if levels > 1:
                    yield from _below(Path(entry.path), levels - 1)


def _is_held(path: Path) -> bool:
    """Whether a lock file is locked."""
    try:
        import fcntl  # noqa: PLC0415 - POSIX has it

        lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except (ImportError, OSError):
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(lock)
    return False


class Whole(Struct, frozen=True):
    """What `WHOLE_FILE` says: which files go where."""

    home: str
    """Where they go, below the folder; empty: the folder itself."""
    files: list[str]
    below: list[str]
    """Folders among them that have results of their own, the deepest first."""


class NewResults:
    """Results on their way into a folder.

    Attributes:
        place: where to write them, under the names that they will have in `home`.
        whole: whether the command came to its end; what is not whole replaces no results.
    """

    def __init__(self, folder: Path, below: Sequence[str]) -> None:
        self.place = folder / NEW
        self.whole = True
        self._folder, self._below = folder, below

    @property
    def home(self) -> Path:
        """Where they will be; when they are, this is where."""
        return self._folder / self._home

    def put_in_place(self, flag: str) -> None:
        """Replace the results of before. UserError where something else stands in the way: then nothing changes."""
        # From here on it is decided.
        self._home = "" if self.whole or not _has_results(self._folder) else UNFINISHED
        files = sorted(path.relative_to(self.place).as_posix() for path in self.place.rglob("*") if path.is_file())
        for name in files:
            path = self._folder / self._home / name
            above = [parent for parent in path.parents if parent.is_relative_to(self._folder) and parent.exists()]
            if path.is_dir() or not all(map(Path.is_dir, above)):
                raise UserError(f"{flag}: {path} is to be written, and a folder is where a file goes, or a file where "
                                "a folder goes; move it away")  # fmt: skip
        whole = json.encode(Whole(self._home, files, list(self._below)))
        write_atomically(self.place / WHOLE_FILE, whole)
        _settle(self._folder)


@contextmanager
def renewing(folder: Path, flag: str = "--out", below: Sequence[str] = ()) -> Iterator[NewResults]:
    """Within, a place for results that replace those of `folder`, which is owned, at the end.

    They replace them together: whatever ends the command before leaves the folder as it was, whatever ends it then is
    made up for by the next that writes there or reads (`settle`).

    Args:
        folder: where they go.
        flag: the option that named it, for messages.
        below: folders in it that get results of their own, the deepest first.

    Raises:
        UserError: as `owning` has it.
    """
    with owning(folder, flag):
        new = NewResults(folder, below)
        new.place.mkdir()
        try:
            yield new
            new.put_in_place(flag)
        except BaseException:
            if not (new.place / WHOLE_FILE).exists():
                shutil.rmtree(new.place, ignore_errors=True)
            raise


def settle(folder: Path) -> None:
    """Put in place what a killed command had written whole for `folder`, or one above: before results are read.

    Raises:
        UserError: another command is at it, or it cannot be written.
    """
    place = without_links(folder)
    for above in (place, *place.parents)[: LEVELS + 1]:
        if (above / NEW / WHOLE_FILE).is_file():
            with owning(above, "results"):
                pass


def _settle(folder: Path) -> None:
    """Put in place what is whole in `NEW`, as often as it takes; drop what is not."""
    new = folder / NEW
    if new.is_symlink() or not new.is_dir():
        return
    with suppress(FileNotFoundError, MsgspecError):
        whole = json.decode((new / WHOLE_FILE).read_bytes(), type=Whole)
        home = folder / whole.home
        for name in whole.files:
            if (new / name).is_file() and ".." not in Path(name).parts:
                (home / name).parent.mkdir(parents=True, exist_ok=True)
                _move(new / name, home / name)
        _clear(folder, whole)
        (new / WHOLE_FILE).unlink()
    shutil.rmtree(new)


def _move(source: Path, target: Path) -> None:
    target = without_links(target)
    if target.is_file() or not target.exists():
        try:
            source.replace(target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
        else:
            return
    # Links lead to other disks, to pipes and devices.
    with source.open("rb") as file:
        write_atomically(target, lambda copy: shutil.copyfileobj(file, copy))
    source.unlink()


def _has_results(folder: Path) -> bool:
    return any((folder / name).exists() for name in RESULT_FILES)


def clear(folder: Path, below: Sequence[str] = ()) -> None:
    """Remove what earlier commands wrote to a folder that is owned, and nothing else.

    Args:
        folder: what it holds under one of `RESULT_FILES` goes, and so with the folders below that they noted.
        below: folders in it that get results of their own, the deepest first: noted for the next that clears it.
    """
    _clear(folder, Whole("", [], list(below)))


def _clear(folder: Path, whole: Whole) -> None:
    """Remove what earlier commands wrote below `whole.home` and `whole` did not, and note what has results now."""
    lock, home = folder / LOCK_FILE, folder / whole.home
    noted = lock.read_text(encoding="utf-8").splitlines()
    here = [name for name in noted if Path(name).is_relative_to(whole.home)]
    kept = {home / name for name in whole.files}
    for place in (folder / name for name in here):
        if place != home and place.is_dir() and folder.resolve() in place.resolve().parents:
            with owning(place):
                own = [path.relative_to(place).as_posix() for path in kept if path.is_relative_to(place)]
                _clear(place, Whole("", own, []))
            _remove_empty(place)
    for name in RESULT_FILES:
        if home / name not in kept:
            for path in (home / name, home / f"{name}.part"):
                path.unlink(missing_ok=True)
    _remove_empty(home / "figures")
    below = [(Path(whole.home) / name).as_posix() for name in (*whole.below, *["."] * bool(whole.home))]
    # Emptied in place: the file is locked.
    lock.write_text("".join(f"{name}\n" for name in (*below, *(set(noted) - set(here)))), encoding="utf-8")


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()
