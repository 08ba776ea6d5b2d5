r"""A kernel tree as features and variances, :math:`k(x, x') \approx \sum_i v_i(\theta) \phi_i(x) \phi_i(x')`.

A node that has a spectral density becomes a tensor product of sines with the density as variances. Constant, linear,
polynomial and periodic kernels have exact finite bases of their own. Sums concatenate, products multiply all pairs.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from gpytorch import kernels
from gpytorch.kernels import Kernel
from torch import Tensor

from ..errors import UnsupportedKernelError
from .advice import advise
from .basis import FourierBasis, SineBasis
from .bessel import periodic_variances
from .index_set import IndexSet
from .spectral import has_density, marginal_density


@dataclass(frozen=True)
class Box:
    """
    The input columns that a kernel node sees, with the box and the number of functions of each.

    :param columns: Which columns of the inputs these are, `D` of them.
    :param center: Centres `(D,)`.
    :param half_width: Half widths `(D,)`.
    :param num_basis: Number of sines of each column.
    :param index_set: Which products of sines are kept.
    """

    columns: tuple[int, ...]
    center: Tensor
    half_width: Tensor
    num_basis: tuple[int, ...]
    index_set: IndexSet

    def select(self, positions: Sequence[int]) -> Box:
        """The box of some of these columns, by position."""
        index = list(positions)
        return replace(
            self,
            columns=tuple(self.columns[i] for i in index),
            center=self.center[index],
            half_width=self.half_width[index],
            num_basis=tuple(self.num_basis[i] for i in index),
        )


class Expansion(ABC):
    """Features and variances of one node of a kernel tree."""

    @property
    @abstractmethod
    def num_functions(self) -> int:
        """M, the number of features."""

    @abstractmethod
    def features(self, x: Tensor) -> Tensor:
        """
        Evaluate the features.

        :param x: Inputs `(..., N, D)`.
        :return: `(..., N, M)`, float64.
        """

    @abstractmethod
    def variances(self) -> Tensor:
        """Prior variances `(*batch, M)`, float64, differentiable in the kernel's parameters."""

    @abstractmethod
    def prior_variance(self, x: Tensor) -> Tensor:
        """
        The exact :math:`k(x, x)` that the features should represent.

        :param x: Inputs `(..., N, D)`.
        :return: `(..., N)`, or `(..., 1)` where it does not depend on x.
        """

    def leaves(self, share: float = 1.0) -> Iterator[tuple[Expansion, float]]:
        """All leaves, each with its share of an error budget: factors of a product divide it."""
        yield self, share

    def basis_parameters(self) -> list[Tensor]:
        """Tensors that the features depend on, beside the inputs."""
        return []


class Sines(Expansion):
    r"""
    Products of sines with a spectral density as variances.

    :param terms: Kernels that are added, each with the columns it sees and the positions among them that are kept (the
        others' lag is held at zero).
    :param box: The box of the kept columns.
    """

    def __init__(self, terms: Sequence[tuple[Kernel, tuple[int, ...], tuple[int, ...]]], box: Box):
        self.terms = list(terms)
        self.box = box
        self.bases = [SineBasis(c, w, m) for c, w, m in zip(box.center, box.half_width, box.num_basis, strict=True)]

    @property
    def num_functions(self) -> int:
        return self.box.index_set.size(self.box.num_basis)

    @property
    def indices(self) -> Tensor:
        """Multi-indices `(M, D)`, counted from 1."""
        return self.box.index_set.indices(self.box.num_basis).to(self.box.center.device)

    def features(self, x: Tensor) -> Tensor:
        return self.box.index_set.products(
            [basis(x[..., column]) for basis, column in zip(self.bases, self.box.columns, strict=True)]
        )

    def variances(self) -> Tensor:
        indices = self.indices - 1
        omega = torch.stack([basis.frequencies[indices[:, d]] for d, basis in enumerate(self.bases)], dim=-1)  # (M, D)
        densities = []
        for kernel, columns, kept in self.terms:
            order = [self.box.columns.index(columns[position]) for position in kept]
            densities.append(marginal_density(kernel, omega[:, order], kept, num_dims=len(columns)))
        return sum(densities[1:], densities[0])

    def covariance(self, lag: Tensor) -> Tensor:
        """
        The kernels' own k at given lags.

        :param lag: `(T, D)` in the order of the box's columns.
        :return: `(*batch, T)`, float64.
        """
        total = torch.zeros((), dtype=torch.float64, device=lag.device)
        for kernel, columns, kept in self.terms:
            end = lag.new_zeros(lag.shape[0], len(columns))
            for position in kept:
                end[:, position] = lag[:, self.box.columns.index(columns[position])]
            end = end.to(kernel.dtype)
            total = total + kernel.forward(torch.zeros_like(end), end, diag=True).double()
        return total

    def prior_variance(self, x: Tensor) -> Tensor:
        return self.covariance(torch.zeros(1, len(self.box.columns), dtype=torch.float64, device=x.device))

    def basis_parameters(self) -> list[Tensor]:
        return [self.box.center, self.box.half_width]


class Constant(Expansion):
    """
    The function 1, for :class:`~gpytorch.kernels.ConstantKernel`.

    :param kernel: The kernel.
    """

    def __init__(self, kernel: kernels.ConstantKernel):
        self.kernel = kernel

    @property
    def num_functions(self) -> int:
        return 1

    def features(self, x: Tensor) -> Tensor:
        return torch.ones_like(x[..., :1], dtype=torch.float64)

    def variances(self) -> Tensor:
        return self.kernel.constant.double()

    def prior_variance(self, x: Tensor) -> Tensor:
        return self.variances()


class Linear(Expansion):
    """
    The inputs themselves, for :class:`~gpytorch.kernels.LinearKernel`.

    :param kernel: The kernel.
    :param box: The columns it sees.
    """

    def __init__(self, kernel: kernels.LinearKernel, box: Box):
        self.kernel = kernel
        self.columns = box.columns

    @property
    def num_functions(self) -> int:
        return len(self.columns)

    def features(self, x: Tensor) -> Tensor:
        return x[..., list(self.columns)].double()

    def variances(self) -> Tensor:
        variance = self.kernel.variance.double().squeeze(-2)
        return variance.expand(*variance.shape[:-1], len(self.columns))

    def prior_variance(self, x: Tensor) -> Tensor:
        return (self.features(x).square() * self.variances().unsqueeze(-2)).sum(-1)


class Polynomial(Expansion):
    r"""
    All monomials up to the power p, for :class:`~gpytorch.kernels.PolynomialKernel`:

    .. math:: (x^\top x' + c)^p = \sum_{|\alpha| \le p} \binom{p}{\alpha} c^{p - |\alpha|} x^\alpha x'^\alpha.

    :param kernel: The kernel; its power must be a positive integer.
    :param box: The columns it sees.
    """

    def __init__(self, kernel: kernels.PolynomialKernel, box: Box):
        power = int(kernel.power)
        if power != kernel.power or power < 1:
            raise UnsupportedKernelError(
                f"PolynomialKernel has power {kernel.power}; only positive integers have a finite basis."
            )
        self.kernel = kernel
        self.columns = box.columns
        self.power = power
        num_dims = len(self.columns)
        exponents = [alpha for alpha in itertools.product(range(power + 1), repeat=num_dims) if sum(alpha) <= power]
        self.exponents = torch.tensor(exponents)  # (M, D)
        self.coefficients = torch.tensor(
            [
                math.factorial(power) / math.prod(math.factorial(a) for a in (*alpha, power - sum(alpha)))
                for alpha in exponents
            ],
            dtype=torch.float64,
        )

    @property
    def num_functions(self) -> int:
        return len(self.exponents)

    def features(self, x: Tensor) -> Tensor:
        inputs = x[..., list(self.columns)].double().unsqueeze(-2)  # (..., N, 1, D)
        return (inputs ** self.exponents.to(x.device)).prod(-1)

    def variances(self) -> Tensor:
        degree = self.exponents.sum(-1).to(self.kernel.offset.device)
        return self.coefficients.to(degree.device) * self.kernel.offset.double() ** (self.power - degree)

    def prior_variance(self, x: Tensor) -> Tensor:
        norm = x[..., list(self.columns)].double().square().sum(-1)
        return (norm + self.kernel.offset.double()) ** self.power


class Periodic(Expansion):
    r"""
    Harmonics of the period, for :class:`~gpytorch.kernels.PeriodicKernel`, which multiplies its dimensions:

    .. math:: e^{-2 \sin^2(\pi t / p) / \ell} = \sum_{j \ge 0} q_j \cos(2 \pi j t / p), \qquad
        q_j = (2 - \delta_{j0}) e^{-1 / \ell} I_j(1 / \ell).

    The basis depends on the period. About half of `num_basis` harmonics are kept, each with a cosine and a sine.

    :param kernel: The kernel.
    :param box: The columns it sees.
    """

    def __init__(self, kernel: kernels.PeriodicKernel, box: Box):
        self.kernel = kernel
        self.box = box
        self.num_harmonics = [-(-m // 2) for m in box.num_basis]

    @property
    def num_functions(self) -> int:
        return math.prod(1 + 2 * j for j in self.num_harmonics)

    def _period(self, d: int) -> Tensor:
        period = self.kernel.period_length.double().squeeze(-2)
        return period[..., min(d, period.shape[-1] - 1)]

    def concentration(self, d: int) -> Tensor:
        """:math:`1 / \\ell` of one dimension, `(*batch,)`."""
        lengthscale = self.kernel.lengthscale.double().squeeze(-2)
        return 1 / lengthscale[..., min(d, lengthscale.shape[-1] - 1)]

    def features(self, x: Tensor) -> Tensor:
        factors = [
            FourierBasis(self._period(d), j)(x[..., column])
            for d, (column, j) in enumerate(zip(self.box.columns, self.num_harmonics, strict=True))
        ]
        return reduce(_all_pairs, factors)

    def variances(self) -> Tensor:
        factors = []
        for d, j in enumerate(self.num_harmonics):
            q = periodic_variances(self.concentration(d), j)  # (*batch, J + 1)
            factors.append(torch.cat([q[..., :1], q[..., 1:].repeat_interleave(2, dim=-1)], dim=-1))
        return reduce(_all_pairs, factors)

    def prior_variance(self, x: Tensor) -> Tensor:
        return torch.ones_like(self.concentration(0)).unsqueeze(-1)

    def basis_parameters(self) -> list[Tensor]:
        return [self.kernel.period_length]


class Scaled(Expansion):
    """
    Another expansion times an output scale, for :class:`~gpytorch.kernels.ScaleKernel`.

    :param kernel: The kernel.
    :param base: The expansion of its base kernel.
    """

    def __init__(self, kernel: kernels.ScaleKernel, base: Expansion):
        self.kernel = kernel
        self.base = base

    @property
    def num_functions(self) -> int:
        return self.base.num_functions

    def features(self, x: Tensor) -> Tensor:
        return self.base.features(x)

    @property
    def scale(self) -> Tensor:
        """The output scale, `(*batch, 1)`, float64."""
        return self.kernel.outputscale.double().unsqueeze(-1)

    def variances(self) -> Tensor:
        return self.scale * self.base.variances()

    def prior_variance(self, x: Tensor) -> Tensor:
        return self.scale * self.base.prior_variance(x)

    def leaves(self, share: float = 1.0) -> Iterator[tuple[Expansion, float]]:
        return self.base.leaves(share)

    def basis_parameters(self) -> list[Tensor]:
        return self.base.basis_parameters()


class _Composite(Expansion):
    def __init__(self, parts: Sequence[Expansion]):
        self.parts = list(parts)

    def basis_parameters(self) -> list[Tensor]:
        return [parameter for part in self.parts for parameter in part.basis_parameters()]


class Sum(_Composite):
    """
    Features side by side.

    :param parts: The summands.
    """

    @property
    def num_functions(self) -> int:
        return sum(part.num_functions for part in self.parts)

    def features(self, x: Tensor) -> Tensor:
        return concatenate([part.features(x) for part in self.parts])

    def variances(self) -> Tensor:
        return concatenate([part.variances() for part in self.parts])

    def prior_variance(self, x: Tensor) -> Tensor:
        variances = [part.prior_variance(x) for part in self.parts]
        return sum(variances[1:], variances[0])

    def leaves(self, share: float = 1.0) -> Iterator[tuple[Expansion, float]]:
        for part in self.parts:
            yield from part.leaves(share)


class Product(_Composite):
    """
    All pairs of features multiplied.

    :param parts: The factors.
    """

    @property
    def num_functions(self) -> int:
        return math.prod(part.num_functions for part in self.parts)

    def features(self, x: Tensor) -> Tensor:
        return reduce(_all_pairs, (part.features(x) for part in self.parts))

    def variances(self) -> Tensor:
        return reduce(_all_pairs, (part.variances() for part in self.parts))

    def prior_variance(self, x: Tensor) -> Tensor:
        return reduce(torch.mul, (part.prior_variance(x) for part in self.parts))

    def leaves(self, share: float = 1.0) -> Iterator[tuple[Expansion, float]]:
        for part in self.parts:
            yield from part.leaves(share / len(self.parts))


def _all_pairs(left: Tensor, right: Tensor) -> Tensor:
    """Products of all pairs of last-dimension entries, the left one running slowest."""
    return (left.unsqueeze(-1) * right.unsqueeze(-2)).flatten(-2)


def concatenate(parts: list[Tensor]) -> Tensor:
    """
    Features or variances side by side, over their common batch shape.

    :param parts: Each `(..., M_i)`.
    """
    shape = torch.broadcast_shapes(*(part.shape[:-1] for part in parts))
    return torch.cat([part.expand(*shape, part.shape[-1]) for part in parts], dim=-1)


_Rule = Callable[[Kernel, Box, str], Expansion]
_RULES: dict[type[Kernel], _Rule] = {}


def register(kernel_class: type[Kernel]) -> Callable[[_Rule], _Rule]:
    """
    Decorator that registers how a kernel class is expanded; subclasses inherit it unless they override ``forward``.

    :param kernel_class: The class.
    """

    def decorate(rule: _Rule) -> _Rule:
        _RULES[kernel_class] = rule
        return rule

    return decorate


def expand(kernel: Kernel, box: Box, path: str = "") -> Expansion:
    """
    The expansion of a kernel.

    :param kernel: A GPyTorch kernel, whose own `active_dims` have been applied already.
    :param box: The columns that the kernel sees.
    :param path: Where the kernel stands in the tree, for messages.
    """
    path = path or type(kernel).__name__
    everything = tuple(range(len(box.columns)))
    if has_density(kernel, len(box.columns)):
        return Sines([(kernel, box.columns, everything)], box)
    for kernel_class, rule in _RULES.items():
        if isinstance(kernel, kernel_class) and type(kernel).forward is kernel_class.forward:
            return rule(kernel, box, path)
    raise UnsupportedKernelError(
        f"{path}: {type(kernel).__name__} has neither a spectral density over its {len(box.columns)} input column(s) "
        f"nor a finite basis. {advise(kernel)}"
    )


def expand_child(child: Kernel, box: Box, path: str = "") -> Expansion:
    """
    The expansion of a kernel whose own `active_dims` have yet to be applied.

    :param child: A GPyTorch kernel.
    :param box: The columns that its parent sees.
    :param path: Where the kernel stands in the tree, for messages.
    """
    return expand(child, box if child.active_dims is None else box.select(child.active_dims.reshape(-1).tolist()), path)


@register(kernels.ConstantKernel)
def _(kernel: kernels.ConstantKernel, box: Box, path: str) -> Expansion:
    return Constant(kernel)


@register(kernels.LinearKernel)
def _(kernel: kernels.LinearKernel, box: Box, path: str) -> Expansion:
    return Linear(kernel, box)


@register(kernels.PolynomialKernel)
def _(kernel: kernels.PolynomialKernel, box: Box, path: str) -> Expansion:
    return Polynomial(kernel, box)


@register(kernels.PeriodicKernel)
def _(kernel: kernels.PeriodicKernel, box: Box, path: str) -> Expansion:
    return Periodic(kernel, box)


@register(kernels.ScaleKernel)
def _(kernel: kernels.ScaleKernel, box: Box, path: str) -> Expansion:
    # ScaleKernel repeats its child's active_dims and calls the child's forward: they are applied already.
    return Scaled(kernel, expand(kernel.base_kernel, box, f"{path}.base_kernel"))


@register(kernels.ProductKernel)
def _(kernel: kernels.ProductKernel, box: Box, path: str) -> Expansion:
    return Product([expand_child(child, box, f"{path}.kernels[{i}]") for i, child in enumerate(kernel.kernels)])


@register(kernels.AdditiveKernel)
def _(kernel: kernels.AdditiveKernel, box: Box, path: str) -> Expansion:
    parts = [expand_child(child, box, f"{path}.kernels[{i}]") for i, child in enumerate(kernel.kernels)]
    return _merge(parts)


@register(kernels.AdditiveStructureKernel)
def _(kernel: kernels.AdditiveStructureKernel, box: Box, path: str) -> Expansion:
    return _merge(split_by_column(kernel.base_kernel, box, f"{path}.base_kernel"))


@register(kernels.ProductStructureKernel)
def _(kernel: kernels.ProductStructureKernel, box: Box, path: str) -> Expansion:
    return Product(split_by_column(kernel.base_kernel, box, f"{path}.base_kernel"))


def split_by_column(base: Kernel, box: Box, path: str) -> list[Expansion]:
    """
    The base kernel of a structure kernel, one input column at a time.

    :param base: The kernel.
    :param box: The columns that its parent sees.
    :param path: Where the kernel stands in the tree, for messages.
    """
    if base.active_dims is not None:
        box = box.select(base.active_dims.reshape(-1).tolist())
    core = base
    while isinstance(core, kernels.ScaleKernel):
        core = core.base_kernel
    radial = (kernels.RBFKernel, kernels.MaternKernel, kernels.RQKernel)
    parts: list[Expansion] = []
    for d in range(len(box.columns)):
        if isinstance(core, radial):  # restricting these to one axis gives their own one-dimensional kernel
            parts.append(Sines([(base, box.columns, (d,))], box.select([d])))
        elif core.ard_num_dims in (None, 1):
            parts.append(expand(base, box.select([d]), path))
        else:
            raise UnsupportedKernelError(
                f"{path}: {type(core).__name__} with ard_num_dims={core.ard_num_dims} cannot be split by input column. "
                "Write the sum or product out with one kernel and active_dims per column."
            )
    return parts


def _merge(parts: list[Expansion]) -> Expansion:
    """A sum, with summands over the same columns that all have densities merged: one basis serves them all."""
    merged: dict[frozenset[int], Sines] = {}
    rest: list[Expansion] = []
    for part in parts:
        if not isinstance(part, Sines):
            rest.append(part)
            continue
        columns = frozenset(part.box.columns)
        if columns in merged:
            merged[columns] = Sines([*merged[columns].terms, *part.terms], merged[columns].box)
        else:
            merged[columns] = part
    summands = [*merged.values(), *rest]
    return summands[0] if len(summands) == 1 else Sum(summands)
