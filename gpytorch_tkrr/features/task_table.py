r"""The functions of a covariance of tasks, :math:`k(i, j) = B_{ij}`.

With :math:`B = L L^\top` the features of task i are the row i of L, all of variance one.
"""

from __future__ import annotations

import torch
from gpytorch.kernels import IndexKernel
from torch import Tensor

from ..errors import UnsupportedKernelError
from .advice import advise
from .expansion import Box, Expansion, register


class TaskTable(Expansion):
    """
    Rows of a root of the covariance of tasks, for :class:`~gpytorch.kernels.IndexKernel`. The basis depends on that
    covariance.

    :param kernel: The kernel.
    :param column: The column that holds the tasks, 0, 1, ...
    """

    def __init__(self, kernel: IndexKernel, column: int):
        self.kernel = kernel
        self.column = column

    @property
    def num_functions(self) -> int:
        return self.kernel.raw_var.shape[-1]

    def _rows(self, table: Tensor, x: Tensor) -> Tensor:
        """Rows of a table `(*batch, T, Q)` for inputs `(..., N, D)`: `(..., N, Q)`."""
        return torch.take_along_dim(table, x[..., [self.column]].long(), dim=-2)

    def features(self, x: Tensor) -> Tensor:
        return self._rows(torch.linalg.cholesky(self.kernel._eval_covar_matrix().double()), x)

    def variances(self) -> Tensor:
        return torch.ones_like(self.kernel.raw_var, dtype=torch.float64)

    def prior_variance(self, x: Tensor) -> Tensor:
        variance = self.kernel._eval_covar_matrix().double().diagonal(dim1=-2, dim2=-1)
        return self._rows(variance.unsqueeze(-1), x).squeeze(-1)

    def basis_parameters(self) -> list[Tensor]:
        return [self.kernel.covar_factor, self.kernel.raw_var]


@register(IndexKernel)
def _(kernel: IndexKernel, box: Box, path: str) -> Expansion:
    if len(box.columns) > 1:
        raise UnsupportedKernelError(f"{path}: IndexKernel sees {len(box.columns)} input columns. {advise(kernel)}")
    return TaskTable(kernel, box.columns[0])
