"""Values of a fixed sum of products at the rows of a fit, kept while there is room."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...bases.basis import Basis, sum_products
from ...data.source import Batch

#: Rows whose values are kept: 256 MB. The others are computed in each pass.
MAX_ROWS = 1 << 25


class RowValues:
    """
    Values of one function at the rows of a fit. They depend on inputs alone; what is kept saves time, nothing else.

    :param bases: The basis of each mode.
    :param factors: Raw factors, D tensors `(R, M_d)`.
    """

    def __init__(self, bases: Sequence[Basis], factors: Sequence[Tensor]):
        self.bases, self.factors = bases, factors
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
        values = sum_products(self.bases, self.factors, batch.x)
        if kept is None and self._num_kept + batch.num_rows <= MAX_ROWS:
            self._kept[first_row] = values
            self._num_kept += batch.num_rows
        return values
