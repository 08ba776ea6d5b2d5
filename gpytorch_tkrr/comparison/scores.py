r"""
Scores of predictive distributions.

Regression: a normal distribution :math:`N(\mu, \sigma^2)` for each target. Classification: the
probability of class 1, or of each of several classes.

Reference: Gneiting & Raftery (2007), *Strictly proper scoring rules, prediction, and estimation*.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .distribution import level_coverage

#: Central intervals whose coverage makes up the calibration curve.
LEVELS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)

#: Bins of the reliability curve of a classifier.
NUM_BINS = 10


def regression_scores(y: Tensor, mean: Tensor, sd: Tensor | None) -> dict[str, float]:
    """
    RMSE; with standard deviations also NLPD, coverage of the central 95 % interval, and CRPS.

    :param y: Targets `(n,)`.
    :param mean: Predictive means `(n,)`.
    :param sd: Predictive standard deviations `(n,)`, or None for a model that has none.

    Example:
        >>> import torch
        >>> scores = regression_scores(torch.zeros(3), torch.zeros(3), torch.ones(3))
        >>> {name: round(value, 4) for name, value in scores.items()}
        {'rmse': 0.0, 'nlpd': 0.9189, 'coverage': 1.0, 'crps': 0.2337}
    """
    scores = {"rmse": float((y - mean).square().mean().sqrt())}
    if sd is not None:
        scores["nlpd"] = float(-torch.distributions.Normal(mean, sd).log_prob(y).mean())
        scores["coverage"] = level_coverage(normal_levels(y, mean, sd)["level"], 0.95)
        scores["crps"] = float(normal_crps(y, mean, sd).mean())
    return scores


def normal_levels(y: Tensor, mean: Tensor, sd: Tensor) -> dict[str, Tensor]:
    """
    Of each target the probability `level` of a smaller one, and the ends `lower` and `upper` of the central 95 %
    interval, `(n,)` each.

    :param y: Targets `(n,)`.
    :param mean: Predictive means `(n,)`.
    :param sd: Predictive standard deviations `(n,)`.
    """
    normal = torch.distributions.Normal(mean, sd)
    half_width = (normal.icdf(torch.tensor(0.975, dtype=mean.dtype)) - mean).abs()
    return {"level": normal.cdf(y), "lower": mean - half_width, "upper": mean + half_width}


def normal_crps(y: Tensor, mean: Tensor, sd: Tensor) -> Tensor:
    r"""
    The continuous ranked probability score of a normal distribution,

    .. math:: \sigma \left( z (2 \Phi(z) - 1) + 2 \varphi(z) - \pi^{-1/2} \right), \qquad z = (y - \mu) / \sigma.

    :param y: Targets `(n,)`.
    :param mean: Predictive means `(n,)`.
    :param sd: Predictive standard deviations `(n,)`.
    """
    z = (y - mean) / sd
    density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
    return sd * (z * torch.erf(z / math.sqrt(2)) + 2 * density - 1 / math.sqrt(math.pi))


def classification_scores(y: Tensor, probability: Tensor) -> dict[str, float]:
    """
    Fraction of wrong classes, mean negative log likelihood, and expected calibration error: that of class 1 for two
    classes, that of the most probable class for several.

    :param y: Classes 0, 1, ..., `(n,)`.
    :param probability: Of class 1 `(n,)`, or of each class `(n, K)`.

    Example:
        >>> import torch
        >>> scores = classification_scores(torch.tensor([0.0, 1.0]), torch.tensor([0.5, 1.0]))
        >>> {name: round(value, 4) for name, value in scores.items()}
        {'error': 0.5, 'nll': 0.3466, 'calibration_error': 0.25}
    """
    probability = probability.double()
    if probability.dim() == 1:
        probability = torch.stack([1 - probability, probability], -1)
    classes = y.long().unsqueeze(-1)
    # A tie of two classes counts as the second; a sure and wrong answer costs 28, not infinity.
    best = probability.shape[1] - 1 - probability.flip(1).argmax(1)
    predicted, observed, count = reliability(*sure_of(y, probability))
    return {
        "error": float((best != y.long()).double().mean()),
        "nll": float(-probability.gather(1, classes).clamp(1e-12, 1 - 1e-12).log().mean()),
        "calibration_error": float((count * (predicted - observed).abs()).sum() / count.sum()),
    }


def sure_of(y: Tensor, probability: Tensor) -> tuple[Tensor, Tensor]:
    """
    What the calibration of a classifier is about: whether a row is of class 1, and that probability; with several
    classes, whether it is of the most probable one.

    :param y: Classes 0, 1, ..., `(n,)`.
    :param probability: Of class 1 `(n,)`, or of each class `(n, K)`.
    """
    if probability.dim() == 1:
        return y, probability
    if probability.shape[1] == 2:
        return y, probability[:, 1]
    largest, best = probability.max(1)
    return (best == y.long()).to(y.dtype), largest


def reliability(y: Tensor, probability: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """
    Predicted against observed frequencies of class 1, over bins of the predicted probability that are not empty.

    :param y: Classes 0 and 1, `(n,)`.
    :param probability: Of class 1, `(n,)`.
    :return: Mean prediction, observed frequency and number of rows of each bin.
    """
    index = (probability * NUM_BINS).long().clamp(0, NUM_BINS - 1)
    count = torch.bincount(index, minlength=NUM_BINS).double()
    predicted = torch.bincount(index, weights=probability.double(), minlength=NUM_BINS)
    observed = torch.bincount(index, weights=y.double(), minlength=NUM_BINS)
    used = count > 0
    return predicted[used] / count[used], observed[used] / count[used], count[used]
