"""The default modules of our models: BoTorch's own, in units of the search space, with columns of other kinds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from botorch.models.kernels.categorical import CategoricalKernel
from botorch.models.kernels.positive_index import PositiveIndexKernel
from botorch.models.utils.gpytorch_modules import (
    get_covar_module_with_dim_scaled_prior,
    get_gaussian_likelihood_with_lognormal_prior,
)
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import Kernel, ProductKernel, RBFKernel
from gpytorch.likelihoods import HadamardGaussianLikelihood
from gpytorch.means import ConstantMean, MultitaskMean
from gpytorch.priors import LogNormalPrior
from torch import Tensor

from .columns import Columns
from .fidelity import FidelityKernel

try:  # before version 0.18 BoTorch has no prior of the correlations of tasks
    from botorch.models.utils import priors
except ImportError:
    priors = None  # type: ignore[assignment]

#: BoTorch's lower bound of lengthscales on the unit cube, and of categories.
MIN_LENGTHSCALE = 0.025
MIN_CATEGORICAL_LENGTHSCALE = 1e-6


def scaled_rbf_kernel(lower: Tensor, upper: Tensor, columns: Sequence[int], batch_shape: torch.Size) -> RBFKernel:
    """
    BoTorch's default kernel, with lengthscales in units of the range; on the unit cube it is that kernel, bit by bit.

    :param lower: Lower ends of all columns `(d,)`.
    :param upper: Upper ends.
    :param columns: Those that the kernel sees.
    :param batch_shape: That of the model, with its outcomes.
    """
    unit = torch.where(upper > lower, upper - lower, torch.ones_like(lower))[list(columns)]
    active_dims = None if len(columns) == len(lower) else tuple(columns)
    own = get_covar_module_with_dim_scaled_prior(len(columns), batch_shape, active_dims=active_dims)
    if float((unit - 1).abs().max()) < 1e-6:  # a transform may round
        return own
    prior = own.lengthscale_prior
    loc = prior.loc.to(unit) + unit.log()
    scaled = LogNormalPrior(loc, prior.scale.to(unit).expand_as(loc).clone())  # a buffer that can be written to
    lowest = MIN_LENGTHSCALE * float(unit.min())  # one number: BoTorch takes no other bound for a batch
    limit = GreaterThan(lowest, transform=None, initial_value=scaled.mode)
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


def task_kernel(columns: Columns) -> PositiveIndexKernel:
    """
    The covariance of tasks, as in BoTorch's MultiTaskGP.

    :param columns: Which column holds the tasks, and how many there are.
    """
    prior = None if priors is None else priors.BetaPrior(2.5, 1.5)
    return PositiveIndexKernel(columns.num_tasks, columns.num_tasks, task_prior=prior, active_dims=[columns.task])


class TaskMean(MultitaskMean):
    """
    A constant for each task.

    :param columns: Which column holds the tasks, and how many there are.
    """

    def __init__(self, columns: Columns):
        super().__init__(ConstantMean(), columns.num_tasks)
        self.column = columns.task

    def forward(self, x: Tensor) -> Tensor:
        """
        :param x: Inputs `(..., n, d)`.
        :return: `(..., n)`.
        """
        task = x[..., self.column].long().unsqueeze(-1)
        return super().forward(x).gather(-1, task).squeeze(-1)


def task_likelihood(columns: Columns) -> HadamardGaussianLikelihood:
    """
    A noise variance for each task, with BoTorch's prior.

    :param columns: Which column holds the tasks, and how many there are.
    """
    covar = get_gaussian_likelihood_with_lognormal_prior().noise_covar
    return HadamardGaussianLikelihood(
        columns.num_tasks, noise_prior=covar.noise_prior, noise_constraint=covar.raw_noise_constraint,
        task_feature_index=columns.task,
    )  # fmt: skip


def default_kernel(lower: Tensor, upper: Tensor, columns: Columns, batch_shape: torch.Size) -> Kernel:
    """
    BoTorch's RBF kernel of the numbers, times a kernel of each other kind of column: a product over columns, which a CP
    model needs and a reduced-rank model expands with few functions.

    :param lower: Lower ends of all columns `(d,)`.
    :param upper: Upper ends.
    :param columns: What they mean.
    :param batch_shape: That of the model, with its outcomes.
    """
    factors: list[Kernel] = []
    if columns.numbers:
        factors.append(scaled_rbf_kernel(lower, upper, columns.numbers, batch_shape))
    if columns.categories:
        factors.append(categorical_kernel(columns.categories, batch_shape))
    factors += [FidelityKernel(batch_shape=batch_shape, active_dims=(column,)) for column in columns.fidelities]
    if columns.task is not None:
        factors.append(task_kernel(columns))
    return factors[0] if len(factors) == 1 else ProductKernel(*factors)
