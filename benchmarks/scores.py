"""Predictive distributions of single targets as mixtures of normal distributions, and their scores."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, stdev

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mixture:
    """
    For each of n targets a mixture of S normal distributions of equal weight; S = 1 is a normal distribution.

    :param means: `(S, n)`.
    :param variances: `(S, n)`.
    """

    means: Tensor
    variances: Tensor

    @property
    def mean(self) -> Tensor:
        """Means of the mixtures, `(n,)`."""
        return self.means.mean(0)

    def rescaled(self, center: Tensor, unit: Tensor) -> Mixture:
        """
        The same distributions of (target - center) / unit.

        :param center: What becomes 0.
        :param unit: What becomes 1.
        """
        return Mixture((self.means - center) / unit, self.variances / unit**2)

    def collapsed(self) -> Mixture:
        """The normal distributions of the same means and variances."""
        variances = self.variances.mean(0) + self.means.var(0, correction=0)
        return Mixture(self.mean.unsqueeze(0), variances.unsqueeze(0))

    def log_density(self, y: Tensor) -> Tensor:
        """
        Logarithm of the density.

        :param y: Targets `(n,)`.
        """
        terms = -0.5 * ((2 * math.pi * self.variances).log() + (y - self.means).square() / self.variances)
        return torch.logsumexp(terms, 0) - math.log(len(terms))

    def distribution_function(self, y: Tensor) -> Tensor:
        """
        Probability of a target below y.

        :param y: Targets `(n,)`.
        """
        return torch.special.ndtr((y - self.means) / self.variances.sqrt()).mean(0)

    def scores(self, y: Tensor) -> dict[str, float]:
        """
        Root mean squared error, mean negative log density, share of targets in the central 95 % interval, CRPS.

        :param y: Targets `(n,)`.
        """
        tail = self.distribution_function(y)
        return {
            "rmse": float((self.mean - y).square().mean().sqrt()),
            "nlpd": -float(self.log_density(y).mean()),
            "coverage": float(((tail > 0.025) & (tail < 0.975)).double().mean()),
            "crps": float(self.crps(y).mean()),
        }

    def crps(self, y: Tensor) -> Tensor:
        r"""
        The continuous ranked probability score :math:`E|Y - y| - \frac12 E|Y - Y'|`, in closed form.

        :param y: Targets `(n,)`.

        Reference: Grimit, Gneiting, Berrocal & Johnson (2006), *The continuous ranked probability score for circular
        variables*.
        """
        accuracy = _mean_absolute(y - self.means, self.variances).mean(0)
        spread = torch.zeros_like(accuracy)
        for mean, variance in zip(self.means, self.variances, strict=True):
            spread += _mean_absolute(mean - self.means, variance + self.variances).mean(0) / len(self.means)
        return accuracy - spread / 2


def _mean_absolute(mean: Tensor, variance: Tensor) -> Tensor:
    """The mean of |Z| for a normal Z."""
    sd = variance.sqrt()
    z = mean / sd
    return sd * math.sqrt(2 / math.pi) * (-z.square() / 2).exp() + mean * (2 * torch.special.ndtr(z) - 1)


def mean_and_error(values: list[float]) -> tuple[float, float | None]:
    """
    Mean and its standard error; None for the latter where there is one value.

    :param values: The values.
    """
    return fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
