"""Tables in files: which columns are inputs, and how they become numbers."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from ..errors import InputError

#: More different values of a column are not one-hot encoded.
MAX_CATEGORIES = 100


def read_table(path: str | Path) -> pd.DataFrame:
    """
    A table from a file: CSV (also compressed), Parquet, or NPZ.

    The arrays of an NPZ file are columns of their names; the columns of a matrix `x` are `x0`, `x1` and so on.

    :param path: The file.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"There is no file {path}.")
    suffixes = [suffix.lower() for suffix in path.suffixes]
    try:
        if ".csv" in suffixes:
            return pd.read_csv(path)
        if ".parquet" in suffixes:
            return pd.read_parquet(path)
        if ".npz" in suffixes:
            return _read_npz(path)
    except ImportError as error:
        raise InputError(f"{path} cannot be read: {error}. Try pip install gpytorch_tkrr[parquet].") from None
    except (ValueError, OSError) as error:  # pandas' parser errors are ValueErrors
        raise InputError(f"{path} cannot be read: {error}") from None
    raise InputError(f"{path} is none of .csv, .parquet and .npz.")


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


@dataclass
class Columns:
    """
    The input columns of a table, and how they become numbers. Made from plain values, to be stored with a model.

    :param inputs: Names, in order.
    :param categories: Column -> its values; all but the first become columns of zeros and ones.

    Example:
        >>> import pandas as pd
        >>> frame = pd.DataFrame({"size": [1.0, 2.0], "kind": ["a", "b"], "price": [3.0, 4.0]})
        >>> columns = Columns.choose(frame, target="price", one_hot=True)
        >>> columns.names(), columns.matrix(frame).tolist()
        (['size', 'kind=b'], [[1.0, 0.0], [2.0, 1.0]])
    """

    inputs: list[str]
    categories: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def choose(
        cls, frame: pd.DataFrame, *, target: str, inputs: Sequence[str] | None = None, one_hot: bool = False
    ) -> Columns:
        """
        All columns but the target, or those named.

        :param frame: The table.
        :param target: Name of the target.
        :param inputs: Names of the inputs.
        :param one_hot: Whether columns that are not numbers are one-hot encoded.
        """
        names = [str(name) for name in frame.columns if name != target] if inputs is None else list(inputs)
        require_columns(frame, [target, *names])
        if target in names:
            raise InputError(f"The target {target!r} is among the inputs.")
        if len(set(names)) < len(names):
            raise InputError(f"An input is named twice: {', '.join(names)}.")
        if not names:
            raise InputError(f"There are no inputs beside the target {target!r}.")
        if frame.empty:
            raise InputError("The table has no rows.")
        categories = {}
        for name in names:
            column = frame[name].dropna()
            if pd.api.types.is_numeric_dtype(column):
                continue
            if not one_hot:
                first = repr(column.iloc[0]) if len(column) else "missing"
                raise InputError(
                    f"The column {name!r} is not numeric (for instance {first}). One-hot encode such columns "
                    "(--one-hot), or leave it out (--inputs)."
                )
            categories[name] = sorted(column.astype(str).unique())
            if len(categories[name]) > MAX_CATEGORIES:
                raise InputError(
                    f"The column {name!r} has {len(categories[name])} different values; at most {MAX_CATEGORIES} are "
                    "one-hot encoded. Leave it out (--inputs), or group its values."
                )
        return cls(names, categories)

    def names(self) -> list[str]:
        """Names of the numbers, `column=value` for one-hot encoded ones."""
        return [
            name
            for column in self.inputs
            for name in (
                [f"{column}={value}" for value in self.categories[column][1:]]
                if column in self.categories
                else [column]
            )
        ]

    def matrix(self, frame: pd.DataFrame) -> np.ndarray:
        """
        The inputs as numbers `(N, D)`.

        :param frame: A table with these columns, in any order, without missing values in them.
        """
        require_columns(frame, self.inputs)
        parts = [self._encoded(frame[name], name) for name in self.inputs]
        return np.column_stack(parts) if parts else np.empty((len(frame), 0))

    def _encoded(self, column: pd.Series, name: str) -> np.ndarray:
        if name not in self.categories:
            try:
                return column.to_numpy(dtype=np.float64)
            except (TypeError, ValueError):
                raise InputError(f"The column {name!r} must be numeric; it is {column.dtype}.") from None
        values = column.astype(str)
        unknown = sorted(set(values.unique()) - set(self.categories[name]))
        if unknown:
            raise InputError(f"The column {name!r} holds {unknown[0]!r}, which was not among the training rows.")
        return np.column_stack([values == value for value in self.categories[name][1:]] or [np.empty((len(column), 0))])


def require_columns(frame: pd.DataFrame, names: Sequence[str]) -> None:
    """
    An error that names the first missing column, and the nearest one there is.

    :param frame: The table.
    :param names: Columns that it must have.
    """
    present = [str(name) for name in frame.columns]
    for name in names:
        if name not in present:
            near = difflib.get_close_matches(name, present, 1)
            hint = f" Did you mean {near[0]!r}?" if near else f" There are: {', '.join(present[:20])}."
            raise InputError(f"There is no column {name!r}.{hint}")


def complete_rows(frame: pd.DataFrame, names: Sequence[str]) -> np.ndarray:
    """
    Which rows have neither missing nor infinite values in some columns, `(N,)`.

    :param frame: The table.
    :param names: The columns.
    """
    require_columns(frame, names)
    return frame[list(names)].replace([np.inf, -np.inf], np.nan).notna().all(axis=1).to_numpy()


def require_complete(frame: pd.DataFrame, names: Sequence[str], *, drop_missing: bool) -> pd.DataFrame:
    """
    The rows without missing or infinite values; an error unless they may be dropped.

    :param frame: The table.
    :param names: Columns in which values must not be missing.
    :param drop_missing: Whether rows may be dropped.
    """
    complete = complete_rows(frame, names)
    if complete.all() or drop_missing:
        return frame[complete]
    first = int((~complete).argmax())
    column = next(name for name in names if not complete_rows(frame.iloc[[first]], [name]).all())
    raise InputError(
        f"{int((~complete).sum())} of {len(frame)} rows have missing or infinite values, the first is data row "
        f"{first + 1}, column {column!r}. Drop such rows (--drop-missing)."
    )
