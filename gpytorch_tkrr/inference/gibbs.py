"""Fitting the CP-weight model by Gibbs sampling."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gpytorch.means import ConstantMean, ZeroMean
from torch import Tensor

from ..bases.covariance import Covariance
from ..cp.design import Design
from ..cp.format import WeightFormat
from ..cp.start import Screening, near_constant
from ..data.checkpoint import (
    Checkpoint,
    NoCheckpoint,
    as_checkpoint,
    difference,
    fit_identity,
    move_tensors,
    require_same_fit,
    show,
)
from ..data.identity import Incomparable, module_identity
from ..data.parallel import as_processes
from ..data.progress import progress_bar
from ..data.training import Summary, TrainingData
from ..errors import ConstraintWarning, ConvergenceWarning, InputError
from ..features.represented import range_grids
from ..features.separable import num_basis_needed
from ..model.draws import DrawsPosterior
from ..model.likelihoods.base import Parameters
from ..model.rollback import rollback_on_error
from ..model.warp import InputWarp
from ..sampling.diagnostics import effective_sample_size, split_rhat
from ..sampling.hyperparameters import Hyperparameters, require_representable
from ..sampling.plan import (
    MANY_ROWS,
    MIN_RACE_HELD_OUT,
    MIN_RANK,
    NUM_SCORED,
    RACE_HELD_OUT,
    RACE_RANK,
    RACE_ROWS,
    RACE_SWEEPS,
    Plan,
    has_settled,
)
from ..sampling.pooling import is_better, kept_draws, stacking_weights
from ..sampling.priors import GibbsState, WeightPrior
from ..sampling.sampler import FIRST_STEP, GibbsSampler
from ..sampling.second_function import JointSampler, SecondFit
from ..sampling.workers import Tell, num_parallel, run_forked
from .als import append_rows
from .process_chains import PROCESS_STATE, WARMUP_SWEEPS, ProcessChains, ProcessRun
from .results import GibbsResult

if TYPE_CHECKING:
    from ..model.tkrr import TKRR

#: Chains are said to disagree where a split R-hat is larger than this.
MAX_RHAT = 1.1

#: Where the user has given no number of sines, as many are taken as leave out this fraction of the prior variance, a
#: quarter more, and at least and at most so many.
TAIL, MIN_NUM_BASIS, MAX_NUM_BASIS = 1e-3, 4, 32

#: Components whose squared values, summed over all rows, stay below so many noise variances are dropped during warm-up:
#: where the rank is given, and where it is found.
DEAD, IDLE = 0.01, 1.0

#: All components have died where none has a mean square above this fraction of the targets' variance, nor above what
#: its weights would find in pure noise.
MIN_ENERGY = 0.01

#: Chains in the limit of many components are left out where their weight is below this.
IDLE_WEIGHT = 0.05

#: What a checkpoint holds of a chain that is being run, beside its state and its random numbers.
RUN_STATE = (
    "sweep", "ends", "log_noise", "scores", "last", "peak", "factors", "parameters", "hyperparameters", "energies",
)  # fmt: skip

#: Training rows whose function values are watched for convergence.
NUM_WATCHED = 50


@torch.no_grad()
def fit_gibbs(
    model: TKRR,
    *,
    data: Any = None,
    new_rows: tuple[Tensor, Tensor] | None = None,
    num_draws: int | None = None,
    num_warmup: int | None = None,
    num_chains: int | None = None,
    seed: int | None = None,
    progress: bool = False,
    memory: int = 2 << 30,
    group: Any = None,
    checkpoint: Checkpoint | str | Path | None = None,
) -> GibbsResult:
    r"""
    Draw the weights, the noise and all free hyperparameters from their posterior by Gibbs sampling.

    One sweep visits every factor once and costs as much as half a sweep of :func:`~gpytorch_tkrr.fit_als`. A model that
    has been fitted by ALS is the start of all chains; otherwise they start from the main effects and pairwise
    interactions that the data show. A model that holds draws already is continued, and new draws are added to the old
    ones, where ``num_warmup=0``; data, mean, box and sizes must be those of the old draws. With `new_rows` its chains
    go on from where they stopped, and the new draws replace the old ones, which did not know these rows. Kernel and
    likelihood are left at the posterior mean.

    A fit that fails or is interrupted (Ctrl-C) leaves the model as it was; pass a `checkpoint` to go on later.

    Hyperparameters with ``requires_grad=False`` stay fixed; priors and constraints registered on the kernel and the
    likelihood are honoured. See :mod:`gpytorch_tkrr.sampling.hyperparameters` for the weak defaults.

    :param model: The model; its posterior is replaced.
    :param data: See :func:`~gpytorch_tkrr.fit_als`; by default the training data of the model.
    :param new_rows: `(x, y)` to be appended to the training data of the model first.
    :param num_draws: Draws kept per chain, one per sweep. By default 30, or 40 where there are one or two
        chains.
    :param num_warmup: Sweeps before them, during which proposals are tuned, components that do nothing are dropped, and
        rows are few at first where there are many. By default at most 50 to 80; fewer where the noise has stopped
        falling.
    :param num_chains: Independent chains. By default 1 where sweeps are given; else up to 6 for up to 1 000 rows, up to
        4 for 3 000, up to 2 for 8 000, fewer where inputs are many: where rows are few each chain explains them in its
        own way. Where no rank is given, half of them up to 600 rows, and one up to 1 000, take the limit of many
        components (see :mod:`gpytorch_tkrr.sampling.process`). They are weighed by training rows that they have not
        seen at first, and draws are kept in proportion (Gaussian noise; see :mod:`gpytorch_tkrr.sampling.pooling`).
        They run at once in as many processes as torch has threads, one after the other where a `checkpoint` or a
        `group` is given. The draws do not depend on that.
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
    for name, value, least in (
        ("num_draws", num_draws, 4),
        ("num_warmup", num_warmup, 0),
        ("num_chains", num_chains, 1),
    ):
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}; got {value}.")
    if new_rows is not None and data is not None:
        raise ValueError(
            "new_rows are appended to the model's own training data; data replaces these. Pass one of them."
        )
    earlier = _draws_to_continue(model, is_start=new_rows is not None) if num_warmup == 0 or new_rows else None
    with rollback_on_error(model):
        if new_rows is not None:
            append_rows(model, *new_rows)
        processes, checkpoint = as_processes(group), as_checkpoint(checkpoint)
        training = model.training_data(data, processes, memory=memory)
        model.prepare(training)
        require_representable(model, training.summary.variance)
        identity = fit_identity(
            "fit_gibbs", model, training.summary, seed=seed, num_warmup=num_warmup, num_draws=num_draws,
            num_chains=num_chains,
        )  # fmt: skip
        require_same_fit(identity, processes)
        saved = checkpoint.open(identity, processes)
        try:
            entropy = processes.share(np.random.SeedSequence(seed).entropy)
            fit = GibbsFit(model, training, earlier, memory, entropy, extends=new_rows is None)
            fit.arrange(saved)
            if earlier is None and num_warmup != 0:
                fit.race(saved)
            plan = fit.choose_plan(num_warmup, num_draws, num_chains)
            if saved is None and isinstance(checkpoint, NoCheckpoint) and processes.size == 1:
                num_workers = min(plan.num_chains, num_parallel())
            else:
                num_workers = 1
            if num_workers > 1:
                chains = fit.run_in_processes(num_workers, progress)
            else:
                chains = fit.run(checkpoint, saved, progress)
        finally:
            checkpoint.close()
        return fit.finish(chains)


def _draws_to_continue(model: TKRR, *, is_start: bool) -> DrawsPosterior | None:
    """The draws of an earlier fit, where there are any; as a start those that cannot be continued are left aside."""
    if not model.is_fitted or not isinstance(model.posterior, DrawsPosterior):
        return None
    if not model.posterior.resume and is_start:
        return None
    if not model.posterior.resume:
        raise InputError(
            "The model's draws come without the state of their chains and cannot be continued. Start anew, with "
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
    ends: list[int]  # the sweep before which each stage of the warm-up ends
    sweep: int = 0
    log_noise: list[float] = field(default_factory=list)  # after each sweep of the present stage
    scores: list[Tensor] = field(default_factory=list)  # log densities of rows held out, each (n,)
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
    num_basis: int | tuple[int, ...]
    scores: Tensor  # log densities of rows held out, (n,)
    resume: dict[str, Any]


class GibbsFit:
    """
    What all chains of a fit have in common. Chains know nothing of each other: each has its own numbers of functions
    and its own rank, so that it does not matter in which order or in which process they are run.

    :param model: The model.
    :param training: Its data.
    :param earlier: Draws whose last ones the chains start from; None to start anew.
    :param memory: See :func:`fit_gibbs`.
    :param entropy: Where all random numbers come from.
    :param extends: Whether the draws are added to the earlier ones, which must be those of the same data.
    """

    plan: Plan
    held_out: Design | None = None  # rows by which chains are weighed
    processes: ProcessChains | None = None  # chains that take the limit of many components
    most_components: int | None = None  # that a chain starts with, where many overfit

    def __init__(
        self,
        model: TKRR,
        training: TrainingData,
        earlier: DrawsPosterior | None,
        memory: int,
        entropy: Any,
        *,
        extends: bool = True,
    ):
        self.model, self.training, self.earlier, self.entropy = model, training, earlier, entropy
        self.extends = extends
        offset = 0.0
        if model.observation.has_link:
            offset = _link_offset(model, training)
        elif model.observation.has_limits:
            offset = _constant_mean(model, training) / training.scale
        self.augmentation = model.observation.augmentation(training.scale, offset)
        self.separable = model.separate()
        if earlier is not None and extends:
            _require_same_target(earlier, _target_identity(model, training.summary))
        bases = [mode.basis for mode in self.separable.modes]
        design = Design(training, bases, memory=memory, weights=model.weights)
        design.marginals()  # before the first update also where a chain is resumed: rows are kept from here on
        self.designs = [design]  # of each stage of the warm-up; the last has all rows
        self.num_dims = len(self.separable.modes)
        summary = training.summary
        centers = None if earlier is None else earlier.resume["centers"]
        with torch.enable_grad():
            half_range = (summary.upper - summary.lower) / 2
            self.hyperparameters = Hyperparameters(model.covar_module, self.separable, half_range, centers)
        self.half_range, self.centers = half_range, centers
        self.second = SecondFit.of(self.augmentation, summary, None if earlier is None else earlier.parameters)
        self.grids = range_grids(summary.lower, summary.upper)
        self.all_slots = range(len(self.hyperparameters.slots))
        self.start = self.hyperparameters.get(self.all_slots)
        self.share = training.scale ** (1 / self.num_dims)  # of the targets' scale in each factor
        self.als_factors: list[Tensor] = []  # raw, where the model was fitted by ALS: the start of all chains
        fitted = model.factors_to_start_from()
        if fitted is not None:
            self.als_factors = self._resized([factor.squeeze(0) / self.share for factor in fitted.factors])
        self.screening: Screening | None = None
        self.start_counts = model.num_basis

    def choose_plan(self, num_warmup: int | None, num_draws: int | None, num_chains: int | None) -> Plan:
        """
        Chains, rank, stages and sweeps.

        :param num_warmup: See :func:`fit_gibbs`.
        :param num_draws: See :func:`fit_gibbs`.
        :param num_chains: See :func:`fit_gibbs`.
        """
        earlier, model = self.earlier, self.model
        rank: int | None = self.most_components if model.adapts_rank else model.rank
        if earlier is not None:
            num_chains, rank = len(earlier.resume["chains"]), earlier.resume.get("rank", model.rank)
        elif self.als_factors:
            rank = model.weights.rank_of([len(factor) for factor in self.als_factors])
        tables = self.designs[-1].tables
        self.plan = Plan.choose(
            self.training.summary.num_rows,
            sum(table.num_moments for table in tables),
            max(table.num_functions for table in tables),
            self.num_dims,
            rank=rank,
            num_warmup=num_warmup,
            num_draws=num_draws,
            num_chains=num_chains,
            can_score=self.augmentation.free == ("noise",) and self.second is None,
            can_integrate=self._can_integrate(),
        )
        if self.plan.num_processes or (earlier is not None and any(map(_is_process, earlier.resume["chains"]))):
            self.processes = self._process_chains()
        if self.plan.ends[-1] > 0:
            key = int(np.random.default_rng(self.entropy).integers(2**62))
            all_rows, rows = self.designs[-1], self.plan.rows
            self.designs = [*(all_rows.thinned(num, key) for num in rows[:-1]), all_rows]
            if self.plan.num_held_out:
                self.held_out = all_rows.thinned(self.plan.num_held_out, key, skip=rows[0])
        return self.plan

    def arrange(self, saved: dict[str, Any] | None = None) -> None:
        """
        Decide about the order of the inputs, where the format of the weights leaves it to the data.

        :param saved: What :meth:`state` described, where this has been decided before.
        """
        form = self.model.weights
        if form.is_undecided:
            if saved is None:
                form = form.arranged(self._screen().interactions())
            else:
                form = WeightFormat.from_state(saved).with_rank(form.rank)
            self.model.weights = form
            self.designs[-1].set_format(form)

    def _can_integrate(self) -> bool:
        """Whether the limit of many components can be taken: f is integrated out, and a draw is a sum of products."""
        model = self.model
        is_new = self.earlier is None and not self.als_factors and model.adapts_rank and model.weights.kind == "cp"
        is_known = not any(self.training.summary.num_missing())
        return is_new and is_known and self.augmentation.is_gaussian and self.augmentation.free == ("noise",)

    def _process_chains(self) -> ProcessChains:
        model, unit = self.model, self.training.scale**2
        with torch.enable_grad():
            hyperparameters = Hyperparameters(
                model.covar_module,
                self.separable,
                self.half_range,
                self.centers,
                likelihood=model.likelihood,
                unit=unit,
            )
        return ProcessChains(self, hyperparameters, len(self.hyperparameters.slots), unit)

    def few_rows(self, num_rows: int) -> Design:
        """
        Rows of the first stage, about so many.

        :param num_rows: How many.
        """
        return self.designs[0].thinned(num_rows, int(np.random.default_rng(self.entropy).integers(2**62)))

    def adapt_functions(self) -> None:
        """As many functions as the kernel needs as it stands, where their numbers are free."""
        if self.model.adapts_num_basis:
            self._adapt_num_basis()

    def race(self, saved: dict[str, Any] | None = None) -> None:
        """
        Decide by short chains and training rows that these have not seen. Columns that crowd are warped, all of them or
        the one that crowds most, where the rows are predicted better so. A chain starts with few components where
        that predicts them better than many, as with outliers that the noise does not allow for.

        :param saved: What :meth:`state` described, where this has been decided before.
        """
        model, plain = self.model, self.designs[-1]
        can_score = self.augmentation.free == ("noise",) and self.second is None
        if self.als_factors or not can_score or not model.races_warp:
            return
        if saved is None:
            columns, self.most_components = self._race(plain)
        else:
            columns, self.most_components = saved["race"]
        if columns:
            summary = self.training.summary
            found = InputWarp.from_data(summary.sample, summary.lower, summary.upper, keep=self.separable.categorical)
            model.warp = self.training.inputs = found.only(columns)
            self.designs, self.screening = [self._mapped(plain, model.warp)], None
            self.designs[-1].marginals()

    def _mapped(self, plain: Design, warp: InputWarp) -> Design:
        """All rows with warped inputs; those of a stream are read again."""
        if self.training.is_kept:
            return plain.mapped(warp)
        bases = [mode.basis for mode in self.separable.modes]
        return Design(self.training, bases, memory=plain.memory, weights=self.model.weights)

    def _race(self, plain: Design) -> tuple[list[int], int | None]:
        """The columns that are worth a warp, and the number of components to start with; None for the plan's choice."""
        model, summary = self.model, self.training.summary
        found = InputWarp.from_data(summary.sample, summary.lower, summary.upper, keep=self.separable.categorical)
        is_known = bool(torch.isfinite(summary.sample).all())  # missing inputs have no place in a warp
        crowded: list[int] = found.columns.tolist() if model.warp is None and is_known else []
        tries_rank = model.adapts_rank and summary.num_rows > MANY_ROWS
        num_held_out = min(RACE_HELD_OUT, summary.num_rows // 5)
        if not (crowded or tries_rank) or num_held_out < MIN_RACE_HELD_OUT:
            return [], None
        key = int(np.random.default_rng(self.entropy).integers(2**62))
        num_seen = min(RACE_ROWS, summary.num_rows - num_held_out)
        seen, held_out = plain.thinned(num_seen, key), plain.thinned(num_held_out, key, skip=num_seen)
        # A rank that is given is not exceeded: that of a tensor train costs as much as its square in components.
        tried = RACE_RANK if model.adapts_rank else min(RACE_RANK, model.rank)
        best, chosen, rank = self._pilot(seen, held_out, tried), [], None
        if tries_rank and is_better(best, self._pilot(seen, held_out, MIN_RANK)):
            rank = RACE_RANK
        moved = (found(summary.sample) - summary.sample).abs().amax(0) / (summary.upper - summary.lower)
        first = sorted(crowded, key=lambda d: -float(moved[d]))[:1]
        for columns in (first, crowded) if len(crowded) > 1 else (first,) if crowded else ():
            warp = found.only(columns)
            scores = self._pilot(seen.mapped(warp), held_out.mapped(warp), tried)
            if is_better(scores, best):
                best, chosen = scores, columns
        return chosen, rank

    def _pilot(self, seen: Design, held_out: Design, rank: int) -> Tensor:
        """
        Log densities of rows held out, of all processes, under a short chain, `(n,)`.

        :param seen: The rows of the chain.
        :param held_out: The others.
        :param rank: R of the chain.
        """
        rng = np.random.default_rng(np.random.SeedSequence(self.entropy).spawn(1)[0])
        self.hyperparameters.set(self.all_slots, self.start)
        covariances = [mode.covariance() for mode in self.separable.modes]
        form = self.model.weights.with_rank(rank)
        generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
        whitened = Screening.of(seen, covariances).start(form.num_components(self.num_dims), generator)
        factors = [v.unwhiten(w) for v, w in zip(covariances, form.from_components(whitened), strict=True)]
        steps = torch.full((len(self.hyperparameters.slots),), FIRST_STEP, dtype=torch.float64)
        state = self._prior(rank).start(factors, self.augmentation.start(), steps)
        sampler = self._sampler_on(seen, rng, rank)
        scores = []
        for sweep in range(RACE_SWEEPS):
            sampler.sweep(state, self._modes(sweep), min(0.5, 5 / (sweep + 5)), sweep / RACE_SWEEPS)
            if sweep >= RACE_SWEEPS - NUM_SCORED:
                scores.append(held_out.log_densities(state.factors, self.augmentation.noise(state.parameters)))
        self.hyperparameters.set(self.all_slots, self.start)
        own = torch.logsumexp(torch.stack(scores), 0).cpu()
        return torch.cat(self.training.processes.gather(own))

    def run(self, checkpoint: Checkpoint, saved: dict[str, Any] | None, progress: bool) -> list[_Chain]:
        """
        All chains, one after the other.

        :param checkpoint: Where states are saved.
        :param saved: What :meth:`state` described, to go on from there.
        :param progress: Whether to show a progress bar.
        """
        plan, processes = self.plan, self.training.processes
        num_sweeps = plan.ends[-1] + plan.num_draws
        chains: list[_Chain] = []
        done = 0
        if saved is not None:
            saved = move_tensors(saved, self.training.summary.lower.device)
            chains = [_Chain(**chain) for chain in saved["chains"]]
            done = len(chains) * num_sweeps + saved["run"]["sweep"]
            self.screening = None if saved["screening"] is None else Screening.from_state(saved["screening"])
        bar = progress_bar(progress and processes.rank == 0, self._num_sweeps(), "Gibbs", "sweep", done=done)
        try:
            for number in range(len(chains), plan.num_chains):
                if saved is None:
                    run = self.start_chain(number)
                else:
                    run, saved = self.resume_chain(number, saved), None
                while run.sweep < run.ends[-1] + plan.num_draws:
                    self.sweep(run)
                    bar.update(f"noise {self._noise(run):.4g}")
                    is_last = run.sweep == run.ends[-1] + plan.num_draws and number == plan.num_chains - 1
                    checkpoint.save(lambda: self.state(chains, run), last=is_last)  # noqa: B023 (called at once)
                bar.skip(num_sweeps - run.sweep)  # the warm-up may have ended early
                chains.append(self.finish_chain(run))
        finally:
            bar.close()
        return chains

    def _noise(self, run: _Run | ProcessRun) -> float:
        """The present noise variance of a chain, in the units of the targets."""
        if isinstance(run, ProcessRun):
            return float(self.model.likelihood.noise)
        return self.augmentation.noise(run.state.parameters) * self.training.scale**2

    def run_in_processes(self, num_workers: int, progress: bool) -> list[_Chain]:
        """
        All chains, in several processes at a time.

        :param num_workers: How many.
        :param progress: Whether to show a progress bar.
        """
        self._screen()

        def run(number: int, tell: Tell) -> _Chain:
            chain = self.start_chain(number)
            while chain.sweep < chain.ends[-1] + self.plan.num_draws:
                self.sweep(chain)
                tell(f"noise {self._noise(chain):.4g}")
            return self.finish_chain(chain)

        bar = progress_bar(progress, self._num_sweeps(), "Gibbs", "sweep")
        try:
            return run_forked(run, self.plan.num_chains, num_workers, bar.update)
        finally:
            bar.close()

    def _num_sweeps(self) -> int:
        """Sweeps of all chains, at most."""
        plan = self.plan
        in_limit = plan.num_processes * (WARMUP_SWEEPS - plan.ends[-1])
        return plan.num_chains * (plan.ends[-1] + plan.num_draws) + in_limit

    def _resize(self, num_basis: int | Sequence[int]) -> None:
        """Other numbers of functions; rows that have been kept stay."""
        self.model.resize(num_basis=num_basis)
        self.separable = self.model.separate()
        for design in (*self.designs, *([] if self.held_out is None else [self.held_out])):
            design.set_bases([mode.basis for mode in self.separable.modes])
        self.designs[-1].marginals()

    def start_chain(self, number: int) -> _Run | ProcessRun:
        """
        A chain before its first sweep.

        :param number: Its number.
        """
        if self.model.num_basis != self.start_counts:
            self._resize(self.start_counts)
        rng = np.random.default_rng(np.random.SeedSequence(self.entropy).spawn(self.plan.num_chains)[number])
        resume = None if self.earlier is None else self.earlier.resume["chains"][number]
        if number < self.plan.num_processes or (resume is not None and _is_process(resume)):
            assert self.processes is not None
            return self.processes.start(number, rng, resume, warm=self.plan.ends[-1] > 0)
        state = self._initial_state(number, rng)
        before = 0 if self.earlier is None else self.earlier.resume["chains"][number]["sweeps"]
        zeros = torch.zeros_like(state.precisions)
        return _Run(number, rng, state, self._sampler(rng), before, zeros, zeros, list(self.plan.ends))

    def _stage(self, run: _Run) -> int:
        """The stage of a chain: the last one also after the warm-up."""
        return next((i for i, end in enumerate(run.ends) if run.sweep < end), len(run.ends) - 1)

    def sweep(self, run: _Run | ProcessRun) -> None:
        """
        One sweep of a chain; draws are kept after the warm-up.

        :param run: The chain.
        """
        if isinstance(run, ProcessRun):
            assert self.processes is not None
            self.processes.sweep(run)
            return
        self._settle(run)
        first = run.ends[0]
        looks = (first // 4, first // 2, 3 * first // 4) if self.model.adapts_rank else (first // 2,)
        if 0 < run.sweep in (*looks, *run.ends):
            if run.sweep == first // 2 < first and self._have_died(run.last, run.state.parameters):
                run.state = self._fresh_state(run.rng, near_constant)
            else:
                self._drop_dead(run)
            run.sampler, run.peak = self._sampler(run.rng, self._stage(run)), torch.zeros_like(run.state.precisions)
        if self.model.adapts_num_basis and 0 < run.sweep in (first // 4, first // 2):
            self._adapt_num_basis()
            run.state.factors = self._resized(run.state.factors)
            run.sampler = self._sampler(run.rng, self._stage(run))
        state, num_warmup = run.state, run.ends[-1]
        is_warm = run.sweep >= num_warmup
        adapt, progress = (0.0, 1.0) if is_warm else (min(0.5, 5 / (run.sweep + 5)), run.sweep / num_warmup)
        run.sampler.sweep(state, self._modes(run.before + run.sweep), adapt, progress)
        run.last = run.sampler.energies
        run.peak = torch.maximum(run.peak, run.last)
        if is_warm:
            run.factors.append(state.scaled_factors())
            run.parameters.append(state.parameters)
            run.hyperparameters.append(self.hyperparameters.values())
            run.energies.append(run.sampler.energies)
        else:
            run.log_noise.append(math.log(max(self.augmentation.noise(state.parameters), 1e-300)))
        run.sweep += 1
        if self.held_out is not None and first - NUM_SCORED <= run.sweep - 1 < first:
            noise = self.augmentation.noise(state.parameters)
            run.scores.append(self.held_out.log_densities(state.factors, noise))

    def _modes(self, sweep: int) -> Sequence[int]:
        """The order in which a sweep visits the modes: along the chain, every other time back."""
        chain = self.model.weights.chain(self.num_dims)
        return chain if sweep % 2 == 0 else chain[::-1]

    def _settle(self, run: _Run) -> None:
        """End the present stage of the warm-up early where the noise has stopped falling."""
        stage = self._stage(run)
        begin, end = run.ends[stage - 1] if stage else 0, run.ends[stage]
        if run.sweep == begin:
            run.log_noise = []
        is_free = not self.plan.is_fixed and "noise" in self.augmentation.free
        is_free = is_free and run.sweep >= self.augmentation.warmup_part * run.ends[-1]
        if is_free and run.sweep > begin + (end - begin) // 2 and run.sweep < end and has_settled(run.log_noise):
            left = NUM_SCORED if stage == 0 and self.held_out is not None else 0
            early = max(end - run.sweep - left, 0)
            run.ends = run.ends[:stage] + [later - early for later in run.ends[stage:]]
            run.log_noise = []

    def finish_chain(self, run: _Run | ProcessRun) -> _Chain:
        """
        The draws of a chain, side by side.

        :param run: The chain.
        """
        device = self.training.summary.lower.device
        if isinstance(run, ProcessRun):
            assert self.processes is not None
            resume = self.processes.resume(run)
        else:
            state = run.state
            resume = {
                "precisions": state.precisions,
                "heights": [len(factor) for factor in state.factors],
                "steps": state.steps,
                "coordinates": self.hyperparameters.get(self.all_slots),
                "rng": run.rng.bit_generator.state,
                "sweeps": run.before + run.sweep,
            }
        scores = run.energies[0].new_empty(0)
        if run.scores:
            scores = torch.logsumexp(torch.stack(run.scores), 0) - math.log(len(run.scores))
        return _Chain(
            [torch.stack(draws) for draws in zip(*run.factors, strict=True)],
            {name: torch.stack([each[name] for each in run.parameters]).to(device) for name in run.parameters[0]},
            torch.stack(run.hyperparameters).to(device),
            torch.stack(run.energies),
            self.model.num_basis,
            scores,
            resume,
        )

    def state(self, chains: Sequence[_Chain], run: _Run | ProcessRun) -> dict[str, Any]:
        """
        What is needed to go on after a sweep.

        :param chains: Chains that are finished.
        :param run: The chain that is being run.
        """
        names = PROCESS_STATE if isinstance(run, ProcessRun) else RUN_STATE
        kept = {name: getattr(run, name) for name in names}
        if not isinstance(run, ProcessRun):
            kept["state"] = vars(run.state)
        return {
            **self.model.weights.state(),
            "chains": [vars(chain) for chain in chains],
            "run": {**kept, "rng": run.rng.bit_generator.state},
            "coordinates": self.hyperparameters.get(self.all_slots),
            "num_basis": self.model.num_basis,
            "screening": None if self.screening is None else self.screening.state(),
            "race": ([] if self.model.warp is None else self.model.warp.columns.tolist(), self.most_components),
        }

    def resume_chain(self, number: int, saved: dict[str, Any]) -> _Run | ProcessRun:
        """
        A chain where :meth:`state` was asked for, and the sums over modes where they stood then.

        :param number: Its number.
        :param saved: The state.
        """
        if "log_leap" in saved["run"]:
            process = self.start_chain(number)
            assert isinstance(process, ProcessRun)
            process.rng.bit_generator.state = saved["run"]["rng"]
            kept = {name: saved["run"][name] for name in PROCESS_STATE}
            kept["coordinates"] = kept["coordinates"].cpu()
            for name, value in kept.items():
                setattr(process, name, value)
            self._resize(saved["num_basis"])
            return process
        if saved["num_basis"] != self.model.num_basis:
            self._resize(saved["num_basis"])
        self.hyperparameters.set(self.all_slots, saved["coordinates"].cpu())
        state = GibbsState(**saved["run"]["state"])
        state.steps = state.steps.cpu()
        rng = np.random.default_rng(0)
        rng.bit_generator.state = saved["run"]["rng"]
        before = 0 if self.earlier is None else self.earlier.resume["chains"][number]["sweeps"]
        kept = {name: saved["run"][name] for name in RUN_STATE}
        kept["hyperparameters"] = [values.cpu() for values in kept["hyperparameters"]]
        run = _Run(number, rng, state, self._sampler(rng), before, **kept)
        # The rows of the last sweep, from where its last mode was.
        run.sweep -= 1
        stage = self._stage(run)
        run.sweep += 1
        run.sampler = self._sampler(rng, stage, position=self._modes(before + run.sweep - 1)[-1])
        return run

    def _sampler(self, rng: np.random.Generator, stage: int = 0, position: int | None = None) -> GibbsSampler:
        """
        A sampler on the rows of a stage.

        :param rng: Source of random numbers.
        :param stage: The stage.
        :param position: The mode that was visited last; None before the first visit.
        """
        return self._sampler_on(self.designs[stage], rng, self.plan.rank, position)

    def _sampler_on(
        self, design: Design, rng: np.random.Generator, rank: int, position: int | None = None
    ) -> GibbsSampler:
        design.reset(position)
        make = GibbsSampler if self.second is None else partial(JointSampler, self.second)
        return make(
            design,
            self.separable,
            self.hyperparameters,
            self.training.scale**2,
            self.augmentation,
            self.grids,
            rng,
            rank=rank,
            weights=self.model.weights,
        )

    def _have_died(self, energies: Tensor, parameters: Parameters) -> bool:
        """Whether no component says anything that the noise does not."""
        is_constant = self.training.summary.variance == 0  # constant targets: nothing to be said
        num_weights = sum(mode.num_functions for mode in self.separable.modes)
        in_noise = num_weights * self.augmentation.noise(parameters) / self.designs[0].data.summary.num_rows
        return not is_constant and float(energies.max()) <= min(in_noise, MIN_ENERGY)

    def _drop_dead(self, run: _Run) -> None:
        """Drop components whose values at all rows together are far below the noise of one; keep at least one."""
        num_rows = run.sampler.design.data.summary.num_rows
        limit = IDLE if self.model.adapts_rank else DEAD
        alive = run.peak * num_rows > limit * self.augmentation.noise(run.state.parameters)
        run.sampler.prior.keep(run.state, alive, run.peak)

    def _adapt_num_basis(self) -> None:
        """As many sines in each mode as its present lengthscale needs, and no more than it has distinct values."""
        model = self.model
        assert model.covar_module is not None and model.domain is not None
        limits = model.max_num_basis or [MAX_NUM_BASIS] * self.num_dims
        most = [min(limit, MAX_NUM_BASIS) for limit in limits]
        needed = num_basis_needed(model.covar_module, model.domain, most, TAIL)
        wanted = [max(math.ceil(1.25 * num), MIN_NUM_BASIS) for num in needed]
        self._resize([min(pair) for pair in zip(wanted, most, strict=True)])

    def _resized(self, factors: Sequence[Tensor]) -> list[Tensor]:
        """Raw factors with the present numbers of functions: the last sines are zero, or left out."""
        return [
            torch.nn.functional.pad(factor, (0, mode.num_functions - factor.shape[-1]))
            for factor, mode in zip(factors, self.separable.modes, strict=True)
        ]

    def _initial_state(self, number: int, rng: np.random.Generator) -> GibbsState:
        """Where an earlier chain stopped, an earlier ALS fit, or components that the data show."""
        hyper, earlier = self.hyperparameters, self.earlier
        if earlier is None:
            return self._fresh_state(rng, None if self.als_factors else self._screened)
        resume = earlier.resume["chains"][number]
        hyper.set(self.all_slots, resume["coordinates"])
        rng.bit_generator.state = resume["rng"]
        last = int((earlier.chains == number).nonzero()[-1])
        heights = resume.get("heights", [len(resume["precisions"])] * self.num_dims)  # earlier files: CP weights
        factors = self.model.weights.resized([factor[last] / self.share for factor in earlier.factors], heights)
        parameters = self.augmentation.scaled({name: each[last] for name, each in earlier.parameters.items()})
        state = self._prior().start(factors, parameters, resume["steps"].clone())
        state.precisions = resume["precisions"].clone()
        return state

    def _prior(self, rank: int | None = None) -> WeightPrior:
        form = self.model.weights.with_rank(self.plan.rank if rank is None else rank)
        return WeightPrior.of_kind[form.kind].of(form, [mode.num_functions for mode in self.separable.modes])

    def _screen(self) -> Screening:
        """What the rows of the first stage show, found once for all chains."""
        if self.screening is None:
            self.hyperparameters.set(self.all_slots, self.start)
            covariances = [mode.covariance() for mode in self.separable.modes]
            self.screening = Screening.of(self.designs[-1], covariances)
        return self.screening

    def _screened(
        self, design: Design, covariances: Sequence[Covariance], rank: int, generator: torch.Generator
    ) -> list[Tensor]:
        return self._screen().start(rank, generator)

    def _fresh_state(self, rng: np.random.Generator, start: Callable[..., list[Tensor]] | None) -> GibbsState:
        """All hyperparameters where the fit began, and components of a kind of start; None for those of ALS."""
        hyper, form = self.hyperparameters, self.model.weights.with_rank(self.plan.rank)
        hyper.set(self.all_slots, self.start)
        covariances = [mode.covariance() for mode in self.separable.modes]
        if start is None:
            factors = self._resized(self.als_factors)
        else:
            generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
            whitened = start(self.designs[-1], covariances, form.num_components(self.num_dims), generator)
            factors = [v.unwhiten(w) for v, w in zip(covariances, form.from_components(whitened), strict=True)]
        steps = torch.full((len(hyper.slots),), FIRST_STEP, dtype=torch.float64)
        return self._prior().start(factors, self.augmentation.start(), steps)

    def finish(self, chains: Sequence[_Chain]) -> GibbsResult:
        """Hand the draws to the model and judge them."""
        hyper = self.hyperparameters
        weights = self._weigh(chains)
        if self.earlier is None:
            chains, weights = _without_idle(chains, weights)
        rank = self._join(chains)
        factors = [torch.cat([chain.factors[d] for chain in chains]) * self.share for d in range(self.num_dims)]
        parameters = self.augmentation.natural(
            {name: torch.cat([chain.parameters[name] for chain in chains]) for name in chains[0].parameters}
        )
        values = torch.cat([chain.hyperparameters for chain in chains])  # (S, P)
        numbers = torch.cat([torch.full_like(chain.energies[:, 0], i).long() for i, chain in enumerate(chains)])
        named = {name: values[:, i] for i, name in enumerate(hyper.names)}
        target = _target_identity(self.model, self.training.summary)  # functions may have been adapted
        resume = {
            "centers": hyper.centers,
            "chains": [chain.resume for chain in chains],
            "target": target,
            "rank": rank,
            "weights": weights,
        }
        bases = [mode.basis for mode in self.separable.modes]
        earlier = self.earlier if self.extends else None
        num_draws = len(chains[0].energies)
        kept = torch.cat([index + i * num_draws for i, index in enumerate(kept_draws(weights, num_draws))])
        posterior = DrawsPosterior(bases, factors, parameters, named, numbers, resume, self.model.weights)
        rhat, ess = self._diagnose(posterior if earlier is None else earlier.extended(posterior), len(chains))
        posterior = posterior.subset(kept)
        if earlier is not None:
            posterior = earlier.extended(posterior)
        self.model.set_posterior(posterior)
        if hyper.slots:
            hyper.set_values(torch.stack([draws.mean() for draws in posterior.hyperparameters.values()]))
        if self.second is not None:
            self.second.finish(posterior.parameters)
        free = {name: posterior.parameters[name] for name in self.augmentation.free}
        self.model.observation.set_parameters(free)
        energies = torch.cat([chain.energies for chain in chains])  # (S, R), in units of the targets' variance
        finite = [chain.energies for chain in chains if not _is_process(chain.resume)]
        effective_rank = self._prior().effective_rank(torch.cat(finite)) if finite else math.inf
        concern = self.augmentation.concern(posterior.parameters)
        if concern is not None:
            warnings.warn(concern, ConstraintWarning, stacklevel=4)
        sizes = [mode.num_functions for mode in self.separable.modes]
        is_process = [_is_process(chain.resume) for chain in chains]
        watched = set(rhat) - set(hyper.names)
        message = _verdict(posterior, is_process, watched, rhat, sizes, warn=self.plan.is_fixed)
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

    def _join(self, chains: Sequence[_Chain]) -> int:
        """
        Give all chains as many functions and components as the largest has; what they lack is zero.

        :return: R that the prior was made for.
        """
        counts = [_counts(chain.num_basis, self.num_dims) for chain in chains]
        largest: list[int] = [max(each) for each in zip(*counts, strict=True)]
        if list(_counts(self.model.num_basis, self.num_dims)) != largest:
            self._resize(largest)
        rank = self.model.rank
        if self.model.adapts_rank:
            rank = max(self.model.weights.rank_of([each.shape[-2] for each in chain.factors]) for chain in chains)
        self.model.resize(rank=rank if self.earlier is None else max(self.earlier.rank, rank))
        form, sizes = self.model.weights, [mode.num_functions for mode in self.separable.modes]
        drawn = [chain.factors for chain in chains] + ([] if self.earlier is None else [self.earlier.factors])
        heights = form.union([form.heights(sizes), *([each.shape[-2] for each in factors] for factors in drawn)])
        width = max(chain.energies.shape[1] for chain in chains)
        for chain in chains:
            chain.factors = form.resized(self._resized(chain.factors), heights)
            chain.energies = torch.nn.functional.pad(chain.energies, (0, width - chain.energies.shape[1]))
        return self.plan.rank

    def _weigh(self, chains: Sequence[_Chain]) -> Tensor:
        """Weights of the chains, `(C,)`: those of an earlier fit, or by the rows that they have not seen at first."""
        if self.earlier is not None and "weights" in self.earlier.resume:
            return self.earlier.resume["weights"]
        own = torch.stack([chain.scores for chain in chains], -1).cpu()  # (n, C), rows of this process
        scores = torch.cat(self.training.processes.gather(own))
        return stacking_weights(scores) if len(scores) else torch.full((len(chains),), 1 / len(chains)).double()

    def _diagnose(self, posterior: DrawsPosterior, num_chains: int) -> tuple[dict[str, float], dict[str, float]]:
        sample = self.training.summary.sample
        rows = torch.linspace(0, len(sample) - 1, min(NUM_WATCHED, len(sample))).long()
        watched = self.model.warped(sample[rows])
        quantities = {**posterior.hyperparameters, "f": posterior.functions(watched)}
        if self.second is not None:
            quantities[self.second.prefix.rstrip(".")] = self.second.values(posterior.parameters, watched)
        quantities.update({name: posterior.parameters[name] for name in self.augmentation.watched})
        rhat, ess = {}, {}
        shortest = int(posterior.chains.bincount(minlength=num_chains).min())
        for name, values in quantities.items():
            parts = [values[posterior.chains == number][-shortest:] for number in range(num_chains)]
            array = np.stack([part.cpu().numpy() for part in parts])
            rhat[name] = float(split_rhat(array).max())
            ess[name] = float(effective_sample_size(array).min())
        return rhat, ess


def _without_idle(chains: Sequence[_Chain], weights: Tensor) -> tuple[list[_Chain], Tensor]:
    """Without chains in the limit of many components that count for little: their draws are large."""
    is_kept = [not _is_process(c.resume) or float(w) > IDLE_WEIGHT for c, w in zip(chains, weights, strict=True)]
    kept = [chain for chain, keep in zip(chains, is_kept, strict=True) if keep]
    weights = weights[torch.tensor(is_kept)]
    return kept, weights / weights.sum()


def _is_process(resume: dict[str, Any]) -> bool:
    """Whether a chain that can be continued takes the limit of many components."""
    return resume.get("kind") == "process"


def _counts(num_basis: int | Sequence[int], num_dims: int) -> Sequence[int]:
    return [num_basis] * num_dims if isinstance(num_basis, int) else num_basis


def _target_identity(model: TKRR, summary: Summary) -> dict[str, Any]:
    """
    What draws belong to: rows, mean, box, sizes, and all of kernel and likelihood but the values of free parameters.
    Draws of another target must not be added to them.
    """
    assert model.domain is not None
    names = ("num_rows", "mass", "mean", "variance", "lower", "upper", "fingerprint")
    rows = {name: getattr(summary, name) for name in names}
    fraction = torch.linspace(0, 1, 33, dtype=torch.float64, device=summary.lower.device).unsqueeze(-1)
    grid = summary.lower + fraction * (summary.upper - summary.lower)
    sizes = [mode.num_functions for mode in model.separate().modes]
    order = list(model.weights.chain(len(sizes)))
    identity = {
        **{f"{name} of the data": value for name, value in rows.items()},
        "the mean function": model.mean_module(grid.to(next(model.mean_module.parameters(), grid).dtype)).double(),
        "the box": torch.stack(model.domain.sides(summary.num_dims)),
        "num_basis": sizes,
        "rank": model.rank,
        "the format of the weights": model.weights.kind,
        **({} if order == sorted(order) else {"the order of the inputs": order}),
        **_rules(model.covar_module, "kernel"),
        **_rules(model.likelihood, "likelihood"),
    }
    return {name: value.detach().cpu() if isinstance(value, Tensor) else value for name, value in identity.items()}


def _rules(module: torch.nn.Module | None, name: str) -> dict[str, Any]:
    """A module without the values of its free parameters; numbers as in single precision, which a model may be in."""
    assert module is not None
    known = module_identity(module, name)
    kept = {key: value for key, value in known.items() if not known.get(f"{key}.requires_grad", False)}
    floats = {k: v.float() for k, v in kept.items() if isinstance(v, Tensor) and v.is_floating_point()}
    return {k: str(v) if isinstance(v, Incomparable) else v for k, v in {**kept, **floats}.items()}


def _require_same_target(earlier: DrawsPosterior, identity: dict[str, Any]) -> None:
    """An error where the draws to be continued are those of something else."""
    saved = earlier.resume.get("target", {})
    name = difference(saved, identity)
    if name is not None:
        raise InputError(
            f"The model's draws cannot be continued (num_warmup=0): {name} was {show(saved.get(name))} and is now "
            f"{show(identity.get(name))}. Draws of different data, models or sizes do not mix. Start anew, with "
            "num_warmup > 0."
        )


def _verdict(
    posterior: DrawsPosterior,
    is_process: Sequence[bool],
    watched: set[str],
    rhat: dict[str, float],
    sizes: Sequence[int],
    *,
    warn: bool,
) -> str:
    """What was done; a warning where chains disagree, unless they are many and short on purpose."""
    num_chains = len(is_process)
    limit = f" ({sum(is_process)} in the limit of many components)" if any(is_process) else ""
    message = (
        f"{posterior.num_draws} draws of {num_chains} chain(s){limit}, rank {posterior.rank}, "
        f"{min(sizes)} to {max(sizes)} functions per dimension."
    )
    worst = max(rhat[name] for name in watched)
    if num_chains > 1 and worst > MAX_RHAT:
        message += f" The chains disagree (R-hat {worst:.2f}); the pooled draws cover what they found."
        if warn:
            warnings.warn(
                f"The chains disagree: split R-hat of function values and noise is up to {worst:.2f}, above "
                f"{MAX_RHAT}. Raise num_warmup and num_draws; the pooled draws still cover what the chains found.",
                ConvergenceWarning,
                stacklevel=4,
            )
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
