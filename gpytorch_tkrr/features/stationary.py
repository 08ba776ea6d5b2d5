r"""Functions with one angular frequency each, and the spectral density as their variances.

A *spectral basis* has frequencies :math:`\omega_j` and factors :math:`q_j` such that for a stationary kernel of one
input

.. math:: k(x - x') \approx \sum_j q_j S(\omega_j) \phi_j(x) \phi_j(x').

For several inputs the functions multiply, and the density is that of all of them. The default, :class:`Sines`, and the
quadratures are such families.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from ..bases.basis import SineBasis, SpectralBasis
from ..bases.domain import Domain
from ..bases.index_set import FullTensor, InPairs
from .expansion import BasisFamily, BasisProducts, Box, Expansion, Term
from .spectral import node_density, node_has_density
from .tree import Node


class SpectralTerm(Term):
    r"""
    Functions with the spectral density of a stationary kernel restricted to one of its columns.

    A kernel over n columns with :math:`k(0) \ne 1` contributes :math:`k(0)^{1/n}` to each of them.

    :param node: The kernel.
    :param column: The column that this term stands for.
    :param basis: The functions.
    """

    def __init__(self, node: Node, column: int, basis: SpectralBasis):
        self.node, self.column, self._basis = node, column, basis

    @property
    def basis(self) -> SpectralBasis:
        return self._basis

    def variances(self) -> Tensor:
        density = node_density(self.node, {self.column: self.basis.frequencies}) * self.basis.factors
        num_columns = len(self.node.free)
        return density if num_columns == 1 else density * self._at_zero() ** (1 / num_columns - 1)

    def prior_variance(self, x: Tensor) -> Tensor:
        return self._at_zero() ** (1 / len(self.node.free))

    def _at_zero(self) -> Tensor:
        return self.node.at_lag(self.basis.center.new_zeros(1, len(self.node.free))).reshape(1)

    def at_lag(self, lag: Tensor) -> Tensor:
        """
        The kernel at lags along its column, as a fraction of its value at zero.

        :param lag: `(T,)`.
        :return: `(T,)`, float64.
        """
        lags = lag.new_zeros(lag.shape[0], len(self.node.free))
        lags[:, self.node.free.index(self.column)] = lag
        return self.node.at_lag(lags) / self._at_zero()


class SpectralProducts(Expansion):
    r"""
    Products of functions of one input each, with a spectral density of all inputs as variances.

    :param nodes: Nodes of the tree that are added, all with the same free columns.
    :param box: The box of these columns.
    :param bases: The functions of each column.
    """

    can_merge = True

    def __init__(self, nodes: Sequence[Node], box: Box, bases: Sequence[SpectralBasis]):
        self.nodes, self.box, self.bases = list(nodes), box, list(bases)
        self.sizes = tuple(basis.num_functions for basis in bases)

    @property
    def num_functions(self) -> int:
        return self.box.index_set.size(self.sizes)

    @property
    def indices(self) -> Tensor:
        """Multi-indices `(M, D)`, counted from 1."""
        return self.box.index_set.indices(self.sizes).to(self.box.center.device)

    def features(self, x: Tensor) -> Tensor:
        return self.box.index_set.products(
            [basis(x[..., column]) for basis, column in zip(self.bases, self.box.columns, strict=True)]
        )

    def variances(self) -> Tensor:
        columns = list(zip(self.box.columns, self.bases, (self.indices - 1).unbind(-1), strict=True))
        omega = {column: basis.frequencies[index] for column, basis, index in columns}  # each (M,)
        density = reduce(torch.add, (node_density(node, omega) for node in self.nodes))
        return density * reduce(torch.mul, (basis.factors[index] for _, basis, index in columns))

    def at_lag(self, lag: Tensor) -> Tensor:
        """
        The kernels' own k at given lags.

        :param lag: `(T, D)` in the order of the box's columns.
        :return: `(*batch, T)`, float64.
        """
        orders = ([self.box.columns.index(column) for column in node.free] for node in self.nodes)
        return reduce(torch.add, (node.at_lag(lag[:, o]) for node, o in zip(self.nodes, orders, strict=True)))

    @property
    def structure(self) -> Hashable:
        return type(self), self.box.family, self.box.columns, self.box.num_basis, self.box.index_set

    def prior_variance(self, x: Tensor) -> Tensor:
        return self.at_lag(torch.zeros(1, len(self.box.columns), dtype=torch.float64, device=x.device))

    def basis_parameters(self) -> list[Tensor]:
        return [self.box.center, self.box.half_width]

    def products(self) -> BasisProducts:
        return BasisProducts(list(self.bases), self.box.columns, self.indices - 1)

    def merged(self, other: Expansion) -> Expansion | None:
        if not isinstance(other, SpectralProducts) or set(other.box.columns) != set(self.box.columns):
            return None
        return SpectralProducts([*self.nodes, *other.nodes], self.box, self.bases)


class SpectralFamily(BasisFamily):
    """Families whose functions have one frequency each. They represent all kernels that have a spectral density."""

    #: Whether functions stand in pairs that must not be parted: of these an index set counts the pairs.
    is_paired = False

    @abstractmethod
    def functions(self, center: Tensor, half_width: Tensor, num_basis: int) -> SpectralBasis:
        """
        The functions of one input.

        :param center: Centre of the box, a scalar.
        :param half_width: Its half width.
        :param num_basis: How many functions were asked for.
        """

    def represents(self, node: Node) -> bool:
        return node_has_density(node)

    def _bases(self, box: Box) -> list[SpectralBasis]:
        return [self.functions(*side) for side in zip(box.center, box.half_width, box.num_basis, strict=True)]

    def term(self, node: Node, box: Box) -> SpectralTerm:
        (basis,) = self._bases(box)
        return SpectralTerm(node, box.columns[0], basis)

    def expand(self, node: Node, box: Box) -> SpectralProducts:
        if self.is_paired and not isinstance(box.index_set, FullTensor):
            box = replace(box, index_set=InPairs(box.index_set))  # the sum over a pair is stationary, its parts are not
        return SpectralProducts([node], box, self._bases(box))


class Sines(SpectralFamily):
    r"""
    Laplace eigenfunctions with Dirichlet ends, the default basis: M sines on the box,

    .. math:: \phi_j(x) = L^{-1/2} \sin(\omega_j (x - c + L)), \quad \omega_j = \frac{\pi j}{2 L}, \quad
        v_j = S(\omega_j).

    Example:
        >>> import gpytorch, torch, gpytorch_tkrr as tkrr
        >>> kernel = tkrr.HilbertKernel(gpytorch.kernels.RBFKernel(), tkrr.Domain(0.0, 4.0), 24, basis=tkrr.Sines())
        >>> kernel.approximation_error(torch.linspace(-1, 1, 50)) < 1e-6
        True

    Reference: Solin & Särkkä (2020), *Hilbert space methods for reduced-rank Gaussian process regression*.
    """

    def functions(self, center: Tensor, half_width: Tensor, num_basis: int) -> SineBasis:
        return SineBasis(center, half_width, num_basis)

    def as_accurate(self, domain: Domain, num_basis: Sequence[int], half_range: Tensor) -> tuple[Domain, list[int]]:
        return domain, list(num_basis)


def as_family(basis: BasisFamily | None) -> BasisFamily:
    """
    The family of functions that a user asked for.

    :param basis: The family; None for the sines.
    """
    if basis is None:
        return Sines()
    if not isinstance(basis, BasisFamily):
        raise TypeError(
            f"basis must be an object such as gpytorch_tkrr.Sines() or gpytorch_tkrr.GaussLegendre(); got {basis!r}."
        )
    return basis
