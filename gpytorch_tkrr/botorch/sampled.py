r"""
The sampled posterior of one outcome of a :class:`~gpytorch_tkrr.botorch.TKRRModel`.

It is the Gaussian with the mean and the covariance of the draws,

.. math:: f(x) = \bar f(x) + r(x)^\top z, \qquad z \sim N(0, I_S), \qquad
    r_s(x) = (f_s(x) - \bar f(x)) / \sqrt{S - 1},

and conditioning on further observations is the exact Gaussian update of z, for fantasies in any number of batches.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from ..errors import NotFittedError
from ..hilbert.weights import WeightPosterior
from ..model.tkrr import TKRR

#: Variance added to every prediction, in units of the outcome's variance: draws span a space of few dimensions.
JITTER = 1e-6


class SampledOutcome(nn.Module):
    """
    One outcome.

    :param model: The CP-weight model, on the scale of the transformed inputs and outcomes.
    """

    def __init__(self, model: TKRR):
        super().__init__()
        self.model = model
        self.update: WeightPosterior | None = None

    @property
    def batch_shape(self) -> torch.Size:
        """Of fantasies; empty for an outcome that has not been conditioned."""
        return torch.Size() if self.update is None else self.update.mean.shape[:-1]

    def functions(self, x: Tensor) -> tuple[Tensor, Tensor]:
        r"""
        :math:`\bar f` and r, before any conditioning.

        :param x: Transformed inputs `(..., n, d)`.
        :return: `(..., n)` and `(..., n, S)`, float64.
        """
        if not self.model.is_fitted:
            raise NotFittedError(
                "The model has not been fitted. Call fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, "
                "model)) first."
            )
        mean, root = self.model.posterior.mean_and_root(self.model.warped(x))
        return self.model.mean_module(x).double() + mean, root

    def predict(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """
        Mean, a root of the covariance, and independent variance beside it.

        :param x: Transformed inputs `(..., n, d)`.
        :return: `(..., n)`, `(..., n, S)` and `(..., n)`, float64.
        """
        mean, root = self.functions(x)
        assert self.model.train_targets is not None
        unit = float(self.model.train_targets.double().var(unbiased=False)) or 1.0
        extra = self._independent_variance(x, root) + JITTER * unit
        if self.update is None:
            return mean, root, extra
        return mean + (root @ self.update.mean.unsqueeze(-1)).squeeze(-1), root @ self.update.root, extra

    def _independent_variance(self, x: Tensor, root: Tensor) -> Tensor:
        """
        What the draws do not know of: the variance that the basis does not represent, and outside the range of the
        training inputs what is lacking to the variance that the prior leaves there (:mod:`..model.extrapolation`).

        :param x: Transformed inputs `(..., n, d)`.
        :param root: That of the draws, `(..., n, S)`.
        :return: `(..., n)`, float64.
        """
        missing = self.model._missing_variance(self.model.warped(x))
        extra = torch.zeros_like(root[..., 0]) if missing is None else missing
        unknown = self.model._unknown_variance(x)
        if unknown is None:
            return extra
        return extra + (unknown - extra - root.square().sum(-1)).clamp_min(0.0)

    def conditioned(self, x: Tensor, y: Tensor, noise: Tensor) -> SampledOutcome:
        """
        The outcome after further observations; hyperparameters stay.

        :param x: Transformed inputs `(*batch, n', d)`.
        :param y: Transformed outcomes `(*fantasies, *batch, n')`.
        :param noise: Their noise variances, which broadcast with the outcomes.
        """
        mean, root = self.functions(x)
        update = self.update
        if update is None:
            eye = torch.eye(root.shape[-1], dtype=root.dtype, device=root.device)
            update = WeightPosterior(torch.zeros_like(eye[0]), eye)
        variance = noise.double().expand(mean.shape) if noise.dim() <= mean.dim() else noise.double()
        variance = variance + self._independent_variance(x, root)
        fantasy = copy.copy(self)
        fantasy.update = update.condition(root, y.double() - mean, variance)
        return fantasy

    def draw_weights(self, sample_shape: torch.Size) -> Tensor:
        r"""
        Draw z of whole functions :math:`\bar f(x) + r(x)^\top z`: one of the model's own draws where there are any,
        a Gaussian draw after conditioning or after alternating least squares.

        :param sample_shape: How many.
        :return: `(*sample_shape, *batch, S)`, float64.
        """
        if self.update is None:
            return self.model.posterior.draw_weights(sample_shape)
        shape = torch.Size([*sample_shape, *self.update.mean.shape[:-1], self.update.root.shape[-1]])
        noise = torch.randn(shape, dtype=torch.float64, device=self.update.root.device)
        return self.update.mean + (self.update.root @ noise.unsqueeze(-1)).squeeze(-1)
