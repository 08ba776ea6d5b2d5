r"""The prior of CP components."""

from __future__ import annotations

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
