"""Reading JSON a user wrote: every fault becomes one line naming the file, the field, the value and the remedy."""

import difflib
import json
import re
from collections.abc import Callable
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from sim.errors import UserError
from sim.files import read_text

T = TypeVar("T")
HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""What may be half a character: two such escapes side by side are a whole one."""


def read_json_object(path: Path, *, finite: bool = False) -> dict[str, Any]:
    """The JSON object in a file.

    NaN and Infinity pass unless `finite`, so that what checks the values can name the field that has them.

    Raises:
        UserError: it cannot be read, is no JSON, repeats a field, is no object, or has what cannot be written again:
            half a character, a whole number of more than 64 bits.
    """
    try:
        text = read_text(path)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{path}: cannot be read ({reason}): check the path and its permissions") from error

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise UserError(f"{path}: field {twice!r} appears twice: keep one")
        return fields

    def whole(digits: str) -> int:
        number = int(digits)
        if abs(number) >= 1 << 63:
            raise ValueError(f"the number {_short(digits)} has more than 64 bits")
        return number

    def number(word: str) -> float:
        value = float(word)
        if finite and not isfinite(value):
            raise ValueError(f"{word} is not a finite number")
        return value

    try:
        data = json.loads(text, object_pairs_hook=unique, parse_int=whole, parse_float=number, parse_constant=number)
        if HALF.search(text):
            msgspec.json.encode(data)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise UserError(f"{path}: not JSON at {where} ({error.msg}): correct the file") from error
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}): correct the file") from error
    except RecursionError as error:
        raise UserError(f"{path}: nested too deeply: give a flat JSON object") from error
    if not isinstance(data, dict):
        raise UserError(f"{path}: holds {_short(data)}, not a JSON object: give {{...}} with named fields")
    return data


def convert(data: object, kind: type[T], path: Path | str, field: str = "") -> T:
    """`data` as a msgspec Struct; UserError naming file, field and value where the schema refuses it.

    Args:
        data: decoded JSON.
        kind: the Struct type.
        path: the file, for the message.
        field: where in the file `data` stands, for the message.
    """
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        message, _, inner = str(error).partition(" - at `$")
        inner = inner.rstrip("`")
        where = (field + inner).lstrip(".") or "(top level)"
        value = _walk(data, inner)
        shown = f", value {_short(value)}" if value is not data else ""
        unknown = re.search(r"unknown field `(.+)`", message)
        remedy = f"remove or rename {unknown[1]!r}" if unknown else "correct the field"
        raise UserError(f"{path}: field {where}{shown}: {message}: {remedy}") from error


def built_in_names(folder: Path) -> list[str]:
    """Names of the JSON files a folder ships."""
    return sorted(path.stem for path in folder.glob("*.json"))


def find_file(name_or_path: str, folder: Path, what: str) -> Path:
    """The shipped file of that name (in any case), else the path itself; UserError when there is neither.

    Args:
        name_or_path: what the user gave.
        folder: where the shipped files lie.
        what: "model", "gpu" or "profile", for the message.
    """
    shipped, path = folder / f"{name_or_path.lower()}.json", Path(name_or_path)
    try:
        if shipped.parent == folder and shipped.is_file():
            return shipped
        exists = bool(name_or_path) and path.exists()
    except OSError:
        exists = False
    if not exists:
        raise _nearest(name_or_path, built_in_names(folder), what)
    return path


def once_of(folder: Path, read: Callable[[Path], T]) -> Callable[[Path], T]:
    """`read`, but files that a folder ships are read once a process: they do not change, and studies ask thousands of
    times.
    """
    once = cache(read)
    return lambda path: once(path) if path.parent == folder else read(path)


def _nearest(name: str, known: list[str], what: str) -> UserError:
    """The error for an unknown name: the closest known one, and all of them."""
    # The last component, for names spelled as on a model hub ("owner/model") and for paths that do not exist.
    stem = name.replace("\\", "/").rstrip("/").rpartition("/")[2].lower().removesuffix(".json")
    close = difflib.get_close_matches(stem, known, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return UserError(
        f"{what}: {name!r} is neither a built-in name nor an existing path: {hint}Known: {', '.join(known)}"
    )


def _walk(data: Any, path: str) -> object:  # noqa: ANN401
    for key, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        try:
            data = data[key] if key else data[int(index)]
        except (KeyError, IndexError, TypeError):
            return data
    return data


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
