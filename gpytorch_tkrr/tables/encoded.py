"""Files with columns of any kind as sources of numbers: categories, dates and classes are encoded batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from ..data.source import RowSource
from .columns import Columns, require_finite
from .files import TableSource

#: Rows of a sample, taken from as many places of the file.
SAMPLE_ROWS, NUM_PLACES = 5000, 10


class EncodedSource(RowSource):
    r"""
    The rows of a file as numbers.

    :param table: The file.
    :param columns: What its inputs are.
    :param target: Targets `(n,)` as numbers, from the column of the file.
    :param allow_missing: Whether inputs may be missing.
    :param without: Numbers of rows that are left out, ascending.

    Example:
        >>> import pathlib, tempfile
        >>> import gpytorch_tkrr as tkrr
        >>> from gpytorch_tkrr.tables.columns import Column, scan
        >>> from gpytorch_tkrr.tables.encoded import EncodedSource
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "flights.csv")
        ...     _ = path.write_text("delay,carrier\n1,AA\n2,UA\n4,AA\n")
        ...     table = tkrr.open_table(path, target="delay")
        ...     columns = scan(table.frames(0, table.num_rows, table.inputs))
        ...     source = EncodedSource(table, columns, lambda y: y.to_numpy(dtype=float))
        ...     [(x.tolist(), y.tolist()) for x, y in source]
        [([[0.0], [1.0], [0.0]], [1.0, 2.0, 4.0])]
    """

    def __init__(
        self,
        table: TableSource,
        columns: Columns,
        target: Callable[..., np.ndarray],
        *,
        allow_missing: bool = False,
        without: np.ndarray | None = None,
    ):
        self.table, self.columns, self.target, self.allow_missing = table, columns, target, allow_missing
        self.without = np.zeros(0, dtype=np.int64) if without is None else without

    @property
    def num_rows(self) -> int:
        return self.table.num_rows - len(self.without)

    def rows(self, start: int, stop: int) -> Iterator[tuple[Tensor, ...]]:
        names = [*self.table.inputs, self.table.target]
        start, stop = self._in_file(start), self._in_file(stop)
        for frame in self.table.frames(start, stop, names):
            x = self.columns.matrix(frame)
            y = np.asarray(self.target(frame[self.table.target]), dtype=np.float64)
            require_finite(x, self.columns.names, allow_missing=self.allow_missing, what="The file", first_row=start)
            require_finite(y[:, None], [self.table.target], what="The file", first_row=start)
            is_kept = ~np.isin(np.arange(start, start + len(y)), self.without, assume_unique=True)
            start += len(y)
            if is_kept.any():
                yield torch.from_numpy(np.ascontiguousarray(x[is_kept])), torch.from_numpy(np.array(y[is_kept]))

    def _in_file(self, row: int) -> int:
        """The row of the file before which as many rows are kept."""
        kept_before = self.without - np.arange(len(self.without))  # of each row that is left out
        return row + int(np.searchsorted(kept_before, row, side="left"))

    def sample(self) -> tuple[Tensor, Tensor]:
        """Rows from all over the file, at most :data:`SAMPLE_ROWS`."""
        total, size = self.num_rows, SAMPLE_ROWS // NUM_PLACES
        if total <= SAMPLE_ROWS:
            parts = list(self)
        else:
            starts = np.linspace(0, total - size, NUM_PLACES).astype(int).tolist()
            parts = [part for start in starts for part in self.rows(start, start + size)]
        return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
