r"""The Gram matrix :math:`\Phi^\top W \Phi` of an expansion's features, with row weights, in float64.

Where the one-dimensional functions have moment functions :math:`\psi` (see :mod:`gpytorch_tkrr.bases.basis`), it
follows from the moments :math:`\sum_n w_n \prod_d \psi_{k_d}(x_{nd})`: with M sines in one dimension, a cost of
:math:`N (2 M + 1)` instead of :math:`N M^2`.

Reference: Viset, Kok, Solin & Särkkä (2024), *Exploiting Hankel-Toeplitz structures for fast computation of kernel
precision matrices*.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..features.expansion import BasisProducts, Expansion, Scaled, Sum

#: Rows per batch: a batch of features stays in cache.
BATCH_ROWS = 4096


class GramCache:
    r"""
    Remembers :math:`\Phi^\top W \Phi` and :math:`\Phi^\top r` of one feature matrix for the last row weights and the
    last r seen, by content.

    It lives beside the feature matrix in a linear operator and never holds an autograd graph.

    :param expansion: Whose features these are.
    :param x: Inputs `(..., N, D)`.
    :param features: Their features `(..., N, M)`.
    """

    def __init__(self, expansion: Expansion, x: Tensor, features: Tensor):
        self._sources = (expansion, x, features)
        self._plain: Tensor | None = None
        self._weighted: tuple[Tensor, Tensor] | None = None
        self._projected: tuple[Tensor, Tensor] | None = None
        self._mean_square: Tensor | None = None

    def mean_square(self) -> Tensor:
        r""":math:`\frac1N \sum_n \phi_i(x_n)^2`, `(..., M)`, float64."""
        if self._mean_square is None:
            features = self._sources[2].double()
            self._mean_square = torch.linalg.vector_norm(features, dim=-2).square() / features.shape[-2]
        return self._mean_square

    def __call__(self, weights: Tensor | None = None) -> Tensor:
        """
        :param weights: Row weights `(..., N)` without gradient, or None for ones.
        :return: `(..., M, M)`, float64.
        """
        if weights is None:
            if self._plain is None:
                self._plain = gram(*self._sources)
            return self._plain
        if self._weighted is None or not _same(self._weighted[0], weights):
            self._weighted = (weights.detach().clone(), gram(*self._sources, weights.detach()))
        return self._weighted[1]

    def project(self, rhs: Tensor) -> Tensor:
        r"""
        :math:`\Phi^\top r`.

        :param rhs: `(..., N, K)`, float64.
        :return: `(..., M, K)`, float64, differentiable in `rhs`.
        """
        features = self._sources[2].double()
        if self._projected is None or not _same(self._projected[0], rhs):
            self._projected = (rhs.detach().clone(), features.mT @ rhs.detach())
        return _Projection.apply(rhs, features, self._projected[1]) if rhs.requires_grad else self._projected[1]


class _Projection(torch.autograd.Function):
    """Phi' r, known already, with a gradient in r."""

    @staticmethod
    def forward(ctx: Any, rhs: Tensor, features: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(features)
        ctx.shape = rhs.shape
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (features,) = ctx.saved_tensors
        return (features @ grad).sum_to_size(ctx.shape), None, None


def _same(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and left.device == right.device and torch.equal(left, right)


@torch.no_grad()
def gram(expansion: Expansion, x: Tensor, features: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""
    :math:`\Phi^\top W \Phi`, by moment functions where the features have them and by matrix products elsewhere.

    :param expansion: Whose features these are.
    :param x: Inputs `(..., N, D)`.
    :param features: Their features `(..., N, M)`.
    :param weights: Row weights `(..., N)`, or None for ones.
    :return: `(..., M, M)`, float64.
    """
    batch_shape = torch.broadcast_shapes(features.shape[:-2], weights.shape[:-1] if weights is not None else ())
    if batch_shape:
        num_rows = features.shape[-2]
        xs = x.expand(*batch_shape, *x.shape[-2:]).reshape(-1, *x.shape[-2:])
        fs = features.expand(*batch_shape, *features.shape[-2:]).reshape(-1, *features.shape[-2:])
        ws = [None] * len(fs) if weights is None else weights.expand(*batch_shape, num_rows).reshape(-1, num_rows)
        grams = [gram(expansion, *each) for each in zip(xs, fs, ws, strict=True)]
        return torch.stack(grams).reshape(*batch_shape, *grams[0].shape)
    return _gram(expansion, x, features, weights)


def _gram(expansion: Expansion, x: Tensor, features: Tensor, weights: Tensor | None) -> Tensor:
    if isinstance(expansion, Scaled):
        return _gram(expansion.base, x, features, weights)
    products = expansion.products()
    if products is not None and _moments_pay(products):
        return _product_gram(products, x, weights)
    if isinstance(expansion, Sum):
        sizes = [part.num_functions for part in expansion.parts]
        blocks = features.split(sizes, dim=-1)
        rows = [[features.new_empty(0)] * len(sizes) for _ in sizes]
        for i, part in enumerate(expansion.parts):
            rows[i][i] = _gram(part, x, blocks[i], weights)
            for j in range(i):
                rows[i][j] = weighted_product(blocks[i], blocks[j], weights)
                rows[j][i] = rows[i][j].mT
        return torch.cat([torch.cat(row, dim=-1) for row in rows], dim=-2)
    return weighted_product(features, features, weights)


def weighted_product(left: Tensor, right: Tensor, weights: Tensor | None) -> Tensor:
    """
    `left.T @ diag(weights) @ right`, in batches of rows.

    :param left: `(..., N, P)`.
    :param right: `(..., N, Q)`.
    :param weights: `(..., N)`, or None for ones.
    :return: `(..., P, Q)`.
    """
    if weights is None:
        return left.mT @ right
    pieces = []
    for start in range(0, left.shape[-2], BATCH_ROWS):
        rows = slice(start, start + BATCH_ROWS)
        pieces.append((left[..., rows, :] * weights[..., rows, None].double()).mT @ right[..., rows, :])
    return reduce(torch.add, pieces)


def _moments_pay(products: BasisProducts) -> bool:
    num_moments = [basis.num_moments for basis in products.bases]
    return None not in num_moments and 2 * math.prod(n for n in num_moments if n) < len(products.indices) ** 2


def _product_gram(products: BasisProducts, x: Tensor, weights: Tensor | None) -> Tensor:
    """The Gram matrix of products of one-dimensional functions, by their moment functions."""
    bases, columns = products.bases, products.columns
    shape = [basis.num_moments or 0 for basis in bases]
    moments = torch.zeros(math.prod(shape[:-1]), shape[-1], dtype=torch.float64, device=x.device)
    for start in range(0, x.shape[0], BATCH_ROWS):
        rows = slice(start, start + BATCH_ROWS)
        waves = [basis.moments(x[rows, column]) for basis, column in zip(bases, columns, strict=True)]  # each (K_d, n)
        if weights is not None:
            waves[-1] = waves[-1] * weights[rows].double()
        left = torch.ones(1, waves[-1].shape[-1], dtype=torch.float64, device=x.device)
        for wave in waves[:-1]:
            left = (left.unsqueeze(1) * wave.unsqueeze(0)).flatten(0, 1)
        moments.addmm_(left, waves[-1].mT)
    moments = moments.flatten()

    # In each dimension a product of two functions is a sum of two moment functions: 2^D combinations.
    choices = []
    for d, basis in enumerate(bases):
        index, factor = (part.to(x.device) for part in basis.product_formula())
        i = products.indices[:, d].to(x.device)
        stride = math.prod(shape[d + 1 :])
        position = index[:, i][:, :, i] * stride  # (2, M, M)
        choices.append(list(zip(position, factor if factor.shape[-1] == 1 else factor[:, i][:, :, i], strict=True)))
    num = len(products.indices)
    result = torch.zeros(num, num, dtype=torch.float64, device=x.device)
    for combination in itertools.product(*choices):
        position = reduce(torch.add, (position for position, _ in combination))
        result.addcmul_(moments[position], reduce(torch.mul, (factor for _, factor in combination)))
    return result


class _WeightedGram(torch.autograd.Function):
    """Phi' diag(w) Phi with a gradient in w: that of weight n is phi_n' (dL/dG) phi_n."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, features: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(features)
        ctx.shape = weights.shape
        return compute(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (features,) = ctx.saved_tensors
        return ((features @ grad) * features).sum(-1).sum_to_size(ctx.shape), None, None


def differentiable_gram(cache: GramCache, features: Tensor, weights: Tensor) -> Tensor:
    r"""
    :math:`\Phi^\top W \Phi` with a gradient in the weights (learned noise that differs between rows).

    :param cache: The cache that computes the sums.
    :param features: `(..., N, M)`, without gradient.
    :param weights: `(..., N)`.
    :return: `(..., M, M)`.
    """
    if not weights.requires_grad:
        return cache(weights)
    return _WeightedGram.apply(weights, features, cache)
