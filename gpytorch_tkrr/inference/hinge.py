r"""Support vector machines: losses of the margin :math:`u = 1 - y f(x)`, by weighted least squares.

Before each update of a factor every row's loss is replaced by a parabola that lies above it and touches it at the
present margin. The sum of parabolas is a least-squares problem, and what lowers it lowers the losses: the objective
never rises.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..data.source import Batch


class Parabola(NamedTuple):
    r"""
    :math:`w (u - u_0 + e)^2` plus a constant: above the loss, and equal to it at :math:`u = u_0`.

    :param step: e, by which the margin is to fall, `(n,)`.
    :param weight: w, `(n,)`.
    :param loss: The loss at :math:`u_0`, `(n,)`.
    """

    step: Tensor
    weight: Tensor
    loss: Tensor


class MarginLoss(ABC):
    """A convex loss of the margin :math:`u = 1 - y f(x)` of two classes, y = -1 and +1."""

    @abstractmethod
    def majorise(self, margin: Tensor) -> Parabola:
        """
        The parabolas above the losses.

        :param margin: :math:`u_0`, `(n,)`.
        """


@dataclass(frozen=True)
class Hinge(MarginLoss):
    r"""
    The hinge loss of a support vector machine, :math:`\max(0, 1 - y f(x))`, with a rounded corner:

    .. math:: \tfrac12 \bigl(u + \sqrt{u^2 + \epsilon^2}\bigr), \qquad u = 1 - y f(x),

    which is larger by :math:`\epsilon / 2` at most. With the penalty :math:`\lambda \|w\|^2` the constant of a support
    vector machine is :math:`C = 1 / (2 \lambda)`.

    :param smoothing: :math:`\epsilon`. The smaller it is, the smaller the steps of a fit.

    Example:
        >>> import gpytorch, torch, gpytorch_tkrr as tkrr
        >>> x = torch.rand(300, 2, dtype=torch.float64)
        >>> y = ((x - 0.5).norm(dim=-1) < 0.3).double()
        >>> model = tkrr.TKRR(x, y, gpytorch.likelihoods.BernoulliLikelihood(), rank=4)
        >>> result = tkrr.fit_als(model, loss=tkrr.Hinge(), penalty=tkrr.FrobeniusPenalty(1e-3), seed=0)
        >>> bool(((model.eval()(x).mean > 0) == (y > 0)).double().mean() > 0.95)
        True

    Reference: Groenen, Nalbantov & Bioch (2008), *SVM-Maj: a majorization approach to linear support vector machines
    with different hinge errors*.
    """

    smoothing: float = 0.01

    def __post_init__(self) -> None:
        if not self.smoothing > 0:
            raise ValueError(f"smoothing must be positive; got {self.smoothing}.")

    def majorise(self, margin: Tensor) -> Parabola:
        size = torch.hypot(margin, torch.full_like(margin, self.smoothing))
        # u + |u| without cancellation where u is negative.
        step = torch.where(margin > 0, margin + size, self.smoothing**2 / (size - margin).clamp(min=self.smoothing))
        return Parabola(step, 1 / (4 * size), step / 2)


@dataclass(frozen=True)
class SquaredHinge(MarginLoss):
    r"""
    The squared hinge loss, :math:`\max(0, 1 - y f(x))^2`: squared errors of the rows that lie on the wrong side of
    their margin.

    Example:
        >>> import gpytorch, torch, gpytorch_tkrr as tkrr
        >>> x = torch.rand(300, 2, dtype=torch.float64)
        >>> y = ((x - 0.5).norm(dim=-1) < 0.3).double()
        >>> model = tkrr.TKRR(x, y, gpytorch.likelihoods.BernoulliLikelihood(), rank=4)
        >>> result = tkrr.fit_als(model, loss=tkrr.SquaredHinge(), penalty=tkrr.FrobeniusPenalty(1e-3), seed=0)
        >>> bool(((model.eval()(x).mean > 0) == (y > 0)).double().mean() > 0.95)
        True
    """

    def majorise(self, margin: Tensor) -> Parabola:
        step = margin.clamp(min=0)
        return Parabola(step, torch.ones_like(margin), step.square())


class WorkingMargins:
    """
    The working targets of a margin loss.

    :param loss: The loss.
    :param scale: The unit of the scaled targets.

    :ivar excess: The sum of the losses minus the weighted sum of squares, of all rows seen, in scaled units.
    """

    def __init__(self, loss: MarginLoss, scale: float):
        self.margin_loss, self.scale = loss, scale
        self.excess = 0.0

    def __call__(self, batch: Batch, f: Tensor, first_row: int) -> tuple[Tensor, Tensor]:
        """
        :param batch: The rows, whose targets are classes minus a mean between them, divided by the scale.
        :param f: The model's values `(n,)`.
        :param first_row: Not used.
        """
        label, parabola = self._majorise(batch, f)
        step = parabola.step / self.scale
        excess = parabola.loss / self.scale**2 - parabola.weight * step.square()
        self.excess += float((excess if batch.weight is None else batch.weight * excess).sum())
        return label * step, parabola.weight

    def loss(self, batch: Batch, f: Tensor, first_row: int) -> Tensor:
        """
        The sum of the losses in scaled units, `(1,)`.

        :param batch: The rows.
        :param f: The model's values `(n,)`.
        :param first_row: Not used.
        """
        loss = self._majorise(batch, f)[1].loss / self.scale**2
        return (loss if batch.weight is None else batch.weight * loss).sum().reshape(1)

    def _majorise(self, batch: Batch, f: Tensor) -> tuple[Tensor, Parabola]:
        label = batch.y.sign()
        return label, self.margin_loss.majorise(label * (batch.y - f) * self.scale)  # 1 - y f = y (y - f)
