r"""Hyperparameters from the evidence of one factor, without the data.

In the raw basis the sums G and b of a factor do not depend on its hyperparameters, so with all other factors fixed

.. math:: \log p(y \mid A_{-d}, \theta) = -\tfrac12 \log |P| + \tfrac{M}{2} \log |Q|
    + \tfrac12 c^\top P^{-1} c - \tfrac{N}{2} \log(2 \pi s^2) - \frac{y^\top y}{2 s^2},
    \qquad P = V^{1/2} G V^{1/2} / s^2 + Q \otimes I, \quad c = V^{1/2} b / s^2,

costs :math:`(M R)^3` and no N. A parameter shared by several modes enters the evidence of each of them: their sum is
maximised. (The density of the other factors at their present values is no substitute: these are modes, not draws, and
would hold the parameter where it is.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gpytorch
import numpy as np
import scipy.optimize
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..features.covariance import Covariance
from ..features.represented import MAX_LEARNED_MISSING, ModeGrid
from ..features.separable import SeparableKernel
from .conditional import Conditional, whitened_precision
from .sums import FactorSums


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

    @classmethod
    def from_residuals(cls, sums: FactorSums, gram: Tensor, raw: Tensor) -> FactorData:
        """
        The sums for the targets themselves, from those for the residuals of a model with a given raw factor.

        :param sums: Sums with the residuals as target.
        :param gram: Their Gram matrix, `(R, M, R, M)`.
        :param raw: The raw factor, scales of its components multiplied in, `(R, M)`.
        """
        product = (gram.reshape(raw.numel(), -1) @ raw.reshape(-1)).reshape(raw.shape)
        square = sums.square + (raw * (2 * sums.rhs + product)).sum()
        return cls(gram, sums.rhs + product, square, sums.count)


def log_evidence(data: FactorData, covariance: Covariance, prior: Tensor, noise: Tensor) -> Tensor:
    r"""
    :math:`\log p(y \mid A_{-d}, \theta)`, a scalar, differentiable in all but the data.

    :param data: Sums over the data.
    :param covariance: V, of M weights.
    :param prior: Q, the prior precision of the whitened weights over components, `(R, R)`.
    :param noise: :math:`s^2`.
    """
    variances = covariance.variances.clamp(min=1e-250)  # the root of zero has no gradient
    precision = whitened_precision(data.gram, Covariance(variances / noise, covariance.mixing), prior)
    integral = _LogIntegral.apply(precision, (covariance.mix(data.rhs) * variances.sqrt() / noise).reshape(-1))
    logdet_prior = Conditional(prior).logdet() * variances.shape[0]
    misfit = data.count * torch.log(2 * math.pi * noise) + data.square / noise
    return integral + (logdet_prior - misfit) / 2


class _LogIntegral(torch.autograd.Function):
    r"""
    :math:`\log \int e^{-w^\top P w / 2 + c^\top w} dw = \tfrac12 (c^\top P^{-1} c - \log |P|)` + const.

    Its gradient needs no derivative of the Cholesky factor: with :math:`u = P^{-1} c` it is
    :math:`-\tfrac12 (P^{-1} + u u^\top)` in P and u in c.
    """

    @staticmethod
    def forward(ctx: Any, precision: Tensor, c: Tensor) -> Tensor:
        conditional = Conditional(precision)
        u = conditional.solve(c)
        ctx.save_for_backward(conditional.factor, conditional.scale, u)
        ctx.jitter = conditional.jitter
        return (c @ u - conditional.logdet()) / 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        factor, scale, u = ctx.saved_tensors
        inverse = Conditional.from_factor(factor, scale).covariance()
        inverse.addr_(u, u).diagonal().mul_(1 + ctx.jitter)  # the jitter is a fraction of the diagonal
        return inverse.mul_(-grad / 2), grad * u


@dataclass
class FactorEvidence:
    """
    The evidence of one factor as a function of hyperparameters.

    :param data: Returns its sums.
    :param prior: Returns Q for given noise variance and output scale.
    """

    data: Callable[[], FactorData]
    prior: Callable[[Tensor, Tensor], Tensor]


class HyperparameterStep:
    """
    A few quasi-Newton steps on the evidence of one factor, through the raw parameters of kernel and likelihood.

    Constraints are those of the raw parameters, registered priors are added, and variances that the box cannot
    represent are kept away from by a barrier. Parameters with ``requires_grad=False`` stay as they are.

    :param separable: The kernel, read mode by mode.
    :param modules: The kernel and the likelihood, GPyTorch modules.
    :param noise: Returns the noise variance in the units of the sums.
    :param outputscale: Returns the outermost output scale in the units of the sums.
    :param grids: Points of each mode where its prior variance should be represented.
    :param max_iterations: Quasi-Newton iterations per factor.
    """

    def __init__(
        self,
        separable: SeparableKernel,
        modules: Sequence[gpytorch.Module],
        noise: Callable[[], Tensor],
        outputscale: Callable[[], Tensor],
        grids: Sequence[Tensor],
        *,
        max_iterations: int = 5,
    ):
        self.separable, self.noise, self.outputscale = separable, noise, outputscale
        self.max_iterations = max_iterations
        self.parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
        self.priors = [found[1:4] for module in modules for found in module.named_priors()]  # owner, prior, closure
        self.grids = [ModeGrid(mode, grid) for mode, grid in zip(separable.modes, grids, strict=True)]
        self.users = [
            self._used_by(mode.covariance().numbers()) for mode in separable.modes
        ]  # parameter numbers of each mode
        self.common = self._used_by(noise()) | self._used_by(outputscale())

    def _used_by(self, value: Tensor) -> set[int]:
        if not value.requires_grad:
            return set()
        grads = torch.autograd.grad(value.sum(), self.parameters, allow_unused=True)
        return {i for i, grad in enumerate(grads) if grad is not None}

    def sharers(self, d: int) -> list[int]:
        """
        The modes that have a hyperparameter in common with a mode, itself included.

        :param d: The mode.
        """
        return [k for k, users in enumerate(self.users) if k == d or users & self.users[d]]

    def __call__(self, d: int, evidences: Mapping[int, FactorEvidence]) -> None:
        """
        Improve the hyperparameters that mode d depends on, in place.

        :param d: The mode.
        :param evidences: The evidence of this mode, and of those it shares hyperparameters with as far as known.
        """
        chosen = [self.parameters[i] for i in sorted(self.users[d] | self.common)]
        if not chosen:
            return
        terms: list[Callable[[], Tensor]] = [self._log_priors]
        for k in self.sharers(d):
            if k in evidences:
                terms.append(self._term(k, evidences[k]))
        _maximise(terms, chosen, self.max_iterations)

    def _term(self, k: int, evidence: FactorEvidence) -> Callable[[], Tensor]:
        data = evidence.data()

        def term() -> Tensor:
            noise, covariance = self.noise(), self.separable.modes[k].covariance()
            value = log_evidence(data, covariance, evidence.prior(noise, self.outputscale()), noise)
            return value - self._barrier(k, covariance) * data.count

        return term

    def _barrier(self, d: int, covariance: Covariance) -> Tensor:
        """Quadratic in the fraction of prior variance that goes missing beyond what is tolerated."""
        excess = self.grids[d].missing(covariance) - MAX_LEARNED_MISSING / len(self.grids)
        return 1e4 * excess.clamp(min=0.0).square().mean()

    def _log_priors(self) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for owner, prior, closure in self.priors:
            total = total + prior.log_prob(closure(owner)).double().sum().cpu()
        return total


def _maximise(terms: Sequence[Callable[[], Tensor]], parameters: Sequence[nn.Parameter], max_iterations: int) -> None:
    """A few steps of L-BFGS-B on a sum, in place; parameters stay as they are where no step improves it."""
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
        value, gradient = 0.0, np.zeros_like(flat)
        for term in terms:  # one graph at a time
            with torch.enable_grad():
                summand = term()
                grads = torch.autograd.grad(summand, parameters, allow_unused=True) if summand.requires_grad else ()
            value += summand.item()
            pieces = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=False)]
            if pieces:
                gradient = gradient + torch.cat([piece.reshape(-1).double() for piece in pieces]).cpu().numpy()
        if not (math.isfinite(value) and np.isfinite(gradient).all()):
            return 1e6 - best[0], np.zeros_like(flat)  # far worse, but not so much that the line search gives up
        if value > best[0]:
            best = value, [parameter.detach().clone() for parameter in parameters]
        return -value, -gradient

    center = torch.cat([parameter.reshape(-1).double() for parameter in start]).cpu().numpy()
    unit = np.maximum(1.0, np.abs(center))  # raw parameters are logarithms where small and values where large

    def scaled(step: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = negative(center + unit * step)
        return value, unit * gradient

    scipy.optimize.minimize(
        scaled,
        np.zeros_like(center),
        jac=True,
        method="L-BFGS-B",
        bounds=[(-1.0, 1.0)] * len(center),
        options={"maxiter": max_iterations, "maxfun": 2 * max_iterations},
    )
    for parameter, value in zip(parameters, best[1], strict=True):
        parameter.data.copy_(value)
