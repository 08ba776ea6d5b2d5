r"""Exact prediction in weight space.

With :math:`f(x) = m(x) + \phi(x)^\top a`, :math:`a \sim N(0, V)`, all that the training data say about :math:`f` is the
posterior of the weights (see :mod:`.weights`).

All rows that are conditioned on share the mean of the variance that the functions do not represent at them, as a part
of the kernel's own; it is part of the noise. Rows that are added later (fantasies) change that mean, for all rows;
those outside the box, where all functions are zero, say nothing about the weights and do not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from gpytorch import settings
from gpytorch.distributions import MultivariateNormal
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy
from gpytorch.utils.memoize import cached, clear_cache_hook
from linear_operator.operators import DiagLinearOperator, LinearOperator, ZeroLinearOperator
from torch import Tensor

from ..operators.lazy_operators import RefusedLinearOperator
from ..operators.operator import HilbertAddedDiagLinearOperator, HilbertLinearOperator, data_precision
from .weights import WeightPosterior, weight_posterior

_MAX_REVISIONS = 4  # of the basis, for one posterior


def split_covariance(covariance: LinearOperator) -> tuple[HilbertLinearOperator, Tensor | None]:
    """
    The low-rank part of a kernel's evaluated covariance and the independent variance added to it, if any.

    :param covariance: What a :class:`~gpytorch_tkrr.HilbertKernel`, scaled or not, evaluates to.
    """
    if isinstance(covariance, HilbertAddedDiagLinearOperator):
        return covariance.low_rank, covariance.noise
    if isinstance(covariance, HilbertLinearOperator):
        return covariance, None
    if isinstance(covariance, RefusedLinearOperator):
        raise covariance.error
    raise TypeError(f"Expected the covariance of a HilbertKernel, got a {type(covariance).__name__}.")


@contextmanager
def by_functions(module: torch.nn.Module) -> Iterator[None]:
    """
    A context in which the kernels of a model are evaluated by their functions, also where there are so few rows that
    they would be evaluated as they are.

    :param module: A model or kernel.
    """
    with ExitStack() as stack:
        for part in module.modules():
            context = getattr(type(part), "by_functions", None)
            if context is not None:
                stack.enter_context(context(part))
        yield


class AddedRows(NamedTuple):
    """
    Rows that were added to the training rows, all float64.

    :param features: `(..., m, M)`.
    :param residual: Targets minus prior mean `(..., m)`.
    :param noise: Variances of the likelihood's noise `(..., m)`.
    :param missing: Variance of the kernel that the functions do not represent `(..., m)`.
    :param scale: By which factor each row multiplies the kernel's variance, `(..., m)` or `(1,)`.
    :param is_inside: Whether they represent any variance at all `(..., m)`.
    """

    features: Tensor
    residual: Tensor
    noise: Tensor
    missing: Tensor
    scale: Tensor
    is_inside: Tensor


class HilbertPredictionStrategy(DefaultPredictionStrategy):
    """
    Predicts from the posterior of the weights; the training rows are visited once.

    :param train_inputs: Training inputs.
    :param train_prior_dist: The prior at the training inputs, of a kernel that evaluates to a low-rank covariance.
    :param train_labels: Training targets.
    :param likelihood: A Gaussian likelihood.
    :param evaluate: Evaluates the covariance of the training rows that the first strategy began with.
    :param basis: Tells one basis of the kernel from another.
    :param posterior: The posterior of the weights, where it is known already.
    :param added: Rows that came after the training rows.
    :param counts_missing: Whether rows that are conditioned on count what the functions do not represent.
    :param is_exact: Whether the kernel is now evaluated without functions; GPyTorch's own strategy predicts then.
    """

    def __init__(
        self,
        train_inputs: Sequence[Tensor],
        train_prior_dist: MultivariateNormal,
        train_labels: Tensor,
        likelihood: Any,
        evaluate: Callable[[], LinearOperator],
        *,
        basis: Callable[[], Hashable] | None = None,
        posterior: WeightPosterior | None = None,
        added: Sequence[Callable[[], AddedRows]] = (),
        counts_missing: bool = True,
        is_exact: Callable[[], bool] | None = None,
    ):
        self._train_shape = train_prior_dist.event_shape
        self.train_inputs = train_inputs
        self.train_prior_dist = train_prior_dist
        self.train_labels = train_labels
        self.likelihood = likelihood
        self._last_test_train_covar = None
        self._evaluate = evaluate
        self._basis = basis
        self._given_posterior = posterior
        self._added = tuple(added)
        self._counts_missing = counts_missing
        self._evaluates_exactly = is_exact

    @property
    def lik_train_train_covar(self) -> LinearOperator:
        """The training covariance with the likelihood's noise."""
        return self.likelihood(self.train_prior_dist, self.train_inputs).lazy_covariance_matrix

    @property
    def posterior(self) -> WeightPosterior:
        """The posterior of the weights, computed once (again after a backward pass through it)."""
        if self._given_posterior is not None:
            return self._given_posterior
        basis = None if self._basis is None else self._basis()
        return self._posterior(settings.observation_nan_policy.value(), basis)

    def _is_exact(self) -> bool:
        """Whether the kernel is evaluated without functions."""
        return self._evaluates_exactly is not None and self._evaluates_exactly()

    def tell_noise(self) -> None:
        """Tell the kernel of the noise, before anything is evaluated in a basis that this may change."""
        if self._basis is None:
            return
        for _ in range(_MAX_REVISIONS):
            before, covariance = self._basis(), self._evaluate()  # rows may widen the range
            if self._is_exact():
                return
            self._tell(covariance)
            if self._basis() == before:
                return

    @torch.no_grad()
    def _tell(self, covariance: LinearOperator) -> None:
        """Tell the kernel how precise the data are; as its likelihood does in training."""
        low_rank, missing = split_covariance(covariance)
        noise = _noise(self.likelihood, self.train_prior_dist.loc, self.train_inputs)
        low_rank.tell(noise if missing is None else noise + missing, self.train_labels - self.train_prior_dist.loc)

    def _exact_strategy(self) -> DefaultPredictionStrategy | None:
        """GPyTorch's own strategy, where the kernel is evaluated without functions."""
        if self._given_posterior is not None or self._basis is None:
            return None
        basis = self._basis()
        return self._make_exact_strategy(basis) if self._is_exact() else None

    @cached(name="exact_strategy")
    def _make_exact_strategy(self, basis: Hashable) -> DefaultPredictionStrategy:
        covariance = self.train_prior_dist.lazy_covariance_matrix
        clear_cache_hook(covariance)
        prior = self.train_prior_dist.__class__(self.train_prior_dist.loc, covariance.evaluate_kernel())
        return DefaultPredictionStrategy(self.train_inputs, prior, self.train_labels, self.likelihood)

    @cached(name="weight_posterior")
    def _posterior(self, nan_policy: str, basis: Hashable) -> WeightPosterior:
        low_rank, missing = split_covariance(self._evaluate())
        num_train = low_rank.shape[-1]
        mean, labels = self.train_prior_dist.loc[..., :num_train], self.train_labels[..., :num_train]
        noise = _noise(self.likelihood, self.train_prior_dist.loc, self.train_inputs)
        noise = noise if noise.shape[-1] == 1 else noise[..., :num_train]
        residual = (labels - mean).double()
        if settings.detach_test_caches.on():
            low_rank, noise, residual = low_rank.detach(), noise.detach(), residual.detach()
            missing = None if missing is None else missing.detach()
        added = [rows() for rows in self._added]
        scale = low_rank.row_scale
        total = noise.new_zeros(())
        if missing is not None:
            total = num_train * (missing / scale).mean(-1, keepdim=True)  # (..., 1)
        count = noise.new_full((1,), num_train)
        for rows in added:
            total = total + (rows.missing * rows.is_inside).sum(-1, keepdim=True)
            count = count + rows.is_inside.sum(-1, keepdim=True)
        shared = total / count
        posterior = self._train_posterior(low_rank, residual, noise + shared * scale, labels, nan_policy)
        for rows in added:
            posterior = posterior.condition(rows.features, rows.residual, rows.noise + shared * rows.scale)
        return self._remember(posterior)

    def _remember(self, posterior: WeightPosterior) -> WeightPosterior:
        """A posterior that can be kept until a backward pass has freed its graph."""
        for tensor in posterior:
            if tensor.grad_fn is not None:  # a graph serves one backward pass: forget it then
                hook = functools.partial(clear_cache_hook, self)
                functools.update_wrapper(hook, clear_cache_hook)
                tensor.grad_fn.register_hook(hook)
        return posterior

    def _train_posterior(
        self, low_rank: HilbertLinearOperator, residual: Tensor, noise: Tensor, labels: Tensor, nan_policy: str
    ) -> WeightPosterior:
        observed = None
        if nan_policy != "ignore" and labels.isnan().any():
            observed = ~labels.isnan()
            residual = torch.where(observed, residual, torch.zeros_like(residual))
        target = low_rank.feature_sums((residual / noise).unsqueeze(-1)).squeeze(-1)  # (..., M)
        return weight_posterior(low_rank.prior, data_precision(low_rank, noise, observed), target)

    def exact_prediction(
        self, test_mean: Tensor, test_test_covar: LinearOperator, test_train_covar: LinearOperator
    ) -> tuple[Tensor, LinearOperator]:
        """
        The posterior at test inputs. The covariance between test and training inputs is not evaluated.

        :param test_mean: Prior mean at the test inputs, `(..., n)`.
        :param test_test_covar: Prior covariance of the test inputs, unevaluated.
        :param test_train_covar: Not used.
        """
        exact = self._exact_strategy()
        if exact is not None:
            return exact.exact_prediction(test_mean, test_test_covar, test_train_covar)
        low_rank, missing = self._split(test_test_covar.evaluate_kernel())
        features = low_rank.features.double()
        posterior = self.posterior
        shift = (features @ posterior.mean.unsqueeze(-1)).squeeze(-1)
        mean = test_mean + shift.to(test_mean.dtype)
        if settings.skip_posterior_variances.on():
            return mean, ZeroLinearOperator(*mean.shape, mean.shape[-1], dtype=mean.dtype, device=mean.device)
        root = (features @ posterior.root).to(test_mean.dtype)
        covariance = HilbertLinearOperator(root, root.new_ones(*root.shape[:-2], root.shape[-1]))
        if covariance.batch_shape != mean.shape[:-1]:
            covariance = covariance.expand(*mean.shape, mean.shape[-1])
        return mean, covariance if missing is None else covariance + missing.expand(covariance.shape)

    def _split(self, covariance: LinearOperator) -> tuple[HilbertLinearOperator, LinearOperator | None]:
        """The low-rank part of the covariance of new inputs, and what the functions do not represent."""
        low_rank, missing = split_covariance(covariance)
        return low_rank, None if missing is None else DiagLinearOperator(missing.to(low_rank.dtype))

    def get_fantasy_strategy(
        self,
        inputs: Any,
        targets: Tensor,
        full_inputs: Any,
        full_targets: Tensor,
        full_output: MultivariateNormal,
        **kwargs: Any,
    ) -> DefaultPredictionStrategy:
        """
        A strategy that has also seen fantasy observations, as if all rows had been there from the start.

        Features of the training rows are not evaluated again. Since the new rows take part in the mean of the variance
        that is missing, the posterior is computed anew from the Gram matrix, :math:`O(M^3)`.

        :param inputs: Fantasy inputs, a list of `(..., m, d)`.
        :param targets: Fantasy targets `(f, ..., m)` or `(..., m)`.
        :param full_inputs: Training and fantasy inputs.
        :param full_targets: Training and fantasy targets.
        :param full_output: The prior at `full_inputs`.
        """
        exact = self._exact_strategy()
        if exact is not None:
            return exact.get_fantasy_strategy(inputs, targets, full_inputs, full_targets, full_output, **kwargs)
        num_train = self.num_train
        full_mean, full_covariance = full_output.loc, full_output.lazy_covariance_matrix
        mean, covariance = full_mean[..., num_train:], full_covariance[..., num_train:, num_train:]
        likelihood = self.likelihood.get_fantasy_likelihood(**kwargs)
        noise = _noise(likelihood, full_mean, full_inputs).expand(full_mean.shape)[..., num_train:]

        def evaluate() -> AddedRows:
            clear_cache_hook(covariance)
            low_rank, missing = split_covariance(covariance.evaluate_kernel())
            represented = low_rank._diagonal().double()
            if missing is None or not self._counts_missing:
                missing = torch.zeros_like(represented)
            missing = missing.expand_as(represented)
            is_inside = represented > 1e-12 * missing
            scale = low_rank.row_scale
            residual = (targets - mean).double()
            return AddedRows(low_rank.features.double(), residual, noise, missing / scale, scale, is_inside)

        prior = self.train_prior_dist.__class__(full_mean, full_covariance)
        added = (*self._added, evaluate)
        return self.__class__(
            full_inputs,
            prior,
            full_targets,
            likelihood,
            self._evaluate,
            basis=self._basis,
            added=added,
            counts_missing=self._counts_missing,
            is_exact=self._evaluates_exactly,
        )


def _noise(likelihood: Any, mean: Tensor, inputs: Any) -> Tensor:
    """The likelihood's noise variances, `(..., N)` or `(..., 1)`, float64: what it adds to a zero covariance."""
    nothing = HilbertLinearOperator(mean.new_zeros(*mean.shape, 1), mean.new_zeros(*mean.shape[:-1], 1))
    observed = likelihood(MultivariateNormal(mean, nothing), inputs)
    return observed.lazy_covariance_matrix.evaluate_kernel().noise
