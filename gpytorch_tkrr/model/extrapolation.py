r"""Rows outside the range of the training rows: who they are, and how much is unknown there.

Let :math:`\bar x` be the nearest point to x within the range of every column. Even if f were known there, the prior
would leave the variance

.. math:: k(x, x) - \frac{k(x, \bar x)^2}{k(\bar x, \bar x)}
    = \sigma^2 \prod_d k_d(x_d, x_d)
    \Bigl(1 - \prod_{d \text{ outside}} \frac{k_d(x_d, \bar x_d)^2}{k_d(x_d, x_d)\, k_d(\bar x_d, \bar x_d)}\Bigr)

at x. It is zero at the edge of the range and that of the prior far away. Predictions never have less. The default
kernel is a product over many inputs whose variance varies by orders of magnitude over the box; there the variance of
the targets stands for :math:`k(x, x)` where that is larger. With it f goes no further beyond the targets than a quarter
of their range, also within the range of every column: much of a box of many inputs is empty, and products of functions
may take any value there.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..errors import ExtrapolationWarning
from ..features.separable import SeparableKernel

#: What lies outside by these fractions of the largest value, and of the width of the range, is taken as rounding.
ROUNDING, ROUNDING_OF_WIDTH = 1e-7, 1e-3

#: Models with the default kernel go on so far outside the range, as a fraction of its width; beyond it f is held.
MARGIN = 0.1

#: In these models f goes no further beyond the training targets than this fraction of their range. Functions that are
#: steep at the edge may need more than `MARGIN`; products over many columns, all of them at their edges, reach any
#: value.
EXCESS = 0.25


class TrainingRange:
    """
    The smallest and the largest value of each column of the training rows, and the levels of a category. Levels that
    are not among these count as outside; f has its prior there, whatever the number of the level.

    :param lower: `(D,)`.
    :param upper: `(D,)`.
    :param variance: That of the targets.
    :param levels: The levels seen of each column that is a category.
    :param ends: The smallest and the largest target; by default unknown.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr.model.extrapolation import TrainingRange
        >>> known = TrainingRange(torch.zeros(2), torch.ones(2))
        >>> known.outside(torch.tensor([[0.5, 1.0], [0.5, 1.2]]))
        tensor([[False, False],
                [False,  True]])
    """

    def __init__(
        self,
        lower: Tensor,
        upper: Tensor,
        variance: float = 1.0,
        levels: Mapping[int, Tensor] | None = None,
        ends: tuple[float, float] = (-math.inf, math.inf),
    ):
        self.variance, self.ends = variance, ends
        self.levels = {d: values.detach().double().cpu() for d, values in (levels or {}).items()}
        self.lower, self.upper = lower.detach().double().cpu(), upper.detach().double().cpu()

    def outside(self, x: Tensor) -> Tensor:
        """
        Which values lie outside, `(..., D)`.

        :param x: Inputs `(..., D)`.
        """
        # Rounding to single precision takes nothing outside.
        slack = ROUNDING * torch.maximum(self.upper.abs(), self.lower.abs())
        width = self.upper - self.lower
        slack = torch.where(width > 0, torch.minimum(slack, ROUNDING_OF_WIDTH * width), slack)
        outside = (x < (self.lower - slack).to(x)) | (x > (self.upper + slack).to(x))
        for d, levels in self.levels.items():
            values = x[..., d].detach().double()
            outside[..., d] = ~(torch.isin(values, levels.to(x.device)) | values.isnan())
        return outside

    def nearest(self, x: Tensor, margin: float = 0.0) -> Tensor:
        """
        The nearest points within the range of every column, `(..., D)`.

        :param x: Inputs `(..., D)`.
        :param margin: The range is widened on either side by this fraction of its width.
        """
        extra = margin * (self.upper - self.lower)
        inside = torch.minimum(torch.maximum(x, (self.lower - extra).to(x)), (self.upper + extra).to(x))
        categories = list(self.levels)
        return (
            inside.index_copy(-1, torch.tensor(categories, device=x.device), x[..., categories])
            if categories
            else inside
        )

    def bounded(self, f: Tensor) -> Tensor:
        """
        Function values that go no further beyond the targets than a quarter of the targets' range.

        :param f: Values `(...)`.
        """
        excess = EXCESS * (self.ends[1] - self.ends[0])
        return f.clamp(self.ends[0] - excess, self.ends[1] + excess) if math.isfinite(excess) else f

    def warn(self, x: Tensor, action: str, weight: int = 1, stacklevel: int = 3) -> None:
        """
        Say how many rows lie outside, and in which columns.

        :param x: Inputs `(..., D)`.
        :param action: What is being done with them.
        :param weight: How many rows each of them stands for.
        :param stacklevel: As for :func:`warnings.warn`.
        """
        outside = self.outside(x).reshape(-1, x.shape[-1])
        if not outside.any():
            return
        number, columns = int(outside.any(-1).sum()), outside.any(0).nonzero().flatten().tolist()
        unseen = " or have levels never seen" if set(columns) & set(self.levels) else ""
        rows = f"{number} of {len(outside)} rows" if weight == 1 else f"About {weight * number} rows"
        warnings.warn(
            f"{rows} lie outside the training range{unseen}, in columns {columns}: {action}",
            ExtrapolationWarning,
            stacklevel=stacklevel,
        )

    def unknown_variance(
        self, separable: SeparableKernel, x: Tensor, warped: Callable[[Tensor], Tensor], most: float = math.inf
    ) -> Tensor | None:
        """
        The variance that f has at least, `(..., n)`; None where all rows lie within the range.

        :param separable: The kernel.
        :param x: Inputs `(..., n, D)`.
        :param warped: Inputs as the kernel sees them.
        :param most: What stands for :math:`k(x, x)` where that is larger.
        """
        outside = self.outside(x)
        if not outside.any():
            return None
        nearest = self.nearest(x)
        beyond, nearest = x - nearest, warped(nearest)
        here = nearest + beyond  # a warp that is nearly flat at the edge says nothing about what lies beyond it
        total = separable.outputscale().detach()
        determined = torch.ones_like(total)
        for d, mode in enumerate(separable.modes):
            covariance = mode.covariance().detach()
            left, right = covariance.mix(mode.basis(here[..., d])), covariance.mix(mode.basis(nearest[..., d]))
            # All three by the basis: what it leaves out is counted elsewhere, and at the edge the share is one.
            between, own, edge = (
                (a * covariance.variances * b).sum(-1) for a, b in ((left, right), (left, left), (right, right))
            )
            share = (between.square() / (own * edge).clamp_min(1e-300)).clamp(max=1.0)
            total = total * mode.prior_variance(here[..., d])
            determined = determined * torch.where(outside[..., d], share, torch.ones_like(share))
        return total.clamp(max=most) * (1 - determined)


class HeldInputs:
    """
    Inputs as a function sees them that is held from a tenth of the range's width outside on.

    :param known: The training range; None for no limit.
    :param warp: The input warp; None for none.
    """

    def __init__(self, known: TrainingRange | None, warp: Callable[[Tensor], Tensor] | None):
        self.known, self.warp = known, warp

    def __call__(self, x: Tensor) -> Tensor:
        """
        :param x: Inputs `(..., D)`.
        """
        x = x if self.known is None else self.known.nearest(x, MARGIN)
        return x if self.warp is None else self.warp(x)
