r"""A separable kernel as one basis with variances per input dimension.

The CP-weight model needs :math:`k(x, x') = \sigma^2 \prod_d k_d(x_d, x'_d)` with
:math:`k_d(x, x') \approx \sum_j v_{dj}(\theta) \phi_{dj}(x) \phi_{dj}(x')`. A :class:`Mode` holds the functions
:math:`\phi_d`, which never change, and computes the variances :math:`v_d` from the user's kernel object. The outermost
output scale :math:`\sigma^2` is kept apart; scales further inside belong to the modes of the dimensions they multiply.
This is the kernel tree read input by input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

import torch
from gpytorch import kernels
from gpytorch.kernels import Kernel
from torch import Tensor

from ..bases.basis import Basis, ConcatenatedBasis, ConstantBasis, SpectralBasis
from ..bases.covariance import Covariance, block_diagonal
from ..bases.domain import Domain
from ..bases.index_set import FullTensor
from ..bases.integrated import IntegratedBasis
from ..bases.levels import LevelBasis
from ..errors import SizeError
from .expansion import BasisFamily, Box, Product, Term
from .stationary import Sines, SpectralTerm
from .task_table import TaskBasis
from .tree import FiniteBasis, Node, Structure, unsupported

#: Number of functions per dimension where the user gives none.
DEFAULT_NUM_BASIS = 20


class ConstantTerm(Term):
    """
    The function 1.

    :param kernel: A ConstantKernel.
    :param share: The constant enters to this power, 1 / n where n columns share it.
    """

    basis = ConstantBasis()

    def __init__(self, kernel: kernels.ConstantKernel, share: float = 1.0):
        self.kernel, self.share = kernel, share

    def variances(self) -> Tensor:
        return self.kernel.constant.double().reshape(1) ** self.share

    def prior_variance(self, x: Tensor) -> Tensor:
        return self.variances()


class UnseenTerm(Term):
    """
    The function 1 with variance 1, for an input dimension that the kernel does not see.

    :param device: Where the variance lives.
    """

    basis = ConstantBasis()

    def __init__(self, device: torch.device):
        self.device = device

    def variances(self) -> Tensor:
        return torch.ones(1, dtype=torch.float64, device=self.device)

    def prior_variance(self, x: Tensor) -> Tensor:
        return self.variances()


class ScaledTerm(Term):
    """
    Another term times an inner scale.

    :param term: The term.
    :param kernel: A ScaleKernel or ConstantKernel.
    :param share: The scale enters to this power, 1 / n where n columns share it.
    """

    def __init__(self, term: Term, kernel: Kernel, share: float):
        self.term, self.kernel, self.share = term, kernel, share

    @property
    def basis(self) -> Basis:
        return self.term.basis

    def _scale(self) -> Tensor:
        kernel = self.kernel
        scale = kernel.outputscale if isinstance(kernel, kernels.ScaleKernel) else kernel.constant
        return scale.double().reshape(1) ** self.share

    def variances(self) -> Tensor:
        return self._scale() * self.term.variances()

    def mixing(self) -> Tensor | None:
        return self.term.mixing()

    def prior_variance(self, x: Tensor) -> Tensor:
        return self._scale() * self.term.prior_variance(x)


class MergedTerm(Term):
    """
    Several terms on the same functions of one frequency each: one basis, variances added.

    :param terms: The terms.
    """

    def __init__(self, terms: Sequence[Term]):
        self.terms = tuple(terms)

    @property
    def basis(self) -> Basis:
        return self.terms[0].basis

    def variances(self) -> Tensor:
        return reduce(torch.add, (term.variances() for term in self.terms))

    def prior_variance(self, x: Tensor) -> Tensor:
        return reduce(torch.add, (term.prior_variance(x) for term in self.terms))


class Mode:
    """
    One input dimension: its functions and their variances.

    :param terms: The summands of the one-dimensional kernel.
    """

    def __init__(self, terms: Sequence[Term]):
        others = [term for term in terms if not isinstance(term.basis, SpectralBasis)]
        self.terms = (*others, *_merged([term for term in terms if isinstance(term.basis, SpectralBasis)]))
        self.basis: Basis = ConcatenatedBasis(*(term.basis.detach() for term in self.terms))

    @property
    def num_functions(self) -> int:
        """M, the number of functions."""
        return self.basis.num_functions

    @property
    def is_categorical(self) -> bool:
        """Whether the values of this input are levels of a category: numbers without an order."""
        return has_levels(self.basis)

    def variances(self) -> Tensor:
        """Prior variances `(M,)`, float64, differentiable in the kernel's raw parameters."""
        return torch.cat([term.variances() for term in self.terms])

    def covariance(self) -> Covariance:
        """The prior covariance of the weights."""
        sizes = [term.basis.num_functions for term in self.terms]
        return Covariance(self.variances(), block_diagonal([term.mixing() for term in self.terms], sizes))

    def prior_variance(self, x: Tensor) -> Tensor:
        """
        The exact :math:`k_d(x, x)` that the functions should represent.

        :param x: Inputs `(...)`.
        :return: `(...)`, float64.
        """
        missing = x.isnan() if isinstance(self.basis, IntegratedBasis) else None
        if missing is None or not missing.any():
            return reduce(torch.add, (term.prior_variance(x) for term in self.terms)).expand(x.shape)
        known = torch.where(missing, torch.zeros_like(x), x)
        exact = reduce(torch.add, (term.prior_variance(known) for term in self.terms)).expand(x.shape)
        return torch.where(missing, self.represented_variance(x), exact)

    def integrate_missing(self, moments: Callable[[Basis], tuple[Tensor, Tensor]]) -> None:
        """
        Let the input be NaN where it is missing: its functions are then integrated.

        :param moments: Mean `(M,)` and covariance `(M, M)` of functions under the distribution of the input.
        """
        basis = self.basis
        self.basis = IntegratedBasis(basis, lambda: moments(basis))

    def represented_variance(self, x: Tensor) -> Tensor:
        r"""
        :math:`\phi(x)^\top V \phi(x)`.

        :param x: Inputs `(...)`.
        :return: `(...)`, float64.
        """
        return self.covariance().quadratic(self.basis(x))

    def num_basis_for(self, tail: float) -> int:
        """
        How many sines, or functions of a period, a mode needs at the present hyperparameters.

        :param tail: The fraction of a term's prior variance that may be left out.
        """
        counted = [term for term in self.terms if not has_levels(term.basis)]  # levels are as many as the box holds
        return max((_num_needed(term.variances(), tail) for term in counted), default=1)

    def spectral_terms(self) -> list[SpectralTerm]:
        """The stationary summands, without their scales."""
        found: list[SpectralTerm] = []
        stack: list[Term] = list(self.terms)
        while stack:
            term = stack.pop(0)
            if isinstance(term, SpectralTerm):
                found.append(term)
            elif isinstance(term, ScaledTerm):
                stack.append(term.term)
            elif isinstance(term, MergedTerm):
                stack.extend(term.terms)
        return found


def has_levels(basis: Basis) -> bool:
    """
    Whether functions are those of a category.

    :param basis: The functions.
    """
    basis = basis.basis if isinstance(basis, IntegratedBasis) else basis
    parts = basis.bases if isinstance(basis, ConcatenatedBasis) else (basis,)
    return any(isinstance(part, (LevelBasis, TaskBasis)) for part in parts)


def _merged(terms: Sequence[Term]) -> list[Term]:
    """Terms on the same functions become one."""
    groups: list[list[Term]] = []
    for term in terms:
        same = [group for group in groups if _same_functions(group[0].basis, term.basis)]
        same[0].append(term) if same else groups.append([term])
    return [MergedTerm(group) if len(group) > 1 else group[0] for group in groups]


def _same_functions(left: Basis, right: Basis) -> bool:
    return left.structure == right.structure and all(map(torch.equal, left.parameters(), right.parameters()))


def _num_needed(variances: Tensor, tail: float) -> int:
    """How many of the first functions carry all but a fraction of the variance."""
    left_out = variances.sum() - variances.cumsum(0)
    return int((left_out > tail * variances.sum()).sum()) + 1


@dataclass
class SeparableKernel:
    """
    A kernel tree, read as a scale times a product of one-dimensional kernels.

    :param modes: One :class:`Mode` per input dimension.
    :param scales: The outermost ScaleKernels.
    :param radial: Paths of radial kernels that are used as products of their one-dimensional kernels.
    """

    modes: list[Mode]
    scales: list[kernels.ScaleKernel] = field(default_factory=list)
    radial: list[str] = field(default_factory=list)

    @property
    def categorical(self) -> list[int]:
        """The input dimensions whose values are levels of a category."""
        return [d for d, mode in enumerate(self.modes) if mode.is_categorical]

    def outputscale(self) -> Tensor:
        """The outermost output scale, a float64 scalar, differentiable."""
        one = torch.ones((), dtype=torch.float64, device=self.scales[0].outputscale.device if self.scales else None)
        return reduce(torch.mul, (scale.outputscale.double().reshape(()) for scale in self.scales), one)


def separate(
    kernel: Kernel,
    domain: Domain,
    num_basis: int | Sequence[int],
    num_dims: int,
    family: BasisFamily | None = None,
) -> SeparableKernel:
    """
    Read a kernel tree as a product of one-dimensional kernels, or raise an error that names the node in the way.

    :param kernel: A GPyTorch kernel.
    :param domain: The box.
    :param num_basis: Number of functions, for all dimensions or for each.
    :param num_dims: D, the number of input dimensions.
    :param family: Which functions stationary kernels get; by default sines.

    Example:
        >>> from gpytorch.kernels import RBFKernel, ScaleKernel
        >>> from gpytorch_tkrr import Domain
        >>> from gpytorch_tkrr.features.separable import separate
        >>> separable = separate(ScaleKernel(RBFKernel(ard_num_dims=2)), Domain(0.0, 2.0), 5, num_dims=2)
        >>> [tuple(mode.variances().shape) for mode in separable.modes]
        [(5,), (5,)]
    """
    sizes = count_per_dimension(num_basis, num_dims)
    center, half_width = domain.sides(num_dims)
    box = Box(tuple(range(num_dims)), center, half_width, tuple(sizes), FullTensor(), family or Sines())
    scales: list[kernels.ScaleKernel] = []
    node = Node.root(kernel, num_dims)
    _require_single(node)
    while node.kind is Structure.SCALE:
        scales.append(node.kernel)
        node = node.base()
    splitter = _Splitter(box)
    terms = splitter.split(node)
    modes = [Mode(terms.get(d, [UnseenTerm(center.device)])) for d in range(num_dims)]
    return SeparableKernel(modes, scales, splitter.radial)


def num_basis_needed(kernel: Kernel, domain: Domain, most: Sequence[int], tail: float) -> list[int]:
    """
    How many functions each mode needs at the present hyperparameters.

    :param kernel: The kernel.
    :param domain: The box.
    :param most: No more than these.
    :param tail: The fraction of the prior variance of a mode that may be left out.
    """
    return [mode.num_basis_for(tail) for mode in separate(kernel, domain, most, len(most)).modes]


def count_per_dimension(num_basis: int | Sequence[int], num_dims: int) -> list[int]:
    """
    The number of functions of each dimension, checked.

    :param num_basis: One number for all dimensions, or one for each.
    :param num_dims: D.
    """
    sizes = [num_basis] * num_dims if isinstance(num_basis, int) else list(num_basis)
    if len(sizes) != num_dims:
        raise SizeError(f"num_basis has {len(sizes)} entries but there are {num_dims} input dimensions.")
    if min(sizes) < 1:
        raise SizeError(f"num_basis must be at least 1 in every dimension; got {num_basis}.")
    return sizes


def _require_single(node: Node) -> None:
    """An error where a kernel, or any below it, has a batch shape."""
    if len(node.kernel.batch_shape):
        raise unsupported(
            node,
            f"has batch_shape {tuple(node.kernel.batch_shape)}; a CP-weight model takes one kernel. Fit one model per "
            "batch entry.",
        )


Terms = dict[int, list[Term]]  # the summands of the kernel of each input column


class _Splitter:
    """Walks a kernel tree and collects the terms of each input dimension."""

    def __init__(self, box: Box):
        self.box, self.family = box, box.family
        self.radial: list[str] = []

    def split(self, node: Node) -> Terms:
        """
        :param node: A node.
        """
        kind = node.kind
        if kind is Structure.SCALE:
            return _scaled(self.split(node.base()), node.kernel)
        if kind is Structure.PRODUCT:
            return self._product(node)
        if kind is Structure.SUM:
            return self._sum(node)
        if kind is Structure.COLUMN_PRODUCT:
            return reduce(lambda left, right: {**left, **right}, map(self.split, node.by_column()), {})
        if kind is Structure.CONSTANT:
            return {d: [ConstantTerm(node.kernel, 1 / len(node.free))] for d in node.free}
        if isinstance(kind, FiniteBasis):
            return self._finite(node, kind)
        if not self.family.represents(node):
            raise unsupported(
                node,
                f"over input dimensions {list(node.free)} is not a product of one-dimensional kernels with a known "
                "basis. Supported are stationary kernels with a spectral density, constant kernels, kernels with a "
                "finite basis (linear, polynomial, periodic), their products over dimensions and their sums within one "
                "dimension; see gpytorch_tkrr.anova_kernel for a general-purpose choice.",
            )
        if len(node.free) > 1 and not isinstance(node.kernel, (kernels.RBFKernel, kernels.SpectralMixtureKernel)):
            self.radial.append(str(node))
        return {d: [self.family.term(node, self.box.select((d,)))] for d in node.free}

    def _finite(self, node: Node, kind: FiniteBasis) -> Terms:
        if len(node.free) > 1 and kind.over_columns is not Product:
            raise unsupported(
                node,
                f"over {len(node.free)} input dimensions is not a product over them. Use one per dimension "
                "(active_dims=(d,)), added to that dimension's kernel.",
            )
        return {d: [kind.make(node, d, self.box.side(d))] for d in node.free}

    def _product(self, node: Node) -> Terms:
        children = node.children()
        factors = [child for child in children if child.kind is not Structure.CONSTANT] or children
        constants = [child for child in children if child not in factors]
        result: Terms = {}
        for factor in factors:
            for d, terms in self.split(factor).items():
                if d in result:
                    together = node.restricted((d,))
                    if node.support() == {d} and self.family.represents(together):
                        return {d: [self.family.term(together, self.box.select((d,)))]}
                    raise unsupported(
                        node,
                        f"has two factors that act on input dimension {d}. A CP-weight model takes products over "
                        "different dimensions; write the factor on this dimension as one kernel.",
                    )
                result[d] = terms
        return reduce(lambda parts, constant: _scaled(parts, constant.kernel), constants, result)

    def _sum(self, node: Node) -> Terms:
        children = node.children()
        if len(children) == 1:
            return self.split(children[0])
        seen = node.support() or set(node.free)
        if len(seen) > 1:
            raise unsupported(
                node,
                f"is a sum over input dimensions {sorted(seen)}, not a product of one-dimensional kernels. Sums are "
                "allowed within one dimension (give every summand active_dims=(d,)), products over dimensions outside "
                "of them, as gpytorch_tkrr.anova_kernel does. For sums over different dimensions use HilbertKernel.",
            )
        (d,) = seen
        # A constant belongs to the column of the others, whatever columns it sees.
        children = [child if child.support() else replace(child, columns=(d,), free=(d,)) for child in children]
        return {d: [term for child in children for term in self.split(child)[d]]}


def _scaled(parts: Terms, kernel: Kernel) -> Terms:
    """Spread an inner scale evenly over the dimensions it multiplies."""
    return {d: [ScaledTerm(term, kernel, 1 / len(parts)) for term in terms] for d, terms in parts.items()}
