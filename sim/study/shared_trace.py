"""A trace read once into columns, which workers share: numpy arrays travel between processes without being copied."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise, repeat

import numpy as np
from numpy.typing import NDArray

from sim.options.scenario import Scenario
from sim.run.traffic import ReadTrace, open_trace
from traces.request import Request

BLOCK = 4096
PLAIN = ("arrival_s", "prompt_tokens", "output_tokens", "session_id", "hash_block_tokens", "priority")
IDS = ("hash_ids", "output_hash_ids")
FEW = ("calls", "slos", "acceptance_rate", "images", "lora")
"""Fields of a request that are numbers or words, those that are lists of ids, and those of which a trace has few unlike
values."""


@dataclass(frozen=True)
class SharedTrace:
    """The requests of a trace, as `traces.readers.Trace` gives them.

    Attributes:
        columns: a value a request; fields that no request of the trace has are absent.
        ids: of each list field, the ids of all requests end to end and where each request's begin, one more than there
            are requests.
        few: of each field with few unlike values, these, and which of them each request has.
        num_requests: how many there are.
        left_out: what of the file is in no request, in sentences.
    """

    num_requests: int
    left_out: Collection[str]
    columns: dict[str, NDArray]
    ids: dict[str, tuple[NDArray, NDArray[np.int64]]]
    few: dict[str, tuple[tuple[object, ...], NDArray[np.int64]]]

    @property
    def found(self) -> Collection[str]:
        """Of `FEW`, what a request has."""
        return self.few.keys()

    @staticmethod
    def read(scenario: Scenario) -> "SharedTrace":
        """Read a scenario's trace with its options. TraceError where it is bad."""
        trace = open_trace(scenario)
        return SharedTrace.of(trace, trace)

    @staticmethod
    def of(requests: Iterable[Request], trace: ReadTrace) -> "SharedTrace":
        """Columns of `requests`, whose ids are their places; `trace` is where they are from."""
        rows = list(requests)
        usual = Request._field_defaults
        columns: dict[str, NDArray] = {}
        for name in PLAIN:
            values = [getattr(row, name) for row in rows]
            if any(value != usual.get(name) for value in values):
                columns[name] = _array(values)
        ids: dict[str, tuple[NDArray, NDArray[np.int64]]] = {}
        for name in IDS:
            lists: list[Sequence[int]] = [getattr(row, name) for row in rows]
            if any(lists):
                begins = np.cumsum([0, *map(len, lists)])
                ids[name] = _array(list(chain.from_iterable(lists))), begins
        few: dict[str, tuple[tuple[object, ...], NDArray[np.int64]]] = {}
        for name in FEW:
            places: dict[object, int] = {}
            chosen = [places.setdefault(getattr(row, name), len(places)) for row in rows]
            if places and places.keys() != {usual[name]}:
                few[name] = tuple(places), np.array(chosen)
        return SharedTrace(len(rows), trace.left_out, columns, ids, few)

    def __iter__(self) -> Iterator[Request]:
        for begin in range(0, self.num_requests, BLOCK):
            yield from self._block(begin, min(begin + BLOCK, self.num_requests))

    def _block(self, begin: int, end: int) -> Iterator[Request]:
        found: dict[str, Iterable[object]] = {name: column[begin:end].tolist() for name, column in self.columns.items()}
        for name, (values, begins) in self.ids.items():
            first = int(begins[begin])
            block = values[first : int(begins[end])].tolist()
            found[name] = [tuple(block[a - first : b - first]) for a, b in pairwise(begins[begin : end + 1].tolist())]
        for name, (unlike, places) in self.few.items():
            found[name] = map(unlike.__getitem__, places[begin:end].tolist())
        rest = (
            found[name] if name in found else repeat(Request._field_defaults.get(name, 0))
            for name in Request._fields[1:]
        )
        return islice(map(Request, range(begin, end), *rest), end - begin)


def _array(values: Sequence[object]) -> NDArray:
    """Values as they are: whole numbers beyond 64 bits would become floating-point ones."""
    found = np.array(values)
    return found if not isinstance(values[0], int) or found.dtype == np.int64 else np.array(values, dtype=object)
