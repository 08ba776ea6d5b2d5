r"""Heavy-tailed noise: :math:`y = f(x) + s\, t_\nu`, a Student distribution, as a scale mixture of normal ones.

With :math:`w_n \sim \text{Gamma}(\nu / 2, \nu / 2)` a target is normal, :math:`y_n \sim N(f(x_n), s^2 / w_n)`: given
the weights, the model is a weighted regression. They are drawn anew at each visit of a mode, from
:math:`\text{Gamma}((\nu + 1) / 2, (\nu + e_n^2 / s^2) / 2)`, with :math:`e_n` the residual; :math:`\nu` is drawn with
the weights integrated out, once before each sweep.

By default :math:`\nu - l \sim \text{Gamma}(2, 0.1)`, with l the lower bound of its constraint, which is 2 in GPyTorch:
its density vanishes at the bound, its mean is l + 20 (Juárez & Steel 2010, for l = 0). During the first part of the
warm-up the noise is Gaussian. With heavy tails from the start, structure that has not been found yet would be taken
for outliers, and never be found.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.special
import torch
from gpytorch.likelihoods import StudentTLikelihood
from torch import Tensor

from ...data.source import Batch, Working, residuals
from ..augmentation.candidates import choose, steps
from ..augmentation.keyed import row_gamma
from .augmented import Augmentation, Parameters, SumRows
from .base import Rows, per_row
from .gaussian import GaussianObservation
from .noise import NoiseModel
from .registry import register

#: Shape and rate of the default Gamma prior of the degrees of freedom above their lower bound.
DEG_FREE_SHAPE, DEG_FREE_RATE = 2.0, 0.1

#: The part of the warm-up with Gaussian noise, and the degrees of freedom (where they are free) that follow it.
GAUSSIAN_PART, FIRST_DEG_FREE = 0.5, 30.0

#: Nodes of the integral over the weight of a row.
NUM_NODES = 96


@register(StudentTLikelihood)
class StudentObservation(GaussianObservation):
    """
    Targets with Student noise. After ALS the degrees of freedom are those of the likelihood object.

    :param likelihood: A StudentTLikelihood with one noise and one number of degrees of freedom.
    """

    def augmentation(self, scale: float, offset: float) -> Augmentation:
        return StudentAugmentation(
            NoiseModel.of(self.likelihood, scale**2),
            DegreesOfFreedom.of(self.likelihood),
            float(self.noise().detach()),
            scale**2,
        )

    def set_parameters(self, draws: Parameters) -> None:
        super().set_parameters(draws)
        if "deg_free" in draws:
            self.likelihood.initialize(deg_free=float(draws["deg_free"].mean()))

    def _nu_and_square(self, parameters: Parameters, rows: Rows) -> tuple[Tensor, Tensor]:
        r""":math:`\nu`, `(*P, 1)`, and :math:`s^2`, `(*P, 1)` or `(*P, n)`."""
        noise, square = per_row(parameters["noise"]), self.own_noise(parameters, rows)
        own = self.likelihood.deg_free.detach().to(noise).mean().expand_as(noise)
        return per_row(parameters["deg_free"]) if "deg_free" in parameters else own, square

    def reweight(self, square: Tensor, noise: float) -> tuple[Tensor, Tensor]:
        nu = float(self.likelihood.deg_free.detach().mean())
        return (nu + 1) / (nu + square / noise), noise * (nu + 1) * torch.log1p(square / (nu * noise))

    @property
    def information(self) -> float:
        nu = float(self.likelihood.deg_free.detach().mean())
        return (nu + 1) / (nu + 3)

    def log_density(self, y: Tensor, f: Tensor, parameters: Parameters, rows: Rows) -> Tensor:
        nu, square = self._nu_and_square(parameters, rows)
        if "spread" not in rows:
            return log_student(y - f, nu, square)
        reach = ((y - f).square() / (nu * square)).log1p()
        weights, log_p = weight_nodes(nu, reach)
        variance = square / weights + rows["spread"]
        log_normal = -0.5 * (torch.log(2 * math.pi * variance) + (y - f) ** 2 / variance)
        return torch.logsumexp(log_normal + log_p, 0)

    def noise_variance(self, f: Tensor, parameters: Parameters, rows: Rows) -> Tensor:
        nu, square = self._nu_and_square(parameters, rows)
        return torch.where(nu > 2, square * nu / (nu - 2).clamp(min=1e-300), torch.inf).expand(f.shape)

    def variance(self, f: Tensor, parameters: Parameters, rows: Rows) -> Tensor:
        own = self.noise_variance(f, parameters, rows)
        return own + rows["spread"] if "spread" in rows else own

    def cdf(self, y: Tensor, f: Tensor, parameters: Parameters, rows: Rows) -> Tensor:
        nu, square = self._nu_and_square(parameters, rows)
        if "spread" not in rows:
            return StudentCDF.apply((y - f) / square.sqrt(), nu)
        weights, log_p = weight_nodes(nu, torch.zeros_like(nu))
        total = torch.zeros_like(f)
        for weight, p in zip(weights, log_p.exp(), strict=True):  # one by one: less memory
            variance = square / weight + rows["spread"] if "spread" in rows else square / weight
            total = total + p * torch.special.erfc((f - y) / (2 * variance).sqrt()) / 2
        return total

    def sample(self, f: Tensor, parameters: Parameters, rows: Rows, generator: torch.Generator) -> Tensor:
        nu, square = self._nu_and_square(parameters, rows)
        half = (nu / 2).expand(f.shape).contiguous()
        variance = square * half / torch._standard_gamma(half, generator=generator)
        if "spread" in rows:
            variance = variance + rows["spread"]
        return torch.normal(f, variance.sqrt(), generator=generator)


class StudentCDF(torch.autograd.Function):
    """The distribution function of a Student distribution, by SciPy, with its density as the gradient in z."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, nu: Tensor) -> Tensor:
        """
        :param z: Where, in units of the scale.
        :param nu: Degrees of freedom, which broadcast with `z`.
        """
        ctx.save_for_backward(z, nu)
        return torch.from_numpy(scipy.special.stdtr(nu.detach().cpu().numpy(), z.detach().cpu().numpy())).to(z)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """
        :param grads: The gradient of the result.
        """
        z, nu = ctx.saved_tensors
        return grads[0] * log_student(z, nu, torch.ones_like(nu)).exp(), None


def log_student(e: Tensor, nu: Tensor, square: Tensor) -> Tensor:
    r"""
    Log density of a Student distribution.

    :param e: Residuals.
    :param nu: Degrees of freedom.
    :param square: :math:`s^2`.
    """
    constant = torch.lgamma((nu + 1) / 2) - torch.lgamma(nu / 2) - 0.5 * torch.log(math.pi * nu * square)
    return constant - (nu + 1) / 2 * torch.log1p(e.square() / (nu * square))


def weight_nodes(nu: Tensor, reach: Tensor) -> tuple[Tensor, Tensor]:
    r"""
    Nodes of an integral over :math:`w \sim \text{Gamma}(\nu / 2, \nu / 2)`: the trapezoidal rule in log w, which
    converges exponentially.

    :param nu: Degrees of freedom.
    :param reach: How much smaller than usual log w may be where the integrand is large, broadcast with `nu`.
    :return: Nodes and the logarithms of their weights, `(K, ...)` each.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr.model.likelihoods.student import weight_nodes
        >>> nodes, log_weights = weight_nodes(torch.tensor([2.5, 8.0, 200.0]).double(), torch.tensor(0.0))
        >>> torch.allclose(log_weights.exp().sum(0), torch.ones(3).double())
        True
    """
    half = nu / 2
    width = 9 / half.sqrt()
    upper = torch.minimum(width, 5 - 0.5 * torch.log(half.clamp(max=1.0)))
    lower = -torch.maximum(width, 37 / half) - reach.detach()
    step = (upper - lower) / (NUM_NODES - 1)
    k = torch.arange(NUM_NODES, dtype=nu.dtype, device=nu.device).reshape(-1, *[1] * step.dim())
    x = lower + step * k
    log_density = half * (half.log() + x - x.exp()) - torch.lgamma(half)
    return x.exp(), log_density + step.log()


class DegreesOfFreedom:
    r"""
    How the degrees of freedom are drawn: in :math:`\log(\nu - l)`, with l their lower bound.

    :param is_free: Whether they are drawn at all.
    :param value: Their present value.
    :param lower: Lower bound.
    :param upper: Upper bound.
    :param log_prior: Log density of a registered prior; None for the default.
    """

    def __init__(
        self,
        is_free: bool,
        value: float,
        lower: float,
        upper: float,
        log_prior: Callable[[float], float] | None = None,
    ):
        self.is_free, self.value, self.lower, self.upper, self.log_prior = is_free, value, lower, upper, log_prior

    @classmethod
    def of(cls, likelihood: StudentTLikelihood) -> DegreesOfFreedom:
        """
        Those of a likelihood, with constraint and prior.

        :param likelihood: The likelihood.
        """
        constraint, log_prior = likelihood.raw_deg_free_constraint, None
        for name, module, prior, closure, setter in likelihood.named_priors():
            if setter is not None and name.endswith("deg_free_prior"):
                value = closure(module)

                def log_prior(nu: float, prior=prior, value=value) -> float:
                    return float(prior.log_prob(torch.full_like(value, nu)).sum())

        return cls(
            likelihood.raw_deg_free.requires_grad,
            float(likelihood.deg_free.detach().mean()),
            max(float(constraint.lower_bound.min()), 0.0),
            float(constraint.upper_bound.max()),
            log_prior,
        )

    def start(self) -> float:
        """Where the tails are freed: near Gaussian ones."""
        if not self.is_free:
            return self.value
        middle = (self.lower + self.upper) / 2
        return FIRST_DEG_FREE if self.lower < FIRST_DEG_FREE < self.upper else min(middle, self.lower + FIRST_DEG_FREE)

    def log_density(self, nu: float) -> float:
        r"""
        Log prior density of :math:`\log(\nu - l)`.

        :param nu: Degrees of freedom.
        """
        if not self.lower < nu < self.upper:
            return -math.inf
        above = nu - self.lower
        if self.log_prior is not None:
            return self.log_prior(nu) + math.log(above)
        return DEG_FREE_SHAPE * math.log(above) - DEG_FREE_RATE * above

    def candidates(self, nu: float, rng: np.random.Generator) -> list[float]:
        """
        The present value, and others within the constraint.

        :param nu: The present value.
        :param rng: Source of random numbers.
        """
        values = (self.lower + (nu - self.lower) * np.exp(steps(rng))).tolist()
        return [value for value in values if self.lower < value < self.upper]


class StudentAugmentation(Augmentation):
    """
    Row weights, drawn anew at each visit; noise and degrees of freedom.

    :param model: How the noise is drawn.
    :param deg_free: How the degrees of freedom are drawn.
    :param present: The likelihood object's noise, in the units of the targets.
    :param unit: Variance of the targets.
    """

    warmup_part = 0.8  # the tails are freed in its middle

    def __init__(self, model: NoiseModel, deg_free: DegreesOfFreedom, present: float, unit: float):
        self.model, self.deg_free, self.present, self.unit = model, deg_free, present, unit
        self.free = (*(("noise",) if model.is_free else ()), *(("deg_free",) if deg_free.is_free else ()))

    def start(self) -> Parameters:
        return _parameters(self.model.start(self.present / self.unit), math.inf)

    def scaled(self, parameters: Parameters) -> Parameters:
        return _parameters(float(parameters["noise"]) / self.unit, float(parameters["deg_free"]))

    def natural(self, parameters: Parameters) -> Parameters:
        return {**parameters, "noise": parameters["noise"] * self.unit}

    def noise(self, parameters: Parameters) -> float:
        return float(parameters["noise"])

    def before_sweep(
        self, parameters: Parameters, sum_rows: SumRows, rng: np.random.Generator, progress: float
    ) -> Parameters:
        if progress < GAUSSIAN_PART:
            return parameters
        noise, nu = float(parameters["noise"]), float(parameters["deg_free"])
        nu = self.deg_free.start() if math.isinf(nu) else nu
        if not self.deg_free.is_free:
            return _parameters(noise, nu)
        candidates = self.deg_free.candidates(nu, rng)

        def sums(batch: Batch, f: Tensor, first_row: int) -> Tensor:
            square = _square(batch, f) / noise
            logs = [torch.log1p(square / nu).sum() for nu in candidates]
            return torch.stack([*logs, square.new_tensor(float(len(square)))])

        *logs, count = sum_rows(sums, len(candidates) + 1).tolist()
        log_p = np.array([self._log_posterior(nu, total, count) for nu, total in zip(candidates, logs, strict=True)])
        return _parameters(noise, candidates[choose(log_p, rng)])

    def _log_posterior(self, nu: float, total: float, count: float) -> float:
        constant = math.lgamma((nu + 1) / 2) - math.lgamma(nu / 2) - 0.5 * math.log(nu)
        return count * constant - (nu + 1) / 2 * total + self.deg_free.log_density(nu)

    def working(self, parameters: Parameters, rng: np.random.Generator) -> Working:
        noise, nu = float(parameters["noise"]), float(parameters["deg_free"])
        if math.isinf(nu):
            return residuals
        key = int(rng.integers(2**62))

        def weighted(batch: Batch, f: Tensor, first_row: int) -> tuple[Tensor, Tensor]:
            gamma = row_gamma((nu + 1) / 2, batch.num_rows, first_row, key, f.device)
            return batch.y - f, 2 * gamma / (nu + _square(batch, f) / noise)

        return weighted

    def after_visit(self, parameters: Parameters, square: float, count: float, rng: np.random.Generator) -> Parameters:
        noise = self.model.draw(float(parameters["noise"]), square, count, rng)
        return _parameters(noise, float(parameters["deg_free"]))


def _square(batch: Batch, f: Tensor) -> Tensor:
    """Squared residuals, times the rows' own weights."""
    square = (batch.y - f).square()
    return square if batch.weight is None else square * batch.weight


def _parameters(noise: float, deg_free: float) -> Parameters:
    return {name: torch.tensor(v, dtype=torch.float64) for name, v in (("noise", noise), ("deg_free", deg_free))}
