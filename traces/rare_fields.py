"""Fields that requests of few traces have: how CSV and JSON lines hold each. A new one is a line of `RARE_FIELDS`."""

from collections.abc import Callable
from typing import Any, NamedTuple

from traces import adapters, slos
from traces.fields import Where
from traces.images import IMAGES
from traces.tool_calls import TOOL_CALLS
from traces.triples import cell_of


class RareField(NamedTuple):
    """A field, `Request`'s too.

    Attributes:
        name: column of CSV, key of JSON.
        of_cell, of_json: what a cell or a value says, of a request of so many prompt and output tokens; the field's
            default where that is empty or None. TraceError names what is wrong with it.
        cell, json: what is written for a value that is not the default.
    """

    name: str
    of_cell: Callable[[Where, str, int, int], Any]
    of_json: Callable[[Where, Any, int, int], Any]
    cell: Callable[[Any], str]
    json: Callable[[Any], object]


def _read_rate(where: Where, value: object, *_: int) -> float | None:
    """The chance that a token drafted for the request is accepted."""
    if value is None or value == "":
        return None
    rate = where.number("acceptance_rate", value)
    if not 0.0 <= rate <= 1.0:
        remedy = "write the chance that a drafted token is accepted, as 0.7"
        raise where.error("acceptance_rate", value, "is not between 0 and 1", remedy)
    return rate


RARE_FIELDS = (
    RareField(TOOL_CALLS.name, TOOL_CALLS.of_cell, TOOL_CALLS.of_json, cell_of, list),
    RareField(slos.FIELD, slos.read_slos, slos.read_slos, str, str),
    RareField("acceptance_rate", _read_rate, _read_rate, repr, float),
    RareField(IMAGES.name, IMAGES.of_cell, IMAGES.of_json, cell_of, list),
    RareField(adapters.FIELD, adapters.read_name, adapters.read_name, str, str),
)
"""In the order of `Request`'s last fields."""
RARE_NAMES = tuple(field.name for field in RARE_FIELDS)


def check_calls_alone(where: Where, shown: object, calls: tuple[Any, ...], output_hashes: tuple[int, ...]) -> None:
    """Raise the error that names tool calls whose answers stand in no `output_hash_ids`."""
    if calls and output_hashes:
        problem = "stands beside output_hash_ids, which name no tools' answers"
        raise where.error(TOOL_CALLS.name, shown, problem, "leave one out")
