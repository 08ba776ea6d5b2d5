"""The rows of a fit: read once, summed up, kept where they fit into memory, and read again where they do not."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from .parallel import ONE_PROCESS, Processes, as_processes
from .source import Batch, Source, as_source, checked_batches, read_batch

#: Inputs and targets beyond this, and ranges below its inverse, are refused.
LARGEST = 1e100

#: Rows that the sample of a summary holds at most.
SAMPLE_ROWS = 16384

#: A column with more distinct whole numbers than this is not listed as levels of a category.
MAX_LEVELS = 1 << 16


@dataclass
class Summary:
    r"""
    What one pass over the data tells.

    :param num_rows: N.
    :param num_dims: D.
    :param mean: Mean of the targets, weighted.
    :param variance: Mean squared deviation of the targets from their mean, weighted.
    :param lower: Smallest inputs `(D,)`.
    :param upper: Largest inputs `(D,)`.
    :param mass: The sum of the row weights.
    :param sample: Inputs of evenly spaced rows `(n, D)`, of all rows where they are few.
    :param sample_weight: The row weights of the sample, `(n,)`.
    :param fingerprint: :math:`\sum_n \max(\pm y_n, 0) |x_{nd}|`, `(2, D)`, the same for the same rows in
        whatever order and batches.
    :param stride: The sample holds one row in so many.
    :param missing: How many rows have no value (NaN) in each column, `(D,)`; None where none lacks one.
    :param levels: For each column its distinct values, in order, where all of them are whole numbers and not too many;
        None for others.
    :param ends: The smallest and the largest target.

    Example:
        >>> import torch, gpytorch_tkrr as tkrr
        >>> x, y = torch.arange(6.0).reshape(6, 1), torch.arange(6.0)
        >>> whole, parts = tkrr.summarise((x, y)), [tkrr.summarise((x[i : i + 3], y[i : i + 3])) for i in (0, 3)]
        >>> (parts[0] + parts[1]).variance == whole.variance  # parts of the rows add up
        True
        >>> whole.num_rows, whole.mean, whole.upper.tolist(), whole.num_distinct()
        (6, 2.5, [5.0], [6])
    """

    num_rows: int
    num_dims: int
    mean: float
    variance: float
    lower: Tensor
    upper: Tensor
    mass: float
    sample: Tensor
    sample_weight: Tensor
    fingerprint: Tensor
    stride: int = 1
    levels: tuple[Tensor | None, ...] = ()
    ends: tuple[float, float] = (-math.inf, math.inf)
    missing: Tensor | None = None

    def __post_init__(self) -> None:
        while self.sample.shape[0] > SAMPLE_ROWS:
            self.sample, self.sample_weight = self.sample[::2].clone(), self.sample_weight[::2].clone()
            self.stride *= 2

    def num_distinct(self) -> list[int]:
        """How many distinct values each column of the sample has."""
        return [int(column[~column.isnan()].unique().numel()) for column in self.sample.mT]

    def num_missing(self) -> list[int]:
        """How many rows have no value in each column."""
        return [0] * self.num_dims if self.missing is None else self.missing.tolist()

    def to(self, device: torch.device | str) -> Summary:
        """
        The same on another device.

        :param device: The device.
        """
        names = ("lower", "upper", "sample", "sample_weight", "fingerprint")
        moved = {name: getattr(self, name).to(device) for name in names}
        levels = tuple(None if column is None else column.to(device) for column in self.levels)
        missing = None if self.missing is None else self.missing.to(device)
        return replace(self, levels=levels, missing=missing, **moved)

    def __add__(self, other: Summary) -> Summary:
        if self.num_dims != other.num_dims:
            raise InputError(f"Some rows have {self.num_dims} inputs, others {other.num_dims}.")
        mass = self.mass + other.mass
        shift, share = other.mean - self.mean, other.mass / mass
        stride = max(self.stride, other.stride)
        thinned = [(part, slice(None, None, stride // part.stride)) for part in (self, other)]
        return Summary(
            self.num_rows + other.num_rows,
            self.num_dims,
            self.mean + shift * share,
            self.variance * (1 - share) + other.variance * share + shift**2 * share * (1 - share),
            torch.minimum(self.lower, other.lower),
            torch.maximum(self.upper, other.upper),
            mass,
            torch.cat([part.sample[rows] for part, rows in thinned]),
            torch.cat([part.sample_weight[rows] for part, rows in thinned]),
            self.fingerprint + other.fingerprint,
            stride,
            tuple(map(_joined, self.levels, other.levels)),
            (min(self.ends[0], other.ends[0]), max(self.ends[1], other.ends[1])),
            _added(self.missing, other.missing),
        )


class TrainingData:
    """
    The rows of a fit, checked, targets mapped to numbers. Reading them changes no model.

    The first pass is made at once: it collects the summary and keeps the rows where all of them fit into `memory`. The
    first iteration then gives the kept rows away; any other reads the source again.

    :param source: See :func:`as_source`; where several processes take part, the rows of this one.
    :param targets: Maps raw targets `(n,)` to float64 ones.
    :param processes: The processes that share the data; the summary is that of all of them.
    :param device: Where batches are moved to; by default they stay where they are.
    :param memory: Bytes that the kept rows may take.
    :param allow_missing: Whether inputs may be NaN.

    :ivar summary: The summary of all rows.
    :ivar first_row: How many rows the processes before this one hold.
    :ivar is_kept: Whether every process has kept its rows.
    """

    def __init__(
        self,
        source: Source,
        *,
        targets: Callable[[Tensor], Tensor] | None = None,
        processes: Processes = ONE_PROCESS,
        device: torch.device | None = None,
        memory: int = 0,
        allow_missing: bool = False,
    ):
        self.source = source
        self.allow_missing = allow_missing
        self.targets = targets
        self.processes = processes
        self.device = device
        self.memory = memory
        self.mean: Callable[[Tensor], Tensor] | None = None
        self.inputs: Callable[[Tensor], Tensor] | None = None
        self.scale = 1.0
        self.own: Summary | None = None  # of the rows of this process
        self._kept: list[Batch] | None = None
        self.summary, self.first_row, self.is_kept = self._read()

    def center(self, mean: Callable[[Tensor], Tensor], inputs: Callable[[Tensor], Tensor] | None = None) -> None:
        """
        Free all batches that follow of their mean, and scale their targets to unit variance.

        :param mean: The mean at inputs `(n, D)`.
        :param inputs: A map of the inputs, applied after the mean.
        """
        self.mean, self.inputs = mean, inputs
        scale = math.sqrt(self.summary.variance)
        self.scale = scale if scale > 1e-12 * abs(self.summary.mean) and scale > 0 else 1.0

    def subset(self, chosen: Sequence[Batch]) -> TrainingData:
        """
        What is known of some of the rows: ranges, mean and scale stay those of all.

        :param chosen: Batches that have been read from here, with fewer rows; kept by the caller.
        """
        own = sum(batch.num_rows for batch in chosen)
        mass = sum(float(batch.num_rows if batch.weight is None else batch.weight.sum()) for batch in chosen)
        counts, masses = zip(*self.processes.gather((own, mass)), strict=True)
        part = copy.copy(self)
        part.summary = replace(self.summary, num_rows=sum(counts), mass=sum(masses))
        part.first_row, part.is_kept, part._kept = sum(counts[: self.processes.rank]), True, None
        return part

    def __iter__(self) -> Iterator[Batch]:
        kept, self._kept = self._kept, None
        if kept is None:
            yield from self._read_again()
            return
        kept.reverse()
        while kept:  # given away one by one, so that they are not held twice
            yield self._prepared(kept.pop())

    def _prepared(self, batch: Batch) -> Batch:
        y = batch.y if self.mean is None else batch.y - self.mean(batch.x)
        return Batch(batch.x if self.inputs is None else self.inputs(batch.x), y / self.scale, batch.weight)

    def _read_again(self) -> Iterator[Batch]:
        count, fingerprint = 0, torch.zeros(())
        for parts in self.source:
            batch = read_batch(parts, targets=self.targets, device=self.device)
            if batch.num_rows == 0:
                continue
            count += batch.num_rows
            fingerprint = fingerprint.to(batch.x) + _fingerprint(batch)
            yield self._prepared(batch)
        self._require_same_rows(count, fingerprint)

    def _require_same_rows(self, count: int, fingerprint: Tensor) -> None:
        """An error where a later pass has brought other rows than the first."""
        expected = 0 if self.own is None else self.own.num_rows
        remedy = "Every factor update reads them again: they must not change during a fit."
        if count != expected:
            raise InputError(f"The data had {expected} rows in the first pass and {count} in a later one. {remedy}")
        if self.own is not None and not torch.allclose(fingerprint.cpu(), self.own.fingerprint.cpu(), 1e-9, 0.0):
            raise InputError(
                "The data had other rows in a later pass than in the first, though as many. A DataLoader with shuffle "
                f"and drop_last leaves out others each time. {remedy}"
            )

    def _read(self) -> tuple[Summary, int, bool]:
        """The first pass: see the attributes."""
        summaries, kept = zip(*self.processes.collect(self._read_own), strict=True)
        present = [summary for summary in summaries if summary is not None]
        if not present:
            raise InputError("There are no rows of data.")
        total = reduce(operator.add, present)
        _require_values(total)
        _require_moderate(total)
        before = [summary.num_rows for summary in summaries[: self.processes.rank] if summary is not None]
        return total if self.device is None else total.to(self.device), sum(before), all(kept)

    def _read_own(self) -> tuple[Summary | None, bool]:
        """The summary of the rows of this process, and whether they have been kept."""
        total: Summary | None = None
        kept: list[Batch] | None = []
        left = self.memory
        batches = checked_batches(
            self.source, targets=self.targets, device=self.device, allow_missing=self.allow_missing
        )
        for batch in batches:
            summary = _summary(batch)
            total = summary if total is None else total + summary
            left -= 8 * batch.x.numel() + 16 * batch.num_rows
            if left < 0:
                kept = None
            elif kept is not None:
                kept.append(_copy(batch))
        self.own, self._kept = total, kept
        return total if total is None or self.processes.size == 1 else total.to("cpu"), kept is not None


def _require_moderate(summary: Summary) -> None:
    """An error for inputs and targets whose squares, or those of their range, floating-point numbers cannot hold."""
    largest = torch.maximum(summary.lower.abs(), summary.upper.abs())
    width = summary.upper - summary.lower
    extreme = (largest > LARGEST) | ((width > 0) & (width < 1 / LARGEST))
    if extreme.any():
        column = int(extreme.nonzero()[0, 0])
        raise InputError(
            f"Column {column} of the inputs reaches from {float(summary.lower[column]):.3g} to "
            f"{float(summary.upper[column]):.3g}. Scale it: values beyond {LARGEST:g}, and ranges below "
            f"{1 / LARGEST:g}, overflow when they are squared."
        )
    deviation = math.sqrt(summary.variance) if math.isfinite(summary.variance) else math.inf
    size = max(abs(summary.mean), deviation)  # the deviation of tiny targets is lost, their mean is not
    if size > LARGEST or 0 < deviation < 1 / LARGEST or 0 < size < 1 / LARGEST:
        raise InputError(
            f"The targets have the mean {summary.mean:.3g} and the standard deviation {deviation:.3g}. Scale them: "
            f"values beyond {LARGEST:g}, and deviations below {1 / LARGEST:g}, overflow when they are squared."
        )


def _summary(batch: Batch) -> Summary:
    """The summary of a batch; it shares no memory with the source, which may use it again."""
    weight = torch.ones_like(batch.y) if batch.weight is None else batch.weight.clone()
    mass = float(weight.sum())
    mean = float(weight @ batch.y) / mass
    variance = float(weight @ (batch.y - mean) ** 2) / mass
    missing = batch.x.isnan()
    has_missing = bool(missing.any())
    if has_missing:
        lower = torch.where(missing, torch.inf, batch.x).amin(0)
        upper = torch.where(missing, -torch.inf, batch.x).amax(0)
    else:
        lower, upper = batch.x.amin(0), batch.x.amax(0)
    x, fingerprint = batch.x.clone(), _fingerprint(batch)
    levels = tuple(_levels(*column) for column in zip(batch.x.mT, lower, upper, strict=True))
    ends = float(batch.y.min()), float(batch.y.max())
    return Summary(
        batch.num_rows,
        x.shape[1],
        mean,
        variance,
        lower,
        upper,
        mass,
        x,
        weight,
        fingerprint,
        levels=levels,
        ends=ends,
        missing=missing.sum(0) if has_missing else None,
    )


def _levels(column: Tensor, lower: Tensor, upper: Tensor) -> Tensor | None:
    """The distinct values of a column of whole numbers, where they lie close together or are few."""
    if not bool(torch.isfinite(lower)):
        return column.new_empty(0)  # no value here, others may follow
    if bool(column.isnan().any()):
        column = column[~column.isnan()]
    head = column[:16]
    if not bool((head == head.round()).all()) or not bool((column == column.round()).all()):
        return None
    if float(upper - lower) <= max(4 * len(column), MAX_LEVELS):
        levels = (column - lower).long().bincount().nonzero().squeeze(-1) + lower
    else:
        levels = column.unique()
    return levels if len(levels) <= MAX_LEVELS else None


def _added(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """The counts of two parts."""
    return right if left is None else left if right is None else left + right


def _require_values(summary: Summary) -> None:
    """An error where a column has no value at all."""
    empty = ~torch.isfinite(summary.lower)
    if empty.any():
        raise InputError(f"Column {int(empty.nonzero()[0, 0])} of the inputs holds no value, only NaN. Leave it out.")


def _joined(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """The levels of two parts of a column."""
    if left is None or right is None:
        return None
    levels = torch.cat([left, right]).unique()
    return levels if len(levels) <= MAX_LEVELS else None


def _copy(batch: Batch) -> Batch:
    """A batch that shares no memory with its source, which may use it again; inputs column by column."""
    weight = None if batch.weight is None else batch.weight.clone()
    return Batch(batch.x.mT.clone(memory_format=torch.contiguous_format).mT, batch.y.clone(), weight)


def _fingerprint(batch: Batch) -> Tensor:
    """See :class:`Summary`; sums of positive numbers, so that rounding stays relative."""
    return torch.stack([batch.y.clamp(min=0), -batch.y.clamp(max=0)]) @ batch.x.abs().nan_to_num(0.5)


def summarise(data: Any, *, group: Any = None) -> Summary:
    """
    One pass over the data: number of rows, mean and variance of the targets, range of the inputs.

    :param data: See `data` of :func:`~gpytorch_tkrr.fit_als`.
    :param group: See `group` of :func:`~gpytorch_tkrr.fit_als`.

    Example:
        >>> import torch, gpytorch_tkrr as tkrr
        >>> summary = tkrr.summarise((torch.tensor([[0.0], [4.0]]), torch.tensor([1.0, 2.0])))
        >>> summary.num_rows, summary.mean
        (2, 1.5)
        >>> tkrr.Domain.from_bounds(summary.lower, summary.upper, boundary_factor=1.5)
        Domain([-1, 5])
    """
    return TrainingData(as_source(data), processes=as_processes(group)).summary
