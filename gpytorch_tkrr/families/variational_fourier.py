r"""Variational Fourier features: the Fourier series of the box, with weights that the Matern kernel correlates.

With :math:`\phi_m` the functions and :math:`\langle \cdot, \cdot \rangle` the inner product of the kernel's Hilbert
space on the box :math:`[a, b]`,

.. math:: k(x, x') \approx \phi(x)^\top K_{uu}^{-1} \phi(x'), \qquad (K_{uu})_{mn} = \langle \phi_m, \phi_n \rangle,

and :math:`K_{uu}` is a diagonal matrix plus one of rank two (Matern 1/2: one) or three.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from gpytorch.kernels import MaternKernel
from torch import Tensor

from ..bases.covariance import Covariance
from ..bases.domain import Domain
from ..bases.waves import HarmonicBasis
from ..features.expansion import BasisFamily, Box, Term
from ..features.finite import of_column
from ..features.tree import Node, is_a, unsupported

#: By which factor the margin around the data, and then the number of functions, are larger than those of sines.
MARGIN, MORE = 1.6, 1.2


class VariationalFourier(BasisFamily):
    r"""
    Variational Fourier features for Matern kernels of smoothness 1/2, 3/2 and 5/2:
    :math:`1, \cos(\omega_m (x - a)), \sin(\omega_m (x - a))` with :math:`\omega_m = 2 \pi m / (b - a)` on the box
    :math:`[a, b]`, about M of them (an odd number). The covariance of their weights is the inverse of a diagonal plus a
    low-rank matrix, which the kernel object gives.

    What is left out, :math:`k - \phi^\top K_{uu}^{-1} \phi`, is a positive definite kernel. The functions are periodic
    on the box, so that it should be wider than the data by about what the sines need. A kernel of several inputs must
    be a sum or a product of kernels of one; :class:`~gpytorch_tkrr.TKRR` takes it input by input.

    Example:
        >>> import gpytorch, torch, gpytorch_tkrr as tkrr
        >>> base = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=1.5))
        >>> kernel = tkrr.HilbertKernel(base, tkrr.Domain(0.0, 4.0), 61, basis=tkrr.VariationalFourier())
        >>> kernel.approximation_error(torch.linspace(-1, 1, 50)) < 0.01
        True

    Reference: Hensman, Durrande & Solin (2018), *Variational Fourier features for Gaussian processes*.
    """

    def term(self, node: Node, box: Box) -> VariationalFourierTerm:
        if not is_a(node.kernel, MaternKernel):
            raise unsupported(
                node, f"is no MaternKernel: {self} has functions for nu = 0.5, 1.5 and 2.5. Use another basis for it."
            )
        basis = HarmonicBasis(box.center[0], box.half_width[0], (box.num_basis[0] - 1) // 2)
        return VariationalFourierTerm(node.kernel, node.columns.index(box.columns[0]), basis)

    def as_accurate(self, domain: Domain, num_basis: Sequence[int], half_range: Tensor) -> tuple[Domain, list[int]]:
        # Where sines add an image, k(2 (L - S)), periodic functions lose the square of k(L - S).
        center, half_width = domain.sides(len(num_basis))
        wider = half_range + MARGIN * (half_width - half_range)
        ratio = (MORE * wider / half_width).tolist()
        return Domain(center, wider), [2 * math.ceil(num * r / 2) + 1 for num, r in zip(num_basis, ratio, strict=True)]


class VariationalFourierTerm(Term):
    """
    The functions of one input of a Matern kernel.

    :param kernel: The kernel.
    :param position: Which of its columns.
    :param basis: The functions.
    """

    def __init__(self, kernel: MaternKernel, position: int, basis: HarmonicBasis):
        self.kernel, self.position, self._basis = kernel, position, basis

    @property
    def basis(self) -> HarmonicBasis:
        return self._basis

    def gram(self) -> tuple[Tensor, Tensor]:
        r"""
        :math:`K_{uu} = \operatorname{diag}(\alpha) + B B^\top`.

        :return: :math:`\alpha`, `(*batch, M)`, and B, `(*batch, M, rank)`.
        """
        nu, omega = self.kernel.nu, self.basis.frequencies
        rate = math.sqrt(2 * nu) / of_column(self.kernel.lengthscale, self.position).unsqueeze(-1)  # (*batch, 1)
        # The inner product's integral of (d/dx + rate)^(nu + 1/2), squared, over whole periods.
        order = int(nu + 0.5)
        scale = {1: 1 / 2, 2: 1 / 4, 3: 3 / 16}[order] / rate ** (2 * order - 1)
        share = torch.where(omega > 0, self.basis.half_width, 2 * self.basis.half_width)
        alpha = scale * share * (rate.square() + omega.square()) ** order
        # Its terms at the left end of the box.
        ratio = omega / rate  # (*batch, M)
        is_cosine = (torch.arange(len(omega), device=omega.device) % 2 == 1) | (omega == 0)
        cosines, sines = is_cosine.double(), (~is_cosine).double()
        ends = [cosines.expand_as(ratio)]
        if order == 2:
            ends.append(sines * ratio)
        elif order == 3:
            ends += [cosines * (3 * ratio.square() - 1) / math.sqrt(8), sines * ratio * math.sqrt(3)]
        return alpha, torch.stack(ends, dim=-1)

    def covariance(self) -> Covariance:
        """The inverse of the Gram matrix, by a factorisation of it with unit diagonal part."""
        alpha, ends = self.gram()
        ends = ends * alpha.rsqrt().unsqueeze(-1)
        identity = torch.eye(alpha.shape[-1], dtype=alpha.dtype, device=alpha.device)
        factor = torch.linalg.cholesky(identity + ends @ ends.mT)
        root = torch.linalg.solve_triangular(factor, identity, upper=False).mT  # of the inverse
        return Covariance(1 / alpha, alpha.rsqrt().unsqueeze(-1) * root * alpha.sqrt().unsqueeze(-2))

    def variances(self) -> Tensor:
        return 1 / self.gram()[0]

    def mixing(self) -> Tensor | None:
        return self.covariance().mixing

    def prior_variance(self, x: Tensor) -> Tensor:
        return torch.ones(*self.kernel.batch_shape, 1, dtype=torch.float64, device=x.device)
