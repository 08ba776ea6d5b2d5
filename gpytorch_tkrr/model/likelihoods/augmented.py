r"""
An observation model as the Gibbs sampler sees it: given some parameters and a working target :math:`t_n` with a weight
:math:`w_n` for each row, the model is a regression :math:`t_n \sim N(f(x_n), s^2 / w_n)`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import numpy as np
from gpytorch.kernels import Kernel
from torch import Tensor

from ...data.source import Batch, RowFunction, Working
from ...features.separable import SeparableKernel
from ..augmentation.row_values import RowValues

#: Parameters of an observation model by name.
Parameters = dict[str, Tensor]

#: Sums a function of all rows, with so many values, over all batches and processes.
SumRows = Callable[[RowFunction, int], Tensor]


class Augmentation(ABC):
    """
    An observation model inside a Gibbs sampler, for targets as the sampler sees them (scaled, free of the mean). It
    holds no state: all that changes is in the parameters, which are kept with each draw.
    """

    #: Names of the parameters that are drawn; the others keep their values.
    free: tuple[str, ...] = ()

    #: Whether y given f is normal, with one variance for all rows and the weights of the data: f can be integrated out.
    is_gaussian: bool = False

    #: The part of the warm-up that is not left out, even if the noise has stopped falling.
    warmup_part: float = 0.0

    #: How many times as many sweeps there are by default, where parts of the noise are freed one after the other.
    sweep_factor: float = 1.0

    #: A function of the inputs that is drawn along with f; None where there is none.
    second: SecondFunction | None = None

    @property
    def watched(self) -> tuple[str, ...]:
        """Names of the parameters that say whether chains agree."""
        return self.free

    @abstractmethod
    def start(self) -> Parameters:
        """Parameters that a chain starts from."""

    def scaled(self, parameters: Parameters) -> Parameters:
        """
        Parameters in the sampler's units.

        :param parameters: In the units of the targets.
        """
        return parameters

    def natural(self, parameters: Parameters) -> Parameters:
        """
        Parameters in the units of the targets, each `(S, ...)`.

        :param parameters: In the sampler's units.
        """
        return parameters

    def noise(self, parameters: Parameters) -> float:
        """
        :math:`s^2` of the working regression.

        :param parameters: In the sampler's units.
        """
        return 1.0

    def before_sweep(
        self, parameters: Parameters, sum_rows: SumRows, rng: np.random.Generator, progress: float
    ) -> Parameters:
        """
        Draw parameters from sums over the rows, once before each sweep.

        :param parameters: The present ones.
        :param sum_rows: `sum_rows(function, K)` adds up `function(batch, f, first_row)`, `(K,)`, over all rows.
        :param rng: Source of random numbers, the same in all processes.
        :param progress: The part of the warm-up that is over, 1 after it.
        """
        return parameters

    @abstractmethod
    def working(self, parameters: Parameters, rng: np.random.Generator) -> Working:
        """
        Working targets minus f, and weights, of the next visit of a mode; called once for all batches.

        :param parameters: The present ones.
        :param rng: Source of random numbers, the same in all processes. Numbers for single rows are made from a key, by
            :func:`~gpytorch_tkrr.data.keyed.row_uniform`.
        """

    def squares(
        self, parameters: Parameters, rng: np.random.Generator
    ) -> Callable[[Batch, Tensor, int], tuple[Tensor, ...]]:
        r"""
        What the rows say of their noise variances, for a function of the inputs that these depend on: numbers `(n,)`
        that are :math:`\chi^2_1` times the variance of the row, independent of each other, given f.

        :param parameters: The present ones.
        :param rng: See :meth:`working`.
        """
        working = self.working(parameters, rng)

        def squares(batch: Batch, f: Tensor, first_row: int) -> tuple[Tensor, ...]:
            e, weight = working(batch, f, first_row)
            return (e.square() if weight is None else e.square() * weight,)

        return squares

    def after_visit(self, parameters: Parameters, square: float, count: float, rng: np.random.Generator) -> Parameters:
        """
        Draw parameters given the new factor and the working targets.

        :param parameters: The present ones.
        :param square: Weighted sum of squared working residuals.
        :param count: N.
        :param rng: Source of random numbers, the same in all processes.
        """
        return parameters

    def concern(self, draws: Parameters) -> str | None:
        """
        What is worth a warning about drawn parameters, or None.

        :param draws: In the units of the targets, each `(S, ...)`.
        """
        return None

    def slowness(self, draws: Parameters, mean: float) -> str | None:
        """
        Why chains may not have come far enough, or None.

        :param draws: In the units of the targets, each `(S, ...)`.
        :param mean: Of the targets.
        """
        return None


class SecondFunction(ABC):
    """
    A function g of the inputs, beside f, that an observation model has: a sum of products as f is, drawn by a sampler
    of its own before each sweep of f. Its state is kept among the parameters, under names with a prefix.

    :ivar kernel: The kernel object, whose hyperparameters are drawn too.
    :ivar separable: The same, read mode by mode.
    :ivar rank: R of g.
    """

    #: Names of its parts among the parameters begin with this, which ends in a dot.
    prefix: ClassVar[str]

    #: The part of the warm-up during which it is zero.
    free_from: ClassVar[float] = 0.0

    kernel: Kernel
    separable: SeparableKernel
    rank: int

    @abstractmethod
    def total(self, g: Tensor, parameters: Parameters) -> Tensor:
        """
        What the data see of g, which has a meaning of its own: here and there a parameter is part of it, `(*P, n)`.

        :param g: Its values, `(*P, n)`.
        :param parameters: Draws, each `(*P, ...)`.
        """

    @abstractmethod
    def row_weight(self, parameters: Parameters) -> Callable[[Batch, int], Tensor]:
        """
        Weights that g gives the rows in the regression of f: a function of a batch and the number of its first row.

        :param parameters: The present ones.
        """

    @abstractmethod
    def working(self, parameters: Parameters, f: RowValues, rng: np.random.Generator) -> Working:
        """
        Working targets minus g, and weights, of the next visit of a mode of g, whose noise variance is 1.

        :param parameters: The present ones.
        :param f: Values of f at the rows.
        :param rng: See :meth:`Augmentation.working`.
        """


def is_reported(name: str) -> bool:
    """
    Whether a parameter is a number to look at: parts of functions have a dot in their name.

    :param name: Its name.
    """
    return "." not in name
