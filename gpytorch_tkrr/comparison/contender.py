"""
What :func:`gpytorch_tkrr.compare` asks of a model, and the models that it knows by name.

Inputs come in the user's own units, `(N, D)` in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from ..data.progress import ProgressBar, progress_bar
from ..errors import NotApplicableError
from ..tables.task import Task
from .distribution import Distribution

#: Means and standard deviations of the targets, or their distribution, or probabilities of class 1, or of each of
#: several classes.
Prediction = tuple[Tensor, Tensor] | Distribution | Tensor

#: Rows that are predicted at a time.
BATCH = 1024


@dataclass
class Contender:
    """
    A model that can be compared. One of your own needs no more than `fit` and `predict`; see
    :func:`gpytorch_tkrr.compare`.

    :param task: Regression or classification.
    :param seed: Seed of all that is random.
    :param progress: Whether to show a progress bar.
    :param num_classes: Classes are 0 to K - 1.
    :param categories: Columns of level numbers, and how many levels each has; for those that know levels.
    :param noise: The noise of a regression, for those that have a choice; see :func:`gpytorch_tkrr.compare`.
    """

    task: Task = "regression"
    seed: int = 0
    progress: bool = False
    num_classes: int = 2
    categories: dict[int, int] = field(default_factory=dict)
    noise: str = "auto"

    title: ClassVar[str]
    note: ClassVar[str] = ""

    #: Whether it is run where no models are named.
    is_default: ClassVar[bool] = True

    #: Whether a category is one column of level numbers; other models get a column of zeros and ones for each level.
    knows_levels: ClassVar[bool] = False

    def fit(self, x: Tensor, y: Tensor) -> None:
        """
        Train the model.

        :param x: Inputs `(N, D)`.
        :param y: Targets `(N,)`; classes are 0, 1, ...
        """
        raise NotImplementedError

    def predict(self, x: Tensor) -> Prediction:
        """
        :param x: Inputs `(n, D)`.
        :return: Means and standard deviations of new observations `(n,)`, or their distribution, where that is not
            normal. For classes probabilities of class 1 `(n,)`, or of all classes `(n, K)`.
        """
        raise NotImplementedError

    @property
    def num_parameters(self) -> int | None:
        """Trained numbers, weights and hyperparameters; None where this says nothing."""
        return None

    @property
    def chosen(self) -> str:
        """What the training rows have decided, in a word or two for the table."""
        return ""

    @property
    def remark(self) -> str:
        """What there is to say of a fit, in a sentence or two."""
        return ""

    @contextmanager
    def _bar(self, num_steps: int) -> Iterator[ProgressBar]:
        bar = progress_bar(self.progress, num_steps, self.title, "step")
        try:
            yield bar
        finally:
            bar.close()

    def _needs_regression(self) -> None:
        if self.task != "regression":
            raise NotApplicableError(f"{self.title} is exact for a Gaussian likelihood; it has none for classes.")

    def _needs_two_classes(self) -> None:
        if self.task == "classification" and self.num_classes != 2:
            raise NotApplicableError(f"{self.title} has a Bernoulli likelihood; there are {self.num_classes} classes.")


Maker = TypeVar("Maker", bound=Callable[..., Contender])

#: The models, by the name that `models=` takes, in the order of the table.
CONTENDERS: dict[str, Callable[..., Contender]] = {}


def register_contender(name: str) -> Callable[[Maker], Maker]:
    """
    Make a model known to :func:`gpytorch_tkrr.compare` and to the command line.

    :param name: The name that `models=` takes.

    Example:
        >>> from gpytorch_tkrr.comparison.baselines import MeanBaseline
        >>> from gpytorch_tkrr.comparison.contender import CONTENDERS, register_contender
        >>> @register_contender("median")
        ... class MedianBaseline(MeanBaseline):
        ...     title = "median"
        ...     def fit(self, x, y):
        ...         self.mean, self.sd = y.median(), y.std()
        >>> CONTENDERS.pop("median").title
        'median'
    """

    def register(maker: Maker) -> Maker:
        CONTENDERS[name] = maker
        return maker

    return register


class Scaler:
    """
    Standardises columns by the mean and the standard deviation of the training rows.

    :param values: Training rows `(N, D)`, or targets `(N,)`.
    """

    def __init__(self, values: Tensor):
        self.mean = values.mean(0)
        sd = values.std(0)
        self.sd = torch.where(sd > 0, sd, torch.ones_like(sd))

    def __call__(self, values: Tensor) -> Tensor:
        return (values - self.mean) / self.sd
