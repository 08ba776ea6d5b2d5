r"""Sums over the data for one factor: the only place where data enter the CP-weight model.

With all factors but one fixed the model is linear in that one. Row n of its design is
:math:`p_n \otimes \phi_d(x_{nd})` with :math:`p_{nr} = \prod_{k \ne d} \phi_k(x_{nk})^\top a_{kr}`, and all that is
needed of the data is

.. math:: G = C^\top W C, \qquad b = C^\top W t, \qquad t^\top W t, \qquad N,

in the raw basis, so that neither depends on hyperparameters. G follows from the sums of
:math:`p_{nr} p_{ns} \psi_k(x_{nd})` over the moment functions :math:`\psi` (see :mod:`.moments`), one matrix product
per batch. Columns with few distinct values are compressed to these values first. Arrays are rank-major, `(R, n)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .basis import Basis, SineBasis
from .moments import MomentTable
from .source import Batch
from .trigonometry import SineSums, count_blocks

#: Numbers held at a time while a batch is summed, as features, moment functions and products of projections: about what
#: fits into cache.
CHUNK_NUMBERS = 1 << 21

#: A column is compressed to its distinct values if there are at least this many rows for each of them.
ROWS_PER_VALUE = 8


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


class DistinctValues:
    """
    The distinct values of a column and the rows of each.

    :param values: Distinct values `(U,)`.
    :param codes: Which of them each row holds, `(n,)`.
    """

    def __init__(self, values: Tensor, codes: Tensor):
        self.values = values
        self.codes = codes.int()
        self._blocks: tuple[Tensor, Tensor, int] | None = None

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
        return 4 * (3 * self.codes.shape[0]) + 16 * self.values.shape[0]

    def blocks(self) -> tuple[Tensor, Tensor, int]:
        """
        The rows of each value in blocks of equal length, so that one batched matrix product sums over them.

        :return: Row numbers, padded with n; the value that each block belongs to; the length of a block.
        """
        if self._blocks is None:
            codes, num_rows, num_values = self.codes.long(), self.codes.shape[0], self.values.shape[0]
            counts = torch.bincount(codes, minlength=num_values)
            length = min(max(num_rows // num_values, 8), 64)
            num_blocks = (counts + length - 1) // length  # of each value
            order = torch.argsort(codes, stable=True)
            sorted_codes = codes[order]
            within = torch.arange(num_rows, device=codes.device) - (counts.cumsum(0) - counts)[sorted_codes]
            rows = torch.full((int(num_blocks.sum()) * length,), num_rows, dtype=torch.int32, device=codes.device)
            rows[((num_blocks.cumsum(0) - num_blocks) * length)[sorted_codes] + within] = order.int()
            owner = torch.repeat_interleave(torch.arange(num_values, device=codes.device), num_blocks)
            self._blocks = rows, owner, length
        return self._blocks

    def sum_products(self, p: Tensor, num_left: int, weight: Tensor | None = None) -> Tensor:
        r"""
        :math:`\sum_{n : x_n = u} w_n p_{an} p_{bn}` for every distinct value u, :math:`a < A`.

        :param p: `(B, n + 1)`, the last column zero.
        :param num_left: A.
        :param weight: Row weights `(n + 1,)`, or None for ones.
        :return: `(U, A, B)`.
        """
        rows, owner, length = self.blocks()
        total = p.new_zeros(self.values.shape[0], num_left, p.shape[0])
        step = max((1 << 21) // (num_left * p.shape[0]), 1)  # blocks at a time
        for start in range(0, owner.shape[0], step):
            index = rows[start * length : (start + step) * length]
            right = p.index_select(1, index)
            left = right[:num_left] if weight is None else right[:num_left] * weight.index_select(0, index)
            a, b = (part.reshape(part.shape[0], -1, length).transpose(0, 1) for part in (left, right))
            total.index_add_(0, owner[start : start + step], torch.bmm(a, b.mT))
        return total


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
    if table.sines is not None and (num_blocks := count_blocks(table.num_functions, num_products)) > 1:
        _add_blocked(sums, table.sines, num_blocks, x, p, t, weight)
        return
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
        _multiply_pairs(left, right, products[:, :size])
        sums.moments.addmm_(psi, products[:, :size].mT)
        sums.rhs.addmm_(left * t[chunk], phi.mT)


def _multiply_pairs(left: Tensor, right: Tensor, out: Tensor) -> None:
    """All products l_r r_s with r <= s, row by row."""
    offset, rank = 0, left.shape[0]
    for r in range(rank):
        torch.mul(left[r], right[r:], out=out[offset : offset + rank - r])
        offset += rank - r


def _add_blocked(
    sums: FactorSums, basis: SineBasis, num_blocks: int, x: Tensor, p: Tensor, t: Tensor, weight: Tensor | None
) -> None:
    """As :func:`add_direct`, for sines and few products of projections."""
    rank, num_products = p.shape[0], sums.moments.shape[1]
    parts = SineSums(basis.num_functions, num_products, rank, num_blocks, p.device)
    rows = min(chunk_rows(4 * basis.num_functions // num_blocks + num_blocks * num_products), p.shape[1])
    for start in range(0, p.shape[1], rows):
        chunk = slice(start, start + rows)
        right = p[:, chunk]
        left = right if weight is None else right * weight[chunk]
        _multiply_pairs(left, right, parts.weights(right.shape[1]))
        parts.add(basis.angle(x[chunk]), left * t[chunk])
    sums.moments.add_(parts.cosine_moments())
    sums.rhs.add_(parts.sine_sums().mT * basis.half_width.rsqrt())


def add_distinct(sums: FactorSums, distinct: DistinctValues, p: Tensor, t: Tensor, weight: Tensor | None) -> None:
    """
    Add the rows of a batch by the distinct values of the mode's column.

    :param sums: Where to.
    :param distinct: The column's values.
    :param p: Products of the other modes' projections `(R, n)`.
    :param t: Targets `(n,)`.
    :param weight: Row weights `(n,)`, or None for ones.
    """
    rank = p.shape[0]
    padded = p.new_zeros(rank + 1, p.shape[1] + 1)
    padded[:rank, :-1], padded[rank, :-1] = p, t
    if weight is not None:
        weight = torch.cat([weight, weight.new_zeros(1)])
    per_value = distinct.sum_products(padded, rank, weight)  # (U, R, R + 1)
    upper = torch.triu_indices(rank, rank, device=p.device)
    phi, psi = sums.table(distinct.values)
    sums.moments.addmm_(psi, per_value[:, upper[0], upper[1]])
    sums.rhs.addmm_(per_value[:, :, rank].mT, phi.mT)


class _Rows:
    """A batch with what is known about it: distinct values of its columns and products over modes."""

    def __init__(self, batch: Batch, tables: Sequence[MomentTable], distinct: Sequence[DistinctValues | None]):
        self.batch, self.tables, self.distinct = batch, tables, distinct
        self.bonds: list[Tensor] | None = None  # bond b, between modes b - 1 and b: see Design
        self.position = 0

    def project(self, d: int, factor: Tensor) -> Tensor:
        """The projection of a mode, `(R, n)`."""
        distinct, x = self.distinct[d], self.batch.x[:, d]
        if distinct is not None:
            return (factor @ self.tables[d].features(distinct.values)).index_select(1, distinct.codes)
        return self.tables[d].project(factor, x, rows=chunk_rows(self.tables[d].num_functions + factor.shape[0]))

    def add_to(self, sums: FactorSums, d: int, p: Tensor, t: Tensor) -> None:
        """Add this batch to the sums of a mode."""
        distinct, weight = self.distinct[d], self.batch.weight
        if distinct is None:
            add_direct(sums, self.batch.x[:, d], p, t, weight)
        else:
            add_distinct(sums, distinct, p, t, weight)
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

    def keep(self, factors: Sequence[Tensor]) -> None:
        """Store products over modes at every bond, for position 0: all of them products to the right."""
        bonds = [factors[0].new_empty(0)] * len(factors)
        right: Tensor | None = None
        for b in range(len(factors) - 1, 0, -1):
            projection = self.project(b, factors[b])
            right = projection if right is None else right * projection
            bonds[b] = right
        self.bonds, self.position = bonds, 0

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

    :param batches: A source of :class:`~gpytorch_tkrr.source.Batch`, iterated again for every update unless kept.
    :param bases: The basis of each mode.
    :param memory: Bytes that may be used beyond the data.
    :param compress: Whether columns with few distinct values are compressed to these.
    """

    def __init__(
        self, batches: Iterable[Batch], bases: Sequence[Basis], *, memory: int = 2 << 30, compress: bool = True
    ):
        self.batches = batches
        self.tables = [MomentTable(basis) for basis in bases]
        self.memory = memory
        self._compress = [compress] * len(bases)  # until a batch shows that a column has too many values
        self._kept: list[_Rows] | None = None
        self._spent = 0

    def reset(self) -> None:
        """Forget kept products: needed when any factor but the last one updated has changed."""
        for rows in self._kept or ():
            rows.bonds = None

    def marginals(self) -> list[tuple[Tensor, Tensor]]:
        r"""
        :math:`\tfrac1N \sum_n \phi_d \phi_d^\top` and :math:`\tfrac1N \sum_n \phi_d` for each mode, in one pass.

        :return: D pairs `(M, M)` and `(M,)`.
        """
        totals: list[FactorSums] = []
        for rows in self._rows():
            one = torch.ones(1, rows.batch.num_rows, dtype=torch.float64, device=rows.batch.x.device)
            if not totals:
                totals = [FactorSums.zeros(table, 1, one.device) for table in self.tables]
            for d, sums in enumerate(totals):
                rows.add_to(sums, d, one, one[0])
        return [(sums.gram()[0, :, 0] / sums.square, sums.rhs[0] / sums.square) for sums in totals]

    def sums(self, d: int, factors: Sequence[Tensor], scale: Tensor) -> FactorSums:
        r"""
        The sums of one factor, with the residual :math:`t = y - f` of the current model as target.

        :param d: The mode.
        :param factors: Raw factors :math:`a_k`, D tensors `(R, M_k)`. Since the last call only the factor that call was
            for may have changed, else call :meth:`reset` first.
        :param scale: Scales of the components `(R,)`: :math:`f(x) = \sum_r s_r \prod_k \phi_k(x_k)^\top a_{kr}`.
        """
        rank = factors[0].shape[0]
        total = FactorSums.zeros(self.tables[d], rank, scale.device)
        left = self.memory - self._spent
        for rows in self._rows():
            left -= 8 * rank * (len(factors) - 1) * rows.batch.num_rows
            if left >= 0 and self._kept is not None:
                if rows.bonds is None:
                    rows.keep(factors)
                p, values = rows.move(d, factors, scale)
            else:
                p, values = rows.products(d, factors, scale)
            rows.add_to(total, d, p, rows.batch.y - values)
        return total

    def _rows(self) -> Iterator[_Rows]:
        """All batches, kept ones or read anew; a first pass that fits into memory keeps them."""
        if self._kept is not None:
            yield from self._kept
            return
        kept: list[_Rows] | None = []
        self._spent = 0
        for batch in self.batches:
            rows = _Rows(batch, self.tables, [self._find(d, batch) for d in range(len(self.tables))])
            if kept is not None:
                self._spent += 8 * batch.x.numel() + 16 * batch.num_rows
                self._spent += sum(distinct.num_bytes for distinct in rows.distinct if distinct is not None)
                kept = [*kept, rows] if self._spent <= self.memory else None
            yield rows
        self._kept = kept

    def _find(self, d: int, batch: Batch) -> DistinctValues | None:
        distinct = DistinctValues.find(batch.x[:, d]) if self._compress[d] else None
        self._compress[d] = distinct is not None
        return distinct
