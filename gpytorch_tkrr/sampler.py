r"""Conjugate Gibbs sampling of the CP weights and all hyperparameters.

The model is

.. math:: y = f(x) + \epsilon, \quad \epsilon \sim N(0, s^2), \qquad
    f(x) = \sum_{r=1}^R \prod_d \phi_d(x_d)^\top a_{dr}, \qquad
    a_{dr} \sim N(0, \sigma^{2/D} V_d(\theta) / \tau_r),

with :math:`\tau_r \sim \text{Gamma}(a_0, a_0 R^{-1/D})`: at its mean the prior covariance of f is the kernel
:math:`\sigma^2 \prod_d k_d`. Large :math:`\tau_r` switch components off (soft rank).

Given all other factors, f is linear in one factor, so its conditional is Gaussian and, with the factor integrated out,
the evidence of its hyperparameters is known in closed form. One visit of a mode

1. collects G and b of that factor from the data,
2. moves :math:`\theta` by Metropolis steps on the evidence, which needs G and b only,
3. draws the factor from its conditional,
4. draws the noise variance from its conditional, by the same G and b.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy.special
import torch
from torch import Tensor

from .conditional import Conditional
from .evidence import FactorData
from .hyperparameters import Hyperparameters
from .modes import SeparableKernel
from .sums import Design

#: Shape of the Gamma prior of the components' precisions.
TAU_SHAPE = 2.0

#: Shape and scale of the default inverse-Gamma prior of the noise variance, in units of the targets' variance.
NOISE_SHAPE, NOISE_SCALE = 1.0, 1e-3

#: A lengthscale must leave at least this fraction of a mode's prior variance represented, all over the data's range.
MIN_REPRESENTED = 0.95

#: Acceptance rate that the proposals are tuned to during warm-up.
TARGET_ACCEPTANCE = 0.3


class FactorConditional:
    r"""
    The Gaussian conditional of one factor, and the evidence with that factor integrated out.

    :param gram: G, `(R, M, R, M)`.
    :param rhs: b, `(R, M)`.
    :param variances: v, `(M,)`.
    :param prior: Prior precisions of the whitened weights of each component, `(R,)`.
    :param noise: :math:`s^2`.
    """

    def __init__(self, gram: Tensor, rhs: Tensor, variances: Tensor, prior: Tensor, noise: float):
        rank, size = rhs.shape
        self.root = variances.clamp(min=1e-300).sqrt()
        precision = (gram * (self.root / noise).reshape(-1, 1, 1)).mul_(self.root).reshape(rank * size, rank * size)
        precision.diagonal().add_(prior.repeat_interleave(size))
        self.conditional = Conditional(precision)
        self.half = self.conditional.half_solve((rhs * self.root / noise).reshape(-1, 1)).squeeze(-1)
        self.log_evidence = float((size * prior.log().sum() - self.conditional.logdet() + self.half.square().sum()) / 2)

    def draw(self, noise: Tensor) -> Tensor:
        """
        A draw of the raw factor.

        :param noise: Standard normal numbers `(R, M)`.
        """
        whitened = self.conditional.half_covariance(self.half + noise.reshape(-1)).reshape_as(noise)
        return whitened * self.root


@dataclass
class GibbsState:
    """
    Everything that a chain carries from one update to the next, beside the kernel object's hyperparameters.

    :param factors: Raw factors, D tensors `(R, M_d)`, for targets scaled to unit variance.
    :param noise: Noise variance of the scaled targets.
    :param precisions: :math:`\\tau`, `(R,)`.
    :param steps: Logarithm of the proposal width of each hyperparameter.
    """

    factors: list[Tensor]
    noise: float
    precisions: Tensor
    steps: Tensor


class NoiseModel:
    """
    How the noise variance is drawn.

    :param is_free: Whether it is drawn at all.
    :param lower: Lower bound, in units of the scaled targets.
    :param upper: Upper bound.
    :param log_prior: Log density of a registered prior at a noise variance of the scaled targets; None for the default.
    """

    def __init__(self, is_free: bool, lower: float, upper: float, log_prior=None):
        self.is_free, self.lower, self.upper, self.log_prior = is_free, lower, upper, log_prior

    def start(self, current: float) -> float:
        """
        The noise variance that a chain starts from: a tenth of the targets' variance, unless it is fixed.

        :param current: The likelihood's present noise variance.
        """
        return min(max(0.1, self.lower), self.upper) if self.is_free else current

    def draw(self, current: float, square: float, count: float, rng: np.random.Generator) -> float:
        """
        One draw from the conditional.

        :param current: The present noise variance.
        :param square: Sum of squared residuals.
        :param count: N.
        :param rng: Source of random numbers.
        """
        if not self.is_free:
            return current
        shape, scale = (NOISE_SHAPE, NOISE_SCALE) if self.log_prior is None else (0.0, 0.0)
        proposal = truncated_inverse_gamma(shape + count / 2, scale + square / 2, self.lower, self.upper, rng)
        if self.log_prior is not None:  # the proposal assumed a density of 1 / s^2
            ratio = self.log_prior(proposal) + math.log(proposal) - self.log_prior(current) - math.log(current)
            return proposal if math.log(rng.random()) < ratio else current
        return proposal


def truncated_inverse_gamma(shape: float, scale: float, lower: float, upper: float, rng: np.random.Generator) -> float:
    """
    A draw from an inverse-Gamma distribution between two bounds.

    :param shape: Its shape.
    :param scale: Its scale.
    :param lower: Lower bound.
    :param upper: Upper bound.
    :param rng: Source of random numbers.
    """
    scale = max(scale, 1e-300)
    # Quantiles of the precision, Gamma(shape, scale), between 1 / upper and 1 / lower.
    top = scipy.special.gammainc(shape, scale / lower) if lower > 0 else 1.0
    bottom = scipy.special.gammainc(shape, scale / upper) if math.isfinite(upper) else 0.0
    u = bottom + (top - bottom) * rng.random()
    precision = scipy.special.gammaincinv(shape, u) / scale
    if not precision > 0:
        precision = 1 / lower if lower > 0 else shape / scale
    return float(min(max(1 / precision, lower), upper))


class GibbsSampler:
    """
    One chain.

    :param design: The data.
    :param separable: The kernel, read mode by mode.
    :param hyperparameters: Its free hyperparameters; moved on the kernel object itself.
    :param outputscale_unit: Output scales are divided by this: the variance of the targets.
    :param noise_model: How the noise is drawn.
    :param grids: Points of each mode, over the data's range, where its prior variance must be represented.
    :param rng: Source of random numbers.
    :param rank: R that the prior was set up for, also after dead components have been dropped.
    :param num_moves: Metropolis steps per visit of a mode.
    """

    def __init__(
        self,
        design: Design,
        separable: SeparableKernel,
        hyperparameters: Hyperparameters,
        outputscale_unit: float,
        noise_model: NoiseModel,
        grids: Sequence[Tensor],
        rng: np.random.Generator,
        *,
        rank: int,
        num_moves: int = 2,
    ):
        self.precision_rate = TAU_SHAPE * rank ** (-1 / len(separable.modes))
        self.design, self.separable, self.hyperparameters = design, separable, hyperparameters
        self.outputscale_unit, self.noise_model, self.rng, self.num_moves = (
            outputscale_unit,
            noise_model,
            rng,
            num_moves,
        )
        self.grids = list(grids)
        self.squares = [mode.basis(grid).square() for mode, grid in zip(separable.modes, grids, strict=True)]
        self.num_dims = len(separable.modes)
        self.variances: list[Tensor] = [torch.empty(0)] * self.num_dims
        self.prior_factor = 1.0  # the share of the output scale in the prior variance of each mode's weights
        self.energies = torch.zeros(rank, dtype=torch.float64)  # mean square of each component over the data
        self.refresh()

    def _normal(self, *shape: int) -> Tensor:
        return torch.from_numpy(self.rng.standard_normal(shape)).to(self.grids[0].device)

    def refresh(self, index: Sequence[int] | None = None) -> None:
        """
        Read variances and output scale from the kernel object again.

        :param index: Coordinates that have changed; by default all.
        """
        changed = set(range(len(self.hyperparameters.slots))) if index is None else set(index)
        for d, users in enumerate(self.hyperparameters.variance_users):
            if index is None or users & changed:
                self.variances[d] = self.separable.modes[d].variances()
        if index is None or self.hyperparameters.scale_users & changed:
            self.prior_factor = (float(self.separable.outputscale()) / self.outputscale_unit) ** (1 / self.num_dims)

    def sweep(self, state: GibbsState, modes: Sequence[int], adapt: float = 0.0) -> None:
        """
        Visit modes one after the other, then draw the components' precisions; `state` is changed in place.

        :param state: The chain's state.
        :param modes: The order of the visits.
        :param adapt: How far proposals are tuned; 0 once the warm-up is over.
        """
        for d in modes:
            self.visit(state, d, adapt)
        self.draw_precisions(state)

    def visit(self, state: GibbsState, d: int, adapt: float = 0.0) -> None:
        """
        Hyperparameters, factor and noise of one mode.

        :param state: The chain's state.
        :param d: The mode.
        :param adapt: How far proposals are tuned.
        """
        factors = state.factors
        sums = self.design.sums(d, factors, torch.ones_like(state.precisions))
        gram = sums.gram()
        data = FactorData.from_residuals(sums, gram, factors[d])
        rhs = data.rhs

        current = self._moved(state, d, gram, rhs, adapt)
        rank, size = rhs.shape
        factors[d] = current.draw(self._normal(rank, size))
        fitted = torch.einsum("risj,sj->ri", gram, factors[d])
        square = float(data.square + (factors[d] * (fitted - 2 * rhs)).sum())
        state.noise = self.noise_model.draw(state.noise, max(square, 0.0), float(sums.count), self.rng)
        blocks = gram.diagonal(dim1=0, dim2=2)  # (M, M, R)
        self.energies = torch.einsum("ri,ijr,rj->r", factors[d], blocks, factors[d]) / sums.count

    def _moved(self, state: GibbsState, d: int, gram: Tensor, rhs: Tensor, adapt: float) -> FactorConditional:
        """Metropolis steps on the evidence of mode d; returns the conditional at the final hyperparameters."""
        hyper = self.hyperparameters

        def conditional() -> FactorConditional:
            return FactorConditional(gram, rhs, self.variances[d], state.precisions / self.prior_factor, state.noise)

        def log_target(index: list[int], at: FactorConditional) -> float:
            others = [k for k, users in enumerate(hyper.users) if k != d and users & set(index)]
            return at.log_evidence + hyper.log_prior(index) + sum(self._log_weight_prior(state, k) for k in others)

        current = conditional()
        own, shared = hyper.own[d], hyper.shared[d]
        blocks = [own] * self.num_moves if own else []
        blocks += [shared] if shared else []
        for turn, block in enumerate(blocks):
            # All coordinates of a block at once, or a single one with a longer step.
            single = len(block) > 1 and turn % 2 == 1
            index = [block[int(self.rng.integers(len(block)))]] if single else block
            before, kept = hyper.get(index), (list(self.variances), self.prior_factor)
            width = state.steps[index].exp() * (2.0 if single else 1.0 / math.sqrt(len(index)))
            noise = torch.from_numpy(self.rng.standard_normal(len(index)))
            threshold = math.log(self.rng.random())
            old, change, proposed = log_target(index, current), -math.inf, None
            if hyper.set(index, before + width * noise):
                self.refresh(index)
                if self.is_represented(index):
                    proposed = conditional()
                    change = log_target(index, proposed) - old
                if proposed is not None and threshold < change:
                    current = proposed
                else:
                    hyper.set(index, before)
                    self.variances, self.prior_factor = kept
            if adapt:
                acceptance = math.exp(min(change, 0.0)) if not math.isnan(change) else 0.0
                state.steps[index] += adapt * (acceptance - TARGET_ACCEPTANCE)
        return current

    def is_represented(self, index: Sequence[int]) -> bool:
        """Whether the box still represents the prior variance of every mode whose variances the coordinates change."""
        for d, users in enumerate(self.hyperparameters.variance_users):
            if users & set(index):
                exact = self.separable.modes[d].prior_variance(self.grids[d])
                if float((self.squares[d] @ self.variances[d] / exact).min()) < MIN_REPRESENTED:
                    return False
        return True

    def _log_weight_prior(self, state: GibbsState, d: int) -> float:
        """log N(A_d; 0, V_d / tau), up to a constant."""
        variances = self.variances[d].clamp(min=1e-300) * self.prior_factor
        energy = (state.factors[d].square() / variances * state.precisions.unsqueeze(-1)).sum()
        return -0.5 * float(energy + len(state.precisions) * variances.log().sum())

    def draw_precisions(self, state: GibbsState) -> None:
        """
        The components' precisions, from their Gamma conditionals.

        :param state: The chain's state.
        """
        energy, count = torch.zeros_like(state.precisions), 0
        for factor, variances in zip(state.factors, self.variances, strict=True):
            variances = variances * self.prior_factor
            alive = variances > 1e-250  # functions whose variance has underflowed carry no information
            energy += (factor[:, alive].square() / variances[alive]).sum(-1)
            count += int(alive.sum())
        rate = self.precision_rate + energy / 2
        draws = self.rng.standard_gamma(TAU_SHAPE + count / 2, len(rate))
        state.precisions = torch.from_numpy(draws).to(rate.device) / rate
