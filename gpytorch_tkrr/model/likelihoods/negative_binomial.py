r"""Counts: :math:`y_n \sim NB` with mean :math:`\mu_n = e_n \exp f(x_n)` and variance :math:`\mu_n + \mu_n^2 / r`.

With :math:`\psi = f + \log e - \log r` the density of a count is proportional to
:math:`e^{\psi y} / (1 + e^\psi)^{y + r}`. Given a Polya-Gamma variate :math:`\omega \sim PG(y + r, \psi)` this is a
normal density of :math:`\psi`, with precision :math:`\omega` and mean :math:`(y - r) / (2 \omega)` (Polson, Scott &
Windle 2013; Zhou, Li, Dunson & Carin 2012). The dispersion r is drawn with all :math:`\omega` integrated out.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.special
import torch
from gpytorch import likelihoods
from gpytorch.constraints import Interval
from gpytorch.likelihoods import Likelihood
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood
from gpytorch.priors import Prior
from torch import Tensor

from ...data.source import Batch, Working
from ...data.training import Summary
from ...errors import InputError
from ..augmentation.polya_gamma import polya_gamma
from .augmented import Augmentation, Parameters, SumRows
from .base import Observation, Rows, per_row
from .registry import refuse, register

#: Bounds of the dispersion where the user sets none, and how many times the mean count it may then be, if that is more
#: than 1. There the variance of an average row is 5 % above that of a Poisson distribution; above, chains move slowly.
BOUNDS, MAX_RATIO = (1e-2, 1e5), 20.0

#: Chains move the more slowly the larger the counts are beside the dispersion: in about half as many sweeps as one is
#: times the other. So the dispersion is held above the mean count over this until so much of the warm-up is over, and f
#: is at its level; and predictions are not to be trusted where the ratio has become much larger.
HELD_RATIO, HELD_PART, SLOW_RATIO = 30.0, 0.5, 100.0

#: The dispersion is drawn from so many candidates at once, with a distance of their logarithms between these.
NUM_CANDIDATES, STEPS = 9, (0.03, 1.0)

#: Nodes of the Gauss-Hermite rule for integrals over f.
NUM_NODES = 32


class NegativeBinomialLikelihood(_OneDimensionalLikelihood):
    r"""
    Counts of a negative binomial distribution, for :class:`~gpytorch_tkrr.TKRR` and
    :func:`~gpytorch_tkrr.fit_gibbs`:

    .. math:: E\, y_n = \mu_n = e_n \exp f(x_n), \qquad \operatorname{var} y_n = \mu_n + \mu_n^2 / r.

    The exposure :math:`e_n` is the time, the area or the number of persons that a count refers to. The dispersion r is
    drawn, too. The larger it is, the closer the counts are to a Poisson distribution, whose variance is smaller by the
    fraction :math:`\mu / r`. For counts that are nearly Poisson fix it at a large value:
    ``likelihood.dispersion = 100.0; likelihood.raw_dispersion.requires_grad_(False)``. The larger :math:`r / \mu`, the
    slower the chains, so do not take a larger value than you need, and use more sweeps.

    :param exposure: One exposure for each training row `(N,)`, or None for 1. With `data=` give them with the rows:
        ``data=(x, y, exposure)``. For new rows pass them to ``model.predict(x, exposure=...)``.
    :param dispersion_prior: Prior of r. By default :math:`1 / \sqrt r` is half-normal with scale 1.
    :param dispersion_constraint: Bounds of r. By default 0.01, and 20 times the mean count (at least 1), where an
        average row has a variance of 5 % above that of a Poisson distribution.

    Example:
        >>> import torch, gpytorch_tkrr as tkrr
        >>> x, hours = torch.rand(200, 2, dtype=torch.float64), torch.rand(200, dtype=torch.float64) + 0.5
        >>> y = torch.poisson(hours * torch.exp(1 + torch.sin(6 * x[:, 0])))
        >>> model = tkrr.TKRR(x, y, tkrr.NegativeBinomialLikelihood(hours), rank=2, num_basis=8)
        >>> result = tkrr.fit_gibbs(model, num_draws=20, num_warmup=20, seed=0)
        >>> prediction = model.predict(x[:3], exposure=10.0)  # counts in ten hours
        >>> prediction.mean.shape, bool((prediction.quantile(0.95) > prediction.mean).all())
        (torch.Size([3]), True)

    Reference: Polson, Scott & Windle (2013), *Bayesian inference for logistic models using Polya-Gamma latent
    variables*.
    """

    def __init__(
        self,
        exposure: Tensor | None = None,
        *,
        dispersion_prior: Prior | None = None,
        dispersion_constraint: Interval | None = None,
    ):
        super().__init__()
        self.exposure: Tensor | None
        self.register_buffer("exposure", None if exposure is None else _checked(exposure), persistent=False)
        self.raw_dispersion = torch.nn.Parameter(torch.zeros(1))
        if dispersion_prior is not None:
            self.register_prior("dispersion_prior", dispersion_prior, _dispersion, _set_dispersion)
        self.register_constraint(
            "raw_dispersion", Interval(*BOUNDS) if dispersion_constraint is None else dispersion_constraint
        )
        self.is_bounded_by_counts = dispersion_constraint is None
        if dispersion_constraint is None:
            self.initialize(dispersion=10.0)

    @property
    def dispersion(self) -> Tensor:
        """r, `(1,)`."""
        return self.raw_dispersion_constraint.transform(self.raw_dispersion)

    @dispersion.setter
    def dispersion(self, value: Tensor | float) -> None:
        value = torch.as_tensor(value).to(self.raw_dispersion)
        self.initialize(raw_dispersion=self.raw_dispersion_constraint.inverse_transform(value))

    def forward(
        self, function_samples: Tensor, *params: Any, exposure: Tensor | float | None = None, **kwargs: Any
    ) -> torch.distributions.NegativeBinomial:
        """
        The distribution of counts given f.

        :param function_samples: f, `(..., n)`.
        :param exposure: One for all rows, or one for each; by default that of the training rows, or 1.
        """
        known = self.row_exposure(function_samples.shape[-1], True, exposure)
        logits = function_samples + (known.log() - self.dispersion.log()).to(function_samples)
        return torch.distributions.NegativeBinomial(self.dispersion.to(function_samples), logits=logits)

    def row_exposure(self, num_rows: int, is_training: bool, given: Tensor | float | None = None) -> Tensor:
        """
        The exposures of rows, `(n,)` or `(1,)`, float64.

        :param num_rows: n.
        :param is_training: Whether these may be the training rows.
        :param given: What the user gives for them.
        """
        if given is not None:
            known = _checked(torch.as_tensor(given).to(self.raw_dispersion.device))
            if len(known) not in (1, num_rows):
                raise InputError(f"exposure must hold one value, or one for each of {num_rows} rows; got {len(known)}.")
            return known
        if self.exposure is None:
            return torch.ones(1, dtype=torch.float64, device=self.raw_dispersion.device)
        if not is_training or len(self.exposure) != num_rows:
            raise InputError(
                f"The likelihood knows the exposures of its {len(self.exposure)} training rows, not those of the "
                f"{num_rows} rows that are asked for. Pass exposure=, one value or one for each row."
            )
        return self.exposure.double()


def _dispersion(likelihood: NegativeBinomialLikelihood) -> Tensor:
    return likelihood.dispersion


def _set_dispersion(likelihood: NegativeBinomialLikelihood, value: Tensor) -> None:
    likelihood.dispersion = value


def _checked(exposure: Tensor) -> Tensor:
    values = torch.as_tensor(exposure).detach().double().reshape(-1)
    if not bool((torch.isfinite(values) & (values > 0)).all()):
        raise InputError("Exposures must be positive and finite. Drop rows without exposure: they say nothing.")
    return values


_ADVICE = "Its mean is softplus(f), not exp(f): use gpytorch_tkrr.NegativeBinomialLikelihood(), with exp(f)"
refuse(likelihoods.NegativeBinomialLikelihood, f"{_ADVICE}.")
refuse(likelihoods.PoissonLikelihood, f"{_ADVICE}; with a large dispersion it is near to Poisson.")


@register(NegativeBinomialLikelihood)
class NegativeBinomialObservation(Observation):
    """
    Counts. What batches hold as row weights are exposures.

    :param likelihood: A NegativeBinomialLikelihood.
    """

    is_discrete = True
    has_link = True
    has_least_squares = False
    row_part = "exposure"

    def check(self) -> None:
        if self.likelihood.dispersion.numel() != 1:
            raise InputError("A CP-weight model takes one dispersion.")

    def encode(self, y: Tensor) -> Tensor:
        y = y.double()
        bad = torch.isfinite(y) & ((y < 0) | (y != y.round()))
        if bad.any():
            raise InputError(
                f"With a NegativeBinomialLikelihood targets must be counts 0, 1, 2, ...; got {float(y[bad][0]):g}. "
                "Rates are counts with an exposure: give the counts as targets, and their exposures to the likelihood."
            )
        return y

    def start_mean(self, summary: Summary) -> float:
        exposure = summary.sample_weight  # the mean of the targets is weighted by it
        rate = max(summary.mean, 0.1 / summary.num_rows) * float(exposure.sum() / exposure.square().sum())
        return math.log(rate)

    @property
    def has_own_rows(self) -> bool:
        return self.likelihood.exposure is not None

    def row_weights(self, num_rows: int) -> Tensor | None:
        exposure = self.likelihood.exposure
        if exposure is None:
            return None
        if exposure.shape != (num_rows,):
            raise InputError(
                f"The likelihood has {exposure.numel()} exposures for {num_rows} training rows. Give the model a "
                "likelihood with one for each row."
            )
        return exposure.double()

    def of_rows(self, index: Tensor) -> Likelihood:
        likelihood = copy.deepcopy(self.likelihood)
        likelihood.exposure = None if likelihood.exposure is None else likelihood.exposure[index]
        return likelihood

    def augmentation(self, scale: float, offset: float) -> Augmentation:
        return NegativeBinomialAugmentation(self.likelihood, offset)

    def set_parameters(self, draws: Parameters) -> None:
        if "dispersion" in draws:
            self.likelihood.initialize(dispersion=float(draws["dispersion"].mean()))

    def rows(self, num_rows: int, is_training: bool, **given: Tensor | float) -> dict[str, Tensor]:
        exposure = given.pop("exposure", None)
        super().rows(num_rows, is_training, **given)
        return {"exposure": self.likelihood.row_exposure(num_rows, is_training, exposure).expand(num_rows)}

    # The distribution of y. Where f has a spread, integrals over it are sums over nodes, the last dimension.

    def log_density(self, y: Tensor, f: Tensor, parameters: Parameters, rows: Rows) -> Tensor:
        log_mean, weights = _nodes(f, rows)
        r = per_row(per_row(parameters["dispersion"]))
        return torch.logsumexp(log_probability(y.unsqueeze(-1), log_mean, r) + weights.log(), -1)

    def mean(self, f: Tensor, parameters: Parameters, rows: Rows) -> Tensor:
        return torch.exp(f + rows["exposure"].log() + _spread(f, rows) / 2)

    def variance(self, f: Tensor, parameters: Parameters, rows: Rows) -> Tensor:
        mean, growth = self.mean(f, parameters, rows), torch.exp(_spread(f, rows))  # E mu^2 = growth mean^2
        return mean + mean.square() * (growth - 1 + growth / per_row(parameters["dispersion"]))

    def cdf(self, y: Tensor, f: Tensor, parameters: Parameters, rows: Rows) -> Tensor:
        log_mean, weights = _nodes(f, rows)
        values = CountCDF.apply(torch.floor(y).unsqueeze(-1), log_mean, per_row(per_row(parameters["dispersion"])))
        return (values * weights).sum(-1)

    def sample(self, f: Tensor, parameters: Parameters, rows: Rows, generator: torch.Generator) -> Tensor:
        noise = torch.randn(f.shape, dtype=f.dtype, device=f.device, generator=generator)
        mean = torch.exp(f + rows["exposure"].log() + _spread(f, rows).sqrt() * noise)
        r = per_row(parameters["dispersion"]).expand(f.shape).contiguous()
        return torch.poisson(mean * torch._standard_gamma(r, generator=generator) / r, generator=generator)


class NegativeBinomialAugmentation(Augmentation):
    """
    Polya-Gamma variates, drawn anew at each visit, and the dispersion, before each sweep.

    :param likelihood: The likelihood.
    :param offset: The mean of f.
    """

    def __init__(self, likelihood: NegativeBinomialLikelihood, offset: float):
        constraint = likelihood.raw_dispersion_constraint
        self.offset, self.present = offset, float(likelihood.dispersion.detach())
        self.lower, self.upper = float(constraint.lower_bound), float(constraint.upper_bound)
        self.free = ("dispersion",) if likelihood.raw_dispersion.requires_grad else ()
        self.log_prior = _log_prior(likelihood)
        self.is_bounded_by_counts = likelihood.is_bounded_by_counts

    def start(self) -> Parameters:
        # Much variance at first: components that explain single rows are hard to leave.
        start = min(max(1.0, 1.01 * self.lower), 0.99 * self.upper) if self.free else self.present
        return {"dispersion": torch.tensor(start, dtype=torch.float64)}

    def before_sweep(
        self, parameters: Parameters, sum_rows: SumRows, rng: np.random.Generator, progress: float
    ) -> Parameters:
        if not self.free:
            return parameters
        # A window of candidates that holds the present one at a random place: any of them would have had the same
        # window with the same probability, so that one is drawn by the density of each (Tjelmeland 2004).
        step = math.exp(rng.uniform(*np.log(STEPS)))
        place = np.arange(NUM_CANDIDATES) - int(rng.integers(NUM_CANDIDATES))
        candidates = parameters["dispersion"] * torch.from_numpy(np.exp(step * place))

        def log_densities(batch: Batch, f: Tensor, first_row: int) -> Tensor:
            sums = log_probability(batch.y, self._log_mean(batch, f), per_row(candidates.to(f.device))).sum(-1)
            return torch.cat([sums, torch.stack([batch.y.sum(), torch.ones_like(batch.y).sum()])])

        *log_likelihood, total, count = sum_rows(log_densities, NUM_CANDIDATES + 2).tolist()
        lower, upper = self.lower, self.upper
        if self.is_bounded_by_counts:
            upper = min(upper, max(MAX_RATIO * total / count, 1.0))
            if progress < HELD_PART:
                lower = min(max(lower, total / count / HELD_RATIO), upper)
        if parameters["dispersion"] < lower:
            return {"dispersion": torch.tensor(lower, dtype=torch.float64)}
        allowed = (candidates >= lower) & (candidates <= upper)
        # The density of log r, the coordinate in which candidates are spread evenly.
        log_target = torch.tensor(log_likelihood, dtype=torch.float64) + self.log_prior(candidates) + candidates.log()
        p = torch.softmax(torch.where(allowed, log_target, -math.inf), 0)
        chosen = int(torch.searchsorted(p.cumsum(0), rng.random() * float(p.sum())).clamp(max=NUM_CANDIDATES - 1))
        return {"dispersion": candidates[chosen]}

    def working(self, parameters: Parameters, rng: np.random.Generator) -> Working:
        key, r = int(rng.integers(2**62)), float(parameters["dispersion"])

        def latent(batch: Batch, f: Tensor, first_row: int) -> tuple[Tensor, Tensor]:
            psi = self._log_mean(batch, f) - math.log(r)
            omega = polya_gamma(batch.y + r, psi, first_row, key)
            # The exposure is no weight: the sums will multiply by it.
            return (batch.y - r) / (2 * omega) - psi, omega if batch.weight is None else omega / batch.weight

        return latent

    def slowness(self, draws: Parameters, mean: float) -> str | None:
        ratio = mean / float(draws["dispersion"].mean())
        if ratio <= SLOW_RATIO:
            return None
        return (
            f"The mean count is {mean:.3g}, {ratio:.3g} times the dispersion. Above {SLOW_RATIO:g} times the chain "
            "hardly moves, and predictions may be far off. Model the logarithm of counts as large as these, with a "
            "GaussianLikelihood or a HeteroskedasticLikelihood."
        )

    def _log_mean(self, batch: Batch, f: Tensor) -> Tensor:
        return f + self.offset if batch.weight is None else f + self.offset + batch.weight.log()


class CountCDF(torch.autograd.Function):
    """The distribution function of counts, by SciPy, with its gradient in the logarithm of their mean."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, log_mean: Tensor, dispersion: Tensor) -> Tensor:
        """
        :param y: Whole numbers.
        :param log_mean: Logarithm of the mean.
        :param dispersion: r.
        """
        ctx.save_for_backward(y, log_mean, dispersion)
        above, failure = y + 1, torch.sigmoid(dispersion.log() - log_mean)  # r / (r + mu)
        arrays = (each.detach().cpu().numpy() for each in (dispersion, above.clamp(min=1.0), failure))
        values = torch.from_numpy(scipy.special.betainc(*arrays)).to(log_mean)
        return torch.where(above > 0, values, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        """
        :param grads: The gradient of the result.
        """
        y, log_mean, dispersion = ctx.saved_tensors
        above = (y + 1).clamp(min=0.0)
        slope = -above * log_probability(above, log_mean, dispersion).exp()
        return None, (grads[0] * slope).sum_to_size(log_mean.shape), None


def log_probability(y: Tensor, log_mean: Tensor, dispersion: Tensor) -> Tensor:
    """
    Log probabilities of counts.

    :param y: Counts.
    :param log_mean: Logarithm of their mean.
    :param dispersion: r.

    Example:
        >>> import scipy.stats, torch
        >>> from gpytorch_tkrr.model.likelihoods.negative_binomial import log_probability
        >>> y, mean, r = torch.tensor([0.0, 3.0]).double(), torch.tensor(2.0).double(), torch.tensor(1.5).double()
        >>> expected = scipy.stats.nbinom(1.5, 1.5 / 3.5).logpmf([0, 3])
        >>> torch.allclose(log_probability(y, mean.log(), r), torch.from_numpy(expected))
        True
    """
    psi = log_mean - dispersion.log()
    binomial = torch.lgamma(y + dispersion) - torch.lgamma(dispersion) - torch.lgamma(y + 1)
    return binomial + y * psi - (y + dispersion) * torch.nn.functional.softplus(psi)


def _log_prior(likelihood: NegativeBinomialLikelihood) -> Callable[[Tensor], Tensor]:
    """Log density of the dispersion."""
    prior = getattr(likelihood, "dispersion_prior", None)
    if prior is None:  # 1 / sqrt(r) is half-normal
        return lambda r: -1.5 * r.log() - 0.5 / r
    return lambda r: prior.log_prob(r.to(likelihood.raw_dispersion)).to(r)


def _spread(f: Tensor, rows: Rows) -> Tensor:
    return rows["spread"] if "spread" in rows else torch.zeros((), dtype=f.dtype, device=f.device)


def _nodes(f: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Logarithms of means `(*P, n, K)`, and weights `(K,)` of the nodes; one node where f has no spread."""
    log_mean = (f + rows["exposure"].log()).unsqueeze(-1)
    if "spread" not in rows:
        return log_mean, torch.ones(1, dtype=f.dtype, device=f.device)
    points, weights = (torch.from_numpy(each).to(f) for each in np.polynomial.hermite_e.hermegauss(NUM_NODES))
    return log_mean + points * rows["spread"].sqrt().unsqueeze(-1), weights / weights.sum()
