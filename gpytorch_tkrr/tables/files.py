"""Files with columns of numbers, read in batches of rows: Parquet, CSV, npy and npz."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import lzma
import zipfile
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..data.source import BATCH_ROWS, RowSource, release, select_rows
from ..errors import InputError
from .dialect import SEPARATORS, Dialect, advise_separator, suffix_of

if TYPE_CHECKING:
    import pyarrow
    from pandas import DataFrame


class TableSource(RowSource):
    """
    A file of named columns of numbers, one of them the target. Subclasses read one format.

    At most a batch of rows is in memory at a time. Missing values become NaN, which a fit refuses with the number of
    the row.

    :param path: The file.
    :param target: The column of the targets: its name, or its number among all columns, from the end if negative.
    :param inputs: The columns of the inputs, in this order; by default all that are neither target nor weight.
    :param weight: A column of row weights, or None for ones.
    :param batch_rows: Rows per batch.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        target: str | int,
        inputs: Sequence[str | int] | None = None,
        weight: str | int | None = None,
        batch_rows: int = BATCH_ROWS,
    ):
        self.path = Path(path)
        if not self.path.exists():
            raise InputError(f"There is no file {self.path}.")
        self.batch_rows = batch_rows
        self.target, self.weight = self._name(target), None if weight is None else self._name(weight)
        if inputs is None:
            self.inputs = [name for name in self.columns if name not in (self.target, self.weight)]
        else:
            self.inputs = [self._name(column) for column in inputs]
        if not self.inputs:
            raise InputError(f"{self.path.name} has no columns beside the target {self.target!r}.")
        for name in self._used:
            if self.columns.count(name) > 1:
                raise InputError(f"{self.path.name} has more than one column {name!r}. Give them different names.")
            if self._used.count(name) > 1:
                raise InputError(f"Target, weight and inputs must be different columns; {name!r} is named twice.")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path.name!r}, target={self.target!r}, {len(self.inputs)} inputs)"

    def _name(self, column: str | int) -> str:
        """The name of a column that is given by its name or number."""
        columns = self.columns
        if isinstance(column, int) and -len(columns) <= column < len(columns):
            return columns[column]
        if column not in columns:
            raise InputError(f"{self.path.name} has no column {column!r}; its columns are {', '.join(columns)}.")
        return str(column)

    @property
    def _used(self) -> list[str]:
        return [*self.inputs, self.target] + ([] if self.weight is None else [self.weight])

    @property
    @abstractmethod
    def columns(self) -> list[str]:
        """The names of all columns."""

    @abstractmethod
    def _blocks(self, start: int, stop: int, names: list[str]) -> Iterator[Sequence[np.ndarray]]:
        """For each batch of rows the named columns, `(n,)` or `(n, k)`, in float64."""

    def rows(self, start: int, stop: int) -> Iterator[tuple[Tensor, ...]]:
        num_inputs = len(self.inputs)
        for block in self._blocks(start, stop, self._used):
            x = np.column_stack(block[:num_inputs])
            yield tuple(torch.from_numpy(part) for part in (x, *block[num_inputs:]))

    def frames(self, start: int, stop: int, names: list[str]) -> Iterator[DataFrame]:
        """
        Rows `start` to `stop - 1` as DataFrames, with columns of any kind.

        :param start: The first row.
        :param stop: The row after the last.
        :param names: The columns.
        """
        import pandas as pd

        for block in self._blocks(start, stop, names):
            yield pd.DataFrame(dict(zip(names, block, strict=True)))

    def _not_numbers(self, name: str, kind: object) -> InputError:
        return InputError(
            f"Column {name!r} of {self.path.name} holds no numbers but {kind}. Name the columns to use in inputs, or "
            "write it as numbers first (for categories: numbers of levels, and TKRR(categorical=...))."
        )


class ParquetSource(TableSource):
    """
    A Parquet file, or a folder of them in the order of their names (needs pyarrow: the extra `parquet`).

    Only the columns asked for are read, and only the row groups that hold the rows asked for.

    :param path: The file or folder.
    :param target: The column of the targets.
    :param inputs: The columns of the inputs, in this order; by default all others.
    :param weight: A column of row weights, or None for ones.
    :param batch_rows: Rows per batch.

    Example:
        >>> import pyarrow, pyarrow.parquet, tempfile
        >>> import gpytorch_tkrr as tkrr
        >>> table = pyarrow.table({"delay": [1.0, 2.0, 4.0], "hour": [7, 8, 9], "carrier": ["AA", "UA", "AA"]})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pyarrow.parquet.write_table(table, f"{folder}/flights.parquet")
        ...     source = tkrr.ParquetSource(f"{folder}/flights.parquet", target="delay", inputs=["hour"])
        ...     [(x.tolist(), y.tolist()) for x, y in source]
        [([[7.0], [8.0], [9.0]], [1.0, 2.0, 4.0])]
    """

    @cached_property
    def _files(self) -> list[Path]:
        files = sorted(self.path.glob("*.parquet")) if self.path.is_dir() else [self.path]
        if not files:
            raise InputError(f"There are no files *.parquet in the folder {self.path}.")
        return files

    def _open(self, path: Path) -> Any:
        try:
            import pyarrow.parquet
        except ImportError as error:
            raise ImportError(
                "Reading Parquet needs pyarrow: pip install pyarrow, or gpytorch_tkrr[parquet]."
            ) from error
        try:
            return pyarrow.parquet.ParquetFile(path)
        except pyarrow.ArrowException as error:
            raise InputError(f"{path.name} cannot be read: {error}") from error

    @cached_property
    def columns(self) -> list[str]:
        with self._open(self._files[0]) as file:
            return list(file.schema_arrow.names)

    @cached_property
    def _groups(self) -> list[list[int]]:
        """The number of rows of each row group of each file."""
        groups = []
        for path in self._files:
            with self._open(path) as file:
                groups.append([file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)])
        return groups

    @property
    def num_rows(self) -> int:
        return sum(map(sum, self._groups))

    def _blocks(self, start: int, stop: int, names: list[str]) -> Iterator[Sequence[np.ndarray]]:
        first = 0
        for path, sizes in zip(self._files, self._groups, strict=True):
            chosen: list[int] = []
            begin = 0
            for number, size in enumerate(sizes):
                if first < stop and first + size > start:
                    begin = begin if chosen else first
                    chosen.append(number)
                first += size
            if chosen:
                yield from select_rows(self._read(path, chosen, names), start - begin, stop - begin)

    def frames(self, start: int, stop: int, names: list[str]) -> Iterator[DataFrame]:
        first = 0
        for path, sizes in zip(self._files, self._groups, strict=True):
            for number, size in enumerate(sizes):
                if first < stop and first + size > start:
                    with self._open(path) as file:
                        frame = file.read_row_group(number, columns=names).to_pandas()
                    kept = frame.iloc[max(start - first, 0) : stop - first].reset_index(drop=True)
                    for begin in range(0, len(kept), self.batch_rows):
                        yield kept.iloc[begin : begin + self.batch_rows].reset_index(drop=True)
                first += size

    def _read(self, path: Path, groups: list[int], names: list[str]) -> Iterator[list[np.ndarray]]:
        import pyarrow

        with self._open(path) as file:
            for name in names:
                if name not in file.schema_arrow.names:
                    raise InputError(f"{path.name} has no column {name!r}, which {self._files[0].name} has.")
                kind = file.schema_arrow.field(name).type
                if not (pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind) or kind == pyarrow.bool_()):
                    raise self._not_numbers(name, f"values of type {kind}")
            for batch in file.iter_batches(self.batch_rows, row_groups=groups, columns=names):
                yield [_as_double(batch.column(name)) for name in names]


def _as_double(column: pyarrow.Array) -> np.ndarray:
    """The values of a column of numbers; what is missing is NaN."""
    import pyarrow

    if not pyarrow.types.is_float16(column.type):  # pyarrow 15 cannot cast half precision; NumPy can
        column = column.cast(pyarrow.float64(), safe=False)
    return np.array(column.to_numpy(zero_copy_only=False), dtype=np.float64)


class CSVSource(TableSource):
    r"""
    A text file with a line of column names and one line for each row; compressed where its name ends in .gz, .bz2 or
    .xz.

    Every pass reads and parses the text again. Where there are many passes over many rows, write the columns to a
    Parquet or npy file once.

    :param path: The file.
    :param target: The column of the targets.
    :param inputs: The columns of the inputs, in this order; by default all others.
    :param weight: A column of row weights, or None for ones.
    :param batch_rows: Rows per batch.
    :param delimiter: What stands between columns.
    :param dialect: How the file is written, instead of `delimiter`.

    Example:
        >>> import pathlib, tempfile
        >>> import gpytorch_tkrr as tkrr
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "flights.csv")
        ...     _ = path.write_text("delay,hour,carrier\n1,7,AA\n2,8,UA\n4,9,AA\n")
        ...     source = tkrr.CSVSource(path, target="delay", inputs=["hour"])
        ...     [(x.tolist(), y.tolist()) for x, y in source]
        [([[7.0], [8.0], [9.0]], [1.0, 2.0, 4.0])]
    """

    def __init__(
        self, path: str | Path, *, delimiter: str | None = None, dialect: Dialect | None = None, **kwargs: Any
    ):
        self.dialect = Dialect(sep=delimiter) if dialect is None else dialect
        self.delimiter = self.dialect.separator(path)
        super().__init__(path, **kwargs)

    def _open(self) -> IO[str]:
        openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
        return openers.get(self.path.suffix, open)(
            self.path, "rt", encoding=self.dialect.encoding or "utf-8-sig", errors="replace", newline=""
        )  # fmt: skip

    def _lines(self, file: IO[str]) -> Iterator[str]:
        """The lines after that of the names, without blank ones."""
        next(file, None)
        return (line for line in file if not line.isspace())

    @cached_property
    def columns(self) -> list[str]:
        with self._open() as file:
            names = [name.strip() for name in next(csv.reader(file, delimiter=self.delimiter), [])]
        advice = advise_separator(names, self.delimiter)
        if advice:
            raise InputError(f"{self.path.name} cannot be read: {advice}")
        return names

    @cached_property
    def num_rows(self) -> int:
        with self._open() as file:
            return sum(1 for _ in self._lines(file))

    def _blocks(self, start: int, stop: int, names: list[str]) -> Iterator[Sequence[np.ndarray]]:
        places = [self.columns.index(name) for name in names]
        with self._open() as file:
            lines = islice(self._lines(file), start, stop)
            first = start
            while chunk := list(islice(lines, self.batch_rows)):
                yield list(self._parse(chunk, places, first).T)
                first += len(chunk)

    def frames(self, start: int, stop: int, names: list[str]) -> Iterator[DataFrame]:
        import pandas as pd

        places = [self.columns.index(name) for name in names]
        options = {**self.dialect.options(self.path), "header": None, "usecols": places, "encoding": None}
        with self._open() as file:
            lines = islice(self._lines(file), start, stop)
            first = start
            while chunk := list(islice(lines, self.batch_rows)):
                try:
                    frame = pd.read_csv(io.StringIO("".join(chunk)), names=range(len(self.columns)), **options)
                except ValueError as error:
                    raise InputError(
                        f"{self.path.name} cannot be read after row {first}: {str(error).strip()}"
                    ) from None
                if len(frame) != len(chunk):
                    raise self._line_break()
                first += len(chunk)
                frame = frame[places]
                frame.columns = names
                yield frame

    def _line_break(self) -> InputError:
        return InputError(f"{self.path.name} must have one line for each row, but a value in it has a line break.")

    def _parse(self, lines: list[str], places: list[int], first: int) -> np.ndarray:
        options: dict[str, Any] = {"delimiter": self.delimiter, "comments": None, "quotechar": '"', "ndmin": 2}
        if all(line.count(self.delimiter) == len(self.columns) - 1 for line in lines):
            try:
                return np.loadtxt(lines, usecols=places, **options)
            except ValueError:
                pass  # a value is missing, or is no number
        rows = list(csv.reader(lines, delimiter=self.delimiter))  # slower: look at the values one by one
        if len(rows) != len(lines):
            raise self._line_break()
        block = np.empty((len(rows), len(places)))
        for i, row in enumerate(rows):
            if len(row) != len(self.columns):
                raise InputError(
                    f"Row {first + i} of {self.path.name} has {len(row)} columns; its first line names "
                    f"{len(self.columns)}."
                )
            for j, place in enumerate(places):
                text = row[place].strip()
                try:
                    block[i, j] = float("nan" if text in MISSING else text)
                except ValueError:
                    raise self._not_numbers(self.columns[place], f"{text!r} in row {first + i}") from None
        return block


#: How a missing value is written in a text file.
MISSING = ("", "NA", "N/A", "nan", "NaN", "null", "NULL", "None")


class NpySource(TableSource):
    """
    One array `(N, K)` in a .npy file; columns are named by their numbers.

    :param path: The file.
    :param target: The number of the column of the targets, from the end if negative.
    :param inputs: The numbers of the columns of the inputs, in this order; by default all others.
    :param weight: The number of a column of row weights, or None for ones.
    :param batch_rows: Rows per batch.

    Example:
        >>> import tempfile
        >>> import numpy as np, gpytorch_tkrr as tkrr
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.save(f"{folder}/flights.npy", np.arange(6).reshape(2, 3))
        ...     [(x.tolist(), y.tolist()) for x, y in tkrr.NpySource(f"{folder}/flights.npy", target=2)]
        [([[0.0, 1.0], [3.0, 4.0]], [2.0, 5.0])]
    """

    def _open(self) -> np.ndarray:
        try:
            table = np.lib.format.open_memmap(self.path, mode="r")
        except ValueError as error:
            raise InputError(f"{self.path.name} cannot be read: {error}") from error
        if table.dtype.kind not in "biuf" or table.ndim != 2:
            raise InputError(
                f"{self.path.name} must hold numbers of shape (N, K); got {table.dtype} of shape {table.shape}."
            )
        return table

    @cached_property
    def columns(self) -> list[str]:
        return [str(number) for number in range(self._open().shape[1])]

    @cached_property
    def num_rows(self) -> int:
        return len(self._open())

    def _blocks(self, start: int, stop: int, names: list[str]) -> Iterator[Sequence[np.ndarray]]:
        table = self._open()
        for first in range(start, stop, self.batch_rows):
            rows = slice(first, min(first + self.batch_rows, stop))
            yield [table[rows, int(name)].astype(np.float64) for name in names]
            release(table)


class _ArrayStream:
    """Rows of one array of an npz archive, decompressed one after the other."""

    def __init__(self, file: IO[bytes], name: str):
        self.file, self.name = file, name
        try:
            version = np.lib.format.read_magic(file)
            read_header = (
                np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            )
            self.shape, self.fortran_order, self.dtype = read_header(file)
        except ValueError as error:
            raise InputError(f"{name} cannot be read: {error}") from error
        self.row_bytes = self.dtype.itemsize * int(np.prod(self.shape[1:]))

    def check(self) -> None:
        """An error where these are not rows of numbers, one after the other."""
        num_dims = len(self.shape)
        if self.dtype.kind not in "biuf" or num_dims not in (1, 2) or (self.fortran_order and num_dims == 2):
            order = "in Fortran order" if self.fortran_order else "in C order"
            raise InputError(
                f"{self.name} must hold numbers of shape (N,) or (N, K) in C order; got {self.dtype} of shape "
                f"{self.shape} {order}. Save numpy.ascontiguousarray(array)."
            )

    def skip(self, num_rows: int) -> None:
        """
        Pass over rows.

        :param num_rows: How many.
        """
        self.file.seek(num_rows * self.row_bytes, 1)

    def read(self, num_rows: int) -> np.ndarray:
        """
        The next rows, `(n, K)`, float64.

        :param num_rows: How many.
        """
        content = self.file.read(num_rows * self.row_bytes)
        if len(content) < num_rows * self.row_bytes:
            raise InputError("An npy array ends before its last row: the file is damaged or being written.")
        return np.frombuffer(content, self.dtype).reshape(num_rows, -1).astype(np.float64)


class NpzSource(TableSource):
    """
    Arrays of an .npz file, read as streams, compressed or not. An array `(N,)` is a column of its name; the columns of
    an array `x` of shape `(N, K)` are `x0`, `x1` and so on.

    :param path: The file.
    :param target: The column of the targets.
    :param inputs: The columns of the inputs, in this order; by default all others.
    :param weight: A column of row weights, or None for ones.
    :param batch_rows: Rows per batch.

    Example:
        >>> import tempfile
        >>> import numpy as np, gpytorch_tkrr as tkrr
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.savez(f"{folder}/flights.npz", x=np.zeros((3, 2)), y=np.arange(3))
        ...     source = tkrr.NpzSource(f"{folder}/flights.npz", target="y")
        ...     source.inputs, [(tuple(x.shape), y.tolist()) for x, y in source]
        (['x0', 'x1'], [((3, 2), [0.0, 1.0, 2.0])])
    """

    @cached_property
    def _places(self) -> dict[str, tuple[str, int, int]]:
        """Array, column in it, and number of rows of each column."""
        places = {}
        with self._open() as archive:
            for member in archive.namelist():
                with archive.open(member) as file:
                    shape = _ArrayStream(file, member).shape
                name, width = member.removesuffix(".npy"), shape[1] if len(shape) == 2 else 1
                for column in range(width):
                    places[name if width == 1 else f"{name}{column}"] = member, column, shape[0] if shape else 1
        return places

    def _open(self) -> zipfile.ZipFile:
        try:
            return zipfile.ZipFile(self.path)
        except zipfile.BadZipFile as error:
            raise InputError(f"{self.path.name} cannot be read: {error}") from error

    @cached_property
    def columns(self) -> list[str]:
        return list(self._places)

    @property
    def num_rows(self) -> int:
        lengths = {name: self._places[name][2] for name in self._used}
        if len(set(lengths.values())) > 1:
            raise InputError(
                f"The columns of {self.path.name} differ in length: {lengths}. Name those to use in inputs."
            )
        return lengths[self.target]

    def _blocks(self, start: int, stop: int, names: list[str]) -> Iterator[Sequence[np.ndarray]]:
        places = [self._places[name] for name in names]
        with self._open() as archive, ExitStack() as stack:
            streams = {}
            for member in {member for member, _, _ in places}:
                streams[member] = _ArrayStream(stack.enter_context(archive.open(member)), member)
                streams[member].check()
                streams[member].skip(start)
            for first in range(start, stop, self.batch_rows):
                blocks = {name: stream.read(min(self.batch_rows, stop - first)) for name, stream in streams.items()}
                yield [np.ascontiguousarray(blocks[member][:, column]) for member, column, _ in places]


#: The formats that :func:`open_table` knows, by the end of the file's name, without that of a compression of text.
FORMATS: dict[str, type[TableSource]] = {
    ".parquet": ParquetSource,
    ".pq": ParquetSource,
    **dict.fromkeys(SEPARATORS, CSVSource),
    ".npy": NpySource,
    ".npz": NpzSource,
}


def open_table(
    path: str | Path,
    *,
    target: str | int,
    inputs: Sequence[str | int] | None = None,
    weight: str | int | None = None,
    batch_rows: int = BATCH_ROWS,
    dialect: Dialect | None = None,
) -> TableSource:
    r"""
    A file of columns as a source of batches, by the end of its name: .parquet, .csv, .tsv, .npy or .npz.

    :param path: The file; a folder is one of Parquet files.
    :param target: The column of the targets: its name, or its number among all columns, from the end if negative.
    :param inputs: The columns of the inputs, in this order; by default all others.
    :param weight: A column of row weights, or None for ones.
    :param batch_rows: Rows per batch.
    :param dialect: How a text file is written.

    Example:
        >>> import pathlib, tempfile
        >>> import gpytorch_tkrr as tkrr
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "flights.csv")
        ...     _ = path.write_text("delay,hour\n1,7\n2,8\n")
        ...     tkrr.open_table(path, target="delay").num_rows
        2
    """
    path = Path(path)
    source = FORMATS.get(".parquet" if path.is_dir() else suffix_of(path))
    if source is None or path.suffix.lower() == ".zip":
        raise InputError(
            f"{path}: the name of a file that is read in batches must end in {', '.join(FORMATS)}; text may be "
            "compressed (.gz, .bz2, .xz). Excel and .zip files are read whole: leave out --stream."
        )
    options: dict[str, Any] = {"dialect": dialect} if source is CSVSource else {}
    return source(path, target=target, inputs=inputs, weight=weight, batch_rows=batch_rows, **options)
