r"""Noise that depends on the inputs: :math:`y = f(x) + s\, e^{g(x) / 2} \epsilon`, with :math:`\epsilon` normal,
Student, or skewed.

g, the log variance up to a constant, is a second sum of products with a kernel of its own. Given f, squared residuals
say :math:`\log(e_n^2 / s^2) = g(x_n) + \log \chi^2_1`, which is a regression given the components of a mixture
(:mod:`gpytorch_tkrr.model.augmentation.log_chi_squared`): g is drawn by the sampler that draws f. Given g, f is a
regression with row weights :math:`e^{-g}`.

The variance has a floor of :data:`FLOOR`, that of GPyTorch's Gaussian noise for standardised targets: a guard, which
the draws of :math:`s^2` take for part of the weights.

In the first half of the warm-up g is zero, and tails are Gaussian until three quarters of it are over: what f has not
explained yet must not be taken for noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gpytorch.constraints import GreaterThan, Interval
from gpytorch.distributions import Distribution, MultivariateNormal, base_distributions
from gpytorch.kernels import Kernel
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood
from gpytorch.priors import Prior
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

from ...bases.basis import Basis, sum_products
from ...bases.domain import Domain
from ...data.source import Batch, Working
from ...data.training import Summary
from ...errors import InputError, NotFittedError
from ...features.box import choose_box
from ...features.separable import SeparableKernel, separate
from ..augmentation.log_chi_squared import SMALLEST, draw_components
from ..augmentation.row_values import RowValues
from .base import Augmentation, Observation, Parameters, Rows, SecondFunction, SumRows, register
from .gaussian import DEFAULT_BOUND, GaussianObservation
from .skewed import SkewedObservation
from .skewed_noise import WIDTHS, SkewedNoise, shape_variance
from .student import StudentObservation

#: Sines per input of g, and its rank.
NUM_BASIS, RANK = 10, 4

#: Prior variance that g starts with in the middle of the inputs, with the default kernel.
PRIOR_VARIANCE = 0.25

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


class HeteroskedasticLikelihood(_OneDimensionalLikelihood):
    r"""
    Noise whose variance is a function of the inputs, :math:`s^2 e^{g(x)}`. For :class:`~gpytorch_tkrr.TKRR` with
    :func:`~gpytorch_tkrr.fit_gibbs`, which draws g together with f; g has its own kernel.

    ``model.predict(x).noise`` gives the standard deviation of the noise with its uncertainty, `model.log_noise` the
    function g itself, for main effects and Sobol indices. Outside the range of the training inputs g is constant.

    :param noise_kernel: The kernel of g, separable. By default :func:`~gpytorch_tkrr.anova_kernel` with a small
        variance, which shrinks g towards a constant.
    :param student: Whether the noise has Student tails, whose degrees of freedom are drawn too.
    :param skewed: Whether the noise is skewed, with tails of any shape, instead: see
        :mod:`gpytorch_tkrr.model.likelihoods.skewed`. f is then not the mean of y; ``model.predict(x).mean`` is.
    :param rank: Number of components of g.
    :param num_basis: Sines per input of g, or fewer for columns with fewer distinct values.
    :param noise_prior: Prior of :math:`s^2`; see :mod:`gpytorch_tkrr.sampling.hyperparameters` for the default.
    :param noise_constraint: Bounds of :math:`s^2`, by default those of a GaussianLikelihood.
    :param deg_free_prior: Prior of the degrees of freedom; see :mod:`gpytorch_tkrr.model.likelihoods.student`.
    :param deg_free_constraint: Their bounds, by default those of a StudentTLikelihood.

    Example:
        >>> import torch, gpytorch_tkrr as tkrr
        >>> x = torch.rand(400, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        >>> e = torch.randn(400, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        >>> y = torch.sin(6 * x[:, 0]) + (0.1 + x[:, 0]) * e  # sd from 0.1 to 1.1
        >>> model = tkrr.TKRR(x, y, tkrr.HeteroskedasticLikelihood(), rank=3, num_basis=8)
        >>> result = tkrr.fit_gibbs(model, num_draws=40, num_warmup=60, seed=0)
        >>> noise = model.predict(torch.tensor([[0.1], [0.9]])).noise
        >>> bool(noise.mean[1] > 2 * noise.mean[0]), noise.quantile(0.9).shape
        (True, torch.Size([2]))

    Reference: Goldberg, Williams & Bishop (1997), *Regression with input-dependent noise: a Gaussian process
    treatment*.
    """

    def __init__(
        self,
        noise_kernel: Kernel | None = None,
        student: bool = False,
        *,
        skewed: bool = False,
        rank: int = RANK,
        num_basis: int = NUM_BASIS,
        noise_prior: Prior | None = None,
        noise_constraint: Interval | None = None,
        deg_free_prior: Prior | None = None,
        deg_free_constraint: Interval | None = None,
    ) -> None:
        super().__init__()
        if rank < 1 or num_basis < 1:
            raise InputError(f"rank and num_basis must be at least 1; got {rank} and {num_basis}.")
        if not student and (deg_free_prior is not None or deg_free_constraint is not None):
            raise InputError("deg_free_prior and deg_free_constraint belong to Student tails: set student=True.")
        if student and skewed:
            raise InputError("Skewed noise has tails of its own: set student or skewed, not both.")
        self.skewed = bool(skewed)
        self.student, self.rank, self.max_num_basis = bool(student), rank, num_basis
        self.num_basis: tuple[int, ...] | None = None
        self.noise_kernel = noise_kernel
        self.noise_domain: Domain | None = None
        self._draws_cache: NoiseDraws | None = None
        self.raw_noise = torch.nn.Parameter(torch.zeros(1))
        if noise_prior is not None:
            self.register_prior("noise_prior", noise_prior, _noise, _set_noise)
        self.register_constraint("raw_noise", noise_constraint or GreaterThan(DEFAULT_BOUND))
        if student:
            self.raw_deg_free = torch.nn.Parameter(torch.zeros(1))
            if deg_free_prior is not None:
                self.register_prior("deg_free_prior", deg_free_prior, _deg_free, _set_deg_free)
            self.register_constraint("raw_deg_free", deg_free_constraint or GreaterThan(2))
            self.initialize(deg_free=7)
        if skewed:  # Gaussian until a fit
            self.raw_shares = torch.nn.Parameter(torch.tensor([0.0, *[-20.0] * (len(WIDTHS) - 1)]))
            self.skew = torch.nn.Parameter(torch.zeros(len(WIDTHS)))

    @property
    def noise(self) -> Tensor:
        """:math:`s^2`, `(1,)`: the variance where g is zero."""
        return self.raw_noise_constraint.transform(self.raw_noise)

    @noise.setter
    def noise(self, value: Tensor | float) -> None:
        self.initialize(raw_noise=self.raw_noise_constraint.inverse_transform(_as(value, self.raw_noise)))

    @property
    def deg_free(self) -> Tensor:
        """Degrees of freedom, `(1,)`, where there are Student tails."""
        return self.raw_deg_free_constraint.transform(self.raw_deg_free)

    @deg_free.setter
    def deg_free(self, value: Tensor | float) -> None:
        self.initialize(raw_deg_free=self.raw_deg_free_constraint.inverse_transform(_as(value, self.raw_deg_free)))

    @property
    def shares(self) -> Tensor:
        """Shares of the components of skewed noise, `(K,)`."""
        return torch.softmax(self.raw_shares, -1)

    @shares.setter
    def shares(self, value: Tensor) -> None:
        self.initialize(raw_shares=_as(value, self.raw_shares).clamp(min=1e-30).log())

    def separate(self) -> SeparableKernel:
        """The kernel of g, read mode by mode at its current hyperparameters."""
        if self.noise_kernel is None or self.noise_domain is None or self.num_basis is None:
            raise NotFittedError("The likelihood has seen no data: give it to a TKRR model with data, and fit that.")
        return separate(self.noise_kernel, self.noise_domain, self.num_basis, len(self.num_basis))

    def forward(self, function_samples: Tensor, *params: Any, **kwargs: Any) -> Distribution:
        """
        The distribution of y given f, with the posterior mean of the noise variance.

        :param function_samples: f, `(..., n)`.
        :param params: The inputs, `(n, D)`.
        """
        sd = self._variance(params).sqrt().to(function_samples)
        if self.skewed:
            shape = (self.shares.to(function_samples), self.skew.to(function_samples))
            return SkewedNoise(function_samples, sd.square(), *shape)
        if self.student:
            return base_distributions.StudentT(self.deg_free.to(function_samples), function_samples, sd)
        return base_distributions.Normal(function_samples, sd)

    def marginal(self, function_dist: MultivariateNormal, *params: Any, **kwargs: Any) -> Distribution:
        """
        The distribution of y: normal, or with other tails for samples of f, as that of a StudentTLikelihood.

        :param function_dist: That of f.
        :param params: The inputs, `(n, D)`.
        """
        if self.student or self.skewed:
            return super().marginal(function_dist, *params, **kwargs)
        noise = DiagLinearOperator(self._variance(params).to(function_dist.mean))
        return MultivariateNormal(function_dist.mean, function_dist.lazy_covariance_matrix + noise)

    def _variance(self, params: Sequence[Any]) -> Tensor:
        x = params[0] if params else None
        x = x[0] if isinstance(x, (list, tuple)) and x else x
        if not isinstance(x, Tensor):
            raise InputError(
                "The noise depends on the inputs: call likelihood(model(x), x), or ask model.predict(x) for the whole "
                "predictive distribution."
            )
        if self._draws_cache is None:
            raise NotFittedError("The likelihood knows no noise yet. Call gpytorch_tkrr.fit_gibbs(model) first.")
        return self._draws_cache.mean_variance(x.unsqueeze(-1) if x.dim() == 1 else x)

    def get_extra_state(self) -> dict[str, Any]:
        """Rank and numbers of functions of g, for `state_dict`."""
        return {"rank": self.rank, "num_basis": self.num_basis}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """
        Restore rank and numbers of functions.

        :param state: As returned by :meth:`get_extra_state`.
        """
        self.rank, self.num_basis = state["rank"], state["num_basis"]

    def choose(self, lower: Tensor, upper: Tensor, counts: Sequence[int], kernel: Kernel) -> None:
        """
        Choose kernel, box and numbers of functions of g where they are not known.

        :param lower: Smallest inputs `(D,)`.
        :param upper: Largest inputs `(D,)`.
        :param counts: How many distinct values each input has.
        :param kernel: The default kernel.
        """
        if self.noise_kernel is None:
            self.noise_kernel = kernel
        if self.noise_domain is None:
            self.noise_domain = choose_box(self.noise_kernel, lower, upper, 0.01 / len(counts))
        if self.num_basis is None:
            self.num_basis = tuple(min(self.max_num_basis, max(count, 2)) for count in counts)


def _as(value: Tensor | float, like: Tensor) -> Tensor:
    return value.to(like) if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64).to(like)


def _noise(module: HeteroskedasticLikelihood) -> Tensor:
    return module.noise


def _set_noise(module: HeteroskedasticLikelihood, value: Tensor) -> None:
    module.noise = value


def _deg_free(module: HeteroskedasticLikelihood) -> Tensor:
    return module.deg_free


def _set_deg_free(module: HeteroskedasticLikelihood, value: Tensor) -> None:
    module.deg_free = value


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


@register(HeteroskedasticLikelihood)
class HeteroskedasticObservation(Observation):
    """
    Targets whose noise depends on the inputs: a Gaussian or Student model with a factor for each row.

    :param likelihood: A HeteroskedasticLikelihood.
    """

    has_least_squares = False

    def __init__(self, likelihood: HeteroskedasticLikelihood):
        super().__init__(likelihood)
        kind = StudentObservation if likelihood.student else GaussianObservation
        self.base = SkewedObservation(likelihood) if likelihood.skewed else kind(likelihood)

    def noise(self) -> Tensor:
        return self.base.noise()

    def start_noise(self, variance: float) -> None:
        self.base.start_noise(variance)

    def noise_bound(self) -> float | None:
        return self.base.noise_bound()

    def set_parameters(self, draws: Parameters) -> None:
        self.base.set_parameters(draws)

    def prepare(self, summary: Summary, default_kernel: Callable[[float], Kernel]) -> None:
        kernel = self.likelihood.noise_kernel
        kernel = default_kernel(PRIOR_VARIANCE) if kernel is None else kernel
        self.likelihood.choose(summary.lower, summary.upper, summary.num_distinct(), kernel)

    def expect(self, state: Mapping[str, Tensor], default_kernel: Kernel) -> None:
        center = state.get("noise_domain.center")
        if center is not None and self.likelihood.noise_domain is None:
            self.likelihood.noise_domain = Domain(center, state["noise_domain.half_width"])
        if center is not None and self.likelihood.noise_kernel is None:
            self.likelihood.noise_kernel = default_kernel

    def augmentation(self, scale: float, offset: float) -> Augmentation:
        base = self.base.augmentation(scale, offset)
        return HeteroskedasticAugmentation(base, LogNoiseFunction(self.likelihood, base), scale**2)

    def adopt(self, parameters: Parameters, inputs: Callable[[Tensor], Tensor]) -> None:
        self.likelihood._draws_cache = NoiseDraws(self.bases(), parameters, inputs)

    def function_rows(self, x: Tensor, parameters: Parameters) -> dict[str, Tensor]:
        return {"factor": noise_factor(sum_products(self.bases(), factors_of(parameters), x), parameters)}

    def bases(self) -> list[Basis]:
        """The functions of each input that g is made of."""
        return [mode.basis for mode in self.likelihood.separate().modes]

    def log_density(self, y: Tensor, f: Tensor, parameters: Parameters, rows: Rows) -> Tensor:
        return self.base.log_density(y, f, parameters, rows)

    def mean(self, f: Tensor, parameters: Parameters, rows: Rows) -> Tensor:
        return self.base.mean(f, parameters, rows)

    def variance(self, f: Tensor, parameters: Parameters, rows: Rows) -> Tensor:
        return self.base.variance(f, parameters, rows)

    def noise_variance(self, f: Tensor, parameters: Parameters, rows: Rows) -> Tensor:
        return self.base.noise_variance(f, parameters, rows)

    def cdf(self, y: Tensor, f: Tensor, parameters: Parameters, rows: Rows) -> Tensor:
        return self.base.cdf(y, f, parameters, rows)

    def sample(self, f: Tensor, parameters: Parameters, rows: Rows, generator: torch.Generator) -> Tensor:
        return self.base.sample(f, parameters, rows, generator)


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


class LogNoiseFunction(SecondFunction):
    """
    g as the sampler sees it.

    :param likelihood: Knows its kernel.
    :param base: The model of the noise given g.
    """

    prefix, free_from = PREFIX, CONSTANT_PART

    def __init__(self, likelihood: HeteroskedasticLikelihood, base: Augmentation):
        self.base = base
        assert likelihood.noise_kernel is not None
        self.kernel, self.separable, self.rank = likelihood.noise_kernel, likelihood.separate(), likelihood.rank

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
