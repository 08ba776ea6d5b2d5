"""An operation that fails changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def rollback_on_error(model: nn.Module) -> Iterator[None]:
    """
    Leave a model as it was where the block ends by an exception, Ctrl-C too.

    Values of parameters and buffers are restored, and the attributes of the model and of all its modules. What an
    attribute refers to is not copied: the block may replace a posterior or training data, not write into them.

    :param model: The model.

    Example:
        >>> import gpytorch, torch
        >>> from gpytorch_tkrr.model.rollback import rollback_on_error
        >>> kernel = gpytorch.kernels.RBFKernel()
        >>> before = kernel.lengthscale.item()
        >>> try:
        ...     with rollback_on_error(kernel):
        ...         kernel.lengthscale = 5.0
        ...         raise KeyboardInterrupt
        ... except KeyboardInterrupt:
        ...     kernel.lengthscale.item() == before
        True
    """
    modules = [(module, dict(vars(module))) for module in model.modules()]
    # Dictionaries, such as those of parameters and sub-modules, are changed in place.
    contents = [(each, each.copy()) for _, parts in modules for each in parts.values() if isinstance(each, dict)]
    values = [(tensor, tensor.detach().clone()) for tensor in (*model.parameters(), *model.buffers())]
    try:
        yield
    except BaseException:
        for module, attributes in modules:
            vars(module).clear()
            vars(module).update(attributes)
        for each, content in contents:
            each.clear()
            each.update(content)
        for tensor, value in values:
            tensor.data.copy_(value)
        raise
