r"""Exact prediction in weight space.

With :math:`f(x) = m(x) + \phi(x)^\top a`, :math:`a \sim N(0, V)`, all that the training data say about :math:`f` is the
posterior of the weights, :math:`a \mid y \sim N(\mu, R R^\top)` with

.. math:: \mu = V^{1/2} C^{-1} V^{1/2} \Phi^\top D^{-1} (y - m), \qquad R = V^{1/2} L^{-\top}, \quad C = L L^\top.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from gpytorch import settings
from gpytorch.distributions import MultivariateNormal
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy
from gpytorch.utils.memoize import cached, clear_cache_hook
from linear_operator.operators import LinearOperator, ZeroLinearOperator
from torch import Tensor

from .lazy_operators import RefusedLinearOperator
from .operator import HilbertAddedDiagLinearOperator, HilbertLinearOperator, capacitance_cholesky, diagonal_for


class WeightPosterior(NamedTuple):
    """
    A Gaussian over the weights of the features.

    :param mean: `(..., M)`, float64.
    :param root: R with covariance `R R^T`, `(..., M, M)`, float64.
    """

    mean: Tensor
    root: Tensor

    @classmethod
    def from_capacitance(cls, scale: Tensor, factor: Tensor, target: Tensor) -> WeightPosterior:
        r"""
        :param scale: :math:`V^{1/2}`, `(..., M)`, float64.
        :param factor: L with :math:`C = L L^\top`, `(..., M, M)`.
        :param target: :math:`V^{1/2} \Phi^\top D^{-1} (y - m)`, `(..., M)`.
        """
        mean = scale * torch.cholesky_solve(target.unsqueeze(-1), factor).squeeze(-1)
        identity = torch.eye(scale.shape[-1], dtype=scale.dtype, device=scale.device)
        inverse = torch.linalg.solve_triangular(factor, identity.expand_as(factor), upper=False)
        return cls(mean, scale.unsqueeze(-1) * inverse.mT)

    def condition(self, features: Tensor, residual: Tensor, noise: Tensor) -> WeightPosterior:
        r"""
        The posterior after m more observations, :math:`O(M^2 m)`.

        With :math:`B = R^\top \Phi^\top` and :math:`B^\top B + D = C C^\top` the new root is
        :math:`R (I - B C^{-\top} (C + D^{1/2})^{-1} B^\top)` (the square-root filter update of Andrews, 1968).

        :param features: Features of the new inputs, `(..., m, M)`.
        :param residual: New targets minus prior mean, `(..., m)`.
        :param noise: Their noise variances, `(..., m)`.
        """
        projected = features @ self.root  # B^T, (..., m, M)
        gram = projected @ projected.mT + torch.diag_embed(noise)
        factor = torch.linalg.cholesky(gram)  # C
        surprise = (residual - (features @ self.mean.unsqueeze(-1)).squeeze(-1)).unsqueeze(-1)
        step = projected.mT @ torch.cholesky_solve(surprise, factor)
        mean = self.mean + (self.root @ step).squeeze(-1)
        update = torch.linalg.solve_triangular(factor + torch.diag_embed(noise.sqrt()), projected, upper=False)
        update = torch.linalg.solve_triangular(factor.mT, update, upper=True)
        return WeightPosterior(mean, self.root - (self.root @ projected.mT) @ update)


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


class HilbertPredictionStrategy(DefaultPredictionStrategy):
    """
    Predicts from the posterior of the weights; the training rows are visited once.

    :param train_inputs: Training inputs.
    :param train_prior_dist: The prior at the training inputs, of a kernel that evaluates to a low-rank covariance.
    :param train_labels: Training targets.
    :param likelihood: A Gaussian likelihood.
    :param evaluate: Evaluates the covariance of `train_prior_dist`.
    :param posterior: The posterior of the weights, where it is known already.
    """

    def __init__(
        self,
        train_inputs: Sequence[Tensor],
        train_prior_dist: MultivariateNormal,
        train_labels: Tensor,
        likelihood: Any,
        evaluate: Callable[[], LinearOperator],
        posterior: WeightPosterior | None = None,
    ):
        self._train_shape = train_prior_dist.event_shape
        self.train_inputs = train_inputs
        self.train_prior_dist = train_prior_dist
        self.train_labels = train_labels
        self.likelihood = likelihood
        self._last_test_train_covar = None
        self._evaluate = evaluate
        self._given_posterior = posterior

    @property
    def lik_train_train_covar(self) -> LinearOperator:
        """The training covariance with the likelihood's noise."""
        return self.likelihood(self.train_prior_dist, self.train_inputs).lazy_covariance_matrix

    @property
    def posterior(self) -> WeightPosterior:
        """The posterior of the weights, computed once (again after a backward pass through it)."""
        if self._given_posterior is not None:
            return self._given_posterior
        return self._posterior(settings.observation_nan_policy.value())

    @cached(name="weight_posterior")
    def _posterior(self, nan_policy: str) -> WeightPosterior:
        low_rank, missing = split_covariance(self._evaluate())
        noise = _noise(self.likelihood, self.train_prior_dist.loc, self.train_inputs)
        noise = noise if missing is None else noise + missing
        residual = (self.train_labels - self.train_prior_dist.loc).double()
        observed = None
        if nan_policy != "ignore" and self.train_labels.isnan().any():
            observed = ~self.train_labels.isnan()
            residual = torch.where(observed, residual, torch.zeros_like(residual))
        factor = capacitance_cholesky(low_rank, noise, observed)
        # A row times a matrix: features that a batch shares are not repeated.
        target = low_rank.scale * ((residual / noise).unsqueeze(-2) @ low_rank.features.double()).squeeze(
            -2
        )  # (..., M)
        return self._remember(WeightPosterior.from_capacitance(low_rank.scale, factor, target))

    def _remember(self, posterior: WeightPosterior) -> WeightPosterior:
        """A posterior that can be kept: detached, or forgotten once a backward pass has freed its graph."""
        if settings.detach_test_caches.on():
            return WeightPosterior(*(tensor.detach() for tensor in posterior))
        for tensor in posterior:
            if tensor.grad_fn is not None:  # a graph serves one backward pass: forget it then
                hook = functools.partial(clear_cache_hook, self)
                functools.update_wrapper(hook, clear_cache_hook)
                tensor.grad_fn.register_hook(hook)
        return posterior

    def exact_prediction(
        self, test_mean: Tensor, test_test_covar: LinearOperator, test_train_covar: LinearOperator
    ) -> tuple[Tensor, LinearOperator]:
        """
        The posterior at test inputs. The covariance between test and training inputs is not evaluated.

        :param test_mean: Prior mean at the test inputs, `(..., n)`.
        :param test_test_covar: Prior covariance of the test inputs, unevaluated.
        :param test_train_covar: Not used.
        """
        low_rank, missing = self._split(test_test_covar.evaluate_kernel())
        features = low_rank.features.double()
        shift = (features @ self.posterior.mean.unsqueeze(-1)).squeeze(-1)
        mean = test_mean + shift.to(test_mean.dtype)
        if settings.skip_posterior_variances.on():
            return mean, ZeroLinearOperator(*mean.shape, mean.shape[-1], dtype=mean.dtype, device=mean.device)
        root = (features @ self.posterior.root).to(test_mean.dtype)
        covariance = HilbertLinearOperator(root, root.new_ones(*root.shape[:-2], root.shape[-1]))
        if covariance.batch_shape != mean.shape[:-1]:
            covariance = covariance.expand(*mean.shape, mean.shape[-1])
        return mean, covariance if missing is None else covariance + missing

    def _split(self, covariance: LinearOperator) -> tuple[HilbertLinearOperator, LinearOperator | None]:
        """The low-rank part of the covariance at test inputs, and what the functions do not represent."""
        low_rank, missing = split_covariance(covariance)
        return low_rank, None if missing is None else diagonal_for(low_rank, missing.to(low_rank.dtype))

    def get_fantasy_strategy(
        self,
        inputs: Any,
        targets: Tensor,
        full_inputs: Any,
        full_targets: Tensor,
        full_output: MultivariateNormal,
        **kwargs: Any,
    ) -> HilbertPredictionStrategy:
        """
        A strategy that has also seen fantasy observations; the training rows are not visited again.

        :param inputs: Fantasy inputs, a list of `(..., m, d)`.
        :param targets: Fantasy targets `(f, ..., m)` or `(..., m)`.
        :param full_inputs: Training and fantasy inputs.
        :param full_targets: Training and fantasy targets.
        :param full_output: The prior at `full_inputs`.
        """
        num_train = self.num_train
        full_mean, full_covariance = full_output.loc, full_output.lazy_covariance_matrix
        low_rank, missing = split_covariance(full_covariance[..., num_train:, num_train:].evaluate_kernel())
        mean = full_mean[..., num_train:]
        likelihood = self.likelihood.get_fantasy_likelihood(**kwargs)
        noise = _noise(likelihood, full_mean, full_inputs).expand(full_mean.shape)[..., num_train:]
        noise = noise if missing is None else noise + missing
        residual = (targets - mean).double()
        posterior = self.posterior.condition(low_rank.features.double(), residual, noise)
        prior = self.train_prior_dist.__class__(full_mean, full_covariance)
        return self.__class__(full_inputs, prior, full_targets, likelihood, self._evaluate, posterior)


def _noise(likelihood: Any, mean: Tensor, inputs: Any) -> Tensor:
    """The likelihood's noise variances, `(..., N)` or `(..., 1)`, float64: what it adds to a zero covariance."""
    nothing = HilbertLinearOperator(mean.new_zeros(*mean.shape, 1), mean.new_zeros(*mean.shape[:-1], 1))
    observed = likelihood(MultivariateNormal(mean, nothing), inputs)
    return observed.lazy_covariance_matrix.evaluate_kernel().noise
