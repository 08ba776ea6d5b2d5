r"""A first look at outcomes with outliers: Gaussian noise with a variance of its own for each row.

With :math:`s_n^2 = s^2 e^{\rho_n}` and the prior :math:`\log p(\rho_n) = -\frac{\nu}{2} (\rho_n + e^{-\rho_n})`, that
of the weights behind Student noise, an outlier is explained by its own :math:`\rho_n`, not by a short lengthscale or
by noise in all rows.
"""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.priors import Prior
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

#: Degrees of freedom of the Student noise that the prior stands for.
DEG_FREE = 4.0

#: Where the noise variance starts, relative to that of the outcomes. From little noise an optimiser shortens
#: lengthscales until they explain the outliers.
START = 0.25


class OutlierLikelihood(GaussianLikelihood):
    """
    Gaussian noise with one variance for all rows times a factor for each.

    :param likelihood: Where the variance, its prior and its bounds come from; it is changed with this object.
    :param num_rows: N.
    :param variance: That of the outcomes.
    """

    def __init__(self, likelihood: GaussianLikelihood, num_rows: int, variance: float):
        super().__init__()
        self.noise_covar = likelihood.noise_covar
        self.noise_covar.initialize(noise=torch.full_like(likelihood.noise, START * (variance or 1.0)))
        self.register_parameter("log_factor", torch.nn.Parameter(torch.zeros(num_rows).to(likelihood.raw_noise)))
        self.register_prior("log_factor_prior", LogFactorPrior(), "log_factor")

    def _shaped_noise_covar(self, base_shape: torch.Size, *params: Any, **kwargs: Any) -> DiagLinearOperator:
        return DiagLinearOperator((self.noise_covar.noise * self.log_factor.exp()).expand(base_shape))


class LogFactorPrior(Prior):
    """The prior of the logarithm of a row's factor, up to a constant."""

    def __init__(self) -> None:
        super().__init__(validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        """
        :param value: Logarithms of factors.
        """
        return -DEG_FREE / 2 * (value + torch.exp(-value))
