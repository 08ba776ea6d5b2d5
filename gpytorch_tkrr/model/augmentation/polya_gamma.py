r"""Polya-Gamma variates, one for each row (Polson, Scott & Windle 2013).

.. math:: \omega \sim PG(b, z): \qquad \omega = \frac{1}{2 \pi^2} \sum_{k=1}^\infty
    \frac{g_k}{(k - 1/2)^2 + z^2 / (4 \pi^2)}, \qquad g_k \sim \text{Gamma}(b, 1)

The first four terms are drawn. The rest is a constant plus one more Gamma variate, such that its mean and variance are
exact (those of :math:`\omega`, known in closed form, minus those of the four terms) and its third cumulant is too, to
0.3 %. What is left of an error is in the log of the Laplace transform, for each unit of b: at s = 1 and s = 5 (in units
of 1 over the mean of PG(1, z)) 1e-8 and 1e-5 up to :math:`|z| = 5`, and 2e-6 and 1e-3 at the worst z, 30. This holds
for every b > 0, also for large ones and those that are no integers, at the same cost.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ...data.keyed import uniform

#: Terms of the sum that are drawn one by one; the constants of :func:`_skewness` are those of the rest after four.
NUM_TERMS = 4

#: Smaller z are taken as this one, for the rounding of the variance; the mean changes by a part in ten millions.
MIN_Z = 1e-3

#: Rounds of the rejection sampler of Gamma variates. Each accepts at least 95 % of the rows.
GAMMA_ROUNDS = 12


def polya_gamma(b: Tensor, z: Tensor, first_row: int, key: int) -> Tensor:
    """
    A Polya-Gamma variate for each row of a batch.

    :param b: Shapes `(n,)`, positive.
    :param z: Tilts `(n,)`; their sign does not matter.
    :param first_row: The number of the first row among the rows of all processes; the others follow.
    :param key: A number for this draw of all rows, at most 63 bits.
    :return: `(n,)`, float64, positive.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr.model.augmentation.polya_gamma import moments, polya_gamma
        >>> b, z = torch.full((10000,), 3.5), torch.full((10000,), 1.2)
        >>> draws, (mean, _) = polya_gamma(b, z, 0, key=7), moments(b, z)
        >>> bool((draws.mean() - mean[0]).abs() < 0.01)
        True
    """
    b, z = b.double(), z.double().abs().clamp(min=MIN_Z)
    mean, variance = moments(b, z)
    place = torch.arange(NUM_TERMS, dtype=torch.float64, device=z.device) + 0.5
    sizes = 1 / (2 * math.pi**2 * place.square() + z.square().unsqueeze(-1) / 2)  # (n, NUM_TERMS)
    mean, variance = mean - b * sizes.sum(-1), variance - b * sizes.square().sum(-1)
    # Of the rest: its third cumulant is 2 rho variance^2 / mean. A Gamma variate has rho = 1, the rest has more.
    rho = _skewness(z)
    scale = rho * variance / mean
    shapes = torch.cat([b.unsqueeze(-1).expand_as(sizes), (variance / scale.square()).unsqueeze(-1)], -1)
    drawn = gamma(shapes, first_row, key)
    return (sizes * drawn[:, :-1]).sum(-1) + mean * (1 - 1 / rho) + scale * drawn[:, -1]


def moments(b: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    r"""
    Mean :math:`\frac{b}{2z} \tanh \frac z2` and variance :math:`\frac{b}{4z^3} (\sinh z - z) / \cosh^2 \frac z2`.

    :param b: Shapes.
    :param z: Tilts, not 0.
    :return: Both, of the same shape.
    """
    half = z.double() / 2
    tanh = torch.tanh(half)
    return b * tanh / (4 * half), b * (tanh / half - (1 - tanh) * (1 + tanh)) / (16 * half.square())


def _skewness(z: Tensor) -> Tensor:
    r"""
    :math:`S_1 S_3 / S_2^2` of :math:`S_n = \sum_{k > 4} ((k - 1/2)^2 + c^2)^{-n}`, :math:`c = z / (2 \pi)`, to 0.3 %.

    :param z: Tilts.
    """
    return 1.5 + 0.267 / torch.sqrt(1 + 0.0406 * (z / (2 * math.pi)).square())


def gamma(shape: Tensor, first_row: int, key: int) -> Tensor:
    """
    Gamma variates of rate 1, several for each row of a batch (Marsaglia & Tsang 2000).

    :param shape: Their shapes, `(n, K)`, positive.
    :param first_row: The number of the first row among the rows of all processes; the others follow.
    :param key: A number for this draw of all rows, at most 63 bits.
    :return: `(n, K)`, float64.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr.model.augmentation.polya_gamma import gamma
        >>> draws = gamma(torch.full((5000, 2), 2.5), 0, key=7)
        >>> bool((draws.mean() - 2.5).abs() < 0.1), bool((draws.var() - 2.5).abs() < 0.2)
        (True, True)
    """
    flat = shape.double().reshape(-1)
    states = np.random.SeedSequence(key).generate_state(1 + 2 * GAMMA_ROUNDS, np.uint64)
    boost, *keys = (int(state) >> 2 for state in states)  # unrelated to each other
    index = torch.arange(len(flat), device=flat.device) + first_row * shape.shape[1]
    d = torch.where(flat < 1, flat + 1, flat) - 1 / 3
    draws, left = d.clone(), torch.arange(len(flat), device=flat.device)
    for one, two in zip(keys[::2], keys[1::2], strict=True):
        at, numbers = d[left], index[left]
        normal = torch.special.ndtri(uniform(numbers, one))
        cube = (1 + normal / (3 * at.sqrt())) ** 3
        log_ratio = 0.5 * normal.square() + at * (1 - cube + cube.clamp(min=1e-300).log())
        accepted = (cube > 0) & (uniform(numbers, two).log() < log_ratio)
        draws[left[accepted]] = (at * cube)[accepted]
        left = left[~accepted]
        if not len(left):
            break
    small = flat < 1
    if bool(small.any()):
        draws[small] *= uniform(index[small], boost) ** (1 / flat[small])
    return draws.reshape(shape.shape)
