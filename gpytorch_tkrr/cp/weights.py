r"""Weights in canonical polyadic (CP) form: pure algebra that knows neither data nor kernels.

A rank-R weight tensor is :math:`W = \sum_r s_r \, w_{1r} \otimes \cdots \otimes w_{Dr}`. The columns are kept at a norm
of the caller's choice and their scales apart, as logarithms: products over 100 modes neither overflow nor vanish.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .format import Norms, Turn, WeightFormat, Weights

#: Exponents are clamped to this: exp of twice it is still a finite float64.
MAX_EXPONENT = 340.0


class CPWeights(Weights):
    r"""
    D factors with the scales of their columns apart: :math:`w_{dr} = e^{\ell_{dr}} \hat w_{dr}`.

    Norms and correlations of each factor's columns are kept with it, so that products over all modes are cheap. Change
    a factor by the methods only.

    :param factors: D tensors :math:`\hat w_d` of shape `(R, M_d)`, float64.
    :param log_scales: :math:`\ell`, `(D, R)`, by default zeros; minus infinity for a column that is zero.
    """

    def __init__(self, factors: Sequence[Tensor], log_scales: Tensor | None = None):
        self.factors = [factor.detach().double() for factor in factors]
        first = self.factors[0]
        self.log_scales = first.new_zeros(len(factors), first.shape[0]) if log_scales is None else log_scales
        parts = [_norms_and_correlations(factor) for factor in self.factors]
        self.norms = torch.stack([norms for norms, _ in parts])  # (D, R)
        self.correlations = torch.stack([correlations for _, correlations in parts])  # (D, R, R)

    def set_factor(self, d: int, factor: Tensor) -> None:
        r"""
        Set :math:`\hat w_d`, leaving the scales alone.

        :param d: The mode.
        :param factor: `(R, M_d)`.
        """
        self.factors[d] = factor
        self.norms[d], self.correlations[d] = _norms_and_correlations(factor)

    @property
    def rank(self) -> int:
        """R, the number of components."""
        return self.factors[0].shape[0]

    def scales(self) -> Tensor:
        """The scale of each component over all modes, `(R,)`."""
        return clamped_exp(self.log_scale())

    def log_scale(self) -> Tensor:
        """Logarithm of each component's scale over all modes, `(R,)`."""
        return self.log_scales.sum(0)

    def log_scale_but(self, d: int) -> Tensor:
        """
        Logarithm of each component's scale over all modes but one, `(R,)`.

        :param d: The mode left out.
        """
        rest = torch.cat([self.log_scales[:d], self.log_scales[d + 1 :]])
        return rest.sum(0)

    def rescale(self, d: int, norms: Tensor) -> None:
        """
        Divide the columns of a factor by given norms and move these to the scales. Zero norms leave a column alone.

        :param d: The mode.
        :param norms: `(R,)`.
        """
        positive = norms > 0
        norms = torch.where(positive, norms, torch.ones_like(norms))
        self.set_factor(d, self.factors[d] / norms.unsqueeze(-1))
        self.log_scales[d] = self.log_scales[d] + norms.log()

    def replace(self, d: int, factor: Tensor, norms: Tensor) -> None:
        r"""
        Set one mode to `factor`, given with the scales of all other modes multiplied in.

        A zero column keeps its old direction at scale zero, so that later updates of other modes can revive it.

        :param d: The mode.
        :param factor: :math:`e^{\sum_{k \ne d} \ell_{kr}} w_{dr}`, `(R, M_d)`.
        :param norms: Norms of its columns, `(R,)`: the new factor has unit columns in this norm.
        """
        alive = norms > 0
        safe = torch.where(alive, norms, torch.ones_like(norms))
        self.set_factor(d, torch.where(alive.unsqueeze(-1), factor / safe.unsqueeze(-1), self.factors[d]))
        rest = self.log_scale_but(d)
        dead = ~alive | torch.isinf(rest)  # where the rest is zero its scale is free: start it again at one
        self.log_scales[:, dead] = 0.0
        self.log_scales[d] = torch.where(alive, safe.log() - self.log_scale_but(d), -torch.inf)

    def move_to(self, d: int) -> tuple[list[int], list[Turn]]:
        """
        Any factor may be updated at any time.

        :param d: The mode.
        """
        return [], []

    def vanish(self, d: int) -> None:
        self.log_scales[d] = -torch.inf

    def multiply(self, number: float) -> None:
        self.log_scales += math.log(number) / self.num_dims

    def normalise(self, norms: Norms) -> None:
        for d, factor in enumerate(self.factors):
            self.rescale(d, norms(d, factor))

    def balance(self) -> None:
        """Components are kept as they are."""

    def scaled_factor(self, d: int) -> Tensor:
        """
        One factor with the scales of all modes multiplied in, `(R, M_d)`.

        :param d: The mode.
        """
        return self.scales().unsqueeze(-1) * self.factors[d]

    def balanced(self) -> list[Tensor]:
        """Plain factors `(R, M_d)`, every component spread evenly over the modes."""
        alive = self.norms > 0
        safe = torch.where(alive, self.norms, torch.ones_like(self.norms))
        share = (self.log_scale() + safe.log().sum(0)) / self.num_dims  # (R,)
        size = torch.where(alive.all(0), clamped_exp(share), torch.zeros_like(share))
        return [factor * (size / norms).unsqueeze(-1) for factor, norms in zip(self.factors, safe, strict=True)]

    def clone(self) -> CPWeights:
        """An independent copy; factors are shared, as they are never changed in place."""
        copy = CPWeights.__new__(CPWeights)
        copy.factors, copy.log_scales = list(self.factors), self.log_scales.clone()
        copy.norms, copy.correlations = self.norms.clone(), self.correlations.clone()
        return copy

    def to(self, device: torch.device) -> CPWeights:
        """
        The same weights on another device.

        :param device: The device.
        """
        return CPWeights([factor.to(device) for factor in self.factors], self.log_scales.to(device))

    def frobenius_form(self, d: int) -> Tensor:
        correlation, log_norm = gram_but(self, d)
        size = clamped_exp(log_norm)
        return correlation * size.unsqueeze(-1) * size

    def squared_norm(self) -> Tensor:
        correlation, log_norm = gram_but(self, -1)
        size = clamped_exp(log_norm + self.log_scale())
        return size @ correlation @ size

    def state(self) -> dict[str, Any]:
        return {"factors": list(self.factors), "log_scales": self.log_scales}


class CP(WeightFormat):
    r"""
    Weights in canonical polyadic form, a sum of R products, the default of :class:`~gpytorch_tkrr.TKRR`:

    .. math:: f(x) = \sum_{r=1}^R \prod_{d=1}^D z_d(x_d)^\top w_{dr} .

    Its number of weights is :math:`R \sum_d M_d`. The order of the inputs does not matter.

    :param rank: R, the number of components.

    Example:
        >>> import gpytorch, torch, gpytorch_tkrr as tkrr
        >>> x = torch.rand(100, 2)
        >>> likelihood = gpytorch.likelihoods.GaussianLikelihood()
        >>> model = tkrr.TKRR(x, x[:, 0] * x[:, 1], likelihood, weights=tkrr.CP(3), num_basis=5)
        >>> model.rank
        3
    """

    kind = "cp"

    def heights(self, sizes: Sequence[int]) -> list[int]:
        assert self.rank is not None
        return [self.rank] * len(sizes)

    def bonds(self, heights: Sequence[int]) -> list[int]:
        return list(heights[1:])

    def rank_of(self, heights: Sequence[int]) -> int:
        return heights[0]

    def union(self, heights: Sequence[Sequence[int]]) -> list[int]:
        return [max(each) for each in zip(*heights, strict=True)]

    def resized(self, factors: Sequence[Tensor], heights: Sequence[int]) -> list[Tensor]:
        pairs = zip(factors, heights, strict=True)
        return [torch.nn.functional.pad(factor, (0, 0, 0, height - factor.shape[-2])) for factor, height in pairs]

    def advance(self, left: Tensor | None, projection: Tensor) -> Tensor:
        return projection if left is None else _times(projection, left)

    def retreat(self, projection: Tensor, right: Tensor | None) -> Tensor:
        return projection if right is None else _times(projection, right)

    def join(self, left: Tensor | None, right: Tensor | None) -> Tensor:
        if left is not None and right is not None:
            return left * right
        product = left if right is None else right
        assert product is not None
        return product

    def pairs(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        return [matrix.flatten(0, 1) for matrix in matrices]

    def weights(self, factors: Sequence[Tensor]) -> CPWeights:
        return CPWeights(factors)

    def restore(self, state: dict[str, Any]) -> CPWeights:
        return CPWeights(list(state["factors"]), state["log_scales"])

    def num_components(self, num_dims: int) -> int:
        assert self.rank is not None
        return self.rank

    def from_components(self, factors: Sequence[Tensor]) -> list[Tensor]:
        return list(factors)

    def shapes(self, sizes: Sequence[int]) -> list[tuple[int, ...]]:
        assert self.rank is not None
        return [(size, self.rank) for size in sizes]

    def shown(self, factors: Sequence[Tensor]) -> list[Tensor]:
        return [factor.mT for factor in factors]

    def read(self, factors: Sequence[Tensor]) -> list[Tensor]:
        return [factor.mT for factor in factors]


def _times(projection: Tensor, other: Tensor) -> Tensor:
    """In the memory of the first, where no gradient is asked for."""
    return projection * other if projection.requires_grad else projection.mul_(other)


def _norms_and_correlations(factor: Tensor) -> tuple[Tensor, Tensor]:
    norms = factor.norm(dim=-1)
    unit = factor / torch.where(norms > 0, norms, torch.ones_like(norms)).unsqueeze(-1)
    return norms, unit @ unit.mT


def clamped_exp(exponent: Tensor) -> Tensor:
    """
    The exponential, kept finite: minus infinity gives zero, large exponents a large number.

    :param exponent: Any shape.
    """
    return exponent.clamp(max=MAX_EXPONENT).exp()


def gram_but(weights: CPWeights, d: int) -> tuple[Tensor, Tensor]:
    r"""
    :math:`\prod_{k \ne d} \hat w_{kr}^\top \hat w_{ks}` as a correlation matrix and logarithmic norms.

    :param weights: The weights.
    :param d: The mode left out; a number outside of `0 ... D - 1` leaves out none.
    :return: Correlations `(R, R)` with unit diagonal and :math:`\sum_{k \ne d} \log \|\hat w_{kr}\|`, `(R,)`.
    """
    rest = torch.cat([weights.correlations[: max(d, 0)], weights.correlations[d + 1 :]])
    return rest.prod(0), log_norm_but(weights, d)


def log_norm_but(weights: CPWeights, d: int) -> Tensor:
    r"""
    :math:`\sum_{k \ne d} \log \|\hat w_{kr}\|`, `(R,)`.

    :param weights: The weights.
    :param d: The mode left out; a number outside of `0 ... D - 1` leaves out none.
    """
    log_norms = weights.norms.log()
    return torch.cat([log_norms[: max(d, 0)], log_norms[d + 1 :]]).sum(0)
