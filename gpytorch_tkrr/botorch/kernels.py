"""The default kernel of our models: BoTorch's own, in units of the search space, times one of categories."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from botorch.models.kernels.categorical import CategoricalKernel
from botorch.models.utils.gpytorch_modules import get_covar_module_with_dim_scaled_prior
from botorch.utils.transforms import normalize_indices
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import Kernel, RBFKernel
from gpytorch.priors import LogNormalPrior
from torch import Tensor

#: BoTorch's lower bound of lengthscales on the unit cube, and of categories.
MIN_LENGTHSCALE = 0.025
MIN_CATEGORICAL_LENGTHSCALE = 1e-6


def split_columns(num_dims: int, cat_dims: Sequence[int] | None) -> tuple[list[int], list[int]]:
    """
    The columns that are numbers, and those that are categories.

    :param num_dims: d.
    :param cat_dims: Columns of categories, which may count from the end; None for none.
    """
    categories = sorted(normalize_indices(list(cat_dims or []), d=num_dims) or [])
    return [d for d in range(num_dims) if d not in categories], categories


def scaled_rbf_kernel(lower: Tensor, upper: Tensor, columns: Sequence[int], batch_shape: torch.Size) -> RBFKernel:
    """
    BoTorch's default kernel, with lengthscales in units of the range: on the unit cube the same.

    :param lower: Lower ends of all columns `(d,)`.
    :param upper: Upper ends.
    :param columns: Those that the kernel sees.
    :param batch_shape: That of the model, with its outcomes.
    """
    unit = torch.where(upper > lower, upper - lower, torch.ones_like(lower))[list(columns)]
    prior = get_covar_module_with_dim_scaled_prior(ard_num_dims=len(columns)).lengthscale_prior
    loc = prior.loc.to(unit) + unit.log()
    scaled = LogNormalPrior(loc, prior.scale.to(unit).expand_as(loc).clone())  # a buffer that can be written to
    lowest = MIN_LENGTHSCALE * float(unit.min())  # one number: BoTorch takes no other bound for a batch
    limit = GreaterThan(lowest, transform=None, initial_value=scaled.mode)
    active_dims = None if len(columns) == len(lower) else tuple(columns)
    return RBFKernel(
        ard_num_dims=len(columns), lengthscale_prior=scaled, lengthscale_constraint=limit, batch_shape=batch_shape,
        active_dims=active_dims,
    )  # fmt: skip


def categorical_kernel(columns: Sequence[int], batch_shape: torch.Size) -> CategoricalKernel:
    """
    BoTorch's kernel of categories.

    :param columns: Those that the kernel sees.
    :param batch_shape: That of the model, with its outcomes.
    """
    return CategoricalKernel(
        batch_shape=batch_shape, ard_num_dims=len(columns), active_dims=tuple(columns),
        lengthscale_constraint=GreaterThan(MIN_CATEGORICAL_LENGTHSCALE),
    )  # fmt: skip


def default_kernel(lower: Tensor, upper: Tensor, cat_dims: Sequence[int] | None, batch_shape: torch.Size) -> Kernel:
    """
    BoTorch's RBF kernel of the numbers, times its kernel of the categories: a product over columns, which a CP model
    needs and a reduced-rank model expands with few functions.

    :param lower: Lower ends of all columns `(d,)`.
    :param upper: Upper ends.
    :param cat_dims: Columns of categories.
    :param batch_shape: That of the model, with its outcomes.
    """
    numbers, categories = split_columns(len(lower), cat_dims)
    if not categories:
        return scaled_rbf_kernel(lower, upper, numbers, batch_shape)
    levels = categorical_kernel(categories, batch_shape)
    return scaled_rbf_kernel(lower, upper, numbers, batch_shape) * levels if numbers else levels
