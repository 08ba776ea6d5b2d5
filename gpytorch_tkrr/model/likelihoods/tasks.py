r"""Gaussian noise with a variance for each task: :math:`y_n \sim N(f(x_n), s_{t(n)}^2)`.

The task of a row is a column of its inputs. The working regression has the mean variance :math:`\bar s^2` and row
weights :math:`\bar s^2 / s_{t(n)}^2`; the variances are drawn before each sweep, from the sums of squared residuals of
their tasks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from gpytorch.likelihoods import HadamardGaussianLikelihood, MultitaskGaussianLikelihood
from torch import Tensor

from ...data.source import Batch, Working
from ...errors import InputError
from .augmented import Augmentation, Parameters, SumRows
from .base import Rows
from .gaussian import GaussianObservation
from .noise import NOISE_SCALE, NOISE_SHAPE, truncated_inverse_gamma, within_bounds
from .registry import register


@register(HadamardGaussianLikelihood)
class TaskObservation(GaussianObservation):
    """
    A long table with a column of tasks.

    :param likelihood: A HadamardGaussianLikelihood that knows this column (`task_feature_index`).
    """

    has_least_squares: ClassVar[bool] = False

    #: What the targets of each task were divided by, `(T,)`, beside the scale of all of them.
    scales: Tensor | None = None

    def check(self) -> None:
        if self.likelihood.task_feature_index is None:
            raise InputError(
                "The likelihood does not know which column holds the tasks: give it task_feature_index, for instance "
                "HadamardGaussianLikelihood(num_tasks, task_feature_index=-1)."
            )

    @property
    def column(self) -> int:
        """The column of the inputs that holds the tasks."""
        return self.likelihood.task_feature_index

    @property
    def raw_noises(self) -> tuple[Tensor, Any]:
        """The parameter behind the variances of all tasks, and its constraint."""
        covar = self.likelihood.noise_covar
        return covar.raw_noise, covar.raw_noise_constraint

    def noises(self) -> Tensor:
        """The variance of each task, `(T,)`, float64."""
        return self.likelihood.noise.double().reshape(-1)

    def noise(self) -> Tensor:
        return self.noises().mean()

    def start_noise(self, variance: float) -> None:
        return None

    def noise_bound(self) -> float | None:
        return float(self.raw_noises[1].lower_bound.min())

    def set_noises(self, noises: Tensor) -> None:
        """
        Set the variance of each task.

        :param noises: `(T,)`.
        """
        parameter, noises = self.likelihood.noise, within_bounds(noises, self.raw_noises[1])
        self.likelihood.initialize(noise=noises.to(parameter).reshape(parameter.shape))

    def set_parameters(self, draws: Parameters) -> None:
        if "noise" in draws:
            self.set_noises(draws["noise"].mean(0))

    def augmentation(self, scale: float, offset: float) -> Augmentation:
        present = self.noises().detach().cpu()
        unit = scale**2 * (torch.ones_like(present) if self.scales is None else self.scales.cpu().double() ** 2)
        parameter, constraint = self.raw_noises
        bounds = float(constraint.lower_bound.min()), float(constraint.upper_bound.max())
        log_prior = _log_prior(self.likelihood, unit)
        return TaskAugmentation(self.column, present, unit, bounds, parameter.requires_grad, log_prior)

    def function_rows(self, x: Tensor, parameters: Parameters) -> dict[str, Tensor]:
        task = x[..., self.column].detach().reshape(-1)
        if not bool(((task == task.round()) & (task >= 0) & (task < len(self.noises()))).all()):
            raise InputError(
                f"Column {self.column} of the inputs holds tasks, 0 to {len(self.noises()) - 1}; it has other values."
            )
        return {"task": task.long()}

    def total_noise(self, parameters: Parameters, rows: Rows) -> Tensor:
        noise = parameters["noise"][..., rows["task"]]
        return noise + rows["spread"] if "spread" in rows else noise


@register(MultitaskGaussianLikelihood)
class MultitaskObservation(TaskObservation):
    """
    Several outputs, each with its own noise; the last column of the inputs is the number of the output.

    :param likelihood: A MultitaskGaussianLikelihood of rank 0. What its global noise and a task's noise add up to is
        drawn; afterwards both are set.
    """

    def check(self) -> None:
        if self.likelihood.rank > 0 or not self.likelihood.has_task_noise:
            raise InputError(
                "The noise of several outputs is independent with one variance for each: use "
                "MultitaskGaussianLikelihood(num_tasks, rank=0), with has_task_noise=True."
            )

    @property
    def column(self) -> int:
        return -1

    @property
    def raw_noises(self) -> tuple[Tensor, Any]:
        return self.likelihood.raw_task_noises, self.likelihood.raw_task_noises_constraint

    def noises(self) -> Tensor:
        shared = self.likelihood.noise.double() if self.likelihood.has_global_noise else 0.0
        return (self.likelihood.task_noises.double() + shared).reshape(-1)

    def set_noises(self, noises: Tensor) -> None:
        likelihood, bound = self.likelihood, 1.01 * (self.noise_bound() or 0.0)
        shared = 0.0
        if likelihood.has_global_noise:
            shared = max(0.5 * float(noises.min()), bound)
            likelihood.initialize(noise=torch.full_like(likelihood.noise, shared))
        likelihood.initialize(task_noises=(noises - shared).clamp(min=bound).to(likelihood.task_noises))


class TaskAugmentation(Augmentation):
    """
    The noise of each task, drawn from the squared residuals of its rows.

    :param column: The column of the inputs that holds the tasks.
    :param present: The likelihood object's variances, in the units of the targets, `(T,)`.
    :param unit: What the squared targets of each task were divided by, `(T,)`.
    :param bounds: The smallest and the largest variance, in the units of the targets.
    :param is_free: Whether they are drawn at all.
    :param log_prior: Log density of a registered prior at variances in the units of the sampler; None for the default.
    """

    def __init__(
        self,
        column: int,
        present: Tensor,
        unit: Tensor,
        bounds: tuple[float, float],
        is_free: bool,
        log_prior: Callable[[Tensor], float] | None,
    ):
        self.column, self.present, self.unit, self.is_free, self.log_prior = column, present, unit, is_free, log_prior
        self.lower, self.upper = (torch.full_like(unit, bound) / unit for bound in bounds)
        self.free = ("noise",) if is_free else ()

    def start(self) -> Parameters:
        one = torch.ones_like(self.unit)
        start = torch.minimum(torch.maximum(one, self.lower), self.upper) if self.is_free else self.present / self.unit
        return {"noise": start}

    def scaled(self, parameters: Parameters) -> Parameters:
        return {"noise": parameters["noise"].cpu() / self.unit}

    def natural(self, parameters: Parameters) -> Parameters:
        return {"noise": parameters["noise"] * self.unit.to(parameters["noise"])}

    def noise(self, parameters: Parameters) -> float:
        return float(parameters["noise"].mean())

    def _tasks(self, batch: Batch) -> Tensor:
        return batch.x[:, self.column].long()

    def before_sweep(
        self, parameters: Parameters, sum_rows: SumRows, rng: np.random.Generator, progress: float
    ) -> Parameters:
        if not self.is_free:
            return parameters
        num = len(self.unit)

        def by_task(batch: Batch, f: Tensor, first_row: int) -> Tensor:
            square = (batch.y - f).square()
            square = square if batch.weight is None else square * batch.weight
            total = square.new_zeros(2, num)
            return total.index_add_(1, self._tasks(batch), torch.stack([square, torch.ones_like(square)])).reshape(-1)

        square, count = sum_rows(by_task, 2 * num).cpu().reshape(2, num)
        shape, scale = (NOISE_SHAPE, NOISE_SCALE) if self.log_prior is None else (0.0, 0.0)
        noise = parameters["noise"].clone().cpu()
        for t in range(num):
            bounds = float(self.lower[t]), float(self.upper[t])
            proposal = truncated_inverse_gamma(shape + float(count[t]) / 2, scale + float(square[t]) / 2, *bounds, rng)
            if self.log_prior is not None:  # the proposal assumed a density of 1 / s^2
                changed = noise.clone()
                changed[t] = proposal
                ratio = self.log_prior(changed) + math.log(proposal) - self.log_prior(noise) - math.log(noise[t])
                if not math.log(rng.random()) < ratio:
                    continue
            noise[t] = proposal
        return {"noise": noise}

    def working(self, parameters: Parameters, rng: np.random.Generator) -> Working:
        noise = parameters["noise"]
        relative = noise.mean() / noise

        def weighted(batch: Batch, f: Tensor, first_row: int) -> tuple[Tensor, Tensor]:
            return batch.y - f, relative.to(f)[self._tasks(batch)]

        return weighted


def _log_prior(likelihood: Any, unit: Tensor) -> Callable[[Tensor], float] | None:
    """The log density of the priors that are registered for the variances of the tasks."""
    found = [
        (prior, closure(module))
        for name, module, prior, closure, _ in likelihood.named_priors()
        if closure(module).numel() == len(unit)
    ]
    if not found:
        return None

    def log_prior(noise: Tensor) -> float:
        return sum(float(prior.log_prob((noise * unit).to(value).reshape(value.shape)).sum()) for prior, value in found)

    return log_prior
