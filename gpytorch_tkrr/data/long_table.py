"""Several targets for each row as a long table: one row for each target that was observed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from .parallel import ONE_PROCESS, Processes
from .source import as_source, as_tensor


class LongTable:
    """
    Batches `(x, y)` with y of shape `(n, T)` as batches of a table with one target: the number of the output is one
    more column of the inputs, and targets are standardised. NaN targets were not observed and have no row.

    :param data: `(x, y)` or `(x, y, weight)`, or an iterable of such batches.
    :param num_outputs: T.
    :param mean: What is taken from the targets of each output, `(T,)`; by default nothing.
    :param scale: What they are divided by then, `(T,)`.
    :param allow_missing: Whether inputs may be NaN.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr.data.long_table import LongTable
        >>> y = torch.tensor([[1.0, 5.0], [float("nan"), 6.0]])
        >>> (x, targets), = LongTable((torch.tensor([[0.5], [0.75]]), y), 2)
        >>> x.tolist(), targets.tolist()
        ([[0.5, 0.0], [0.5, 1.0], [0.75, 1.0]], [1.0, 5.0, 6.0])
    """

    def __init__(
        self,
        data: Any,
        num_outputs: int,
        mean: Tensor | None = None,
        scale: Tensor | None = None,
        *,
        allow_missing: bool = False,
    ):
        self.source, self.num_outputs, self.allow_missing = as_source(data), num_outputs, allow_missing
        self.mean = torch.zeros(num_outputs, dtype=torch.float64) if mean is None else mean.double()
        self.scale = torch.ones(num_outputs, dtype=torch.float64) if scale is None else scale.double()

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        first_row = 0
        for parts in self.source:
            x, y, *weight = (as_tensor(part) for part in parts)
            x, y = (part.double().unsqueeze(-1) if part.dim() == 1 else part.double() for part in (x, y))
            self._check(x, y, first_row)
            first_row += len(x)
            row, output = torch.isnan(y).logical_not().nonzero(as_tuple=True)
            inputs = torch.cat([x[row], output.unsqueeze(-1).to(x)], -1)
            targets = (y[row, output] - self.mean.to(y)[output]) / self.scale.to(y)[output]
            yield (inputs, targets, *(part[row] for part in weight))

    def _check(self, x: Tensor, y: Tensor, first_row: int) -> None:
        if x.dim() != 2 or y.shape != (len(x), self.num_outputs):
            raise InputError(
                f"Inputs must have shape (N, D) and targets (N, {self.num_outputs}), one column for each output; got "
                f"{tuple(x.shape)} and {tuple(y.shape)}."
            )
        known = torch.isfinite(x) | x.isnan() if self.allow_missing else torch.isfinite(x)
        wrong = ~known.all(-1) | torch.isinf(y).any(-1)
        if wrong.any():
            row = first_row + int(wrong.nonzero()[0, 0])
            raise InputError(
                f"Row {row} holds NaN or infinite inputs, or infinite targets. (A target that is NaN was not observed.)"
            )

    def moments(self, processes: Processes = ONE_PROCESS) -> tuple[Tensor, Tensor]:
        """
        Mean and standard deviation of the targets of each output, `(T,)` each, by one pass; 1 for those that are
        constant.

        :param processes: The processes that share the rows.
        """
        shift: Tensor | None = None
        total = torch.zeros(3, self.num_outputs, dtype=torch.float64)
        for x, y, *_ in LongTable(self.source, self.num_outputs, allow_missing=self.allow_missing):
            output = x[:, -1].long().cpu()
            values = y.cpu()
            if shift is None:
                shift = _first_of_each(values, output, self.num_outputs)
            away = values - shift[output]
            total.index_add_(1, output, torch.stack([torch.ones_like(away), away, away.square()]))
        return _joined_moments(processes.gather((shift, total)))


def _first_of_each(values: Tensor, output: Tensor, num_outputs: int) -> Tensor:
    """A value of each output that has one, else zero: what sums are taken about, against rounding."""
    first = torch.zeros(num_outputs, dtype=torch.float64)
    first[output.flip(0)] = values.flip(0)
    return first


def _joined_moments(parts: Sequence[tuple[Tensor | None, Tensor]]) -> tuple[Tensor, Tensor]:
    """Means and standard deviations from the sums of all processes, each about a shift of its own."""
    known = [(shift, total) for shift, total in parts if shift is not None]
    if not known:
        raise InputError("No target was observed.")
    counts = torch.stack([total[0] for _, total in known])
    num = counts.sum(0)
    if bool((num == 0).any()):
        empty = (num == 0).nonzero().flatten().tolist()
        raise InputError(f"No target of output {empty[0]} was observed. Leave this output out.")
    means = torch.stack([shift + total[1] / total[0].clamp(min=1) for shift, total in known])
    spreads = torch.stack([total[2] - total[1].square() / total[0].clamp(min=1) for _, total in known])
    mean = (counts * means).sum(0) / num
    variance = (spreads + counts * (means - mean).square()).sum(0) / num
    scale = variance.clamp(min=0).sqrt()
    return mean, torch.where(scale > 1e-12 * mean.abs(), scale, torch.ones_like(scale))
