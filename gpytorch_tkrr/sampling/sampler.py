r"""Conjugate Gibbs sampling of the weights and all hyperparameters.

The model, for Gaussian noise and CP weights, is

.. math:: y = f(x) + \epsilon, \quad \epsilon \sim N(0, s^2), \qquad
    f(x) = \sum_{r=1}^R \prod_d \phi_d(x_d)^\top a_{dr}, \qquad
    a_{dr} \sim N(0, \sigma^{2/D} V_d(\theta) / \tau_r),

with precisions :math:`\tau_r` that switch components off
(:class:`~gpytorch_tkrr.sampling.priors.SoftRankPrior`): at their mean the prior covariance of f is the kernel
:math:`\sigma^2 \prod_d k_d`. Other formats have other priors (:class:`~gpytorch_tkrr.sampling.priors.WeightPrior`);
all else is the same.

Given all other factors, f is linear in one factor, so its conditional is Gaussian and, with the factor integrated out,
the evidence of its hyperparameters is known in closed form. One visit of a mode

1. collects G and b of that factor from the data (for other observation models from working targets and row weights,
   drawn given f: see :mod:`gpytorch_tkrr.model.likelihoods.augmented`),
2. moves :math:`\theta` by Metropolis steps on the evidence, which needs G and b only,
3. draws the factor from its conditional,
4. draws the noise variance, or what else the observation model has, from its conditional, by the same G and b.

Only the product of a component's scales over the modes is seen by the data, so factor draws hardly move one scale
against another. After every sweep pairs of them are moved along that direction (generalised Gibbs, Liu & Sabatti 2000),
which needs no data either. The state keeps such moves apart from the factors: component r of mode d is
:math:`e^{c_{dr}}` times the stored one, with :math:`\sum_d c_{dr} = 0`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..bases.covariance import Covariance
from ..cp.conditional import DenseGram
from ..cp.design import Design
from ..cp.evidence import FactorData
from ..cp.format import WeightFormat
from ..cp.levels import LevelGram
from ..cp.rounding import Resolution
from ..cp.weights import CP
from ..data.source import RowFunction
from ..features.represented import MAX_MISSING, ModeGrid
from ..features.separable import SeparableKernel
from ..model.likelihoods.augmented import Augmentation
from . import train_prior  # noqa: F401  it registers its prior
from .hyperparameters import Hyperparameters
from .priors import GibbsState, WeightPrior
from .product_measure import ProductMeasure

#: Logarithm of the width that proposals of hyperparameters start from.
FIRST_STEP = math.log(0.3)

#: How often, after each sweep, scale is moved between random pairs of modes.
NUM_BALANCINGS = 2

#: The information that the data have on a weight, as a fraction of its prior precision, below which it is not counted:
#: it changes no posterior variance of the weight by a larger fraction, and all rows together say next to nothing of it.
UNSEEN = 1e-8

#: Acceptance rate that the proposals are tuned to during warm-up.
TARGET_ACCEPTANCE = 0.3


class FactorConditional:
    r"""
    The Gaussian conditional of one factor, and the evidence with that factor integrated out.

    :param gram: G.
    :param rhs: b, `(R, M)`.
    :param covariance: V, of M weights.
    :param prior: Prior precisions of the whitened weights of each component, `(R,)`.
    :param noise: :math:`s^2`.
    """

    def __init__(self, gram: DenseGram | LevelGram, rhs: Tensor, covariance: Covariance, prior: Tensor, noise: float):
        self.covariance, self.prior = covariance, prior
        self.root = covariance.variances.clamp(min=1e-300).sqrt()
        self.seen = _seen(gram, covariance, prior, noise)
        rhs = covariance.mix(rhs) * self.root / noise
        if self.seen is not None:
            assert isinstance(gram, DenseGram)
            gram, rhs = gram.of_functions(self.seen), rhs[:, self.seen]
            covariance = Covariance(covariance.variances[self.seen])
        self.conditional = gram.conditional(covariance, prior, noise)
        self.half = self.conditional.half_solve(rhs.reshape(-1, 1)).squeeze(-1)
        logdet = rhs.shape[1] * prior.log().sum() - self.conditional.logdet()
        self.log_evidence = float((logdet + self.half.square().sum()) / 2)

    def draw(self, noise: Tensor) -> Tensor:
        """
        A draw of the raw factor.

        :param noise: Standard normal numbers `(R, M)`.
        """
        seen = noise if self.seen is None else noise[:, self.seen]
        whitened = self.conditional.half_covariance(self.half + seen.reshape(-1)).reshape_as(seen)
        if self.seen is not None:
            whitened = (noise / self.prior.sqrt().unsqueeze(-1)).index_copy(1, self.seen, whitened)
        return self.covariance.unmix(whitened * self.root)


def _seen(gram: DenseGram | LevelGram, covariance: Covariance, prior: Tensor, noise: float) -> Tensor | None:
    """
    The functions whose weights the data see, `(M',)`; None for all of them. A smooth kernel gives functions that vary
    fast next to no variance: their weights keep their prior, and the matrix that is factorised is that of the others.
    """
    if isinstance(gram, LevelGram) or covariance.mixing is not None:
        return None
    information = gram.diagonal() * covariance.variances / noise
    seen = (information > UNSEEN * prior.unsqueeze(-1)).any(0)
    return None if bool(seen.all()) else seen.nonzero().squeeze(-1)


class GibbsSampler:
    """
    One chain.

    :param design: The data.
    :param separable: The kernel, read mode by mode.
    :param hyperparameters: Its free hyperparameters; moved on the kernel object itself.
    :param outputscale_unit: Output scales are divided by this: the variance of the targets.
    :param augmentation: The observation model: working targets, row weights, and how its parameters are drawn.
    :param grids: Points of each mode, over the data's range, where its prior variance must be represented.
    :param rng: Source of random numbers.
    :param rank: R that the prior was set up for, also after dead components have been dropped.
    :param weights: The format of the weights, by default :class:`CP`.
    :param empty: What f is drawn to where there are no rows; None for nothing.
    """

    def __init__(
        self,
        design: Design,
        separable: SeparableKernel,
        hyperparameters: Hyperparameters,
        outputscale_unit: float,
        augmentation: Augmentation,
        grids: Sequence[Tensor],
        rng: np.random.Generator,
        *,
        rank: int,
        weights: WeightFormat | None = None,
        empty: ProductMeasure | None = None,
    ):
        form = CP(rank) if weights is None else weights.with_rank(rank)
        sizes = [mode.num_functions for mode in separable.modes]
        self.prior = WeightPrior.of_kind[form.kind].of(form, sizes)
        self.design, self.separable, self.hyperparameters = design, separable, hyperparameters
        self.outputscale_unit, self.augmentation, self.rng = outputscale_unit, augmentation, rng
        self.grids, self.empty = list(grids), empty
        self.mode_grids = [ModeGrid(mode, grid) for mode, grid in zip(separable.modes, grids, strict=True)]
        self.num_dims = len(separable.modes)
        self.modes_of = [  # the modes whose weights depend on each coordinate
            [d for d, users in enumerate(hyperparameters.users) if i in users]
            for i in range(len(hyperparameters.slots))
        ]
        self.covariances = [mode.covariance() for mode in separable.modes]
        self.prior_factor = 1.0  # the share of the output scale in the prior variance of each mode's weights
        self.energies = torch.empty(0, dtype=torch.float64)  # mean square of each component over the data
        self.one = torch.ones(1, dtype=torch.float64, device=self.grids[0].device)  # factors carry all scales
        self.refresh()

    def _normal(self, *shape: int) -> Tensor:
        return torch.from_numpy(self.rng.standard_normal(shape)).to(self.grids[0].device)

    def refresh(self, index: Sequence[int] | None = None) -> None:
        """
        Read variances and output scale from the kernel object again.

        :param index: Coordinates that have changed; by default all.
        """
        changed = range(len(self.hyperparameters.slots)) if index is None else index
        for d in range(self.num_dims) if index is None else self._modes_that_change(index):
            self.covariances[d] = self.separable.modes[d].covariance()
        if index is None or not self.hyperparameters.scale_users.isdisjoint(changed):
            self.prior_factor = (float(self.separable.outputscale()) / self.outputscale_unit) ** (1 / self.num_dims)

    def sweep(self, state: GibbsState, modes: Sequence[int], adapt: float = 0.0, progress: float = 1.0) -> None:
        """
        Visit modes one after the other, then draw the components' precisions; `state` is changed in place.

        :param state: The chain's state.
        :param modes: The order of the visits.
        :param adapt: How far proposals are tuned; 0 once the warm-up is over.
        :param progress: The part of the warm-up that is over.
        """

        def sum_rows(function: RowFunction, size: int) -> Tensor:
            return self.design.sum_rows(state.factors, self.one, function, size)

        state.parameters = self.augmentation.before_sweep(state.parameters, sum_rows, self.rng, progress)
        for turn, d in enumerate(modes):
            self.visit(state, d, adapt, move_scale=turn == 0)
        energies, counts = self._weight_energies(state)
        self.prior.draw(state, energies, counts, self.rng)
        for _ in range(NUM_BALANCINGS):
            self.prior.balance(state, energies, counts, self.rng)

    def visit(self, state: GibbsState, d: int, adapt: float = 0.0, *, move_scale: bool = True) -> None:
        """
        Hyperparameters and factor of one mode, and parameters of the observation model.

        :param state: The chain's state.
        :param d: The mode.
        :param adapt: How far proposals are tuned.
        :param move_scale: Whether to move the output scale too, which all modes share.
        """
        factors, working = state.factors, self.augmentation.working(state.parameters, self.rng)
        noise, precisions = self.augmentation.noise(state.parameters), self.prior.rows(state, d) / self.prior_factor
        sums = self.design.sums(d, factors, self.one, working, Resolution(self.covariances[d], precisions, noise))
        gram = sums.structured_gram()
        data = FactorData.from_residuals(sums, gram, factors[d])
        rhs = data.rhs

        seen = gram if self.empty is None else self.empty.added_to(gram, d, factors, noise)
        current = self._moved(state, d, seen, rhs, adapt, move_scale)
        rank, size = rhs.shape
        factors[d] = current.draw(self._normal(rank, size))
        fitted = gram.apply(factors[d])
        square = float(data.square + (factors[d] * (fitted - 2 * rhs)).sum())
        state.parameters = self.augmentation.after_visit(
            state.parameters, max(square, 0.0), float(sums.count), self.rng
        )
        found = self.energies * sums.count if self.energies.numel() else None
        self.energies = self.prior.mean_squares(found, state, d, gram) / sums.count

    def _moved(
        self, state: GibbsState, d: int, gram: DenseGram | LevelGram, rhs: Tensor, adapt: float, move_scale: bool
    ) -> FactorConditional:
        """
        Metropolis steps on the evidence of mode d, one for its own hyperparameters and one for one that it shares;
        returns the conditional at the final ones.
        """
        hyper, noise_variance = self.hyperparameters, self.augmentation.noise(state.parameters)

        def conditional() -> FactorConditional:
            prior = self.prior.rows(state, d) / self.prior_factor
            return FactorConditional(gram, rhs, self.covariances[d], prior, noise_variance)

        def log_target(index: list[int], at: FactorConditional) -> float:
            others = sorted({k for i in index for k in self.modes_of[i]} - {d})
            return at.log_evidence + hyper.log_prior(index) + sum(self._log_weight_prior(state, k) for k in others)

        current = conditional()
        own, shared = hyper.own[d], hyper.shared[d]
        if not move_scale:
            shared = [i for i in shared if i in hyper.variance_users[d]]
        one = [shared[int(self.rng.integers(len(shared)))]] if shared else []  # one of them at each visit
        for index in filter(None, (own, one)):
            before, kept = hyper.get(index), (list(self.covariances), self.prior_factor)
            width = state.steps[index].exp() / math.sqrt(len(index))
            noise = torch.from_numpy(self.rng.standard_normal(len(index)))
            threshold = math.log(self.rng.random())
            old, change = log_target(index, current), -math.inf
            if hyper.set(index, before + width * noise):
                self.refresh(index)
                proposed = conditional()
                change = log_target(index, proposed) - old
                if threshold < change and not self.is_represented(index):
                    change = -math.inf  # asked last: it costs more than to refuse
                if threshold < change:
                    current = proposed
                else:
                    hyper.set(index, before)
                    self.covariances, self.prior_factor = kept
            if adapt:
                acceptance = math.exp(min(change, 0.0)) if not math.isnan(change) else 0.0
                state.steps[index] += adapt * (acceptance - TARGET_ACCEPTANCE)
        return current

    def is_represented(self, index: Sequence[int]) -> bool:
        """Whether the box still represents the prior variance of every mode whose variances the coordinates change."""
        modes = self._modes_that_change(index)
        return all(float(self.mode_grids[d].missing(self.covariances[d]).max()) <= MAX_MISSING for d in modes)

    def _modes_that_change(self, index: Sequence[int]) -> list[int]:
        """The modes whose variances depend on one of some coordinates."""
        found = {d for i in index for d in self.modes_of[i]}
        return [d for d in sorted(found) if not self.hyperparameters.variance_users[d].isdisjoint(index)]

    def _weight_energy(self, state: GibbsState, d: int) -> tuple[Tensor, int]:
        """Squared whitened weights of each row of factor d without its scales, `(K,)`, and the number of weights."""
        variances = self.covariances[d].variances * self.prior_factor
        alive = variances > 1e-250  # functions whose variance has underflowed carry no information
        energy = (self.covariances[d].demix(state.factors[d])[:, alive].square() / variances[alive]).sum(-1)
        return energy, int(alive.sum())

    def _log_weight_prior(self, state: GibbsState, d: int) -> float:
        """log N(A_d; 0, V_d / tau), up to a constant."""
        energy, _ = self._weight_energy(state, d)
        variances = (self.covariances[d].variances * self.prior_factor).clamp(min=1e-300)
        logdet = variances.log().sum() + self.covariances[d].logdet_mixing()
        return -0.5 * float(energy @ self.prior.rows(state, d) + len(energy) * logdet)

    def _weight_energies(self, state: GibbsState) -> tuple[list[np.ndarray], np.ndarray]:
        """:meth:`_weight_energy` of all modes with their scales, D arrays `(K_d,)`, and `(D,)`."""
        energies, counts = [], []
        for d, scales in enumerate(state.log_scales):
            energy, count = self._weight_energy(state, d)
            energies.append((energy * (2 * scales).exp()).cpu().numpy())
            counts.append(count)
        return energies, np.array(counts)
