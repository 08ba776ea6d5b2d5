r"""The features :math:`\Phi` of fixed rows, not evaluated until one of them is needed.

Training needs :math:`\Phi^\top W \Phi`, :math:`\Phi^\top r` and :math:`\Phi u` only, which come from less (see
:mod:`.blocks`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..features.expansion import Expansion
from .blocks import Block, DenseBlock, make_blocks
from .lazy_operators import DeferredLinearOperator


@dataclass
class _Known:
    """
    What has been computed, shared by all copies of a matrix of features. It never holds an autograd graph.

    :param shape: The shape of the features.
    :param blocks: The features, block by block.
    :param dense: All of them, once they have been needed.
    :param gram: Their Gram matrix.
    :param weighted: Row weights, and the Gram matrix with them.
    :param projected: A right-hand side, and its sums.
    :param mean_square: The mean square of each function.
    """

    shape: torch.Size
    blocks: list[Block] | None = None
    dense: Tensor | None = None
    gram: Tensor | None = None
    weighted: tuple[Tensor, Tensor] | None = None
    projected: tuple[Tensor, Tensor] | None = None
    mean_square: Tensor | None = None


class LazyFeatures(DeferredLinearOperator):
    r"""
    :math:`\Phi`, `(..., N, M)`, float64. The sums for the last row weights and for the last r seen are remembered, and
    found again by content.

    :param x: Inputs `(..., N, D)`, without gradient.
    :param expansion: Evaluates the features; they must not depend on anything that needs a gradient.
    :param known: What has been computed before.

    Example:
        >>> import gpytorch, torch, gpytorch_tkrr as tkrr
        >>> from gpytorch_tkrr.operators.lazy_features import LazyFeatures
        >>> kernel = tkrr.HilbertKernel(gpytorch.kernels.RBFKernel(), tkrr.Domain([0.0, 0.0], [2.0, 2.0]), 8)
        >>> x = torch.rand(100, 2, dtype=torch.float64)
        >>> features = LazyFeatures(x, expansion=kernel.expansion())
        >>> dense = kernel.expansion().features(x)
        >>> torch.allclose(features.gram(), dense.mT @ dense), torch.allclose(features.project(x), dense.mT @ x)
        (True, True)
    """

    def __init__(self, x: Tensor, *, expansion: Expansion, known: _Known | None = None):
        if known is None:
            with torch.no_grad():
                *batch_shape, _, num = expansion.features(x[..., :0, :]).shape  # without a single row
            known = _Known(torch.Size((*batch_shape, x.shape[-2], num)))
        super().__init__(x, expansion=expansion, known=known)
        self.x, self.expansion, self._known = x, expansion, known

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64

    def _size(self) -> torch.Size:
        return self._known.shape

    @property
    def _blocks(self) -> list[Block]:
        if self._known.blocks is None:
            is_plain = len(self._known.shape) == 2
            self._known.blocks = (make_blocks if is_plain else _one_block)(self.expansion, self.x.detach())
        return self._known.blocks

    @torch.no_grad()
    def to_dense(self) -> Tensor:
        if self._known.dense is None:
            values = [block.dense() for block in self._blocks]
            is_one = len(values) == 1
            self._known.dense = values[0] if is_one else torch.cat([each.mT for each in values], dim=-2).mT
        return self._known.dense

    @torch.no_grad()
    def mean_square(self) -> Tensor:
        r""":math:`\frac1N \sum_n \phi_i(x_n)^2`, `(..., M)`."""
        if self._known.mean_square is None:
            sums = torch.cat([block.sum_squares() for block in self._blocks], dim=-1)
            self._known.mean_square = sums / self._known.shape[-2]
        return self._known.mean_square

    def project(self, rhs: Tensor) -> Tensor:
        r"""
        :math:`\Phi^\top r`.

        :param rhs: `(..., N, K)`, float64.
        :return: `(..., M, K)`, differentiable in `rhs`.
        """
        known = self._known
        if known.projected is None or not _same(known.projected[0], rhs):
            known.projected = (rhs.detach().clone(), self._project(rhs.detach()))
        return _Projection.apply(rhs, self, known.projected[1]) if rhs.requires_grad else known.projected[1]

    @torch.no_grad()
    def _project(self, rhs: Tensor) -> Tensor:
        return torch.cat([block.project(rhs) for block in self._blocks], dim=-2)

    def evaluate(self, weights: Tensor) -> Tensor:
        r"""
        :math:`\Phi u`.

        :param weights: u, `(..., M, K)`, float64.
        :return: `(..., N, K)`, differentiable in `weights`.
        """
        return _Evaluation.apply(weights, self) if weights.requires_grad else self._evaluate(weights)

    @torch.no_grad()
    def _evaluate(self, weights: Tensor) -> Tensor:
        pieces = weights.split([block.expansion.num_functions for block in self._blocks], dim=-2)
        return reduce(torch.add, (block.evaluate(u) for block, u in zip(self._blocks, pieces, strict=True)))

    def gram(self, weights: Tensor | None = None) -> Tensor:
        r"""
        :math:`\Phi^\top W \Phi`.

        :param weights: Row weights `(..., N)`, or None for ones.
        :return: `(..., M, M)`, differentiable in the weights (learned noise that differs between rows).
        """
        known = self._known
        if weights is None:
            if known.gram is None:
                known.gram = self._gram(None)
            return known.gram
        weights = weights.double()
        if known.weighted is None or not _same(known.weighted[0], weights):
            known.weighted = (weights.detach().clone(), self._gram(weights.detach()))
        if weights.requires_grad:
            return _WeightedGram.apply(weights, self.to_dense(), known.weighted[1])
        return known.weighted[1]

    @torch.no_grad()
    def _gram(self, weights: Tensor | None) -> Tensor:
        weight_shape = () if weights is None else weights.shape[:-1]
        batch_shape = torch.broadcast_shapes(self.x.shape[:-2], weight_shape)
        if not batch_shape:
            return self._plain_gram(weights)
        num_rows = self._known.shape[-2]
        if self.x.dim() == 2:
            parts = [self] * batch_shape.numel()
        else:
            xs = self.x.expand(*batch_shape, *self.x.shape[-2:]).reshape(-1, *self.x.shape[-2:])
            parts = [LazyFeatures(x, expansion=self.expansion) for x in xs]
        ws = [None] * len(parts) if weights is None else weights.expand(*batch_shape, num_rows).reshape(-1, num_rows)
        grams = [part._plain_gram(w) for part, w in zip(parts, ws, strict=True)]
        return torch.stack(grams, dim=-3).unflatten(-3, batch_shape)

    def _plain_gram(self, weights: Tensor | None) -> Tensor:
        """That of rows `(N, D)` with weights `(N,)`."""
        blocks = self._blocks
        rows = [[torch.empty(0)] * len(blocks) for _ in blocks]
        for i, block in enumerate(blocks):
            rows[i][i] = block.gram(weights)
            for j in range(i):
                rows[i][j] = block.gram_with(blocks[j], weights)
                rows[j][i] = rows[i][j].mT
        return rows[0][0] if len(rows) == 1 else torch.cat([torch.cat(row, dim=-1) for row in rows], dim=-2)

    def evaluated(self) -> Any:
        raise NotImplementedError  # entries come from to_dense


def _one_block(expansion: Expansion, x: Tensor) -> list[Block]:
    return [DenseBlock(expansion, x)]


class _Projection(torch.autograd.Function):
    """Phi' r, known already, with a gradient in r."""

    @staticmethod
    def forward(ctx: Any, rhs: Tensor, features: LazyFeatures, value: Tensor) -> Tensor:
        ctx.features, ctx.shape = features, rhs.shape
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.features.evaluate(grad).sum_to_size(ctx.shape), None, None


class _Evaluation(torch.autograd.Function):
    """Phi u with a gradient in u."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, features: LazyFeatures) -> Tensor:
        ctx.features, ctx.shape = features, weights.shape
        return features._evaluate(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        value = ctx.features._project(grad.detach())
        value = _Projection.apply(grad, ctx.features, value) if grad.requires_grad else value
        return value.sum_to_size(ctx.shape), None


class _WeightedGram(torch.autograd.Function):
    """Phi' diag(w) Phi, known already, with a gradient in w: that of weight n is phi_n' (dL/dG) phi_n."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, features: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(features)
        ctx.shape = weights.shape
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (features,) = ctx.saved_tensors
        return ((features @ grad) * features).sum(-1).sum_to_size(ctx.shape), None, None


def _same(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and left.device == right.device and torch.equal(left, right)
