"""More components while a chain runs: hardly any has died, and rows that it has not seen say that more pay.

The chain goes on twice from where it stands, as it is and with more components, which start near the constant and
together as large as the noise. It keeps to the way under which the other rows are more probable, even if only by a
little: components that turn out to do nothing are dropped again.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..cp.design import Design
from ..cp.start import near_constant
from ..sampling.plan import GROWTH_SCORED, GROWTH_SWEEPS
from ..sampling.pooling import mean_gain
from ..sampling.priors import GibbsState, SoftRankPrior
from .problem import GibbsProblem
from .race import scored_sweeps


class Branch(NamedTuple):
    """
    How a chain may go on.

    :param rank: R that its prior is made for.
    :param state: Its state.
    :param energies: Mean square of each component.
    :param coordinates: All hyperparameters.
    :param scores: Log densities of the rows that it does not see, `(n,)`.
    """

    rank: int
    state: GibbsState
    energies: Tensor
    coordinates: Tensor
    scores: Tensor


def branch_out(
    problem: GibbsProblem,
    state: GibbsState,
    ranks: tuple[int, int],
    rows: Design,
    unseen: Design,
    rng: np.random.Generator,
    sweep: int,
) -> Branch:
    """
    The better one of a chain and the same chain with more components, after some sweeps. The kernel object's
    hyperparameters are where it is then.

    :param problem: What is sampled.
    :param state: The chain's state, which is not changed.
    :param ranks: The present number of components, of the prior, and the larger one.
    :param rows: The rows that the chain sees.
    :param unseen: Rows that it does not see.
    :param rng: Source of random numbers.
    :param sweep: The number of its next sweep.
    """
    start = problem.hyperparameters.get(problem.all_slots)
    sweeps = range(sweep, sweep + GROWTH_SWEEPS)

    def go_on(rank: int, state: GibbsState) -> Branch:
        problem.hyperparameters.set(problem.all_slots, start)
        sampler = problem.sampler(rows, rng, rank)
        scores = scored_sweeps(problem, sampler, state, sweeps, unseen, GROWTH_SCORED)
        return Branch(rank, state, sampler.energies, problem.hyperparameters.get(problem.all_slots), scores)

    larger = _with_more(problem, state, ranks, rng)
    same, more = go_on(ranks[0], copy.deepcopy(state)), go_on(ranks[1], larger)
    best = more if mean_gain(more.scores, same.scores) > 0 else same
    problem.hyperparameters.set(problem.all_slots, best.coordinates)
    return best


def _with_more(
    problem: GibbsProblem, state: GibbsState, ranks: tuple[int, int], rng: np.random.Generator
) -> GibbsState:
    """A state with as many components more as one rank exceeds the other."""
    covariances = [mode.covariance() for mode in problem.separable.modes]
    generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
    whitened = near_constant(problem.designs[-1], covariances, ranks[1] - ranks[0], generator)
    factors = [covariance.unwhiten(each) for covariance, each in zip(covariances, whitened, strict=True)]
    factors[0] = factors[0] * problem.augmentation.noise(state.parameters) ** 0.5
    prior = problem.prior(ranks[1])
    assert isinstance(prior, SoftRankPrior)
    return prior.grown(state, factors)
