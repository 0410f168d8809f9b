"""Lists of triples of numbers in a trace: `40:1.5:32;90:0.3:8` in a CSV cell, lists of three in JSON lines."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from traces.fields import Where

Number = int | float
Kinds = tuple[type[Number], type[Number], type[Number]]


class Triples(NamedTuple):
    """A field whose values are such lists.

    Attributes:
        name: column or key.
        make: a value of three numbers, each of its kind in `kinds`.
        what: it is called in messages.
        in_cell, in_json: how to write it.
        fault: says what is wrong with values of a request of so many prompt and output tokens; empty if nothing is.
    """

    name: str
    make: Callable[[Iterable[Any]], Any]
    kinds: Kinds
    what: str
    in_cell: str
    in_json: str
    fault: Callable[[Any, int, int], str]

    def of_cell(self, where: Where, cell: str, prompt: int, output: int) -> tuple[Any, ...]:
        """The values of a CSV cell; TraceError says what is wrong with it."""
        return self._checked(where, cell, self._split(cell), prompt, output, self.in_cell)

    def of_json(self, where: Where, value: Any, prompt: int, output: int) -> tuple[Any, ...]:  # noqa: ANN401
        """The same of a JSON value. A float may be written as a whole number."""
        return self._checked(where, value or [], self._listed(value or []), prompt, output, self.in_json)

    def _checked(
        self, where: Where, shown: object, triples: Iterator[list[Number]], prompt: int, output: int, remedy: str
    ) -> tuple[Any, ...]:
        try:
            found = tuple(map(self.make, triples))
        except ValueError:
            raise where.error(self.name, shown, f"is not a list of {self.what}", remedy) from None
        if problem := self.fault(found, prompt, output):
            raise where.error(self.name, shown, problem, remedy)
        return found

    def _split(self, cell: str) -> Iterator[list[Number]]:
        if "_" in cell:
            raise ValueError("Python's digit groups are not a trace's")
        for triple in cell.split(";") if cell.strip() else ():
            yield [kind(text) for kind, text in zip(self.kinds, triple.split(":"), strict=True)]

    def _listed(self, value: object) -> Iterator[list[Number]]:
        for triple in value if isinstance(value, list) else [value]:
            if not isinstance(triple, list):
                raise ValueError("not a triple")
            for kind, number in zip(self.kinds, triple, strict=True):
                if type(number) not in (int, kind):
                    raise ValueError("not such a number")
            yield [kind(number) for kind, number in zip(self.kinds, triple, strict=True)]


def cell_of(values: Iterable[Iterable[Number]]) -> str:
    """The CSV cell of a list of triples."""
    return ";".join(":".join(map(repr, triple)) for triple in values)
