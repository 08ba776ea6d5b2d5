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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..data.source import Batch, RowFunction, TrainingData, Working, residuals
from ..features.basis import Basis
from .cells import Cells, DistinctValues, RowGroups, multiply_pairs
from .moments import MomentTable

#: Numbers held at a time while a batch is summed, as features, moment functions and products of projections: about what
#: fits into cache.
CHUNK_NUMBERS = 1 << 21

#: Ranks up to this sum over cells; for larger ones the products of projections cost more than the functions.
MAX_CELL_RANK = 12

#: Bytes for each row of a column that is divided into cells.
CELL_BYTES = 20


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
        rank = self.rhs.shape[0]
        upper = torch.triu_indices(rank, rank, device=self.moments.device)
        pair = torch.empty(rank, rank, dtype=torch.long, device=self.moments.device)
        pair[upper[0], upper[1]] = pair[upper[1], upper[0]] = torch.arange(upper.shape[1], device=pair.device)
        blocks = self.table.gram(self.moments[:, pair])  # (R, R, M, M)
        return blocks.permute(0, 2, 1, 3).contiguous()


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
    phi, psi = sums.table(groups.nodes)
    num_products = sums.moments.shape[1]
    sums.moments.addmm_(psi, per_node[:, :num_products])
    sums.rhs.addmm_(per_node[:, num_products:].mT, phi.mT)


class _Rows:
    """A batch with what is known about it: nodes of its columns and products over modes."""

    def __init__(self, batch: Batch, tables: Sequence[MomentTable], distinct: Sequence[DistinctValues | None]):
        self.batch, self.tables, self.distinct = batch, tables, distinct
        self.bonds: list[Tensor] | None = None  # bond b, between modes b - 1 and b: see Design
        self.position = 0
        self.is_kept = False
        self.cells: dict[int, Cells | None] = {}

    def groups(self, d: int, rank: int) -> RowGroups | None:
        """The nodes of a column; cells only for a batch that is kept."""
        if self.distinct[d] is not None or not self.is_kept or rank > MAX_CELL_RANK:
            return self.distinct[d]
        if d not in self.cells:
            self.cells[d] = Cells.find(self.batch.x[:, d], self.tables[d])
        return self.cells[d]

    def project(self, d: int, factor: Tensor) -> Tensor:
        """The projection of a mode, `(R, n)`."""
        groups, x = self.groups(d, factor.shape[0]), self.batch.x[:, d]
        if groups is not None:
            return groups.interpolate(factor @ self.tables[d].features(groups.nodes))
        return self.tables[d].project(factor, x, rows=chunk_rows(self.tables[d].num_functions + factor.shape[0]))

    def add_to(self, sums: FactorSums, d: int, p: Tensor, t: Tensor, weight: Tensor | None = None) -> None:
        """Add this batch to the sums of a mode, with weights beside its own."""
        groups, own = self.groups(d, p.shape[0]), self.batch.weight
        weight = own if weight is None else weight if own is None else own * weight
        if groups is None:
            add_direct(sums, self.batch.x[:, d], p, t, weight)
        else:
            add_grouped(sums, groups, p, t, weight)
        sums.square.add_(t @ t if weight is None else (weight * t) @ t)
        sums.count.add_(t.shape[0])

    def products(self, d: int, factors: Sequence[Tensor], scale: Tensor) -> tuple[Tensor, Tensor]:
        """Products over all modes but d, `(R, n)`, and the model's values `(n,)`, without any memory."""
        projections = [self.project(k, factor) for k, factor in enumerate(factors)]
        left, right = _product(projections[:d]), _product(projections[d + 1 :])
        p = right if left is None else left if right is None else left.mul_(right)
        if p is None:
            p = torch.ones_like(projections[0])
        return p, scale @ (p * projections[d])

    def keep(self, factors: Sequence[Tensor], position: int) -> None:
        """Store products over modes at every bond, as they are after an update of the mode at a position."""
        self.is_kept = True
        bonds = [factors[0].new_empty(0)] * len(factors)
        left: Tensor | None = None
        for b in range(1, position + 1):  # products to the left
            projection = self.project(b - 1, factors[b - 1])
            left = projection if left is None else projection.mul_(left)
            bonds[b] = left
        right: Tensor | None = None
        for b in range(len(factors) - 1, position, -1):  # products to the right
            projection = self.project(b, factors[b])
            right = projection if right is None else projection.mul_(right)
            bonds[b] = right
        self.bonds, self.position = bonds, position

    def move(self, d: int, factors: Sequence[Tensor], scale: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`products`, from the stored bonds, which are brought to position d."""
        assert self.bonds is not None
        bonds, last = self.bonds, len(factors) - 1
        values: Tensor | None = None
        while self.position != d:
            here = self.position
            projection = self.project(here, factors[here])
            if d > here:  # bond here + 1 turns from a product to the right into one to the left
                bond, new = here + 1, projection if here == 0 else projection.mul_(bonds[here])
            else:  # bond here turns from a product to the left into one to the right
                bond, new = here, projection if here == last else projection.mul_(bonds[here + 1])
            values = scale @ (new * bonds[bond]) if values is None else values
            bonds[bond] = new
            self.position = here + 1 if d > here else here - 1
        if last == 0:
            p = torch.ones(factors[0].shape[0], self.batch.num_rows, dtype=torch.float64, device=scale.device)
        elif d == 0:
            p = bonds[1]
        elif d == last:
            p = bonds[last]
        else:
            p = bonds[d] * bonds[d + 1]
        if values is None:
            values = scale @ (p * self.project(d, factors[d]))
        return p, values


def _product(tensors: Sequence[Tensor]) -> Tensor | None:
    result: Tensor | None = None
    for tensor in tensors:
        result = tensor.clone() if result is None else result.mul_(tensor)
    return result


class Design:
    r"""
    The design of every factor over a source of batches.

    Batches and products over modes are kept where they fit into `memory` bytes: bond b, between modes b - 1 and b,
    holds the product of all projections to its left or to its right, and passing a mode turns one bond over. So a sweep
    costs one projection per factor update, whatever D. What does not fit is projected anew for each update.

    :param batches: The rows, iterated again for every update unless kept. Where several processes hold rows, the sums
        are those of all of them.
    :param bases: The basis of each mode.
    :param memory: Bytes that may be used beyond the data.
    :param compress: Whether columns with few distinct values are compressed to these.
    """

    def __init__(self, batches: TrainingData, bases: Sequence[Basis], *, memory: int = 2 << 30, compress: bool = True):
        self.batches = batches
        self.tables = [MomentTable(basis) for basis in bases]
        self.memory = memory
        self._compress = [compress] * len(bases)  # until a batch shows that a column has too many values
        self._kept: list[_Rows] | None = None
        self._spent = 0
        self._position = 0  # of products over modes that are made anew
        self._marginals: list[tuple[Tensor, Tensor]] | None = None

    def reset(self, position: int = 0) -> None:
        """
        Forget kept products: needed when any factor but the last one updated has changed.

        :param position: The mode from where the next update is reached.
        """
        self._position = position
        for rows in self._kept or ():
            rows.bonds = None

    def marginals(self) -> list[tuple[Tensor, Tensor]]:
        r"""
        :math:`\tfrac1N \sum_n \phi_d \phi_d^\top` and :math:`\tfrac1N \sum_n \phi_d` for each mode, in one pass.

        :return: D pairs `(M, M)` and `(M,)`.
        """
        if self._marginals is None:
            device = self.batches.summary.lower.device
            totals = [FactorSums.zeros(table, 1, device) for table in self.tables]
            for rows in self._rows():
                one = torch.ones(1, rows.batch.num_rows, dtype=torch.float64, device=device)
                for d, sums in enumerate(totals):
                    rows.add_to(sums, d, one, one[0])
            packed = self.batches.processes.sum(torch.cat([sums.pack() for sums in totals]))
            parts = packed.split([sums.pack().numel() for sums in totals])
            totals = [sums.unpack(part) for sums, part in zip(totals, parts, strict=True)]
            self._marginals = [(sums.gram()[0, :, 0] / sums.square, sums.rhs[0] / sums.square) for sums in totals]
        return self._marginals

    def sums(self, d: int, factors: Sequence[Tensor], scale: Tensor, working: Working = residuals) -> FactorSums:
        r"""
        The sums of one factor, with the residual :math:`t = y - f` of the current model as target.

        :param d: The mode.
        :param factors: Raw factors :math:`a_k`, D tensors `(R, M_k)`. Since the last call only the factor that call was
            for may have changed, else call :meth:`reset` first.
        :param scale: Scales of the components `(R,)`: :math:`f(x) = \sum_r s_r \prod_k \phi_k(x_k)^\top a_{kr}`.
        :param working: t and row weights of a batch, where they are not the residuals and those of the data.
        """
        rank = factors[0].shape[0]
        first_row = self.batches.first_row
        total = FactorSums.zeros(self.tables[d], rank, scale.device)
        left = self.memory - self._spent
        per_row = 8 * rank * (len(factors) - 1) + (CELL_BYTES * len(factors) if rank <= MAX_CELL_RANK else 0)
        for rows in self._rows():
            left -= per_row * rows.batch.num_rows
            if left >= 0 and self._kept is not None:
                if rows.bonds is None:
                    rows.keep(factors, self._position)
                p, values = rows.move(d, factors, scale)
            else:
                p, values = rows.products(d, factors, scale)
            rows.add_to(total, d, p, *working(rows.batch, values, first_row))
            first_row += rows.batch.num_rows
        return total.unpack(self.batches.processes.sum(total.pack()))

    def sum_rows(self, factors: Sequence[Tensor], scale: Tensor, function: RowFunction, size: int) -> Tensor:
        """
        The sum of a function of all rows, over all processes.

        :param factors: As for :meth:`sums`.
        :param scale: As for :meth:`sums`.
        :param function: Its sum over the rows of a batch, `(size,)`.
        :param size: How many values it has.
        :return: `(size,)`, float64.
        """
        first_row = self.batches.first_row
        total = torch.zeros(size, dtype=torch.float64, device=scale.device)
        for rows in self._rows():
            # Kept products stand at some mode; from there f costs one projection.
            evaluate = rows.products if rows.bonds is None else rows.move
            _, values = evaluate(0 if rows.bonds is None else rows.position, factors, scale)
            total += function(rows.batch, values, first_row)
            first_row += rows.batch.num_rows
        return self.batches.processes.sum(total)

    def _rows(self) -> Iterator[_Rows]:
        """All batches, kept ones or read anew; a first pass that fits into memory keeps them."""
        if self._kept is not None:
            yield from self._kept
            return
        kept: list[_Rows] | None = []
        self._spent = 0
        for batch in self.batches:
            batch = replace(batch, x=batch.x.mT.contiguous().mT)  # columns are read one by one: contiguous ones
            rows = _Rows(batch, self.tables, [self._find(d, batch) for d in range(len(self.tables))])
            if kept is not None:
                self._spent += 8 * batch.x.numel() + 16 * batch.num_rows
                self._spent += sum(distinct.num_bytes for distinct in rows.distinct if distinct is not None)
                kept.append(rows)
                kept = kept if self._spent <= self.memory else None
            yield rows
        self._kept = kept

    def _find(self, d: int, batch: Batch) -> DistinctValues | None:
        distinct = DistinctValues.find(batch.x[:, d]) if self._compress[d] else None
        self._compress[d] = distinct is not None
        return distinct
