r"""Gaussian noise of one variance: :math:`y = f(x) + \epsilon`, :math:`\epsilon \sim N(0, s^2)`."""

from __future__ import annotations

import math

import numpy as np
import torch
from gpytorch.likelihoods import GaussianLikelihood
from torch import Tensor

from ...data.source import Working, residuals
from ...errors import InputError
from .augmented import Augmentation, Parameters
from .base import Observation, Rows, per_row
from .noise import NoiseModel, noise_module, within_bounds
from .registry import register

#: The lower bound of the noise that GPyTorch sets where the user sets none. It is worth a warning if it is more than
#: this fraction of the variance of the targets and most draws lie this close to it.
DEFAULT_BOUND, LARGE_FRACTION, NEAR = 1e-4, 1e-3, 1.2


@register(GaussianLikelihood)
class GaussianObservation(Observation):
    """
    Targets with Gaussian noise.

    :param likelihood: A GaussianLikelihood with one variance.
    """

    def check(self) -> None:
        if self.likelihood.noise.numel() != 1:
            raise InputError(
                f"The likelihood has {self.likelihood.noise.numel()} noise variances (batch_shape); a CP-weight model "
                "takes one."
            )

    def noise(self) -> Tensor:
        return self.likelihood.noise.double().mean()

    def start_noise(self, variance: float) -> None:
        module = noise_module(self.likelihood)
        is_default = not module.raw_noise.detach().any()  # GPyTorch's, which says nothing about the targets
        if module.raw_noise.requires_grad and (is_default or not 1e-4 <= float(self.noise()) / variance <= 10.0):
            constraint = module.raw_noise_constraint
            low, high = float(constraint.lower_bound.min()), float(constraint.upper_bound.max())
            start = min(max(0.1 * variance, 1.01 * low), 0.99 * high)
            self.likelihood.initialize(noise=torch.tensor(start, dtype=torch.float64))  # a float would be rounded

    def noise_bound(self) -> float | None:
        return float(noise_module(self.likelihood).raw_noise_constraint.lower_bound.min())

    def augmentation(self, scale: float, offset: float) -> Augmentation:
        return GaussianAugmentation(NoiseModel.of(self.likelihood, scale**2), float(self.noise().detach()), scale**2)

    def set_parameters(self, draws: Parameters) -> None:
        if "noise" in draws:
            constraint = noise_module(self.likelihood).raw_noise_constraint
            self.likelihood.initialize(noise=within_bounds(draws["noise"].mean(), constraint))

    def own_noise(self, parameters: Parameters, rows: Rows) -> Tensor:
        """
        The noise parameter of each row.

        :param parameters: Parameters of each draw.
        :param rows: What is known of each row.
        """
        noise = per_row(parameters["noise"])
        return noise * rows["factor"] if "factor" in rows else noise

    def total_noise(self, parameters: Parameters, rows: Rows) -> Tensor:
        """
        The variance of y about the given f.

        :param parameters: Parameters of each draw.
        :param rows: What is known of each row.
        """
        noise = self.own_noise(parameters, rows)
        return noise + rows["spread"] if "spread" in rows else noise

    def noise_variance(self, f: Tensor, parameters: Parameters, rows: Rows) -> Tensor:
        return self.own_noise(parameters, rows).expand(f.shape)

    def log_density(self, y: Tensor, f: Tensor, parameters: Parameters, rows: Rows) -> Tensor:
        variance = self.total_noise(parameters, rows)
        return -0.5 * (torch.log(2 * math.pi * variance) + (y - f) ** 2 / variance)

    def mean(self, f: Tensor, parameters: Parameters, rows: Rows) -> Tensor:
        return f

    def variance(self, f: Tensor, parameters: Parameters, rows: Rows) -> Tensor:
        return self.total_noise(parameters, rows).expand(f.shape)

    def cdf(self, y: Tensor, f: Tensor, parameters: Parameters, rows: Rows) -> Tensor:
        z = (y - f) / self.total_noise(parameters, rows).sqrt()
        return torch.special.erfc(-z / math.sqrt(2)) / 2

    def sample(self, f: Tensor, parameters: Parameters, rows: Rows, generator: torch.Generator) -> Tensor:
        return torch.normal(f, self.variance(f, parameters, rows).sqrt(), generator=generator)


class GaussianAugmentation(Augmentation):
    """
    Nothing is augmented: targets and weights are those of the data, and the noise is drawn.

    :param model: How it is drawn.
    :param present: The likelihood object's noise variance, in the units of the targets.
    :param unit: Variance of the targets.
    """

    is_gaussian = True

    def __init__(self, model: NoiseModel, present: float, unit: float):
        self.model, self.present, self.unit = model, present, unit
        self.free = ("noise",) if model.is_free else ()

    def start(self) -> Parameters:
        return _noise(self.model.start(self.present / self.unit))

    def scaled(self, parameters: Parameters) -> Parameters:
        return _noise(float(parameters["noise"]) / self.unit)

    def natural(self, parameters: Parameters) -> Parameters:
        return {"noise": parameters["noise"] * self.unit}

    def noise(self, parameters: Parameters) -> float:
        return float(parameters["noise"])

    def working(self, parameters: Parameters, rng: np.random.Generator) -> Working:
        return residuals

    def after_visit(self, parameters: Parameters, square: float, count: float, rng: np.random.Generator) -> Parameters:
        return _noise(self.model.draw(float(parameters["noise"]), square, count, rng))

    def concern(self, draws: Parameters) -> str | None:
        is_default = math.isclose(self.model.lower * self.unit, DEFAULT_BOUND, rel_tol=1e-3)
        near = (draws["noise"] < NEAR * DEFAULT_BOUND).double().mean()
        if not (self.model.is_free and is_default and self.model.lower > LARGE_FRACTION and near > 0.5):
            return None
        fraction = self.model.lower  # of the variance of the targets
        size = f"{fraction:.1%} of" if fraction < 1 else f"{fraction:.3g} times"
        return (
            f"The noise variance lies at {DEFAULT_BOUND:g}, GPyTorch's default lower bound, which is "
            f"{size} the variance of the targets. Scale the targets to unit variance, or pass "
            "GaussianLikelihood(noise_constraint=GreaterThan(...)) with a smaller bound."
        )


def _noise(value: float) -> Parameters:
    return {"noise": torch.tensor(value, dtype=torch.float64)}
