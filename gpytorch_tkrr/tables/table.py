"""Tables in files as DataFrames: how they are read, which of their columns and rows are used."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from ..errors import InputError
from .columns import require_columns
from .dialect import SEPARATORS, Dialect, advise_separator, suffix_of

#: All ends of names that can be read.
SUFFIXES = (*SEPARATORS, ".parquet", ".pq", ".npz", ".npy", ".xlsx")


def read_table(path: str | Path, dialect: Dialect | None = None) -> pd.DataFrame:
    """
    A table from a file: text (.csv, .tsv, also compressed), Parquet, Excel, .npz or .npy.

    The arrays of an NPZ file are columns of their names; the columns of a matrix `x` are `x0`, `x1` and so on.

    :param path: The file.
    :param dialect: How a text file is written.
    """
    path, dialect = Path(path), dialect or Dialect()
    if path.is_dir():
        raise InputError(f"{path} is a folder; expected a file.")
    if not path.is_file():
        raise InputError(f"There is no file {path}.")
    suffix = suffix_of(path)
    try:
        if suffix in SEPARATORS:
            return _read_text(path, dialect)
        if suffix in (".parquet", ".pq"):
            return _named(pd.read_parquet(path))
        if suffix == ".xlsx":
            return _named(pd.read_excel(path))
        if suffix == ".npz":
            return _read_npz(path)
        if suffix == ".npy":
            return _read_npy(path)
    except ImportError as error:
        extra = "excel" if suffix == ".xlsx" else "parquet"
        raise InputError(f"{path} cannot be read: {error}. Try pip install 'gpytorch_tkrr[{extra}]'.") from None
    except UnicodeError as error:
        name = dialect.encoding or "UTF-8"
        raise InputError(f"{path} is not written in {name}: {error}. Name its encoding (--encoding latin-1).") from None
    except LookupError as error:  # an encoding that Python does not know
        raise InputError(f"{path} cannot be read: {error}") from None
    except (ValueError, OSError, zipfile.BadZipFile, EOFError, TypeError) as error:
        raise InputError(f"{path} cannot be read: {str(error).strip() or type(error).__name__}") from None
    raise InputError(f"{path}: the name of a table must end in {', '.join(SUFFIXES)}; text may be compressed (.gz).")


def _read_text(path: Path, dialect: Dialect) -> pd.DataFrame:
    options = dialect.options(path)
    header = pd.read_csv(path, header=None, nrows=1, dtype=str, keep_default_na=False, **options)
    names = ["" if value != value else str(value).strip() for value in header.iloc[0]]
    advice = advise_separator(names, options["sep"])
    if advice:
        raise ValueError(advice)
    frame = pd.read_csv(path, **options)
    if isinstance(frame.index, pd.MultiIndex) or not isinstance(frame.index, pd.RangeIndex):
        raise ValueError(f"its rows have more values than its first line has names ({len(names)})")
    if names and all(_is_number(name) for name in names):
        raise ValueError(
            f"its first line holds numbers ({', '.join(names[:3])}), not the names of columns. Add a line with names"
        )
    frame.columns = [name or f"Unnamed: {position}" for position, name in enumerate(names)]
    return frame


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _named(frame: pd.DataFrame) -> pd.DataFrame:
    """Names of columns as text; an index with a name is a column."""
    frame = frame.reset_index() if any(name is not None for name in frame.index.names) else frame
    frame.columns = [str(name).strip() for name in frame.columns]
    return frame


def _read_npz(path: Path) -> pd.DataFrame:
    columns: dict[str, np.ndarray] = {}
    with np.load(path, allow_pickle=False) as arrays:
        for name in arrays.files:
            array = arrays[name]
            if array.ndim == 2 and array.shape[1] > 1:
                columns.update({f"{name}{d}": array[:, d] for d in range(array.shape[1])})
            elif array.ndim in (1, 2):
                columns[name] = array.reshape(-1)
            else:
                raise ValueError(f"the array {name!r} has {array.ndim} dimensions; expected one or two.")
    lengths = {name: len(array) for name, array in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"its arrays have different lengths, {lengths}.")
    return pd.DataFrame(columns)


def _read_npy(path: Path) -> pd.DataFrame:
    array = np.load(path, allow_pickle=False)
    if array.ndim != 2:
        raise ValueError(f"it holds an array of {array.ndim} dimensions; expected two.")
    return pd.DataFrame(array, columns=[str(number) for number in range(array.shape[1])])


def without_index(frame: pd.DataFrame, keep: Sequence[str]) -> tuple[pd.DataFrame, list[str]]:
    """
    The table without columns that only number its rows and have no name, as pandas' `to_csv` writes an index.

    :param frame: The table.
    :param keep: Columns that are asked for by name.
    :return: The table, and the names that were left out.
    """
    left_out = []
    for position, name in enumerate(frame.columns):
        if not str(name).startswith("Unnamed: ") or name in keep:
            continue
        values = frame.iloc[:, position]
        if values.isna().all() or (
            pd.api.types.is_integer_dtype(values) and len(values) > 1 and bool((values.diff().iloc[1:] == 1).all())
        ):
            left_out.append(str(name))
    return frame[[name for name in frame.columns if name not in left_out]], left_out


def choose_inputs(
    columns: Sequence[str], target: str, inputs: Sequence[str] | None = None, exclude: Sequence[str] = ()
) -> list[str]:
    """
    The names of the inputs: all columns but the target, or those named.

    :param columns: All names.
    :param target: Name of the target.
    :param inputs: Names of the inputs; None for all others.
    :param exclude: Columns that are no inputs.
    """
    present = pd.DataFrame(columns=list(columns))
    require_columns(present, [target])
    for name in exclude:
        if name not in columns:
            require_columns(present, [name])
    if target in exclude:
        raise InputError(f"The target {target!r} is among the columns to leave out.")
    if inputs is not None and set(inputs) & set(exclude):
        raise InputError(f"{sorted(set(inputs) & set(exclude))[0]!r} is an input, and is to be left out. Which?")
    names = [name for name in columns if name != target and name not in exclude] if inputs is None else list(inputs)
    if target in names:
        raise InputError(f"The target {target!r} is among the inputs.")
    if inputs is not None and len(set(names)) < len(names):
        raise InputError(f"An input is named twice: {', '.join(names)}.")
    require_columns(present, names)
    if not names:
        raise InputError(f"There are no inputs beside the target {target!r}.")
    return names


def complete_rows(frame: pd.DataFrame, names: Sequence[str]) -> np.ndarray:
    """
    Which rows have neither missing nor infinite values in some columns, `(N,)`.

    :param frame: The table.
    :param names: The columns.
    """
    require_columns(frame, names)
    return frame[list(names)].replace([np.inf, -np.inf], np.nan).notna().all(axis=1).to_numpy(dtype=bool)


def require_complete(frame: pd.DataFrame, names: Sequence[str], *, drop_missing: bool) -> pd.DataFrame:
    """
    The rows without missing or infinite values; an error unless they may be dropped.

    :param frame: The table.
    :param names: Columns in which values must not be missing.
    :param drop_missing: Whether rows may be dropped.
    """
    complete = complete_rows(frame, names)
    if complete.all():
        return frame
    empty = [name for name in names if frame[name].isna().all()]
    if empty:
        raise InputError(f"The column {empty[0]!r} is empty. Leave it out (--exclude).")
    if drop_missing:
        if not complete.any():
            raise InputError("All rows have missing values. Leave out the columns that are mostly empty (--exclude).")
        return frame[complete]
    first = int((~complete).argmax())
    column = next(name for name in names if not complete_rows(frame.iloc[[first]], [name]).all())
    raise InputError(
        f"{int((~complete).sum())} of {len(frame)} rows have missing or infinite values, the first is data row "
        f"{first + 1}, column {column!r}. Drop such rows (--drop-missing). Where only inputs are missing, `fit` can "
        "average over them (--integrate-missing; in Python missing='integrate')."
    )


def write_table(frame: pd.DataFrame | None, path: str | Path, part: Path | None = None) -> None:
    """
    Write a table in the format of its name: text (.csv, .tsv, also compressed), Parquet or Excel.

    :param frame: The table; None to find out whether the name can be written at all.
    :param path: The name.
    :param part: Where it is written to, by default to `path`.
    """
    path = Path(path)
    suffix, target = suffix_of(path), path if part is None else part
    if suffix not in (*SEPARATORS, ".parquet", ".pq", ".xlsx"):
        raise InputError(f"{path}: a table is written as .csv, .tsv, .parquet or .xlsx; text may be compressed (.gz).")
    if frame is None:
        return
    try:
        if suffix in (".parquet", ".pq"):
            frame.to_parquet(target, index=False)
        elif suffix == ".xlsx":
            with target.open("wb") as file:
                frame.to_excel(file, index=False, engine="openpyxl")
        else:
            kinds = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zip": "zip"}
            frame.to_csv(target, index=False, sep=SEPARATORS[suffix], compression=kinds.get(path.suffix.lower()))
    except ImportError as error:
        extra = "excel" if suffix == ".xlsx" else "parquet"
        raise InputError(f"{path} cannot be written: {error}. Try pip install 'gpytorch_tkrr[{extra}]'.") from None
