"""The design of every factor: rows, what is kept of them between updates, and products of projections."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..bases.basis import Basis
from ..data.keyed import row_uniform
from ..data.source import Batch, RowFunction, Working, residuals
from ..data.training import TrainingData
from ..errors import SizeError
from .cells import Cells, DistinctValues, RowGroups
from .conditional import DenseGram
from .format import WeightFormat
from .levels import LevelGram, LevelTable
from .missing import moment_table
from .moments import MomentTable
from .rounding import Resolution
from .sums import FactorSums, add_direct, add_grouped, add_single, chunk_rows
from .weights import CP

#: The largest matrix of one factor's weights: it has 46 000 rows, and a factorisation takes 3e13 multiplications.
MAX_MATRIX_BYTES = 1 << 34

#: Ranks up to this are projected by cells; for larger ones interpolation costs more than the functions.
MAX_CELL_RANK = 12

#: Ranks up to this are summed over cells; for larger ones their sums do not fit into cache.
MAX_CELL_SUM_RANK = 64

#: Bytes for each row of a column that is divided into cells.
CELL_BYTES = 20


@dataclass(frozen=True)
class Marginal:
    r"""
    A mode alone, averaged over the rows.

    :param gram: :math:`\tfrac1N \sum_n \phi_d \phi_d^\top`, of one component.
    :param mean: :math:`\tfrac1N \sum_n \phi_d`, `(M,)`.
    """

    gram: DenseGram | LevelGram
    mean: Tensor

    def dense(self) -> Tensor:
        """The Gram matrix, `(M, M)`."""
        return self.gram.dense()[0, :, 0]

    def squares(self, raw: Tensor) -> Tensor:
        """
        Mean squares of functions of this mode.

        :param raw: Their weights, `(R, M)`.
        :return: `(R,)`.
        """
        if isinstance(self.gram, LevelGram):
            return self.gram.table.at_levels(raw).square() @ self.gram.blocks[:, 0, 0]
        gram = self.dense()
        return ((raw @ gram) * raw).sum(-1)

    def diagonal(self) -> Tensor:
        """Mean squares of the mode's own functions, `(M,)`."""
        if isinstance(self.gram, LevelGram):
            counts = self.gram.blocks[:, 0, 0]
            total = torch.empty_like(self.mean)
            total[self.gram.table.levels] = counts
            total[self.gram.table.others] = counts @ self.gram.table.values.to(counts).square()
            return total
        return self.dense().diagonal()


@dataclass(frozen=True)
class DenseRows:
    """
    Few rows, as dense matrices.

    :param features: The functions of each mode, D tensors `(N, M_d)`.
    :param y: Targets, `(N,)`.
    :param weight: Weights of the rows, `(N,)`.
    """

    features: list[Tensor]
    y: Tensor
    weight: Tensor


class _Rows:
    """A batch with what is known about it: nodes of its columns and products over modes."""

    def __init__(
        self,
        batch: Batch,
        tables: Sequence[MomentTable],
        distinct: Sequence[DistinctValues | None],
        weights: WeightFormat,
    ):
        self.batch, self.tables, self.distinct, self.format = batch, tables, distinct, weights
        self.chain = weights.chain(len(tables))
        self.bonds: list[Tensor] | None = None  # bond b, between places b - 1 and b of the chain: see Design
        self.place = 0
        self.is_kept = False
        self.cells: dict[int, Cells | None] = {}

    def groups(self, d: int, is_small: bool) -> RowGroups | None:
        """The nodes of a column; cells only for a batch that is kept, and where the rank is small enough."""
        if self.distinct[d] is not None or not self.is_kept or not is_small:
            return self.distinct[d]
        if d not in self.cells:
            self.cells[d] = Cells.find(self.batch.x[:, d], self.tables[d])
        return self.cells[d]

    def project(self, d: int, factor: Tensor) -> Tensor:
        """The projection of a mode, `(R, n)`."""
        groups, x = self.groups(d, len(factor) <= MAX_CELL_RANK), self.batch.x[:, d]
        if groups is not None:
            return groups.interpolate(self.tables[d].at_nodes(factor, groups.nodes))
        return self.tables[d].project(factor, x, rows=chunk_rows(self.tables[d].num_functions + factor.shape[0]))

    def add_to(
        self,
        sums: FactorSums,
        d: int,
        p: Tensor,
        t: Tensor,
        weight: Tensor | None = None,
        resolution: Resolution | None = None,
        num_rows: int = 0,
    ) -> None:
        """Add this batch to the sums of a mode, with row weights; by default in double precision."""
        groups, x = self.groups(d, len(p) <= MAX_CELL_SUM_RANK), self.batch.x[:, d]
        if isinstance(groups, DistinctValues):  # cheap in any case
            resolution = None
        if resolution is not None and resolution.allows_single(sums.table, x, p, weight, num_rows):
            add_single(sums, x, groups, p, t, weight)
        elif groups is not None:
            add_grouped(sums, groups, p, t, weight)
        else:
            add_direct(sums, x, p, t, weight)
        sums.square.add_(t @ t if weight is None else (weight * t) @ t)
        sums.count.add_(t.shape[0])

    def products(self, d: int, factors: Sequence[Tensor], scale: Tensor) -> tuple[Tensor, Tensor]:
        """Products over all modes but d, `(K_d, n)`, and the model's values `(n,)`, without any memory."""
        place = self.chain.index(d)
        left: Tensor | None = None
        for k in self.chain[:place]:
            left = self.format.advance(left, self.project(k, factors[k]))
        right: Tensor | None = None
        for k in self.chain[:place:-1]:
            right = self.format.retreat(self.project(k, factors[k]), right)
        projection = self.project(d, factors[d])
        p = torch.ones_like(projection) if len(factors) == 1 else self.format.join(left, right)
        return p, _values(scale, p, projection)

    def keep(self, factors: Sequence[Tensor], d: int) -> None:
        """Store products over modes at every bond, as they are after an update of mode d."""
        self.is_kept = True
        bonds, place = [factors[0].new_empty(0)] * len(factors), self.chain.index(d)
        left: Tensor | None = None
        for b, k in zip(range(1, place + 1), self.chain, strict=False):  # products to the left
            bonds[b] = left = self.format.advance(left, self.project(k, factors[k]))
        right: Tensor | None = None
        for b in range(len(factors) - 1, place, -1):  # products to the right
            k = self.chain[b]
            bonds[b] = right = self.format.retreat(self.project(k, factors[k]), right)
        self.bonds, self.place = bonds, place

    def move(self, d: int, factors: Sequence[Tensor], scale: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`products`, from the stored bonds, which are brought to mode d."""
        assert self.bonds is not None
        bonds, last, place = self.bonds, len(factors) - 1, self.chain.index(d)
        values: Tensor | None = None
        while self.place != place:
            here, k = self.place, self.chain[self.place]
            projection = self.project(k, factors[k])
            if place > here:  # bond here + 1 turns from a product to the right into one to the left
                bond, new = here + 1, self.format.advance(None if here == 0 else bonds[here], projection)
            else:  # bond here turns from a product to the left into one to the right
                bond, new = here, self.format.retreat(projection, None if here == last else bonds[here + 1])
            values = _values(scale, new, bonds[bond]) if values is None else values
            bonds[bond] = new
            self.place = here + 1 if place > here else here - 1
        if last == 0:
            p = torch.ones(factors[0].shape[0], self.batch.num_rows, dtype=torch.float64, device=scale.device)
        else:
            p = self.format.join(None if place == 0 else bonds[place], None if place == last else bonds[place + 1])
        if values is None:
            values = _values(scale, p, self.project(d, factors[d]))
        return p, values


def _values(scale: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """f, from the two sides of a bond `(K, n)`; scales for each row, or one for all."""
    return scale.expand(len(left)) @ (left * right)


def _times(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The product of weights, None for ones."""
    return other if one is None else one if other is None else one * other


class Design:
    r"""
    The design of every factor over the rows of a fit.

    Batches and products over modes are kept where they fit into `memory` bytes: bond b, between places b - 1 and b of
    the format's chain, holds the product of all projections to its left or to its right, and passing a mode turns one
    bond over. So a sweep costs one projection per factor update, whatever D. What does not fit is projected anew for
    each update.

    :param data: The rows, read again for every update unless kept. Where several processes hold rows, the sums are
        those of all of them.
    :param bases: The basis of each mode.
    :param memory: Bytes that may be used beyond the data.
    :param compress: Whether columns with few distinct values are compressed to these.
    :param weights: The format of the weights, by default :class:`CP`.
    :param rows_of: A design of other functions over the same rows, which are then held once.

    :ivar row_weight: Weights of rows beside those of the data, which change from sweep to sweep: a function of a batch
        and of the number of its first row; None for ones.
    """

    def __init__(
        self,
        data: TrainingData,
        bases: Sequence[Basis],
        *,
        memory: int = 2 << 30,
        compress: bool = True,
        weights: WeightFormat | None = None,
        rows_of: Design | None = None,
    ):
        self.row_weight: Callable[[Batch, int], Tensor] | None = None
        self._rows_of = rows_of
        self.data = data
        self.memory = memory
        self.format: WeightFormat = CP() if weights is None else weights
        sample = data.summary.sample
        # Hardly any repetition in the sample: no need to look for it in every batch.
        self._compress = [compress and 2 * num <= len(sample) for num in data.summary.num_distinct()]
        self._kept: list[_Rows] | None = None
        self._spent = 0
        self.set_bases(bases)

    def set_bases(self, bases: Sequence[Basis]) -> None:
        """
        Go on with other functions, and the rows that have been kept.

        :param bases: The basis of each mode.
        """
        missing = self.data.summary.num_missing()
        self.tables = [moment_table(b, has_missing=bool(m)) for b, m in zip(bases, missing, strict=True)]
        self.bases = list(bases)
        self._marginals: list[Marginal] | None = None
        self.set_format(self.format)

    def set_format(self, weights: WeightFormat) -> None:
        """
        Go on with another format of the weights, and the rows that have been kept.

        :param weights: The format.
        """
        self.format = weights
        self._position = weights.chain(len(self.bases))[0]  # the mode at which products are made anew
        if self._kept is not None:
            self._kept = [_Rows(rows.batch, self.tables, rows.distinct, weights) for rows in self._kept]

    def require_affordable(self) -> None:
        """An error where the matrix of a factor's weights is far too large to be factorised, in memory and in time."""
        sizes = [0 if isinstance(table, LevelTable) else table.num_functions for table in self.tables]
        heights = self.format.heights([table.num_functions for table in self.tables])
        num, d = max((height * size, d) for d, (height, size) in enumerate(zip(heights, sizes, strict=True)))
        if 8 * num**2 > MAX_MATRIX_BYTES:
            raise SizeError(
                f"Input {d} has {num:.3g} weights, {heights[d]:.3g} for each of {sizes[d]} functions; their "
                f"matrix would take {8 * num**2:.1e} bytes, and {MAX_MATRIX_BYTES:.1e} is the limit. Lower rank or "
                "num_basis."
            )

    def reset(self, position: int | None = None) -> None:
        """
        Forget kept products: needed when any factor but the last one updated has changed.

        :param position: The mode from where the next update is reached; by default the first one of the chain.
        """
        self._position = self.format.chain(len(self.bases))[0] if position is None else position
        for rows in self._kept or ():
            rows.bonds = None

    def thinned(self, num_rows: int, key: int, *, skip: int = 0) -> Design:
        """
        The design of about so many rows, chosen at random by one pass: the same ones for the same key, however rows are
        batched or shared between processes. They are kept, whatever `memory` is.

        :param num_rows: How many, of all processes together.
        :param key: A number that decides which ones, at most 63 bits.
        :param skip: Others than the first so many of the same key.
        """
        low, high = (number / self.data.summary.num_rows for number in (skip, skip + num_rows))
        first_row, chosen = self.data.first_row, []
        for rows in self._rows():
            batch = rows.batch
            chance = row_uniform(batch.num_rows, first_row, key, batch.x.device)
            index = ((chance >= low) & (chance < high)).nonzero().squeeze(-1)
            weight = None if batch.weight is None else batch.weight[index]
            chosen.append(Batch(batch.x[index], batch.y[index], weight, first_row + index))
            first_row += batch.num_rows
        return self._of_batches(self.data.subset(chosen), chosen)

    def mapped(self, inputs: Callable[[Tensor], Tensor]) -> Design:
        """
        The design of the same rows with other inputs; all of them must have been kept.

        :param inputs: A map of the inputs `(n, D)`.
        """
        assert self._kept is not None
        return self._of_batches(self.data, [replace(rows.batch, x=inputs(rows.batch.x)) for rows in self._kept])

    def _of_batches(self, data: TrainingData, batches: Sequence[Batch]) -> Design:
        design = Design(data, self.bases, memory=self.memory, weights=self.format)
        design._kept = [design._grouped(batch) for batch in batches if batch.num_rows]
        return design

    def log_densities(self, factors: Sequence[Tensor], noise: float) -> Tensor:
        r"""
        :math:`\log N(y_n; f(x_n), s^2 / w_n)` of each row of this process, `(n,)`, without its constant.

        :param factors: Raw factors, D tensors `(R, M_d)`.
        :param noise: :math:`s^2`.
        """
        scale, parts = factors[0].new_ones(()), [factors[0].new_empty(0)]
        for rows in self._rows():
            _, values = rows.products(rows.chain[0], factors, scale)
            weight = torch.ones_like(values) if rows.batch.weight is None else rows.batch.weight
            parts.append(-0.5 * (weight * (rows.batch.y - values).square() / noise + math.log(noise)))
        return torch.cat(parts)

    def rows(self, *, own: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """
        All rows at once: inputs `(n, D)`, targets `(n,)`, weights `(n,)`.

        :param own: Whether to take those of this process alone.
        """
        batches = [rows.batch for rows in self._rows()]
        empty = self.data.summary.lower.new_empty(0)
        x = torch.cat([empty.new_empty(0, len(self.bases)), *(batch.x for batch in batches)])
        y = torch.cat([empty, *(batch.y for batch in batches)])
        ones = [torch.ones_like(batch.y) if batch.weight is None else batch.weight for batch in batches]
        weight = torch.cat([empty, *ones])
        if not own:
            parts = self.data.processes.gather((x.cpu(), y.cpu(), weight.cpu()))
            x, y, weight = (torch.cat(each).to(empty.device) for each in zip(*parts, strict=True))
        return x, y, weight

    def dense(self, *, own: bool = False) -> DenseRows:
        """
        All rows at once, with the functions of every mode: for few rows.

        :param own: Whether to take those of this process alone.
        """
        x, y, weight = self.rows(own=own)
        return DenseRows([basis(column) for basis, column in zip(self.bases, x.mT, strict=True)], y, weight)

    def turn(self, bond: int, matrix: Tensor) -> None:
        """
        Multiply the products that are kept at a bond: the factors on one side of it have been multiplied, those on the
        other divided.

        :param bond: Between places `bond - 1` and `bond` of the chain.
        :param matrix: `(r, r)`.
        """
        for rows in self._kept or ():
            if rows.bonds is not None:
                rows.bonds[bond] = matrix @ rows.bonds[bond]

    def marginals(self) -> list[Marginal]:
        """
        Each mode alone, averaged over all rows where these have been kept, else over the sample that the first pass
        took. So they cost no pass of their own.
        """
        if self._marginals is None:
            device = self.data.summary.lower.device
            totals = [FactorSums.zeros(table, 1, device) for table in self.tables]
            for rows in self._rows() if self.data.is_kept else [self._sample()]:
                one = torch.ones(1, rows.batch.num_rows, dtype=torch.float64, device=device)
                for d, sums in enumerate(totals):
                    rows.add_to(sums, d, one, one[0], rows.batch.weight)
            if self.data.is_kept:
                packed = self.data.processes.sum(torch.cat([sums.pack() for sums in totals]))
                parts = packed.split([sums.pack().numel() for sums in totals])
                totals = [sums.unpack(part) for sums, part in zip(totals, parts, strict=True)]
            self._marginals = []
            for sums in totals:
                averaged = replace(sums, moments=sums.moments / sums.square)
                self._marginals.append(Marginal(averaged.structured_gram(), sums.rhs[0] / sums.square))
        return self._marginals

    def _sample(self) -> _Rows:
        """The sample of all processes' rows, as one batch."""
        summary, inputs = self.data.summary, self.data.inputs
        x = summary.sample if inputs is None else inputs(summary.sample)
        return self._grouped(Batch(x, torch.zeros_like(summary.sample_weight), summary.sample_weight))

    def sums(
        self,
        d: int,
        factors: Sequence[Tensor],
        scale: Tensor,
        working: Working = residuals,
        resolution: Resolution | None = None,
    ) -> FactorSums:
        r"""
        The sums of one factor, with the residual :math:`t = y - f` of the current model as target.

        :param d: The mode.
        :param factors: Raw factors :math:`a_k`, D tensors `(K_k, M_k)`. Since the last call only the factor that call
            was for may have changed, else call :meth:`reset` or :meth:`turn` first.
        :param scale: Scales of the components `(R,)`: :math:`f(x) = \sum_r s_r \prod_k \phi_k(x_k)^\top a_{kr}`; one
            number for formats without.
        :param working: t and row weights of a batch, where they are not the residuals and those of the data.
        :param resolution: How precisely G must be known; by default all is summed in double precision.
        """
        first_row = self.data.first_row
        total = FactorSums.zeros(self.tables[d], len(factors[d]), scale.device)
        for rows, p, values in self._products(d, factors, scale):
            batch = self._weighed(rows.batch, first_row)
            t, weight = working(batch, values, first_row)
            weight = _times(batch.weight, weight)
            rows.add_to(total, d, p, t, weight, resolution, self.data.summary.num_rows)
            first_row += rows.batch.num_rows
        return total.unpack(self.data.processes.sum(total.pack()))

    def fill(self, factors: Sequence[Tensor], scale: Tensor) -> None:
        """
        Make the products that :meth:`sums` keeps now, as they stand before an update of the chain's first mode.

        :param factors: As for :meth:`sums`.
        :param scale: As for :meth:`sums`.
        """
        for _ in self._products(self.format.chain(len(factors))[0], factors, scale):
            pass

    def _products(self, d: int, factors: Sequence[Tensor], scale: Tensor) -> Iterator[tuple[_Rows, Tensor, Tensor]]:
        """Batches with p and the values of f, from products that are kept where they fit into memory."""
        heights = [len(factor) for factor in factors]
        left = self.memory - self._spent
        per_row = 8 * sum(self.format.bonds(heights)) + CELL_BYTES * sum(num <= MAX_CELL_SUM_RANK for num in heights)
        for rows in self._rows():
            left -= per_row * rows.batch.num_rows
            if left >= 0 and self._kept is not None:
                if rows.bonds is None:
                    rows.keep(factors, self._position)
                yield rows, *rows.move(d, factors, scale)
            else:
                yield rows, *rows.products(d, factors, scale)

    def sum_rows(self, factors: Sequence[Tensor], scale: Tensor, function: RowFunction, size: int) -> Tensor:
        """
        The sum of a function of all rows, over all processes.

        :param factors: As for :meth:`sums`.
        :param scale: As for :meth:`sums`.
        :param function: Its sum over the rows of a batch, `(size,)`.
        :param size: How many values it has.
        :return: `(size,)`, float64.
        """
        first_row = self.data.first_row
        total = torch.zeros(size, dtype=torch.float64, device=scale.device)
        for rows in self._rows():
            # Kept products stand at some mode; from there f costs one projection.
            evaluate = rows.products if rows.bonds is None else rows.move
            _, values = evaluate(rows.chain[0 if rows.bonds is None else rows.place], factors, scale)
            total += function(self._weighed(rows.batch, first_row), values, first_row)
            first_row += rows.batch.num_rows
        return self.data.processes.sum(total)

    def _weighed(self, batch: Batch, first_row: int) -> Batch:
        """A batch with all that weighs its rows."""
        if self.row_weight is None:
            return batch
        return replace(batch, weight=_times(batch.weight, self.row_weight(batch, first_row)))

    def sum_projections(
        self, factors: Sequence[Tensor], function: Callable[[Batch, Tensor], Tensor], size: int
    ) -> Tensor:
        r"""
        The sum over all rows, of all processes, of a function of single modes.

        :param factors: Raw weights of functions of each mode, D tensors `(Q_d, M_d)`.
        :param function: Its sum over the rows of a batch, `(size,)`, given the batch and
            :math:`\phi_d(x_{nd})^\top a_{dq}`, those of all modes one after the other, `(sum_d Q_d, n)`.
        :param size: How many values it has.
        :return: `(size,)`, float64.
        """
        total = torch.zeros(size, dtype=torch.float64, device=factors[0].device)
        for rows in self._rows():
            values = torch.cat([rows.project(d, factor) for d, factor in enumerate(factors)])
            total += function(rows.batch, values)
        return self.data.processes.sum(total)

    def _rows(self) -> Iterator[_Rows]:
        """All batches, kept ones or read anew; a first pass that fits into memory keeps them."""
        if self._kept is None and self._rows_of is not None and self._rows_of._kept is not None:
            self._kept = [_Rows(rows.batch, self.tables, rows.distinct, self.format) for rows in self._rows_of._kept]
        if self._kept is not None:
            yield from self._kept
            return
        if self._rows_of is not None:
            yield from (_Rows(rows.batch, self.tables, rows.distinct, self.format) for rows in self._rows_of._rows())
            return
        kept: list[_Rows] | None = []
        self._spent = 0
        for batch in self.data:
            rows = self._grouped(batch)
            if kept is not None:
                self._spent += 8 * batch.x.numel() + 16 * batch.num_rows
                self._spent += sum(distinct.num_bytes for distinct in rows.distinct if distinct is not None)
                kept.append(rows)
                kept = kept if self._spent <= self.memory else None
            yield rows
        self._kept = kept

    def _grouped(self, batch: Batch) -> _Rows:
        """A batch, its columns contiguous since they are read one by one, with their distinct values."""
        batch = replace(batch, x=batch.x.mT.contiguous().mT)
        columns = zip(batch.x.mT, self._compress, self.tables, strict=True)
        return _Rows(batch, self.tables, [_distinct(*column) for column in columns], self.format)


def _distinct(x: Tensor, compress: bool, table: MomentTable) -> DistinctValues | None:
    """The distinct values of a column: its levels, or those that are found where it is to be compressed."""
    if isinstance(table, LevelTable):
        return table.group(x)
    return DistinctValues.find(x) if compress else None
