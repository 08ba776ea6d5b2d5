"""Fitting the CP-weight model by Gibbs sampling."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..chains.chain import Chain, ChainDraws
from ..chains.component_chain import ComponentChain
from ..chains.first_lengthscales import shorten_lengthscales
from ..chains.limit_chain import WARMUP_SWEEPS, LimitChain
from ..chains.pool import all_draws, diagnose, in_proportion, join, mean_parameters, weigh
from ..chains.problem import GibbsProblem, is_limit
from ..chains.race import race
from ..cp.start import Screening
from ..data.checkpoint import (
    Checkpoint,
    NoCheckpoint,
    as_checkpoint,
    fit_identity,
    move_tensors,
    require_same_fit,
)
from ..data.parallel import as_processes
from ..data.progress import progress_bar
from ..errors import ConstraintWarning, ConvergenceWarning, InputError
from ..features.represented import MAX_MISSING, ModeGrid
from ..model.draws import DrawsPosterior
from ..model.low_rank import require_low_rank
from ..model.rollback import rollback_on_error
from ..sampling.hyperparameters import require_representable
from ..sampling.workers import Tell, num_parallel, run_forked
from .als import append_rows, require_new_rows
from .results import GibbsResult

if TYPE_CHECKING:
    from ..model.tkrr import TKRR

#: Chains are said to disagree where a split R-hat is larger than this.
MAX_RHAT = 1.1


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

    One sweep visits every factor once and costs half as much as a sweep of :func:`~gpytorch_tkrr.fit_als`. If the model
    has been fitted by ALS, all chains start from that solution; otherwise they start from the main effects and pairwise
    interactions in the data. After the fit, kernel and likelihood have the posterior means of their parameters
    (the kernel those of one draw where the box does not represent it at the means).

    To add draws to a model that has draws already, call the fit again with ``num_warmup=0`` and the same data, mean,
    box and sizes. With `new_rows` the chains continue with the additional rows, and the new draws replace the old ones.

    If a fit fails or is interrupted (Ctrl-C), the model stays as it was; with a `checkpoint` you can resume it later.

    Hyperparameters with ``requires_grad=False`` stay fixed. Priors and constraints of the kernel and the likelihood are
    used; :mod:`gpytorch_tkrr.sampling.hyperparameters` has the weak default priors.

    :param model: The model; its posterior is replaced.
    :param data: See :func:`~gpytorch_tkrr.fit_als`; by default the training data of the model.
    :param new_rows: Rows `(x, y)` that are first appended to the training data of the model.
    :param num_draws: Number of draws of each chain, one for each sweep. By default 40 with one or two chains, 30 with
        more, down to half as many if there are more than 40 inputs or a chain has added components, and twice as many
        with skewed noise.
    :param num_warmup: Number of sweeps before the draws. During these the proposals are tuned, components without
        effect are dropped, others are added where they pay, and large data are sampled (few rows first). By default
        50 to 80 at most, fewer if the noise stops falling earlier, if there are more than 40 inputs or if a chain has
        added components, and twice as many with skewed noise.
    :param num_chains: Number of independent chains. By default 1 if `num_draws` or `num_warmup` is given. Otherwise
        up to 6 and at least 2 for 1 000 rows or less, up to 4 for 3 000, up to 2 for 8 000, else 1, and fewer if
        there are many inputs: with few rows, different chains find different explanations. If no rank is given, half
        of the chains (up to 600 rows) or one of them (up to 1 000 rows) take the limit of many components
        (:mod:`gpytorch_tkrr.sampling.process`). With Gaussian noise the chains are weighted by training rows that
        they did not see at first, and draws are kept in proportion (:mod:`gpytorch_tkrr.sampling.pooling`). Chains
        run at the same time, in as many processes as torch has threads, or one after the other with a `checkpoint` or
        a `group`; the draws are the same.
    :param seed: The same seed gives the same draws, if the model is new or its hyperparameters are where they were.
    :param progress: Whether to show a progress bar (needs tqdm).
    :param memory: Bytes that the fit may use, in addition to the data, to keep products over modes; the rest is
        computed again when needed.
    :param group: See :func:`~gpytorch_tkrr.fit_als`. All processes use the same random numbers and have the same draws.
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
    require_low_rank(model, "fit_gibbs")
    for name, value, least in (
        ("num_draws", num_draws, 4),
        ("num_warmup", num_warmup, 0),
        ("num_chains", num_chains, 1),
        ("seed", seed, 0),
    ):
        if value is not None and not (isinstance(value, Integral) and value >= least):
            raise ValueError(f"{name} must be an integer, at least {least}; got {value!r}.")
    if new_rows is not None:
        require_new_rows(new_rows, data)
    is_start = new_rows is not None
    earlier = _draws_to_continue(model, is_start=is_start) if num_warmup == 0 or is_start else None
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
            problem = GibbsProblem(model, training, earlier, memory, entropy, extends=new_rows is None)
            problem.arrange(saved)
            if earlier is None and num_warmup != 0:
                race(problem, saved)
                if model.chooses_kernel and not problem.als_factors:
                    shorten_lengthscales(problem)
            plan = problem.choose_plan(num_warmup, num_draws, num_chains)
            if saved is None and isinstance(checkpoint, NoCheckpoint) and processes.size == 1:
                num_workers = min(plan.num_chains, num_parallel())
            else:
                num_workers = 1
            if num_workers > 1:
                chains = _run_in_processes(problem, num_workers, progress)
            else:
                chains = _run(problem, checkpoint, saved, progress)
        finally:
            checkpoint.close()
        return _finish(problem, chains)


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


def make_chain(problem: GibbsProblem, number: int) -> Chain:
    """
    A chain before its first sweep, and without a state.

    :param problem: What it samples.
    :param number: Its number.
    """
    if problem.model.num_basis != problem.start_counts:
        problem.resize(problem.start_counts)
    resume = None if problem.earlier is None else problem.earlier.resume["chains"][number]
    takes_limit = number < problem.plan.num_processes or (resume is not None and is_limit(resume))
    return (LimitChain if takes_limit else ComponentChain)(problem, number, resume)


def _run(
    problem: GibbsProblem, checkpoint: Checkpoint, saved: dict[str, Any] | None, progress: bool
) -> list[ChainDraws]:
    """
    All chains, one after the other.

    :param problem: What they sample.
    :param checkpoint: Where states are saved.
    :param saved: What :func:`_state` described, to go on from there.
    :param progress: Whether to show a progress bar.
    """
    plan = problem.plan
    num_sweeps = plan.ends[-1] + plan.num_draws
    finished: list[ChainDraws] = []
    done = 0
    if saved is not None:
        saved = move_tensors(saved, problem.training.summary.lower.device)
        finished = [ChainDraws(**chain) for chain in saved["chains"]]
        done = len(finished) * num_sweeps + saved["run"]["sweeps"]
        problem.screening = None if saved["screening"] is None else Screening.from_state(saved["screening"])
    is_shown = progress and problem.training.processes.rank == 0
    bar = progress_bar(is_shown, _num_sweeps(problem), "Gibbs", "sweep", done=done)
    try:
        for number in range(len(finished), plan.num_chains):
            chain = make_chain(problem, number)
            if saved is None:
                chain.begin()
            else:
                problem.resize(saved["num_basis"])
                chain.load(saved["run"])
                saved = None
            while not chain.has_ended:
                chain.sweep()
                bar.update(f"noise {chain.noise:.4g}")
                is_last = chain.has_ended and number == plan.num_chains - 1
                checkpoint.save(lambda: _state(problem, finished, chain), last=is_last)  # noqa: B023 (called at once)
            bar.skip(num_sweeps - chain.sweeps)  # the warm-up may have ended early
            finished.append(chain.draws())
    finally:
        bar.close()
    return finished


def _state(problem: GibbsProblem, finished: Sequence[ChainDraws], chain: Chain) -> dict[str, Any]:
    """
    What is needed to go on after a sweep.

    :param problem: What the chains sample.
    :param finished: Chains that have ended.
    :param chain: The one that is being run.
    """
    model = problem.model
    return {
        **model.weights.state(),
        "chains": [vars(draws) for draws in finished],
        "run": chain.state(),
        "num_basis": model.num_basis,
        "screening": None if problem.screening is None else problem.screening.state(),
        "race": ([] if model.warp is None else model.warp.columns.tolist(), problem.most_components),
    }


def _run_in_processes(problem: GibbsProblem, num_workers: int, progress: bool) -> list[ChainDraws]:
    """
    All chains, in several processes at a time.

    :param problem: What they sample.
    :param num_workers: How many.
    :param progress: Whether to show a progress bar.
    """
    problem.screen()

    def run(number: int, tell: Tell) -> ChainDraws:
        chain = make_chain(problem, number)
        chain.begin()
        while not chain.has_ended:
            chain.sweep()
            tell(f"noise {chain.noise:.4g}")
        return chain.draws()

    bar = progress_bar(progress, _num_sweeps(problem), "Gibbs", "sweep")
    try:
        return run_forked(run, problem.plan.num_chains, num_workers, bar.update)
    finally:
        bar.close()


def _num_sweeps(problem: GibbsProblem) -> int:
    """Sweeps of all chains, at most."""
    plan = problem.plan
    in_limit = plan.num_processes * (WARMUP_SWEEPS - plan.ends[-1])
    return plan.num_chains * (plan.ends[-1] + plan.num_draws) + in_limit


def _finish(problem: GibbsProblem, chains: Sequence[ChainDraws]) -> GibbsResult:
    """
    Hand the draws to the model and judge them.

    :param problem: What the chains sampled.
    :param chains: All of them.
    """
    model, hyper = problem.model, problem.hyperparameters
    chains, weights = weigh(problem, chains)
    join(problem, chains)
    draws = all_draws(problem, chains, weights)
    earlier = problem.earlier if problem.extends else None
    rhat, ess = diagnose(problem, draws if earlier is None else earlier.extended(draws), len(chains))
    posterior = in_proportion(draws, weights)
    if earlier is not None:
        posterior = earlier.extended(posterior)
    model.set_posterior(posterior)
    if hyper.slots:
        _set_centre(problem, torch.stack(list(posterior.hyperparameters.values()), -1))
    if problem.second is not None:
        problem.second.finish(posterior.parameters)
    model.observation.set_parameters({name: posterior.parameters[name] for name in problem.augmentation.free})
    finite = [chain.energies for chain in chains if not chain.is_limit]  # in units of the targets' variance
    effective_rank = problem.prior(problem.plan.rank).effective_rank(torch.cat(finite)) if finite else math.inf
    message, concerns = _verdict(problem, chains, posterior, rhat)
    for category, concern in concerns:
        warnings.warn(concern, category, stacklevel=4)
    return GibbsResult(model, posterior, rhat, ess, effective_rank, message)


def _set_centre(problem: GibbsProblem, drawn: Tensor) -> None:
    """
    Give the kernel the means of its drawn hyperparameters. All draws lie where the box represents the kernel, but their
    means, taken one by one, need not: then the draw that is nearest to them stands for all.

    :param problem: What the chains sampled.
    :param drawn: Constrained values `(S, P)`.
    """
    mean = drawn.mean(0)
    problem.hyperparameters.set_values(mean)
    modes = zip(problem.separable.modes, problem.grids, strict=True)
    if any(float(ModeGrid(mode, grid).missing().max()) > MAX_MISSING for mode, grid in modes):
        distance = ((drawn - mean) / drawn.std(0).clamp(min=1e-300)).square().sum(-1)
        problem.hyperparameters.set_values(drawn[distance.argmin()])


def _verdict(
    problem: GibbsProblem, chains: Sequence[ChainDraws], posterior: DrawsPosterior, rhat: dict[str, float]
) -> tuple[str, list[tuple[type[Warning], str]]]:
    """What was done, and what to warn of. Chains that are many and short on purpose may disagree."""
    concerns: list[tuple[type[Warning], str]] = []
    concern = problem.augmentation.concern(posterior.parameters)
    if concern is not None:
        concerns.append((ConstraintWarning, concern))
    concern = problem.augmentation.slowness(posterior.parameters, problem.training.summary.mean)
    if concern is not None:
        concerns.append((ConvergenceWarning, concern))
    for d, needed in problem.too_fast.items():
        concern = (
            f"Input {d} acts so fast that about {needed} functions are needed to follow it; the fit takes at most "
            f"{problem.most_functions()[d]} and takes the rest for noise. Give num_basis={needed} for this input and a "
            "small rank, a kernel with its period (PeriodicKernel), or use HilbertGP if there are few inputs."
        )
        concerns.append((ConvergenceWarning, concern))
    num_limits = sum(chain.is_limit for chain in chains)
    chains_text = "one chain" if len(chains) == 1 else f"{len(chains)} chains"
    limit = f" ({num_limits} in the limit of many components)" if num_limits else ""
    message = (
        f"{posterior.num_draws} draws of {chains_text}{limit}, rank {posterior.rank}, "
        f"num_basis {problem.model.num_basis_text()}."
    )
    num_left_out = problem.plan.num_chains - len(chains)
    if num_left_out:
        message += f" {num_left_out} more did not count: they predicted rows that were held out worse."
    worst = max(value for name, value in rhat.items() if name not in problem.hyperparameters.names)
    if len(chains) > 1 and worst > MAX_RHAT:
        message += f" The chains disagree (R-hat {worst:.2f}); the pooled draws cover what they found."
        if problem.plan.is_fixed:
            concern = (
                f"The chains disagree: split R-hat of function values and noise is up to {worst:.2f}, above "
                f"{MAX_RHAT}. Raise num_warmup and num_draws; the pooled draws still cover what the chains found."
            )
            concerns.append((ConvergenceWarning, concern))
    energies = torch.cat([chain.energies for chain in chains])  # (S, R)
    if problem.have_died(energies.amax(-1).mean(), mean_parameters(chains)):
        message += " All components have died."
        concern = (
            "All components have died: the model predicts little more than the mean, also after another start. "
            "Either the inputs do not explain the targets, or an interaction of three or more inputs was missed: "
            "raise num_warmup or rank, or try another seed."
        )
        concerns.append((ConvergenceWarning, concern))
    return message, concerns
