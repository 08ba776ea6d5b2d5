"""One-dimensional, hyperparameter-free basis functions.

Each basis maps inputs `(...)` to float64 features `(..., M)`. The box and the period are the only things a basis knows.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Basis(ABC):
    """A finite list of functions of one variable."""

    @property
    @abstractmethod
    def num_functions(self) -> int:
        """M, the number of functions."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """
        Evaluate all functions.

        :param x: Inputs `(...)`.
        :return: Features `(..., M)`, float64, differentiable in `x`.
        """


class SineBasis(Basis):
    r"""
    Laplace eigenfunctions with Dirichlet ends on :math:`[c - L, c + L]`, zero outside:

    .. math:: \phi_j(x) = L^{-1/2} \sin(\omega_j (x - c + L)), \quad \omega_j = \frac{\pi j}{2 L}, \quad j = 1 \ldots M.

    :param center: The centre c.
    :param half_width: The half width L.
    :param num_functions: M.

    Reference: Solin & Särkkä (2020), *Hilbert space methods for reduced-rank Gaussian process regression*.
    """

    def __init__(self, center: float | Tensor, half_width: float | Tensor, num_functions: int):
        self.center = torch.as_tensor(center, dtype=torch.float64)
        self.half_width = torch.as_tensor(half_width, dtype=torch.float64)
        self._num_functions = num_functions

    @property
    def num_functions(self) -> int:
        return self._num_functions

    @property
    def frequencies(self) -> Tensor:
        r"""Angular frequencies :math:`\omega_j`, `(M,)`."""
        j = torch.arange(1, self._num_functions + 1, dtype=torch.float64, device=self.half_width.device)
        return math.pi * j / (2 * self.half_width)

    def angle(self, x: Tensor) -> Tensor:
        r""":math:`t = \pi (x - c + L) / (2 L)`, clamped to :math:`[0, \pi]` so that all sines vanish outside."""
        t = math.pi * (x.double() - self.center + self.half_width) / (2 * self.half_width)
        return t.clamp(0.0, math.pi)

    def __call__(self, x: Tensor) -> Tensor:
        j = torch.arange(1, self._num_functions + 1, dtype=torch.float64, device=x.device)
        return torch.sin(self.angle(x).unsqueeze(-1) * j) / self.half_width.sqrt()


class ConstantBasis(Basis):
    """The one function 1."""

    @property
    def num_functions(self) -> int:
        return 1

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ones_like(x, dtype=torch.float64).unsqueeze(-1)


class MonomialBasis(Basis):
    r"""
    The one function :math:`(x - c)^p`.

    :param power: The exponent p.
    :param center: The origin c.
    """

    def __init__(self, power: int = 1, center: float | Tensor = 0.0):
        self.power = power
        self.center = torch.as_tensor(center, dtype=torch.float64)

    @property
    def num_functions(self) -> int:
        return 1

    def __call__(self, x: Tensor) -> Tensor:
        return ((x.double() - self.center) ** self.power).unsqueeze(-1)


class FourierBasis(Basis):
    r"""
    The functions of period p: :math:`1, \cos(\omega x), \sin(\omega x), \ldots, \cos(J \omega x), \sin(J \omega x)`
    with :math:`\omega = 2 \pi / p`.

    :param period: The period p, a tensor that may require a gradient; its shape `(*batch,)` must broadcast with the
        inputs' leading dimensions.
    :param num_harmonics: J.
    """

    def __init__(self, period: float | Tensor, num_harmonics: int):
        self.period = torch.as_tensor(period).double()
        self.num_harmonics = num_harmonics

    @property
    def num_functions(self) -> int:
        return 1 + 2 * self.num_harmonics

    def __call__(self, x: Tensor) -> Tensor:
        j = torch.arange(1, self.num_harmonics + 1, dtype=torch.float64, device=x.device)
        phase = (2 * math.pi * x.double() / self.period.unsqueeze(-1)).unsqueeze(-1) * j  # (..., N, J)
        waves = torch.stack([phase.cos(), phase.sin()], dim=-1).flatten(-2)  # cos, sin, cos, sin, ...
        return torch.cat([torch.ones_like(waves[..., :1]), waves], dim=-1)


class ConcatenatedBasis(Basis):
    """
    Several bases of the same variable, one after the other.

    :param bases: The parts.
    """

    def __init__(self, *bases: Basis):
        self.bases = bases

    @property
    def num_functions(self) -> int:
        return sum(basis.num_functions for basis in self.bases)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([basis(x) for basis in self.bases], dim=-1)
