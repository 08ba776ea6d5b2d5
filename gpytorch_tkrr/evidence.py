r"""Hyperparameters from the evidence of one factor, without the data.

In the raw basis the sums G and b of a factor do not depend on its hyperparameters, so with all other factors fixed

.. math:: \log p(y \mid A_{-d}, \theta) = -\tfrac12 \log |P| + \tfrac{M}{2} \log |Q|
    + \tfrac12 c^\top P^{-1} c - \tfrac{N}{2} \log(2 \pi s^2) - \frac{y^\top y}{2 s^2},
    \qquad P = V^{1/2} G V^{1/2} / s^2 + Q \otimes I, \quad c = V^{1/2} b / s^2,

costs :math:`(M R)^3` and no N.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import scipy.optimize
import torch
from torch import Tensor, nn

from .conditional import Conditional, whitened_precision
from .modes import SeparableKernel

#: Learned hyperparameters may leave this fraction of the prior variance unrepresented at the edge of the data.
MAX_MISSING = 0.02


@dataclass
class FactorData:
    r"""
    All that the evidence of one factor needs of the data.

    :param gram: G in the raw basis, `(R, M, R, M)`.
    :param rhs: :math:`b = C^\top y`, `(R, M)`.
    :param square: :math:`y^\top y`.
    :param count: N.
    """

    gram: Tensor
    rhs: Tensor
    square: Tensor
    count: Tensor


def log_evidence(data: FactorData, variances: Tensor, prior: Tensor, noise: Tensor) -> Tensor:
    r"""
    :math:`\log p(y \mid A_{-d}, \theta)`, a scalar, differentiable in all but the data.

    :param data: Sums over the data.
    :param variances: v, `(M,)`.
    :param prior: Q, the prior precision of the whitened weights over components, `(R, R)`.
    :param noise: :math:`s^2`.
    """
    variances = variances.clamp(min=1e-250)  # the root of zero has no gradient
    conditional = Conditional(whitened_precision(data.gram / noise, variances, prior))
    c = (data.rhs * variances.sqrt() / noise).reshape(-1, 1)
    quadratic = conditional.half_solve(c).square().sum()
    logdet_prior = Conditional(prior).logdet() * variances.shape[0]
    misfit = data.count * torch.log(2 * math.pi * noise) + data.square / noise
    return (logdet_prior - conditional.logdet() + quadratic - misfit) / 2


@dataclass
class FactorMoments:
    r"""
    What is remembered of a factor after its update, for hyperparameters that it shares with other modes.

    Its expected log prior density is
    :math:`-\tfrac12 \sum_j (R \log v_j + T_j \bar v_j / v_j)` with
    :math:`T_j = \sum_{rs} Q_{rs} E[w_{rj} w_{sj}]` under the factor's conditional.

    :param energy: T, `(M,)`.
    :param variances: :math:`\bar v`, the variances at the time of the update, `(M,)`.
    :param rank: R.
    """

    energy: Tensor
    variances: Tensor
    rank: int

    @classmethod
    def from_conditional(cls, weights: Tensor, covariance: Tensor, prior: Tensor, variances: Tensor) -> FactorMoments:
        """
        :param weights: Whitened weights `(R, M)`.
        :param covariance: Of the whitened weights, `(R M, R M)`.
        :param prior: Q, `(R, R)`.
        :param variances: v, `(M,)`.
        """
        rank, size = weights.shape
        blocks = covariance.reshape(rank, size, rank, size).diagonal(dim1=1, dim2=3)  # (R, R, M)
        second = blocks + weights.unsqueeze(1) * weights.unsqueeze(0)
        return cls(torch.einsum("rs,rsj->j", prior, second), variances, rank)

    def expected_log_prior(self, variances: Tensor) -> Tensor:
        """
        :param variances: v at other hyperparameters, `(M,)`.
        """
        tiny = torch.finfo(torch.float64).tiny
        ratio = (self.variances.clamp(min=tiny).log() - variances.clamp(min=tiny).log()).clamp(max=300.0)
        return -0.5 * (self.energy * ratio.exp() - self.rank * ratio).sum()


class HyperparameterStep:
    """
    A few quasi-Newton steps on the evidence of one factor, through the raw parameters of kernel and likelihood.

    Constraints are those of the raw parameters, registered priors are added, and variances that the box cannot represent
    are kept away from by a barrier. Parameters with ``requires_grad=False`` stay as they are.

    :param separable: The kernel, read mode by mode.
    :param modules: The kernel and the likelihood.
    :param noise: Returns the noise variance in the units of the sums.
    :param outputscale: Returns the outermost output scale in the units of the sums.
    :param grids: Points of each mode where its prior variance should be represented.
    :param max_iterations: Quasi-Newton iterations per factor.
    """

    def __init__(
        self,
        separable: SeparableKernel,
        modules: Sequence[nn.Module],
        noise: Callable[[], Tensor],
        outputscale: Callable[[], Tensor],
        grids: Sequence[Tensor],
        *,
        max_iterations: int = 5,
    ):
        self.separable, self.modules, self.noise, self.outputscale = separable, modules, noise, outputscale
        self.grids, self.max_iterations = grids, max_iterations
        self.parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
        self.features = [mode.basis(grid).square() for mode, grid in zip(separable.modes, grids, strict=True)]
        self.users = [self._used_by(mode.variances()) for mode in separable.modes]  # parameter numbers of each mode
        self.common = self._used_by(noise()) | self._used_by(outputscale())

    def _used_by(self, value: Tensor) -> set[int]:
        if not value.requires_grad:
            return set()
        grads = torch.autograd.grad(value.sum(), self.parameters, allow_unused=True)
        return {i for i, grad in enumerate(grads) if grad is not None}

    def shares(self, d: int) -> bool:
        """
        Whether a mode has a hyperparameter in common with another one.

        :param d: The mode.
        """
        return any(self.users[d] & users for k, users in enumerate(self.users) if k != d)

    def __call__(
        self,
        d: int,
        data: FactorData,
        prior: Callable[[Tensor, Tensor], Tensor],
        memory: Sequence[FactorMoments | None],
    ) -> None:
        """
        Improve the hyperparameters that mode d depends on, in place.

        :param d: The mode.
        :param data: Its sums.
        :param prior: Q from noise and output scale.
        :param memory: What is remembered of each mode.
        """
        numbers = sorted(self.users[d] | self.common)
        others = [k for k, users in enumerate(self.users) if k != d and users & self.users[d] and memory[k] is not None]
        chosen = [self.parameters[i] for i in numbers]
        if not chosen:
            return

        def objective() -> Tensor:
            noise, outputscale = self.noise(), self.outputscale()
            variances = self.separable.modes[d].variances()
            value = log_evidence(data, variances, prior(noise, outputscale), noise)
            value = value - self._barrier(d, variances) * data.count
            for k in others:
                moments = memory[k]
                assert moments is not None
                value = value + moments.expected_log_prior(self.separable.modes[k].variances())
            return value + self._log_priors()

        _maximise(objective, chosen, self.max_iterations)

    def _barrier(self, d: int, variances: Tensor) -> Tensor:
        """Quadratic in the fraction of prior variance that goes missing beyond what is tolerated."""
        represented = (self.features[d] @ variances) / self.separable.modes[d].prior_variance(self.grids[d])
        excess = 1 - represented - MAX_MISSING / len(self.grids)
        return 1e4 * excess.clamp(min=0.0).square().mean()

    def _log_priors(self) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for module in self.modules:
            for _, owner, prior, closure, _ in module.named_priors():
                total = total + prior.log_prob(closure(owner)).double().sum().cpu()
        return total


def _maximise(objective: Callable[[], Tensor], parameters: Sequence[nn.Parameter], max_iterations: int) -> None:
    """A few steps of L-BFGS-B, in place; parameters stay as they are where no step improves the objective."""
    start = [parameter.detach().clone() for parameter in parameters]
    best: tuple[float, list[Tensor]] = (-1e300, start)

    def assign(flat: np.ndarray) -> None:
        position = 0
        for parameter in parameters:
            piece = torch.as_tensor(flat[position : position + parameter.numel()])
            parameter.data.copy_(piece.reshape(parameter.shape))
            position += parameter.numel()

    def negative(flat: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal best
        assign(flat)
        with torch.enable_grad():
            value = objective()
            grads = torch.autograd.grad(value, parameters, allow_unused=True)
        flat_grads = [
            (torch.zeros_like(p) if g is None else g).reshape(-1).double() for p, g in zip(parameters, grads, strict=True)
        ]
        gradient = torch.cat(flat_grads).cpu().numpy()
        if not (math.isfinite(float(value)) and np.isfinite(gradient).all()):
            return 1e6 - best[0], np.zeros_like(flat)  # far worse, but not so much that the line search gives up
        if float(value) > best[0]:
            best = float(value), [parameter.detach().clone() for parameter in parameters]
        return -float(value), -gradient

    flat = torch.cat([parameter.reshape(-1).double() for parameter in start]).cpu().numpy()
    scipy.optimize.minimize(
        negative, flat, jac=True, method="L-BFGS-B", bounds=[(v - 1.0, v + 1.0) for v in flat],
        options={"maxiter": max_iterations, "maxfun": 2 * max_iterations},
    )
    for parameter, value in zip(parameters, best[1], strict=True):
        parameter.data.copy_(value)
