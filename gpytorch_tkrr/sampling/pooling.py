r"""Draws of several chains as one set: chains that predict better count more.

Each chain of CP weights explains the training rows in its own way, and mixes little with the ways of others. So all
chains warm up without some of the rows, the same ones, and the weights :math:`w` of the chains maximise the density of
these rows under the mixture (stacking; Yao, Vehtari & Gelman 2022),

.. math:: \sum_n \log \sum_c w_c\, p_c(y_n) + \lambda \sum_c \log w_c .

Then all rows are taken in, and draws of a chain are kept in proportion to its weight. So every draw counts the same,
and whoever uses draws need not know of weights. A chain that fails beside the best one (:func:`keep_up`) has no weight:
a mixture has use for wild predictions of a few rows, but its mean has not.

Reference: Yao, Vehtari & Gelman (2022), *Stacking for non-mixing Bayesian computations*.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

#: :math:`\lambda`: equal weights are worth as much as so many rows for each chain.
PRIOR_ROWS = 1.0

#: The most that a single row can say for one of two models, as a difference of log densities.
MAX_GAIN = 3.0

#: A chain fails where the best one makes a row more probable by this factor on average, as a logarithm.
MAX_LOSS = 0.5

#: Steps of the expectation-maximisation algorithm.
NUM_STEPS = 200


def stacking_weights(log_densities: Tensor) -> Tensor:
    """
    Weights of the chains, `(C,)`; they sum to one.

    :param log_densities: Log density of each row that was held out under each chain, `(n, C)`.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr.sampling.pooling import stacking_weights
        >>> stacking_weights(torch.tensor([[-1.0, -9.0]]).repeat(50, 1)).round(decimals=2)
        tensor([0.9800, 0.0200], dtype=torch.float64)
    """
    log_densities = log_densities.double()
    num_rows, num_chains = log_densities.shape
    weights = torch.full((num_chains,), 1 / num_chains, dtype=torch.float64, device=log_densities.device)
    for _ in range(NUM_STEPS):
        shares = torch.softmax(log_densities + weights.log(), -1)  # (n, C)
        weights = (shares.sum(0) + PRIOR_ROWS) / (num_rows + num_chains * PRIOR_ROWS)
    return weights


def is_better(new: Tensor, old: Tensor) -> bool:
    """
    Whether rows held out are predicted better, by more than twice the standard error of the gain. The log density of a
    single row counts as different by :data:`MAX_GAIN` at most.

    :param new: Their log densities, `(n,)`.
    :param old: The same under the simpler model.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr.sampling.pooling import is_better
        >>> old = torch.zeros(50)
        >>> is_better(old + 0.1, old), is_better(torch.linspace(-1, 1.1, 50), old)
        (True, False)
    """
    return _surely(_gains(new, old)) > 0


def mean_gain(new: Tensor, old: Tensor) -> float:
    """
    By how much rows are more probable on average, as a logarithm; a single row counts as for :func:`is_better`.

    :param new: Their log densities, `(n,)`.
    :param old: The same under another model.
    """
    return float(_gains(new, old).mean())


def _gains(new: Tensor, old: Tensor) -> Tensor:
    """Differences of log densities, bounded, `(n,)`."""
    return (new - old).double().clamp(-MAX_GAIN, MAX_GAIN)


def _surely(gains: Tensor) -> float:
    """Their mean, less twice its standard error; a single one says nothing."""
    if len(gains) < 2:
        return -math.inf
    return float(gains.mean() - 2 * gains.std() / len(gains) ** 0.5)


def keep_up(log_densities: Tensor) -> list[bool]:
    """
    Which chains do not fail beside the best one: rows are at most :data:`MAX_LOSS` less probable, as the mean of their
    log densities with bounded differences, less twice its standard error.

    :param log_densities: Log density of each row that was held out under each chain, `(n, C)`.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr.sampling.pooling import keep_up
        >>> keep_up(torch.tensor([[-1.0, -1.5, -40.0]]).repeat(50, 1))
        [True, True, False]
    """
    chains = log_densities.unbind(-1)
    totals = [sum(float(_gains(chain, other).sum()) for other in chains) for chain in chains]
    best = chains[totals.index(max(totals))]
    return [not _surely(_gains(best, chain)) > MAX_LOSS for chain in chains]


def kept_draws(weights: Tensor, num_draws: Sequence[int]) -> list[Tensor]:
    """
    Which draws of each chain are kept: as many as there can be in proportion to the weights, evenly spaced. The last
    one always is, so that a chain can be continued.

    :param weights: Of the chains, `(C,)`.
    :param num_draws: Draws of each chain.
    :return: C tensors of numbers.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr.sampling.pooling import kept_draws
        >>> [len(index) for index in kept_draws(torch.tensor([0.5, 0.25, 0.25]), [40, 40, 15])]
        [30, 15, 15]
    """
    most = (torch.tensor(num_draws) / weights).min()  # draws in all
    counts = (most * weights).round().clamp(min=1).long().tolist()
    return [
        torch.linspace(num - 1, 0, count).round().long().flip(0) for num, count in zip(num_draws, counts, strict=True)
    ]
