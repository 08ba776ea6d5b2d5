"""Values of a fixed function at the rows of a fit, kept while there is room."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ...data.source import Batch

#: Rows whose values are kept: 256 MB. The others are computed in each pass.
MAX_ROWS = 1 << 25


class RowValues:
    """
    Values of one function at the rows of a fit. They depend on inputs alone; what is kept saves time, nothing else.

    :param function: The function: inputs `(n, D)` -> values `(n,)`, float64.
    """

    def __init__(self, function: Callable[[Tensor], Tensor]):
        self.function = function
        self._kept: dict[int, Tensor] = {}
        self._num_kept = 0

    def __call__(self, batch: Batch, first_row: int) -> Tensor:
        """
        :param batch: Rows.
        :param first_row: The number of the first of them.
        :return: `(n,)`, float64.
        """
        kept = self._kept.get(first_row)
        if kept is not None and len(kept) == batch.num_rows:
            return kept
        values = self.function(batch.x)
        if kept is None and self._num_kept + batch.num_rows <= MAX_ROWS:
            self._kept[first_row] = values
            self._num_kept += batch.num_rows
        return values
