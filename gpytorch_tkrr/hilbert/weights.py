r"""The posterior of the weights of fixed features.

With :math:`y = \Phi a + \epsilon`, :math:`a \sim N(0, V)`, :math:`\epsilon \sim N(0, D)`, data enter by
:math:`P = \Phi^\top D^{-1} \Phi` and :math:`b = \Phi^\top D^{-1} y` only, and :math:`a \mid y \sim N(\mu, R R^\top)`
with

.. math:: \mu = V^{1/2} C^{-1} V^{1/2} b, \qquad R = V^{1/2} L^{-\top}, \qquad C = I + V^{1/2} P V^{1/2} = L L^\top.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..bases.covariance import Covariance
from ..operators.capacitance import capacitance_factor, root


class WeightPosterior(NamedTuple):
    """
    A Gaussian over the weights of the features.

    :param mean: `(..., M)`, float64.
    :param root: R with covariance `R R^T`, `(..., M, M)`, float64.
    """

    mean: Tensor
    root: Tensor

    def condition(self, features: Tensor, residual: Tensor, noise: Tensor) -> WeightPosterior:
        r"""
        The posterior after m more observations, :math:`O(M^2 m)`.

        With :math:`B = R^\top \Phi^\top` and :math:`B^\top B + D = C C^\top` the new root is
        :math:`R (I - B C^{-\top} (C + D^{1/2})^{-1} B^\top)` (the square-root filter update of Andrews, 1968).

        :param features: Features of the new inputs, `(..., m, M)`.
        :param residual: New targets minus prior mean, `(..., m)`.
        :param noise: Their noise variances, `(..., m)`.
        """
        projected = features @ self.root  # B^T, (..., m, M)
        gram = projected @ projected.mT + torch.diag_embed(noise)
        factor = torch.linalg.cholesky(gram)  # C
        surprise = (residual - (features @ self.mean.unsqueeze(-1)).squeeze(-1)).unsqueeze(-1)
        step = projected.mT @ torch.cholesky_solve(surprise, factor)
        mean = self.mean + (self.root @ step).squeeze(-1)
        update = torch.linalg.solve_triangular(factor + torch.diag_embed(noise.sqrt()), projected, upper=False)
        update = torch.linalg.solve_triangular(factor.mT, update, upper=True)
        return WeightPosterior(mean, self.root - (self.root @ projected.mT) @ update)


def weight_posterior(prior: Covariance, precision: Tensor, target: Tensor) -> WeightPosterior:
    """
    The posterior of the weights.

    :param prior: V.
    :param precision: P, `(..., M, M)`, float64.
    :param target: b, `(..., M)`, float64.
    """
    return whitened_posterior(prior, capacitance_factor(prior, precision), _whiten(prior, target))


def whitened_posterior(prior: Covariance, factor: Tensor, target: Tensor) -> WeightPosterior:
    r"""
    The posterior of the weights from sums over data that the root of V has multiplied already.

    :param prior: V.
    :param factor: L, `(..., M, M)`, float64.
    :param target: :math:`V^{1/2} b`, `(..., M)`, float64.
    """
    scale = root(prior.variances)
    identity = torch.eye(scale.shape[-1], dtype=scale.dtype, device=scale.device)
    inverse = torch.linalg.solve_triangular(factor, identity.expand_as(factor), upper=False)
    half = scale.unsqueeze(-1) * inverse.mT
    return WeightPosterior(_mean(prior, factor, target), half if prior.mixing is None else prior.mixing @ half)


def weight_mean(prior: Covariance, precision: Tensor, target: Tensor) -> Tensor:
    """
    The mean of :func:`weight_posterior` alone.

    :param prior: V.
    :param precision: P, `(..., M, M)`, float64.
    :param target: b, `(..., M)`, float64.
    :return: `(..., M)`.
    """
    return _mean(prior, capacitance_factor(prior, precision), _whiten(prior, target))


def _whiten(prior: Covariance, target: Tensor) -> Tensor:
    """The root of V times b."""
    return root(prior.variances) * prior.mix(target.unsqueeze(-2)).squeeze(-2)


def _mean(prior: Covariance, factor: Tensor, target: Tensor) -> Tensor:
    solved = root(prior.variances) * torch.cholesky_solve(target.unsqueeze(-1), factor).squeeze(-1)
    return prior.unmix(solved.unsqueeze(-2)).squeeze(-2)
