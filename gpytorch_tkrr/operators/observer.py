r"""What likelihoods tell the kernel that a covariance comes from: how precise the data are, and how many."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

#: A diagonal of which a kernel has added all but this part itself is no likelihood's noise.
_NO_NOISE = 1e-3


@dataclass
class DataFacts:
    r"""
    What a kernel has been told.

    :param precision: :math:`s\, \sigma / \bar k`, with s the standard deviation of the residuals, :math:`\sigma` that
        of the noise and :math:`\bar k` the mean prior variance of the rows: how small an error of the covariance,
        relative to the prior variance, must be. None where no likelihood has told.
    :param num_rows: How many rows there are; None where that is not known, or where the kernel is a part of the
        covariance only.
    :param noise: :math:`\sigma^2 / \bar k`.
    """

    precision: float | None = None
    num_rows: int | None = None
    noise: float | None = None

    def note(self, prior: Tensor, noise: Tensor, spread: Tensor) -> None:
        """
        :param prior: Mean prior variance of the rows `(...)`.
        :param noise: Variance of the noise `(...)`.
        :param spread: Variance of the residuals `(...)`.
        """
        ratio = float(((spread * noise).sqrt() / prior.clamp_min(1e-300)).min())
        if math.isfinite(ratio) and ratio > 0:
            self.precision = ratio
            self.noise = float((noise / prior.clamp_min(1e-300)).min())


class Observer:
    """
    Hears for a kernel that has been evaluated at training rows.

    :param facts: Where it writes down what it hears.
    :param missing: Independent variance that the kernel has added itself, relative to what its functions represent;
        the largest of a batch.
    """

    def __init__(self, facts: DataFacts, missing: float = 0.0):
        self.facts = facts
        self.missing = missing

    def added(self, prior: Tensor) -> Tensor:
        """
        The variance that the kernel has added itself.

        :param prior: Mean over the rows of the prior variance that its functions represent `(...)`.
        """
        return self.missing * prior

    def note(self, prior: Tensor, noise: Tensor, spread: Tensor, num_rows: int | None) -> None:
        """
        :param prior: As in :meth:`added`.
        :param noise: Variance of the noise `(...)`.
        :param spread: Variance of the residuals `(...)`.
        :param num_rows: N, where the kernel makes up the whole covariance of N rows.
        """
        self.facts.note(prior + self.added(prior), noise, spread)
        if num_rows is not None:
            self.facts.num_rows = num_rows

    def hear(self, prior: Tensor, diagonal: Tensor, residual: Tensor | None, num_rows: int | None) -> None:
        """
        :param prior: As in :meth:`added`.
        :param diagonal: All independent variance of the rows `(..., N)` or `(..., 1)`.
        :param residual: Targets minus prior mean `(..., N)`; where they are not known, their variance is taken for that
            of the prior.
        :param num_rows: N, where the kernel makes up the whole covariance of N rows.
        """
        total = 1 / (1 / diagonal.double()).mean(-1)
        noise = total - self.added(prior)
        if bool((noise <= _NO_NOISE * total).all()):
            return  # there is no likelihood yet
        if residual is None:
            spread = prior
        else:
            known = residual.where(~residual.isnan(), residual.nanmean(-1, keepdim=True)).double()
            spread = known.var(-1, correction=0)
        self.note(prior, noise.clamp_min(_NO_NOISE * total), spread, num_rows)


class SumObserver(Observer):
    """
    Hears for the terms of a sum of covariances.

    :param parts: Their observers, None for a kernel that does not listen, each with its part of the prior variance
        `(...)`.
    """

    def __init__(self, parts: Sequence[tuple[Observer | None, Tensor]]):
        self.parts = [(observer, share) for observer, share in parts if observer is not None]

    def added(self, prior: Tensor) -> Tensor:
        return sum((observer.added(share * prior) for observer, share in self.parts), 0.0 * prior)

    def note(self, prior: Tensor, noise: Tensor, spread: Tensor, num_rows: int | None) -> None:
        for observer, share in self.parts:
            observer.note(share * prior, noise, spread, None)
