r"""Kernels of categories: numbers that are names, without an order.

Two values are equal or they are not. A kernel of one column that sees nothing else is a constant plus a multiple of
:math:`[x = x']`. So its functions are the constant 1 and one indicator for each level
(:mod:`gpytorch_tkrr.bases.levels`). The levels are the whole numbers inside the box of their column. All other values
share one more function, whose weight no data have seen.

A category with an order (small, medium, large) is a column of numbers, 0, 1, 2: take a stationary kernel of them.
"""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from ..bases.basis import ConcatenatedBasis, ConstantBasis
from ..bases.levels import LevelBasis
from ..errors import InputError
from .expansion import Product, Term
from .finite import of_column
from .tree import BasisOfBox, Node, Side, register, register_by_name


class IndicatorKernel(Kernel):
    r"""
    :math:`k(x, x') = [x = x']`: one for equal inputs and zero for all others.

    Every level has a value of its own, independent of all others. Add a constant for what levels have in common, and
    scale it: ``ConstantKernel() + ScaleKernel(IndicatorKernel(active_dims=(d,)))`` is the kernel that
    :func:`~gpytorch_tkrr.anova_kernel` has for a category.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr import IndicatorKernel
        >>> IndicatorKernel()(torch.tensor([[2.0], [5.0], [2.0]])).to_dense()
        tensor([[1., 0., 1.],
                [0., 1., 0.],
                [1., 0., 1.]])
    """

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
        return _differences(x1, x2, diag).logical_not().all(-1).to(x1.dtype)


class CategoricalKernel(Kernel):
    r"""
    The Hamming kernel of categories, with one lengthscale or one for each column:

    .. math:: k(x, x') = \exp\Bigl(-\frac1D \sum_d \frac{[x_d \ne x'_d]}{\ell_d}\Bigr).

    It is BoTorch's ``CategoricalKernel``, which is taken as well. Over one column it is the constant
    :math:`e^{-1/\ell}` plus :math:`1 - e^{-1/\ell}` times :class:`IndicatorKernel`; over several it is a product.

    :param kwargs: As for :class:`~gpytorch.kernels.Kernel`; for instance `ard_num_dims` and `active_dims`.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr import CategoricalKernel
        >>> kernel = CategoricalKernel()
        >>> kernel.lengthscale = 1.0
        >>> kernel(torch.tensor([[0.0], [1.0]])).to_dense().detach()
        tensor([[1.0000, 0.3679],
                [0.3679, 1.0000]])
    """

    has_lengthscale = True

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
        lengthscale = self.lengthscale if diag else self.lengthscale.unsqueeze(-2)
        return (-(_differences(x1, x2, diag) / lengthscale).mean(-1)).exp()


def _differences(x1: Tensor, x2: Tensor, diag: bool) -> Tensor:
    """Where inputs differ, `(..., n, D)` or `(..., n, m, D)`."""
    return x1 != x2 if diag else x1.unsqueeze(-2) != x2.unsqueeze(-3)


class IndicatorTerm(Term):
    """
    One function for each level, all with variance 1, for :class:`IndicatorKernel`.

    :param node: The kernel.
    :param column: Not used: all columns are alike.
    :param side: The box of the column.
    """

    def __init__(self, node: Node, column: int, side: Side):
        self._basis, self.device = LevelBasis.inside(side.center, side.half_width), side.center.device

    @property
    def basis(self) -> LevelBasis:
        return self._basis

    def variances(self) -> Tensor:
        return torch.ones(self._basis.num_functions, dtype=torch.float64, device=self.device)

    def prior_variance(self, x: Tensor) -> Tensor:
        return torch.ones(1, dtype=torch.float64, device=self.device)


class HammingTerm(Term):
    r"""
    The constant 1 with variance :math:`e^{-1 / (D \ell)}` and one function for each level with what is left of 1, for
    :class:`CategoricalKernel` and BoTorch's.

    :param node: The kernel.
    :param column: The column that this term stands for.
    :param side: The box of the column.
    """

    def __init__(self, node: Node, column: int, side: Side):
        self.kernel, self.position, self.num_columns = node.kernel, node.columns.index(column), len(node.columns)
        self._levels = LevelBasis.inside(side.center, side.half_width)

    @property
    def basis(self) -> ConcatenatedBasis:
        return ConcatenatedBasis(ConstantBasis(), self._levels)

    def variances(self) -> Tensor:
        rate = 1 / (of_column(self.kernel.lengthscale, self.position) * self.num_columns).unsqueeze(-1)
        own = -torch.expm1(-rate)  # 1 - exp(-rate)
        return torch.cat([torch.exp(-rate), own.expand(*own.shape[:-1], self._levels.num_functions)], dim=-1)

    def prior_variance(self, x: Tensor) -> Tensor:
        return torch.ones(1, dtype=torch.float64, device=x.device)


register(IndicatorKernel, BasisOfBox(IndicatorTerm, Product))
register(CategoricalKernel, BasisOfBox(HammingTerm, Product))
register_by_name("botorch.models.kernels.categorical.CategoricalKernel", BasisOfBox(HammingTerm, Product))


def require_levels(columns: dict[int, bool]) -> None:
    """
    An error where a category has values that are no levels.

    :param columns: For each column that is a category, whether all its values are whole numbers, and not too many.
    """
    wrong = [column for column, is_whole in columns.items() if not is_whole]
    if wrong:
        raise InputError(
            f"Input column {wrong[0]} is a category for the kernel, so its values must be level numbers 0, 1, 2, ...; "
            "it has values that are no whole numbers, or more than 65 536 of them. Number its levels, for instance by "
            "numpy.unique(column, return_inverse=True)[1]; or use a stationary kernel for this column."
        )
