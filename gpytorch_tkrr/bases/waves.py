r"""Cosines and sines on a box, zero outside of it: at given frequencies, or at the multiples of one frequency.

Zero outside means that a model knows nothing there, as with the sines: what the functions do not represent counts as
independent variance.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .basis import Basis, FourierBasis, SpectralBasis


def within(x: Tensor, center: Tensor, half_width: Tensor) -> Tensor:
    """
    One inside the closed box and zero outside, float64 (a relative 1e-6 of the half width is forgiven: float32).

    :param x: Inputs `(...)`.
    :param center: The centre, a scalar.
    :param half_width: The half width, a scalar.
    """
    return ((x.detach().double() - center).abs() <= half_width * (1 + 1e-6)).double()


class FrequencyBasis(SpectralBasis):
    r"""
    Cosines and sines at given frequencies, in pairs:
    :math:`\cos(\omega_1 s), \sin(\omega_1 s), \cos(\omega_2 s), \ldots` with :math:`s = x - c`.

    :param center: The centre c.
    :param half_width: The half width of the box.
    :param omega: :math:`\omega`, `(n,)` or `(*batch, n)`.
    :param factors: :math:`q`, `(n,)`; see :class:`SpectralBasis`.
    """

    def __init__(self, center: Tensor, half_width: Tensor, omega: Tensor, factors: Tensor):
        self.center, self.half_width, self.omega, self._factors = center, half_width, omega, factors

    @property
    def num_functions(self) -> int:
        return 2 * self.omega.shape[-1]

    @property
    def frequencies(self) -> Tensor:
        return self.omega.repeat_interleave(2, dim=-1)

    @property
    def factors(self) -> Tensor:
        return self._factors.repeat_interleave(2, dim=-1)

    def parameters(self) -> list[Tensor]:
        return [self.center, self.half_width, self.omega]

    def detach(self) -> FrequencyBasis:
        return FrequencyBasis(self.center, self.half_width, self.omega.detach(), self._factors)

    def __call__(self, x: Tensor) -> Tensor:
        phase = (x.double() - self.center).unsqueeze(-1) * self.omega.unsqueeze(-2)  # (..., N, n)
        waves = torch.stack([phase.cos(), phase.sin()], dim=-1).flatten(-2)
        return waves * within(x, self.center, self.half_width).unsqueeze(-1)

    def fill(self, x: Tensor, out: Tensor) -> None:
        phase = self.omega.unsqueeze(-1) * (x.double() - self.center)  # (n, N)
        torch.cos(phase, out=out[0::2])
        torch.sin(phase, out=out[1::2])
        out.mul_(within(x, self.center, self.half_width))

    def band(self, low: float, high: float) -> tuple[float, int] | None:
        if low < self.center - self.half_width or high > self.center + self.half_width:
            return None  # zero outside of the box: not smooth at its edge
        return float(self.omega.max()), 0


class HarmonicBasis(Basis):
    r"""
    The Fourier series of the box :math:`[c - L, c + L]`:
    :math:`1, \cos(\omega s), \sin(\omega s), \ldots, \cos(J \omega s), \sin(J \omega s)` with :math:`\omega = \pi / L`
    and :math:`s = x - c + L`. Their moment functions are those of twice as many harmonics.

    :param center: The centre c.
    :param half_width: The half width L.
    :param num_harmonics: J.
    """

    def __init__(self, center: Tensor, half_width: Tensor, num_harmonics: int):
        self.center, self.half_width, self.num_harmonics = center, half_width, num_harmonics
        self._series = FourierBasis(2 * half_width, num_harmonics)

    @property
    def num_functions(self) -> int:
        return self._series.num_functions

    @property
    def frequencies(self) -> Tensor:
        r"""Angular frequencies of the functions, `(M,)`."""
        number = (torch.arange(self.num_functions, device=self.half_width.device) + 1) // 2
        return math.pi * number.double() / self.half_width

    def parameters(self) -> list[Tensor]:
        return [self.center, self.half_width]

    def _position(self, x: Tensor) -> Tensor:
        return x.double() - self.center + self.half_width

    def _within(self, x: Tensor) -> Tensor:
        return within(x, self.center, self.half_width)

    def __call__(self, x: Tensor) -> Tensor:
        return self._series(self._position(x)) * self._within(x).unsqueeze(-1)

    @property
    def num_moments(self) -> int:
        return self._series.num_moments

    def product_formula(self) -> tuple[Tensor, Tensor]:
        return self._series.product_formula()

    def moments(self, x: Tensor) -> Tensor:
        return self._series.moments(self._position(x)).mul_(self._within(x))

    def fill_with_moments(self, x: Tensor, features: Tensor, moments: Tensor) -> None:
        self._series.fill_with_moments(self._position(x), features, moments)
        inside = self._within(x)
        features.mul_(inside)
        moments.mul_(inside)

    def band(self, low: float, high: float) -> tuple[float, int] | None:
        if low < self.center - self.half_width or high > self.center + self.half_width:
            return None  # zero outside of the box: not smooth at its edge
        return self._series.band(low, high)
