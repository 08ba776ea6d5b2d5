"""Fitting the CP-weight model by Gibbs sampling."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gpytorch.means import ConstantMean, ZeroMean
from torch import Tensor

from ..cp.design import Design
from ..cp.start import near_constant, screened
from ..data.checkpoint import (
    Checkpoint,
    as_checkpoint,
    difference,
    fit_identity,
    move_tensors,
    require_same_fit,
    show,
)
from ..data.parallel import as_processes
from ..data.progress import progress_bar
from ..data.training import Summary, TrainingData
from ..errors import ConstraintWarning, ConvergenceWarning, InputError
from ..features.represented import range_grids
from ..features.separable import num_basis_needed
from ..model.draws import DrawsPosterior
from ..model.laplace import LaplacePosterior
from ..model.likelihoods.base import Parameters
from ..model.rollback import rollback_on_error
from .diagnostics import effective_sample_size, split_rhat
from .hyperparameters import Hyperparameters, require_representable
from .results import GibbsResult
from .sampler import GibbsSampler, GibbsState

if TYPE_CHECKING:
    from ..model.tkrr import TKRR

#: Chains are said to disagree where a split R-hat is larger than this.
MAX_RHAT = 1.1

#: Where the user has given no number of sines, as many are taken as leave out this fraction of the prior variance, a
#: quarter more, and at least and at most so many.
TAIL, MIN_NUM_BASIS, MAX_NUM_BASIS = 1e-3, 4, 32

#: Components whose squared values, summed over all rows, stay below so many noise variances are dropped during warm-up.
DEAD = 0.01

#: All components have died where none has a mean square above this fraction of the targets' variance, nor above what
#: its weights would find in pure noise.
MIN_ENERGY = 0.01

#: What a checkpoint holds of a chain that is being run, beside its state and its random numbers.
RUN_STATE = ("sweep", "last", "peak", "factors", "parameters", "hyperparameters", "energies")

#: Training rows whose function values are watched for convergence.
NUM_WATCHED = 50


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
    has been fitted by ALS is the start of all chains; otherwise they start from the main effects and pairwise
    interactions that the data show. A model that holds draws already is continued, and new draws are added to the old
    ones, where ``num_warmup=0``; data, mean, box and sizes must be those of the old draws. Kernel and likelihood are
    left at the posterior mean.

    A fit that fails or is interrupted (Ctrl-C) leaves the model as it was; pass a `checkpoint` to go on later.

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
    earlier = _draws_to_continue(model) if num_warmup == 0 else None
    num_chains = num_chains if earlier is None else len(earlier.resume["chains"])
    with rollback_on_error(model):
        processes, checkpoint = as_processes(group), as_checkpoint(checkpoint)
        training = model.training_data(data, processes, memory=memory)
        model.prepare(training)
        require_representable(model, training.summary.variance)
        identity = fit_identity(
            "fit_gibbs", model, training.summary, seed=seed, num_warmup=num_warmup, num_draws=num_draws,
            num_chains=num_chains,
        )  # fmt: skip
        require_same_fit(identity, processes)
        fit = GibbsFit(model, training, earlier, memory)
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
                    noise = fit.augmentation.noise(run.state.parameters) * training.scale**2
                    bar.update(f"noise {noise:.4g}")
                    is_last = run.sweep == num_sweeps and number == num_chains - 1
                    checkpoint.save(lambda: fit.state(chains, run), last=is_last)  # noqa: B023 (called at once)
                chains.append(fit.finish_chain(run))
        finally:
            bar.close()
            checkpoint.close()
        return fit.finish(chains)


def _draws_to_continue(model: TKRR) -> DrawsPosterior | None:
    """The draws of an earlier fit, where there are any."""
    if not model.is_fitted or not isinstance(model.posterior, DrawsPosterior):
        return None
    if not model.posterior.resume:
        raise InputError(
            "The model's draws come from chains side by side, which cannot be continued. Start anew, with "
            "num_warmup > 0."
        )
    return model.posterior


@dataclass
class _Run:
    """A chain that is being run, for targets of unit variance, and the draws that it has kept."""

    number: int
    rng: np.random.Generator
    state: GibbsState
    sampler: GibbsSampler
    before: int  # sweeps of an earlier fit
    last: Tensor  # energy of each component after the last sweep
    peak: Tensor  # the largest since the last look
    sweep: int = 0
    factors: list[list[Tensor]] = field(default_factory=list)  # S lists of D tensors (R, M_d)
    parameters: list[Parameters] = field(default_factory=list)
    hyperparameters: list[Tensor] = field(default_factory=list)
    energies: list[Tensor] = field(default_factory=list)


@dataclass
class _Chain:
    """The draws of one chain, for targets of unit variance, and what it needs to go on."""

    factors: list[Tensor]  # D tensors (S, R, M_d)
    parameters: Parameters  # of the observation model, each (S, ...)
    hyperparameters: Tensor  # (S, P)
    energies: Tensor  # (S, R)
    resume: dict[str, Any]


class GibbsFit:
    """What all chains of a fit have in common."""

    def __init__(self, model: TKRR, training: TrainingData, earlier: DrawsPosterior | None, memory: int):
        self.model, self.training, self.earlier = model, training, earlier
        offset = 0.0
        if model.observation.has_link:
            offset = _link_offset(model, training)
        elif model.observation.has_limits:
            offset = _constant_mean(model, training) / training.scale
        self.augmentation = model.observation.augmentation(training.scale, offset)
        self.separable = model.separate()
        if earlier is not None:
            _require_same_target(earlier, _target_identity(model, training.summary))
        self.design = Design(training, [mode.basis for mode in self.separable.modes], memory=memory)
        self.design.marginals()  # before the first update also where a chain is resumed: rows are kept from here on
        self.num_dims = len(self.separable.modes)
        summary = training.summary
        centers = None if earlier is None else earlier.resume["centers"]
        with torch.enable_grad():
            half_range = (summary.upper - summary.lower) / 2
            self.hyperparameters = Hyperparameters(model.covar_module, self.separable, half_range, centers)
        self.grids = range_grids(summary.lower, summary.upper)
        self.all_slots = range(len(self.hyperparameters.slots))
        self.start = self.hyperparameters.get(self.all_slots)
        self.share = training.scale ** (1 / self.num_dims)  # of the targets' scale in each factor
        self.als_factors: list[Tensor] = []  # raw, where the model was fitted by ALS: the start of all chains
        if model.is_fitted and isinstance(model.posterior, LaplacePosterior):
            modes = zip(model.factors, self.separable.modes, strict=True)
            self.als_factors = [mode.covariance().unwhiten(w.mT / self.share) for w, mode in modes]

    def _resize(self, num_basis: int | Sequence[int]) -> None:
        """Other numbers of functions; rows that have been kept stay."""
        self.model.resize(num_basis=num_basis)
        self.separable = self.model.separate()
        self.design.set_bases([mode.basis for mode in self.separable.modes])
        self.design.marginals()

    def start_chain(self, number: int, rng: np.random.Generator) -> _Run:
        """A chain before its first sweep."""
        state = self._initial_state(number, rng)
        before = 0 if self.earlier is None else self.earlier.resume["chains"][number]["sweeps"]
        zeros = torch.zeros_like(state.precisions)
        return _Run(number, rng, state, self._sampler(rng), before, zeros, zeros)

    def sweep(self, run: _Run, num_warmup: int) -> None:
        """One sweep of a chain; draws are kept after the warm-up."""
        if 0 < run.sweep == num_warmup // 2 or 0 < run.sweep == num_warmup:
            if run.sweep < num_warmup and self._have_died(run.last, run.state.parameters):
                run.state = self._fresh_state(run.rng, near_constant)
            else:
                self._drop_dead(run.state, run.peak)
            run.sampler, run.peak = self._sampler(run.rng), torch.zeros_like(run.state.precisions)
        state = run.state
        adapts = run.number == 0 and self.model.adapts_num_basis
        if adapts and 0 < run.sweep in (num_warmup // 4, num_warmup // 2):
            self._adapt_num_basis(state)
            run.sampler = self._sampler(run.rng)
        modes = range(self.num_dims)
        order = modes if (run.before + run.sweep) % 2 == 0 else modes[::-1]
        is_warm = run.sweep >= num_warmup
        adapt, progress = (0.0, 1.0) if is_warm else (min(0.5, 5 / (run.sweep + 5)), run.sweep / num_warmup)
        run.sampler.sweep(state, order, adapt, progress)
        run.last = run.sampler.energies
        run.peak = torch.maximum(run.peak, run.last)
        if run.sweep >= num_warmup:
            run.factors.append(state.scaled_factors())
            run.parameters.append(state.parameters)
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
            {
                name: torch.stack([each[name] for each in run.parameters]).to(state.precisions.device)
                for name in state.parameters
            },
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
            self._resize(saved["num_basis"])
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
            self.augmentation,
            self.grids,
            rng,
            rank=self.model.rank,
        )

    def _have_died(self, energies: Tensor, parameters: Parameters) -> bool:
        """Whether no component says anything that the noise does not."""
        is_constant = self.training.summary.variance == 0  # constant targets: nothing to be said
        num_weights = sum(mode.num_functions for mode in self.separable.modes)
        in_noise = num_weights * self.augmentation.noise(parameters) / self.training.summary.num_rows
        return not is_constant and float(energies.max()) <= min(in_noise, MIN_ENERGY)

    def _drop_dead(self, state: GibbsState, energies: Tensor) -> None:
        """Drop components whose values at all rows together are far below the noise of one; keep at least one."""
        alive = energies * self.training.summary.num_rows > DEAD * self.augmentation.noise(state.parameters)
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
        wanted = [max(math.ceil(1.25 * num), MIN_NUM_BASIS) for num in needed]
        self._resize([min(pair) for pair in zip(wanted, most, strict=True)])
        state.factors = self._resized(state.factors)

    def _resized(self, factors: Sequence[Tensor]) -> list[Tensor]:
        """Raw factors with the present numbers of functions: the last sines are zero, or left out."""
        return [
            torch.nn.functional.pad(factor, (0, mode.num_functions - factor.shape[1]))
            for factor, mode in zip(factors, self.separable.modes, strict=True)
        ]

    def _initial_state(self, number: int, rng: np.random.Generator) -> GibbsState:
        """Where an earlier chain stopped, an earlier ALS fit, or components that the data show."""
        hyper, earlier = self.hyperparameters, self.earlier
        if earlier is None:
            return self._fresh_state(rng, None if self.als_factors else screened)
        resume = earlier.resume["chains"][number]
        hyper.set(self.all_slots, resume["coordinates"])
        rng.bit_generator.state = resume["rng"]
        last = int((earlier.chains == number).nonzero()[-1])
        alive = len(resume["precisions"])
        factors = [factor[last, :alive] / self.share for factor in earlier.factors]
        parameters = self.augmentation.scaled({name: each[last] for name, each in earlier.parameters.items()})
        return GibbsState(factors, parameters, resume["precisions"].clone(), resume["steps"].clone())

    def _fresh_state(self, rng: np.random.Generator, start: Callable[..., list[Tensor]] | None) -> GibbsState:
        """All hyperparameters where the fit began, and components of a kind of start; None for those of ALS."""
        hyper, rank = self.hyperparameters, self.model.rank
        hyper.set(self.all_slots, self.start)
        covariances = [mode.covariance() for mode in self.separable.modes]
        if start is None:
            factors = self._resized(self.als_factors)
        else:
            generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
            whitened = start(self.design, covariances, rank, generator)
            factors = [v.unwhiten(w) for v, w in zip(covariances, whitened, strict=True)]
        precisions = torch.full((rank,), rank ** (1 / self.num_dims), dtype=torch.float64, device=factors[0].device)
        steps = torch.full((len(hyper.slots),), math.log(0.3), dtype=torch.float64)
        return GibbsState(factors, self.augmentation.start(), precisions, steps)

    def finish(self, chains: Sequence[_Chain]) -> GibbsResult:
        """Hand the draws to the model and judge them."""
        hyper = self.hyperparameters
        factors = [torch.cat([chain.factors[d] for chain in chains]) * self.share for d in range(self.num_dims)]
        parameters = self.augmentation.natural(
            {name: torch.cat([chain.parameters[name] for chain in chains]) for name in chains[0].parameters}
        )
        values = torch.cat([chain.hyperparameters for chain in chains])  # (S, P)
        numbers = torch.cat([torch.full_like(chain.energies[:, 0], i).long() for i, chain in enumerate(chains)])
        named = {name: values[:, i] for i, name in enumerate(hyper.names)}
        target = _target_identity(self.model, self.training.summary)  # functions may have been adapted
        resume = {"centers": hyper.centers, "chains": [chain.resume for chain in chains], "target": target}
        bases = [mode.basis for mode in self.separable.modes]
        posterior = DrawsPosterior(bases, factors, parameters, named, numbers, resume)
        if self.earlier is not None:
            posterior = self.earlier.extended(posterior)
        self.model.set_posterior(posterior)
        if hyper.slots:
            hyper.set_values(torch.stack([draws.mean() for draws in posterior.hyperparameters.values()]))
        free = {name: posterior.parameters[name] for name in self.augmentation.free}
        self.model.observation.set_parameters(free)
        energies = torch.cat([chain.energies for chain in chains])  # (S, R), in units of the targets' variance
        effective_rank = float((energies > 1e-3).sum(-1).double().mean())
        rhat, ess = self._diagnose(posterior, len(chains))
        concern = self.augmentation.concern(posterior.parameters)
        if concern is not None:
            warnings.warn(concern, ConstraintWarning, stacklevel=4)
        sizes = [mode.num_functions for mode in self.separable.modes]
        message = _verdict(posterior, len(chains), {"f", *free}, rhat, sizes)
        average = {
            name: torch.cat([chain.parameters[name] for chain in chains]).mean(0) for name in chains[0].parameters
        }
        if self._have_died(energies.amax(-1).mean(), average):
            warnings.warn(
                "All components have died: the model predicts little more than the mean, also after another start. "
                "Either the inputs do not explain the targets, or an interaction of three or more inputs was missed: "
                "raise num_warmup or rank, or try another seed.",
                ConvergenceWarning,
                stacklevel=4,
            )
            message += " All components have died."
        return GibbsResult(self.model, posterior, rhat, ess, effective_rank, message)

    def _diagnose(self, posterior: DrawsPosterior, num_chains: int) -> tuple[dict[str, float], dict[str, float]]:
        sample = self.training.summary.sample
        rows = torch.linspace(0, len(sample) - 1, min(NUM_WATCHED, len(sample))).long()
        quantities = {**posterior.hyperparameters, "f": posterior.functions(self.model.warped(sample[rows]))}
        quantities.update({name: posterior.parameters[name] for name in self.augmentation.free})
        rhat, ess = {}, {}
        for name, values in quantities.items():
            array = np.stack([values[posterior.chains == number].cpu().numpy() for number in range(num_chains)])
            rhat[name] = float(split_rhat(array).max())
            ess[name] = float(effective_sample_size(array).min())
        return rhat, ess


def _target_identity(model: TKRR, summary: Summary) -> dict[str, Any]:
    """What draws belong to: rows, mean, box, sizes. Draws of another target must not be added to them."""
    assert model.domain is not None
    names = ("num_rows", "mass", "mean", "variance", "lower", "upper", "fingerprint")
    rows = {name: getattr(summary, name) for name in names}
    fraction = torch.linspace(0, 1, 33, dtype=torch.float64, device=summary.lower.device).unsqueeze(-1)
    grid = summary.lower + fraction * (summary.upper - summary.lower)
    identity = {
        **{f"{name} of the data": value for name, value in rows.items()},
        "the mean function": model.mean_module(grid.to(next(model.mean_module.parameters(), grid).dtype)).double(),
        "the box": torch.stack(model.domain.sides(summary.num_dims)),
        "num_basis": [mode.num_functions for mode in model.separate().modes],
        "rank": model.rank,
    }
    return {name: value.detach().cpu() if isinstance(value, Tensor) else value for name, value in identity.items()}


def _require_same_target(earlier: DrawsPosterior, identity: dict[str, Any]) -> None:
    """An error where the draws to be continued are those of something else."""
    saved = earlier.resume.get("target", {})
    name = difference(saved, identity)
    if name is not None:
        raise InputError(
            f"The model's draws cannot be continued (num_warmup=0): {name} was {show(saved.get(name))} and is now "
            f"{show(identity[name])}. Draws of different data, means or sizes do not mix. Start anew, with "
            "num_warmup > 0."
        )


def _verdict(
    posterior: DrawsPosterior, num_chains: int, watched: set[str], rhat: dict[str, float], sizes: Sequence[int]
) -> str:
    message = (
        f"{posterior.num_draws} draws of {num_chains} chain(s), rank {posterior.rank}, "
        f"{min(sizes)} to {max(sizes)} functions per dimension."
    )
    worst = max(rhat[name] for name in watched)
    if num_chains > 1 and worst > MAX_RHAT:
        warnings.warn(
            f"The chains disagree: split R-hat of function values and noise is up to {worst:.2f}, above {MAX_RHAT}. "
            "Raise num_warmup and num_draws; the pooled draws still cover what the chains found.",
            ConvergenceWarning,
            stacklevel=4,
        )
        message += f" The chains disagree (R-hat {worst:.2f}): more sweeps are advised."
    return message


def _link_offset(model: TKRR, training: TrainingData) -> float:
    """The mean of f, whose scale is not that of the targets; training data become the encoded targets themselves."""
    mean = _constant_mean(model, training)
    if model.fits_mean:
        model.mean_module.initialize(constant=model.observation.start_mean(training.summary))
        mean = _constant_mean(model, training)
    training.mean, training.scale = None, 1.0
    return mean


def _constant_mean(model: TKRR, training: TrainingData) -> float:
    if not isinstance(model.mean_module, (ConstantMean, ZeroMean)):
        raise InputError(
            f"With a {type(model.likelihood).__name__} fit_gibbs takes a model with a ConstantMean or a ZeroMean; got "
            f"a {type(model.mean_module).__name__}."
        )
    return float(model.mean_module(training.summary.sample[:1]).sum())
