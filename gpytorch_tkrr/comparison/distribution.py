r"""Predictive distributions of any shape: what a model of the comparison may return in place of means and standard
deviations, and how they are scored.

Reference: Gneiting & Raftery (2007), *Strictly proper scoring rules, prediction, and estimation*.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

#: Draws of each target from which the continuous ranked probability score is computed.
NUM_SAMPLES = 500


@runtime_checkable
class Distribution(Protocol):
    """A distribution of each of n targets, such as a :class:`~gpytorch_tkrr.Prediction`."""

    @property
    def mean(self) -> Tensor:
        """Means `(n,)`."""

    @property
    def stddev(self) -> Tensor:
        """Standard deviations `(n,)`; infinite where a tail has none."""

    def log_prob(self, y: Tensor) -> Tensor:
        """
        Log densities of targets, `(n,)`.

        :param y: Targets `(n,)`.
        """

    def cdf(self, y: Tensor) -> Tensor:
        """
        Probabilities of smaller targets, `(n,)`.

        :param y: Targets `(n,)`.
        """

    def sample(self, num_samples: int, *, seed: int | None = None) -> Tensor:
        """
        Draws of the targets, `(num_samples, n)`.

        :param num_samples: How many of each.
        :param seed: Seed.
        """


class Rescaled:
    """
    A distribution of standardised targets in their own units.

    :param base: That of (y - center) / unit.
    :param center: What stands for 0.
    :param unit: What stands for 1.
    """

    def __init__(self, base: Distribution, center: Tensor, unit: Tensor):
        self.base, self.center, self.unit = base, center, unit

    @property
    def mean(self) -> Tensor:
        """Means `(n,)`."""
        return self.center + self.unit * self.base.mean

    @property
    def stddev(self) -> Tensor:
        """Standard deviations `(n,)`."""
        return self.unit * self.base.stddev

    def log_prob(self, y: Tensor) -> Tensor:
        """
        Log densities.

        :param y: Targets `(n,)`.
        """
        return self.base.log_prob((y - self.center) / self.unit) - self.unit.log()

    def cdf(self, y: Tensor) -> Tensor:
        """
        Probabilities of smaller targets.

        :param y: Targets `(n,)`.
        """
        return self.base.cdf((y - self.center) / self.unit)

    def sample(self, num_samples: int, *, seed: int | None = None) -> Tensor:
        """
        Draws.

        :param num_samples: How many of each.
        :param seed: Seed.
        """
        return self.center + self.unit * self.base.sample(num_samples, seed=seed)


class QuantileDistribution:
    r"""
    A distribution known by some of its quantiles: uniform between two of them, exponential beyond the outer ones, whose
    scale lets the density go on continuously.

    :param levels: Probabilities, increasing, `(K,)`.
    :param quantiles: `(n, K)`; sorted here where they cross.
    :param mean: The means `(n,)`, which the quantiles need not agree with.
    :param least_width: Two quantiles are at least so far apart: densities of repeated targets stay finite.

    Example:
        >>> import torch
        >>> levels = torch.linspace(0.05, 0.95, 19).double()
        >>> quantiles = torch.distributions.Normal(0.0, 1.0).icdf(levels).expand(3, -1)
        >>> made = QuantileDistribution(levels, quantiles, torch.zeros(3).double(), 1e-6)
        >>> made.cdf(torch.tensor([-1.0, 0.0, 1.0])).numpy().round(2)
        array([0.16, 0.5 , 0.84])
        >>> torch.allclose(made.cdf(made.sample(2, seed=0)[0]), torch.tensor([0.5, 0.5, 0.5]).double(), atol=0.5)
        True
    """

    def __init__(self, levels: Tensor, quantiles: Tensor, mean: Tensor, least_width: float):
        values = quantiles.double().sort(-1).values
        steps = (values[:, 1:] - values[:, :-1]).clamp(min=least_width)
        middle = levels.shape[0] // 2
        # Widened from the middle outwards.
        right = values[:, middle : middle + 1] + steps[:, middle:].cumsum(-1)
        left = values[:, middle : middle + 1] - steps[:, :middle].flip(-1).cumsum(-1).flip(-1)
        self.values = torch.cat([left, values[:, middle : middle + 1], right], -1)  # (n, K)
        self.levels, self.mean = levels.double(), mean.double()
        self.density = (self.levels[1:] - self.levels[:-1]) / (self.values[:, 1:] - self.values[:, :-1])  # (n, K - 1)

    @property
    def stddev(self) -> Tensor:
        """Standard deviations of the distribution of the quantiles, about its own mean, `(n,)`."""
        p, a, b = self.levels[1:] - self.levels[:-1], self.values[:, :-1], self.values[:, 1:]
        low, high = self._tails()
        # Means of y and y^2: of uniform pieces, and of exponential tails beyond the outer quantiles.
        first = (p * (a + b) / 2).sum(-1) + self.levels[0] * (a[:, 0] - low) + (1 - self.levels[-1]) * (b[:, -1] + high)
        second = (p * (a * a + a * b + b * b) / 3).sum(-1)
        second = second + self.levels[0] * ((a[:, 0] - low) ** 2 + low**2)
        second = second + (1 - self.levels[-1]) * ((b[:, -1] + high) ** 2 + high**2)
        return (second - first**2).clamp(min=0).sqrt()

    def _tails(self) -> tuple[Tensor, Tensor]:
        """Scales of the exponential tails, `(n,)` each."""
        return self.levels[0] / self.density[:, 0], (1 - self.levels[-1]) / self.density[:, -1]

    def _piece(self, y: Tensor) -> Tensor:
        """Between which quantiles a target lies: 0 for below all, K for above all."""
        return torch.searchsorted(self.values, y.double().unsqueeze(-1).contiguous()).squeeze(-1)

    def log_prob(self, y: Tensor) -> Tensor:
        """
        Log densities.

        :param y: Targets `(n,)`.
        """
        piece, (low, high), y = self._piece(y), self._tails(), y.double()
        inside = self.density.gather(-1, (piece - 1).clamp(0, self.density.shape[1] - 1).unsqueeze(-1)).squeeze(-1)
        below = self.density[:, 0].log() - (self.values[:, 0] - y) / low
        above = self.density[:, -1].log() - (y - self.values[:, -1]) / high
        return torch.where(piece == 0, below, torch.where(piece == len(self.levels), above, inside.log()))

    def cdf(self, y: Tensor) -> Tensor:
        """
        Probabilities of smaller targets.

        :param y: Targets `(n,)`.
        """
        piece, (low, high), y = self._piece(y), self._tails(), y.double()
        index = (piece - 1).clamp(0, self.density.shape[1] - 1).unsqueeze(-1)
        start, density = self.values.gather(-1, index).squeeze(-1), self.density.gather(-1, index).squeeze(-1)
        inside = self.levels[index.squeeze(-1)] + density * (y - start)
        below = self.levels[0] * ((y - self.values[:, 0]) / low).clamp(max=0).exp()
        above = 1 - (1 - self.levels[-1]) * ((self.values[:, -1] - y) / high).clamp(max=0).exp()
        return torch.where(piece == 0, below, torch.where(piece == len(self.levels), above, inside))

    def sample(self, num_samples: int, *, seed: int | None = None) -> Tensor:
        """
        Draws.

        :param num_samples: How many of each.
        :param seed: Seed.
        """
        generator = torch.Generator().manual_seed(int(torch.randint(2**31, ())) if seed is None else seed)
        u = torch.rand(len(self.values), num_samples, dtype=torch.float64, generator=generator)
        low, high = (tail.unsqueeze(-1) for tail in self._tails())
        piece = torch.searchsorted(self.levels, u)
        index = (piece - 1).clamp(0, self.density.shape[1] - 1)
        inside = self.values.gather(-1, index) + (u - self.levels[index]) / self.density.gather(-1, index)
        below = self.values[:, :1] + low * (u / self.levels[0]).log()
        above = self.values[:, -1:] - high * ((1 - u) / (1 - self.levels[-1])).log()
        return torch.where(piece == 0, below, torch.where(piece == len(self.levels), above, inside)).mT


def sampled_crps(y: Tensor, samples: Tensor) -> Tensor:
    r"""
    The continuous ranked probability score :math:`E|Y - y| - \tfrac12 E|Y - Y'|`, from draws, without bias.

    :param y: Targets `(n,)`.
    :param samples: Draws `(m, n)`.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr.comparison.scores import normal_crps
        >>> samples = torch.randn(20000, 1, generator=torch.Generator().manual_seed(0)).double()
        >>> y, zero, one = (torch.full((1,), value).double() for value in (0.7, 0.0, 1.0))
        >>> abs(sampled_crps(y, samples) - normal_crps(y, zero, one)).item() < 0.01
        True
    """
    number = len(samples)
    ordered = samples.sort(0).values
    rank = torch.arange(1, number + 1, dtype=samples.dtype, device=samples.device).unsqueeze(-1)
    spread = ((2 * rank - number - 1) * ordered).sum(0) * 2 / (number * (number - 1))  # E|Y - Y'|
    return (samples - y).abs().mean(0) - spread / 2


def distribution_scores(y: Tensor, made: Distribution, *, seed: int = 0) -> tuple[dict[str, float], dict[str, Tensor]]:
    """
    RMSE of the mean, NLPD, coverage of the central 95 % interval, and CRPS.

    :param y: Targets `(n,)`.
    :param made: Their distribution.
    :param seed: Seed of the draws for the CRPS.
    :return: The scores; and for each target `mean`, its `level`, the probability of a smaller one, and the ends `lower`
        and `upper` of the interval.
    """
    samples, level, mean = made.sample(NUM_SAMPLES, seed=seed).double(), made.cdf(y).double(), made.mean.double()
    scores = {
        "rmse": float((y - mean).square().mean().sqrt()),
        "nlpd": -float(made.log_prob(y).mean()),
        "coverage": level_coverage(level, 0.95),
        "crps": float(sampled_crps(y, samples).mean()),
    }
    lower, upper = torch.quantile(samples, torch.tensor([0.025, 0.975], dtype=torch.float64), dim=0)
    return scores, {"mean": mean, "level": level, "lower": lower, "upper": upper}


def level_coverage(level: Tensor, probability: float) -> float:
    """
    The share of targets inside the central interval of a probability.

    :param level: Of each target: the probability of a smaller one, `(n,)`.
    :param probability: That of the interval.
    """
    return float(((level - 0.5).abs() <= probability / 2).double().mean())
