r"""One-dimensional, hyperparameter-free basis functions, and what is known about their products.

Each basis maps inputs `(...)` to float64 features `(..., M)`. The box and the period are the only things a basis knows.

Where products of two functions are combinations of few others, a basis says so: its *moment functions* :math:`\psi`
with

.. math:: \phi_i \phi_j = \alpha_{ij} \psi_{k(i, j)} + \beta_{ij} \psi_{l(i, j)}.

There are far fewer :math:`\psi` than pairs: :math:`2 M + 1` cosines serve M sines. So a Gram matrix with any row
weights needs the sums :math:`\sum_n w_n \psi_k(x_n)` only. A basis without such an identity leaves these methods alone;
its features are then multiplied pair by pair.

Function-major arrays, `(functions, N)`, carry no gradients.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from functools import reduce

import torch
from torch import Tensor

from .trigonometry import cosines, harmonics, sine_series


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

    def combine(self, x: Tensor, coefficients: Tensor) -> Tensor:
        r"""
        :math:`\sum_j a_{kj} \phi_j(x)`, differentiable in both.

        :param x: Inputs `(...)`.
        :param coefficients: a, `(K, M)`.
        :return: `(..., K)`, float64.
        """
        return self(x) @ coefficients.mT

    def parameters(self) -> list[Tensor]:
        """Tensors that the functions depend on, beside the inputs."""
        return []

    @property
    def structure(self) -> Hashable:
        """Which functions these are, all but the values of :meth:`parameters`: the class and its plain attributes."""
        plain = {name: value for name, value in vars(self).items() if isinstance(value, (int, float, str))}
        return type(self), self.num_functions, *plain.items()

    def detach(self) -> Basis:
        """The same functions without gradients in what they depend on."""
        return self

    # Function-major values

    def fill(self, x: Tensor, out: Tensor) -> None:
        """
        Evaluate all functions, function-major.

        :param x: Inputs `(n,)`.
        :param out: Where to put the values, float64 `(M, n)`.
        """
        out.copy_(self(x).mT)

    def series(self, x: Tensor, coefficients: Tensor, out: Tensor, buffer: Tensor) -> None:
        r"""
        :math:`\sum_j a_{rj} \phi_j(x_n)`.

        :param x: Inputs `(n,)`.
        :param coefficients: a, `(R, M)`.
        :param out: Where to put the sums, float64 `(R, n)`.
        :param buffer: Room for intermediate values, float64 `(M + 2, n)`.
        """
        features = buffer[: self.num_functions]
        self.fill(x, features)
        torch.mm(coefficients, features, out=out)

    # Products

    @property
    def num_moments(self) -> int | None:
        """The number of moment functions; None for a basis without a product identity."""
        return None

    def product_formula(self) -> tuple[Tensor, Tensor]:
        r"""
        How products follow from moment functions.

        :return: The numbers :math:`k(i, j)` and :math:`l(i, j)` of two moment functions, `(2, M, M)`, and their factors
            :math:`\alpha` and :math:`\beta`, float64, `(2, M, M)` or `(2, 1, 1)` where they are the same for all pairs.
        """
        raise NotImplementedError(f"{type(self).__name__} has no product identity.")

    def moments(self, x: Tensor) -> Tensor:
        """
        The moment functions.

        :param x: Inputs `(n,)`.
        :return: `(num_moments, n)`, float64.
        """
        raise NotImplementedError(f"{type(self).__name__} has no product identity.")

    def fill_with_moments(self, x: Tensor, features: Tensor, moments: Tensor) -> None:
        """
        The functions and the moment functions together.

        :param x: Inputs `(n,)`.
        :param features: Where to put the functions, float64 `(M, n)`.
        :param moments: Where to put the moment functions, float64 `(num_moments, n)`.
        """
        self.fill(x, features)
        moments.copy_(self.moments(x))

    def band(self, low: float, high: float) -> tuple[float, int] | None:
        """
        The largest angular frequency and polynomial degree of the functions, as analytic functions on an interval, or
        None if no such bound is known.

        :param low: Lower end of the interval.
        :param high: Upper end.
        """
        return None


class SpectralBasis(Basis):
    r"""
    Functions of one angular frequency each, with which a stationary kernel with the spectral density S is

    .. math:: k(x - x') \approx \sum_j q_j S(\omega_j) \phi_j(x) \phi_j(x').
    """

    center: Tensor

    @property
    @abstractmethod
    def frequencies(self) -> Tensor:
        r"""Angular frequencies :math:`\omega_j`, `(M,)`."""

    @property
    @abstractmethod
    def factors(self) -> Tensor:
        """:math:`q_j`, `(M,)`."""


class SineBasis(SpectralBasis):
    r"""
    Laplace eigenfunctions with Dirichlet ends on :math:`[c - L, c + L]`, zero outside:

    .. math:: \phi_j(x) = L^{-1/2} \sin(\omega_j (x - c + L)), \quad \omega_j = \frac{\pi j}{2 L}, \quad j = 1 \ldots M.

    Their moment functions are cosines: :math:`\sin(i t) \sin(j t) = \tfrac12 [\cos((i - j) t) - \cos((i + j) t)]`.

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

    def parameters(self) -> list[Tensor]:
        return [self.center, self.half_width]

    @property
    def frequencies(self) -> Tensor:
        r"""Angular frequencies :math:`\omega_j`, `(M,)`."""
        j = torch.arange(1, self._num_functions + 1, dtype=torch.float64, device=self.half_width.device)
        return math.pi * j / (2 * self.half_width)

    @property
    def factors(self) -> Tensor:
        return torch.ones(self._num_functions, dtype=torch.float64, device=self.half_width.device)

    def angle(self, x: Tensor) -> Tensor:
        r""":math:`t = \pi (x - c + L) / (2 L)`, clamped to :math:`[0, \pi]` so that all sines vanish outside."""
        t = math.pi * (x.double() - self.center + self.half_width) / (2 * self.half_width)
        return t.clamp(0.0, math.pi)

    def __call__(self, x: Tensor) -> Tensor:
        j = torch.arange(1, self._num_functions + 1, dtype=torch.float64, device=x.device)
        return torch.sin(self.angle(x).unsqueeze(-1) * j) / self.half_width.sqrt()

    def fill(self, x: Tensor, out: Tensor) -> None:
        j = torch.arange(1, self._num_functions + 1, dtype=torch.float64, device=x.device).unsqueeze(-1)
        torch.sin(torch.mul(j, self.angle(x), out=out), out=out)  # without cosines, doubling saves nothing
        out.mul_(self.half_width.rsqrt())

    def series(self, x: Tensor, coefficients: Tensor, out: Tensor, buffer: Tensor) -> None:
        block = -(-self._num_functions // 2)
        buffers = buffer[: block + 1], buffer[block + 1 : 2 * block + 1]
        sine_series(self.angle(x), coefficients * self.half_width.rsqrt(), out=out, buffers=buffers)

    @property
    def num_moments(self) -> int:
        return 2 * self._num_functions + 1

    def product_formula(self) -> tuple[Tensor, Tensor]:
        j = torch.arange(1, self._num_functions + 1)
        index = torch.stack([(j.unsqueeze(-1) - j).abs(), j.unsqueeze(-1) + j])
        half = 0.5 / self.half_width.detach().cpu()
        return index, torch.stack([half, -half]).reshape(2, 1, 1)

    def moments(self, x: Tensor) -> Tensor:
        return cosines(self.angle(x), self.num_moments)

    def fill_with_moments(self, x: Tensor, features: Tensor, moments: Tensor) -> None:
        harmonics(self.angle(x), self.num_moments, self._num_functions, out=(moments, features))
        features.mul_(self.half_width.rsqrt())

    def band(self, low: float, high: float) -> tuple[float, int] | None:
        if low < self.center - self.half_width or high > self.center + self.half_width:
            return None  # sines vanish outside of the box: not smooth at its edge
        return float(self.frequencies[-1]), 0


class ConstantBasis(Basis):
    """The one function 1."""

    @property
    def num_functions(self) -> int:
        return 1

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ones_like(x, dtype=torch.float64).unsqueeze(-1)

    def fill(self, x: Tensor, out: Tensor) -> None:
        out.fill_(1.0)

    def band(self, low: float, high: float) -> tuple[float, int]:
        return 0.0, 0


class MonomialBasis(Basis):
    r"""
    The functions :math:`(x - c)^p`.

    :param powers: The exponent p, or several of them.
    :param center: The origin c.
    """

    def __init__(self, powers: int | Sequence[int] = 1, center: float | Tensor = 0.0):
        self.powers = [powers] if isinstance(powers, int) else list(powers)
        self.center = torch.as_tensor(center, dtype=torch.float64)

    @property
    def num_functions(self) -> int:
        return len(self.powers)

    def parameters(self) -> list[Tensor]:
        return [self.center]

    def __call__(self, x: Tensor) -> Tensor:
        shifted = x.double() - self.center
        return torch.stack([shifted**power for power in self.powers], dim=-1)

    def band(self, low: float, high: float) -> tuple[float, int]:
        return 0.0, max(self.powers)


class FourierBasis(Basis):
    r"""
    The functions of period p: :math:`1, \cos(\omega x), \sin(\omega x), \ldots, \cos(J \omega x), \sin(J \omega x)`
    with :math:`\omega = 2 \pi / p`. Their moment functions are those of twice as many harmonics: cosines, then sines.

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

    def parameters(self) -> list[Tensor]:
        return [self.period]

    def detach(self) -> FourierBasis:
        return FourierBasis(self.period.detach(), self.num_harmonics)

    def __call__(self, x: Tensor) -> Tensor:
        j = torch.arange(1, self.num_harmonics + 1, dtype=torch.float64, device=x.device)
        phase = (2 * math.pi * x.double() / self.period.unsqueeze(-1)).unsqueeze(-1) * j  # (..., N, J)
        waves = torch.stack([phase.cos(), phase.sin()], dim=-1).flatten(-2)  # cos, sin, cos, sin, ...
        return torch.cat([waves.new_ones(*waves.shape[:-1], 1), waves], dim=-1)

    @property
    def num_moments(self) -> int:
        return 2 * self.num_functions - 1

    def product_formula(self) -> tuple[Tensor, Tensor]:
        top = 2 * self.num_harmonics  # psi: cos(0 ... top), then sin(1 ... top)
        harmonic = (torch.arange(self.num_functions) + 1) // 2  # 0, 1, 1, 2, 2, ...
        sine = (torch.arange(self.num_functions) % 2 == 0) & (harmonic > 0)
        i, j = harmonic.unsqueeze(-1), harmonic
        is_sine_i, is_sine_j = sine.unsqueeze(-1), sine
        mixed = is_sine_i ^ is_sine_j
        difference, total = (i - j).abs(), i + j
        index = torch.stack([torch.where(mixed, top + difference, difference), torch.where(mixed, top + total, total)])
        # sin(s) cos(c) = (sin(s + c) + sign(s - c) sin|s - c|) / 2; cos cos and sin sin: (cos(i - j) +- cos(i + j)) / 2
        lead = torch.where(is_sine_i, i - j, j - i).sign().double()
        weight_difference = torch.where(mixed, lead, torch.ones_like(lead)) / 2
        weight_total = torch.where(is_sine_i & is_sine_j, -0.5, 0.5).double().expand_as(weight_difference)
        return index, torch.stack([weight_difference, weight_total])

    def moments(self, x: Tensor) -> Tensor:
        moments = torch.empty(self.num_moments, x.shape[-1], dtype=torch.float64, device=x.device)
        self._fill_harmonics(x, moments)
        return moments

    def fill_with_moments(self, x: Tensor, features: Tensor, moments: Tensor) -> None:
        cos, sin = self._fill_harmonics(x, moments)
        features[0] = 1.0
        features[1::2], features[2::2] = cos[1 : self.num_harmonics + 1], sin[: self.num_harmonics]

    def _fill_harmonics(self, x: Tensor, moments: Tensor) -> tuple[Tensor, Tensor]:
        top = 2 * self.num_harmonics
        phase = 2 * math.pi * (x.double() / self.period).remainder(1.0)
        return harmonics(phase, top + 1, top, out=(moments[: top + 1], moments[top + 1 :]))

    def band(self, low: float, high: float) -> tuple[float, int]:
        return 2 * math.pi * self.num_harmonics / float(self.period), 0


class ConcatenatedBasis(Basis):
    """
    Several bases of the same variable, one after the other.

    :param bases: The parts; those of a concatenation are taken one by one.
    """

    def __init__(self, *bases: Basis):
        nested = (basis.bases if isinstance(basis, ConcatenatedBasis) else (basis,) for basis in bases)
        self.bases: tuple[Basis, ...] = tuple(part for parts in nested for part in parts)

    @property
    def num_functions(self) -> int:
        return sum(basis.num_functions for basis in self.bases)

    def parameters(self) -> list[Tensor]:
        return [parameter for basis in self.bases for parameter in basis.parameters()]

    @property
    def structure(self) -> Hashable:
        return type(self), *(basis.structure for basis in self.bases)

    def detach(self) -> ConcatenatedBasis:
        return ConcatenatedBasis(*(basis.detach() for basis in self.bases))

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([basis(x) for basis in self.bases], dim=-1)

    def combine(self, x: Tensor, coefficients: Tensor) -> Tensor:
        # One product for all parts whose values are needed anyway; indicators only select.
        sizes = [basis.num_functions for basis in self.bases]
        selects = [type(basis).combine is not Basis.combine for basis in self.bases]
        if not any(selects):
            return self(x) @ coefficients.mT
        parts = zip(self.bases, coefficients.split(sizes, -1), strict=True)
        return reduce(torch.add, (basis.combine(x, part) for basis, part in parts))

    def band(self, low: float, high: float) -> tuple[float, int] | None:
        bands = [basis.band(low, high) for basis in self.bases]
        known = [band for band in bands if band is not None]
        if len(known) < len(bands):
            return None
        return max(frequency for frequency, _ in known), max(degree for _, degree in known)


def sum_products(bases: Sequence[Basis], factors: Sequence[Tensor], x: Tensor) -> Tensor:
    r"""
    Sums of products of functions of one input each, :math:`\sum_r \prod_d \phi_d(x_d)^\top a_{dr}`.

    :param bases: :math:`\phi`, of each input.
    :param factors: Raw weights a, D tensors `(*P, R, M_d)`.
    :param x: Inputs `(n, D)`.
    :return: `(*P, n)`, float64, differentiable in `x`.
    """
    shape = factors[0].shape[:-1]
    product: Tensor | None = None
    for d, (basis, factor) in enumerate(zip(bases, factors, strict=True)):
        projection = basis.combine(x[:, d], factor.reshape(shape.numel(), -1))  # (n, P R)
        product = projection if product is None else product * projection
    assert product is not None
    return product.reshape(len(x), *shape).sum(-1).movedim(0, -1)
