"""Which observation model stands behind a likelihood class of GPyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from gpytorch.likelihoods import Likelihood

from ...errors import InputError
from .base import Observation

_OBSERVATIONS: dict[type[Likelihood], type[Observation]] = {}

#: Likelihoods that are not taken though another one is near to them, and which.
_REFUSED: dict[type[Likelihood], str] = {}

#: Methods of a likelihood that say what y is, given f. A subclass that changes one of them is another model.
_MEANING = ("forward", "marginal", "log_marginal", "expected_log_prob", "_shaped_noise_covar")

T = TypeVar("T", bound="type[Observation]")


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
        >>> from gpytorch_tkrr.model.likelihoods.registry import observe
        >>> type(observe(gpytorch.likelihoods.BernoulliLikelihood())).__name__
        'ProbitObservation'
    """
    if isinstance(likelihood, type):
        raise InputError(f"likelihood must be an object, not a class: write {likelihood.__name__}(...).")
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
