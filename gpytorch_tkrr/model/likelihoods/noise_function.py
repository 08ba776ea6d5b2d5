r"""The function g behind noise that depends on the inputs, as the sampler sees it and as draws keep it.

Given f, squared residuals say :math:`\log(e_n^2 / s^2) = g(x_n) + \log \chi^2_1`, which is a regression given the
components of a mixture (:mod:`gpytorch_tkrr.model.augmentation.log_chi_squared`). Given g, f is a regression with row
weights :math:`e^{-g}`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from ...bases.basis import Basis, sum_products
from ...data.source import Batch, Working
from ...features.separable import SeparableKernel
from ..augmentation.log_chi_squared import SMALLEST, draw_components
from ..augmentation.row_values import RowValues
from .augmented import Augmentation, Parameters, SecondFunction, SumRows
from .skewed_noise import shape_variance

#: The part of the warm-up with constant noise.
CONSTANT_PART = 0.5

#: g is cut off here: variances differ by at most twelve orders of magnitude.
LARGEST = 14.0

#: The smallest variance of the noise anywhere, in units of the targets' variance. Without it a region of equal targets
#: has an unbounded density, and all else would be given up for it.
FLOOR = 1e-4

#: A row says so many things of its variance at most.
MAX_SQUARES = 2

#: Names of the parts of g begin with this.
PREFIX = "log_noise."


def noise_factor(g: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
    """
    What :math:`s^2` is multiplied by, `(*P, n)`.

    :param g: Values of g, `(*P, n)`.
    :param parameters: Each `(*P, ...)`.
    """
    least = (parameters[f"{PREFIX}floor"] / parameters["noise"]).unsqueeze(-1)
    return torch.maximum(g.clamp(-LARGEST, LARGEST).exp(), least.to(g.device))


def factors_of(parameters: Mapping[str, Tensor]) -> list[Tensor]:
    """
    The factors of g, D tensors `(*P, R, M_d)`.

    :param parameters: Where they stand.
    """
    names = [f"{PREFIX}factors.{d}" for d in range(len(parameters))]
    return [parameters[name] for name in names if name in parameters]


def log_size(parameters: Mapping[str, Tensor]) -> Tensor:
    """
    The logarithm of the noise variance where g is zero, `(*P,)`; with Student tails that of the squared scale.

    :param parameters: Each `(*P, ...)`.
    """
    own = parameters["noise"].log()
    return own + shape_variance(parameters["shares"], parameters["skew"]).log() if "shares" in parameters else own


class NoiseDraws:
    """
    What the likelihood object knows after a fit.

    :param bases: The functions of each input that g is made of.
    :param parameters: Draws.
    :param inputs: Inputs as g sees them.
    """

    def __init__(self, bases: Sequence[Basis], parameters: Parameters, inputs: Callable[[Tensor], Tensor]):
        self.bases, self.parameters, self.inputs = bases, parameters, inputs

    def mean_variance(self, x: Tensor) -> Tensor:
        """
        Posterior mean of the squared scale of the noise, `(..., n)`.

        :param x: Inputs `(..., n, D)`.
        """
        rows = self.inputs(x.double()).reshape(-1, x.shape[-1])
        factor = noise_factor(sum_products(self.bases, factors_of(self.parameters), rows), self.parameters)
        return (self.parameters["noise"].unsqueeze(-1) * factor).mean(0).reshape(x.shape[:-1])


class LogNoiseFunction(SecondFunction):
    """
    g as the sampler sees it.

    :param kernel: Its kernel object.
    :param separable: The same, read mode by mode.
    :param rank: Its number of components.
    :param base: The model of the noise given g.
    """

    prefix, free_from = PREFIX, CONSTANT_PART

    def __init__(self, kernel: Kernel, separable: SeparableKernel, rank: int, base: Augmentation):
        self.kernel, self.separable, self.rank, self.base = kernel, separable, rank, base

    def total(self, g: Tensor, parameters: Parameters) -> Tensor:
        return g + log_size(parameters).unsqueeze(-1)

    def row_weight(self, parameters: Parameters) -> Callable[[Batch, int], Tensor]:
        bases, factors = [mode.basis for mode in self.separable.modes], factors_of(parameters)
        g = RowValues(lambda x: sum_products(bases, factors, x))
        return lambda batch, first_row: 1 / noise_factor(g(batch, first_row), parameters)

    def working(self, parameters: Parameters, f: RowValues, rng: np.random.Generator) -> Working:
        inner, noise = self.base.squares(parameters, rng), self.base.noise(parameters)
        keys = [int(key) for key in rng.integers(2**62, size=MAX_SQUARES)]

        def log_squares(batch: Batch, g: Tensor, first_row: int) -> tuple[Tensor, Tensor]:
            own = torch.ones_like(g) if batch.weight is None else batch.weight
            weighted = replace(batch, weight=own / noise_factor(g, parameters))
            target, precision = torch.zeros_like(g), torch.zeros_like(g)
            for square, key in zip(inner(weighted, f(batch, first_row), first_row), keys, strict=False):
                xi = ((square * own / noise).clamp(min=1e-300).log() - g).clamp(min=SMALLEST)
                mean, variance = draw_components(xi, first_row, key)
                target, precision = target + (xi - mean) / variance, precision + 1 / variance
            return target / precision, precision / own

        return log_squares


class HeteroskedasticAugmentation(Augmentation):
    """
    Noise and tails as without g, for rows that g weighs; g itself is drawn by the sampler and kept with them.

    :param base: Noise and tails.
    :param second: g.
    :param unit: Variance of the targets.
    """

    second: LogNoiseFunction
    warmup_part = 1.0

    def __init__(self, base: Augmentation, second: LogNoiseFunction, unit: float):
        self.base, self.second, self.free, self.unit = base, second, base.free, unit
        self.sweep_factor = base.sweep_factor

    @property
    def watched(self) -> tuple[str, ...]:
        return tuple(name for name in self.base.watched if name != "noise")  # the data see it together with g alone

    def start(self) -> Parameters:
        zeros = {
            f"{PREFIX}factors.{d}": torch.zeros(self.second.rank, mode.num_functions, dtype=torch.float64)
            for d, mode in enumerate(self.second.separable.modes)
        }
        return {**zeros, f"{PREFIX}floor": torch.tensor(FLOOR, dtype=torch.float64), **self.base.start()}

    def scaled(self, parameters: Parameters) -> Parameters:
        return {**parameters, **self.base.scaled(parameters), **self._floor(parameters, 1 / self.unit)}

    def natural(self, parameters: Parameters) -> Parameters:
        return {**parameters, **self.base.natural(parameters), **self._floor(parameters, self.unit)}

    @staticmethod
    def _floor(parameters: Parameters, unit: float) -> Parameters:
        return {f"{PREFIX}floor": parameters[f"{PREFIX}floor"] * unit}

    def noise(self, parameters: Parameters) -> float:
        return self.base.noise(parameters)

    def before_sweep(
        self, parameters: Parameters, sum_rows: SumRows, rng: np.random.Generator, progress: float
    ) -> Parameters:
        late = max(0.0, (progress - CONSTANT_PART) / (1 - CONSTANT_PART))  # tails later than g
        return {**parameters, **self.base.before_sweep(parameters, sum_rows, rng, late)}

    def working(self, parameters: Parameters, rng: np.random.Generator) -> Working:
        return self.base.working(parameters, rng)

    def after_visit(self, parameters: Parameters, square: float, count: float, rng: np.random.Generator) -> Parameters:
        return {**parameters, **self.base.after_visit(parameters, square, count, rng)}

    def concern(self, draws: Parameters) -> str | None:
        return self.base.concern(draws)
