"""Kernels with a finite basis of their own: linear, polynomial and periodic.

Each is registered once, as the functions and variances of one input and the way in which several inputs combine. Both
readers of the tree use it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Sequence

import torch
from gpytorch import kernels
from gpytorch.kernels import Kernel
from torch import Tensor

from ..bases.basis import FourierBasis, MonomialBasis
from ..errors import UnsupportedKernelError
from .bessel import periodic_variances
from .expansion import Expansion, OneInput, Product, Sum, Term
from .tree import FiniteBasis, check_kernel_class, register

MakeTerm = Callable[[Kernel, int, int], Term]


def register_finite_basis(
    kernel_class: type[Kernel], *, over_columns: Callable[[list[OneInput]], Expansion] | None = Product
) -> Callable[[MakeTerm], MakeTerm]:
    """
    Decorator that registers the finite basis of a kernel class, for :class:`~gpytorch_tkrr.HilbertKernel` and for
    :class:`~gpytorch_tkrr.TKRR`.

    It stands above a subclass of :class:`Term`, or a function that returns one, which is called with the kernel, the
    position of a column among those that the kernel sees, and the number of functions asked for. Subclasses of the
    kernel inherit it as long as they do not override ``forward``.

    :param kernel_class: The class.
    :param over_columns: How kernels of single columns make the kernel of several: :class:`Product`, :class:`Sum`, or
        an expansion of its own; None for a kernel of one column. A TKRR model takes several columns only where they
        multiply.

    Example:
        >>> import torch
        >>> from gpytorch.kernels import Kernel
        >>> from gpytorch_tkrr import Domain, HilbertKernel, register_finite_basis
        >>> from gpytorch_tkrr.bases.basis import MonomialBasis
        >>> from gpytorch_tkrr.features.expansion import Term
        >>> class SquareKernel(Kernel):
        ...     def forward(self, x1, x2, diag=False, **params):
        ...         left, right = x1.square().prod(-1), x2.square().prod(-1)
        ...         return left * right if diag else left.unsqueeze(-1) * right.unsqueeze(-2)
        >>> @register_finite_basis(SquareKernel)
        ... class SquareTerm(Term):
        ...     basis = MonomialBasis(2)
        ...     def __init__(self, kernel, position, num_basis): ...
        ...     def variances(self):
        ...         return torch.ones(1, dtype=torch.float64)
        ...     def prior_variance(self, x):
        ...         return x.double() ** 4
        >>> x = torch.rand(5, 2)
        >>> HilbertKernel(SquareKernel(), Domain(0.0, 2.0), num_basis=1).approximation_error(x) < 1e-6
        True
    """
    check_kernel_class(kernel_class)

    def decorator(term: MakeTerm) -> MakeTerm:
        register(kernel_class, FiniteBasis(term, over_columns))
        return term

    return decorator


def of_column(parameter: Tensor, position: int) -> Tensor:
    """
    One column of a parameter, `(*batch,)`, float64.

    :param parameter: `(*batch, 1, D or 1)`.
    :param position: Which column.
    """
    parameter = parameter.double().squeeze(-2)
    return parameter[..., min(position, parameter.shape[-1] - 1)]


@register_finite_basis(kernels.LinearKernel, over_columns=Sum)
class LinearTerm(Term):
    """
    The function x - c, where c is the kernel's `center` if it has one, else 0.

    :param kernel: A LinearKernel.
    :param position: Which of its columns.
    :param num_basis: Not used.
    """

    def __init__(self, kernel: kernels.LinearKernel, position: int, num_basis: int = 1):
        self.kernel, self.position = kernel, position

    @property
    def basis(self) -> MonomialBasis:
        center = torch.as_tensor(getattr(self.kernel, "center", 0.0))
        return MonomialBasis(1, center[self.position] if center.dim() and center.numel() > 1 else center)

    def variances(self) -> Tensor:
        return of_column(self.kernel.variance, self.position).unsqueeze(-1)

    def prior_variance(self, x: Tensor) -> Tensor:
        return self.basis(x).squeeze(-1).square() * self.variances()


class Polynomial(Expansion):
    r"""
    All monomials of several inputs up to the power p, for :class:`~gpytorch.kernels.PolynomialKernel`:

    .. math:: (x^\top x' + c)^p = \sum_{|\alpha| \le p} \binom{p}{\alpha} c^{p - |\alpha|} x^\alpha x'^\alpha.

    :param parts: The polynomials of the single inputs.
    """

    def __init__(self, parts: Sequence[OneInput]):
        self.columns, self.terms = [part.column for part in parts], [part.term for part in parts]
        first = self.terms[0]
        assert isinstance(first, PolynomialTerm)
        self.kernel, power = first.kernel, first.power
        exponents = [a for a in itertools.product(range(power + 1), repeat=len(parts)) if sum(a) <= power]
        self.exponents = torch.tensor(exponents)  # (M, D)
        self.power = power

    @property
    def num_functions(self) -> int:
        return len(self.exponents)

    def features(self, x: Tensor) -> Tensor:
        inputs = x[..., self.columns].double().unsqueeze(-2)  # (..., N, 1, D)
        return (inputs ** self.exponents.to(x.device)).prod(-1)

    def variances(self) -> Tensor:
        return _monomial_variances(self.kernel.offset, self.power, self.exponents)

    @property
    def structure(self) -> Hashable:
        return type(self), tuple(self.columns), self.power

    def prior_variance(self, x: Tensor) -> Tensor:
        norm = x[..., self.columns].double().square().sum(-1)
        return (norm + self.kernel.offset.double()) ** self.power


@register_finite_basis(kernels.PolynomialKernel, over_columns=Polynomial)
class PolynomialTerm(Term):
    """
    The powers of one input.

    :param kernel: A PolynomialKernel; its power must be a positive integer.
    :param position: Not used: all columns are alike.
    :param num_basis: Not used.
    """

    def __init__(self, kernel: kernels.PolynomialKernel, position: int = 0, num_basis: int = 1):
        self.kernel, self.power = kernel, int(kernel.power)
        if self.power != kernel.power or self.power < 1:
            raise UnsupportedKernelError(
                f"PolynomialKernel has power {kernel.power}; only positive integers have a finite basis."
            )

    @property
    def basis(self) -> MonomialBasis:
        return MonomialBasis(range(self.power + 1))

    def variances(self) -> Tensor:
        return _monomial_variances(self.kernel.offset, self.power, torch.arange(self.power + 1).unsqueeze(-1))

    def prior_variance(self, x: Tensor) -> Tensor:
        return (x.double().square() + self.kernel.offset.double()) ** self.power


def _monomial_variances(offset: Tensor, power: int, exponents: Tensor) -> Tensor:
    """The factors of the monomials with exponents `(M, D)` in a polynomial kernel, `(*batch, M)`."""
    multinomials = [
        math.factorial(power) / math.prod(math.factorial(a) for a in (*alpha, power - sum(alpha)))
        for alpha in exponents.tolist()
    ]
    degree = exponents.sum(-1).to(offset.device)
    return torch.tensor(multinomials, dtype=torch.float64, device=offset.device) * offset.double() ** (power - degree)


@register_finite_basis(kernels.PeriodicKernel)
class PeriodicTerm(Term):
    r"""
    Harmonics of the period, for :class:`~gpytorch.kernels.PeriodicKernel`, which multiplies its columns:

    .. math:: e^{-2 \sin^2(\pi t / p) / \ell} = \sum_{j \ge 0} q_j \cos(2 \pi j t / p), \qquad
        q_j = (2 - \delta_{j0}) e^{-1 / \ell} I_j(1 / \ell).

    The functions depend on the period. About half of `num_basis` harmonics are kept, each with a cosine and a sine.

    :param kernel: The kernel.
    :param position: Which of its columns.
    :param num_basis: The number of functions asked for.
    """

    def __init__(self, kernel: kernels.PeriodicKernel, position: int, num_basis: int):
        self.kernel, self.position, self.num_harmonics = kernel, position, -(-num_basis // 2)

    @property
    def basis(self) -> FourierBasis:
        return FourierBasis(of_column(self.kernel.period_length, self.position), self.num_harmonics)

    def concentration(self) -> Tensor:
        r""":math:`1 / \ell`, `(*batch,)`."""
        return 1 / of_column(self.kernel.lengthscale, self.position)

    def variances(self) -> Tensor:
        q = periodic_variances(self.concentration(), self.num_harmonics)  # (*batch, J + 1)
        return torch.cat([q[..., :1], q[..., 1:].repeat_interleave(2, dim=-1)], dim=-1)

    def prior_variance(self, x: Tensor) -> Tensor:
        return torch.ones_like(self.concentration()).unsqueeze(-1)
