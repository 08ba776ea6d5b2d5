r"""Cosines and sines at the nodes of Gauss-Hermite quadrature."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from scipy.special import roots_hermite
from torch import Tensor

from ..bases.domain import Domain
from ..bases.waves import FrequencyBasis
from ..features.stationary import SpectralFamily

#: The outer nodes are far apart: of as many functions as sines, these frequencies are not resolved.
HEADROOM = 1.25


class GaussHermite(SpectralFamily):
    r"""
    The spectral integral by Gauss-Hermite quadrature (quadrature Fourier features): with :math:`z_i` the positive ones
    of 2 n nodes and :math:`q_i` their weights,

    .. math:: k(t) = \frac1{2 \pi} \int S(\omega) \cos(\omega t) d\omega
        \approx \frac{s}{\pi} \sum_{i=1}^n q_i e^{z_i^2} S(s z_i) \cos(s z_i t), \qquad s = \frac{\sqrt{2 M}}{L},

    with a cosine and a sine for each node, n = M / 2. The nodes depend on the box and on the number of functions alone:
    they follow the lengthscale as the box does. In a box with :math:`L = \ell \sqrt M` they are those of Mutný & Krause
    for an RBF kernel of the lengthscale :math:`\ell`. For kernels of several inputs the nodes are a grid.

    Example:
        >>> import gpytorch, torch, gpytorch_tkrr as tkrr
        >>> base = gpytorch.kernels.RBFKernel()
        >>> kernel = tkrr.HilbertKernel(base, tkrr.Domain(0.0, 4.0), 24, basis=tkrr.GaussHermite())
        >>> kernel.approximation_error(torch.linspace(-1, 1, 50)) < 1e-6
        True

    References: Dao, De Sa & Ré (2017), *Gaussian quadrature for kernel features*; Mutný & Krause (2018), *Efficient
    high dimensional Bayesian optimization with additivity and quadrature Fourier features*.
    """

    is_paired = True

    def functions(self, center: Tensor, half_width: Tensor, num_basis: int) -> FrequencyBasis:
        nodes, weights = (part.to(half_width) for part in _positive_half(max(num_basis // 2, 1)))
        scale = 2 * math.sqrt(len(nodes)) / half_width
        return FrequencyBasis(center, half_width, scale * nodes, scale * weights / math.pi)

    def as_accurate(self, domain: Domain, num_basis: Sequence[int], half_range: Tensor) -> tuple[Domain, list[int]]:
        return domain, [2 * math.ceil(HEADROOM * num / 2) for num in num_basis]


@lru_cache(maxsize=64)
def _positive_half(num: int) -> tuple[Tensor, Tensor]:
    r"""The positive ones of 2 `num` nodes, and their weights times :math:`e^{z^2}`, without overflow."""
    order = 2 * num
    nodes = roots_hermite(order)[0][num:]
    # The weight is 1 / (order h(z)^2) with h the orthonormal polynomial of one degree less, kept with a scale apart.
    before, last, log_scale = np.zeros_like(nodes), np.full_like(nodes, math.pi**-0.25), np.zeros_like(nodes)
    for k in range(order - 1):
        before, last = last, nodes * math.sqrt(2 / (k + 1)) * last - math.sqrt(k / (k + 1)) * before
        size = np.maximum(np.abs(last), np.abs(before))
        before, last, log_scale = before / size, last / size, log_scale + np.log(size)
    log_weight = -math.log(order) - 2 * (np.log(np.abs(last)) + log_scale) + nodes**2
    return torch.from_numpy(nodes), torch.from_numpy(np.exp(log_weight))
