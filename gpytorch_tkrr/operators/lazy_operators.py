"""Covariances that are not computed, or not computed yet."""

from __future__ import annotations

from typing import Any

import torch
from linear_operator.operators import LinearOperator, MatmulLinearOperator, to_linear_operator
from linear_operator.utils.memoize import cached
from torch import Tensor

from ..bases.covariance import Covariance
from ..features.expansion import Expansion


def multiply(operator: LinearOperator, other: Any) -> LinearOperator:
    """
    The elementwise product; a batch of constants keeps the structure also where it enlarges the batch (ScaleKernel over
    a shared basis).

    :param operator: A covariance.
    :param other: A number, tensor or operator.
    """
    if torch.is_tensor(other) and other.shape[-2:] == torch.Size((1, 1)) and (other > 0).all():
        return operator._mul_constant(other.squeeze(-1).squeeze(-1))
    return LinearOperator.mul(operator, other)


class DeferredLinearOperator(LinearOperator):
    """A covariance that is evaluated as soon as one of its entries is needed, and not before."""

    def evaluated(self) -> LinearOperator:
        """The covariance with all its entries."""
        raise NotImplementedError

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self.evaluated()._matmul(rhs)

    def _t_matmul(self, rhs: Tensor) -> Tensor:
        return self.evaluated()._t_matmul(rhs)

    def _diagonal(self) -> Tensor:
        return self.evaluated()._diagonal()

    def _permute_batch(self, *dims: int) -> LinearOperator:
        return self.evaluated()._permute_batch(*dims)

    def _unsqueeze_batch(self, dim: int) -> LinearOperator:
        return self.evaluated()._unsqueeze_batch(dim)

    def _expand_batch(self, batch_shape: torch.Size | list[int]) -> LinearOperator:
        return self.evaluated()._expand_batch(batch_shape)

    def _get_indices(self, row_index: Any, col_index: Any, *batch_indices: Any) -> Tensor:
        return self.evaluated()._get_indices(row_index, col_index, *batch_indices)

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        return self.evaluated()._getitem(row_index, col_index, *batch_indices)

    @cached
    def to_dense(self) -> Tensor:
        return self.evaluated().to_dense()


class HilbertCrossLinearOperator(DeferredLinearOperator):
    r"""
    The covariance :math:`\Phi(x_1) V \Phi(x_2)^\top` between two sets of inputs, not evaluated until it is needed.

    Predicting in weight space never needs it, and GPyTorch asks for it at every prediction.

    :param x1: `(..., N, D)`.
    :param x2: `(..., n, D)`.
    :param variances: `(..., M)`. Its dtype is that of the operator.
    :param mixing: T, `(..., M, M)`, float64; None for the identity.
    :param expansion: Evaluates the features; they must not depend on parameters that need a gradient.
    """

    def __init__(
        self, x1: Tensor, x2: Tensor, variances: Tensor, mixing: Tensor | None = None, *, expansion: Expansion
    ):
        super().__init__(x1, x2, variances, *([] if mixing is None else [mixing]), expansion=expansion)
        self.x1 = x1
        self.x2 = x2
        self.variances = variances
        self.mixing = mixing
        self.expansion = expansion

    @property
    def dtype(self) -> torch.dtype:
        return self.variances.dtype

    def evaluated(self) -> MatmulLinearOperator:
        """The product of both feature matrices."""
        prior = Covariance(self.variances.double(), self.mixing)
        left, right = (prior.mix(self.expansion.features(x)) for x in (self.x1, self.x2))
        left = left * prior.variances.unsqueeze(-2)
        return MatmulLinearOperator(left.to(self.dtype), right.mT.to(self.dtype))

    def _size(self) -> torch.Size:
        batch_shape = torch.broadcast_shapes(self.x1.shape[:-2], self.x2.shape[:-2], self.variances.shape[:-1])
        return torch.Size((*batch_shape, self.x1.shape[-2], self.x2.shape[-2]))

    def _transpose_nonbatch(self) -> HilbertCrossLinearOperator:
        return self.__class__(self.x2, self.x1, self.variances, self.mixing, expansion=self.expansion)

    def _expand_batch(self, batch_shape: torch.Size | list[int]) -> HilbertCrossLinearOperator:
        variances = self.variances.expand(*batch_shape, self.variances.shape[-1])
        return self.__class__(self.x1, self.x2, variances, self.mixing, expansion=self.expansion)

    def _mul_constant(self, other: Tensor) -> HilbertCrossLinearOperator:
        variances = self.variances * other.unsqueeze(-1)
        return self.__class__(self.x1, self.x2, variances, self.mixing, expansion=self.expansion)

    def mul(self, other: Any) -> LinearOperator:
        return multiply(self, other)


class HadamardCrossLinearOperator(DeferredLinearOperator):
    """
    The elementwise product of a covariance and of a covariance of tasks, not evaluated until it is needed.

    :param data: The covariance of the inputs, `(..., N, n)`.
    :param left: Rows of a root of the covariance of tasks, one for each row, `(..., N, T)`.
    :param right: The same for the columns, `(..., n, T)`.
    """

    def __init__(self, data: LinearOperator, left: Tensor, right: Tensor):
        super().__init__(data, left, right)
        self.data = data
        self.left = left
        self.right = right

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def evaluated(self) -> LinearOperator:
        return to_linear_operator(self.data.to_dense() * (self.left @ self.right.mT).to(self.dtype))

    def _size(self) -> torch.Size:
        batch_shape = torch.broadcast_shapes(self.data.batch_shape, self.left.shape[:-2], self.right.shape[:-2])
        return torch.Size((*batch_shape, *self.data.shape[-2:]))

    def _transpose_nonbatch(self) -> HadamardCrossLinearOperator:
        return self.__class__(self.data.mT, self.right, self.left)


class RefusedLinearOperator(LinearOperator):
    """
    Stands in for a covariance that could not be computed and raises the reason as soon as it is used.

    GPyTorch takes `active_dims` from a kernel while it evaluates it, and a kernel that raised would not get them back.

    :param x: Inputs, for their dtype and device.
    :param shape: The shape of the covariance.
    :param error: Why there is none.
    """

    def __init__(self, x: Tensor, shape: torch.Size, error: Exception):
        super().__init__(x, shape=shape, error=error)
        self._shape = shape
        self.error = error

    def _size(self) -> torch.Size:
        return self._shape

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise self.error

    _matmul = _transpose_nonbatch = _getitem = _get_indices = _diagonal = to_dense = _refuse

    def _keep(self, *args: Any, **kwargs: Any) -> RefusedLinearOperator:
        return self

    mul = add_diagonal = __add__ = _expand_batch = _unsqueeze_batch = _permute_batch = _keep
