"""Kernels whose hyperparameters a sampler draws: modules that take drawn values, and steps that fail numerically."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from gpytorch import Module
from gpytorch.module import RandomModuleMixin
from gpytorch.priors import Prior
from linear_operator.utils.errors import NanError, NotPSDError
from torch.nn import Parameter


def random_twin(module: Any, memo: dict[int, Any] | None = None) -> Any:
    """
    A twin of a GPyTorch module that takes any tensor for a parameter and shares everything else with the module.

    It does what :meth:`to_random_module` does with a deep copy for every level of the tree. Parameters that are not
    replaced keep their values, as constants.

    :param module: A kernel, likelihood or model. What is no GPyTorch module is returned as it is.
    :param memo: Twins by the identity of their modules; a module that occurs twice has one twin.

    Example:
        >>> import gpytorch, torch
        >>> from gpytorch_tkrr.hilbert.sampled import random_twin
        >>> kernel = gpytorch.kernels.RBFKernel()
        >>> twin = random_twin(kernel)
        >>> log_lengthscale = torch.zeros(1, 1, requires_grad=True)
        >>> twin.lengthscale = log_lengthscale.exp()
        >>> twin.lengthscale.sum().backward()
        >>> log_lengthscale.grad, kernel.raw_lengthscale.item()
        (tensor([[1.0000]]), 0.0)
    """
    if not isinstance(module, Module) or isinstance(module, (Prior, RandomModuleMixin)):
        return module
    memo = {} if memo is None else memo
    if id(module) not in memo:
        module_class: Any = type(module)
        twin = memo[id(module)] = object.__new__(_random_class(module_class))
        twin.__dict__.update(module.__dict__)
        twin.__dict__["_parameters"] = {
            name: None if parameter is None else Parameter(parameter.detach(), requires_grad=False)
            for name, parameter in module._parameters.items()
        }
        twin.__dict__["_modules"] = {name: random_twin(child, memo) for name, child in module._modules.items()}
        twin._clear_cache()
    return memo[id(module)]


@cache
def _random_class(module_class: Any) -> Any:
    return type(f"_Random{module_class.__name__}", (RandomModuleMixin, module_class), {})


def is_numerical_failure(error: Exception) -> bool:
    """
    Whether an error says that hyperparameters were numerically impossible, rather than that a program is wrong.

    :param error: The error.

    Example:
        >>> from linear_operator.utils.errors import NotPSDError
        >>> from gpytorch_tkrr.hilbert.sampled import is_numerical_failure
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
