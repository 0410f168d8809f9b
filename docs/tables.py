"""Writes the tables of docs/results.md anew: `python docs/tables.py`. A field says itself what it is.

A table stands below a line `<!-- MODULE:NAME -->`, which names a class of fields with docstrings, options of a run
(their help), or columns with what they are. Fields without a docstring share that of the next one that has it.
"""

import ast
import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("results.md")
sys.path.insert(0, str(PAGE.parents[1]))


def with_tables(page: str) -> str:
    """The page with its tables as the fields have them."""
    return re.sub(
        r"(<!-- ([\w.]+):(\w+) -->\n\n)(?:\|.*\n)*",
        lambda found: found[1] + "".join(_lines(getattr(import_module(found[2]), found[3]))),
        page,
    )


def _lines(described: Any) -> Iterator[str]:  # noqa: ANN401
    is_columns = isinstance(described, Mapping)
    yield f"| {'name' if is_columns else 'field'} | what it is |\n|---|---|\n"
    for names, text in _of_columns(described) if is_columns else _of_fields(described):
        # In a file there is no None.
        told = re.sub(r"\bNone\b", "null", text).replace(". null:", ". Null:").replace("|", "\\|")
        if re.match("[a-z]+[ ,]", told):
            told = told[0].upper() + told[1:]
        yield f"| {', '.join(f'`{name}`' for name in names)} | {told} |\n"


def _of_columns(columns: Mapping[str, object]) -> Iterator[tuple[list[str], str]]:
    for name, told in columns.items():
        yield [name], told if isinstance(told, str) else inspect.getdoc(told) or ""


def _of_fields(kind: type) -> Iterator[tuple[list[str], str]]:
    """Names of fields in the order of the file, and what is said of them together."""
    told = {name: text for base in reversed(kind.__mro__) for name, text in _docstrings(base)}
    if dataclasses.is_dataclass(kind):
        names = {f.name: f.name for f in dataclasses.fields(kind)}
        told |= {f.name: _of_option(f) for f in dataclasses.fields(kind) if "help" in f.metadata}
    else:
        struct: Any = kind
        names = dict(zip(struct.__struct_fields__, struct.__struct_encode_fields__, strict=True))
    untold: list[str] = []
    for name, encoded in names.items():
        untold.append(encoded)
        if name in told:
            yield untold, told[name]
            untold = []


def _docstrings(kind: type) -> Iterator[tuple[str, str]]:
    if kind.__module__.partition(".")[0] not in ("sim", "gpu_runtime"):
        return
    body = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(body, ast.ClassDef)
    for statement, after in zip(body.body, body.body[1:], strict=False):
        match statement, after:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(value=ast.Constant(str(text))):
                yield name, " ".join(text.split())


def _of_option(option: dataclasses.Field[Any]) -> str:
    text, unit = option.metadata["help"], option.metadata["unit"]
    if unit is not None and unit.split()[0] not in text:
        text += f". In {unit}"
    if option.metadata.get("resolved"):
        return f"{text}. Resolved."
    if option.metadata["sparse"]:
        return f"{text}. Absent: not given."
    return f"{text}. Null: not given." if option.default is None else f"{text}."


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
