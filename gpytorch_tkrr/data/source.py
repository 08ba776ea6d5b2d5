"""Where data come from: anything that can be iterated again and again in batches of rows."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from ..errors import InputError

#: Rows per batch: few enough for the cache, enough to count distinct values.
BATCH_ROWS = 65536


@dataclass
class Batch:
    """
    Rows of data, float64.

    :param x: Inputs `(n, D)`.
    :param y: Targets, the mean removed, `(n,)`.
    :param weight: Row weights `(n,)`, or None for ones.
    :param numbers: Of some rows that were taken out of all: their numbers among these, `(n,)`. None for rows that
        follow each other.
    """

    x: Tensor
    y: Tensor
    weight: Tensor | None = None
    numbers: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return self.x.shape[0]


#: A function of a batch, of the model's values f at its rows `(n,)`, and of the number of its first row among the rows
#: of all processes.
RowFunction = Callable[[Batch, Tensor, int], Tensor]

#: As such a function: targets minus f `(n,)`, and row weights `(n,)`, beside those of the batch, or None for ones.
Working = Callable[[Batch, Tensor, int], tuple[Tensor, Tensor | None]]


def residuals(batch: Batch, f: Tensor, first_row: int) -> tuple[Tensor, None]:
    """
    The working targets of least squares: the targets themselves.

    :param batch: The rows.
    :param f: The model's values `(n,)`.
    :param first_row: Not used.
    """
    return batch.y - f, None


Source = Iterable[Sequence[Any]]


class RowSource(ABC):
    """A source that knows its number of rows and reads any range of them without reading the rest."""

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """N."""

    @abstractmethod
    def rows(self, start: int, stop: int) -> Iterator[tuple[Tensor, ...]]:
        """
        Batches of the rows `start` to `stop - 1`.

        :param start: The first row.
        :param stop: The row after the last.
        """

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return self.rows(0, self.num_rows)


class TensorSource(RowSource):
    """
    Tensors in memory as a source of batches.

    :param x: Inputs `(N, D)`.
    :param y: Targets `(N,)`.
    :param weight: Row weights `(N,)`, or None for ones.
    :param batch_rows: Rows per batch.
    """

    def __init__(self, x: Tensor, y: Tensor, weight: Tensor | None = None, *, batch_rows: int = BATCH_ROWS):
        self.parts = (x, y) if weight is None else (x, y, weight)
        self.batch_rows = batch_rows
        _check_lengths(self.parts)

    @property
    def num_rows(self) -> int:
        return self.parts[0].shape[0]

    def rows(self, start: int, stop: int) -> Iterator[tuple[Tensor, ...]]:
        for first in range(start, stop, self.batch_rows):
            yield tuple(part[first : min(first + self.batch_rows, stop)] for part in self.parts)


class ArraySource(RowSource):
    """
    NumPy arrays, in memory or mapped from files, as a source of batches.

    Of a :class:`numpy.memmap` no more than a batch is held in memory at a time.

    :param x: Inputs `(N, D)`, of any numeric type.
    :param y: Targets `(N,)`.
    :param weight: Row weights `(N,)`, or None for ones.
    :param batch_rows: Rows per batch.

    Example:
        >>> import numpy as np
        >>> import gpytorch_tkrr as tkrr
        >>> source = tkrr.ArraySource(np.zeros((5, 2), dtype=np.int16), np.arange(5), batch_rows=3)
        >>> [tuple(x.shape) for x, y in source]
        [(3, 2), (2, 2)]
    """

    def __init__(self, x: np.ndarray, y: np.ndarray, weight: np.ndarray | None = None, *, batch_rows: int = BATCH_ROWS):
        self.parts = (x, y) if weight is None else (x, y, weight)
        self.batch_rows = batch_rows
        _check_lengths(self.parts)

    @property
    def num_rows(self) -> int:
        return len(self.parts[0])

    def rows(self, start: int, stop: int) -> Iterator[tuple[Tensor, ...]]:
        for first in range(start, stop, self.batch_rows):
            rows = slice(first, min(first + self.batch_rows, stop))
            yield tuple(as_tensor(part[rows]) for part in self.parts)
            for part in self.parts:
                release(part)


def _check_lengths(parts: Sequence[Any]) -> None:
    lengths = [part.shape[0] if part.ndim else 1 for part in parts]
    if len(set(lengths)) > 1:
        raise InputError(f"Inputs, targets and weights must have the same number of rows; got {lengths}.")


def is_frame(part: object) -> bool:
    """
    Whether this is a column or a table of pandas, or of a library with the same methods.

    :param part: Anything.
    """
    return not isinstance(part, (Tensor, np.ndarray)) and hasattr(part, "to_numpy") and hasattr(part, "shape")


def as_array(part: Any) -> np.ndarray:
    """
    The numbers of a DataFrame or a Series, missing ones as NaN; columns of other types are an error that names them.

    :param part: A table or a column of pandas.
    """
    names = [None] if len(part.shape) == 1 else list(part.columns)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"The table has more than one column {twice!r}. Give them different names.")
    columns = {None: part} if len(part.shape) == 1 else {name: part[name] for name in names}
    for name, column in columns.items():
        if getattr(column, "dtype", None) is None or not _is_numeric(column.dtype):
            where = "The column" if name is None else f"Column {name!r}"
            raise InputError(
                f"{where} has the type {getattr(column, 'dtype', 'unknown')}; a model takes numbers. The estimators of "
                "gpytorch_tkrr.sklearn take text, categories and dates; or give levels numbers (column.cat.codes) and "
                "name the column in categorical=."
            )
    if len(part.shape) == 1:
        values: np.ndarray = part.to_numpy(dtype=np.float64, na_value=np.nan)
        return values
    return np.column_stack([column.to_numpy(dtype=np.float64, na_value=np.nan) for column in columns.values()])


def _is_numeric(dtype: Any) -> bool:
    return getattr(dtype, "kind", "O") in "biuf"


def as_tensor(part: Any) -> Tensor:
    """
    A tensor, detached, or the float64 tensor of an array, a DataFrame or a Series of numbers.

    :param part: A tensor, an array or a table.
    """
    if isinstance(part, Tensor):
        return part.detach()
    if is_frame(part):
        return torch.from_numpy(np.array(as_array(part)))
    if part.dtype.kind not in "biuf":
        raise InputError(f"Arrays must hold numbers; got one of type {part.dtype}. Convert it by astype(float).")
    return torch.from_numpy(np.array(part, dtype=np.float64))


def release(array: np.ndarray) -> None:
    """
    Give the pages of a mapped file back to the system, which would count them as memory of this process.

    :param array: An array, mapped from a file or not.
    """
    mapped = getattr(array, "_mmap", None)
    if mapped is not None and getattr(array, "mode", "c") != "c" and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


def as_source(data: object) -> Source:
    """
    Tensors or arrays, or an iterable of batches that starts afresh each time, as a source.

    :param data: `(x, y)` or `(x, y, weight)`, tensors, arrays or DataFrames; or an iterable of such batches, for
        instance a DataLoader.
    """
    if isinstance(data, (tuple, list)) and _is_batch(data):
        if all(isinstance(part, Tensor) for part in data):
            return TensorSource(*data)
        return ArraySource(*(_in_memory(part) for part in data))
    if isinstance(data, (str, Mapping, Tensor, np.ndarray)) or not isinstance(data, Iterable):
        raise InputError(
            f"data must be a pair of tensors or arrays (x, y), or an iterable of such batches; got a "
            f"{type(data).__name__}. Open a file with gpytorch_tkrr.open_table(path, target=...)."
        )
    if isinstance(data, Iterator):
        raise InputError(
            f"data is a one-shot iterator ({type(data).__name__}), but every factor update reads the data again. Pass "
            "an object whose iteration starts afresh each time: tensors, a list of batches, or a DataLoader."
        )
    return data


def _in_memory(part: Any) -> np.ndarray:
    """A tensor or a table as an array; arrays, also mapped from a file, as they are."""
    if isinstance(part, Tensor):
        return part.detach().cpu().numpy()
    return as_array(part) if is_frame(part) else part


def _is_batch(parts: object) -> bool:
    """Whether this is (x, y) or (x, y, weight), tensors, arrays or DataFrames."""
    return (
        isinstance(parts, (tuple, list))
        and len(parts) in (2, 3)
        and all(isinstance(part, (Tensor, np.ndarray)) or is_frame(part) for part in parts)
    )


def _require_batch(parts: object) -> None:
    if not _is_batch(parts):
        kind = type(parts).__name__
        if isinstance(parts, (tuple, list)) and len(parts) <= 5:
            kind += f" ({', '.join(type(part).__name__ for part in parts)})"
        raise InputError(f"Data must come in batches (x, y) or (x, y, weight) of tensors or arrays; got: {kind}.")


class Shard(RowSource):
    """
    The rows of one process among several: consecutive ones, none twice, none left out.

    The shards of all processes, one after the other, are the source. They differ by at most one row in length and may
    be empty. Only the rows of the shard are read, except from a plain iterable of batches.

    :param data: See `data` of :func:`~gpytorch_tkrr.fit_als`.
    :param rank: The number of this process.
    :param size: The number of processes.

    Example:
        >>> import torch, gpytorch_tkrr as tkrr
        >>> data = torch.zeros(7, 2), torch.arange(7.0)
        >>> [y.tolist() for rank in range(3) for x, y in tkrr.Shard(data, rank, 3)]
        [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0, 6.0]]
    """

    def __init__(self, data: Any, rank: int, size: int):
        if not 0 <= rank < size:
            raise InputError(f"rank must lie between 0 and size - 1 = {size - 1}; got {rank}.")
        if isinstance(data, DataLoader) and isinstance(data.sampler, RandomSampler):
            raise InputError(
                "A shard is made of consecutive rows, but this DataLoader gives them in another order in every pass. "
                "Make it with shuffle=False."
            )
        self.source = as_source(data)
        total = self.source.num_rows if isinstance(self.source, RowSource) else _count(self.source)
        self.first_row, self.stop_row = total * rank // size, total * (rank + 1) // size

    @property
    def num_rows(self) -> int:
        return self.stop_row - self.first_row

    def rows(self, start: int, stop: int) -> Iterator[tuple[Tensor, ...]]:
        start, stop = self.first_row + start, self.first_row + stop
        if isinstance(self.source, RowSource):
            return self.source.rows(start, stop)
        return select_rows(self.source, start, stop)


def _count(source: Source) -> int:
    total = 0
    for parts in source:
        _require_batch(parts)
        total += len(parts[0])
    return total


def select_rows(batches: Iterable[Sequence[Any]], start: int, stop: int) -> Iterator[tuple[Any, ...]]:
    """
    The rows `start` to `stop - 1` of batches that are read one after the other.

    :param batches: Tensors or arrays, the parts of each batch.
    :param start: The first row.
    :param stop: The row after the last.
    """
    first = 0
    for parts in batches:
        last = first + parts[0].shape[0]
        if last > start and first < stop:
            yield tuple(part[max(start - first, 0) : stop - first] for part in parts)
        if last >= stop:
            return
        first = last


def read_batch(
    parts: Sequence[Any],
    *,
    targets: Callable[[Tensor], Tensor] | None = None,
    device: torch.device | None = None,
) -> Batch:
    """
    What a source yields, its shapes checked, in float64.

    :param parts: `(x, y)` or `(x, y, weight)`, tensors or arrays.
    :param targets: Maps raw targets `(n,)` to float64 ones.
    :param device: Where the batch is moved to; by default it stays where it is.
    """
    _require_batch(parts)
    tensors = (as_tensor(part) for part in parts)
    x, y, *weight = (part if device is None else part.to(device) for part in tensors)
    x = x.double().unsqueeze(-1) if x.dim() == 1 else x.double()
    y, *weight = (part.squeeze(-1) if part.dim() == 2 and part.shape[-1] == 1 else part for part in (y, *weight))
    if x.dim() != 2 or any(part.shape != x.shape[:1] for part in (y, *weight)):
        shapes = ", ".join(str(tuple(part.shape)) for part in (x, y, *weight))
        raise InputError(f"Inputs must have shape (N, D), targets and weights (N,); got {shapes}.")
    y = y.double() if targets is None else targets(y)
    return Batch(x, y, weight[0].double() if weight else None)


def checked_batches(
    source: Source,
    *,
    targets: Callable[[Tensor], Tensor] | None = None,
    device: torch.device | None = None,
    allow_missing: bool = False,
) -> Iterator[Batch]:
    """
    All batches that are not empty; values that are not finite are an error that names the first row with one.

    :param source: See :func:`as_source`.
    :param targets: See :func:`read_batch`.
    :param device: See :func:`read_batch`.
    :param allow_missing: Whether inputs may be NaN.
    """
    first_row = getattr(source, "first_row", 0)
    for parts in source:
        batch = read_batch(parts, targets=targets, device=device)
        if batch.num_rows:
            _check_finite(batch, first_row, allow_missing)
            first_row += batch.num_rows
            yield batch


def _check_finite(batch: Batch, offset: int, allow_missing: bool) -> None:
    inputs = torch.isfinite(batch.x) | batch.x.isnan() if allow_missing else torch.isfinite(batch.x)
    finite = {"inputs": inputs.all(-1), "targets": torch.isfinite(batch.y)}
    if batch.weight is not None:
        finite["weights"] = torch.isfinite(batch.weight) & (batch.weight > 0)
    bad = ~torch.stack(list(finite.values())).all(0)
    if not bad.any():
        return
    first = int(bad.nonzero()[0, 0])
    name = next(name for name, good in finite.items() if not good[first])
    if name == "weights":
        raise InputError(f"Row weights must be positive and finite (the first that is not is in row {offset + first}).")
    raise InputError(
        f"The {name} hold NaN or infinite values (the first is in row {offset + first}). Drop or impute these rows."
    )
