"""Indicators of the levels of a category."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import InputError
from .basis import Basis

#: Levels that a category has at most, those that no row has among them.
MAX_LEVELS = 1 << 20


class LevelBasis(Basis):
    r"""
    One function for each of L consecutive whole numbers, one at that level and zero elsewhere, and a last one for all
    other values:

    .. math:: \phi_j(x) = [x = m + j], \quad j = 0 \ldots L - 1, \qquad \phi_L(x) = [x \notin \{m, \ldots, m + L - 1\}].

    The last one is the function of levels that nobody has seen: its weight keeps its prior. Gradients in x are zero.

    :param first: The first level m.
    :param num_levels: L.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr.bases.levels import LevelBasis
        >>> LevelBasis(0, 2)(torch.tensor([1.0, 0.0, 7.0])).int()
        tensor([[0, 1, 0],
                [1, 0, 0],
                [0, 0, 1]], dtype=torch.int32)
    """

    def __init__(self, first: int, num_levels: int):
        if num_levels > MAX_LEVELS:
            raise InputError(
                f"A category has a function for each whole number of its range, here {num_levels}; at most "
                f"{MAX_LEVELS} are taken. Number the levels that there are 0, 1, 2, ..., for instance by "
                "numpy.unique(column, return_inverse=True)[1]."
            )
        self.first, self.num_levels = first, num_levels

    @classmethod
    def inside(cls, center: Tensor, half_width: Tensor) -> LevelBasis:
        """
        The whole numbers inside a box.

        :param center: Its centre, a scalar.
        :param half_width: Its half width.
        """
        first = math.ceil(float(center - half_width))
        return cls(first, max(math.floor(float(center + half_width)) - first + 1, 1))

    @property
    def num_functions(self) -> int:
        return self.num_levels + 1

    @property
    def levels(self) -> Tensor:
        """A value for each function: the levels, and the number after them for all other values, `(L + 1,)`."""
        return torch.arange(self.first, self.first + self.num_levels + 1, dtype=torch.float64)

    def codes(self, x: Tensor) -> Tensor:
        """
        Which function is one.

        :param x: Inputs `(...)`.
        :return: Numbers from 0 to L, of the same shape.
        """
        shifted = x.detach().double() - self.first
        is_level = (shifted == shifted.round()) & (shifted >= 0) & (shifted < self.num_levels)
        return torch.where(is_level, shifted, torch.full_like(shifted, self.num_levels)).long()

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(self.codes(x), self.num_functions).double()

    def combine(self, x: Tensor, coefficients: Tensor) -> Tensor:
        return coefficients.mT[self.codes(x)]

    def fill(self, x: Tensor, out: Tensor) -> None:
        out.zero_().scatter_(0, self.codes(x).unsqueeze(0), 1.0)

    def series(self, x: Tensor, coefficients: Tensor, out: Tensor, buffer: Tensor) -> None:
        torch.index_select(coefficients, 1, self.codes(x), out=out)
