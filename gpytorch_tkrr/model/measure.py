"""Distributions of the inputs, and the moments of functions under them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError

#: Rows whose functions are evaluated at a time.
CHUNK_ROWS = 65536

#: Intervals of the quadrature over a uniform distribution.
NUM_INTERVALS = 256

#: Functions of one input: points `(n,)` -> values `(n, M)`.
Functions = Callable[[Tensor], Tensor]


class Measure(ABC):
    """
    A distribution of independent inputs.

    :param lower: Where the range of each input begins, `(D,)`.
    :param upper: Where it ends, `(D,)`.
    """

    def __init__(self, lower: Tensor, upper: Tensor):
        self.lower, self.upper = lower, upper

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {len(self.lower)} inputs"

    @abstractmethod
    def moments(self, d: int, functions: Functions) -> tuple[Tensor, Tensor]:
        """
        Mean `(M,)` and covariance `(M, M)` of functions of one input.

        :param d: The input.
        :param functions: Points `(n,)` -> values `(n, M)`, float64.
        """


class EmpiricalMeasure(Measure):
    """
    Every input has the distribution of its column in a table; dependence between columns is left out.

    :param x: The table, `(n, D)`; NaN are left out.

    Example:
        >>> import torch
        >>> import gpytorch_tkrr as tkrr
        >>> measure = tkrr.EmpiricalMeasure(torch.tensor([[0.0, 5.0], [1.0, 7.0]]))
        >>> measure.lower, measure.upper
        (tensor([0., 5.]), tensor([1., 7.]))
    """

    def __init__(self, x: Tensor):
        if x.dim() != 2 or x.shape[0] == 0:
            raise InputError(f"x must be a table (n, D) with at least one row; got shape {tuple(x.shape)}.")
        missing = x.isnan()
        if missing.all(0).any():
            raise InputError(f"Column {int(missing.all(0).nonzero()[0, 0])} of the table holds no value, only NaN.")
        lower, upper = x.nan_to_num(torch.inf, torch.inf, -torch.inf), x.nan_to_num(-torch.inf, torch.inf, -torch.inf)
        super().__init__(lower.amin(0), upper.amax(0))
        self.x = x

    def moments(self, d: int, functions: Functions) -> tuple[Tensor, Tensor]:
        column = self.x[:, d]
        values, counts = column[~column.isnan()].unique(return_counts=True)  # many columns have few values
        share = counts.double() / counts.sum()
        chunks = list(zip(values.split(CHUNK_ROWS), share.split(CHUNK_ROWS), strict=True))
        mean = reduce(torch.add, (part @ functions(chunk) for chunk, part in chunks))  # (M,)
        pieces = ((functions(chunk) - mean, part) for chunk, part in chunks)
        return mean, reduce(torch.add, (phi.mT @ (part.unsqueeze(-1) * phi) for phi, part in pieces))


class UniformMeasure(Measure):
    """
    Every input is uniform on an interval.

    :param lower: Where the intervals begin, `(D,)`.
    :param upper: Where they end, `(D,)`.

    Example:
        >>> import torch
        >>> import gpytorch_tkrr as tkrr
        >>> from gpytorch_tkrr.bases.basis import MonomialBasis
        >>> measure = tkrr.UniformMeasure(torch.tensor([0.0]), torch.tensor([6.0]))
        >>> mean, covariance = measure.moments(0, MonomialBasis())
        >>> round(mean.item(), 6), round(covariance.item(), 6)
        (3.0, 3.0)
    """

    def __init__(self, lower: Tensor, upper: Tensor):
        if lower.shape != upper.shape or lower.dim() != 1 or not bool((lower < upper).all()):
            raise InputError(f"lower must lie below upper in every input; got {lower.tolist()} and {upper.tolist()}.")
        super().__init__(lower, upper)

    def moments(self, d: int, functions: Functions) -> tuple[Tensor, Tensor]:
        # Gauss-Legendre in many short intervals: exact to rounding for sines, close through an input warp.
        nodes, weights = (torch.from_numpy(values) for values in np.polynomial.legendre.leggauss(8))
        starts = torch.arange(NUM_INTERVALS, dtype=torch.float64).unsqueeze(-1)
        fraction = ((starts + (1 + nodes) / 2) / NUM_INTERVALS).flatten().to(self.lower.device)
        weights = (weights / (2 * NUM_INTERVALS)).repeat(NUM_INTERVALS).to(self.lower.device)
        phi = functions(self.lower[d].double() + fraction * (self.upper[d] - self.lower[d]).double())
        mean = weights @ phi  # (M,)
        centered = phi - mean
        return mean, centered.mT @ (weights.unsqueeze(-1) * centered)
