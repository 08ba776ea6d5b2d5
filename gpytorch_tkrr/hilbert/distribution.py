"""Multivariate normals that keep their low-rank likelihoods."""

from __future__ import annotations

import gpytorch
from torch import Tensor


class ReducedRankNormal(gpytorch.distributions.MultivariateNormal):
    """
    A :class:`~gpytorch.distributions.MultivariateNormal` whose log density always uses the structure of its covariance.

    ``import botorch`` switches structured likelihoods off for the whole process; a model that returns this class from
    its `forward` is not affected. Otherwise it is the same distribution.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr import ReducedRankNormal
        >>> ReducedRankNormal(torch.zeros(2), torch.eye(2)).log_prob(torch.zeros(2))
        tensor(-1.8379)
    """

    def log_prob(self, value: Tensor) -> Tensor:
        with gpytorch.settings.fast_computations.log_prob(True):
            return super().log_prob(value)


class ReducedRankMultitaskNormal(gpytorch.distributions.MultitaskMultivariateNormal):
    """
    A :class:`~gpytorch.distributions.MultitaskMultivariateNormal` whose log density always uses the structure of its
    covariance, as :class:`ReducedRankNormal` does for one task.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr import ReducedRankMultitaskNormal
        >>> ReducedRankMultitaskNormal(torch.zeros(1, 2), torch.eye(2)).log_prob(torch.zeros(1, 2))
        tensor(-1.8379)
    """

    def log_prob(self, value: Tensor) -> Tensor:
        with gpytorch.settings.fast_computations.log_prob(True):
            return super().log_prob(value)
