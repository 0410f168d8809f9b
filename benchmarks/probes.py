"""Which blocks of functions run: each begins with a store into a file that all processes of a run share.

A block is what runs as one: a list of statements, up to a compound one that may leave it. Modules are compiled so when
they are imported; their files stay as they are. What a test starts does the same (`SITE`).
"""

import ast
import builtins
import importlib.abc
import importlib.machinery
import json
import marshal
import mmap
import os
import sys
from hashlib import sha256
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType

HITS = "__kvtwin_hits__"
TABLE = "KVTWIN_PROBES"
"""Environment variable: the path of what `lay` wrote."""
SITE = f"""import os, sys
if "{TABLE}" in os.environ:
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    import probes
    sys.path.pop(0)
    probes.install(os.environ["{TABLE}"])
"""
"""Of a `sitecustomize` in the tree."""


class Prober:
    """Puts a store at the beginning of each block of a module's functions; `owner` has the block of each line."""

    def __init__(self, tree: ast.Module, first: int = 0) -> None:
        self.owner: dict[int, int] = {}
        self.count = 0
        self._first = first
        self._outside(tree)

    def _outside(self, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                child.body = self._block(child.body)
            else:
                self._outside(child)

    def _block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        is_new, block = True, 0
        for i, statement in enumerate(body):
            if i == 0 and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                found.append(statement)  # A docstring stays first.
                continue
            if is_new:
                block = self.count
                found.append(self._store(statement))
            for line in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1):
                self.owner[line] = block
            found.append(statement)
            inner = [statement, *getattr(statement, "handlers", ()), *getattr(statement, "cases", ())]
            for node in inner:
                for field in ("body", "orelse", "finalbody"):
                    if getattr(node, field, None) and isinstance(getattr(node, field), list):
                        setattr(node, field, self._block(getattr(node, field)))
            leaving = (ast.Return, ast.Continue, ast.Break, ast.Raise)
            is_new = any(isinstance(node, leaving) for node in ast.walk(statement))
        return found

    def _store(self, before: ast.stmt) -> ast.stmt:
        target = ast.Subscript(ast.Name(HITS, ast.Load()), ast.Constant(self._first + self.count), ast.Store())
        self.count += 1
        return ast.fix_missing_locations(ast.copy_location(ast.Assign([target], ast.Constant(1)), before))


def blocks_of(text: str) -> Prober:
    """Of a module's text."""
    return Prober(ast.parse(text))


def lay(tree: Path, sources: list[str]) -> Path:
    """Write what processes of a tree need to know; the path of it."""
    table, size = {}, 0
    for name in sources:
        text = (tree / name).read_bytes()
        table[str(tree / name)] = (size, sha256(text).hexdigest())
        size += blocks_of(text.decode()).count
    hits, place = tree.with_suffix(".hits"), tree.with_suffix(".probes")
    hits.write_bytes(bytes(size + 1))
    place.write_text(json.dumps({"table": table, "hits": str(hits), "codes": str(tree.with_suffix(".codes"))}))
    (tree / "sitecustomize.py").write_text(SITE)
    tree.with_suffix(".codes").mkdir(exist_ok=True)
    return place


class Loader(SourceFileLoader):
    """Compiles with probes, and keeps the code."""

    folder, first, digest = Path(), 0, ""

    def get_code(self, fullname: str) -> CodeType:
        text = self.get_data(self.path)
        if sha256(text).hexdigest() != self.digest:
            return compile(text, self.path, "exec", dont_inherit=True)
        # Faults are put into code by its path: a copied cache has that of another tree.
        kept = self.folder / f"{sha256(self.path.encode() + text).hexdigest()}-{self.first}"
        if kept.exists():
            return marshal.loads(kept.read_bytes())
        tree = ast.parse(text)
        Prober(tree, self.first)
        code = compile(tree, self.path, "exec", dont_inherit=True)
        part = kept.with_suffix(f".{os.getpid()}")
        part.write_bytes(marshal.dumps(code))
        part.replace(kept)
        return code


class Finder(importlib.abc.MetaPathFinder):
    """Of the modules in a table."""

    def __init__(self, table: dict[str, tuple[int, str]], folder: Path) -> None:
        self._table, self._folder = table, folder
        self._names = {Path(path).stem for path in table} | {Path(path).parent.name for path in table}

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname.rpartition(".")[2] not in self._names:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)  # type: ignore[arg-type]
        if spec is None or spec.origin not in self._table:
            return None
        loader = Loader(fullname, spec.origin)
        loader.folder, (loader.first, loader.digest) = self._folder, self._table[spec.origin]
        spec.loader = loader
        return spec


def install(place: str) -> mmap.mmap:
    """Compile with probes from now on; a byte for each block, 1 where it ran."""
    known = json.loads(Path(place).read_text())
    with Path(known["hits"]).open("r+b") as file:
        hits = mmap.mmap(file.fileno(), 0)
    setattr(builtins, HITS, hits)
    sys.meta_path.insert(0, Finder(known["table"], Path(known["codes"])))
    return hits
