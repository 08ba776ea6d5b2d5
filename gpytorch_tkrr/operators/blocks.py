r"""Features of fixed rows, block by block; training needs sums over rows and linear combinations of them only.

Where functions are products of functions of one input each, these come from the values of the latter. For two inputs,

.. math:: (\Phi^\top r)_{ij} = \sum_n r_n \phi_i(x_{n1}) \phi_j(x_{n2}),

is one product of a :math:`M_1 \times N` and a :math:`N \times M_2` matrix: the :math:`N M_1 M_2` features are never
written down.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import cached_property, reduce

import torch
from torch import Tensor

from ..features.expansion import BasisProducts, Expansion, Scaled, Sum
from .gram import BATCH_ROWS, moments_pay, product_gram

#: For more right-hand sides than this the features of a batch of rows are written down.
_FEW_COLUMNS = 8


class Block(ABC):
    """
    Features of one part of an expansion at fixed rows.

    :param expansion: The part.
    :param x: Inputs `(..., N, D)`.
    """

    def __init__(self, expansion: Expansion, x: Tensor):
        self.expansion, self.x = expansion, x

    def dense(self) -> Tensor:
        """All features `(..., N, M)`, float64, function-major in memory: products with a vector run twice as fast."""
        return self.expansion.features(self.x).mT.contiguous().mT

    @abstractmethod
    def project(self, rhs: Tensor) -> Tensor:
        r"""
        :math:`\Phi^\top r`.

        :param rhs: r, `(..., N, K)`, float64.
        :return: `(..., M, K)`.
        """

    @abstractmethod
    def evaluate(self, weights: Tensor) -> Tensor:
        r"""
        :math:`\Phi u`.

        :param weights: u, `(..., M, K)`, float64.
        :return: `(..., N, K)`.
        """

    @abstractmethod
    def sum_squares(self) -> Tensor:
        r""":math:`\sum_n \phi_i(x_n)^2`, `(..., M)`."""

    def rows(self, batch: slice) -> Tensor:
        """
        The features of some rows, `(..., n, M)`.

        :param batch: Which rows.
        """
        return self.expansion.features(self.x[..., batch, :])

    def gram(self, weights: Tensor | None) -> Tensor:
        r"""
        :math:`\Phi^\top W \Phi`, by moment functions where the features have them.

        :param weights: Row weights `(N,)`, or None for ones.
        :return: `(..., M, M)`.
        """
        products = self.expansion.products() if self.x.dim() == 2 else None
        if products is not None and moments_pay(products):
            return product_gram(products, self.x, weights)
        return self.gram_with(self, weights)

    def gram_with(self, other: Block, weights: Tensor | None) -> Tensor:
        r"""
        :math:`\Phi^\top W \Phi'`, in batches of rows.

        :param other: Other features of the same rows.
        :param weights: Row weights `(N,)`, or None for ones.
        :return: `(..., M, M')`.
        """
        pieces = []
        for batch in self._batches():
            left = self.rows(batch)
            right = left if other is self else other.rows(batch)
            pieces.append((left if weights is None else left * weights[batch, None].double()).mT @ right)
        return reduce(torch.add, pieces)

    def _batches(self) -> list[slice]:
        return [slice(start, start + BATCH_ROWS) for start in range(0, max(self.x.shape[-2], 1), BATCH_ROWS)]


class DenseBlock(Block):
    """Features that are written down as soon as they are needed."""

    @cached_property
    def _values(self) -> Tensor:
        return super().dense()

    def dense(self) -> Tensor:
        return self._values

    def rows(self, batch: slice) -> Tensor:
        return self._values[..., batch, :]

    def project(self, rhs: Tensor) -> Tensor:
        return self._values.mT @ rhs

    def evaluate(self, weights: Tensor) -> Tensor:
        return self._values @ weights

    def sum_squares(self) -> Tensor:
        return torch.linalg.vector_norm(self._values, dim=-2).square()


class ProductBlock(Block):
    """
    Products of functions of one input each, of which only the values of these functions are kept.

    :param expansion: The part.
    :param x: Inputs `(N, D)`.
    :param products: Its functions.
    """

    def __init__(self, expansion: Expansion, x: Tensor, products: BasisProducts):
        super().__init__(expansion, x)
        self._bases, self._columns = products.bases, products.columns
        self._sizes = [basis.num_functions for basis in products.bases]
        strides = [math.prod(self._sizes[d + 1 :]) for d in range(len(self._sizes))]
        indices = products.indices.to(x.device)
        self._positions = (indices * indices.new_tensor(strides)).sum(-1)  # of the products on the grid of all of them

    @cached_property
    def _factors(self) -> list[Tensor]:
        """Values of the functions of each input, `(M_d, N)`."""
        factors = []
        for basis, column in zip(self._bases, self._columns, strict=True):
            values = torch.empty(basis.num_functions, len(self.x), dtype=torch.float64, device=self.x.device)
            basis.fill(self.x[:, column], values)
            factors.append(values)
        return factors

    @staticmethod
    def pays(products: BasisProducts) -> bool:
        """
        Whether all products but those with the last input are far fewer than the features.

        :param products: The functions of an expansion.
        """
        sizes = [basis.num_functions for basis in products.bases]
        return len(sizes) > 1 and 2 * math.prod(sizes[:-1]) <= len(products.indices)

    def _sum(self, factors: list[Tensor], weights: Tensor | None) -> Tensor:
        """Sums over rows of all products of factors `(M_d, N)` with weights `(N,)`, `(M,)`."""
        total = torch.zeros(
            math.prod(self._sizes[:-1]), self._sizes[-1], dtype=torch.float64, device=self._positions.device
        )
        for rows in self._batches():
            first, *others, last = (factor[:, rows] for factor in factors)
            left = reduce(_pairs, others, first if weights is None else first * weights[rows])
            total.addmm_(left, last.mT)
        return total.flatten()[self._positions]

    def project(self, rhs: Tensor) -> Tensor:
        columns = rhs.movedim(-2, -1).reshape(-1, rhs.shape[-2])
        if len(columns) > _FEW_COLUMNS:
            return reduce(torch.add, (self.rows(batch).mT @ rhs[..., batch, :] for batch in self._batches()))
        sums = torch.stack([self._sum(self._factors, column) for column in columns])
        return sums.reshape(*rhs.shape[:-2], rhs.shape[-1], -1).mT

    def evaluate(self, weights: Tensor) -> Tensor:
        columns = weights.movedim(-2, -1).reshape(-1, weights.shape[-2])
        if len(columns) > _FEW_COLUMNS:
            return torch.cat([self.rows(batch) @ weights for batch in self._batches()], dim=-2)
        values = torch.stack([self._combine(column) for column in columns])
        return values.reshape(*weights.shape[:-2], weights.shape[-1], -1).mT

    def _combine(self, weights: Tensor) -> Tensor:
        """The sum of all functions with weights `(M,)` at each row, `(N,)`."""
        grid = weights.new_zeros(math.prod(self._sizes))
        grid[self._positions] = weights
        grid = grid.reshape(-1, self._sizes[-1])
        values = weights.new_empty(len(self.x))
        for rows in self._batches():
            first, *others, last = (factor[:, rows] for factor in self._factors)
            values[rows] = ((grid.mT @ reduce(_pairs, others, first)) * last).sum(0)
        return values

    def sum_squares(self) -> Tensor:
        return self._sum([factor.square() for factor in self._factors], None)


def _pairs(left: Tensor, right: Tensor) -> Tensor:
    """Products of all pairs of functions, `(P, n)` and `(Q, n)` -> `(P Q, n)`."""
    return (left.unsqueeze(1) * right.unsqueeze(0)).flatten(0, 1)


def make_blocks(expansion: Expansion, x: Tensor) -> list[Block]:
    """
    The blocks of an expansion, side by side.

    :param expansion: The expansion; its features do not depend on anything that needs a gradient.
    :param x: Inputs `(N, D)`.
    """
    inner = expansion
    while isinstance(inner, Scaled):
        inner = inner.base
    if isinstance(inner, Sum):
        return [block for part in inner.parts for block in make_blocks(part, x)]
    products = expansion.products()
    if products is not None and ProductBlock.pays(products):
        return [ProductBlock(expansion, x, products)]
    return [DenseBlock(expansion, x)]
