"""A noise variance that is drawn: its conditional, within the constraint and the prior of a GPyTorch likelihood."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.special
import torch
from gpytorch.constraints import Interval
from gpytorch.likelihoods import Likelihood
from torch import Tensor

#: Shape and scale of the default inverse-Gamma prior of the noise variance, in units of the targets' variance.
NOISE_SHAPE, NOISE_SCALE = 1.0, 5e-3

#: A variance is no closer to a bound than this, relative to it: what single precision can tell apart.
ROUNDING = 1e-6

#: Width of the first interval of a slice, and how many of them it may have.
SLICE_WIDTH, MAX_STEPS_OUT = 1.0, 20


def noise_module(likelihood: Likelihood) -> Any:
    """
    The module that holds `raw_noise` and its constraint: the likelihood itself, or a part of it.

    :param likelihood: A likelihood with one noise variance.
    """
    return getattr(likelihood, "noise_covar", likelihood)


def within_bounds(noise: Tensor, constraint: Interval) -> Tensor:
    """
    The mean of draws at a bound is beyond it by rounding, and a value at the bound itself has no raw parameter.

    :param noise: Variances.
    :param constraint: Theirs.
    """
    low, high = float(constraint.lower_bound.min()), float(constraint.upper_bound.max())
    return noise.clamp(low * (1 + ROUNDING), high * (1 - ROUNDING))


class NoiseModel:
    """
    How the noise variance is drawn.

    :param is_free: Whether it is drawn at all.
    :param lower: Lower bound, in units of the scaled targets.
    :param upper: Upper bound.
    :param log_prior: Log density of a registered prior at a noise variance of the scaled targets; None for the default.
    """

    def __init__(
        self, is_free: bool, lower: float, upper: float, log_prior: Callable[[float], float] | None = None
    ) -> None:
        self.is_free, self.lower, self.upper, self.log_prior = is_free, lower, upper, log_prior

    @classmethod
    def of(cls, likelihood: Likelihood, unit: float) -> NoiseModel:
        """
        The noise of a likelihood that has one variance, with its constraint and its prior.

        :param likelihood: The likelihood.
        :param unit: Variance of the targets.
        """
        covar = noise_module(likelihood)
        constraint = covar.raw_noise_constraint
        log_prior = None
        for name, module, prior, closure, setter in likelihood.named_priors():
            if setter is not None and not name.endswith("deg_free_prior"):
                value = closure(module)

                def log_prior(noise: float, prior=prior, value=value) -> float:
                    return float(prior.log_prob(torch.full_like(value, noise * unit)).sum())

        return cls(
            covar.raw_noise.requires_grad,
            float(constraint.lower_bound.min()) / unit,
            float(constraint.upper_bound.max()) / unit,
            log_prior,
        )

    def log_density(self, noise: float) -> float:
        """
        The log density of the prior, up to a constant; minus infinity outside the bounds.

        :param noise: A noise variance.
        """
        if not self.lower <= noise <= self.upper:
            return -math.inf
        if self.log_prior is not None:
            return self.log_prior(noise)
        return -(NOISE_SHAPE + 1) * math.log(noise) - NOISE_SCALE / noise

    def start(self, current: float) -> float:
        """
        The noise variance that a chain starts from: the targets' variance, unless it is fixed. A chain that starts with
        little noise may stay where components explain single points.

        :param current: The likelihood's present noise variance.
        """
        return min(max(1.0, self.lower), self.upper) if self.is_free else current

    def draw(self, current: float, square: float, count: float, rng: np.random.Generator) -> float:
        """
        One draw from the conditional.

        :param current: The present noise variance.
        :param square: Sum of squared residuals.
        :param count: N.
        :param rng: Source of random numbers.
        """
        if not self.is_free:
            return current
        shape, scale = (NOISE_SHAPE, NOISE_SCALE) if self.log_prior is None else (0.0, 0.0)
        proposal = truncated_inverse_gamma(shape + count / 2, scale + square / 2, self.lower, self.upper, rng)
        if self.log_prior is None:
            return proposal

        def log_conditional(log_noise: float) -> float:
            noise = math.exp(min(log_noise, 700.0))
            if not self.lower < noise < self.upper or noise == 0:
                return -math.inf
            return self.log_density(noise) - (count / 2 - 1) * log_noise - square / (2 * noise)

        # The proposal assumed a density of 1 / s^2.
        ratio = self.log_prior(proposal) + math.log(proposal) - self.log_prior(current) - math.log(current)
        noise = proposal if math.log(rng.random()) < ratio else current
        # Where prior and data disagree no such proposal is taken.
        return math.exp(slice_draw(log_conditional, math.log(noise), rng))


def slice_draw(log_density: Callable[[float], float], current: float, rng: np.random.Generator) -> float:
    """
    One step of slice sampling, which leaves a density invariant and needs no tuning (Neal 2003: stepping out, then
    shrinkage).

    :param log_density: Logarithm of the density, up to a constant.
    :param current: The present point.
    :param rng: Source of random numbers.

    Example:
        >>> import numpy as np
        >>> from gpytorch_tkrr.model.likelihoods.noise import slice_draw
        >>> rng, draws = np.random.default_rng(0), [9.0]
        >>> for _ in range(2000):
        ...     draws.append(slice_draw(lambda x: -0.5 * x**2, draws[-1], rng))
        >>> bool(abs(np.mean(draws)) < 0.1), bool(abs(np.std(draws) - 1) < 0.1)
        (True, True)
    """
    height = log_density(current)
    if not math.isfinite(height):
        return current
    level = height + math.log(1 - rng.random())
    left = current - SLICE_WIDTH * rng.random()
    right = left + SLICE_WIDTH
    num_left = int(rng.integers(MAX_STEPS_OUT))
    for _ in range(num_left):
        if log_density(left) <= level:
            break
        left -= SLICE_WIDTH
    for _ in range(MAX_STEPS_OUT - 1 - num_left):
        if log_density(right) <= level:
            break
        right += SLICE_WIDTH
    while True:
        point = left + (right - left) * rng.random()
        if log_density(point) >= level or point == current:
            return point
        left, right = (point, right) if point < current else (left, point)


def truncated_inverse_gamma(shape: float, scale: float, lower: float, upper: float, rng: np.random.Generator) -> float:
    """
    A draw from an inverse-Gamma distribution between two bounds.

    :param shape: Its shape.
    :param scale: Its scale.
    :param lower: Lower bound.
    :param upper: Upper bound.
    :param rng: Source of random numbers.
    """
    scale = max(scale, 1e-300)
    # Quantiles of the precision, Gamma(shape, scale), between 1 / upper and 1 / lower.
    top = scipy.special.gammainc(shape, scale / lower) if lower > 0 else 1.0
    bottom = scipy.special.gammainc(shape, scale / upper) if math.isfinite(upper) else 0.0
    u = bottom + (top - bottom) * rng.random()
    precision = scipy.special.gammaincinv(shape, u) / scale
    if not precision > 0:
        precision = 1 / lower if lower > 0 else shape / scale
    return float(min(max(1 / precision, lower), upper))
