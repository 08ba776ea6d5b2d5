"""Several tasks with GPyTorch's own classes: ``MultitaskKernel``, and products with ``IndexKernel`` (Hadamard models).

GPyTorch makes a Kronecker or elementwise product of whatever the kernel of the data evaluates to, and has no place
where that could choose the product itself. Importing this module gives ``MultitaskKernel``, ``ProductKernel`` and
lazily evaluated kernels such a place. Kernels that are not reduced to a low rank are not affected.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, wraps
from typing import Any

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.kernels import IndexKernel, Kernel, MultitaskKernel, ProductKernel, ScaleKernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy
from gpytorch.utils.memoize import cached
from linear_operator.operators import (
    KroneckerProductLinearOperator,
    LinearOperator,
    SumLinearOperator,
)
from torch import Tensor

from ..errors import UnsupportedKernelError
from ..linalg import robust_cholesky
from .kernel import HilbertKernel
from .lazy_operators import HadamardCrossLinearOperator, RefusedLinearOperator
from .operator import HilbertAddedDiagLinearOperator, HilbertLinearOperator
from .prediction import HilbertPredictionStrategy, WeightPosterior
from .task_operators import HilbertTaskNoiseLinearOperator, all_tasks, one_task_each


def reduced_kernel(kernel: Kernel) -> HilbertKernel | None:
    """
    The HilbertKernel inside any number of ScaleKernels, or None.

    :param kernel: A kernel.
    """
    while isinstance(kernel, ScaleKernel):
        kernel = kernel.base_kernel
    return kernel if isinstance(kernel, HilbertKernel) else None


class TaskPredictionStrategy(HilbertPredictionStrategy):
    """
    Predicts several tasks from the posterior of the weights.

    :param train_inputs: Training inputs.
    :param train_prior_dist: The prior at the training inputs.
    :param train_labels: Training targets, `(..., N, T)`.
    :param likelihood: A Gaussian likelihood.
    :param evaluate: Evaluates the covariance of `train_prior_dist`.
    """

    def __init__(
        self,
        train_inputs: Any,
        train_prior_dist: MultivariateNormal,
        train_labels: Tensor,
        likelihood: Any,
        evaluate: Any,
        posterior: WeightPosterior | None = None,
    ):
        train_labels = train_labels.reshape(*train_labels.shape[: -len(train_prior_dist.event_shape)], -1)
        super().__init__(train_inputs, train_prior_dist, train_labels, likelihood, evaluate, posterior)

    @cached(name="weight_posterior")
    def _posterior(self, nan_policy: str) -> WeightPosterior:
        if nan_policy != "ignore" and self.train_labels.isnan().any():
            raise UnsupportedKernelError(
                "A MultitaskKernel of a HilbertKernel cannot leave out missing targets. Multiply by an IndexKernel "
                "instead, with one row for each target that is there."
            )
        prior = self.train_prior_dist
        covariance = self._observe(self.likelihood, prior.mean, self._evaluate(), self.train_inputs)
        residual = (self.train_labels - prior.loc).double().unsqueeze(-1)
        target = covariance.project(residual).squeeze(-1)
        scale = covariance.low_rank.scale
        return self._remember(WeightPosterior.from_capacitance(scale, covariance.capacitance_cholesky, target))

    def _observe(
        self, likelihood: Any, mean: Tensor, covariance: LinearOperator, inputs: Any
    ) -> HilbertTaskNoiseLinearOperator | HilbertAddedDiagLinearOperator:
        """A covariance with the likelihood's noise."""
        if isinstance(covariance, RefusedLinearOperator):
            raise covariance.error
        observed = likelihood(self.train_prior_dist.__class__(mean, covariance), inputs)
        covariance = observed.lazy_covariance_matrix.evaluate_kernel()
        if not isinstance(covariance, (HilbertTaskNoiseLinearOperator, HilbertAddedDiagLinearOperator)):
            raise UnsupportedKernelError(
                f"The noise of {type(likelihood).__name__} is neither diagonal nor the same for all inputs. Use a "
                "MultitaskGaussianLikelihood."
            )
        return covariance

    def _split(self, covariance: LinearOperator) -> tuple[HilbertLinearOperator, LinearOperator | None]:
        if isinstance(covariance, RefusedLinearOperator):
            raise covariance.error
        if isinstance(covariance, SumLinearOperator):
            low_rank, missing = covariance.linear_ops
            return low_rank, missing
        return covariance, None

    def get_fantasy_strategy(
        self,
        inputs: Any,
        targets: Tensor,
        full_inputs: Any,
        full_targets: Tensor,
        full_output: MultivariateNormal,
        **kwargs: Any,
    ) -> TaskPredictionStrategy:
        num_train, num_tasks = self.num_train, full_output.event_shape[-1]
        full_covariance = full_output.lazy_covariance_matrix
        low_rank, _ = self._split(full_covariance[..., num_train:, num_train:].evaluate_kernel())
        mean = full_output.mean[..., num_train // num_tasks :, :]
        likelihood = self.likelihood.get_fantasy_likelihood(**kwargs)
        covariance = self._observe(likelihood, mean, low_rank, inputs)
        # Features and residuals whose noise has unit variance.
        features = covariance.whiten(low_rank.features.double())
        residual = covariance.whiten((targets - mean).double().flatten(-2).unsqueeze(-1)).squeeze(-1)
        posterior = self.posterior.condition(features, residual, torch.ones_like(residual))
        prior = self.train_prior_dist.__class__(full_output.mean, full_covariance)
        return self.__class__(full_inputs, prior, full_targets, likelihood, self._evaluate, posterior)


class HadamardKernel(Kernel):
    r"""
    A HilbertKernel, scaled or not, times an :class:`~gpytorch.kernels.IndexKernel` of the last column.

    It stands behind the product ``covar_module(x).mul(task_covar_module(i))`` of GPyTorch's Hadamard models.

    :param data_kernel: The kernel of the other columns.
    :param task_kernel: The kernel of the tasks.
    """

    def __init__(self, data_kernel: Kernel, task_kernel: IndexKernel):
        super().__init__()
        self.data_kernel = data_kernel
        self.task_kernel = task_kernel

    def select(self, x: Tensor) -> Tensor:
        """
        The columns that the two kernels see, side by side.

        :param x: Inputs `(..., N, D)` of a product of the two.
        """
        columns = [
            x if kernel.active_dims is None else x[..., kernel.active_dims.reshape(-1)]
            for kernel in (self.data_kernel, self.task_kernel)
        ]
        return _side_by_side(*columns)

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor | LinearOperator:
        data = self.data_kernel.forward(x1[..., :-1], x2[..., :-1], diag=diag, **params)
        left, right = x1[..., -1].long(), x2[..., -1].long()
        task_covariance = self.task_kernel._eval_covar_matrix()
        if not diag and isinstance(data, RefusedLinearOperator):
            return data
        if not diag and x1.shape == x2.shape and torch.equal(x1, x2):
            product = one_task_each(data, task_covariance, left)
            if product is not None:
                return product
        root = robust_cholesky(task_covariance.double())
        left_rows = torch.take_along_dim(root, left.unsqueeze(-1), dim=-2)  # (..., N, T)
        right_rows = torch.take_along_dim(root, right.unsqueeze(-1), dim=-2)
        if diag:
            return data * (left_rows * right_rows).sum(-1).to(data.dtype)
        return HadamardCrossLinearOperator(data, left_rows, right_rows)

    def prediction_strategy(
        self, train_inputs: Any, train_prior_dist: MultivariateNormal, train_labels: Tensor, likelihood: Any
    ) -> DefaultPredictionStrategy:
        return self.data_kernel.prediction_strategy(train_inputs, train_prior_dist, train_labels, likelihood)


_multitask_kernel_forward = MultitaskKernel.forward
_product_kernel_forward = ProductKernel.forward


@wraps(_multitask_kernel_forward)
def _multitask_forward(
    self: MultitaskKernel, x1: Tensor, x2: Tensor, diag: bool = False, last_dim_is_batch: bool = False, **params: Any
) -> Tensor | LinearOperator:
    product = _multitask_kernel_forward(self, x1, x2, diag=diag, last_dim_is_batch=last_dim_is_batch, **params)
    if not isinstance(product, KroneckerProductLinearOperator):
        return product
    data, tasks = product.linear_ops
    if isinstance(data, RefusedLinearOperator):
        return RefusedLinearOperator(x1, product.shape, data.error)
    low_rank = all_tasks(data, tasks.to_dense())
    return product if low_rank is None else low_rank


def _multitask_prediction_strategy(
    self: MultitaskKernel,
    train_inputs: Any,
    train_prior_dist: MultivariateNormal,
    train_labels: Tensor,
    likelihood: Any,
) -> DefaultPredictionStrategy:
    kernel = reduced_kernel(self.data_covar_module)
    if kernel is None or not isinstance(train_prior_dist, MultitaskMultivariateNormal):
        return Kernel.prediction_strategy(self, train_inputs, train_prior_dist, train_labels, likelihood)
    evaluate = partial(kernel._evaluate_as_training, train_prior_dist.lazy_covariance_matrix)
    return TaskPredictionStrategy(train_inputs, train_prior_dist, train_labels, likelihood, evaluate)


def _hadamard_kernel(kernels: Sequence[Kernel]) -> HadamardKernel | None:
    """The product of two kernels, if one is reduced to a low rank and the other one is a covariance of tasks."""
    if len(kernels) != 2:
        return None
    for data, tasks in (kernels, tuple(reversed(kernels))):
        if reduced_kernel(data) is not None and isinstance(tasks, IndexKernel):
            return HadamardKernel(data, tasks)
    return None


@wraps(_product_kernel_forward)
def _product_forward(
    self: ProductKernel, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any
) -> Tensor | LinearOperator:
    kernel = _hadamard_kernel(tuple(self.kernels))
    if kernel is None:
        return _product_kernel_forward(self, x1, x2, diag=diag, **params)
    return kernel.forward(kernel.select(x1), kernel.select(x2), diag=diag, **params)


def _product_prediction_strategy(
    self: ProductKernel, train_inputs: Any, train_prior_dist: MultivariateNormal, train_labels: Tensor, likelihood: Any
) -> DefaultPredictionStrategy:
    kernel = _hadamard_kernel(tuple(self.kernels))
    strategy = Kernel.prediction_strategy if kernel is None else HadamardKernel.prediction_strategy
    return strategy(kernel or self, train_inputs, train_prior_dist, train_labels, likelihood)


def _multiply_kernels(self: LazyEvaluatedKernelTensor, other: LinearOperator) -> LinearOperator:
    """The elementwise product of two lazily evaluated kernels; lazy too if it is that of a Hadamard model."""
    if isinstance(other, LazyEvaluatedKernelTensor):
        kernel = _hadamard_kernel((self.kernel, other.kernel))
        if kernel is not None:
            data, tasks = (self, other) if kernel.data_kernel is self.kernel else (other, self)
            columns = _side_by_side(data.x1, tasks.x1), _side_by_side(data.x2, tasks.x2)
            return LazyEvaluatedKernelTensor(*columns, kernel=kernel)
    return LinearOperator._mul_matrix(self, other)


def _side_by_side(x: Tensor, tasks: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(x.shape[:-1], tasks.shape[:-1])
    return torch.cat([x.expand(*shape, x.shape[-1]), tasks.to(x).expand(*shape, 1)], dim=-1)


MultitaskKernel.forward = _multitask_forward
MultitaskKernel.prediction_strategy = _multitask_prediction_strategy
ProductKernel.forward = _product_forward
ProductKernel.prediction_strategy = _product_prediction_strategy
LazyEvaluatedKernelTensor._mul_matrix = _multiply_kernels
