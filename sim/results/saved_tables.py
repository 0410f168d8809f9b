"""The tables that a run left in its folder."""

from importlib.util import find_spec
from pathlib import Path

import pandas as pd

from sim.errors import UserError
from sim.results.metrics import TABLE_COLUMNS
from sim.results.result import SERIES_FILE


def read_request_table(folder: Path) -> pd.DataFrame:
    """The per-request table. UserError where there is none, or a file that is none."""
    path = folder / "requests.parquet"
    if not path.is_file():
        path = path.with_suffix(".csv")
    elif find_spec("pyarrow") is None:
        raise UserError(f"{path}: is read with pyarrow, which is not installed: pip install 'kvtwin[parquet]'")
    try:
        found = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
        if missing := [name for name in TABLE_COLUMNS if name not in found]:
            raise ValueError(f"no column {missing[0]}")
    except FileNotFoundError as error:
        raise UserError(f"{folder}: neither requests.parquet nor requests.csv is there; run it again") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a per-request table ({str(error).splitlines()[0]}); run it again") from error
    return found


def read_series(folder: Path) -> pd.DataFrame:
    """The time series, of several engines with a column `engine`; empty where the run kept none."""
    path = folder / SERIES_FILE
    if not path.is_file():
        return pd.DataFrame()
    try:
        found = pd.read_csv(path, index_col=False)
        if found.isna().to_numpy().any():
            raise ValueError("some values are missing")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a time series ({str(error).splitlines()[0]}); run it again") from error
    return found
