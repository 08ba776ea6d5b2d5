r"""Cosines and sines at the nodes of Gauss-Legendre quadrature."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ..bases.domain import Domain
from ..bases.waves import FrequencyBasis
from ..features.stationary import SpectralFamily


class GaussLegendre(SpectralFamily):
    r"""
    The spectral integral up to the frequency :math:`\Omega` by Gauss-Legendre quadrature with n nodes,

    .. math:: k(t) = \frac1\pi \int_0^\infty S(\omega) \cos(\omega t) d\omega
        \approx \frac1\pi \sum_{i=1}^n q_i S(\omega_i) \cos(\omega_i t), \qquad \Omega = \frac{2 n}{L},

    with a cosine and a sine for each node, n = M / 2. The nodes depend on the box and on the number of functions alone.
    With this :math:`\Omega` they resolve lags up to the width 2 L of the box: so they follow the lengthscale as the box
    does. For kernels of several inputs the nodes are a grid.

    Example:
        >>> import gpytorch, torch, gpytorch_tkrr as tkrr
        >>> base = gpytorch.kernels.MaternKernel(nu=2.5)
        >>> kernel = tkrr.HilbertKernel(base, tkrr.Domain(0.0, 2.0), 48, basis=tkrr.GaussLegendre())
        >>> kernel.approximation_error(torch.linspace(-1, 1, 50)) < 1e-4
        True

    Reference: Shustin & Avron (2022), *Gauss-Legendre features for Gaussian process regression*.
    """

    is_paired = True

    def functions(self, center: Tensor, half_width: Tensor, num_basis: int) -> FrequencyBasis:
        nodes, weights = (part.to(half_width) for part in _half_interval(max(num_basis // 2, 1)))
        highest = 2 * len(nodes) / half_width
        return FrequencyBasis(center, half_width, highest * nodes, highest * weights / math.pi)

    def as_accurate(self, domain: Domain, num_basis: Sequence[int], half_range: Tensor) -> tuple[Domain, list[int]]:
        # The same highest frequency, and two nodes more to resolve it at the ends of the box.
        return domain, [2 * math.ceil(math.pi * num / 4) + 4 for num in num_basis]


@lru_cache(maxsize=64)
def _half_interval(num: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights on [0, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(num)
    return torch.from_numpy((nodes + 1) / 2), torch.from_numpy(weights / 2)
