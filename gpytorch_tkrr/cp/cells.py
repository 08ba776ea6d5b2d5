r"""Rows of one column, grouped, so that functions of the column are evaluated at a few nodes instead of at every row.

Every sum over rows of weights times a smooth function of the column is a sum over *nodes* :math:`\xi_u`,

.. math:: \sum_n w_n \psi(x_n) = \sum_u \Big( \sum_n w_n \ell_u(x_n) \Big) \psi(\xi_u),
    \qquad \psi(x_n) = \sum_u \ell_u(x_n) \psi(\xi_u) .

A column with few distinct values has these as nodes (:class:`DistinctValues`, exact). Any other column is divided into
cells so narrow that all functions are polynomials of low degree in each of them, up to rounding (:class:`Cells`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from .moments import MomentTable

#: A column is compressed to its distinct values if there are at least this many rows for each of them.
ROWS_PER_VALUE = 8

#: Functions are interpolated to this accuracy, relative to their largest value.
INTERPOLATION_ERROR = 1e-15

#: Numbers held at a time while rows are summed, and the least number of rows, below which calls cost more than sums.
CHUNK_NUMBERS, CHUNK_ROWS = 1 << 18, 1024


class RowGroups(ABC):
    """
    Rows in blocks of equal length, every block within one group, so that one batched matrix product sums over them.

    :param codes: The group of each row, `(n,)`.
    :param num_groups: The number of groups.
    """

    nodes: Tensor  #: Where functions are evaluated, `(U,)`.

    def __init__(self, codes: Tensor, num_groups: int):
        self.codes, self.num_groups = codes.int(), num_groups
        self.length = min(max(codes.shape[0] // num_groups, 8), 64)

    @cached_property
    def _layout(self) -> tuple[Tensor, Tensor]:
        """Row numbers block by block, padded with n, and the group that each block belongs to."""
        codes, num_rows = self.codes.long(), self.codes.shape[0]
        counts = torch.bincount(codes, minlength=self.num_groups)
        num_blocks = (counts + self.length - 1) // self.length  # of each group
        order = torch.argsort(codes, stable=True)
        ordered = codes[order]
        within = torch.arange(num_rows, device=codes.device) - (counts.cumsum(0) - counts)[ordered]
        rows = torch.full((int(num_blocks.sum()) * self.length,), num_rows, dtype=torch.int32, device=codes.device)
        rows[((num_blocks.cumsum(0) - num_blocks) * self.length)[ordered] + within] = order.int()
        return rows, torch.repeat_interleave(torch.arange(self.num_groups, device=codes.device), num_blocks)

    def _gather(
        self, p: Tensor, t: Tensor, weight: Tensor | None, step: int
    ) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Some blocks at a time: which, their groups, and their rows of p, weighted, `(n, R)`, and of p and t."""
        rows, owner = self._layout
        padded = p.new_empty(p.shape[1] + 1, p.shape[0] + 1)  # row by row: a gathered row is contiguous
        padded[:-1, :-1], padded[:-1, -1], padded[-1] = p.mT, t, 0
        if weight is not None:
            weight = torch.cat([weight, weight.new_zeros(1)])
        for start in range(0, owner.shape[0], step):
            blocks = slice(start, start + step)
            index = rows[self._rows_of(blocks)]
            right = padded.index_select(0, index)
            left = right[:, :-1] if weight is None else right[:, :-1] * weight.index_select(0, index).unsqueeze(-1)
            yield blocks, owner[blocks], left, right

    def _rows_of(self, blocks: slice) -> slice:
        return slice(blocks.start * self.length, blocks.stop * self.length)

    @abstractmethod
    def sum_products(self, p: Tensor, t: Tensor, weight: Tensor | None = None) -> Tensor:
        r"""
        :math:`\sum_n w_n \ell_u(x_n) p_{rn} p_{sn}` for :math:`r \le s`, then
        :math:`\sum_n w_n \ell_u(x_n) p_{rn} t_n`.

        :param p: `(R, n)`; where it is float32 the products are, and only their sums over few rows.
        :param t: `(n,)`.
        :param weight: Row weights `(n,)`, or None for ones.
        :return: `(U, R (R + 1) / 2 + R)`, float64.
        """

    @abstractmethod
    def interpolate(self, values: Tensor) -> Tensor:
        r"""
        :math:`\sum_u \ell_u(x_n) f_r(\xi_u)`.

        :param values: Values of functions at the nodes, `(R, U)`.
        :return: `(R, n)`.
        """


class DistinctValues(RowGroups):
    """
    The distinct values of a column and the rows of each.

    :param values: Distinct values `(U,)`.
    :param codes: Which of them each row holds, `(n,)`.
    """

    def __init__(self, values: Tensor, codes: Tensor):
        super().__init__(codes, values.shape[0])
        self.nodes = values

    @classmethod
    def find(cls, x: Tensor) -> DistinctValues | None:
        """
        The distinct values of a column, or None where there are too many for them to pay.

        :param x: `(n,)`.
        """
        stride = x.shape[0] // 2048
        if stride >= ROWS_PER_VALUE:  # hardly any repetition in a sample: a continuous column, no need to sort it
            sample = x[::stride]
            if torch.unique(sample).shape[0] > 0.95 * sample.shape[0]:
                return None
        values, codes = torch.unique(x, return_inverse=True)
        return cls(values, codes) if values.shape[0] * ROWS_PER_VALUE <= x.shape[0] else None

    @property
    def num_bytes(self) -> int:
        """Memory that is held once all is computed."""
        return 4 * (3 * self.codes.shape[0]) + 16 * self.nodes.shape[0]

    def sum_products(self, p: Tensor, t: Tensor, weight: Tensor | None = None) -> Tensor:
        rank = p.shape[0]
        total = p.new_zeros(self.num_groups, rank, rank + 1)
        step = max(CHUNK_NUMBERS // (self.length * (rank + 1)), 1)
        for _, owner, left, right in self._gather(p, t, weight, step):
            left, right = (rows.reshape(-1, self.length, rows.shape[1]) for rows in (left, right))
            total.index_add_(0, owner, torch.bmm(left.mT, right))
        first, second = torch.triu_indices(rank, rank, device=p.device)
        wanted = torch.cat([first * (rank + 1) + second, torch.arange(1, rank + 1, device=p.device) * (rank + 1) - 1])
        return total.flatten(1).index_select(1, wanted)

    def interpolate(self, values: Tensor) -> Tensor:
        out = values.new_empty(values.shape[0], self.codes.shape[0])
        for row, found in zip(values, out, strict=True):  # a row fits into cache
            torch.index_select(row, 0, self.codes, out=found)
        return out


class Cells(RowGroups):
    """
    A column divided into cells, with Chebyshev nodes in each.

    :param x: The column `(n,)`.
    :param num_cells: The number of cells between its smallest and largest value.
    :param num_nodes: J, the number of nodes in each.
    """

    def __init__(self, x: Tensor, num_cells: int, num_nodes: int):
        low, high = x.min(), x.max()
        half = (high - low) / (2 * num_cells)
        codes = ((x - low) / (2 * half)).long().clamp(max=num_cells - 1)
        super().__init__(codes, num_cells)
        middles = low + half * (2 * torch.arange(num_cells, device=x.device) + 1)
        local = torch.cat([(x - middles[codes]) / half, x.new_zeros(1)])
        rows, _ = self._layout
        self.local = local.index_select(0, rows)  # position within the cell, in [-1, 1], block by block
        places = torch.empty(x.shape[0] + 1, dtype=torch.int32, device=x.device)
        places[rows.long()] = torch.arange(rows.shape[0], dtype=torch.int32, device=x.device)
        self.places = places[:-1].clone()  # where each row stands in the blocks
        points = torch.cos(math.pi * (torch.arange(num_nodes, dtype=torch.float64, device=x.device) + 0.5) / num_nodes)
        self.nodes = (middles.unsqueeze(-1) + half * points).flatten()
        self.transform = chebyshev(points, num_nodes) * (2 / num_nodes)  # values at the points to coefficients
        self.transform[0] /= 2
        self.num_nodes = num_nodes

    @classmethod
    def find(cls, x: Tensor, table: MomentTable) -> Cells | None:
        """
        Cells for the moment functions of a mode, or None where they do not pay.

        :param x: `(n,)`.
        :param table: The functions.
        """
        low, high = float(x.min()), float(x.max())
        band = table.band(low, high)
        if band is None or not high > low:
            return None
        frequency, degree = band
        best = (table.num_moments * x.shape[0] / 2, 0, 0)
        for num_cells in (2**k for k in range(3, 11)):
            num_nodes = degree + count_nodes(frequency * (high - low) / (2 * num_cells))
            cost = num_nodes * (x.shape[0] + num_cells * (table.num_moments + 32))
            best = min(best, (cost, num_cells, num_nodes))
        return cls(x, *best[1:]) if best[1] else None

    def sum_products(self, p: Tensor, t: Tensor, weight: Tensor | None = None) -> Tensor:
        rank = p.shape[0]
        num_products = rank * (rank + 1) // 2
        step = max(CHUNK_NUMBERS // (num_products + rank + self.num_nodes), CHUNK_ROWS) // self.length
        total = self.nodes.new_zeros(self.num_groups, self.num_nodes, num_products + rank)
        buffer = p.new_empty(num_products + rank, step * self.length)
        for blocks, owner, left, right in self._gather(p, t, weight, step):
            right = right.mT.contiguous()
            left = right[:-1] if weight is None else left.mT.contiguous()
            products = buffer[:, : left.shape[1]]
            multiply_pairs(left, right[:-1], products[:num_products])
            torch.mul(left, right[-1], out=products[num_products:])
            polynomials = self._polynomials(blocks).to(p.dtype)
            total.index_add_(0, owner, torch.bmm(polynomials, self._blocks(products).mT).to(total.dtype))
        return (self.transform.mT @ total).reshape(-1, num_products + rank)

    def interpolate(self, values: Tensor) -> Tensor:
        rank = values.shape[0]
        coefficients = values.reshape(rank, self.num_groups, -1) @ self.transform.mT  # (R, cells, J)
        coefficients = coefficients.permute(1, 2, 0).contiguous()  # (cells, J, R)
        owner = self._layout[1]
        out = values.new_empty(self.local.shape[0], rank)
        step = max(CHUNK_NUMBERS // ((rank + self.num_nodes) * self.length), 1)
        for start in range(0, owner.shape[0], step):
            blocks = slice(start, start + step)
            piece = torch.bmm(self._polynomials(blocks).mT, coefficients[owner[blocks]])  # (blocks, length, R)
            out[self._rows_of(blocks)] = piece.reshape(-1, rank)
        return out.index_select(0, self.places).mT.contiguous()

    def _blocks(self, rows: Tensor) -> Tensor:
        """`(A, n)` as `(blocks, A, length)`."""
        return rows.reshape(rows.shape[0], -1, self.length).transpose(0, 1)

    def _polynomials(self, blocks: slice) -> Tensor:
        """Chebyshev polynomials of the rows of some blocks, `(blocks, J, length)`."""
        return self._blocks(chebyshev(self.local[self._rows_of(blocks)], self.num_nodes))


def chebyshev(u: Tensor, num: int) -> Tensor:
    """
    The first Chebyshev polynomials.

    :param u: Points in [-1, 1], `(n,)`.
    :param num: How many, at least 2.
    :return: `(num, n)`.
    """
    values = u.new_empty(num, u.shape[0])
    values[0], values[1] = 1.0, u
    double = 2 * u
    for j in range(2, num):
        torch.mul(double, values[j - 1], out=values[j]).sub_(values[j - 2])
    return values


def count_nodes(phase: float) -> int:
    r"""
    Chebyshev nodes that interpolate :math:`e^{i z u}` on [-1, 1], by the bound :math:`4 (z / 2)^J / J!` on the error.

    :param phase: z.
    """
    num, error = 2, phase**2 / 2
    while error > INTERPOLATION_ERROR:
        num += 1
        error *= phase / (2 * num)
    return num


def multiply_pairs(left: Tensor, right: Tensor, out: Tensor) -> None:
    """
    All products l_r r_s with r <= s, row by row.

    :param left: `(R, n)`.
    :param right: `(R, n)`.
    :param out: `(R (R + 1) / 2, n)`.
    """
    offset, rank = 0, left.shape[0]
    for r in range(rank):
        torch.mul(left[r], right[r:], out=out[offset : offset + rank - r])
        offset += rank - r
