r"""What ALS adds to the squared error.

Each penalty is a quadratic form in every single factor, so that a factor update is a linear solve and the objective

.. math:: \sum_n (y_n - f(x_n))^2 + \text{penalty}

never rises. A penalty sees whitened weights: those of :math:`z = \sqrt v \phi`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from .format import Weights
from .weights import CPWeights, clamped_exp, log_norm_but


class Penalty(ABC):
    """
    A penalty on the weights that is quadratic in each factor. One of your own is a subclass with three methods, written
    for :class:`CP` weights unless it says otherwise.

    :cvar formats: Kinds of weights that it is for; None for all.

    Example:
        >>> import gpytorch, torch, gpytorch_tkrr as tkrr
        >>> class HalfRidge(tkrr.FrobeniusPenalty):
        ...     def strength_for(self, noise, outputscale, weights):
        ...         return 0.5 * super().strength_for(noise, outputscale, weights)
        >>> x = torch.rand(100, 2)
        >>> likelihood = gpytorch.likelihoods.GaussianLikelihood()
        >>> likelihood.noise = 0.01
        >>> model = tkrr.TKRR(x, x[:, 0] * x[:, 1], likelihood, rank=2)
        >>> result = tkrr.fit_als(model, penalty=HalfRidge(), seed=0)
        >>> result.objective[-1] < result.objective[0]
        True
    """

    formats: ClassVar[tuple[str, ...] | None] = ("cp",)

    @abstractmethod
    def strength_for(self, noise: Tensor, outputscale: Tensor, weights: Any) -> Tensor:
        """
        The multiplier of the quadratic form, a scalar.

        :param noise: Noise variance.
        :param outputscale: The kernel's outermost output scale.
        :param weights: The weights, for their rank and number of modes.
        """

    @abstractmethod
    def form(self, weights: Any, d: int) -> Tensor:
        r"""
        H such that the penalty is strength times :math:`u^\top (H \otimes I) u` plus what does not depend on mode d,
        where u is its factor with the scales of all other modes multiplied in.

        :param weights: The weights.
        :param d: The mode.
        :return: `(R, R)`.
        """

    @abstractmethod
    def value(self, weights: Any) -> Tensor:
        """
        The penalty at strength 1, a scalar.

        :param weights: The weights.
        """


class _WeightPenalty(Penalty):
    def __init__(self, strength: float | None = None):
        if strength is not None and not 0 <= strength < float("inf"):
            raise ValueError(f"strength must be None or a finite number, zero or larger; got {strength}.")
        self.strength = strength

    def __repr__(self) -> str:
        return f"{type(self).__name__}(strength={self.strength})"

    def strength_for(self, noise: Tensor, outputscale: Tensor, weights: Weights) -> Tensor:
        return noise / outputscale if self.strength is None else torch.full_like(noise, self.strength)


class FrobeniusPenalty(_WeightPenalty):
    r"""
    :math:`\lambda \|W\|_F^2`, the ridge penalty on the full weight tensor.

    With :math:`\lambda = \text{noise} / \text{outputscale}` the minimiser over all tensors is the Gaussian process'
    posterior mean.

    :param strength: :math:`\lambda`; None means noise / outputscale.

    Example:
        >>> from gpytorch_tkrr.cp.penalty import FrobeniusPenalty
        >>> FrobeniusPenalty(1e-5)
        FrobeniusPenalty(strength=1e-05)

    Reference: Wesel & Batselier (2021), *Large-scale learning with Fourier features and tensor decompositions*.
    """

    formats = None

    def form(self, weights: Weights, d: int) -> Tensor:
        return weights.frobenius_form(d)

    def value(self, weights: Weights) -> Tensor:
        return weights.squared_norm()


class ColumnPenalty(_WeightPenalty):
    r"""
    :math:`\lambda \sum_r \prod_d \|w_{dr}\|^2`: components are penalised one by one, as if they were orthogonal.

    :param strength: :math:`\lambda`; None means noise / outputscale.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr import ColumnPenalty, FrobeniusPenalty
        >>> from gpytorch_tkrr.cp.weights import CPWeights
        >>> weights = CPWeights([torch.eye(2).double(), torch.ones(2, 2).double()])  # two orthogonal components
        >>> ColumnPenalty().value(weights).item() == FrobeniusPenalty().value(weights).item()
        True
    """

    def form(self, weights: CPWeights, d: int) -> Tensor:
        return clamped_exp(2 * log_norm_but(weights, d)).diag_embed()

    def value(self, weights: CPWeights) -> Tensor:
        return clamped_exp(2 * (log_norm_but(weights, -1) + weights.log_scale())).sum()


class FactorPenalty(Penalty):
    r"""
    An independent Gaussian prior on each factor: noise times :math:`\sum_{dr} \|w_{dr}\|^2 / c` with
    :math:`c = (\text{outputscale} / R)^{1/D}`, under which the prior covariance of f is the kernel.

    Example:
        >>> import gpytorch, torch, gpytorch_tkrr as tkrr
        >>> x = torch.rand(100, 2)
        >>> likelihood = gpytorch.likelihoods.GaussianLikelihood()
        >>> likelihood.noise = 0.01
        >>> model = tkrr.TKRR(x, x[:, 0] * x[:, 1], likelihood, rank=2)
        >>> result = tkrr.fit_als(model, penalty=tkrr.FactorPenalty(), seed=0)
        >>> result.objective[-1] < result.objective[0]
        True
    """

    def __repr__(self) -> str:
        return "FactorPenalty()"

    def strength_for(self, noise: Tensor, outputscale: Tensor, weights: CPWeights) -> Tensor:
        return noise * (weights.rank / outputscale) ** (1 / weights.num_dims)

    def form(self, weights: CPWeights, d: int) -> Tensor:
        return clamped_exp(-2 * weights.log_scale_but(d)).diag_embed()

    def value(self, weights: CPWeights) -> Tensor:
        squares = torch.stack([factor.square().sum(-1) for factor in weights.factors])  # (D, R)
        alive = ~torch.isinf(weights.log_scale())  # a component with a zero column might as well be zero throughout
        return (squares * clamped_exp(2 * weights.log_scales))[:, alive].sum()


#: Penalties by name, to restore them from a `state_dict`.
PENALTIES: dict[str, Callable[..., Penalty]] = {
    penalty.__name__: penalty for penalty in (FrobeniusPenalty, ColumnPenalty, FactorPenalty)
}
