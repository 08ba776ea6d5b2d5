r"""Learning hyperparameters by Fisher scoring: one step on the evidence of one factor for each visit of it.

With :math:`\eta(\theta)` the natural coordinates of :class:`~gpytorch_tkrr.cp.evidence.FactorEvidence`, J their
derivative in the coordinates :math:`\theta` of the hyperparameters, and p, :math:`\Lambda` gradient and curvature of
the log prior,

.. math:: \theta \leftarrow \theta + (J^\top F J + \Lambda)^{-1} (J^\top g + p).

J comes from differences of the kernel's variances, so that a step costs one inverse of :math:`(M R)^2` numbers and one
factorisation for each length that is tried. The step does not depend on the units of inputs, targets or parameters.

The other factors are estimates, and have used up observations: the noise is learned as if there were so many fewer,
by their effective numbers of parameters. Without this it falls towards zero where rows are few.

A parameter shared by several modes enters the evidence of each of them: their sum is maximised. (The density of the
other factors at their present values is no substitute: these are modes, not draws, and would hold the parameter where
it is.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..bases.covariance import Covariance
from ..cp.evidence import FactorData, FactorEvidence
from ..features.represented import MAX_LEARNED_MISSING, ModeGrid
from ..features.separable import SeparableKernel
from ..linalg import jittered_cholesky
from ..sampling.hyperparameters import Hyperparameters

#: No more than this fraction of the rows counts as used up by the other factors.
MOST_SPENT = 0.8

#: Weight, for each row, of the squared fraction that is missing beyond that.
BARRIER = 1e4

#: No coordinate, mostly the logarithm of a parameter, moves further than this in one step.
MAX_MOVE = 1.0

#: Fractions of a step that are tried, one after the other, until one does not lower the objective.
FRACTIONS = (1.0, 0.25, 0.05)


@dataclass
class FactorTerm:
    """
    What the evidence of one factor is made of.

    :param data: Returns its sums, components mixed.
    :param strength: Returns q for given noise variance and output scale.
    """

    data: Callable[[], FactorData]
    strength: Callable[[Tensor, Tensor], Tensor]


class HyperparameterStep:
    """
    Steps of Fisher scoring, on the kernel and the likelihood themselves.

    Bounds and registered priors are honoured, and variances that the box cannot represent are kept away from by a
    barrier. Parameters with ``requires_grad=False`` stay as they are.

    :param separable: The kernel, read mode by mode.
    :param hyperparameters: Its free hyperparameters and those of the likelihood.
    :param noise: Returns the noise variance in the units of the sums.
    :param outputscale: Returns the outermost output scale in the units of the sums.
    :param grids: Points of each mode where its prior variance should be represented.
    """

    def __init__(
        self,
        separable: SeparableKernel,
        hyperparameters: Hyperparameters,
        noise: Callable[[], Tensor],
        outputscale: Callable[[], Tensor],
        grids: Sequence[Tensor],
    ):
        self.separable, self.hyperparameters = separable, hyperparameters
        self.noise, self.outputscale = noise, outputscale
        self.grids = [ModeGrid(mode, grid) for mode, grid in zip(separable.modes, grids, strict=True)]
        self.num_parameters: dict[int, float] = {}  # effective ones, of the modes visited so far
        self._spent: dict[int, float] = {}
        self._before: tuple[Sequence[int], Tensor] = (), torch.empty(0)
        self.users = hyperparameters.variance_users
        self.common = hyperparameters.scale_users | hyperparameters.noise_users

    def state(self) -> tuple[Tensor, dict[int, float]]:
        """What is needed to go on: coordinates, and effective numbers of parameters."""
        hyper = self.hyperparameters
        return hyper.get(range(len(hyper.slots))), dict(self.num_parameters)

    def restore(self, state: tuple[Tensor, dict[int, float]]) -> None:
        """
        Go on from where :meth:`state` was asked for.

        :param state: What it returned.
        """
        coordinates, self.num_parameters = state[0].cpu(), dict(state[1])
        self.hyperparameters.set(range(len(coordinates)), coordinates)

    def sharers(self, d: int) -> list[int]:
        """
        The modes that have a hyperparameter in common with a mode, itself included.

        :param d: The mode.
        """
        return [k for k, users in enumerate(self.users) if k == d or users & self.users[d]]

    def __call__(self, d: int, terms: Mapping[int, FactorTerm]) -> None:
        """
        Improve the hyperparameters that mode d depends on, in place.

        :param d: The mode.
        :param terms: The terms of this mode, and of those it shares hyperparameters with as far as known.
        """
        hyper = self.hyperparameters
        index = sorted(self.users[d] | self.common)
        if not index:
            return
        self._before = index, hyper.get(index)
        if not self._step(index, {k: terms[k] for k in self.sharers(d) if k in terms}):
            self.undo()

    def undo(self) -> None:
        """Take the last step back."""
        self.hyperparameters.set(*self._before)

    def _step(self, index: Sequence[int], terms: Mapping[int, FactorTerm]) -> bool:
        """Try a step; False where it does not improve the objective."""
        hyper = self.hyperparameters
        self._spent = {k: self._spent_on_others(k) for k in terms}
        start = hyper.get(index)
        value, gradient, curvature = self._expand(index, terms)
        free = ~hyper.held(index, gradient)
        if not (free.any() and bool(torch.isfinite(gradient).all()) and bool(torch.isfinite(curvature).all())):
            return False
        matrix = curvature[free][:, free]
        size = matrix.diagonal().clamp(min=1e-12).rsqrt()
        scaled = matrix * size.unsqueeze(-1) * size
        scaled.diagonal().add_(1e-9)
        factor, _ = jittered_cholesky(scaled)
        solution = torch.cholesky_solve((gradient[free] * size).unsqueeze(-1), factor).squeeze(-1)
        change = torch.zeros_like(gradient)
        change[free] = (size * solution).clamp(-MAX_MOVE, MAX_MOVE)
        for fraction in FRACTIONS:
            if hyper.set(index, hyper.inside(index, start + fraction * change)):
                if self._objective(index, terms) >= value:
                    return True
        return False

    def _objective(self, index: Sequence[int], terms: Mapping[int, FactorTerm]) -> float:
        total = self.hyperparameters.log_penalty(index)
        for k, term in terms.items():
            covariance, excess = self._shape(k)
            total += self._value(k, self._evidence(term, term.data(), covariance), excess)
        return total

    def _expand(self, index: Sequence[int], terms: Mapping[int, FactorTerm]) -> tuple[float, Tensor, Tensor]:
        """The objective, its gradient and its curvature at the present coordinates."""
        total, gradient, curvature = self.hyperparameters.expand_log_penalty(index)
        for k, term in terms.items():
            covariance, excess = self._shape(k)
            evidence = self._evidence(term, term.data(), covariance)
            slopes, directions, excess_slopes = self._slopes(k, index, term, covariance, excess)
            natural, fisher = evidence.derivatives(directions)
            natural[-1] += torch.clamp(MOST_SPENT * evidence.count, max=self._spent[k]) / 2
            total += self._value(k, evidence, excess)
            weight = 2 * BARRIER * evidence.count / len(excess)
            gradient += (slopes.mT @ natural - weight * excess_slopes.mT @ excess).cpu()
            curvature += (slopes.mT @ fisher @ slopes + weight * excess_slopes.mT @ excess_slopes).cpu()
            self.num_parameters[k] = evidence.num_parameters()
        return total, gradient, curvature

    def _value(self, k: int, evidence: FactorEvidence, excess: Tensor) -> float:
        """The evidence of a factor, with the parameters of the others spent, less the barrier."""
        barrier = BARRIER * evidence.count * excess.square().mean()
        spent = torch.clamp(MOST_SPENT * evidence.count, max=self._spent[k])
        return evidence.value() + float(spent / 2 * evidence.log_noise - barrier)

    def _spent_on_others(self, k: int) -> float:
        """Observations that determine the other factors, going by those that have been visited."""
        others = [number for j, number in self.num_parameters.items() if j != k]
        return (len(self.users) - 1) * sum(others) / max(len(others), 1)

    def _evidence(self, term: FactorTerm, data: FactorData, covariance: Covariance) -> FactorEvidence:
        noise, strength = self._scales(term)
        return FactorEvidence(data, covariance, strength, noise)

    def _scales(self, term: FactorTerm) -> tuple[Tensor, Tensor]:
        noise = self.noise()
        return noise, term.strength(noise, self.outputscale()) / noise

    def _shape(self, k: int) -> tuple[Covariance, Tensor]:
        """The covariance of the weights and what is missing of the prior variance."""
        covariance = self.separable.modes[k].covariance()
        return covariance, self._excess(k, covariance)

    def _excess(self, k: int, covariance: Covariance) -> Tensor:
        """The fraction of prior variance missing at the points of the grid, beyond what is tolerated."""
        return (self.grids[k].missing(covariance) - MAX_LEARNED_MISSING / len(self.grids)).clamp(min=0.0)

    def _slopes(
        self, k: int, index: Sequence[int], term: FactorTerm, covariance: Covariance, excess: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """
        Derivatives in the coordinates, by differences: of the natural coordinates `(K + 2, P)`, and of the missing
        fractions `(n, P)`. Where weights are correlated the directions of their covariance come with them.
        """
        hyper, is_diagonal = self.hyperparameters, covariance.mixing is None
        size = len(covariance.variances)
        num = size if is_diagonal else len(index)
        slopes = excess.new_zeros(num + 2, len(index))
        directions = None if is_diagonal else excess.new_zeros(num, size, size)
        excess_slopes = excess.new_zeros(len(excess), len(index))
        scales = torch.stack(self._scales(term)).log()
        is_missing = bool(excess.any())
        for column, i in enumerate(index):
            with hyper.nudged(i) as change:
                if i in self.users[k]:
                    moved = self.separable.modes[k].covariance()
                    if directions is None:
                        growth = (moved.variances / covariance.variances).log()
                        slopes[:num, column] = growth.nan_to_num(0.0, 0.0, 0.0) / change
                    else:
                        whitened = covariance.whiten(covariance.whiten(moved.to_dense()).mT)
                        directions[column] = (whitened - torch.eye(size).to(whitened)) / change
                        slopes[column, column] = 1.0
                    if is_missing:
                        growth = (self._excess(k, moved) - excess) / change
                        excess_slopes[:, column] = torch.where(excess > 0, growth, 0.0)
                if i in self.common:
                    noise, strength = (torch.stack(self._scales(term)).log() - scales) / change
                    slopes[num, column], slopes[num + 1, column] = strength, noise
        return slopes, directions, excess_slopes
