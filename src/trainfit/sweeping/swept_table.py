"""The rows of a sweep as one table in a file: CSV, or Parquet where the name ends so."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainfit.basics.sealed_files import write_whole
from trainfit.errors import MissingExtra, OptionError
from trainfit.exports.csv_tables import csv_text
from trainfit.report.json_result import check_destination
from trainfit.sweeping.row_runner import FIGURES, Row

INSTALL_LINE = "pip install -c constraints.txt 'trainfit[parquet]'"
_ALWAYS = ("target", "batch", "seq", "image_size", "dtype", "optimizer", "mesh", "device", "budget")
_ENDINGS = (".csv", ".parquet")


def check_table(path: Path) -> None:
    """Refuse a file that cannot be written, before the work begins."""
    if path.suffix.lower() not in _ENDINGS:
        raise OptionError(f"--output {path!s:.200}: the name of the table ends in .csv or .parquet.")
    check_destination(str(path), "--output")
    if path.suffix.lower() == ".parquet":
        _pyarrow()


def columns_of(rows: Sequence[Row]) -> list[str]:
    """Return the columns: what a grid usually says, what else this one says, then the figures."""
    asked = [name for row in rows for name in row if name not in FIGURES]
    return list(dict.fromkeys([*_ALWAYS, *asked, *FIGURES]))


def write_table(rows: Sequence[Row], path: Path) -> None:
    """Write the table, whole or not at all."""
    names = columns_of(rows)
    whole = [{name: row.get(name) for name in names} for row in rows]
    if path.suffix.lower() == ".parquet":
        write_whole(path, _parquet(names, whole))
    else:
        write_whole(path, csv_text(whole).encode())


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingExtra(
            f"a table as Parquet needs pyarrow, which is not installed:\n  {INSTALL_LINE}"
        ) from None
    return pyarrow


def _parquet(names: Sequence[str], rows: Sequence[Row]) -> bytes:
    arrow = _pyarrow()
    columns = {name: _one_type([row[name] for row in rows]) for name in names}
    # A column without a value has no type to be guessed: text is what everything reads.
    arrays = {
        name: arrow.array(values, type=None if any(v is not None for v in values) else arrow.string())
        for name, values in columns.items()
    }
    target = io.BytesIO()
    arrow.parquet.write_table(arrow.table(arrays), target)
    return target.getvalue()


def _one_type(values: list[Any]) -> list[Any]:
    """Return a column whose values are of one type; where a grid mixes them (24GiB, 80), as text."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float}:
        return values if kinds != {int, float} else [None if v is None else float(v) for v in values]
    if len(kinds) <= 1 and list not in kinds:
        return values
    return [v if v is None or isinstance(v, str) else json.dumps(v) for v in values]
