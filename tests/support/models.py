"""Models, kernels and likelihoods that several tests use."""

from __future__ import annotations

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean, Mean
from torch import Tensor

from gpytorch_tkrr import ReducedRankNormal


class GP(gpytorch.models.ExactGP):
    """
    An ExactGP as users write it.

    :param x: Training inputs.
    :param y: Training targets.
    :param likelihood: The likelihood.
    :param kernel: The kernel.
    :param mean_module: The mean; a constant by default.
    """

    distribution: type = MultivariateNormal

    def __init__(self, x: Tensor, y: Tensor, likelihood, kernel: Kernel, mean_module: Mean | None = None):
        super().__init__(x, y, likelihood)
        self.mean_module = ConstantMean(batch_shape=kernel.batch_shape) if mean_module is None else mean_module
        self.covar_module = kernel

    def forward(self, x: Tensor) -> MultivariateNormal:
        return self.distribution(self.mean_module(x), self.covar_module(x))


class ReducedRankGP(GP):
    """The same with the distribution that keeps its structure."""

    distribution = ReducedRankNormal


def rbf(lengthscale: float = 0.4, outputscale: float = 1.0, ard: int | None = None, dtype=torch.float64) -> ScaleKernel:
    """A scaled RBF kernel with these hyperparameters."""
    kernel = ScaleKernel(RBFKernel(ard_num_dims=ard)).to(dtype)
    kernel.base_kernel.lengthscale, kernel.outputscale = lengthscale, outputscale
    return kernel


def gaussian(noise: float = 0.01, dtype=torch.float64) -> GaussianLikelihood:
    """A Gaussian likelihood with this variance."""
    likelihood = GaussianLikelihood().to(dtype)
    likelihood.noise = noise
    return likelihood


def wavy_data(num_rows: int, num_dims: int = 2, batch: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    """Inputs `(*batch, N, D)` and a noisy sum of sines."""
    x = torch.rand(*batch, num_rows, num_dims, dtype=torch.float64)
    return x, torch.sin(5 * x).sum(-1) + 0.3 * torch.randn(*batch, num_rows, dtype=torch.float64)
