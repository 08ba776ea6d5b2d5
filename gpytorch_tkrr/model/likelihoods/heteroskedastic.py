r"""Noise that depends on the inputs: :math:`y = f(x) + s\, e^{g(x) / 2} \epsilon`, with :math:`\epsilon` normal,
Student, or skewed.

g, the log variance up to a constant, is a second sum of products with a kernel of its own, drawn by the sampler that
draws f (:mod:`gpytorch_tkrr.model.likelihoods.noise_function`).

The variance has a floor, that of GPyTorch's Gaussian noise for standardised targets: a guard, which the draws of
:math:`s^2` take for part of the weights.

In the first half of the warm-up g is zero, and tails are Gaussian until three quarters of it are over: what f has not
explained yet must not be taken for noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from gpytorch.constraints import GreaterThan, Interval, Positive
from gpytorch.distributions import Distribution, MultivariateNormal, base_distributions
from gpytorch.kernels import Kernel
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood
from gpytorch.priors import Prior
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

from ...bases.basis import Basis, sum_products
from ...bases.domain import Domain
from ...data.training import Summary
from ...errors import InputError, NotFittedError
from ...features.box import choose_box
from ...features.separable import SeparableKernel, separate
from .augmented import Augmentation, Parameters
from .base import Observation, Rows
from .gaussian import GaussianObservation
from .noise_function import HeteroskedasticAugmentation, LogNoiseFunction, NoiseDraws, factors_of, noise_factor
from .registry import register
from .skewed import SkewedObservation
from .skewed_noise import WIDTHS, SkewedNoise
from .student import StudentObservation

#: Sines per input of g, and its rank.
NUM_BASIS, RANK = 10, 4

#: Prior variance that g starts with in the middle of the inputs, with the default kernel.
PRIOR_VARIANCE = 0.25


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
    :param noise_constraint: Bounds of :math:`s^2`, by default those of a StudentTLikelihood: none but zero.
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
        self.register_constraint("raw_noise", noise_constraint or Positive())
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
        kernel, separable, rank = self.likelihood.noise_kernel, self.likelihood.separate(), self.likelihood.rank
        return HeteroskedasticAugmentation(base, LogNoiseFunction(kernel, separable, rank, base), scale**2)

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
