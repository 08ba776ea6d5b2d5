r"""When single precision is enough for the sums of a factor.

With prior precisions Q, the conditional of a factor sees the sums over data in

.. math:: P = I + \sum_n z_n z_n^\top, \qquad z_n = \sqrt{w_n}\, Q^{-1/2} p_n \otimes V^{1/2} \phi_n / s .

As :math:`P \ge I`, an error :math:`\Delta P` of these sums changes no posterior variance of the factor, in no
direction, by a larger fraction than :math:`\|\Delta P\|`. The error is measured: C rows from everywhere in a batch are
summed in both precisions, for the blocks :math:`r = s` alone, which are sums of squares and therefore have the largest
errors. By the inequalities of Cauchy and Schwarz, and of the triangle,

.. math:: \|\Delta P\|_2 \le \|\Delta P\|_F \le \frac{2 N}{C} \sum_r \|\Delta P_{rr}\|_F .

The 2 is for rows that are larger than those that were measured. The noise variance is in the denominator of P: with
little noise the sums stay in double precision. The right-hand side is summed in double precision in any case, and it is
that of the residuals; so errors of P do not add up over updates, and the values that a factor converges to do not
depend on them.
"""

from __future__ import annotations

from torch import Tensor

from ..bases.covariance import Covariance
from .moments import MomentTable

#: The largest fraction by which a posterior variance may be wrong.
TOLERANCE = 0.02

#: How much larger the error may be than the one that was measured.
SAFETY = 2.0

#: Rows at which the error is measured.
NUM_PROBES = 1024

#: Batches with fewer rows, or fewer components, gain nothing.
MIN_ROWS, MIN_RANK = 8192, 24


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
        >>> x, p = torch.linspace(-1, 1, 9000).double(), torch.ones(30, 9000, dtype=torch.float64)
        >>> table = MomentTable(SineBasis(0.0, 1.2, 5))
        >>> covariance, prior = Covariance(torch.ones(5).double() / 5), torch.full((30,), 30.0).double()
        >>> noisy, precise = (Resolution(covariance, prior, noise) for noise in (1.0, 1e-6))
        >>> noisy.allows_single(table, x, p, None, 9000), precise.allows_single(table, x, p, None, 9000)
        (True, False)
    """

    def __init__(self, covariance: Covariance, prior: Tensor, noise: float):
        self.covariance, self.prior, self.noise = covariance, prior, noise

    def error(self, table: MomentTable, x: Tensor, p: Tensor, weight: Tensor | None, num_rows: int) -> float:
        r"""
        The bound on :math:`\|\Delta P\|`, if all rows of the fit are like those of a batch.

        :param table: The functions of the mode.
        :param x: The mode's inputs `(n,)`.
        :param p: Products of the other modes' projections `(R, n)`.
        :param weight: Row weights `(n,)`, or None for ones.
        :param num_rows: N, of the whole fit.
        """
        probes = slice(None, None, max(x.shape[0] // NUM_PROBES, 1))
        _, psi = table(x[probes])
        squares = p[:, probes].square()
        if weight is not None:
            squares = squares * weight[probes]
        units = [values.abs().amax(1, keepdim=True).clamp(min=1e-300) for values in (psi, squares)]
        psi, squares = psi / units[0], squares / units[1]
        single = psi.float() @ squares.float().mT  # (K, R)
        errors = (single.double() - psi @ squares.mT) * units[0] * units[1].mT
        norms = (table.gram_weights(self.covariance.variances) @ errors.square()).sqrt() / self.prior  # (R,)
        return float(SAFETY * num_rows / squares.shape[1] * norms.sum() / self.noise)

    def allows_single(self, table: MomentTable, x: Tensor, p: Tensor, weight: Tensor | None, num_rows: int) -> bool:
        """
        Whether the sums over a batch may be made in single precision, and are faster so. Arguments are those of
        :meth:`error`. Functions with correlated weights are summed in double precision.
        """
        is_small = p.shape[1] < MIN_ROWS or p.shape[0] < MIN_RANK
        if is_small or self.covariance.mixing is not None:
            return False
        return self.error(table, x, p, weight, num_rows) <= TOLERANCE
