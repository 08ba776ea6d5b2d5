"""The same ExactGP script with one line swapped, shared by the Hilbert-kernel benchmarks."""

from __future__ import annotations

import gpytorch
import torch
from torch import Tensor

from gpytorch_tkrr import Domain, HilbertKernel
from gpytorch_tkrr.comparison.gp_contenders import ExactModel

LENGTHSCALE = 0.3


class SwappableGP(ExactModel):
    """
    An ExactGP whose covariance module is given, with a likelihood of its own.

    :param train_x: Inputs `(N, D)`.
    :param train_y: Targets `(N,)`.
    :param covar_module: The kernel.
    """

    def __init__(self, train_x: Tensor, train_y: Tensor, covar_module: gpytorch.kernels.Kernel):
        super().__init__(train_x, train_y, gpytorch.likelihoods.GaussianLikelihood(), covar_module)


def make_data(num_rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Smooth noisy targets on the unit square."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(num_rows, 2, generator=generator)
    y = torch.sin(6 * x[:, 0]) * torch.cos(4 * x[:, 1]) + 0.1 * torch.randn(num_rows, generator=generator)
    return x.to(dtype), y.to(dtype)


def hilbert_model(x: Tensor, y: Tensor, num_basis: int) -> SwappableGP:
    """`num_basis`^2 functions of an ARD RBF kernel."""
    base = gpytorch.kernels.RBFKernel(ard_num_dims=2)
    base.lengthscale = LENGTHSCALE
    domain = Domain.from_data(x, boundary_factor=2.0)
    return SwappableGP(x, y, gpytorch.kernels.ScaleKernel(HilbertKernel(base, domain, num_basis))).to(x.dtype)


def rff_model(x: Tensor, y: Tensor, num_features: int) -> SwappableGP:
    """Random Fourier features, `num_features` columns (a cosine and a sine per sample)."""
    base = gpytorch.kernels.RFFKernel(num_samples=num_features // 2, num_dims=2, ard_num_dims=2)
    base.lengthscale = LENGTHSCALE
    return SwappableGP(x, y, gpytorch.kernels.ScaleKernel(base)).to(x.dtype)
