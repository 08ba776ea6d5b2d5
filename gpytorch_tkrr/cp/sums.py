r"""Sums over the data for one factor: the only place where data enter the CP-weight model.

With all factors but one fixed the model is linear in that one. Row n of its design is
:math:`p_n \otimes \phi_d(x_{nd})` with :math:`p_{nr} = \prod_{k \ne d} \phi_k(x_{nk})^\top a_{kr}`, and all that is
needed of the data is

.. math:: G = C^\top W C, \qquad b = C^\top W t, \qquad t^\top W t, \qquad N,

in the raw basis, so that neither depends on hyperparameters. G follows from the sums of
:math:`p_{nr} p_{ns} \psi_k(x_{nd})` over the moment functions :math:`\psi` (see :mod:`.moments`), one matrix product
per batch. Columns with few distinct values are compressed to these values first, and where few components are summed
the other columns to the nodes of cells (see :mod:`.cells`). Arrays are rank-major, `(R, n)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .cells import RowGroups, multiply_pairs
from .conditional import DenseGram
from .levels import LevelGram
from .moments import MomentTable

#: Numbers held at a time while a batch is summed, as features, moment functions and products of projections: about what
#: fits into cache.
CHUNK_NUMBERS = 1 << 21


#: Rows that are summed in single precision before they are added to a sum in double precision.
SINGLE_ROWS = 2048

#: Point estimates form Gram matrices of up to this size also where they have a structure.
MAX_DENSE = 1024


@dataclass
class FactorSums:
    r"""
    The sums of one factor. They can be added, also across machines: :meth:`pack` makes one vector of them.

    :param table: The moment functions of the factor's mode.
    :param moments: :math:`\sum_n w_n p_{nr} p_{ns} \psi_k(x_n)` for :math:`r \le s`, `(K, R (R + 1) / 2)`.
    :param rhs: :math:`\sum_n w_n p_{nr} t_n \phi_j(x_n)`, `(R, M)`.
    :param square: :math:`\sum_n w_n t_n^2`.
    :param count: N.
    """

    table: MomentTable
    moments: Tensor
    rhs: Tensor
    square: Tensor
    count: Tensor

    @classmethod
    def zeros(cls, table: MomentTable, rank: int, device: torch.device) -> FactorSums:
        """
        Sums over no data.

        :param table: The moment functions.
        :param rank: R.
        :param device: Where the sums live.
        """
        scalar = torch.zeros((), dtype=torch.float64, device=device)
        return cls(
            table,
            scalar.new_zeros(table.num_moments, rank * (rank + 1) // 2),
            scalar.new_zeros(rank, table.num_functions),
            scalar.clone(),
            scalar.clone(),
        )

    def __add__(self, other: FactorSums) -> FactorSums:
        return self.unpack(self.pack() + other.pack())

    def pack(self) -> Tensor:
        """All sums in one vector."""
        return torch.cat([part.reshape(-1) for part in (self.moments, self.rhs, self.square, self.count)])

    def unpack(self, packed: Tensor) -> FactorSums:
        """
        The sums in a vector made by :meth:`pack` of sums of the same size.

        :param packed: The vector.
        """
        sizes = [self.moments.numel(), self.rhs.numel(), 1, 1]
        moments, rhs, square, count = packed.split(sizes)
        return FactorSums(
            self.table, moments.reshape_as(self.moments), rhs.reshape_as(self.rhs), square.squeeze(0), count.squeeze(0)
        )

    def gram(self) -> Tensor:
        """G as `(R, M, R, M)`."""
        return self.structured_gram().dense()

    def gram_for_solving(self) -> DenseGram | LevelGram:
        """As :meth:`structured_gram`, formed while it is small."""
        gram = self.structured_gram()
        return DenseGram(gram.dense()) if self.rhs.numel() <= MAX_DENSE else gram

    def structured_gram(self) -> DenseGram | LevelGram:
        """G, for a category without ever being formed."""
        rank = self.rhs.shape[0]
        upper = torch.triu_indices(rank, rank, device=self.moments.device)
        pair = torch.empty(rank, rank, dtype=torch.long, device=self.moments.device)
        pair[upper[0], upper[1]] = pair[upper[1], upper[0]] = torch.arange(upper.shape[1], device=pair.device)
        gram: DenseGram | LevelGram = self.table.structured(self.moments[:, pair])
        return gram


def chunk_rows(numbers: int) -> int:
    """
    How many rows to take at a time.

    :param numbers: Numbers held for each row.
    """
    return min(max(CHUNK_NUMBERS // numbers, 2048), 8192)


def add_direct(sums: FactorSums, x: Tensor, p: Tensor, t: Tensor, weight: Tensor | None) -> None:
    """
    Add the rows of a batch, chunk by chunk.

    :param sums: Where to.
    :param x: The mode's inputs `(n,)`.
    :param p: Products of the other modes' projections `(R, n)`.
    :param t: Targets `(n,)`.
    :param weight: Row weights `(n,)`, or None for ones.
    """
    rank, table = p.shape[0], sums.table
    num_products = rank * (rank + 1) // 2
    rows = min(chunk_rows(table.num_functions + table.num_moments + num_products), p.shape[1])
    features = p.new_empty(table.num_functions, rows)
    moments = p.new_empty(table.num_moments, rows)
    products = p.new_empty(num_products, rows)
    for start in range(0, p.shape[1], rows):
        chunk = slice(start, start + rows)
        size = min(rows, p.shape[1] - start)
        phi, psi = table(x[chunk], out=(features[:, :size], moments[:, :size]))
        right = p[:, chunk]
        left = right if weight is None else right * weight[chunk]
        multiply_pairs(left, right, products[:, :size])
        sums.moments.addmm_(psi, products[:, :size].mT)
        sums.rhs.addmm_(left * t[chunk], phi.mT)


def add_grouped(sums: FactorSums, groups: RowGroups, p: Tensor, t: Tensor, weight: Tensor | None) -> None:
    """
    Add the rows of a batch by the nodes of the mode's column.

    :param sums: Where to.
    :param groups: The column's nodes.
    :param p: Products of the other modes' projections `(R, n)`.
    :param t: Targets `(n,)`.
    :param weight: Row weights `(n,)`, or None for ones.
    """
    per_node = groups.sum_products(p, t, weight)  # (U, R (R + 1) / 2 + R)
    sums.table.add_nodes(sums.moments, sums.rhs, groups.nodes, per_node)


def add_single(
    sums: FactorSums, x: Tensor, groups: RowGroups | None, p: Tensor, t: Tensor, weight: Tensor | None
) -> None:
    """
    Add the rows of a batch with products of projections in single precision (see :mod:`.rounding`). Components, moment
    functions and weights are brought to about 1 first, so that none of them leaves the range of float32. The right-hand
    side is summed in double precision.

    :param sums: Where to.
    :param x: The mode's inputs `(n,)`.
    :param groups: The column's nodes, or None to sum row by row.
    :param p: Products of the other modes' projections `(R, n)`.
    :param t: Targets `(n,)`.
    :param weight: Row weights `(n,)`, or None for ones.
    """
    unit = _unit(p)
    projections = _divided(p, unit)
    product_unit = p.new_empty(sums.moments.shape[1], 1)
    multiply_pairs(unit, unit, product_unit)
    weights = None
    if weight is not None:
        weight_unit = _unit(weight.unsqueeze(0))
        weights, product_unit = _divided(weight.unsqueeze(0), weight_unit)[0], product_unit * weight_unit
    if groups is None:
        total = _single_moments(sums.table, x, projections, weights)
    else:
        per_node = groups.sum_products(projections, torch.zeros_like(projections[0]), weights)
        total = sums.table(groups.nodes)[1] @ per_node[:, : sums.moments.shape[1]]
    sums.moments.addcmul_(total, product_unit.mT)
    for start in range(0, p.shape[1], SINGLE_ROWS):
        chunk = slice(start, start + SINGLE_ROWS)
        targets = t[chunk] if weight is None else t[chunk] * weight[chunk]
        sums.rhs.addmm_(p[:, chunk] * targets, sums.table.features(x[chunk]).mT)


def _single_moments(table: MomentTable, x: Tensor, p: Tensor, weight: Tensor | None) -> Tensor:
    """Sums of products with the moment functions, chunk by chunk, `(K, R (R + 1) / 2)`."""
    rows = min(SINGLE_ROWS, p.shape[1])
    features = x.new_empty(table.num_functions, rows, dtype=torch.float64)
    moments = x.new_empty(table.num_moments, rows, dtype=torch.float64)
    products = p.new_empty(p.shape[0] * (p.shape[0] + 1) // 2, rows)
    part = p.new_empty(table.num_moments, products.shape[0])
    total, unit = torch.zeros_like(part, dtype=torch.float64), None
    for start in range(0, p.shape[1], rows):
        chunk, size = slice(start, start + rows), min(rows, p.shape[1] - start)
        _, psi = table(x[chunk], out=(features[:, :size], moments[:, :size]))
        unit = _unit(psi) if unit is None else unit
        right = p[:, chunk]
        multiply_pairs(right if weight is None else right * weight[chunk], right, products[:, :size])
        total += torch.mm(_divided(psi, unit), products[:, :size].mT, out=part)
    return total if unit is None else total * unit


def _unit(values: Tensor) -> Tensor:
    """The size of each row, `(K, 1)`: the root of its mean square; 1 for rows of zeros."""
    size: Tensor = torch.linalg.vector_norm(values, dim=1, keepdim=True) / math.sqrt(values.shape[1])
    return size.masked_fill_(size == 0, 1.0)


def _divided(values: Tensor, unit: Tensor) -> Tensor:
    """Rows over their units, in single precision."""
    return torch.div(values, unit, out=values.new_empty(values.shape, dtype=torch.float32))
