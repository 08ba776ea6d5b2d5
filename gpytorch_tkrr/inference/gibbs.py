"""Fitting the CP-weight model by Gibbs sampling."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.special
import torch
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood
from gpytorch.means import ConstantMean, ZeroMean
from torch import Tensor

from ..cp.sums import Design
from ..data.checkpoint import Checkpoint, as_checkpoint, fit_identity, move_tensors, require_same_fit
from ..data.parallel import as_processes
from ..data.progress import progress_bar
from ..data.source import TrainingData
from ..errors import ConstraintWarning, ConvergenceWarning, InputError
from ..features.represented import range_grids
from ..features.separable import num_basis_needed
from ..model.draws import DrawsPosterior
from ..model.laplace import LaplacePosterior
from ..model.probit import as_signs
from .als import near_constant
from .arviz import draws_to_arviz
from .diagnostics import effective_sample_size, split_rhat
from .hyperparameters import Hyperparameters
from .sampler import GibbsSampler, GibbsState, NoiseModel

if TYPE_CHECKING:
    from ..model.tkrr import TKRR

#: Chains are said to disagree where a split R-hat is larger than this.
MAX_RHAT = 1.1

#: Where the user has given no number of sines, as many are taken as leave out this fraction of the prior variance, a
#: quarter more, and at least and at most so many.
TAIL, MIN_NUM_BASIS, MAX_NUM_BASIS = 1e-3, 4, 32

#: Components whose squared values, summed over all rows, stay below so many noise variances are dropped during warm-up.
DEAD = 0.01

#: The lower bound of the noise that GPyTorch sets where the user sets none. It is worth a warning if it is more than
#: this fraction of the variance of the targets and most draws lie this close to it.
DEFAULT_BOUND, LARGE_FRACTION, NEAR = 1e-4, 1e-3, 1.05

#: What a checkpoint holds of a chain that is being run, beside its state and its random numbers.
RUN_STATE = ("sweep", "peak", "factors", "noise", "hyperparameters", "energies")

#: Training rows whose function values are watched for convergence.
NUM_WATCHED = 50


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

    Example:
        >>> import gpytorch, torch, gpytorch_tkrr as tkrr
        >>> x = torch.rand(100, 2)
        >>> model = tkrr.TKRR(x, torch.sin(6 * x[:, 0]), gpytorch.likelihoods.GaussianLikelihood(), rank=3)
        >>> result = tkrr.fit_gibbs(model, num_draws=20, num_warmup=20, seed=0)
        >>> result.posterior.num_draws, sorted(result.ess)[-2:]
        (20, ['noise', 'outputscale'])
        >>> result.log_predictive_density(x[:5], torch.sin(6 * x[:5, 0])).shape
        torch.Size([5])
    """

    model: TKRR
    posterior: DrawsPosterior
    rhat: dict[str, float]
    ess: dict[str, float]
    effective_rank: float
    message: str

    def summary(self) -> str:
        """A table: mean, standard deviation, 95 % interval, R-hat and effective sample size of each quantity."""
        rows: list[tuple[str, ...]] = [("", "mean", "sd", "2.5 %", "97.5 %", "R-hat", "ESS")]
        for name, values in {"noise": self.posterior.noise, **self.posterior.hyperparameters}.items():
            if name not in self.rhat:
                continue
            low, high = torch.quantile(values, torch.tensor([0.025, 0.975], dtype=values.dtype, device=values.device))
            numbers = (values.mean(), values.std(), low, high)
            tail = (f"{self.rhat[name]:.3f}", f"{self.ess[name]:.0f}")
            rows.append((name, *(f"{float(number):.4g}" for number in numbers), *tail))
        rows.append(("f (worst watched value)", "", "", "", "", f"{self.rhat['f']:.3f}", f"{self.ess['f']:.0f}"))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(
                cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        return "\n".join([*lines, f"effective rank {self.effective_rank:.1f}", self.message])

    def log_predictive_density(self, x: Tensor, y: Tensor) -> Tensor:
        r"""
        :math:`\log \frac1S \sum_s N(y; f_s(x), s^2_s)`, the log density of the predictive mixture; with a
        BernoulliLikelihood :math:`\log \frac1S \sum_s \Phi(\pm f_s(x))`.

        :param x: Inputs `(n, D)`.
        :param y: Targets `(n,)`.
        :return: `(n,)`.
        """
        with torch.no_grad():
            f = self.model.draws(x).double()  # (S, n)
            if isinstance(self.model.likelihood, BernoulliLikelihood):
                log_density = torch.special.log_ndtr(as_signs(y) * f)
            else:
                noise = self.posterior.noise.unsqueeze(-1)
                log_density = -0.5 * (torch.log(2 * math.pi * noise) + (y.double() - f) ** 2 / noise)
            return torch.logsumexp(log_density, 0) - math.log(f.shape[0])

    def to_arviz(self, data: Any = None, *, seed: int | None = None) -> Any:
        """
        The model's draws as ArviZ's InferenceData (a DataTree from ArviZ 1.0 on), for `az.plot_trace`, `az.plot_ppc`,
        `az.loo` and `az.compare`.

        Groups: the posterior of noise, hyperparameters and f at up to 50 rows; sample stats; the log likelihood of each
        row; replicated targets (posterior predictive); observed and constant data.

        :param data: Rows `(x, y)` to report on; by default the training data.
        :param seed: Seed of the replicated targets.
        :raises ImportError: Where ArviZ is not installed (extra `arviz`).
        """
        return draws_to_arviz(self.model, data, seed=seed)


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
    group: Any = None,
    checkpoint: Checkpoint | str | Path | None = None,
) -> GibbsResult:
    r"""
    Draw the CP weights, the noise and all free hyperparameters from their posterior by Gibbs sampling.

    One sweep visits every factor once and costs as much as half a sweep of :func:`~gpytorch_tkrr.fit_als`. A model that
    has been fitted by ALS is the start of all chains. A model that holds draws already is continued, and new draws are
    added to the old ones, where ``num_warmup=0``. Kernel and likelihood are left at the posterior mean.

    Hyperparameters with ``requires_grad=False`` stay fixed; priors and constraints registered on the kernel and the
    likelihood are honoured. See :mod:`gpytorch_tkrr.inference.hyperparameters` for the weak defaults.

    :param model: The model; its posterior is replaced.
    :param data: See :func:`~gpytorch_tkrr.fit_als`; by default the training data of the model.
    :param num_draws: Draws kept per chain, one per sweep.
    :param num_warmup: Sweeps before them, during which proposals are tuned.
    :param num_chains: Independent chains.
    :param seed: Seed; the same seed gives the same draws.
    :param progress: Whether to show a progress bar (needs tqdm).
    :param memory: Bytes that may be used beyond the data to keep products over modes; what does not fit is recomputed.
    :param group: See :func:`~gpytorch_tkrr.fit_als`. All processes draw the same random numbers, so that all hold the
        same draws.
    :param checkpoint: See :func:`~gpytorch_tkrr.fit_als`.

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
    if num_draws < 4 or num_warmup < 0 or num_chains < 1:
        raise ValueError(
            f"num_draws must be at least 4, num_warmup at least 0 and num_chains at least 1; got {num_draws}, "
            f"{num_warmup} and {num_chains}."
        )
    earlier = model.posterior if num_warmup == 0 and model.is_fitted and not model.is_stale else None
    if isinstance(earlier, DrawsPosterior):
        if not earlier.resume:
            raise InputError(
                "The model's draws come from chains side by side, which cannot be continued. Start anew, with "
                "num_warmup > 0."
            )
        num_chains = len(earlier.resume["chains"])
    processes, checkpoint = as_processes(group), as_checkpoint(checkpoint)
    training = model.training_data(data, processes)
    identity = fit_identity(
        "fit_gibbs", model, training.summary, seed=seed, num_warmup=num_warmup, num_draws=num_draws,
        num_chains=num_chains,
    )  # fmt: skip
    require_same_fit(identity, processes)
    fit = _Fit(model, training, earlier, memory)
    saved = checkpoint.open(identity, processes)
    seeds = np.random.SeedSequence(processes.share(np.random.SeedSequence(seed).entropy)).spawn(num_chains)
    num_sweeps = num_warmup + num_draws
    chains: list[_Chain] = []
    done = 0
    if saved is not None:
        saved = move_tensors(saved, training.summary.lower.device)
        chains = [_Chain(**chain) for chain in saved["chains"]]
        done = len(chains) * num_sweeps + saved["run"]["sweep"]
    bar = progress_bar(progress and processes.rank == 0, num_chains * num_sweeps, "Gibbs", "sweep", done=done)
    try:
        for number in range(len(chains), num_chains):
            run = fit.start_chain(number, np.random.default_rng(seeds[number]))
            if saved is not None:
                fit.resume_chain(run, saved)
                saved = None
            while run.sweep < num_sweeps:
                fit.sweep(run, num_warmup)
                bar.update(f"noise {run.state.noise * training.scale**2:.4g}")
                is_last = run.sweep == num_sweeps and number == num_chains - 1
                checkpoint.save(lambda: fit.state(chains, run), last=is_last)  # noqa: B023 (called at once)
            chains.append(fit.finish_chain(run))
    finally:
        bar.close()
    return fit.finish(chains)


@dataclass
class _Run:
    """A chain that is being run, for targets of unit variance, and the draws that it has kept."""

    number: int
    rng: np.random.Generator
    state: GibbsState
    sampler: GibbsSampler
    before: int  # sweeps of an earlier fit
    peak: Tensor  # largest energy of each component since the last look
    sweep: int = 0
    factors: list[list[Tensor]] = field(default_factory=list)  # S lists of D tensors (R, M_d)
    noise: list[float] = field(default_factory=list)
    hyperparameters: list[Tensor] = field(default_factory=list)
    energies: list[Tensor] = field(default_factory=list)


@dataclass
class _Chain:
    """The draws of one chain, for targets of unit variance, and what it needs to go on."""

    factors: list[Tensor]  # D tensors (S, R, M_d)
    noise: Tensor  # (S,)
    hyperparameters: Tensor  # (S, P)
    energies: Tensor  # (S, R)
    resume: dict[str, Any]


class _Fit:
    """What all chains of a fit have in common."""

    def __init__(self, model: TKRR, training: TrainingData, earlier: Any, memory: int):
        self.model, self.training, self.earlier, self.memory = model, training, earlier, memory
        self.offset = _probit_offset(model, training) if isinstance(model.likelihood, BernoulliLikelihood) else None
        self._build()
        self.num_dims = len(self.separable.modes)
        summary = training.summary
        centers = earlier.resume["centers"] if isinstance(earlier, DrawsPosterior) else None
        with torch.enable_grad():
            half_range = (summary.upper - summary.lower) / 2
            self.hyperparameters = Hyperparameters(model.covar_module, self.separable, half_range, centers)
        self.grids = range_grids(summary.lower, summary.upper)
        self.all_slots = range(len(self.hyperparameters.slots))
        self.start = self.hyperparameters.get(self.all_slots)
        self.noise_model = _noise_model(model.likelihood, training.scale**2)
        self.share = training.scale ** (1 / self.num_dims)  # of the targets' scale in each factor
        self.als_factors: list[Tensor] = []  # raw, where the model was fitted by ALS: the start of all chains
        if model.is_fitted and isinstance(model.posterior, LaplacePosterior):
            modes = zip(model.factors, self.separable.modes, strict=True)
            self.als_factors = [mode.covariance().unwhiten(w.mT / self.share) for w, mode in modes]

    def _build(self) -> None:
        """What depends on the number of functions."""
        self.separable = self.model.separate()
        self.design = Design(self.training, [mode.basis for mode in self.separable.modes], memory=self.memory)
        self.design.marginals()  # the first pass over the data, also where a chain is resumed

    def start_chain(self, number: int, rng: np.random.Generator) -> _Run:
        """A chain before its first sweep."""
        state = self._initial_state(number, rng)
        before = self.earlier.resume["chains"][number]["sweeps"] if isinstance(self.earlier, DrawsPosterior) else 0
        return _Run(number, rng, state, self._sampler(rng), before, torch.zeros_like(state.precisions))

    def sweep(self, run: _Run, num_warmup: int) -> None:
        """One sweep of a chain; draws are kept after the warm-up."""
        state = run.state
        if 0 < run.sweep == num_warmup // 2 or 0 < run.sweep == num_warmup:
            self._drop_dead(state, run.peak)
            run.sampler, run.peak = self._sampler(run.rng), torch.zeros_like(state.precisions)
        adapts = run.number == 0 and self.model.adapts_num_basis
        if adapts and 0 < run.sweep in (num_warmup // 4, num_warmup // 2):
            self._adapt_num_basis(state)
            run.sampler = self._sampler(run.rng)
        modes = range(self.num_dims)
        order = modes if (run.before + run.sweep) % 2 == 0 else modes[::-1]
        run.sampler.sweep(state, order, adapt=min(0.5, 5 / (run.sweep + 5)) if run.sweep < num_warmup else 0.0)
        run.peak = torch.maximum(run.peak, run.sampler.energies)
        if run.sweep >= num_warmup:
            run.factors.append(state.scaled_factors())
            run.noise.append(state.noise)
            run.hyperparameters.append(self.hyperparameters.values())
            run.energies.append(run.sampler.energies)
        run.sweep += 1

    def finish_chain(self, run: _Run) -> _Chain:
        """The draws of a chain, side by side."""
        state = run.state
        resume = {
            "precisions": state.precisions,
            "steps": state.steps,
            "coordinates": self.hyperparameters.get(self.all_slots),
            "rng": run.rng.bit_generator.state,
            "sweeps": run.before + run.sweep,
        }
        missing = self.model.rank - len(state.precisions)  # components that have been dropped are zero
        pad = torch.nn.functional.pad
        return _Chain(
            [pad(torch.stack(draws), (0, 0, 0, missing)) for draws in zip(*run.factors, strict=True)],
            torch.tensor(run.noise, dtype=torch.float64, device=state.precisions.device),
            torch.stack(run.hyperparameters).to(state.precisions.device),
            pad(torch.stack(run.energies), (0, missing)),
            resume,
        )

    def state(self, chains: Sequence[_Chain], run: _Run) -> dict[str, Any]:
        """What is needed to go on after a sweep."""
        kept = {name: getattr(run, name) for name in RUN_STATE}
        return {
            "chains": [vars(chain) for chain in chains],
            "run": {**kept, "state": vars(run.state), "rng": run.rng.bit_generator.state},
            "coordinates": self.hyperparameters.get(self.all_slots),
            "num_basis": self.model.num_basis,
        }

    def resume_chain(self, run: _Run, saved: dict[str, Any]) -> None:
        """Bring a chain to where :meth:`state` was asked for, and the sums over modes to where it stood then."""
        if saved["num_basis"] != self.model.num_basis:
            self.model.num_basis = saved["num_basis"]
            self._build()
        self.hyperparameters.set(self.all_slots, saved["coordinates"].cpu())
        for name in RUN_STATE:
            setattr(run, name, saved["run"][name])
        run.state = GibbsState(**saved["run"]["state"])
        run.state.steps = run.state.steps.cpu()
        run.rng.bit_generator.state = saved["run"]["rng"]
        run.hyperparameters = [values.cpu() for values in run.hyperparameters]
        went_back = (run.before + run.sweep) % 2 == 0
        run.sampler = self._sampler(run.rng, position=0 if went_back else self.num_dims - 1)

    def _sampler(self, rng: np.random.Generator, position: int = 0) -> GibbsSampler:
        self.design.reset(position)
        return GibbsSampler(
            self.design,
            self.separable,
            self.hyperparameters,
            self.training.scale**2,
            self.noise_model,
            self.grids,
            rng,
            rank=self.model.rank,
            offset=self.offset,
        )

    def _drop_dead(self, state: GibbsState, energies: Tensor) -> None:
        """Drop components whose values at all rows together are far below the noise of one; keep at least one."""
        alive = energies * self.training.summary.num_rows > DEAD * state.noise
        alive[energies.argmax()] = True
        state.factors = [factor[alive] for factor in state.factors]
        state.precisions, state.log_scales = state.precisions[alive], state.log_scales[:, alive]

    def _adapt_num_basis(self, state: GibbsState) -> None:
        """As many sines in each mode as its present lengthscale needs, and no more than it has distinct values."""
        model = self.model
        assert model.covar_module is not None and model.domain is not None
        limits = model.max_num_basis or [MAX_NUM_BASIS] * self.num_dims
        most = [min(limit, MAX_NUM_BASIS) for limit in limits]
        needed = num_basis_needed(model.covar_module, model.domain, most, TAIL)
        model.num_basis = tuple(
            min(max(math.ceil(1.25 * num), MIN_NUM_BASIS), limit) for num, limit in zip(needed, most, strict=True)
        )
        self._build()
        state.factors = self._resized(state.factors)

    def _resized(self, factors: Sequence[Tensor]) -> list[Tensor]:
        """Raw factors with the present numbers of functions: the last sines are zero, or left out."""
        return [
            torch.nn.functional.pad(factor, (0, mode.num_functions - factor.shape[1]))
            for factor, mode in zip(factors, self.separable.modes, strict=True)
        ]

    def _initial_state(self, number: int, rng: np.random.Generator) -> GibbsState:
        """Where an earlier chain stopped, an earlier ALS fit, or components near the constant function."""
        hyper, rank, earlier = self.hyperparameters, self.model.rank, self.earlier
        if isinstance(earlier, DrawsPosterior):
            resume = earlier.resume["chains"][number]
            hyper.set(self.all_slots, resume["coordinates"])
            rng.bit_generator.state = resume["rng"]
            last = int((earlier.chains == number).nonzero()[-1])
            alive = len(resume["precisions"])
            factors = [factor[last, :alive] / self.share for factor in earlier.factors]
            noise = float(earlier.noise[last]) / self.training.scale**2
            return GibbsState(factors, noise, resume["precisions"].clone(), resume["steps"].clone())
        hyper.set(self.all_slots, self.start)
        covariances = [mode.covariance() for mode in self.separable.modes]
        if self.als_factors:
            factors = self._resized(self.als_factors)
        else:
            generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
            marginals = zip(self.design.marginals(), covariances, strict=True)
            factors = [v.unwhiten(near_constant(*marginal, v, rank, generator)) for marginal, v in marginals]
            size = torch.from_numpy(rng.standard_normal((rank, 1))).to(factors[0].device)
            factors[0] = factors[0] * size / math.sqrt(rank)
        precisions = torch.full((rank,), rank ** (1 / self.num_dims), dtype=torch.float64, device=factors[0].device)
        steps = torch.full((len(hyper.slots),), math.log(0.3), dtype=torch.float64)
        noise = self.noise_model.start(float(self.model.noise()) / self.training.scale**2)
        return GibbsState(factors, noise, precisions, steps)

    def finish(self, chains: Sequence[_Chain]) -> GibbsResult:
        """Hand the draws to the model and judge them."""
        hyper = self.hyperparameters
        factors = [torch.cat([chain.factors[d] for chain in chains]) * self.share for d in range(self.num_dims)]
        noise = torch.cat([chain.noise for chain in chains]) * self.training.scale**2
        values = torch.cat([chain.hyperparameters for chain in chains])  # (S, P)
        numbers = torch.cat([torch.full_like(chain.noise, i).long() for i, chain in enumerate(chains)])
        named = {name: values[:, i] for i, name in enumerate(hyper.names)}
        resume = {"centers": hyper.centers, "chains": [chain.resume for chain in chains]}
        posterior = DrawsPosterior(factors, noise, named, numbers, resume)
        if isinstance(self.earlier, DrawsPosterior):
            posterior = self.earlier.extended(posterior)
        self.model.set_posterior(posterior)
        if hyper.slots:
            hyper.set_values(torch.stack([draws.mean() for draws in posterior.hyperparameters.values()]))
        if self.noise_model.is_free:
            self.model.likelihood.initialize(noise=float(posterior.noise.mean()))
        energies = torch.cat([chain.energies for chain in chains])  # (S, R), in units of the targets' variance
        effective_rank = float((energies > 1e-3).sum(-1).double().mean())
        rhat, ess = self._diagnose(posterior, len(chains))
        self._warn_of_bound(posterior)
        message = _verdict(posterior, len(chains), rhat, [mode.num_functions for mode in self.separable.modes])
        return GibbsResult(self.model, posterior, rhat, ess, effective_rank, message)

    def _warn_of_bound(self, posterior: DrawsPosterior) -> None:
        """Say so where the smallest noise that GPyTorch allows by default is too large for the targets."""
        unit = self.training.scale**2
        is_default = math.isclose(self.noise_model.lower * unit, DEFAULT_BOUND, rel_tol=1e-3)
        near = (posterior.noise < NEAR * DEFAULT_BOUND).double().mean()
        if self.noise_model.is_free and is_default and self.noise_model.lower > LARGE_FRACTION and near > 0.5:
            warnings.warn(
                f"The noise variance lies at {DEFAULT_BOUND:g}, GPyTorch's default lower bound, which is "
                f"{self.noise_model.lower:.1%} of the variance of the targets. Scale the targets to unit variance, or "
                "pass GaussianLikelihood(noise_constraint=GreaterThan(...)) with a smaller bound.",
                ConstraintWarning,
                stacklevel=4,
            )

    def _diagnose(self, posterior: DrawsPosterior, num_chains: int) -> tuple[dict[str, float], dict[str, float]]:
        sample = self.training.summary.sample
        rows = torch.linspace(0, len(sample) - 1, min(NUM_WATCHED, len(sample))).long()
        quantities = {**posterior.hyperparameters, "f": posterior.draws(self.model.warped(sample[rows]))}
        if self.noise_model.is_free:
            quantities["noise"] = posterior.noise
        rhat, ess = {}, {}
        for name, values in quantities.items():
            array = np.stack([values[posterior.chains == number].cpu().numpy() for number in range(num_chains)])
            rhat[name] = float(split_rhat(array).max())
            ess[name] = float(effective_sample_size(array).min())
        return rhat, ess


def _verdict(posterior: DrawsPosterior, num_chains: int, rhat: dict[str, float], sizes: Sequence[int]) -> str:
    message = (
        f"{posterior.num_draws} draws of {num_chains} chain(s), rank {posterior.rank}, "
        f"{min(sizes)} to {max(sizes)} functions per dimension."
    )
    worst = max(rhat["f"], rhat.get("noise", 1.0))
    if num_chains > 1 and worst > MAX_RHAT:
        warnings.warn(
            f"The chains disagree: split R-hat of function values and noise is up to {worst:.2f}, above {MAX_RHAT}. "
            "Raise num_warmup and num_draws; the pooled draws still cover what the chains found.",
            ConvergenceWarning,
            stacklevel=4,
        )
        message += f" The chains disagree (R-hat {worst:.2f}): more sweeps are advised."
    return message


def _probit_offset(model: TKRR, training: TrainingData) -> float:
    """The mean of f in a probit model; training data become the labels themselves."""
    if not isinstance(model.mean_module, (ConstantMean, ZeroMean)):
        raise InputError(
            "With a BernoulliLikelihood fit_gibbs takes a model with a ConstantMean or a ZeroMean; got a "
            f"{type(model.mean_module).__name__}."
        )
    if model.fits_mean:  # the share of the class +1, kept away from 0 and 1
        share = min(max((training.summary.mean + 1) / 2, 0.01), 0.99)
        model.mean_module.initialize(constant=float(scipy.special.ndtri(share)))
    training.mean, training.scale = None, 1.0
    return float(model.mean_module(training.summary.sample[:1]).sum())


def _noise_model(likelihood: Any, unit: float) -> NoiseModel:
    """How the noise is drawn, in units of the scaled targets."""
    if not isinstance(likelihood, GaussianLikelihood):
        return NoiseModel(False, 0.0, math.inf)
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
