r"""Sums of products in single precision, where the noise hides what is lost.

With prior precisions Q, the conditional of a factor sees the sums over data in

.. math:: P = I + \sum_n z_n z_n^\top, \qquad
    z_n = \sqrt{w_n}\, Q^{-1/2} p_n \otimes V^{1/2} \phi_n / s, \qquad \rho_n = \|z_n\|^2 :

:math:`\rho_n` is the prior variance of f at row n given the other factors, over its noise variance. Sums of C rows in
single precision, added up in double precision, are wrong by independent errors of about
:math:`u \sqrt C \sum_{n \in \text{chunk}} |z_n| |z_n|^\top` with :math:`u = 2^{-24}` (Higham & Mary 2019), so

.. math:: \|\Delta P\|_2 \le 2\, u\, C \Big( \sum_n \rho_n^2 \Big)^{1/2} .

As :math:`P \ge I`, no posterior variance of the factor, in any direction, is wrong by a larger fraction than that. The 2 is
for products of functions that are differences of moment functions. The right-hand side is summed in double precision, so
the error does not add up over updates: what a factor converges to does not depend on P.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..bases.covariance import Covariance
from .moments import MomentTable

#: Rows that are summed in single precision before they are added to a sum in double precision, C.
CHUNK_ROWS = 1024

#: The largest bound on the relative error of a posterior variance with which single precision is used.
TOLERANCE = 0.05

#: Batches with fewer rows, or fewer products for each of them, gain nothing worth an error.
MIN_ROWS, MIN_PRODUCTS = 4 * CHUNK_ROWS, 100

#: Rows at which the prior variance of a mode is looked at.
NUM_PROBES = 256


class Resolution:
    r"""
    How precisely the sums of one factor have to be known.

    :param covariance: V, of M weights.
    :param prior: Prior precisions of the whitened weights of each component, `(R,)`.
    :param noise: :math:`s^2`.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr.bases.basis import SineBasis
        >>> from gpytorch_tkrr.bases.covariance import Covariance
        >>> from gpytorch_tkrr.cp.moments import MomentTable
        >>> from gpytorch_tkrr.cp.rounding import Resolution
        >>> table, x = MomentTable(SineBasis(0.0, 1.2, 5)), torch.linspace(-1, 1, 5000).double()
        >>> p = torch.ones(20, 5000, dtype=torch.float64)
        >>> covariance, prior = Covariance(torch.ones(5).double() / 5), torch.full((20,), 20.0).double()
        >>> noisy, precise = (Resolution(covariance, prior, noise) for noise in (1.0, 1e-3))
        >>> noisy.allows_single(table, x, p, None, 5000), precise.allows_single(table, x, p, None, 5000)
        (True, False)
    """

    def __init__(self, covariance: Covariance, prior: Tensor, noise: float):
        self.covariance, self.prior, self.noise = covariance, prior, noise

    def error(self, table: MomentTable, x: Tensor, p: Tensor, weight: Tensor | None, num_rows: int) -> float:
        r"""
        The bound on :math:`\|\Delta P\|_2`, if all rows of the fit were like those of a batch.

        :param table: The functions of the mode.
        :param x: The mode's inputs `(n,)`.
        :param p: Products of the other modes' projections `(R, n)`.
        :param weight: Row weights `(n,)`, or None for ones.
        :param num_rows: N, of the whole fit.
        """
        probes = x[:: max(x.shape[0] // NUM_PROBES, 1)]
        features = self.covariance.mix(table.features(probes).mT) * self.covariance.root  # (probes, M)
        variance = features.square().sum(-1).amax() / self.noise
        ratios = self.prior.reciprocal() @ p.square()  # (n,)
        if weight is not None:
            ratios = ratios * weight
        return float(2 * 2**-24 * CHUNK_ROWS * variance * (num_rows * ratios.square().mean()).sqrt())

    def allows_single(self, table: MomentTable, x: Tensor, p: Tensor, weight: Tensor | None, num_rows: int) -> bool:
        """
        Whether the sums over a batch may be made in single precision, and are worth it. Arguments are those of
        :meth:`error`.
        """
        rank, size = p.shape
        is_small = size < MIN_ROWS or rank * (rank + 1) // 2 < MIN_PRODUCTS
        if is_small or torch.get_float32_matmul_precision() != "highest":
            return False
        return self.error(table, x, p, weight, num_rows) <= TOLERANCE
