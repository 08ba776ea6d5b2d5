"""A kernel whose weights are correlated: the levels of a category with a dense covariance."""

from __future__ import annotations

import torch
from gpytorch.kernels import IndexKernel

from gpytorch_tkrr import register_finite_basis
from gpytorch_tkrr.bases.basis import Basis
from gpytorch_tkrr.features.expansion import Term


class LevelsKernel(IndexKernel):
    """An IndexKernel: k(i, j) is an entry of a dense matrix of levels."""


class IndicatorBasis(Basis):
    """One function for each level, 1 there and 0 elsewhere."""

    def __init__(self, num_levels):
        self.num_levels = num_levels

    @property
    def num_functions(self):
        return self.num_levels

    def __call__(self, x):
        return (x.long().unsqueeze(-1) == torch.arange(self.num_levels)).double()  # IndexKernel rounds down


@register_finite_basis(LevelsKernel)
class LevelsTerm(Term):
    """The covariance of the levels is that of the indicators' weights."""

    def __init__(self, kernel, position, num_basis):
        self.kernel = kernel

    @property
    def basis(self):
        return IndicatorBasis(self.kernel.covar_factor.shape[-2])

    def matrix(self):
        return self.kernel.covar_matrix.to_dense().double()

    def variances(self):
        return torch.ones_like(self.matrix()[..., 0])

    def mixing(self):
        return torch.linalg.cholesky(self.matrix())

    def prior_variance(self, x):
        return self.matrix().diagonal(dim1=-2, dim2=-1)[..., x.long()]
