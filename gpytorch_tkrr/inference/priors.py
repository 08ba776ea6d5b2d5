r"""Priors of CP components.

Both have the covariance of the kernel, :math:`\sigma^2 \prod_d k_d`; they differ in how a sum of R products departs
from a Gaussian process.

:class:`SoftRankPrior` is that of :mod:`.sampler`: every weight is normal, and a precision for each component can switch
it off. :class:`SparsePrior` is that of :mod:`.few_rows`: most components depend on few inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .hyperparameters import TOTAL_SPREAD

#: Smallest shape of the Gamma prior of the components' precisions.
TAU_SHAPE = 2.0


class SoftRankPrior:
    r"""
    Normal weights whose components can be switched off,

    .. math:: a_{dr} \sim N(0, \sigma^{2/D} V_d / \tau_r), \qquad \tau_r \sim \text{Gamma}(a_0, a_0 R^{-1/D}) .

    A component as a whole has the prior variance :math:`\tau_r^{-D}`: in many dimensions the shape :math:`a_0` grows,
    so that the standard deviation of :math:`D \log \tau_r` stays below 4.

    :param num_dims: D.
    :param rank: R.

    :ivar shape: :math:`a_0`.
    :ivar rate: :math:`a_0 R^{-1/D}`.
    """

    def __init__(self, num_dims: int, rank: int):
        self.shape = max(TAU_SHAPE, (num_dims / TOTAL_SPREAD) ** 2)
        self.rate = self.shape * rank ** (-1 / num_dims)


class SparsePrior:
    r"""
    Components that use few inputs,

    .. math:: f(x) = \sum_{r=1}^R a_r \prod_d g_{dr}(x_d), \qquad a_r \sim N(0, \sigma^2 / R),

    where each factor is, with probability :math:`1 - q_d`, the first function of its mode (nearly or exactly a
    constant), :math:`g = \sqrt{v_{d1} / (1 - q_d)}\, \phi_{d1}`, and otherwise made of all others,
    :math:`g = \sum_{j > 1} w_j \phi_{dj}` with :math:`w_j \sim N(0, v_{dj} / q_d)`. Its covariance is that of the
    kernel exactly, for any q. Were every weight normal, a component would be a product of D normal variables, whose
    kurtosis is :math:`3^D`; here it is about :math:`\prod_d (1 + 2 q_d)`, with :math:`q_d` the share of the variance
    that the first function lacks.

    :param variances: Prior variances of the functions, D tensors `(M_d,)`.
    :param shares: :math:`q_d`, at least 0 and below 1: how probable it is that a component uses the functions beyond
        the first.
    :param outputscale: :math:`\sigma^2`.
    :param rank: R.

    :ivar scale: Standard deviation of an amplitude.
    :ivar first: Weights of a factor that is the first function, D tensors `(M_d,)`.
    :ivar others: Variances of the weights of one that is not, D tensors `(M_d,)`.
    """

    def __init__(self, variances: Sequence[Tensor], shares: Sequence[float], outputscale: float, rank: int):
        self.rank = rank
        self.shares = [q if len(v) > 1 else 0.0 for q, v in zip(shares, variances, strict=True)]
        self.scale = math.sqrt(outputscale / rank)
        self.first: list[Tensor] = []
        self.others: list[Tensor] = []
        for q, v in zip(self.shares, variances, strict=True):
            first, others = torch.zeros_like(v), v / q if q > 0 else torch.zeros_like(v)
            first[0], others[0] = (v[0] / (1 - q)).sqrt(), 0.0
            self.first.append(first)
            self.others.append(others)
