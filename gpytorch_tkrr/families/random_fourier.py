r"""Cosines and sines at random frequencies."""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch
from gpytorch.kernels import MaternKernel, RBFKernel
from torch import Tensor

from ..bases.index_set import FullTensor
from ..bases.waves import FrequencyBasis, within
from ..errors import UnsupportedKernelError
from ..features.expansion import BasisFamily, Box, Expansion, Term
from ..features.finite import of_column
from ..features.tree import Node, is_a, unsupported


class RandomFourier(BasisFamily):
    r"""
    Random Fourier features, for comparison: with frequencies :math:`\omega_i` drawn from the spectral density,

    .. math:: k(x - x') \approx \frac1n \sum_{i=1}^n \cos(\omega_i^\top (x - x')).

    It serves RBF and Matern kernels. Random numbers, drawn once by `seed`, are divided by the lengthscale: unlike those
    of all other families these functions depend on hyperparameters, and are evaluated again whenever these change.
    Therefore the lengthscales of a :class:`~gpytorch_tkrr.TKRR` model must be fixed
    (``kernel.raw_lengthscale.requires_grad_(False)``). :class:`~gpytorch_tkrr.HilbertKernel` has as many functions as a
    full grid of `num_basis`; with TKRR each input has its own.

    :param seed: Of the random numbers.

    Example:
        >>> import gpytorch, torch, gpytorch_tkrr as tkrr
        >>> base = gpytorch.kernels.RBFKernel()
        >>> kernel = tkrr.HilbertKernel(base, tkrr.Domain(0.0, 2.0), 2000, basis=tkrr.RandomFourier(seed=0))
        >>> kernel.approximation_error(torch.linspace(-1, 1, 50)) < 0.1
        True

    Reference: Rahimi & Recht (2007), *Random features for large-scale kernel machines*.
    """

    def __init__(self, seed: int = 0):
        self.seed = seed

    def __repr__(self) -> str:
        return f"RandomFourier(seed={self.seed})"

    def _frequencies(self, node: Node, box: Box, num: int) -> Tensor:
        """`(*batch, num, D)`, differentiable in the lengthscales."""
        is_matern = is_a(node.kernel, MaternKernel)
        if not (is_matern or is_a(node.kernel, RBFKernel)):
            raise unsupported(node, f"is neither an RBFKernel nor a MaternKernel: {self} has no frequencies for it.")
        seed = self.seed + sum(1_000_003 * (column + 1) for column in box.columns)
        generator = torch.Generator().manual_seed(seed)
        draws = torch.randn(num, len(box.columns), generator=generator, dtype=torch.float64)
        if is_matern:  # the density is that of Student's t with 2 nu degrees of freedom
            degrees = 2 * node.kernel.nu
            chi2 = 2 * torch._standard_gamma(torch.full((num, 1), degrees / 2, dtype=torch.float64), generator)
            draws = draws * (degrees / chi2).sqrt()
        scales = [of_column(node.kernel.lengthscale, node.columns.index(column)) for column in box.columns]
        return draws.to(box.center.device) / torch.stack(scales, dim=-1).unsqueeze(-2)

    def term(self, node: Node, box: Box) -> RandomTerm:
        if node.kernel.has_lengthscale and node.kernel.raw_lengthscale.requires_grad:
            raise UnsupportedKernelError(
                f"{node}: random frequencies depend on the lengthscale, and the functions of a CP-weight model are "
                "fixed. Set the lengthscale and keep it: kernel.raw_lengthscale.requires_grad_(False)."
            )
        omega = self._frequencies(node, box, max(box.num_basis[0] // 2, 1)).detach()[..., 0]
        return RandomTerm(FrequencyBasis(box.center[0], box.half_width[0], omega, torch.ones_like(omega)))

    def expand(self, node: Node, box: Box) -> RandomWaves:
        if not isinstance(box.index_set, FullTensor):
            raise UnsupportedKernelError(
                f"{box.index_set} chooses among products of functions of one input each; those of {self} see all "
                "inputs at once. Leave index_set out: num_basis says how many functions there are."
            )
        num = max(math.prod(box.num_basis) // 2, 1)
        return RandomWaves(box, self._frequencies(node, box, num), num)


class RandomTerm(Term):
    """
    The functions of one input, all with the same variance.

    :param basis: The functions.
    """

    def __init__(self, basis: FrequencyBasis):
        self._basis = basis

    @property
    def basis(self) -> FrequencyBasis:
        return self._basis

    def variances(self) -> Tensor:
        num = self.basis.num_functions
        return torch.full((num,), 2 / num, dtype=torch.float64, device=self.basis.omega.device)

    def prior_variance(self, x: Tensor) -> Tensor:
        return torch.ones(1, dtype=torch.float64, device=x.device)


class RandomWaves(Expansion):
    """
    Cosines and sines of several inputs at once.

    :param box: The box of these inputs.
    :param omega: Frequencies `(*batch, n, D)`.
    :param num: n.
    """

    def __init__(self, box: Box, omega: Tensor, num: int):
        self.box, self.omega, self.num = box, omega, num

    @property
    def num_functions(self) -> int:
        return 2 * self.num

    def features(self, x: Tensor) -> Tensor:
        inputs = x[..., list(self.box.columns)]
        phase = (inputs.double() - self.box.center) @ self.omega.mT  # (..., N, n)
        inside = within(inputs, self.box.center, self.box.half_width).prod(-1, keepdim=True)
        return torch.cat([phase.cos(), phase.sin()], dim=-1) * inside

    def variances(self) -> Tensor:
        ones = torch.ones(*self.omega.shape[:-2], self.num_functions, dtype=torch.float64, device=self.omega.device)
        return ones / self.num

    @property
    def structure(self) -> Hashable:
        return type(self), self.box.family, self.box.columns, self.num

    def prior_variance(self, x: Tensor) -> Tensor:
        return self.variances()[..., :1] * self.num

    def basis_parameters(self) -> list[Tensor]:
        return [self.box.center, self.box.half_width, self.omega]
