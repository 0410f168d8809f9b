"""Small Parquet tables, in folders as aiconfigurator has them."""

import pytest


def put(folder, place, rows):
    """Write rows to a table at `place` in a folder; skips the test where pyarrow is not installed."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = folder / place
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
