r"""Targets that are known up to a limit: :math:`y = f(x) + \epsilon` below, above or at what was recorded.

Given f, a target beyond its limit is a truncated normal number, drawn along as in the probit model; given all targets,
the model is a regression with Gaussian noise.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gpytorch.constraints import Positive
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from gpytorch.utils.quadrature import GaussHermiteQuadrature1D
from torch import Tensor

from ...data.source import Batch, Working
from ...data.training import Summary
from ...errors import ConstraintWarning, InputError
from .augmented import Augmentation, Parameters
from .base import Rows
from .gaussian import GaussianAugmentation, GaussianObservation
from .noise import NoiseModel
from .probit import truncated_noise
from .registry import register

#: Targets this close to a limit are at the limit: relative to the limit itself, which may be that of a float32, and
#: relative to the scale of the targets, by which these are divided.
AT_LIMIT, ROUNDING = 1e-6, 1e-9


class CensoredLikelihood(GaussianLikelihood):
    """
    Gaussian noise, and targets of which only a bound may be known. For :class:`~gpytorch_tkrr.TKRR` with
    :func:`~gpytorch_tkrr.fit_gibbs`, and for GPyTorch's ApproximateGP.

    Give limits of an instrument that hold for all rows, or a flag for each training row. Predictions are those of the
    uncensored y. Log densities are those of the recorded value: for a target at its limit, the log probability of lying
    beyond it.

    :param low: Targets at or below this are known to be at most this; None for no such limit.
    :param high: Targets at or above this are known to be at least this; None for no such limit.
    :param censoring: A flag for each training row `(N,)`, in their order: -1 where y is at most the recorded target
        (left-censored), +1 where it is at least that (right-censored), 0 where it was measured.
    :param kwargs: `noise_prior`, `noise_constraint` of a GaussianLikelihood; by default no bound but zero.

    Example:
        >>> import torch, gpytorch_tkrr as tkrr
        >>> x = torch.rand(100, 1)
        >>> y = (4 * x[:, 0] + 0.1 * torch.randn(100)).clamp(max=2.0)  # the scale ends at 2
        >>> model = tkrr.TKRR(x, y, tkrr.CensoredLikelihood(high=2.0), rank=2, num_basis=6)
        >>> result = tkrr.fit_gibbs(model, num_draws=20, num_warmup=20, seed=0)
        >>> bool(model.predict(torch.tensor([[0.7]])).mean > 2.1)
        True
    """

    def __init__(
        self, low: float | None = None, high: float | None = None, censoring: Tensor | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**{"noise_constraint": Positive(), **kwargs})
        self.low = -math.inf if low is None else float(low)
        self.high = math.inf if high is None else float(high)
        if not self.low < self.high:
            raise InputError(f"low must be smaller than high; got {low} and {high}.")
        self.register_buffer("censoring", None if censoring is None else as_flags(censoring), persistent=False)

    def flags(self, y: Tensor, given: Tensor | None = None, slack: float = 0.0) -> Tensor:
        """
        -1, 0 or +1 for each target.

        :param y: Targets `(..., n)`.
        :param given: Flags of the rows, which broadcast; None for zeros.
        :param slack: How far from a limit a target may be to be at it.
        """
        high = self.high - slack - AT_LIMIT * abs(self.high) if self.high < math.inf else math.inf
        low = self.low + slack + AT_LIMIT * abs(self.low) if self.low > -math.inf else -math.inf
        at_limit = (y >= high).to(y) - (y <= low).to(y)
        return at_limit if given is None else torch.where(given == 0, at_limit, given.to(y))

    def expected_log_prob(
        self, target: Tensor, input: MultivariateNormal, *params: Any, censoring: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """
        Mean of the log density under a Gaussian f, by quadrature.

        :param target: Targets.
        :param input: The distribution of f.
        :param censoring: Flags of these rows.
        """
        flags = self.flags(target, censoring)
        return GaussHermiteQuadrature1D().to(target)(
            lambda f: log_density(target, f, self.noise, flags),
            torch.distributions.Normal(input.mean, input.variance.sqrt()),
        )

    def log_marginal(
        self,
        observations: Tensor,
        function_dist: MultivariateNormal,
        *params: Any,
        censoring: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """
        Log density with a Gaussian f integrated out.

        :param observations: Targets.
        :param function_dist: The distribution of f.
        :param censoring: Flags of these rows.
        """
        variance = self.noise + function_dist.variance
        return log_density(observations, function_dist.mean, variance, self.flags(observations, censoring))


def log_density(y: Tensor, f: Tensor, variance: Tensor, flags: Tensor) -> Tensor:
    """
    Log density of a measured target, log probability of one beyond its limit.

    :param y: Recorded targets.
    :param f: Their means.
    :param variance: Their variance.
    :param flags: -1, 0 or +1.
    """
    z = (y - f) / variance.sqrt()
    measured = -0.5 * (torch.log(2 * math.pi * variance) + z**2)
    return torch.where(flags == 0, measured, torch.special.log_ndtr(-torch.where(flags < 0, -1.0, 1.0).to(z) * z))


def as_flags(censoring: Tensor) -> Tensor:
    """
    Flags, checked, as integers.

    :param censoring: -1, 0 and +1.
    """
    flags = torch.as_tensor(censoring).detach().reshape(-1)
    if not bool(((flags == 0) | (flags.abs() == 1)).all()):
        raise InputError(f"censoring must hold -1, 0 and +1; got {flags.unique()[:5].tolist()}.")
    return flags.to(torch.int8)


@register(CensoredLikelihood)
class CensoredObservation(GaussianObservation):
    """
    Targets with Gaussian noise, some beyond what was recorded.

    :param likelihood: A CensoredLikelihood.
    """

    has_least_squares = False

    @property
    def has_limits(self) -> bool:
        return self.likelihood.low > -math.inf or self.likelihood.high < math.inf

    @property
    def shows_range(self) -> bool:
        return False

    def check_rows(self, num_rows: int) -> None:
        flags = self.likelihood.censoring
        if flags is not None and len(flags) != num_rows:
            raise InputError(
                f"The likelihood has {len(flags)} flags (censoring=) for {num_rows} training rows. Give one for each, "
                "in the order of the data (of all processes)."
            )

    def prepare(self, summary: Summary, default_kernel: Callable[[float], Kernel]) -> None:
        super().prepare(summary, default_kernel)
        given = self.likelihood.censoring
        if given is None:
            ends = self.likelihood.flags(torch.tensor(summary.ends, dtype=torch.float64))
            all_beyond = abs(float(ends.sum())) == 2
        else:
            all_beyond = bool((given != 0).all())
        is_free = self.likelihood.noise_covar.raw_noise.requires_grad
        if all_beyond and is_free and not list(self.likelihood.named_priors()):
            warnings.warn(
                f"All {summary.num_rows} targets are censored: they say neither how far beyond their limits the true "
                "values lie nor how large the noise is, so that priors decide. Give rows that were measured, too, or "
                "what you know of the noise: noise_prior=, or a fixed noise.",
                ConstraintWarning,
                stacklevel=6,
            )

    def of_rows(self, index: Tensor) -> Likelihood:
        if self.likelihood.censoring is None:
            return self.likelihood
        likelihood = CensoredLikelihood(self.likelihood.low, self.likelihood.high, self.likelihood.censoring[index])
        likelihood.noise_covar = self.likelihood.noise_covar
        return likelihood

    def augmentation(self, scale: float, offset: float) -> Augmentation:
        return CensoredAugmentation(
            NoiseModel.of(self.likelihood, scale**2), float(self.noise().detach()), scale, offset, self.likelihood
        )

    def rows(self, num_rows: int, is_training: bool, **given: Tensor | float) -> dict[str, Tensor]:
        censoring = given.pop("censoring", None)
        super().rows(num_rows, is_training, **given)
        own = self.likelihood.censoring
        if censoring is None:
            return {"censoring": own} if is_training and own is not None and len(own) == num_rows else {}
        flags = as_flags(torch.as_tensor(censoring))
        if len(flags) not in (1, num_rows):
            raise InputError(f"censoring must hold one flag, or one for each of {num_rows} rows; got {len(flags)}.")
        return {"censoring": flags.expand(num_rows)}

    def log_density(self, y: Tensor, f: Tensor, parameters: Parameters, rows: Rows) -> Tensor:
        flags = self.likelihood.flags(y, rows.get("censoring"))
        return log_density(y, f, self.total_noise(parameters, rows), flags)


class CensoredAugmentation(GaussianAugmentation):
    """
    Targets beyond their limits, drawn anew at each visit.

    :param model: How the noise is drawn.
    :param present: The likelihood object's noise variance, in the units of the targets.
    :param scale: Standard deviation of the targets.
    :param offset: The mean that was taken from the targets, in units of `scale`, where there are limits.
    :param likelihood: Knows limits and flags.
    """

    is_gaussian = False

    def __init__(self, model: NoiseModel, present: float, scale: float, offset: float, likelihood: CensoredLikelihood):
        super().__init__(model, present, scale**2)
        self.scale, self.offset, self.likelihood = scale, offset, likelihood

    def working(self, parameters: Parameters, rng: np.random.Generator) -> Working:
        key, noise = int(rng.integers(2**62)), float(parameters["noise"])

        def completed(batch: Batch, f: Tensor, first_row: int) -> tuple[Tensor, None]:
            flags = self.likelihood.flags(
                (batch.y + self.offset) * self.scale,
                self._given(batch, first_row),
                ROUNDING * self.scale,
            )
            e = batch.y - f
            sd = math.sqrt(noise) if batch.weight is None else (noise / batch.weight).sqrt()
            beyond = sd * truncated_noise(torch.where(flags < 0, -1.0, 1.0).to(e), -e / sd, first_row, key)
            return torch.where(flags == 0, e, beyond), None

        return completed

    def _given(self, batch: Batch, first_row: int) -> Tensor | None:
        """Flags of the rows of a batch."""
        flags = self.likelihood.censoring
        if flags is None:
            return None
        return flags[first_row : first_row + batch.num_rows] if batch.numbers is None else flags[batch.numbers]
