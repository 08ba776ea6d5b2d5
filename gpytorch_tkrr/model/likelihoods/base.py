r"""
What a likelihood must say for a CP-weight model: the distribution of y given f, and how it is sampled.

An :class:`Observation` stands behind a likelihood object of GPyTorch, in the units of the user. Its
:class:`Augmentation` is the same as the Gibbs sampler sees it: given some parameters and a working target
:math:`t_n` with a weight :math:`w_n` for each row, the model is a regression
:math:`t_n \sim N(f(x_n), s^2 / w_n)`. A new observation model is one file here: both classes, registered for its
likelihood by :func:`register`.

Shapes: values of f are `(*P, n)`, where P are draws, `(S,)` or `(chains, draws)`. Parameters are kept for each draw,
`(*P,)` or `(*P, ...)`. What belongs to single rows (:data:`Rows`) is `(n,)`, or anything that broadcasts with f.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from torch import Tensor

from ...data.source import Batch, RowFunction, Working
from ...data.training import Summary
from ...errors import InputError
from ...features.separable import SeparableKernel
from ..augmentation.row_values import RowValues

#: Parameters of an observation model by name.
Parameters = dict[str, Tensor]

#: What is known of single rows beside inputs and targets, by name: `noise`; `spread`, the variance of f about the value
#: that is given; `factor`, by which the noise variance is multiplied.
Rows = Mapping[str, Tensor]

#: Sums a function of all rows, with so many values, over all batches and processes.
SumRows = Callable[[RowFunction, int], Tensor]

_OBSERVATIONS: dict[type[Likelihood], type[Observation]] = {}

#: Likelihoods that are not taken though another one is near to them, and which.
_REFUSED: dict[type[Likelihood], str] = {}

#: Methods of a likelihood that say what y is, given f. A subclass that changes one of them is another model.
_MEANING = ("forward", "marginal", "log_marginal", "expected_log_prob", "_shaped_noise_covar")

T = TypeVar("T", bound="type[Observation]")


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


def register(likelihood: type[Likelihood]) -> Callable[[T], T]:
    """
    A class decorator: the observation model of a likelihood class.

    :param likelihood: The class; subclasses that only add parameters or priors are included.
    """

    def decorate(cls: T) -> T:
        _OBSERVATIONS[likelihood] = cls
        return cls

    return decorate


def refuse(likelihood: type[Likelihood], advice: str) -> None:
    """
    Let the error about a likelihood class that is not registered say what to use instead.

    :param likelihood: The class.
    :param advice: A sentence.
    """
    _REFUSED[likelihood] = advice


def observe(likelihood: Likelihood) -> Observation:
    """
    The observation model behind a likelihood.

    :param likelihood: A likelihood object.

    Example:
        >>> import gpytorch, gpytorch_tkrr as tkrr
        >>> from gpytorch_tkrr.model.likelihoods.base import observe
        >>> type(observe(gpytorch.likelihoods.BernoulliLikelihood())).__name__
        'ProbitObservation'
    """
    mro = type(likelihood).__mro__
    known = next((cls for cls in mro if cls in _OBSERVATIONS), None)
    names = ", ".join(sorted(cls.__name__ for cls in _OBSERVATIONS))
    if known is None:
        advice = "".join(f" {text}" for cls, text in _REFUSED.items() if cls in mro)
        kind = f"{type(likelihood).__module__}.{type(likelihood).__name__}" if advice else type(likelihood).__name__
        raise InputError(f"likelihood must be one of {names}; got a {kind}.{advice}")
    between = mro[: mro.index(known)]
    changed = [name for name in _MEANING if any(name in vars(cls) for cls in between)]
    if changed:
        raise InputError(
            f"{type(likelihood).__name__} changes {', '.join(changed)} of {known.__name__} and is another model. Use "
            f"one of {names}."
        )
    return _OBSERVATIONS[known](likelihood)


def per_row(parameter: Tensor) -> Tensor:
    """
    A parameter of each draw, to be broadcast over rows.

    :param parameter: `(*P,)`.
    :return: `(*P, 1)`.
    """
    return parameter.unsqueeze(-1)
