"""Additive Gaussian processes: sums of functions of one input each, exact and with variational Fourier features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gpytorch.kernels import AdditiveKernel, Kernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from torch import Tensor

from ..families.variational_fourier import VariationalFourier
from ..hilbert.kernel import HilbertKernel
from .contender import register_contender
from .gp_contenders import AdditiveHilbert, SubsetExactGP, wide_box


def additive_kernel(num_dims: int, base: type[Kernel], **settings: float) -> AdditiveKernel:
    """
    A sum of kernels of one input each, of unit variance in all.

    :param num_dims: D.
    :param base: The kernel of an input.
    :param settings: Its settings.
    """
    parts = [ScaleKernel(base(active_dims=[d], **settings)) for d in range(num_dims)]
    for part in parts:
        part.outputscale = 1 / num_dims
    return AdditiveKernel(*parts)


@register_contender("additive-exact")
@dataclass
class AdditiveExactGP(SubsetExactGP):
    """
    An exact GP with a sum of one-dimensional kernels, on a random subset of the training rows.

    Reference: Duvenaud, Nickisch & Rasmussen (2011), *Additive Gaussian processes*.
    """

    title: ClassVar[str] = "additive ExactGP on a subset"
    note: ClassVar[str] = "a sum of one-dimensional RBF kernels: no interactions; at most 1000 random rows."
    is_default: ClassVar[bool] = False

    def kernel(self, x: Tensor, likelihood: GaussianLikelihood) -> Kernel:
        return additive_kernel(x.shape[1], RBFKernel)


@register_contender("additive-vff")
@dataclass
class AdditiveVFF(AdditiveHilbert):
    """
    A sum of one-dimensional Matern 3/2 kernels with variational Fourier features.

    Reference: Hensman, Durrande & Solin (2018), *Variational Fourier features for Gaussian processes*.
    """

    title: ClassVar[str] = "additive VFF"
    note: ClassVar[str] = "a sum of one-dimensional Matern 3/2 kernels, 41 variational Fourier features per input."
    is_default: ClassVar[bool] = False
    num_basis: int = 41

    def kernel(self, x: Tensor, likelihood: GaussianLikelihood) -> Kernel:
        self._check_size(x.shape[1])
        kernel = additive_kernel(x.shape[1], MaternKernel, nu=1.5)
        return HilbertKernel(kernel, wide_box(x), self.num_basis, basis=VariationalFourier())
