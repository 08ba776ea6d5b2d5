"""Covariances of few rows as they are: dense, and factorised by Cholesky whatever GPyTorch's limit for that is."""

from __future__ import annotations

from typing import Any

import torch
from linear_operator import settings
from linear_operator.operators import AddedDiagLinearOperator, DenseLinearOperator, DiagLinearOperator, LinearOperator
from torch import Tensor

from .observer import Observer
from .operator import diagonal_for

#: A covariance of more rows is left to GPyTorch, which estimates likelihoods by a random iteration.
MAX_EXACT_ROWS = 2_000


class ExactLinearOperator(DenseLinearOperator):
    """
    A dense covariance.

    :param tsr: `(..., N, N)`.
    :param observer: Hears of the noise that is added, and of the residuals.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr.operators.exact import ExactLinearOperator
        >>> ExactLinearOperator(torch.eye(2)).add_diagonal(torch.tensor(1.0)).logdet()
        tensor(1.3863)
    """

    def __init__(self, tsr: Tensor, *, observer: Observer | None = None):
        LinearOperator.__init__(self, tsr, observer=observer)
        self.tensor = tsr
        self.observer = observer

    def _check_args(self, tsr: Tensor, observer: Observer | None = None) -> str | None:
        return super()._check_args(tsr)

    def _mul_constant(self, other: Tensor) -> LinearOperator:
        return self.__class__(self.tensor * other.unsqueeze(-1).unsqueeze(-1), observer=self.observer)

    def _expand_batch(self, batch_shape: torch.Size | list[int]) -> LinearOperator:
        return self.__class__(self.tensor.expand(*batch_shape, *self.matrix_shape), observer=self.observer)

    def add_diagonal(self, diag: Tensor) -> LinearOperator:
        return self + diagonal_for(self, diag)

    def __add__(self, other: Any) -> LinearOperator:
        if isinstance(other, DiagLinearOperator):
            return ExactAddedDiagLinearOperator(self, other)
        return super().__add__(other)


class ExactAddedDiagLinearOperator(AddedDiagLinearOperator):
    """
    A dense covariance with noise.

    :param linear_ops: An :class:`ExactLinearOperator` and a diagonal.
    """

    @property
    def _by_cholesky(self) -> settings.max_cholesky_size:
        return settings.max_cholesky_size(max(self.shape[-1], settings.max_cholesky_size.value()))

    def inv_quad_logdet(
        self, inv_quad_rhs: Tensor | None = None, logdet: bool | None = False, reduce_inv_quad: bool | None = True
    ) -> tuple[Tensor | None, Tensor | None]:
        observer = self._linear_op.observer
        if observer is not None and inv_quad_rhs is not None:
            residual = inv_quad_rhs if inv_quad_rhs.dim() == 1 else inv_quad_rhs[..., 0]
            with torch.no_grad():
                prior = self._linear_op._diagonal().double().mean(-1)
                observer.hear(prior, self._diag_tensor._diagonal(), residual, self.shape[-1])
        with self._by_cholesky:
            return super().inv_quad_logdet(inv_quad_rhs, logdet, reduce_inv_quad)

    def solve(self, right_tensor: Tensor, left_tensor: Tensor | None = None) -> Tensor:
        with self._by_cholesky:
            return super().solve(right_tensor, left_tensor)

    def root_decomposition(self, method: str | None = None) -> LinearOperator:
        with self._by_cholesky:
            return super().root_decomposition(method)

    def root_inv_decomposition(
        self, initial_vectors: Tensor | None = None, test_vectors: Tensor | None = None, method: str | None = None
    ) -> LinearOperator:
        with self._by_cholesky:
            return super().root_inv_decomposition(initial_vectors, test_vectors, method)

    def __add__(self, other: Any) -> LinearOperator:
        if isinstance(other, DiagLinearOperator):
            return self.__class__(self._linear_op, self._diag_tensor + other)
        return super().__add__(other)
