r"""Lengthscales that chains start with, where the model has chosen its kernel itself.

A function that is fast beside the lengthscale looks like noise, and a chain that takes it for noise stays there. So
each input alone is tried with shorter and shorter lengthscales. With functions :math:`\Phi` of prior covariance V and
the ratio :math:`\rho` of signal and noise, the evidence of the targets has a closed form,

.. math:: \log p(y) = -\tfrac12 \sum_j \log(1 + \rho \lambda_j)
    - \tfrac{N}{2} \log\Bigl(y^\top y - \sum_j \frac{\rho\, b_j^2}{1 + \rho \lambda_j}\Bigr) + \text{const},

where :math:`V^{1/2} \Phi^\top \Phi V^{1/2} = U \operatorname{diag}(\lambda) U^\top` and
:math:`b = U^\top V^{1/2} \Phi^\top y`. The best lengthscale is taken where it is better by far. With several inputs it
must also show what was hidden: others explain an input that is only seen more sharply by a shorter lengthscale.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..bases.covariance import Covariance
from ..features.represented import MAX_MISSING
from ..features.separable import separate
from .problem import TAIL, GibbsProblem

#: How many times a lengthscale is halved, at most.
NUM_HALVINGS = 7

#: Ratios of signal and noise that are tried, for functions that have together a mean square of one.
RATIOS = tuple(10.0**power for power in range(-6, 7))

#: A shorter lengthscale must make the rows, and itself a priori, more probable by this factor, as a logarithm.
MIN_GAIN = math.log(1e3)

#: With several inputs it must explain at least so much of the variance, and the usual one at most this part of it.
MIN_SHARE, HIDDEN = 0.1, 0.2

#: Rows that are looked at, at most.
NUM_ROWS = 3000

#: Functions that are looked at, to say so where more are needed than the fit can afford, at most and for each row; and
#: inputs up to which that is done.
NUM_FUNCTIONS, PER_ROW, FEW_INPUTS = 256, 0.25, 10


class Trial(NamedTuple):
    """
    A lengthscale of one input.

    :param coordinate: Its coordinate `(1,)`.
    :param value: Log evidence and log prior together.
    :param share: The part of the targets' mean square that the input explains alone.
    :param num_needed: Functions that represent it well.
    :param is_affordable: Whether as many functions as there can be represent it.
    """

    coordinate: Tensor
    value: float
    share: float
    num_needed: int
    is_affordable: bool


def shorten_lengthscales(problem: GibbsProblem) -> None:
    """
    Let all chains start with shorter lengthscales where an input alone shows that these are needed, and with the
    functions to represent them. Inputs that would need more functions than there can be are noted.

    :param problem: What is to be sampled.
    """
    hyper = problem.hyperparameters
    for d, trials in _try_lengthscales(problem).items():
        better = [trial for trial in trials if _is_better(problem, trial, trials[0])]
        affordable = [trial for trial in better if trial.is_affordable]
        taken = max(affordable, key=lambda trial: trial.value, default=trials[0])
        best = max(better, key=lambda trial: trial.value, default=taken)
        hyper.set(_lengthscale_slots(problem, d), taken.coordinate)
        if _is_better(problem, best, taken):
            problem.too_fast[d] = best.num_needed
    problem.set_start(hyper.get(problem.all_slots))


def _lengthscale_slots(problem: GibbsProblem, d: int) -> list[int]:
    hyper = problem.hyperparameters
    return [i for i in hyper.own[d] if hyper.slots[i].is_lengthscale]


def _is_better(problem: GibbsProblem, trial: Trial, usual: Trial) -> bool:
    """Whether a lengthscale is worth it; with several inputs also whether it shows what was hidden."""
    is_hidden = trial.share > MIN_SHARE and usual.share < HIDDEN * trial.share
    return trial.value > usual.value + MIN_GAIN and (is_hidden or problem.num_dims == 1)


def _try_lengthscales(problem: GibbsProblem) -> dict[int, list[Trial]]:
    """The present lengthscale of each input that has one of its own, and shorter ones as far as there are functions."""
    model, hyper, most = problem.model, problem.hyperparameters, problem.most_functions()
    design = problem.designs[-1].thinned(min(NUM_ROWS, problem.training.summary.num_rows), problem.row_key)
    x, y, weight = design.rows()
    y = y - (weight * y).sum() / weight.sum()
    root = (weight if problem.num_dims == 1 else _of_other_inputs(weight)).sqrt()
    seen = most
    if model.limits_num_basis and problem.num_dims <= FEW_INPUTS:
        assert model.max_num_basis is not None
        limits = [min(NUM_FUNCTIONS, int(PER_ROW * len(y)), distinct) for distinct in model.max_num_basis]
        seen = [max(pair) for pair in zip(most, limits, strict=True)]
    assert model.covar_module is not None and model.domain is not None
    tried: dict[int, list[Trial]] = {}
    for d, mode in enumerate(separate(model.covar_module, model.domain, seen, problem.num_dims).modes):
        slots, is_known = _lengthscale_slots(problem, d), ~x[:, d].isnan()
        if len(slots) != 1 or int(is_known.sum()) < 2:
            continue
        first = hyper.get(slots)
        features, targets = mode.basis(x[is_known, d]) * root[is_known].unsqueeze(-1), (y * root)[is_known]
        tried[d] = []
        for power in range(NUM_HALVINGS + 1):
            if not hyper.set(slots, first - power * math.log(2.0)):
                break
            num_least = mode.num_basis_for(MAX_MISSING)
            if power and num_least >= seen[d]:
                break
            evidence = Evidence.of(features, targets, mode.covariance())
            value, is_affordable = evidence.log_density + hyper.log_prior(slots), power == 0 or num_least <= most[d]
            num_needed = mode.num_basis_for(TAIL)
            tried[d].append(Trial(hyper.get(slots), value, evidence.share, num_needed, is_affordable))
        hyper.set(slots, first)
    return tried


def _of_other_inputs(weight: Tensor) -> Tensor:
    """
    Row weights where what other inputs explain counts as noise too: that is the same for all rows, however large their
    weights. It is taken to be half of the noise of a row of average weight.

    :param weight: Those of the noise alone, `(n,)`.
    """
    return 2 * weight / (weight + weight.mean())


class Evidence(NamedTuple):
    """
    How well a function of one input explains the targets, with the best ratio of signal and noise.

    :param log_density: Logarithm of the density of the targets, with the best noise; up to a constant.
    :param share: The part of their mean square that is explained.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr.bases.covariance import Covariance
        >>> from gpytorch_tkrr.chains.first_lengthscales import Evidence
        >>> x = torch.linspace(0, 6, 100, dtype=torch.float64)
        >>> y, prior = torch.sin(9 * x), Covariance(torch.ones(1, dtype=torch.float64))
        >>> [round(Evidence.of(torch.sin(k * x).unsqueeze(-1), y, prior).share, 3) for k in (1, 9)]
        [0.0, 1.0]
    """

    log_density: float
    share: float

    @classmethod
    def of(cls, features: Tensor, y: Tensor, covariance: Covariance) -> Evidence:
        """
        From all rows.

        :param features: Functions `(n, M)`.
        :param y: Targets `(n,)`.
        :param covariance: V.
        """
        mixed = covariance.mix(features) * covariance.root
        is_tall = len(mixed) >= mixed.shape[1]
        values, vectors = torch.linalg.eigh(mixed.mT @ mixed if is_tall else mixed @ mixed.mT)
        values = values.clamp(min=0)
        squares = (vectors.mT @ (mixed.mT @ y)).square() if is_tall else values * (vectors.mT @ y).square()
        ratios = torch.tensor(RATIOS, dtype=y.dtype, device=y.device).unsqueeze(-1) * len(y)
        ratios = ratios / max(float(values.sum()), 1e-300)
        scaled, total = 1 + ratios * values, max(float(y @ y), 1e-300)
        left = (total - (ratios * squares / scaled).sum(-1)).clamp(min=1e-9 * total)
        density, best = (-0.5 * scaled.log().sum(-1) - 0.5 * len(y) * left.log()).max(0)
        return cls(float(density), 1 - float(left[best]) / total)
