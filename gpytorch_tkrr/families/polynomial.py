"""Legendre polynomials on the box."""

from __future__ import annotations

import torch
from torch import Tensor

from ..bases.basis import Basis
from ..bases.waves import within
from ..errors import SizeError
from .map_kernel import FeatureMap


class Polynomial(FeatureMap):
    r"""
    All products of powers up to a degree in each input, as Legendre polynomials on the box, orthonormal for a uniform
    input: :math:`\phi_j(x) = \sqrt{2 j + 1} P_j((x - c) / L)`, j = 0 ... p, whatever `num_basis` is. The kernel is

    .. math:: k(x, x') = \prod_d \frac1{p + 1} \sum_{j=0}^p \phi_j(x_d) \phi_j(x'_d).

    :param degree: p, at least 1.

    Example:
        >>> import gpytorch, torch, gpytorch_tkrr as tkrr
        >>> x = torch.rand(200, 2, dtype=torch.float64)
        >>> likelihood = gpytorch.likelihoods.GaussianLikelihood()
        >>> likelihood.noise = 1e-3
        >>> model = tkrr.TKRR(x, x[:, 0] ** 2 * x[:, 1], likelihood, basis=tkrr.Polynomial(2), rank=2)
        >>> result = tkrr.fit_als(model, seed=0)
        >>> bool((model.eval()(x).mean - model.train_targets).abs().max() < 0.02)
        True

    References: Novikov, Trofimov & Oseledets (2017), *Exponential machines*; Chen, Batselier, Suykens & Wong (2018),
    *Parallelized tensor train learning of polynomial classifiers*.
    """

    def __init__(self, degree: int):
        if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
            raise SizeError(f"degree must be an integer, at least 1; got {degree!r}.")
        self.degree = degree

    def __repr__(self) -> str:
        return f"Polynomial(degree={self.degree})"

    def functions(self, center: Tensor, half_width: Tensor, num_basis: int) -> Basis:
        return LegendreBasis(center, half_width, self.degree)


class LegendreBasis(Basis):
    r"""
    :math:`\sqrt{2 j + 1} P_j((x - c) / L)`, j = 0 ... p, zero outside of the box.

    :param center: The centre c.
    :param half_width: The half width L.
    :param degree: p.
    """

    def __init__(self, center: Tensor, half_width: Tensor, degree: int):
        self.center, self.half_width, self.degree = center, half_width, degree

    @property
    def num_functions(self) -> int:
        return self.degree + 1

    def parameters(self) -> list[Tensor]:
        return [self.center, self.half_width]

    def __call__(self, x: Tensor) -> Tensor:
        z = (x.double() - self.center) / self.half_width
        values = [torch.ones_like(z), z]
        for j in range(1, self.degree):
            values.append(((2 * j + 1) * z * values[j] - j * values[j - 1]) / (j + 1))
        norms = torch.arange(1, 2 * self.degree + 2, 2, dtype=torch.float64, device=x.device).sqrt()
        return torch.stack(values, dim=-1) * norms * within(x, self.center, self.half_width).unsqueeze(-1)

    def band(self, low: float, high: float) -> tuple[float, int] | None:
        if low < self.center - self.half_width or high > self.center + self.half_width:
            return None
        return 0.0, self.degree
