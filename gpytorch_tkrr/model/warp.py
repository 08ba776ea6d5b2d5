r"""Inputs that crowd in a corner of their range, spread out by their empirical distribution.

A few far points squeeze the rest of a column into a corner of the box, where one lengthscale must serve both. The warp
replaces such a column by its ranks, rescaled to the column's own range: monotone, smooth, learned once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

#: A column is warped if its distribution function differs by more than this from a uniform one's on the same range.
CROWDED = 0.25

#: Number of quantiles that describe the distribution of a column.
NUM_QUANTILES = 33


class InputWarp(nn.Module):
    r"""
    A monotone map of some columns of the inputs, with a continuous slope; the others stay as they are.

    Between the smallest and the largest value of a column the map is :math:`l + (u - l) \hat F(x)`, with
    :math:`\hat F` the empirical distribution function, interpolated between quantiles by monotone cubics (Fritsch &
    Carlson 1980). So the range and the units of a column do not change. Outside it goes on with the slope at the edge,
    at most about 1: where far points are rare it is nearly flat, and nothing runs away.

    :param columns: The columns that are mapped, `(C,)`.
    :param knots: Increasing values of each, `(C, K)`.
    :param levels: What they are mapped to, `(C, K)`.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr import InputWarp
        >>> x = torch.cat([torch.arange(20.0), torch.tensor([100.0])]).unsqueeze(-1)
        >>> warp = InputWarp.from_data(x)
        >>> warp(torch.tensor([[0.0], [10.0], [100.0], [101.0]])).flatten()
        tensor([  0.0000,  50.0000, 100.0000, 100.0882])
    """

    columns: Tensor
    knots: Tensor
    levels: Tensor
    slopes: Tensor

    def __init__(self, columns: Tensor, knots: Tensor, levels: Tensor):
        super().__init__()
        self.register_buffer("columns", columns.long())
        self.register_buffer("knots", knots.double())
        self.register_buffer("levels", levels.double())
        self.register_buffer("slopes", _slopes(self.knots, self.levels), persistent=False)

    @classmethod
    def from_data(
        cls, x: Tensor, lower: Tensor | None = None, upper: Tensor | None = None, *, keep: Sequence[int] = ()
    ) -> InputWarp:
        """
        A map of those columns that crowd: whose distribution function somewhere differs by more than a quarter
        from that of uniform values on the same range.

        :param x: Inputs, or a sample of them, `(n, D)`.
        :param lower: Smallest values of all inputs, `(D,)`; by default those of `x`.
        :param upper: Largest values.
        :param keep: Columns that stay as they are, such as levels of a category.
        """
        x = x.detach().double()
        lower = x.amin(0) if lower is None else lower.double()
        upper = x.amax(0) if upper is None else upper.double()
        columns, knots, levels = [], [], []
        for d in range(x.shape[1]):
            width = upper[d] - lower[d]
            if width == 0 or d in keep:
                continue
            column = x[:, d][~x[:, d].isnan()]
            quantiles, ranks = _quantiles(torch.cat([column, lower[d : d + 1], upper[d : d + 1]]))
            if (ranks - (quantiles - lower[d]) / width).abs().max() > CROWDED:
                columns.append(d)
                knots.append(quantiles)
                levels.append(lower[d] + width * ranks)
        if not columns:
            return cls(torch.empty(0), torch.empty(0, 2), torch.empty(0, 2)).to(x.device)
        longest = max(len(part) for part in knots)
        return cls(
            torch.tensor(columns, device=x.device),
            *(torch.stack(parts) for parts in zip(*map(_extended, knots, levels, [longest] * len(knots)), strict=True)),
        )

    def only(self, columns: Sequence[int]) -> InputWarp:
        """
        The same map of some of the columns.

        :param columns: Their numbers, among :attr:`columns`.
        """
        kept = torch.isin(self.columns, torch.as_tensor(columns, device=self.columns.device))
        return InputWarp(self.columns[kept], self.knots[kept], self.levels[kept])

    def forward(self, x: Tensor) -> Tensor:
        """
        :param x: Inputs `(..., D)`.
        :return: Mapped inputs of the same shape, differentiable.
        """
        if self.columns.numel() == 0:
            return x
        rows = x.reshape(-1, x.shape[-1])
        values = rows[:, self.columns].mT.double()  # (C, n)
        knots, levels, slopes = self.knots.double(), self.levels.double(), self.slopes.double()
        inner = torch.minimum(torch.maximum(values, knots[:, :1]), knots[:, -1:])
        right = torch.searchsorted(knots, inner.detach().contiguous()).clamp(1, knots.shape[1] - 1)
        (a, b), (c, d), (p, q) = (
            (part.gather(1, right - 1), part.gather(1, right)) for part in (knots, levels, slopes)
        )
        width = (b - a).clamp(min=torch.finfo(torch.float64).tiny)
        t = (inner - a) / width
        mapped = c + (d - c) * t.square() * (3 - 2 * t) + width * t * (1 - t) * (p * (1 - t) - q * t)
        mapped = mapped + torch.where(values < inner, slopes[:, :1], slopes[:, -1:]) * (values - inner)
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


def _extended(knots: Tensor, levels: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """More knots and levels on both sides, a range apart, with the slope at the edge, at most 1."""
    width = knots[-1] - knots[0]
    first, last = (((levels[i + 1] - levels[i]) / (knots[i + 1] - knots[i])).clamp(max=1.0) for i in (0, -2))
    steps = width * torch.arange(1, length - len(knots) + 2, dtype=knots.dtype, device=knots.device)
    return (
        torch.cat([knots[:1] - width, knots, knots[-1] + steps]),
        torch.cat([levels[:1] - first * width, levels, levels[-1] + last * steps]),
    )


def _slopes(knots: Tensor, levels: Tensor) -> Tensor:
    """Slopes at the knots that keep cubics between them monotone: weighted harmonic means, `(C, K)`."""
    widths = knots.diff(dim=-1).clamp(min=torch.finfo(torch.float64).tiny)
    secants = (levels.diff(dim=-1) / widths).clamp(min=torch.finfo(torch.float64).tiny)
    before, after = widths[:, 1:] + 2 * widths[:, :-1], 2 * widths[:, 1:] + widths[:, :-1]
    inner = (before + after) / (after / secants[:, :-1] + before / secants[:, 1:])
    return torch.cat([secants[:, :1], inner, secants[:, -1:]], -1)
