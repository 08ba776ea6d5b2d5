"""Numerical failures inside a sampler of Pyro: rejected steps, not exceptions."""

from __future__ import annotations

import torch
from linear_operator.utils.errors import NanError, NotPSDError


def is_numerical_failure(error: Exception) -> bool:
    """
    Whether an error says that hyperparameters were numerically impossible, rather than that a program is wrong.

    :param error: The error.

    Example:
        >>> from linear_operator.utils.errors import NotPSDError
        >>> from gpytorch_tkrr.hilbert.rejection import is_numerical_failure
        >>> is_numerical_failure(NotPSDError("not positive definite")), is_numerical_failure(ValueError("a shape"))
        (True, False)
    """
    if isinstance(error, (NotPSDError, NanError, torch.linalg.LinAlgError, ArithmeticError)):
        return True
    # What torch and Pyro say of distributions whose parameters are NaN.
    return isinstance(error, ValueError) and "to satisfy the constraint" in str(error) and "nan" in str(error)


def reject_failed_steps() -> None:
    """Have Pyro's HMC and NUTS reject steps that fail numerically; nothing happens where Pyro is not installed."""
    try:
        from pyro.ops.integrator import register_exception_handler
    except ImportError:
        return
    register_exception_handler("gpytorch_tkrr", is_numerical_failure, warn_on_overwrite=False)
