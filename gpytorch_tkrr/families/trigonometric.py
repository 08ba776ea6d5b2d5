"""Two functions for each input: the map of Stoudenmire and Schwab."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..bases.basis import Basis
from ..bases.waves import within
from .map_kernel import FeatureMap


class Trigonometric(FeatureMap):
    r"""
    A quarter of a wave over the box :math:`[a, b]`: :math:`\cos(\tfrac\pi2 s), \sin(\tfrac\pi2 s)` with
    :math:`s = (x - a) / (b - a)`, two functions for each input whatever `num_basis` is. The kernel is

    .. math:: k(x, x') = \prod_d \cos\bigl(\tfrac\pi2 (s_d - s'_d)\bigr).

    Example:
        >>> import gpytorch, torch, gpytorch_tkrr as tkrr
        >>> x = torch.rand(200, 2)
        >>> likelihood = gpytorch.likelihoods.GaussianLikelihood()
        >>> model = tkrr.TKRR(x, x.prod(-1), likelihood, basis=tkrr.Trigonometric(), rank=3)
        >>> [mode.num_functions for mode in model.separate().modes]
        [2, 2]

    Reference: Stoudenmire & Schwab (2016), *Supervised learning with tensor networks*.
    """

    def functions(self, center: Tensor, half_width: Tensor, num_basis: int) -> Basis:
        return QuarterWaveBasis(center, half_width)


class QuarterWaveBasis(Basis):
    r"""
    :math:`\sqrt 2 \cos(\tfrac\pi2 s)` and :math:`\sqrt 2 \sin(\tfrac\pi2 s)` with s from 0 to 1 over the box.

    :param center: The centre.
    :param half_width: The half width.
    """

    def __init__(self, center: Tensor, half_width: Tensor):
        self.center, self.half_width = center, half_width

    @property
    def num_functions(self) -> int:
        return 2

    def parameters(self) -> list[Tensor]:
        return [self.center, self.half_width]

    def __call__(self, x: Tensor) -> Tensor:
        angle = math.pi / 4 * ((x.double() - self.center) / self.half_width + 1)
        waves = math.sqrt(2) * torch.stack([angle.cos(), angle.sin()], dim=-1)
        return waves * within(x, self.center, self.half_width).unsqueeze(-1)

    def band(self, low: float, high: float) -> tuple[float, int] | None:
        if low < self.center - self.half_width or high > self.center + self.half_width:
            return None
        return math.pi / (4 * float(self.half_width)), 0
