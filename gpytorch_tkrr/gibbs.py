"""Fitting the CP-weight model by Gibbs sampling."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gpytorch.likelihoods import GaussianLikelihood
from torch import Tensor

from .als import near_constant
from .diagnostics import effective_sample_size, split_rhat
from .ensemble import DrawsPosterior
from .errors import ConvergenceWarning, InputError
from .hyperparameters import Hyperparameters
from .progress import progress_bar
from .sampler import GibbsSampler, GibbsState, NoiseModel
from .source import TrainingData
from .sums import Design

if TYPE_CHECKING:
    from .model import TKRR

#: Chains are said to disagree where a split R-hat is larger than this.
MAX_RHAT = 1.1

#: Training rows whose function values are watched for convergence.
NUM_WATCHED = 50

_RESUME_VERSION = 1


@dataclass
class GibbsResult:
    """
    What a fit by Gibbs sampling did.

    :param model: The fitted model.
    :param posterior: All draws.
    :param rhat: Split R-hat of the noise, of each hyperparameter, and the largest over watched function values.
    :param ess: Effective sample sizes of the same.
    :param effective_rank: Mean number of components that carry more than a thousandth of f's variance.
    :param message: What was done, and what to try next.
    """

    model: TKRR
    posterior: DrawsPosterior
    rhat: dict[str, float]
    ess: dict[str, float]
    effective_rank: float
    message: str

    def summary(self) -> str:
        """A table: mean, standard deviation, 95 % interval, R-hat and effective sample size of each quantity."""
        rows = [("", "mean", "sd", "2.5 %", "97.5 %", "R-hat", "ESS")]
        for name, values in {"noise": self.posterior.noise, **self.posterior.hyperparameters}.items():
            low, high = torch.quantile(values, torch.tensor([0.025, 0.975], dtype=values.dtype, device=values.device))
            numbers = (values.mean(), values.std(), low, high)
            tail = (f"{self.rhat[name]:.3f}", f"{self.ess[name]:.0f}")
            rows.append((name, *(f"{float(number):.4g}" for number in numbers), *tail))
        rows.append(("f (worst watched value)", "", "", "", "", f"{self.rhat['f']:.3f}", f"{self.ess['f']:.0f}"))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
            for row in rows
        ]
        return "\n".join([*lines, f"effective rank {self.effective_rank:.1f}", self.message])

    def log_predictive_density(self, x: Tensor, y: Tensor) -> Tensor:
        r"""
        :math:`\log \frac1S \sum_s N(y; f_s(x), s^2_s)`, the log density of the predictive mixture.

        :param x: Inputs `(n, D)`.
        :param y: Targets `(n,)`.
        :return: `(n,)`.
        """
        with torch.no_grad():
            f = self.model.draws(x).double()  # (S, n)
            noise = self.posterior.noise.unsqueeze(-1)
            log_density = -0.5 * (torch.log(2 * math.pi * noise) + (y.double() - f) ** 2 / noise)
            return torch.logsumexp(log_density, 0) - math.log(f.shape[0])


@torch.no_grad()
def fit_gibbs(
    model: TKRR,
    *,
    data: Any = None,
    num_draws: int = 100,
    num_warmup: int = 100,
    num_chains: int = 1,
    seed: int | None = None,
    progress: bool = False,
    memory: int = 2 << 30,
) -> GibbsResult:
    r"""
    Draw the CP weights, the noise and all free hyperparameters from their posterior by Gibbs sampling.

    One sweep visits every factor once and costs as much as half a sweep of :func:`~gpytorch_tkrr.fit_als`. Kernel and
    likelihood are left at the posterior mean. Hyperparameters with ``requires_grad=False`` stay fixed; priors and
    constraints registered on the kernel and the likelihood are honoured. See :mod:`gpytorch_tkrr.hyperparameters` for the
    weak defaults.

    :param model: The model; its posterior is replaced.
    :param data: `(x, y)`, or an iterable of such batches that starts afresh each time; by default the training data of
        the model.
    :param num_draws: Draws kept per chain, one per sweep.
    :param num_warmup: Sweeps before them, during which proposals are tuned.
    :param num_chains: Independent chains.
    :param seed: Seed; the same seed gives the same draws.
    :param progress: Whether to show a progress bar (needs tqdm).
    :param memory: Bytes that may be used beyond the data to keep products over modes; what does not fit is recomputed.

    Example:
        >>> import torch, gpytorch
        >>> import gpytorch_tkrr as tkrr
        >>> x = torch.rand(100, 2)
        >>> y = torch.sin(6 * x[:, 0]) * x[:, 1]
        >>> likelihood = gpytorch.likelihoods.GaussianLikelihood()
        >>> model = tkrr.TKRR(x, y, likelihood, rank=4, num_basis=10)
        >>> result = tkrr.fit_gibbs(model, num_draws=20, num_warmup=20, seed=0)
        >>> likelihood(model.eval()(x)).mean.shape, model.draws(x).shape
        (torch.Size([100]), torch.Size([20, 100]))
    """
    if not isinstance(model.likelihood, GaussianLikelihood):
        raise InputError(
            f"fit_gibbs takes a model with a GaussianLikelihood; got a {type(model.likelihood).__name__}. Use fit_als."
        )
    if num_draws < 4 or num_warmup < 0 or num_chains < 1:
        raise ValueError(
            f"num_draws must be at least 4, num_warmup at least 0 and num_chains at least 1; got {num_draws}, {num_warmup} "
            f"and {num_chains}."
        )
    training = model.training_data(data)
    fit = _Fit(model, training, memory)
    seeds = np.random.SeedSequence(seed).spawn(num_chains)
    bar = progress_bar(progress, num_chains * (num_warmup + num_draws), "Gibbs", "sweep")
    try:
        draws = [
            draw
            for chain in range(num_chains)
            for draw in fit.chain(chain, np.random.default_rng(seeds[chain]), num_warmup, num_draws, bar)
        ]
    finally:
        bar.close()
    return fit.finish(draws, num_chains)


@dataclass
class _Draw:
    chain: int
    factors: list[Tensor]
    noise: float
    hyperparameters: Tensor
    energies: Tensor


class _Fit:
    """What all chains of a fit have in common."""

    def __init__(self, model: TKRR, training: TrainingData, memory: int):
        self.model, self.training = model, training
        self.separable = model.separate()
        summary = training.summary
        with torch.enable_grad():
            half_range = (summary.upper - summary.lower) / 2
            self.hyperparameters = Hyperparameters(model.covar_module, self.separable, half_range)
        self.design = Design(training, [mode.basis for mode in self.separable.modes], memory=memory)
        self.marginals = self.design.marginals()
        fraction = torch.linspace(0, 1, 33, dtype=torch.float64, device=summary.lower.device)
        self.grids = [a + fraction * (b - a) for a, b in zip(summary.lower, summary.upper, strict=True)]
        self.start = self.hyperparameters.get(range(len(self.hyperparameters.slots)))
        self.noise_model = _noise_model(model.likelihood, training.scale**2)

    def chain(
        self, number: int, rng: np.random.Generator, num_warmup: int, num_draws: int, bar: Any
    ) -> Iterator[_Draw]:
        """The draws of one chain."""
        hyper = self.hyperparameters
        hyper.set(range(len(hyper.slots)), self.start)
        sampler = GibbsSampler(
            self.design, self.separable, hyper, self.training.scale**2, self.noise_model, self.grids, rng,
            rank=self.model.rank,
        )
        state = self._initial_state(rng)
        self.design.reset()
        num_dims = len(self.separable.modes)
        for sweep in range(num_warmup + num_draws):
            order = range(num_dims) if sweep % 2 == 0 else range(num_dims - 1, -1, -1)
            sampler.sweep(state, order, adapt=min(0.5, 5 / (sweep + 5)) if sweep < num_warmup else 0.0)
            bar.update(f"noise {state.noise * self.training.scale**2:.4g}")
            if sweep >= num_warmup:
                assert sampler.energies is not None
                yield _Draw(number, list(state.factors), state.noise, hyper.values(), sampler.energies)

    def _initial_state(self, rng: np.random.Generator) -> GibbsState:
        """Components near the constant function, of random size."""
        rank, modes = self.model.rank, self.separable.modes
        generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
        factors = []
        for mode, marginal in zip(modes, self.marginals, strict=True):
            variances = mode.variances()
            factors.append(near_constant(*marginal, variances, rank, generator) * variances.sqrt())
        size = torch.from_numpy(rng.standard_normal((rank, 1))).to(factors[0].device)
        factors[0] = factors[0] * size / math.sqrt(rank)
        precisions = torch.full((rank,), rank ** (1 / len(modes)), dtype=torch.float64, device=size.device)
        steps = torch.full((len(self.hyperparameters.slots),), math.log(0.3), dtype=torch.float64)
        noise = self.noise_model.start(float(self.model.noise()) / self.training.scale**2)
        return GibbsState(factors, noise, precisions, steps)

    def finish(self, draws: Sequence[_Draw], num_chains: int) -> GibbsResult:
        """Hand the draws to the model and judge them."""
        scale, hyper = self.training.scale, self.hyperparameters
        num_dims = len(self.separable.modes)
        share = scale ** (1 / num_dims)
        factors = [torch.stack([draw.factors[d] for draw in draws]) * share for d in range(num_dims)]
        device = factors[0].device
        noise = torch.tensor([draw.noise * scale**2 for draw in draws], dtype=torch.float64, device=device)
        values = torch.stack([draw.hyperparameters for draw in draws]).to(device)  # (S, P)
        chains = torch.tensor([draw.chain for draw in draws], device=device)
        named = {name: values[:, i] for i, name in enumerate(hyper.names)}
        posterior = DrawsPosterior(factors, noise, named, chains, {"centers": hyper.centers})
        self.model.set_posterior(posterior)
        hyper.set_values(values.mean(0))
        if self.noise_model.is_free:
            self.model.likelihood.initialize(noise=float(noise.mean()))
        energies = torch.stack([draw.energies for draw in draws])  # (S, R), in units of the targets' variance
        effective_rank = float((energies > 1e-3).sum(-1).double().mean())
        rhat, ess = self._diagnose(posterior, num_chains)
        return GibbsResult(
            self.model, posterior, rhat, ess, effective_rank, _verdict(posterior, num_chains, rhat, ess, self.separable)
        )

    def _diagnose(self, posterior: DrawsPosterior, num_chains: int) -> tuple[dict[str, float], dict[str, float]]:
        batch = next(iter(self.training))
        rows = torch.linspace(0, batch.num_rows - 1, min(NUM_WATCHED, batch.num_rows)).long()
        quantities = {"noise": posterior.noise, **posterior.hyperparameters, "f": posterior.draws(batch.x[rows])}
        rhat, ess = {}, {}
        for name, values in quantities.items():
            array = values.cpu().numpy()
            array = array.reshape(num_chains, -1, *array.shape[1:])
            rhat[name] = float(split_rhat(array).max())
            ess[name] = float(effective_sample_size(array).min())
        return rhat, ess


def _verdict(posterior: DrawsPosterior, num_chains: int, rhat: dict[str, float], ess: dict[str, float], separable) -> str:
    sizes = [mode.num_functions for mode in separable.modes]
    message = (
        f"{posterior.num_draws} draws of {num_chains} chain(s), rank {posterior.rank}, "
        f"{min(sizes)} to {max(sizes)} functions per dimension."
    )
    worst = max(rhat["f"], rhat["noise"])
    if num_chains > 1 and worst > MAX_RHAT:
        warnings.warn(
            f"The chains disagree: split R-hat is {rhat['f']:.2f} for function values and {rhat['noise']:.2f} for the noise, "
            f"above {MAX_RHAT}. Raise num_warmup and num_draws; the pooled draws still cover what the chains found.",
            ConvergenceWarning,
            stacklevel=4,
        )
        message += f" The chains disagree (R-hat {worst:.2f}): more sweeps are advised."
    return message


def _noise_model(likelihood: GaussianLikelihood, unit: float) -> NoiseModel:
    """How the noise is drawn, in units of the scaled targets."""
    covar = likelihood.noise_covar
    constraint = covar.raw_noise_constraint
    log_prior = None
    for _, module, prior, closure, setter in likelihood.named_priors():
        if setter is not None:
            value = closure(module)

            def log_prior(noise: float, prior=prior, value=value) -> float:
                return float(prior.log_prob(torch.full_like(value, noise * unit)).sum())

    return NoiseModel(
        covar.raw_noise.requires_grad,
        float(constraint.lower_bound.min()) / unit,
        float(constraint.upper_bound.max()) / unit,
        log_prior,
    )
