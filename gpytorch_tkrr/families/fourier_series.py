"""The plain Fourier series of the box."""

from __future__ import annotations

import math

from torch import Tensor

from ..bases.basis import Basis
from ..bases.waves import HarmonicBasis
from .map_kernel import FeatureMap


class FourierSeries(FeatureMap):
    r"""
    The Fourier series of the box with the same variance for all frequencies: a uniform spectral density. Its kernel is
    Dirichlet's,

    .. math:: k(t) = \frac1M \Bigl(1 + 2 \sum_{j=1}^J \cos(\pi j t / L)\Bigr), \qquad M = 2 J + 1,

    multiplied over the inputs. It has the period 2 L: a box wider than the data keeps their ends apart.

    Example:
        >>> import gpytorch, torch, gpytorch_tkrr as tkrr
        >>> x = torch.rand(200, 2)
        >>> likelihood = gpytorch.likelihoods.GaussianLikelihood()
        >>> model = tkrr.TKRR(x, torch.sin(6 * x[:, 0]) * x[:, 1], likelihood, basis=tkrr.FourierSeries(), num_basis=7)
        >>> model.covar_module.base_kernel.map
        FourierSeries()

    Reference: Wahls, Koivunen, Poor & Verhaegen (2014), *Learning multidimensional Fourier series with tensor trains*.
    """

    def functions(self, center: Tensor, half_width: Tensor, num_basis: int) -> Basis:
        return OrthonormalSeries(center, half_width, (num_basis - 1) // 2)


class OrthonormalSeries(HarmonicBasis):
    r"""
    The Fourier series of the box, where cosines and sines have the factor :math:`\sqrt 2`.

    :param center: The centre.
    :param half_width: The half width.
    :param num_harmonics: J.
    """

    def __call__(self, x: Tensor) -> Tensor:
        values = super().__call__(x)
        return values * self._norms(values.new_ones(self.num_functions))

    def _norms(self, ones: Tensor) -> Tensor:
        ones[1:] = math.sqrt(2)
        return ones

    def product_formula(self) -> tuple[Tensor, Tensor]:
        index, factor = super().product_formula()
        norms = self._norms(factor.new_ones(self.num_functions))
        return index, factor * norms.unsqueeze(-1) * norms

    def fill_with_moments(self, x: Tensor, features: Tensor, moments: Tensor) -> None:
        super().fill_with_moments(x, features, moments)
        features[1:].mul_(math.sqrt(2))
