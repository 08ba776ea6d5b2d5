r"""
What a likelihood must say for a CP-weight model: the distribution of y given f, and how it is sampled.

An :class:`Observation` stands behind a likelihood object of GPyTorch, in the units of the user. Its
:class:`~gpytorch_tkrr.model.likelihoods.augmented.Augmentation` is the same as the Gibbs sampler sees it. A new
observation model is one file here: both classes, registered for its likelihood by
:func:`~gpytorch_tkrr.model.likelihoods.registry.register`.

Shapes: values of f are `(*P, n)`, where P are draws, `(S,)` or `(chains, draws)`. Parameters are kept for each draw,
`(*P,)` or `(*P, ...)`. What belongs to single rows (:data:`Rows`) is `(n,)`, or anything that broadcasts with f.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from torch import Tensor

from ...data.training import Summary
from ...errors import InputError
from .augmented import Augmentation, Parameters

#: What is known of single rows beside inputs and targets, by name: `noise`; `spread`, the variance of f about the value
#: that is given; `factor`, by which the noise variance is multiplied.
Rows = Mapping[str, Tensor]


class Observation(ABC):
    """
    The distribution of y given f.

    :param likelihood: The likelihood object; its parameters are read when they are needed.
    """

    #: How many classes y stands for; 0 where it is a number.
    num_classes: int = 0

    #: Whether y takes whole numbers only.
    is_discrete: ClassVar[bool] = False

    #: Whether f has a scale of its own: targets are then neither centred nor scaled, and the mean is part of f.
    has_link: ClassVar[bool] = False

    #: Whether `fit_als` may regress on the encoded targets.
    has_least_squares: ClassVar[bool] = True

    #: What the third part of data=(x, y, ...) is, where the likelihood object knows something of each row.
    row_part: ClassVar[str] = "noise.mean() / noise"

    def __init__(self, likelihood: Any) -> None:
        self.likelihood = likelihood

    def check(self) -> None:
        """Refuse a likelihood object that a CP-weight model cannot take."""
        return None

    # Targets and noise, for all fits

    def encode(self, y: Tensor) -> Tensor:
        """
        Targets as numbers that a fit takes, float64; refuses what the model does not allow.

        :param y: Targets `(n,)`, as the user gives them.
        """
        return y.double()

    def decode(self, y: Tensor) -> Tensor:
        """
        Encoded targets as the numbers that a prediction speaks of.

        :param y: `(n,)`.
        """
        return y

    def start_mean(self, summary: Summary) -> float:
        """
        The constant mean of f that a fit sets where the user gives none.

        :param summary: Of the encoded targets.
        """
        return summary.mean

    def noise(self) -> Tensor | None:
        """The noise variance of the likelihood object, a differentiable float64 scalar; None where it has none."""
        return None

    @property
    def has_own_rows(self) -> bool:
        """Whether the likelihood object knows something of each of its own rows (noise, exposure), and of no others."""
        return False

    @property
    def has_limits(self) -> bool:
        """Whether targets are compared with limits in their own units: their mean must then be constant."""
        return False

    @property
    def shows_range(self) -> bool:
        """Whether the targets show which values f takes: it has their units, and none of them ends before f does."""
        return not self.has_link

    def row_weights(self, num_rows: int) -> Tensor | None:
        """
        Weights of the model's own training rows `(N,)`, relative to the noise, or what else the augmentation takes in
        their place; None for ones.

        :param num_rows: N.
        """
        return None

    def check_rows(self, num_rows: int) -> None:
        """
        Refuse data of so many rows where the likelihood object knows something of another number of them.

        :param num_rows: N, of all processes.
        """
        return None

    def start_noise(self, variance: float) -> None:
        """
        Bring a free noise near the scale of the targets where it is orders of magnitude away from it.

        :param variance: Variance of the targets.
        """
        return None

    def noise_bound(self) -> float | None:
        """The smallest noise that the likelihood object allows; None where there is none."""
        return None

    def prepare(self, summary: Summary, default_kernel: Callable[[float], Kernel]) -> None:
        """
        Choose what has not been given, from the data, once.

        :param summary: The data.
        :param default_kernel: The default kernel of a function of the inputs with a prior variance.
        """
        return None

    def expect(self, state: Mapping[str, Tensor], default_kernel: Kernel) -> None:
        """
        Make what a `state_dict` of the likelihood is about to fill.

        :param state: The state.
        :param default_kernel: The default kernel of a function of as many inputs.
        """
        return None

    # Alternating least squares

    def reweight(self, square: Tensor, noise: float) -> tuple[Tensor, Tensor] | None:
        r"""
        How :func:`~gpytorch_tkrr.fit_als` sees targets where it does not minimise squared errors: row weights such that
        the weighted sum of squares touches the sum of the losses :math:`-2 s^2 \log p(y_n \mid f_n)` from above, up to
        a constant. None where the loss is the squared error.

        :param square: Squared residuals `(n,)`.
        :param noise: :math:`s^2`.
        :return: Weights and losses, `(n,)` each; the loss of a zero is zero.
        """
        return None

    @property
    def information(self) -> float:
        """The mean curvature of that loss, relative to the squared error's."""
        return 1.0

    def of_rows(self, index: Tensor) -> Likelihood:
        """
        The likelihood of some of the training rows.

        :param index: Their numbers.
        """
        return self.likelihood

    # Sampling

    @abstractmethod
    def augmentation(self, scale: float, offset: float) -> Augmentation:
        """
        The model as a sampler sees it.

        :param scale: Standard deviation that the targets were divided by; 1 where f has a scale of its own.
        :param offset: What is added to the sampler's f, or to the targets where these are compared with limits; else 0.
        """

    def set_parameters(self, draws: Parameters) -> None:
        """
        Leave the likelihood object at the mean of drawn parameters.

        :param draws: Those that were free, each `(S, ...)`.
        """
        return None

    def adopt(self, parameters: Parameters, inputs: Callable[[Tensor], Tensor]) -> None:
        """
        Let the likelihood object know the draws that a model holds, where it has functions of the inputs.

        :param parameters: Draws, each `(S, ...)`.
        :param inputs: Inputs as these functions see them.
        """
        return None

    # The distribution of y

    def function_rows(self, x: Tensor, parameters: Parameters) -> dict[str, Tensor]:
        """
        What further functions of the inputs say of each row, `(*P, n)` by name.

        :param x: Inputs as these functions see them, `(n, D)`.
        :param parameters: Parameters of each draw.
        """
        return {}

    def noise_variance(self, f: Tensor, parameters: Parameters, rows: Rows) -> Tensor:
        """
        Variance of additive noise, `(*P, n)`; an error for targets that have none.

        :param f: `(*P, n)`.
        :param parameters: See above.
        :param rows: See above.
        """
        raise InputError(f"With a {type(self.likelihood).__name__} targets have no additive noise. Ask for stddev.")

    def rows(self, num_rows: int, is_training: bool, **given: Tensor | float) -> dict[str, Tensor]:
        """
        What the distribution of y needs to know of each row, checked.

        :param num_rows: n.
        :param is_training: Whether these are the model's own training rows.
        :param given: What the user gives, by name.
        """
        if given:
            name = type(self.likelihood).__name__
            raise InputError(f"With a {name} nothing is given for each row; got {', '.join(given)}.")
        return {}

    @abstractmethod
    def log_density(self, y: Tensor, f: Tensor, parameters: Parameters, rows: Rows) -> Tensor:
        """
        Log density, or log probability, of targets.

        :param y: Targets, which broadcast with f.
        :param f: `(*P, n)`.
        :param parameters: See above.
        :param rows: See above.
        """

    @abstractmethod
    def mean(self, f: Tensor, parameters: Parameters, rows: Rows) -> Tensor:
        """
        Mean of y, `(*P, n)`.

        :param f: `(*P, n)`.
        :param parameters: See above.
        :param rows: See above.
        """

    @abstractmethod
    def variance(self, f: Tensor, parameters: Parameters, rows: Rows) -> Tensor:
        """
        Variance of y, `(*P, n)`.

        :param f: `(*P, n)`.
        :param parameters: See above.
        :param rows: See above.
        """

    @abstractmethod
    def cdf(self, y: Tensor, f: Tensor, parameters: Parameters, rows: Rows) -> Tensor:
        """
        Probability of a target that is not larger.

        :param y: Targets, which broadcast with f.
        :param f: `(*P, n)`.
        :param parameters: See above.
        :param rows: See above.
        """

    @abstractmethod
    def sample(self, f: Tensor, parameters: Parameters, rows: Rows, generator: torch.Generator) -> Tensor:
        """
        One draw of y for each value of f, `(*P, n)`.

        :param f: `(*P, n)`.
        :param parameters: See above.
        :param rows: See above.
        :param generator: Source of random numbers.
        """


def per_row(parameter: Tensor) -> Tensor:
    """
    A parameter of each draw, to be broadcast over rows.

    :param parameter: `(*P,)`.
    :return: `(*P, 1)`.
    """
    return parameter.unsqueeze(-1)
