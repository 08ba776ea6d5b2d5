r"""Inputs that crowd in a corner of their range, spread out by their empirical distribution.

A few far points squeeze the rest of a column into a corner of the box, where one lengthscale must serve both. The warp
replaces such a column by its ranks, rescaled to the column's own range: monotone, piecewise linear, learned once.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

#: A column is warped if its distribution function differs by more than this from a uniform one's on the same range.
CROWDED = 0.25

#: Number of quantiles that describe the distribution of a column.
NUM_QUANTILES = 33


class InputWarp(nn.Module):
    r"""
    A monotone, piecewise-linear map of some columns of the inputs; the others stay as they are.

    Between the smallest and the largest value of a column the map is :math:`l + (u - l) \hat F(x)`, with
    :math:`\hat F` the empirical distribution function, interpolated between quantiles. Outside it goes on with slope 1.
    So the range and the units of a column do not change.

    :param columns: The columns that are mapped, `(C,)`.
    :param knots: Increasing values of each, `(C, K)`.
    :param levels: What they are mapped to, `(C, K)`.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr import InputWarp
        >>> x = torch.cat([torch.arange(20.0), torch.tensor([100.0])]).unsqueeze(-1)
        >>> warp = InputWarp.from_data(x)
        >>> warp(torch.tensor([[0.0], [10.0], [100.0], [101.0]])).flatten()
        tensor([  0.,  50., 100., 101.])
    """

    columns: Tensor
    knots: Tensor
    levels: Tensor

    def __init__(self, columns: Tensor, knots: Tensor, levels: Tensor):
        super().__init__()
        self.register_buffer("columns", columns.long())
        self.register_buffer("knots", knots.double())
        self.register_buffer("levels", levels.double())

    @classmethod
    def from_data(cls, x: Tensor, lower: Tensor | None = None, upper: Tensor | None = None) -> InputWarp:
        """
        A map of those columns that crowd: whose distribution function somewhere differs by more than a quarter
        from that of uniform values on the same range.

        :param x: Inputs, or a sample of them, `(n, D)`.
        :param lower: Smallest values of all inputs, `(D,)`; by default those of `x`.
        :param upper: Largest values.
        """
        x = x.detach().double()
        lower = x.amin(0) if lower is None else lower.double()
        upper = x.amax(0) if upper is None else upper.double()
        columns, knots, levels = [], [], []
        for d in range(x.shape[1]):
            width = upper[d] - lower[d]
            if width == 0:
                continue
            quantiles, ranks = _quantiles(torch.cat([x[:, d], lower[d : d + 1], upper[d : d + 1]]))
            if (ranks - (quantiles - lower[d]) / width).abs().max() > CROWDED:
                columns.append(d)
                knots.append(quantiles)
                levels.append(lower[d] + width * ranks)
        if not columns:
            return cls(torch.empty(0), torch.empty(0, 2), torch.empty(0, 2)).to(x.device)
        longest = max(len(part) for part in knots)
        return cls(
            torch.tensor(columns, device=x.device),
            torch.stack([_extended(part, longest) for part in knots]),
            torch.stack([_extended(part, longest) for part in levels]),
        )

    def forward(self, x: Tensor) -> Tensor:
        """
        :param x: Inputs `(..., D)`.
        :return: Mapped inputs of the same shape, differentiable.
        """
        if self.columns.numel() == 0:
            return x
        rows = x.reshape(-1, x.shape[-1])
        values = rows[:, self.columns].mT.double()  # (C, n)
        knots, levels = self.knots.double(), self.levels.double()
        right = torch.searchsorted(knots, values.detach().contiguous()).clamp(1, knots.shape[1] - 1)
        a, b, c, d = (part.gather(1, index) for part in (knots, levels) for index in (right - 1, right))
        mapped = c + (values - a) * ((d - c) / (b - a).clamp(min=torch.finfo(torch.float64).tiny))
        return rows.index_copy(1, self.columns, mapped.mT.to(x.dtype)).reshape(x.shape)

    def extra_repr(self) -> str:
        return f"columns={self.columns.tolist()}"


def _quantiles(values: Tensor) -> tuple[Tensor, Tensor]:
    """At most NUM_QUANTILES distinct values and their mid-ranks, from 0 to 1."""
    distinct, counts = values.unique(return_counts=True)
    counts = counts.double()  # a quotient of integers would be float32, and so would the levels made of it
    ranks = counts.cumsum(0) - counts / 2
    ranks = (ranks - ranks[0]) / (ranks[-1] - ranks[0])
    if distinct.numel() > NUM_QUANTILES:
        wanted = torch.linspace(0, 1, NUM_QUANTILES, dtype=torch.float64, device=values.device)
        kept = torch.searchsorted(ranks, wanted).clamp(max=distinct.numel() - 1).unique()
        distinct, ranks = distinct[kept], ranks[kept]
    return distinct, ranks


def _extended(part: Tensor, length: int) -> Tensor:
    """The same knots or levels with more on both sides, a range apart: there the map has slope 1."""
    width = part[-1] - part[0]
    after = part[-1] + width * torch.arange(1, length - len(part) + 2, dtype=part.dtype, device=part.device)
    return torch.cat([part[:1] - width, part, after])
