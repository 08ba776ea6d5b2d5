"""Short chains that decide, by training rows that they have not seen, about warped inputs and many components."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..bases.covariance import Covariance
from ..cp.design import Design
from ..cp.start import Screening
from ..model.warp import InputWarp
from ..sampling.plan import (
    MANY_INPUTS,
    MANY_ROWS,
    MIN_RACE_HELD_OUT,
    MIN_RANK,
    NUM_SCORED,
    RACE_HELD_OUT,
    RACE_RANK,
    RACE_ROWS,
    RACE_SWEEPS,
    adaptation,
    begins_on_few,
)
from ..sampling.pooling import is_better
from ..sampling.priors import GibbsState
from ..sampling.sampler import GibbsSampler
from .problem import GibbsProblem


def race(problem: GibbsProblem, saved: dict[str, Any] | None = None) -> None:
    """
    Columns that crowd are warped, all of them or the one that crowds most, where the rows are predicted better so. A
    chain starts with few components where that predicts them better than many, as with outliers that the noise does not
    allow for.

    :param problem: What is to be sampled.
    :param saved: The state of a fit where this has been decided before.
    """
    is_wide = problem.num_dims > MANY_INPUTS
    if is_wide or problem.als_factors or not problem.can_score or not problem.model.races_warp:
        return
    found = _crowded(problem)
    if saved is None:
        columns, problem.most_components = _decide(problem, found)
    else:
        columns, problem.most_components = saved["race"]
    if columns:
        problem.warp_inputs(found.only(columns))


def _crowded(problem: GibbsProblem) -> InputWarp:
    """A warp of all columns that crowd."""
    summary = problem.training.summary
    return InputWarp.from_data(summary.sample, summary.lower, summary.upper, keep=problem.separable.categorical)


def _decide(problem: GibbsProblem, found: InputWarp) -> tuple[list[int], int | None]:
    """The columns that are worth a warp, and the number of components to start with; None for the plan's choice."""
    model, summary, plain = problem.model, problem.training.summary, problem.designs[-1]
    is_known = bool(torch.isfinite(summary.sample).all())  # missing inputs have no place in a warp
    crowded: list[int] = found.columns.tolist() if model.warp is None and is_known else []
    tries_rank = model.adapts_rank and summary.num_rows > MANY_ROWS and not begins_on_few(summary.num_rows)
    num_held_out = min(RACE_HELD_OUT, summary.num_rows // 5)
    if not (crowded or tries_rank) or num_held_out < MIN_RACE_HELD_OUT:
        return [], None
    key, num_seen = problem.row_key, min(RACE_ROWS, summary.num_rows - num_held_out)
    seen, held_out = plain.thinned(num_seen, key), plain.thinned(num_held_out, key, skip=num_seen)
    # A rank that is given is not exceeded: that of a tensor train costs as much as its square in components.
    tried = RACE_RANK if model.adapts_rank else min(RACE_RANK, model.rank)
    best, chosen, rank = _pilot(problem, seen, held_out, tried), [], None
    if tries_rank and is_better(best, _pilot(problem, seen, held_out, MIN_RANK)):
        rank = RACE_RANK
    moved = (found(summary.sample) - summary.sample).abs().amax(0) / (summary.upper - summary.lower)
    first = sorted(crowded, key=lambda d: -float(moved[d]))[:1]
    for columns in (first, crowded) if len(crowded) > 1 else (first,) if crowded else ():
        warp = found.only(columns)
        scores = _pilot(problem, seen.mapped(warp), held_out.mapped(warp), tried)
        if is_better(scores, best):
            best, chosen = scores, columns
    return chosen, rank


def _pilot(problem: GibbsProblem, seen: Design, held_out: Design, rank: int) -> Tensor:
    """
    Log densities of rows held out, of all processes, under a short chain, `(n,)`.

    :param problem: What is to be sampled.
    :param seen: The rows of the chain.
    :param held_out: The others.
    :param rank: R of the chain.
    """

    def screened(covariances: Sequence[Covariance], num: int, generator: torch.Generator) -> list[Tensor]:
        return Screening.of(seen, covariances).start(num, generator)

    rng = np.random.default_rng(np.random.SeedSequence(problem.entropy).spawn(1)[0])
    state = problem.first_state(rng, rank, screened)
    scores = scored_sweeps(problem, problem.sampler(seen, rng, rank), state, range(RACE_SWEEPS), held_out, NUM_SCORED)
    problem.hyperparameters.set(problem.all_slots, problem.start)
    return scores


def scored_sweeps(
    problem: GibbsProblem, sampler: GibbsSampler, state: GibbsState, sweeps: range, unseen: Design, num_scored: int
) -> Tensor:
    """
    Sweeps of a warm-up; the log densities of rows under the draws of the last ones, of all processes, `(n,)`.

    :param problem: What is to be sampled.
    :param sampler: On the rows of the chain.
    :param state: The chain's state, which is changed.
    :param sweeps: Their numbers.
    :param unseen: Other rows.
    :param num_scored: How many draws are scored.
    """
    scores = []
    for sweep in sweeps:
        sampler.sweep(state, problem.modes(sweep), adaptation(sweep), sweep / sweeps.stop)
        if sweep >= sweeps.stop - num_scored:
            scores.append(unseen.log_densities(state.factors, problem.augmentation.noise(state.parameters)))
    own = torch.logsumexp(torch.stack(scores), 0).cpu()
    return torch.cat(problem.training.processes.gather(own))
