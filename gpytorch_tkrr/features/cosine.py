r"""The two functions of a cosine kernel of one input.

.. math:: \cos(\pi (x - x') / p) = \cos(\pi x / p) \cos(\pi x' / p) + \sin(\pi x / p) \sin(\pi x' / p).
"""

from __future__ import annotations

import math

import torch
from gpytorch.kernels import CosineKernel
from torch import Tensor

from ..errors import UnsupportedKernelError
from .advice import advise
from .expansion import Box, Expansion, register


class Cosine(Expansion):
    """
    A cosine and a sine of one frequency, for :class:`~gpytorch.kernels.CosineKernel` of one input column. The basis
    depends on the period.

    :param kernel: The kernel.
    :param column: The column it sees.
    """

    def __init__(self, kernel: CosineKernel, column: int):
        self.kernel = kernel
        self.column = column

    @property
    def num_functions(self) -> int:
        return 2

    def features(self, x: Tensor) -> Tensor:
        angle = math.pi * x[..., [self.column]].double() / self.kernel.period_length.double()  # (..., N, 1)
        return torch.cat([angle.cos(), angle.sin()], dim=-1)

    def variances(self) -> Tensor:
        period = self.kernel.period_length.double().squeeze(-1)  # (*batch, 1)
        return torch.ones_like(period).expand(*period.shape[:-1], 2)

    def prior_variance(self, x: Tensor) -> Tensor:
        return self.variances()[..., :1]

    def basis_parameters(self) -> list[Tensor]:
        return [self.kernel.period_length]


@register(CosineKernel)
def _(kernel: CosineKernel, box: Box, path: str) -> Expansion:
    if len(box.columns) > 1:
        raise UnsupportedKernelError(f"{path}: CosineKernel sees {len(box.columns)} input columns. {advise(kernel)}")
    return Cosine(kernel, box.columns[0])
