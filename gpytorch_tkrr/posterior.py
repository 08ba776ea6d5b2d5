"""A posterior over functions, and its covariance as a linear operator that is evaluated when needed."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from linear_operator.operators import LinearOperator, LowRankRootLinearOperator
from torch import Tensor

#: Rows whose covariance root is held at a time where only variances or products are asked for.
CHUNK_ROWS = 1024


class Posterior(Protocol):
    """What :class:`~gpytorch_tkrr.TKRR` asks of a posterior; it knows functions, not kernels or data."""

    def mean(self, x: Tensor) -> Tensor:
        """
        The posterior mean without the mean module.

        :param x: Inputs `(..., n, D)`.
        :return: `(..., n)`, float64, differentiable in `x`.
        """

    def root(self, x: Tensor) -> Tensor:
        """
        A root of the posterior covariance.

        :param x: Inputs `(..., n, D)`.
        :return: `(..., n, K)`, float64, differentiable in `x`.
        """


class PosteriorCovariance(LinearOperator):
    """
    The covariance of a posterior at given points, of low rank and never formed unless asked for.

    Variances and products with vectors go through the root in chunks of rows, so that memory does not grow with the
    number of points times the rank.

    :param x: Inputs `(..., n, D)`.
    :param posterior: The posterior.
    :param out_dtype: The dtype of the results.
    """

    def __init__(self, x: Tensor, *, posterior: Posterior, out_dtype: torch.dtype = torch.float64):
        super().__init__(x, posterior=posterior, out_dtype=out_dtype)
        self.x, self.posterior, self.out_dtype = x, posterior, out_dtype

    @property
    def dtype(self) -> torch.dtype:
        return self.out_dtype

    def _size(self) -> torch.Size:
        return torch.Size([*self.x.shape[:-1], self.x.shape[-2]])

    def _transpose_nonbatch(self) -> PosteriorCovariance:
        return self

    def _chunks(self) -> list[Tensor]:
        return list(self.x.split(CHUNK_ROWS, dim=-2))

    def _matmul(self, rhs: Tensor) -> Tensor:
        vector = rhs.dim() == 1
        rhs_ = (rhs.unsqueeze(-1) if vector else rhs).double()
        chunks = self._chunks()
        inner: Tensor | None = None
        for x, part in zip(chunks, rhs_.split(CHUNK_ROWS, dim=-2), strict=True):
            piece = self.posterior.root(x).mT @ part
            inner = piece if inner is None else inner + piece
        assert inner is not None
        product = torch.cat([self.posterior.root(x) @ inner for x in chunks], dim=-2).to(self.out_dtype)
        return product.squeeze(-1) if vector else product

    def _diagonal(self) -> Tensor:
        parts = [self.posterior.root(x).square().sum(-1) for x in self._chunks()]
        return torch.cat(parts, dim=-1).to(self.out_dtype)

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        if row_index is col_index or (isinstance(row_index, slice) and row_index == col_index):
            return PosteriorCovariance(
                self.x[(*batch_indices, row_index, slice(None))], posterior=self.posterior, out_dtype=self.out_dtype
            )
        return self.low_rank()._getitem(row_index, col_index, *batch_indices)

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Tensor) -> Tensor:
        return self.low_rank()._get_indices(row_index, col_index, *batch_indices)

    def _expand_batch(self, batch_shape: torch.Size) -> PosteriorCovariance:
        x = self.x.expand(*batch_shape, *self.x.shape[-2:])
        return PosteriorCovariance(x, posterior=self.posterior, out_dtype=self.out_dtype)

    def low_rank(self) -> LowRankRootLinearOperator:
        """The same covariance with its root formed."""
        return LowRankRootLinearOperator(self.posterior.root(self.x).to(self.out_dtype))

    def to_dense(self) -> Tensor:
        root = self.posterior.root(self.x)
        return (root @ root.mT).to(self.out_dtype)

    def root_decomposition(self, method: str | None = None) -> LinearOperator:
        return self.low_rank()
