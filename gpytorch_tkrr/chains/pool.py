"""The draws of all chains as one posterior: weighed, given the same sizes, and compared."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..model.draws import DrawsPosterior
from ..sampling.diagnostics import effective_sample_size, split_rhat
from ..sampling.pooling import keep_up, kept_draws, stacking_weights
from .chain import ChainDraws
from .problem import GibbsProblem
from .target import target_identity

#: Chains in the limit of many components are left out where their weight is below this: their draws are large.
IDLE_WEIGHT = 0.05

#: Training rows whose function values are watched for convergence.
NUM_WATCHED = 50


def weigh(problem: GibbsProblem, chains: Sequence[ChainDraws]) -> tuple[list[ChainDraws], Tensor]:
    """
    The chains that count, and their weights `(C,)`: those of an earlier fit, or by the rows that they have not seen at
    first.

    :param problem: What they sampled.
    :param chains: All chains.
    """
    earlier = problem.earlier
    if earlier is not None and "weights" in earlier.resume:
        return list(chains), earlier.resume["weights"]
    own = torch.stack([chain.scores for chain in chains], -1).cpu()  # (n, C), rows of this process
    scores = torch.cat(problem.training.processes.gather(own))
    if earlier is not None or not len(scores):
        return list(chains), _weights(scores)
    kept = [i for i, keeps_up in enumerate(keep_up(scores)) if keeps_up]
    weights = _weights(scores[:, kept])
    counts = [not chains[i].is_limit or float(w) > IDLE_WEIGHT for i, w in zip(kept, weights, strict=True)]
    weights = weights[torch.tensor(counts)]
    return [chains[i] for i, is_kept in zip(kept, counts, strict=True) if is_kept], weights / weights.sum()


def _weights(scores: Tensor) -> Tensor:
    """Of chains, from log densities `(n, C)`; equal ones where there are no rows."""
    num_rows, num_chains = scores.shape
    return stacking_weights(scores) if num_rows else torch.full((num_chains,), 1 / num_chains).double()


def join(problem: GibbsProblem, chains: Sequence[ChainDraws]) -> None:
    """
    Give all chains, and the model, as many functions and components as the largest has; what they lack is zero.

    :param problem: What they sampled.
    :param chains: Those that count.
    """
    model, earlier, num_dims = problem.model, problem.earlier, problem.num_dims
    counts = [_counts(chain.num_basis, num_dims) for chain in chains]
    largest: list[int] = [max(each) for each in zip(*counts, strict=True)]
    if list(_counts(model.num_basis, num_dims)) != largest:
        problem.resize(largest)
    rank = model.rank
    if model.adapts_rank:
        rank = max(model.weights.rank_of([each.shape[-2] for each in chain.factors]) for chain in chains)
    model.resize(rank=rank if earlier is None else max(earlier.rank, rank))
    form, sizes = model.weights, [mode.num_functions for mode in problem.separable.modes]
    drawn = [chain.factors for chain in chains] + ([] if earlier is None else [earlier.factors])
    heights = form.union([form.heights(sizes), *([each.shape[-2] for each in factors] for factors in drawn)])
    width = max(chain.energies.shape[1] for chain in chains)
    for chain in chains:
        chain.factors = form.resized(problem.resized(chain.factors), heights)
        chain.energies = torch.nn.functional.pad(chain.energies, (0, width - chain.energies.shape[1]))


def _counts(num_basis: int | Sequence[int], num_dims: int) -> Sequence[int]:
    return [num_basis] * num_dims if isinstance(num_basis, int) else num_basis


def all_draws(problem: GibbsProblem, chains: Sequence[ChainDraws], weights: Tensor) -> DrawsPosterior:
    """
    Every draw of all chains, in the units of the targets.

    :param problem: What they sampled.
    :param chains: Those that count, after :func:`join`.
    :param weights: Their weights.
    """
    num_dims, hyper = problem.num_dims, problem.hyperparameters
    factors = [torch.cat([chain.factors[d] for chain in chains]) * problem.share for d in range(num_dims)]
    parameters = problem.augmentation.natural(_side_by_side(chains))
    values = torch.cat([chain.hyperparameters for chain in chains])  # (S, P)
    numbers = torch.cat([torch.full_like(chain.energies[:, 0], i).long() for i, chain in enumerate(chains)])
    named = {name: values[:, i] for i, name in enumerate(hyper.names)}
    resume = {
        "centers": hyper.centers,
        "chains": [chain.resume for chain in chains],
        "target": target_identity(problem.model, problem.training.summary),  # functions may have been adapted
        "rank": problem.plan.rank,
        "weights": weights,
    }
    bases = [mode.basis for mode in problem.separable.modes]
    return DrawsPosterior(bases, factors, parameters, named, numbers, resume, problem.model.weights)


def in_proportion(draws: DrawsPosterior, weights: Tensor) -> DrawsPosterior:
    """
    Draws of each chain in proportion to its weight.

    :param draws: Of all chains, one chain after the other.
    :param weights: Of the chains, `(C,)`.
    """
    counts = draws.chains.bincount(minlength=len(weights)).tolist()
    kept, first = [], 0
    for index, count in zip(kept_draws(weights, counts), counts, strict=True):
        kept.append(index + first)
        first += count
    return draws.subset(torch.cat(kept))


def mean_parameters(chains: Sequence[ChainDraws]) -> dict[str, Tensor]:
    """
    The observation model's parameters, averaged over all draws, for targets of unit variance.

    :param chains: Those that count.
    """
    return {name: values.mean(0) for name, values in _side_by_side(chains).items()}


def _side_by_side(chains: Sequence[ChainDraws]) -> dict[str, Tensor]:
    return {name: torch.cat([chain.parameters[name] for chain in chains]) for name in chains[0].parameters}


def diagnose(
    problem: GibbsProblem, posterior: DrawsPosterior, num_chains: int
) -> tuple[dict[str, float], dict[str, float]]:
    """
    Split R-hat and effective sample sizes of hyperparameters, noise and the worst of some function values.

    :param problem: What was sampled.
    :param posterior: Every draw of all chains.
    :param num_chains: C.
    """
    sample = problem.training.summary.sample
    rows = torch.linspace(0, len(sample) - 1, min(NUM_WATCHED, len(sample))).long()
    watched = problem.model.warped(sample[rows])
    quantities = {**posterior.hyperparameters, "f": posterior.functions(watched)}
    if problem.second is not None:
        quantities[problem.second.prefix.rstrip(".")] = problem.second.values(posterior.parameters, watched)
    quantities.update({name: posterior.parameters[name] for name in problem.augmentation.watched})
    rhat, ess = {}, {}
    shortest = int(posterior.chains.bincount(minlength=num_chains).min())
    for name, values in quantities.items():
        parts = [values[posterior.chains == number][-shortest:] for number in range(num_chains)]
        array = np.stack([part.cpu().numpy() for part in parts])
        rhat[name] = float(split_rhat(array).max())
        ess[name] = float(effective_sample_size(array).min())
    return rhat, ess
