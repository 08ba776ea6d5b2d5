"""Where data come from: anything that can be iterated again and again in batches of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import InputError

#: Rows per batch of tensors in memory: few enough for the cache, enough to count distinct values.
BATCH_ROWS = 65536


@dataclass
class Batch:
    """
    Rows of data, float64.

    :param x: Inputs `(n, D)`.
    :param y: Targets, the mean removed, `(n,)`.
    :param weight: Row weights `(n,)`, or None for ones.
    """

    x: Tensor
    y: Tensor
    weight: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return self.x.shape[0]


class TensorSource:
    """
    Tensors in memory as a source of batches.

    :param x: Inputs `(N, D)`.
    :param y: Targets `(N,)`.
    :param weight: Row weights `(N,)`, or None for ones.
    :param batch_rows: Rows per batch.
    """

    def __init__(self, x: Tensor, y: Tensor, weight: Tensor | None = None, *, batch_rows: int = BATCH_ROWS):
        self.x, self.y, self.weight, self.batch_rows = x, y, weight, batch_rows

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for start in range(0, self.x.shape[0], self.batch_rows):
            rows = slice(start, start + self.batch_rows)
            pair = self.x[rows], self.y[rows]
            yield pair if self.weight is None else (*pair, self.weight[rows])


Source = Iterable[tuple[Tensor, ...]]


def as_source(data: object) -> Source:
    """
    A pair of tensors, or an iterable of batches that starts afresh each time, as a source.

    :param data: `(x, y)` or `(x, y, weight)`, or an iterable of such batches, for instance a DataLoader.
    """
    if isinstance(data, (tuple, list)) and len(data) in (2, 3) and all(isinstance(part, Tensor) for part in data):
        return TensorSource(*data)
    if not isinstance(data, Iterable):
        raise InputError(
            f"data must be a pair of tensors (x, y) or an iterable of such batches; got {type(data).__name__}."
        )
    if isinstance(data, Iterator):
        raise InputError(
            f"data is a one-shot iterator ({type(data).__name__}), but every factor update reads the data again. Pass "
            "an object whose iteration starts afresh each time: tensors, a list of batches, or a DataLoader."
        )
    return data


@dataclass
class Summary:
    """
    What one pass over the data tells.

    :param num_rows: N.
    :param num_dims: D.
    :param mean: Mean of the targets, weighted.
    :param variance: Mean squared deviation of the targets from their mean, weighted.
    :param lower: Smallest inputs `(D,)`.
    :param upper: Largest inputs `(D,)`.
    """

    num_rows: int
    num_dims: int
    mean: float
    variance: float
    lower: Tensor
    upper: Tensor


class TrainingData:
    """
    A source, its targets prepared: checked, mapped to numbers, freed of the mean and scaled.

    The first pass is made at once; set :attr:`mean` (a function of the inputs) and :attr:`scale` after it.

    :param source: See :func:`as_source`.
    :param targets: Maps raw targets `(n,)` to float64 ones.
    """

    def __init__(self, source: Source, *, targets: Callable[[Tensor], Tensor] | None = None):
        self.source = source
        self.targets = targets
        self.mean: Callable[[Tensor], Tensor] | None = None
        self.scale = 1.0
        self.summary = self._summarise()

    def __iter__(self) -> Iterator[Batch]:
        for parts in self.source:
            batch = self._read(parts)
            if self.mean is not None:
                batch.y = batch.y - self.mean(batch.x)
            batch.y = batch.y / self.scale
            yield batch

    def _read(self, parts: tuple[Tensor, ...]) -> Batch:
        if len(parts) not in (2, 3) or not all(isinstance(part, Tensor) for part in parts):
            kinds = ", ".join(type(part).__name__ for part in parts)
            raise InputError(f"Data must come as tensors (x, y) or (x, y, weight); got ({kinds}).")
        x, y = parts[0].detach().double(), parts[1].detach()
        x = x.unsqueeze(-1) if x.dim() == 1 else x
        y = y.squeeze(-1) if y.dim() == 2 and y.shape[-1] == 1 else y
        if x.dim() != 2 or y.shape != x.shape[:1]:
            raise InputError(
                f"Inputs must have shape (N, D) and targets (N,); got {tuple(x.shape)} and {tuple(y.shape)}."
            )
        y = y.double() if self.targets is None else self.targets(y)
        weight = parts[2].detach().double() if len(parts) > 2 else None
        return Batch(x, y, weight)

    def _summarise(self) -> Summary:
        count, total, mean, deviation = 0, 0.0, 0.0, 0.0
        lower = upper = None
        for batch in self:
            if batch.num_rows == 0:
                continue
            _check_finite(batch, count)
            count += batch.num_rows
            weight = torch.ones_like(batch.y) if batch.weight is None else batch.weight
            mass = float(weight.sum())
            batch_mean = float(weight @ batch.y) / mass
            shift = batch_mean - mean
            deviation += float(weight @ (batch.y - batch_mean) ** 2) + shift**2 * total * mass / (total + mass)
            total += mass
            mean += shift * mass / total
            low, high = batch.x.amin(0), batch.x.amax(0)
            lower = low if lower is None else torch.minimum(lower, low)
            upper = high if upper is None else torch.maximum(upper, high)
        if lower is None or upper is None:
            raise InputError("There are no rows of data.")
        return Summary(count, lower.shape[0], mean, deviation / total, lower, upper)


def _check_finite(batch: Batch, offset: int) -> None:
    for name, values in (("inputs", batch.x), ("targets", batch.y.unsqueeze(-1))):
        bad = ~torch.isfinite(values).all(-1)
        if bad.any():
            first = offset + int(bad.nonzero()[0, 0])
            raise InputError(
                f"The {name} hold NaN or infinite values (the first is in row {first}). Drop or impute these rows."
            )
    if batch.weight is not None and not (torch.isfinite(batch.weight) & (batch.weight > 0)).all():
        raise InputError("Row weights must be positive and finite.")
