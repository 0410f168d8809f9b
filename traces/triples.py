"""Lists of triples of numbers in a trace: `40:1.5:32;90:0.3:8` in a CSV cell, lists of three in JSON."""

from collections.abc import Iterator

Number = int | float
Kinds = tuple[type[Number], type[Number], type[Number]]


def parse_triples(cell: str, kinds: Kinds) -> Iterator[list[Number]]:
    """The triples of a CSV cell, each number of its kind, int or float; ValueError where one is none."""
    if "_" in cell:
        raise ValueError("Python's digit groups are not a trace's")
    for triple in cell.split(";") if cell.strip() else ():
        yield [kind(text) for kind, text in zip(kinds, triple.split(":"), strict=True)]


def triples_of(value: object, kinds: Kinds) -> Iterator[list[Number]]:
    """The triples of a JSON value; ValueError where it is no list of any. A float may be written as a whole number."""
    for triple in value if isinstance(value, list) else [value]:
        if not isinstance(triple, list):
            raise ValueError("not a triple")
        for kind, number in zip(kinds, triple, strict=True):
            if type(number) not in (int, kind):
                raise ValueError("not such a number")
        yield [kind(number) for kind, number in zip(kinds, triple, strict=True)]
