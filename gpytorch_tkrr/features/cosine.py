r"""The two functions of a cosine kernel of one input.

.. math:: \cos(\pi (x - x') / p) = \cos(\pi x / p) \cos(\pi x' / p) + \sin(\pi x / p) \sin(\pi x' / p).
"""

from __future__ import annotations

import math

import torch
from gpytorch.kernels import CosineKernel
from torch import Tensor

from ..bases.basis import Basis
from .expansion import Term
from .finite import of_column, register_finite_basis


class WaveBasis(Basis):
    r"""
    :math:`\cos(\pi x / p)` and :math:`\sin(\pi x / p)`.

    :param half_period: p, `(*batch,)`, a tensor that may require a gradient.
    """

    def __init__(self, half_period: Tensor):
        self.half_period = half_period.double()

    @property
    def num_functions(self) -> int:
        return 2

    def parameters(self) -> list[Tensor]:
        return [self.half_period]

    def detach(self) -> WaveBasis:
        return WaveBasis(self.half_period.detach())

    def __call__(self, x: Tensor) -> Tensor:
        phase = math.pi * x.double() / self.half_period.unsqueeze(-1)
        return torch.stack([phase.cos(), phase.sin()], dim=-1)

    def band(self, low: float, high: float) -> tuple[float, int]:
        return math.pi / float(self.half_period), 0


@register_finite_basis(CosineKernel, over_columns=None)
class CosineTerm(Term):
    """
    A cosine and a sine of one frequency, for :class:`~gpytorch.kernels.CosineKernel`. They depend on its period.

    :param kernel: The kernel.
    :param position: Which of its columns.
    :param num_basis: Not used.
    """

    def __init__(self, kernel: CosineKernel, position: int, num_basis: int = 2):
        self.kernel, self.position = kernel, position

    @property
    def basis(self) -> WaveBasis:
        return WaveBasis(of_column(self.kernel.period_length, self.position))

    def variances(self) -> Tensor:
        return self.prior_variance(self.kernel.period_length).expand(*self.kernel.batch_shape, 2)

    def prior_variance(self, x: Tensor) -> Tensor:
        return torch.ones(*self.kernel.batch_shape, 1, dtype=torch.float64, device=x.device)
