"""How many rows lie within the intervals that the others give: each configuration, or each server, left out in turn.

    python validation/accuracy_coverage.py

Rows are those of `sim/results/accuracy.csv`. The aim is `SHARE` of them, 80 %. A server left out, with all its numbers
of GPUs, stands for a model that was never measured; a configuration left out may have others of its server to go by.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from math import exp, log
from statistics import fmean

from sim.results.accuracy import METRICS, SHARE, Error, Kind, Row, measured_rows, nearest_error

Found = tuple[Row, Error]


def left_out(rows: Sequence[Row], metric: str, unit: Callable[[Row], Hashable]) -> list[Found]:
    """Each row of the metric with the error that the rows of other units give; those left out that have none."""
    known = [row for row in rows if metric in row.ratios]
    found: list[Found] = []
    for one in dict.fromkeys(unit(row) for row in known):
        others = [row for row in known if unit(row) != one]
        errors: dict[Kind, Error | None] = {}
        for row in known:
            if unit(row) != one:
                continue
            if row.kind not in errors:
                errors[row.kind] = nearest_error(others, row.kind, metric)
            if (error := errors[row.kind]) is not None:
                found.append((row, error))
    return found


def coverage(found: Sequence[Found], metric: str) -> float:
    """Share of the rows within their interval."""
    return fmean(abs(log(row.ratios[metric])) <= log(error.factor) for row, error in found)


def factor(found: Sequence[Found]) -> float:
    """Geometric mean of the intervals' factors."""
    return exp(fmean(log(error.factor) for _, error in found))


def main() -> None:
    """Print coverage and factor of each metric, and of the means by layers and GPU."""
    rows = measured_rows()
    print(f"{len(rows)} rows, {len({row.configuration for row in rows})} configurations; aim {SHARE:.0%}")
    for name, unit in (("configuration", lambda row: row.configuration), ("server", lambda row: row.server)):
        print(f"\neach {name} left out in turn")
        for metric in METRICS:
            found = left_out(rows, metric, unit)
            if not found:
                print(f"{metric:<20} too few")
                continue
            print(f"{metric:<20}{coverage(found, metric):>6.0%} of {len(found):>4} rows, factor {factor(found):.2f}")
            groups: dict[tuple[str, ...], list[Found]] = defaultdict(list)
            for row, error in found:
                groups[row.kind[:2]].append((row, error))
            if metric.startswith("mean"):
                for kind, some in sorted(groups.items()):
                    told = f"{coverage(some, metric):>6.0%} of {len(some):>4} rows, factor {factor(some):.2f}"
                    print(f"    {', '.join(kind):<22}{told}")


if __name__ == "__main__":
    main()
