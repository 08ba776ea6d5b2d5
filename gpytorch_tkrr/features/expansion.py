r"""A kernel tree as features and variances, :math:`k(x, x') \approx \sum_i v_i(\theta) \phi_i(x) \phi_i(x')`.

This is the kernel tree read for all inputs at once. A stationary node gets the functions that a :class:`BasisFamily`
has for it, by default a tensor product of sines with the spectral density as variances (:mod:`.stationary`). Leaves
with a finite basis bring their own functions (:mod:`.finite`). Sums concatenate, products multiply all pairs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from gpytorch import kernels
from gpytorch.kernels import Kernel
from torch import Tensor

from ..bases.basis import Basis
from ..bases.covariance import Covariance, block_diagonal, kronecker
from ..bases.domain import Domain
from ..bases.index_set import IndexSet
from ..errors import UnsupportedKernelError
from .tree import ColumnByColumn, Density, FiniteBasis, Node, Side, Structure, unsupported


@dataclass(frozen=True)
class Box:
    """
    The input columns that a kernel node sees, with the box and the number of functions of each.

    :param columns: Which columns of the inputs these are, `D` of them.
    :param center: Centres `(D,)`.
    :param half_width: Half widths `(D,)`.
    :param num_basis: Number of functions of each column.
    :param index_set: Which products of functions are kept.
    :param family: Which functions they are.
    """

    columns: tuple[int, ...]
    center: Tensor
    half_width: Tensor
    num_basis: tuple[int, ...]
    index_set: IndexSet
    family: BasisFamily

    def side(self, column: int) -> Side:
        """
        The box of one column.

        :param column: Which.
        """
        i = self.columns.index(column)
        return Side(self.center[i], self.half_width[i], self.num_basis[i])

    def select(self, columns: Sequence[int]) -> Box:
        """
        The box of some of these columns.

        :param columns: Which, in the order wanted.
        """
        index = [self.columns.index(column) for column in columns]
        return replace(
            self,
            columns=tuple(self.columns[i] for i in index),
            center=self.center[index],
            half_width=self.half_width[index],
            num_basis=tuple(self.num_basis[i] for i in index),
        )


@dataclass(frozen=True)
class BasisProducts:
    """
    Features that are products of functions of one input each.

    :param bases: The functions of each input.
    :param columns: Which inputs these are.
    :param indices: Which functions each product takes, counted from 0, `(M, D)`.
    """

    bases: list[Basis]
    columns: tuple[int, ...]
    indices: Tensor


@dataclass(frozen=True)
class Leaf:
    """
    A leaf of an expansion, with what stands around it in the tree.

    :param expansion: The leaf.
    :param share: Its share of an error budget.
    :param scale: By which factor it is multiplied in the kernel, of a batch the largest.
    """

    expansion: Expansion
    share: float
    scale: float


class Expansion(ABC):
    """Features and variances of one node of a kernel tree."""

    #: Whether summands on the same functions can become one; they stand first in a sum.
    can_merge = False

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

    def mixing(self) -> Tensor | None:
        r"""
        T, `(*batch, M, M)`, where the weights' prior covariance is :math:`T \operatorname{diag}(v) T^\top`; None where
        it is diagonal.
        """
        return None

    def covariance(self) -> Covariance:
        """The prior covariance of the weights."""
        return Covariance(self.variances(), self.mixing())

    @abstractmethod
    def prior_variance(self, x: Tensor) -> Tensor:
        """
        The exact :math:`k(x, x)` that the features should represent.

        :param x: Inputs `(..., N, D)`.
        :return: `(..., N)`, or `(..., 1)` where it does not depend on x.
        """

    @property
    @abstractmethod
    def structure(self) -> Hashable:
        """Which functions the features are, all but the values of :meth:`basis_parameters`."""

    def leaves(self, x: Tensor, share: float = 1.0, scale: float = 1.0) -> Iterator[Leaf]:
        """
        All leaves.

        :param x: Inputs `(P, D)`, for the variance of factors that are not stationary.
        :param share: The share of an error budget; factors of a product divide it.
        :param scale: By which factor the leaf is multiplied in the kernel.
        """
        yield Leaf(self, share, scale)

    def basis_parameters(self) -> list[Tensor]:
        """Tensors that the features depend on, beside the inputs."""
        return []

    def products(self) -> BasisProducts | None:
        """The features as products of fixed functions of one input each, where they are."""
        return None

    def merged(self, other: Expansion) -> Expansion | None:
        """
        The sum with another expansion on the same functions, or None where they are not the same.

        :param other: The other one.
        """
        return None


class Term(ABC):
    """Functions of one input and their prior variances: a leaf of a tree on one column."""

    @property
    @abstractmethod
    def basis(self) -> Basis:
        """The functions."""

    @abstractmethod
    def variances(self) -> Tensor:
        """Prior variances `(*batch, M)`, float64, differentiable in the kernel's raw parameters."""

    def mixing(self) -> Tensor | None:
        """T, `(*batch, M, M)`, for weights that are correlated (see :mod:`.covariance`); None where they are not."""
        return None

    @abstractmethod
    def prior_variance(self, x: Tensor) -> Tensor:
        """
        The exact :math:`k(x, x)`.

        :param x: Inputs `(..., N)`.
        :return: `(..., N)`, or `(..., 1)` where it does not depend on x.
        """


class OneInput(Expansion):
    """
    The functions of one input.

    :param column: Which input.
    :param term: Its functions and their variances.
    """

    def __init__(self, column: int, term: Term):
        self.column, self.term = column, term

    @property
    def num_functions(self) -> int:
        return self.term.basis.num_functions

    def features(self, x: Tensor) -> Tensor:
        return self.term.basis(x[..., self.column])

    def variances(self) -> Tensor:
        return self.term.variances()

    def mixing(self) -> Tensor | None:
        return self.term.mixing()

    @property
    def structure(self) -> Hashable:
        return type(self), self.column, self.term.basis.structure

    def prior_variance(self, x: Tensor) -> Tensor:
        return self.term.prior_variance(x[..., self.column])

    def basis_parameters(self) -> list[Tensor]:
        return self.term.basis.parameters()

    def products(self) -> BasisProducts | None:
        basis = self.term.basis.detach()
        if any(parameter.dim() for parameter in basis.parameters()):  # other functions for each entry of a batch
            return None
        return BasisProducts([basis], (self.column,), torch.arange(basis.num_functions).unsqueeze(-1))


class BasisFamily(ABC):
    r"""
    A way to choose the functions of stationary kernels: sines, variational Fourier features, quadratures and others.

    Given a leaf of a kernel tree, the box and a number of functions it returns functions of one input and the
    covariance of their weights. Both readers of the tree ask here. The functions depend on box and number alone, so
    that they are evaluated once while hyperparameters move.
    """

    @abstractmethod
    def term(self, node: Node, box: Box) -> Term:
        """
        The functions of one column of a node, and the prior covariance of their weights.

        :param node: A node that this family represents; the lag of its other columns is zero.
        :param box: The box of that column.
        :raises UnsupportedKernelError: Names a node that the functions cannot represent.
        """

    def represents(self, node: Node) -> bool:
        """
        Whether a node is taken as a whole. By default these are the stationary leaves; sums, products and scales of
        them are then put together from their parts.

        :param node: The node.
        """
        return isinstance(node.kind, Density)

    def expand(self, node: Node, box: Box) -> Expansion:
        """
        The features of a node of any number of columns. By default of one: a family of functions of one input serves
        sums and products of kernels of one input each.

        :param node: A node that this family represents.
        :param box: The box of its free columns.
        """
        if len(box.columns) > 1:
            raise unsupported(
                node,
                f"sees {len(box.columns)} input columns, and {self} has functions of one. Write a product or a sum of "
                "kernels with active_dims=(d,) each, or a ProductStructureKernel or AdditiveStructureKernel.",
            )
        return OneInput(box.columns[0], self.term(node, box))

    def as_accurate(self, domain: Domain, num_basis: Sequence[int], half_range: Tensor) -> tuple[Domain, list[int]]:
        """
        The box and the numbers with which these functions are as accurate as sines are with given ones.

        :param domain: The box of the sines.
        :param num_basis: Their numbers.
        :param half_range: Half the range of the inputs, `(D,)`.
        :raises UnsupportedKernelError: Where no bound of the error is known.
        """
        raise UnsupportedKernelError(
            f"No bound of the error is known for {self}. Give the box and the numbers by hand: "
            f"HilbertKernel(kernel, domain, num_basis, basis={self})."
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *vars(self).items()))


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

    @property
    def structure(self) -> Hashable:
        return type(self)

    def prior_variance(self, x: Tensor) -> Tensor:
        return self.variances()


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

    def mixing(self) -> Tensor | None:
        return self.base.mixing()

    @property
    def structure(self) -> Hashable:
        return self.base.structure

    def prior_variance(self, x: Tensor) -> Tensor:
        return self.scale * self.base.prior_variance(x)

    def leaves(self, x: Tensor, share: float = 1.0, scale: float = 1.0) -> Iterator[Leaf]:
        return self.base.leaves(x, share, scale * float(self.scale.detach().max()))

    def basis_parameters(self) -> list[Tensor]:
        return self.base.basis_parameters()

    def products(self) -> BasisProducts | None:
        return self.base.products()


class _Composite(Expansion):
    def __init__(self, parts: Sequence[Expansion]):
        self.parts = list(parts)

    @property
    def structure(self) -> Hashable:
        return type(self), *(part.structure for part in self.parts)

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

    def mixing(self) -> Tensor | None:
        return block_diagonal([part.mixing() for part in self.parts], [part.num_functions for part in self.parts])

    def prior_variance(self, x: Tensor) -> Tensor:
        variances = [part.prior_variance(x) for part in self.parts]
        return sum(variances[1:], variances[0])

    def leaves(self, x: Tensor, share: float = 1.0, scale: float = 1.0) -> Iterator[Leaf]:
        for part in self.parts:
            yield from part.leaves(x, share, scale)


class Product(_Composite):
    """
    All pairs of features multiplied.

    :param parts: The factors.
    """

    @property
    def num_functions(self) -> int:
        return math.prod(part.num_functions for part in self.parts)

    def features(self, x: Tensor) -> Tensor:
        return reduce(all_pairs, (part.features(x) for part in self.parts))

    def variances(self) -> Tensor:
        return reduce(all_pairs, (part.variances() for part in self.parts))

    def mixing(self) -> Tensor | None:
        return kronecker([part.mixing() for part in self.parts], [part.num_functions for part in self.parts])

    def prior_variance(self, x: Tensor) -> Tensor:
        return reduce(torch.mul, (part.prior_variance(x) for part in self.parts))

    def leaves(self, x: Tensor, share: float = 1.0, scale: float = 1.0) -> Iterator[Leaf]:
        largest = [float(part.prior_variance(x).detach().max()) for part in self.parts]
        for i, part in enumerate(self.parts):
            others = math.prod(largest[:i] + largest[i + 1 :])
            yield from part.leaves(x, share / len(self.parts), scale * others)


def all_pairs(left: Tensor, right: Tensor) -> Tensor:
    """
    Products of all pairs of last-dimension entries, the left one running slowest.

    :param left: `(..., P)`.
    :param right: `(..., Q)`.
    :return: `(..., P Q)`.
    """
    return (left.unsqueeze(-1) * right.unsqueeze(-2)).flatten(-2)


def concatenate(parts: list[Tensor]) -> Tensor:
    """
    Features or variances side by side, over their common batch shape.

    :param parts: Each `(..., M_i)`.
    """
    shape = torch.broadcast_shapes(*(part.shape[:-1] for part in parts))
    return torch.cat([part.expand(*shape, part.shape[-1]) for part in parts], dim=-1)


def expand(kernel: Kernel, box: Box) -> Expansion:
    """
    The expansion of a kernel.

    :param kernel: A GPyTorch kernel; its own `active_dims` are applied.
    :param box: All columns of the inputs.
    """
    return _expand(Node.root(kernel, len(box.columns)), box)


def _expand(node: Node, box: Box) -> Expansion:
    if box.family.represents(node):
        return box.family.expand(node, box.select(node.free))
    kind = node.kind
    if isinstance(kind, FiniteBasis):
        parts = []
        for column in node.free:
            parts.append(OneInput(column, kind.make(node, column, box.side(column))))
        if len(parts) == 1:
            return parts[0]
        if kind.over_columns is None:
            raise unsupported(node, f"sees {len(parts)} input columns.")
        return kind.over_columns(parts)
    if isinstance(kind, ColumnByColumn):
        return kind.combine(node, [_expand(part, box) for part in node.by_column()])
    if kind is Structure.CONSTANT:
        return Constant(node.kernel)
    if kind is Structure.SCALE:
        return Scaled(node.kernel, _expand(node.base(), box))
    if kind is Structure.PRODUCT:
        return Product([_expand(child, box) for child in node.children()])
    if kind is Structure.SUM:
        return _merge([_expand(child, box) for child in node.children()])
    if kind is Structure.COLUMN_PRODUCT:
        return Product([_expand(part, box) for part in node.by_column()])
    if kind is Structure.COLUMN_SUM:
        return _merge([_expand(part, box) for part in node.by_column()])
    raise unsupported(
        node, f"has neither a spectral density over its {len(node.free)} input columns nor a finite basis."
    )


def _merge(parts: list[Expansion]) -> Expansion:
    """A sum; summands on the same functions become one and stand first."""
    summands: list[Expansion] = []
    for part in parts:
        for i, known in enumerate(summands):
            together = known.merged(part)
            if together is not None:
                summands[i] = together
                break
        else:
            summands.append(part)
    summands.sort(key=lambda part: not part.can_merge)
    return summands[0] if len(summands) == 1 else Sum(summands)
