"""The kernel tree: one walk, one treatment of `active_dims`, one registry of what a kernel class is.

A :class:`Node` is a kernel inside a tree, with the input columns that it sees and the path that leads to it. What its
class is stands in one registry: a sum, a product, a scale, a constant, a kernel over the columns of a base kernel, a
leaf with a spectral density or a leaf with a finite basis. Three files read the tree: :mod:`.spectral` (densities),
:mod:`.expansion` (all inputs at once) and :mod:`.separable` (input by input).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

import torch
from gpytorch import kernels
from gpytorch.kernels import Kernel
from torch import Tensor

from ..errors import InputError, UnsupportedKernelError
from .advice import advise

Frequencies = dict[int, Tensor]  # input column -> angular frequencies (..., M)


class Structure(Enum):
    """What a kernel that is no leaf does with its children."""

    SUM = auto()
    PRODUCT = auto()
    SCALE = auto()
    CONSTANT = auto()  # has no children and no columns: a number, as a scale is
    COLUMN_SUM = auto()  # the sum over columns of one base kernel
    COLUMN_PRODUCT = auto()


@dataclass(frozen=True)
class Density:
    """
    A stationary leaf.

    :param rule: Its density from the node and the frequencies of the columns that are kept.
    """

    rule: Callable[[Node, Frequencies], Tensor]


@dataclass(frozen=True)
class FiniteBasis:
    """
    A leaf with a finite basis.

    :param term: Makes the functions and variances of one column, from the kernel, the position of the column among
        those the kernel sees, and the number of sines of that column.
    :param over_columns: Makes the expansion of several columns from those of single ones; None for a kernel of one
        column.
    """

    term: Callable[[Kernel, int, int], Any]
    over_columns: Callable[[list[Any]], Any] | None

    def make(self, node: Node, column: int, side: Side) -> Any:
        """
        The functions and variances of one column.

        :param node: The leaf.
        :param column: The column.
        :param side: Its box.
        """
        return self.term(node.kernel, node.columns.index(column), side.num_basis)


@dataclass(frozen=True)
class BasisOfBox(FiniteBasis):
    """
    A leaf whose functions are given by the box: the levels of a category.

    :param term: As for :class:`FiniteBasis`, from the node, the column and its box.
    :param over_columns: As for :class:`FiniteBasis`.
    """

    term: Callable[[Node, int, Side], Any]  # type: ignore[assignment]

    def make(self, node: Node, column: int, side: Side) -> Any:
        return self.term(node, column, side)


@dataclass(frozen=True)
class ColumnByColumn:
    """
    A kernel made of one base kernel, column by column, that is neither their sum nor their product.

    :param combine: Makes the expansion from the node and the expansions of the base kernel on each column.
    """

    combine: Callable[[Node, list[Any]], Any]


@dataclass(frozen=True)
class Side:
    """
    What a box says about one column.

    :param center: Its centre, a scalar.
    :param half_width: Its half width.
    :param num_basis: The number of sines.
    """

    center: Tensor
    half_width: Tensor
    num_basis: int


Kind = Structure | Density | FiniteBasis | ColumnByColumn

_KINDS: dict[type[Kernel], Kind] = {
    kernels.AdditiveKernel: Structure.SUM,
    kernels.ProductKernel: Structure.PRODUCT,
    kernels.ScaleKernel: Structure.SCALE,
    kernels.ConstantKernel: Structure.CONSTANT,
    kernels.AdditiveStructureKernel: Structure.COLUMN_SUM,
    kernels.ProductStructureKernel: Structure.COLUMN_PRODUCT,
}

#: Classes of libraries that are not imported here, by module and name.
_NAMED_KINDS: dict[str, Kind] = {}

#: Kernels whose meaning on one column is not their restriction to that column.
_NOT_COLUMN_BY_COLUMN = (
    kernels.SpectralMixtureKernel,
    kernels.PiecewisePolynomialKernel,
    kernels.AdditiveStructureKernel,
    kernels.ProductStructureKernel,
    kernels.NewtonGirardAdditiveKernel,
)


def register(kernel_class: type[Kernel], kind: Kind) -> None:
    """
    Say what a kernel class is. Subclasses inherit it unless they have a `forward` of their own; a later registration
    replaces an earlier one.

    :param kernel_class: The class.
    :param kind: What it is.
    """
    check_kernel_class(kernel_class)
    _KINDS[kernel_class] = kind


def register_by_name(name: str, kind: Kind) -> None:
    """
    Say what a kernel class of a library is that need not be installed.

    :param name: Its module and its name, with a dot between them.
    :param kind: What it is.
    """
    _NAMED_KINDS[name] = kind


def check_kernel_class(kernel_class: Any) -> None:
    """
    Refuse what cannot be registered.

    :param kernel_class: Should be a subclass of :class:`~gpytorch.kernels.Kernel`.
    """
    if not (isinstance(kernel_class, type) and issubclass(kernel_class, Kernel)):
        raise TypeError(
            f"What is registered must be a subclass of gpytorch.kernels.Kernel; got {kernel_class!r}. Write the "
            "decorator with the class itself and not with one of its objects."
        )


def is_a(kernel: Kernel, kernel_class: type[Kernel]) -> bool:
    """
    Whether a kernel is of a class, or of a subclass (of sampled parameters) that has no `forward` of its own.

    :param kernel: The kernel.
    :param kernel_class: The class.
    """
    return isinstance(kernel, kernel_class) and type(kernel).forward is kernel_class.forward


@dataclass(frozen=True)
class Node:
    """
    A kernel inside a tree.

    :param kernel: The kernel.
    :param columns: The columns of the root's input that the kernel sees, in the order in which it sees them.
    :param path: How to reach it from the root, such as ``AdditiveKernel.kernels[1]``.
    :param free: The columns among them whose lag is free; that of the others is held at zero. By default all.
    """

    kernel: Kernel
    columns: tuple[int, ...]
    path: str
    free: tuple[int, ...] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.free is None:
            object.__setattr__(self, "free", self.columns)
        ard_num_dims = self.kernel.ard_num_dims
        if ard_num_dims is not None and ard_num_dims != len(self.columns):
            raise InputError(
                f"{self} has ard_num_dims={ard_num_dims} but sees {len(self.columns)} input columns. One frequency "
                "column is needed per input column, counted after active_dims."
            )
        if len(set(self.columns)) < len(self.columns):
            raise UnsupportedKernelError(f"{self} has active_dims that repeat a column.")

    @classmethod
    def root(cls, kernel: Kernel, num_dims: int) -> Node:
        """
        The root of a tree.

        :param kernel: The kernel; its own `active_dims` are applied.
        :param num_dims: D, the number of columns that are offered to it.
        """
        path = kernel._get_name()
        return cls(kernel, _select(kernel, tuple(range(num_dims)), path), path)

    @property
    def kind(self) -> Kind | None:
        """What the nearest registered class is, unless `forward` has been overridden since."""
        for cls in type(self.kernel).__mro__:
            kind = _KINDS.get(cls) or _NAMED_KINDS.get(f"{cls.__module__}.{cls.__qualname__}")
            if kind is not None:
                return kind if type(self.kernel).forward is getattr(cls, "forward", None) else None
        return None

    def __str__(self) -> str:
        name = self.kernel._get_name()
        return self.path if self.path == name else f"{self.path}: {name}"

    def child(self, kernel: Kernel, name: str) -> Node:
        """
        A child that the parent calls, so that the child's ``active_dims`` select among the parent's columns.

        :param kernel: The child.
        :param name: Its name in the parent.
        """
        path = f"{self.path}.{name}"
        columns = _select(kernel, self.columns, path)
        return Node(kernel, columns, path, tuple(column for column in columns if column in self.free))

    def children(self) -> list[Node]:
        """The terms of a sum or the factors of a product."""
        return [self.child(kernel, f"kernels[{i}]") for i, kernel in enumerate(self.kernel.kernels)]

    def base(self) -> Node:
        """The child of a ScaleKernel, which repeats its child's ``active_dims`` and bypasses the child's own."""
        return Node(self.kernel.base_kernel, self.columns, f"{self.path}.base_kernel", self.free)

    def by_column(self) -> list[Node]:
        """The base of a structure kernel, one column at a time."""
        base = self.child(self.kernel.base_kernel, "base_kernel")
        shared = True  # whether all columns see the same parameters
        for part in base.kernel.modules():
            if isinstance(part, _NOT_COLUMN_BY_COLUMN):
                raise UnsupportedKernelError(
                    f"{base} cannot be split by input column: {type(part).__name__} on one column is not its "
                    "restriction to that column."
                )
            children = part.kernels if isinstance(part, (kernels.AdditiveKernel, kernels.ProductKernel)) else ()
            if any(kernel.active_dims is not None for kernel in children):
                raise UnsupportedKernelError(
                    f"{base} cannot be split by input column: active_dims inside a structure kernel's base have no "
                    "meaning column by column. Write the sum or product out with one kernel and active_dims per column."
                )
            shared = shared and getattr(part, "ard_num_dims", None) in (None, 1)
        if shared:
            return [Node(base.kernel, (column,), base.path) for column in base.free]
        return [base.restricted((column,)) for column in base.free]

    def restricted(self, columns: Sequence[int]) -> Node:
        """
        The same kernel with the lag of all other columns held at zero.

        :param columns: The columns that stay free.
        """
        return replace(self, free=tuple(columns))

    def support(self) -> set[int]:
        """The free columns that the kernel depends on: a sum or a product may leave some of those it sees unused."""
        if self.kind in (Structure.SUM, Structure.PRODUCT):
            return set().union(*(child.support() for child in self.children()))
        if self.kind is Structure.SCALE:
            return self.base().support()
        if self.kind in (Structure.COLUMN_SUM, Structure.COLUMN_PRODUCT) or isinstance(self.kind, ColumnByColumn):
            return self.child(self.kernel.base_kernel, "base_kernel").support()
        return set() if self.kind is Structure.CONSTANT else set(self.free)

    def at_lag(self, lag: Tensor) -> Tensor:
        """
        The kernel's own k of two inputs, one of them zero.

        :param lag: `(T, len(free))`, in the order of the free columns.
        :return: `(*batch, T)`, float64.
        """
        # With as many lags as columns, GPyTorch takes the diagonals of a kernel for each column for one matrix.
        num, num_columns = len(lag), len(self.columns)
        end = lag.new_zeros(num + 1 if num == num_columns else num, num_columns)
        end[:num, [self.columns.index(column) for column in self.free]] = lag
        end = end.to(self.kernel.dtype)
        return self.kernel.forward(torch.zeros_like(end), end, diag=True)[..., :num].double()


def _select(kernel: Kernel, columns: tuple[int, ...], path: str) -> tuple[int, ...]:
    """The columns that a kernel sees of those offered to it."""
    if kernel.active_dims is None:
        return columns
    active_dims = kernel.active_dims.reshape(-1).tolist()
    if max(active_dims) >= len(columns):
        raise InputError(
            f"{path}: {type(kernel).__name__} has active_dims={active_dims} but its parent sees {len(columns)} columns."
        )
    return tuple(columns[d] for d in active_dims)


def unsupported(node: Node, reason: str) -> UnsupportedKernelError:
    """
    The error of a node that cannot be read: which node, why, and what to write instead where that is known.

    :param node: The node.
    :param reason: A sentence without its subject.
    """
    is_leaf_of_one_column = isinstance(node.kind, FiniteBasis) and node.kind.over_columns is None
    remedy = f" {advise(node.kernel)}" if node.kind is None or is_leaf_of_one_column else ""
    return UnsupportedKernelError(f"{node} {reason}{remedy}")
