"""Several tasks with GPyTorch's own classes: ``MultitaskKernel``, ``LCMKernel``, and products with ``IndexKernel``
(Hadamard models).

GPyTorch makes a Kronecker or elementwise product of whatever the kernel of the data evaluates to, and has no place
where that could choose the product itself. :func:`keep_structure_of_tasks` gives its classes such a place; it is called
when the first :class:`~gpytorch_tkrr.HilbertKernel` is made. Kernels that are not reduced to a low rank are not
affected.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cache, partial, wraps
from typing import Any, NamedTuple

import torch
from gpytorch import settings
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.kernels import IndexKernel, Kernel, LCMKernel, MultitaskKernel, ProductKernel, ScaleKernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy
from gpytorch.utils.memoize import cached, clear_cache_hook
from linear_operator.operators import (
    BlockDiagLinearOperator,
    KroneckerProductLinearOperator,
    LinearOperator,
    to_linear_operator,
)
from torch import Tensor

from ..errors import UnsupportedKernelError
from ..linalg import robust_cholesky
from ..operators.lazy_operators import HadamardCrossLinearOperator, RefusedLinearOperator
from ..operators.operator import HilbertLinearOperator
from ..operators.task_operators import HilbertTaskNoiseLinearOperator, all_tasks, one_task_each, split_tasks
from .prediction import HilbertPredictionStrategy
from .transparent import TransparentKernel
from .weights import WeightPosterior, whitened_posterior


class ReducedRankKernel(TransparentKernel):
    """A kernel that evaluates to a low-rank covariance, with or without independent variance."""

    def follow(self, x: Tensor | None = None) -> Hashable:
        """
        Have the functions follow the hyperparameters.

        :param x: Training inputs, if there are any.
        :return: What tells one basis from another.
        """
        raise NotImplementedError

    @property
    def is_exact(self) -> bool:
        """Whether there are so few rows that the kernel is evaluated as it is."""
        raise NotImplementedError

    def as_training(self) -> AbstractContextManager[None]:
        """A context in which inputs are the rows that a prediction is conditioned on, whatever mode the model is in."""
        raise NotImplementedError


def evaluate_as_training(kernels: Sequence[ReducedRankKernel], covariance: LinearOperator) -> LinearOperator:
    """
    The covariance of the rows that a prediction is conditioned on.

    :param kernels: All kernels of reduced rank that take part in it.
    :param covariance: The covariance, evaluated lazily.
    """
    clear_cache_hook(covariance)  # a graph that a backward pass has freed must not be used again
    with ExitStack() as stack:
        for kernel in kernels:
            stack.enter_context(kernel.as_training())
        return covariance.evaluate_kernel()


def reduced_kernel(kernel: Kernel) -> ReducedRankKernel | None:
    """
    The kernel of reduced rank inside any number of ScaleKernels, or None.

    :param kernel: A kernel.
    """
    while isinstance(kernel, ScaleKernel):
        kernel = kernel.base_kernel
    return kernel if isinstance(kernel, ReducedRankKernel) else None


class AddedTaskRows(NamedTuple):
    """
    Inputs that were added to the training inputs, with all their tasks.

    :param low_rank: Their low-rank covariance `(..., m T, m T)`.
    :param mean: Their prior mean `(..., m, T)`.
    :param residual: Targets minus prior mean `(..., m T)`, float64.
    :param missing: Covariance of the tasks that the functions do not represent at each of them, `(..., m, T, T)`,
        float64, or None.
    """

    low_rank: HilbertLinearOperator
    mean: Tensor
    residual: Tensor
    missing: Tensor | None


class TaskPredictionStrategy(HilbertPredictionStrategy):
    """
    Predicts several tasks from the posterior of the weights.

    :param train_inputs: Training inputs.
    :param train_prior_dist: The prior at the training inputs.
    :param train_labels: Training targets, `(..., N, T)`.
    :param likelihood: A Gaussian likelihood.
    :param evaluate: Evaluates the covariance of the training rows that the first strategy began with.
    :param basis: Tells one basis of the kernel from another.
    :param added: Inputs that came after the training inputs.
    """

    def __init__(
        self,
        train_inputs: Any,
        train_prior_dist: MultivariateNormal,
        train_labels: Tensor,
        likelihood: Any,
        evaluate: Callable[[], LinearOperator],
        *,
        basis: Callable[[], Hashable],
        added: Sequence[Callable[[], AddedTaskRows]] = (),
    ):
        train_labels = train_labels.reshape(*train_labels.shape[: -len(train_prior_dist.event_shape)], -1)
        super().__init__(train_inputs, train_prior_dist, train_labels, likelihood, evaluate, basis=basis)
        self._added_tasks = tuple(added)

    @cached(name="weight_posterior")
    def _posterior(self, nan_policy: str, basis: Hashable) -> WeightPosterior:
        if nan_policy != "ignore" and self.train_labels.isnan().any():
            raise UnsupportedKernelError(
                "A MultitaskKernel of a HilbertKernel cannot leave out missing targets. Multiply by an IndexKernel "
                "instead, with one row for each target that is there."
            )
        low_rank, missing = split_tasks(self._evaluate())
        prior, num_tasks = self.train_prior_dist, self.train_prior_dist.event_shape[-1]
        num_targets = low_rank.shape[-1]
        num_train = num_targets // num_tasks
        added = [rows() for rows in self._added_tasks]
        shared = _shared_missing(low_rank, missing, added, num_tasks)
        mean, residual = prior.mean[..., :num_train, :], (self.train_labels - prior.loc)[..., :num_targets].double()
        covariance = self._observe(low_rank, mean, shared)
        factor, target = covariance.capacitance_cholesky, covariance.project(residual.unsqueeze(-1)).squeeze(-1)
        posterior = whitened_posterior(low_rank.prior, factor, target)
        for rows in added:  # with features and residuals whose noise has unit variance
            covariance = self._observe(rows.low_rank, rows.mean, shared)
            features = covariance.whiten(rows.low_rank.features.double())
            residual = covariance.whiten(rows.residual.unsqueeze(-1)).squeeze(-1)
            posterior = posterior.condition(features, residual, torch.ones_like(residual))
        if settings.detach_test_caches.on():
            return WeightPosterior(*(tensor.detach() for tensor in posterior))
        return self._remember(posterior)

    def _observe(self, low_rank: HilbertLinearOperator, mean: Tensor, shared: Tensor) -> HilbertTaskNoiseLinearOperator:
        """A covariance with what is missing and the likelihood's noise."""
        covariance = HilbertTaskNoiseLinearOperator.from_matrix(low_rank, shared)
        observed = self.likelihood(MultitaskMultivariateNormal(mean, covariance), self.train_inputs)
        covariance = observed.lazy_covariance_matrix.evaluate_kernel()
        if not isinstance(covariance, HilbertTaskNoiseLinearOperator):
            raise UnsupportedKernelError(
                f"The noise of {type(self.likelihood).__name__} is not the same for all inputs. Use a "
                "MultitaskGaussianLikelihood."
            )
        return covariance

    @torch.no_grad()
    def _tell(self, covariance: LinearOperator) -> None:
        low_rank, missing = split_tasks(covariance)
        shared = _shared_missing(low_rank, missing, [], self.train_prior_dist.event_shape[-1])
        observed = self._observe(low_rank, self.train_prior_dist.mean, shared)
        observed.tell(self.train_labels - self.train_prior_dist.loc)

    def _split(self, covariance: LinearOperator) -> tuple[HilbertLinearOperator, LinearOperator | None]:
        low_rank, missing = split_tasks(covariance)
        if missing is None:
            return low_rank, None
        num_tasks = missing.shape[-1]
        missing = missing.expand(*missing.shape[:-3], low_rank.shape[-1] // num_tasks, num_tasks, num_tasks)
        return low_rank, BlockDiagLinearOperator(to_linear_operator(missing.to(low_rank.dtype)))

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
        covariance = full_covariance[..., num_train:, num_train:]
        mean = full_output.mean[..., num_train // num_tasks :, :]
        residual = (targets - mean).double().flatten(-2)

        def evaluate() -> AddedTaskRows:
            clear_cache_hook(covariance)
            low_rank, missing = split_tasks(covariance.evaluate_kernel())
            return AddedTaskRows(low_rank, mean, residual, missing)

        prior = self.train_prior_dist.__class__(full_output.mean, full_covariance)
        likelihood, added = self.likelihood.get_fantasy_likelihood(**kwargs), (*self._added_tasks, evaluate)
        assert self._basis is not None
        return self.__class__(
            full_inputs, prior, full_targets, likelihood, self._evaluate, basis=self._basis, added=added
        )


def _shared_missing(
    low_rank: HilbertLinearOperator, missing: Tensor | None, added: Sequence[AddedTaskRows], num_tasks: int
) -> Tensor:
    """The mean over all inputs inside the box of the covariance that is missing, `(..., T, T)`."""
    num_train = low_rank.shape[-1] // num_tasks
    zero = torch.zeros(1, num_tasks, num_tasks, dtype=torch.float64, device=low_rank.device)
    total = num_train * (zero if missing is None else missing).mean(-3)
    count = total.new_full((1, 1), num_train)
    for rows in added:
        blocks = zero if rows.missing is None else rows.missing
        represented = rows.low_rank._diagonal().double().unflatten(-1, (-1, num_tasks))  # (..., m, T)
        is_inside = (represented > 1e-12 * blocks.diagonal(dim1=-2, dim2=-1)).any(-1)[..., None, None]
        total = total + (blocks * is_inside).sum(-3)
        count = count + is_inside.sum(-3)
    return total / count


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


def _hadamard_kernel(kernels: Sequence[Kernel]) -> HadamardKernel | None:
    """The product of two kernels, if one is reduced to a low rank and the other one is a covariance of tasks."""
    if len(kernels) != 2:
        return None
    for data, tasks in (kernels, tuple(reversed(kernels))):
        if reduced_kernel(data) is not None and isinstance(tasks, IndexKernel):
            return HadamardKernel(data, tasks)
    return None


def _side_by_side(x: Tensor, tasks: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(x.shape[:-1], tasks.shape[:-1])
    return torch.cat([x.expand(*shape, x.shape[-1]), tasks.to(x).expand(*shape, 1)], dim=-1)


def _task_strategy(
    data_kernels: Sequence[Kernel], train_inputs: Any, train_prior_dist: Any, train_labels: Tensor, likelihood: Any
) -> TaskPredictionStrategy | None:
    """The strategy of several tasks, if all kernels of data are reduced to a low rank and evaluated by it."""
    kernels = [reduced_kernel(kernel) for kernel in data_kernels]
    reduced = [kernel for kernel in kernels if kernel is not None]
    if len(reduced) < len(kernels) or not isinstance(train_prior_dist, MultitaskMultivariateNormal):
        return None
    evaluate = partial(evaluate_as_training, reduced, train_prior_dist.lazy_covariance_matrix)
    evaluate()  # so that kernels have seen how many rows there are
    if any(kernel.is_exact for kernel in reduced):
        return None
    strategy = TaskPredictionStrategy(
        train_inputs,
        train_prior_dist,
        train_labels,
        likelihood,
        evaluate,
        basis=lambda: tuple(kernel.follow() for kernel in reduced),
    )
    strategy.tell_noise()
    return strategy


@cache
def keep_structure_of_tasks() -> None:
    """
    Have GPyTorch's ``MultitaskKernel``, ``LCMKernel``, ``ProductKernel`` and lazily evaluated kernels keep the low rank
    of the kernels inside; they do what they did before with all other kernels. Called again, nothing happens.
    """
    multitask_forward, multitask_strategy = MultitaskKernel.forward, MultitaskKernel.prediction_strategy
    lcm_strategy = LCMKernel.prediction_strategy
    product_forward, product_strategy = ProductKernel.forward, ProductKernel.prediction_strategy
    multiply_lazy = LazyEvaluatedKernelTensor._mul_matrix

    @wraps(multitask_forward)
    def forward_of_tasks(self: MultitaskKernel, x1: Tensor, x2: Tensor, *args: Any, **kwargs: Any) -> Any:
        product = multitask_forward(self, x1, x2, *args, **kwargs)
        if not isinstance(product, KroneckerProductLinearOperator):
            return product
        data, tasks = product.linear_ops
        if isinstance(data, RefusedLinearOperator):
            return RefusedLinearOperator(x1, product.shape, data.error)
        low_rank = all_tasks(data, tasks.to_dense())
        return product if low_rank is None else low_rank

    @wraps(multitask_strategy)
    def strategy_of_tasks(self: MultitaskKernel, *args: Any) -> DefaultPredictionStrategy:
        return _task_strategy([self.data_covar_module], *args) or multitask_strategy(self, *args)

    @wraps(lcm_strategy)
    def strategy_of_sums(self: LCMKernel, *args: Any) -> DefaultPredictionStrategy:
        kernels = [kernel.data_covar_module for kernel in self.covar_module_list]
        return _task_strategy(kernels, *args) or lcm_strategy(self, *args)

    @wraps(product_forward)
    def forward_of_products(self: ProductKernel, x1: Tensor, x2: Tensor, *args: Any, **kwargs: Any) -> Any:
        kernel = _hadamard_kernel(tuple(self.kernels))
        if kernel is None:
            return product_forward(self, x1, x2, *args, **kwargs)
        return kernel.forward(kernel.select(x1), kernel.select(x2), *args, **kwargs)

    @wraps(product_strategy)
    def strategy_of_products(self: ProductKernel, *args: Any) -> DefaultPredictionStrategy:
        kernel = _hadamard_kernel(tuple(self.kernels))
        return product_strategy(self, *args) if kernel is None else kernel.prediction_strategy(*args)

    @wraps(multiply_lazy)
    def multiply_kernels(self: LazyEvaluatedKernelTensor, other: LinearOperator) -> LinearOperator:
        if isinstance(other, LazyEvaluatedKernelTensor):
            kernel = _hadamard_kernel((self.kernel, other.kernel))
            if kernel is not None:
                data, tasks = (self, other) if kernel.data_kernel is self.kernel else (other, self)
                columns = _side_by_side(data.x1, tasks.x1), _side_by_side(data.x2, tasks.x2)
                return LazyEvaluatedKernelTensor(*columns, kernel=kernel)
        return multiply_lazy(self, other)

    MultitaskKernel.forward, MultitaskKernel.prediction_strategy = forward_of_tasks, strategy_of_tasks
    LCMKernel.prediction_strategy = strategy_of_sums
    ProductKernel.forward, ProductKernel.prediction_strategy = forward_of_products, strategy_of_products
    LazyEvaluatedKernelTensor._mul_matrix = multiply_kernels
