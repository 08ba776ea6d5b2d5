"""Which products of one-dimensional functions enter a multi-dimensional basis."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce

import torch
from torch import Tensor

from ..errors import SizeError

#: No basis with more functions than this is built: its Gram matrix alone would take 0.8 GB.
MAX_FUNCTIONS = 10_000


def as_num_basis(num_basis: int | Sequence[int] | Tensor) -> int | tuple[int, ...]:
    """
    Numbers of functions as Python integers, or an error that says what is wrong.

    :param num_basis: One number for all dimensions, or one for each. Integers of NumPy and torch will do.
    """
    given = num_basis.tolist() if isinstance(num_basis, Tensor) else num_basis
    try:
        sizes = tuple(map(operator.index, given)) if isinstance(given, Iterable) else operator.index(given)
    except TypeError as error:
        raise TypeError(
            f"num_basis must be a whole number or one per input dimension; got {num_basis!r}. Round it with int()."
        ) from error
    if (sizes if isinstance(sizes, int) else min(sizes, default=0)) < 1:
        raise SizeError(f"num_basis must be at least 1 in every dimension; got {num_basis}.")
    return sizes


class IndexSet(ABC):
    """
    A rule that keeps some of the multi-indices :math:`1 \\le j_d \\le M_d`.

    Example:
        >>> import gpytorch, gpytorch_tkrr as tkrr
        >>> rules: list[tkrr.IndexSet] = [tkrr.FullTensor(), tkrr.TotalDegree(12), tkrr.HyperbolicCross(10)]
        >>> [rule.size([10, 10, 10]) for rule in rules]
        [1000, 220, 53]
    """

    @abstractmethod
    def _extend(self, value: Tensor, index: Tensor, num_remaining: int) -> tuple[Tensor, Tensor]:
        """
        Add one dimension to partial multi-indices.

        :param value: What the rule has accumulated for each partial multi-index, `(K, 1)`.
        :param index: The candidates :math:`j_d` of the next dimension, `(1, M_d)`.
        :param num_remaining: How many dimensions follow.
        :return: The accumulated values `(K, M_d)` and whether each pair can be completed.
        """

    @abstractmethod
    def _start(self) -> float:
        """The accumulated value of the empty multi-index."""

    def indices(self, num_basis: Sequence[int]) -> Tensor:
        """
        The kept multi-indices in lexicographic order.

        :param num_basis: :math:`M_1 \\ldots M_D`.
        :return: `(M, D)`, int64, each entry between 1 and :math:`M_d`.
        """
        return _cached_indices(self, tuple(num_basis))

    def _levels(self, num_basis: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
        """
        How the kept multi-indices grow: for each dimension the partial multi-indices that go on, and by which function.
        """
        levels = []
        value = torch.tensor([self._start()])
        for d, num in enumerate(num_basis):
            candidates = torch.arange(1, num + 1)
            values, possible = self._extend(value.unsqueeze(-1), candidates.unsqueeze(0), len(num_basis) - d - 1)
            rows, columns = possible.nonzero(as_tuple=True)
            self._check_size(len(rows), num_basis)  # each partial multi-index can be completed by ones
            levels.append((rows, columns))
            value = values[rows, columns]
        if not len(value):
            raise SizeError(f"{self} keeps no function at all in {len(num_basis)} dimensions. Raise its limit.")
        return levels

    def size(self, num_basis: Sequence[int]) -> int:
        """Number of kept multi-indices."""
        return len(self.indices(num_basis))

    def products(self, factors: Sequence[Tensor]) -> Tensor:
        """
        The kept products of one-dimensional functions.

        :param factors: Values of the functions of each dimension, `(..., M_d)`.
        :return: `(..., M)`, in the order of :meth:`indices`.
        """
        levels = _cached_levels(self, tuple(factor.shape[-1] for factor in factors))
        device = factors[0].device
        products = torch.ones_like(factors[0][..., :1].mT)  # (..., M, n): whole rows are copied
        for factor, (rows, columns) in zip(factors, levels, strict=True):  # products that begin alike are shared
            values = factor.mT.contiguous()
            is_large = len(rows) * values.shape[-1] >= _MANY_VALUES and _are_first(rows, columns)
            if is_large and not (products.requires_grad or values.requires_grad):
                products = _write_products(products, values, rows)
            else:
                products = products.index_select(-2, rows.to(device)) * values.index_select(-2, columns.to(device))
        return products.mT

    def _check_size(self, size: int, num_basis: Sequence[int]) -> None:
        if size > MAX_FUNCTIONS:
            raise SizeError(
                f"{self} with num_basis {list(num_basis)} keeps more than {MAX_FUNCTIONS} functions. Use fewer "
                "functions per dimension, a HyperbolicCross or TotalDegree index set with a smaller limit, or the "
                "CP-weight model TKRR, whose size is linear in the number of dimensions."
            )


#: So many values of products are written block by block.
_MANY_VALUES = 2**20


@dataclass(frozen=True)
class FullTensor(IndexSet):
    """
    All products, :math:`\\prod_d M_d` of them.

    Example:
        >>> from gpytorch_tkrr import FullTensor
        >>> FullTensor().indices([2, 2]).tolist()
        [[1, 1], [1, 2], [2, 1], [2, 2]]
    """

    def _start(self) -> int:
        return 0

    def _extend(self, value: Tensor, index: Tensor, num_remaining: int) -> tuple[Tensor, Tensor]:
        values = value + 0 * index
        return values, torch.ones_like(values, dtype=torch.bool)

    def size(self, num_basis: Sequence[int]) -> int:
        return math.prod(num_basis)

    def _levels(self, num_basis: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
        self._check_size(self.size(num_basis), num_basis)
        return super()._levels(num_basis)

    def products(self, factors: Sequence[Tensor]) -> Tensor:
        return reduce(lambda left, right: (left.unsqueeze(-1) * right.unsqueeze(-2)).flatten(-2), factors)


@dataclass(frozen=True)
class TotalDegree(IndexSet):
    """
    Products with :math:`\\sum_d j_d \\le K`.

    :param limit: K, at least the number of dimensions.

    Example:
        >>> from gpytorch_tkrr import TotalDegree
        >>> TotalDegree(3).indices([9, 9]).tolist()
        [[1, 1], [1, 2], [2, 1]]
    """

    limit: int

    def _start(self) -> int:
        return 0

    def _extend(self, value: Tensor, index: Tensor, num_remaining: int) -> tuple[Tensor, Tensor]:
        values = value + index
        return values, values + num_remaining <= self.limit


@dataclass(frozen=True)
class Ellipsoid(IndexSet):
    """
    Products with :math:`\\sum_d ((j_d - 1) / M_d)^2 < 1`: all functions of one dimension, and of several those whose
    frequencies lie in an ellipsoid, as the level sets of the density of an RBF or Matern kernel do.

    Of all products it keeps about :math:`\\pi / 4` in two dimensions and :math:`\\pi / 6` in three, those with the
    largest variances.

    Example:
        >>> from gpytorch_tkrr import Ellipsoid
        >>> Ellipsoid().indices([2, 2]).tolist()
        [[1, 1], [1, 2], [2, 1], [2, 2]]
        >>> Ellipsoid().size([40, 40, 40])
        35376
    """

    def _start(self) -> float:
        return 0.0

    def size(self, num_basis: Sequence[int]) -> int:
        """Number of kept multi-indices; of very many, about."""
        num_dims = len(num_basis)
        if math.prod(num_basis) > 100 * MAX_FUNCTIONS:  # the volume of the part with positive entries
            return round(math.prod(num_basis) * math.pow(math.pi / 4, num_dims / 2) / math.gamma(num_dims / 2 + 1))
        values = torch.zeros(1, dtype=torch.float64)
        for num in num_basis:
            values, possible = self._extend(values.unsqueeze(-1), torch.arange(1, num + 1).unsqueeze(0), 0)
            values = values[possible]
        return len(values)

    def _extend(self, value: Tensor, index: Tensor, num_remaining: int) -> tuple[Tensor, Tensor]:
        values = value + ((index - 1) / index.shape[-1]).double().square()
        return values, values < 1 - 1e-9


@dataclass(frozen=True)
class HyperbolicCross(IndexSet):
    """
    Products with :math:`\\prod_d j_d \\le K`: high frequencies in one dimension at a time.

    :param limit: K, at least 1.

    Example:
        >>> from gpytorch_tkrr import HyperbolicCross
        >>> HyperbolicCross(2).indices([9, 9]).tolist()
        [[1, 1], [1, 2], [2, 1]]
    """

    limit: int

    def _start(self) -> int:
        return 1

    def _extend(self, value: Tensor, index: Tensor, num_remaining: int) -> tuple[Tensor, Tensor]:
        values = value * index
        return values, values <= self.limit


@dataclass(frozen=True)
class InPairs(IndexSet):
    """
    A rule for functions that stand in pairs, such as the cosine and the sine of one frequency: it counts the pairs, and
    all products of functions whose pairs it keeps are kept.

    :param rule: The rule for pairs.

    Example:
        >>> from gpytorch_tkrr import TotalDegree
        >>> from gpytorch_tkrr.bases.index_set import InPairs
        >>> InPairs(TotalDegree(2)).indices([4, 4]).tolist()
        [[1, 1], [1, 2], [2, 1], [2, 2]]
    """

    rule: IndexSet

    def _start(self) -> float:
        return self.rule._start()

    def _extend(self, value: Tensor, index: Tensor, num_remaining: int) -> tuple[Tensor, Tensor]:
        values, possible = self.rule._extend(value, index[:, : index.shape[-1] // 2], num_remaining)
        return values.repeat_interleave(2, dim=-1), possible.repeat_interleave(2, dim=-1)


def _are_first(rows: Tensor, columns: Tensor) -> bool:
    """Whether each row goes on with the first columns, however many, and without a gap."""
    counts = torch.bincount(rows)
    starts = counts.cumsum(0) - counts
    return torch.equal(columns, torch.arange(len(rows)) - starts[rows])


def _write_products(products: Tensor, values: Tensor, rows: Tensor) -> Tensor:
    """
    Each of the products `(..., P, n)` times the first of the values `(..., M, n)`, as many as `rows` names it. Large
    matrices are written once, and nothing is copied.
    """
    batch_shape = torch.broadcast_shapes(products.shape[:-2], values.shape[:-2])
    out = values.new_empty(*batch_shape, len(rows), values.shape[-1])
    start = 0
    for row, count in enumerate(torch.bincount(rows, minlength=products.shape[-2]).tolist()):
        block = out[..., start : start + count, :]
        torch.mul(products[..., row : row + 1, :], values[..., :count, :], out=block)
        start += count
    return out


@lru_cache(maxsize=64)
def _cached_levels(index_set: IndexSet, num_basis: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    return index_set._levels(num_basis)


@lru_cache(maxsize=64)
def _cached_indices(index_set: IndexSet, num_basis: tuple[int, ...]) -> Tensor:
    kept = torch.zeros(1, 0, dtype=torch.long)
    for rows, columns in _cached_levels(index_set, num_basis):
        kept = torch.cat([kept[rows], columns.unsqueeze(-1) + 1], dim=-1)
    return kept
