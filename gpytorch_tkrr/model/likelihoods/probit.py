r"""Latent targets of a probit model, for exact Gibbs sampling (Albert & Chib 1993).

A label :math:`y = \pm 1` is the sign of :math:`z = f(x) + \epsilon` with standard normal noise. Given f, each z is a
truncated normal number; given all z, the model is a regression with noise variance 1.

After ALS the model is another one, that of the sign: the classes were regressed on as -1 and +1, and y is the sign of
:math:`f(x) + \epsilon` with the variance of the residuals. Both are :math:`P(y = 1) = \Phi(f / s)`, with s = 1 for the
probit model.
"""

from __future__ import annotations

import math

import numpy as np
import scipy.special
import torch
from gpytorch.likelihoods import BernoulliLikelihood
from torch import Tensor

from ...data.keyed import row_uniform
from ...data.source import Batch, Working
from ...data.training import Summary
from ...errors import InputError
from .augmented import Augmentation, Parameters
from .base import Observation, Rows, per_row
from .registry import register


@register(BernoulliLikelihood)
class ProbitObservation(Observation):
    """
    Two classes. Targets are {0, 1} or {-1, +1}; predictions speak of 0 and 1, and their mean is the probability of 1.

    :param likelihood: A BernoulliLikelihood.
    """

    num_classes = 2
    is_discrete = True
    has_link = True

    def encode(self, y: Tensor) -> Tensor:
        return as_signs(y)

    def decode(self, y: Tensor) -> Tensor:
        return (y > 0).double()

    def start_mean(self, summary: Summary) -> float:
        share = min(max((summary.mean + 1) / 2, 0.01), 0.99)  # of the class +1, kept away from 0 and 1
        return float(scipy.special.ndtri(share))

    def augmentation(self, scale: float, offset: float) -> Augmentation:
        return ProbitAugmentation(offset)

    def _score(self, f: Tensor, parameters: Parameters, rows: Rows) -> Tensor:
        """z with P(y = 1) = Phi(z)."""
        noise = per_row(parameters["noise"])
        return f / (noise + rows["spread"] if "spread" in rows else noise).sqrt()

    def log_density(self, y: Tensor, f: Tensor, parameters: Parameters, rows: Rows) -> Tensor:
        return torch.special.log_ndtr(as_signs(y) * self._score(f, parameters, rows))

    def mean(self, f: Tensor, parameters: Parameters, rows: Rows) -> Tensor:
        return _ndtr(self._score(f, parameters, rows))

    def variance(self, f: Tensor, parameters: Parameters, rows: Rows) -> Tensor:
        score = self._score(f, parameters, rows)
        return _ndtr(score) * _ndtr(-score)

    def cdf(self, y: Tensor, f: Tensor, parameters: Parameters, rows: Rows) -> Tensor:
        zero = _ndtr(-self._score(f, parameters, rows))
        return torch.where(y < 0, torch.zeros_like(zero), torch.where(y < 1, zero, torch.ones_like(zero)))

    def sample(self, f: Tensor, parameters: Parameters, rows: Rows, generator: torch.Generator) -> Tensor:
        return torch.bernoulli(self.mean(f, parameters, rows), generator=generator)


class ProbitAugmentation(Augmentation):
    """
    Latent targets, drawn anew at each visit.

    :param offset: The mean of f.
    """

    def __init__(self, offset: float):
        self.offset = offset

    def start(self) -> Parameters:
        return {"noise": torch.ones((), dtype=torch.float64)}

    def working(self, parameters: Parameters, rng: np.random.Generator) -> Working:
        key = int(rng.integers(2**62))

        def latent(batch: Batch, f: Tensor, first_row: int) -> tuple[Tensor, None]:
            return truncated_noise(batch.y, self.offset + f, first_row, key), None

        return latent


def _ndtr(z: Tensor) -> Tensor:
    return torch.special.erfc(-z / math.sqrt(2)) / 2  # torch's ndtr cancels in the tail


def truncated_noise(labels: Tensor, mean: Tensor, first_row: int, key: int) -> Tensor:
    r"""
    A draw of :math:`z - f(x)` for each row, given its label.

    :param labels: :math:`\pm 1`, `(n,)`.
    :param mean: :math:`f(x)`, `(n,)`.
    :param first_row: The number of the first row among all rows; the others follow.
    :param key: A number for this draw of all rows, at most 63 bits.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr.model.likelihoods.probit import truncated_noise
        >>> labels, mean = torch.tensor([1.0, -1.0, 1.0]), torch.tensor([0.0, 3.0, -8.0])
        >>> (torch.sign(mean + truncated_noise(labels, mean, 0, key=7)) == labels).all().item()
        True
    """
    u = row_uniform(labels.shape[0], first_row, key, labels.device)
    # label * noise is standard normal above -label * mean: its tail probability is uniform below that of the bound.
    above = _ndtr(labels * mean.double())
    tail = (u * above).clamp(min=torch.finfo(torch.float64).tiny)
    return labels * torch.maximum(-torch.special.ndtri(tail), -labels * mean)


def as_signs(y: Tensor) -> Tensor:
    """
    Class labels {0, 1} or {-1, +1} as numbers -1 and +1.

    :param y: Labels `(N,)`.
    """
    y = y.double()
    if ((y == 0) | (y == 1)).all():
        return 2 * y - 1
    if ((y == -1) | (y == 1)).all():
        return y
    values = y.unique()[:5].tolist()
    raise InputError(f"With a BernoulliLikelihood targets must be 0 and 1, or -1 and +1; got {values}.")
