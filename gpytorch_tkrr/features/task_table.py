r"""The functions of a covariance of tasks, :math:`k(i, j) = B_{ij}`: one for each task, with correlated weights."""

from __future__ import annotations

import torch
from gpytorch.kernels import IndexKernel
from torch import Tensor

from ..bases.basis import Basis
from ..bases.covariance import Covariance
from .expansion import Term
from .finite import register_finite_basis


class TaskBasis(Basis):
    """
    The function of task t is one for t and zero for all others.

    :param num_tasks: T.
    """

    def __init__(self, num_tasks: int):
        self.num_tasks = num_tasks

    @property
    def num_functions(self) -> int:
        return self.num_tasks

    def __call__(self, x: Tensor) -> Tensor:
        return (x.long().unsqueeze(-1) == torch.arange(self.num_tasks, device=x.device)).double()


@register_finite_basis(IndexKernel, over_columns=None)
class TaskTerm(Term):
    """
    One function for each task, whose weights have the covariance B, for :class:`~gpytorch.kernels.IndexKernel`. A task
    that is none of them has no function, and the mean variance of the others, independent of them.

    :param kernel: The kernel; the column it sees holds the tasks, 0, 1, ...
    :param position: Not used.
    :param num_basis: Not used.
    """

    def __init__(self, kernel: IndexKernel, position: int, num_basis: int):
        self.kernel = kernel

    @property
    def basis(self) -> TaskBasis:
        return TaskBasis(self.kernel.raw_var.shape[-1])

    def _covariance(self) -> Covariance:
        return Covariance.from_matrix(self.kernel._eval_covar_matrix().double())

    def variances(self) -> Tensor:
        return self._covariance().variances

    def mixing(self) -> Tensor | None:
        return self._covariance().mixing

    def prior_variance(self, x: Tensor) -> Tensor:
        variance = self.kernel._eval_covar_matrix().double().diagonal(dim1=-2, dim2=-1)
        tasks = self.basis(x)
        known = (tasks @ variance.unsqueeze(-1)).squeeze(-1)
        return known + (1 - tasks.sum(-1)) * variance.mean(-1, keepdim=True)
