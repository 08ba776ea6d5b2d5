"""Regression with few inputs by Hilbert-space features for scikit-learn."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import gpytorch
import numpy as np
import torch
from gpytorch.kernels import Kernel, MaternKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from scipy.special import ndtri
from sklearn.base import RegressorMixin
from torch import Tensor

from ..data.progress import progress_bar
from ..errors import InputError
from ..features.categorical import CategoricalKernel
from ..hilbert.gp import HilbertGP
from ..hilbert.kernel import HilbertKernel
from ..hilbert.prediction import split_covariance
from .table_estimator import TableEstimator, all_or_nothing, as_numpy, as_seed, joined_weights, positive_rows

#: More inputs have too many products of functions.
MAX_INPUTS = 3

#: So have more combinations of the levels of categories: each has functions of the other inputs of its own.
MAX_COMBINATIONS = 32


class HilbertRegressor(RegressorMixin, TableEstimator):
    r"""
    Gaussian process regression with one to three inputs by :class:`~gpytorch_tkrr.HilbertGP`, for scikit-learn: the
    exact GP up to a tolerance, for any number of rows.

    Inputs are those of :class:`TKRRRegressor`: arrays of numbers, and DataFrames with columns of text, categories,
    booleans and dates. A level that the training rows did not have gets the prior's variance, and :meth:`extrapolates`
    tells.

    :param kernel: A GPyTorch kernel of standardised numbers, in which a category is a column of level numbers; None for
        a scaled Matérn-5/2 kernel with a lengthscale for each number, times a
        :class:`~gpytorch_tkrr.CategoricalKernel` of the categories.
    :param tol: Error of the kernel that is allowed, see :meth:`gpytorch_tkrr.HilbertKernel.from_tolerance`.
    :param num_steps: Steps of Adam that maximise the marginal likelihood.
    :param learning_rate: Their size.
    :param categorical: Names or numbers of columns that are categories although they hold numbers. Columns of text and
        of pandas' categorical type are categories anyway.
    :param random_state: Not used: nothing is random.
    :param progress: Whether to show a progress bar.

    :ivar model_: The fitted :class:`~gpytorch_tkrr.HilbertGP`, of standardised inputs and targets.
    :ivar columns_: What the columns of the table are.

    Example:
        >>> import numpy as np, gpytorch_tkrr as tkrr
        >>> X = np.linspace(0, 1, 200)[:, None]
        >>> model = tkrr.sklearn.HilbertRegressor(num_steps=30).fit(X, np.sin(9 * X[:, 0]))
        >>> mean, sd = model.predict(X, return_std=True)
        >>> bool(np.abs(mean - np.sin(9 * X[:, 0])).max() < 0.05)
        True
    """

    def __init__(
        self,
        kernel: Kernel | None = None,
        *,
        tol: float = 3e-3,
        num_steps: int = 100,
        learning_rate: float = 0.1,
        categorical: Sequence[str | int] | None = None,
        random_state: Any = None,
        progress: bool = False,
    ):
        self.kernel = kernel
        self.tol = tol
        self.num_steps = num_steps
        self.learning_rate = learning_rate
        self.categorical = categorical
        self.random_state = random_state
        self.progress = progress

    @all_or_nothing
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> HilbertRegressor:
        """
        Fit the model.

        :param X: Inputs `(N, D)`: an array or a DataFrame.
        :param y: Targets `(N,)`, numbers.
        :param sample_weight: Row weights `(N,)`: the noise variance of a row is divided by its weight, and a row of
            weight zero is left out.
        """
        x, targets = self._learn_rows(X), torch.from_numpy(self._numbers(y))
        x, targets, weights = positive_rows(x, targets, self._weights(sample_weight, x, targets))
        self.shift_, self.scale_ = x.mean(0), _spread(x)
        for d in self.columns_.categories:
            self.shift_[d], self.scale_[d] = 0.0, 1.0
        self.target_shift_, self.target_scale_ = float(targets.mean()), float(_spread(targets))
        self._train(x, targets, weights, None)
        return self

    @all_or_nothing
    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> HilbertRegressor:
        """
        Append rows to those of the last fit, and go on from its hyperparameters.

        :param X: Inputs `(n, D)`.
        :param y: Targets `(n,)`.
        :param sample_weight: Row weights `(n,)`.
        """
        if not hasattr(self, "model_"):
            return self.fit(X, y, sample_weight)
        if not hasattr(self, "_training"):
            raise InputError("This model was loaded from a file, which holds no rows to append to. Fit it anew.")
        targets = torch.from_numpy(self._numbers(y))
        x, _ = self._more_rows(X)
        x, targets, weights = positive_rows(x, targets, self._weights(sample_weight, x, targets))
        old_x, old_targets, old_weights = self._training
        weights = joined_weights(old_weights, len(old_x), weights, len(x))
        self._train(torch.cat([old_x, x]), torch.cat([old_targets, targets]), weights, self.model_)
        return self

    def predict(
        self, X: Any, return_std: bool = False, return_quantiles: Sequence[float] | None = None
    ) -> np.ndarray | tuple[np.ndarray, ...]:
        """
        The mean of new observations.

        :param X: Inputs `(n, D)`.
        :param return_std: Whether to return their standard deviation `(n,)`, too: noise included.
        :param return_quantiles: Probabilities whose quantiles are returned, too, `(n, k)`.
        """
        mean, sd = self._moments(X)
        answers = [mean]
        if return_std:
            answers.append(sd)
        if return_quantiles is not None:
            levels = np.atleast_1d(return_quantiles)
            if not ((levels >= 0) & (levels <= 1)).all():
                raise InputError(f"Quantiles are defined for probabilities between 0 and 1; got {levels.tolist()}.")
            answers.append(mean[:, None] + sd[:, None] * ndtri(levels))
        return answers[0] if len(answers) == 1 else tuple(answers)

    @torch.no_grad()
    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """
        Draws of new observations, `(n, n_samples)`; those of one column share a draw of the function.

        :param X: Inputs `(n, D)`.
        :param n_samples: How many.
        :param random_state: Seed.
        """
        f = self.model_(self._standardised(self._rows(X)))
        low_rank, own = split_covariance(f.lazy_covariance_matrix)  # by functions, and what is independent
        generator = torch.Generator().manual_seed(as_seed(random_state))
        weights = torch.randn(low_rank.num_features, n_samples, dtype=torch.float64, generator=generator)
        noise = self.model_.likelihood.noise + (0.0 if own is None else own)
        error = torch.randn(len(f.mean), n_samples, dtype=torch.float64, generator=generator)
        values = f.mean.unsqueeze(-1) + low_rank.evaluate(low_rank.scale.unsqueeze(-1) * weights)
        draws = values + noise.sqrt().expand(len(f.mean)).unsqueeze(-1) * error
        return as_numpy(self.target_shift_ + self.target_scale_ * draws)

    def log_predictive_density(self, X: Any, y: Any) -> np.ndarray:
        """
        The log density of targets under the predictive distribution, `(n,)`. Its mean is a score for model selection.

        :param X: Inputs `(n, D)`.
        :param y: Targets `(n,)`.
        """
        mean, sd = (torch.as_tensor(part) for part in self._moments(X))
        return as_numpy(torch.distributions.Normal(mean, sd).log_prob(torch.from_numpy(self._numbers(y))))

    def extrapolates(self, X: Any) -> np.ndarray:
        """
        Which rows lie outside the range of the training rows, or have a level that they did not have, `(n,)`.

        :param X: Inputs `(n, D)`.
        """
        x = self._rows(X)
        edges = self.model_.train_inputs[0] * self.scale_ + self.shift_
        slack = 1e-9 * (edges.amax(0) - edges.amin(0))
        outside = ((x < edges.amin(0) - slack) | (x > edges.amax(0) + slack)).any(-1)
        return as_numpy(outside) | self.columns_.is_unknown(as_numpy(x))

    def _train(self, x: Tensor, targets: Tensor, weights: Tensor | None, earlier: HilbertGP | None) -> None:
        """Make the model for these rows and train it."""
        rows, y = self._standardised(x), (targets - self.target_shift_) / self.target_scale_
        model = self._new_model((rows, y) if weights is None else (rows, y, weights), rows)
        if earlier is not None:
            model.likelihood.load_state_dict(earlier.likelihood.state_dict())
            model.covar_module.base_kernel.load_state_dict(earlier.covar_module.base_kernel.state_dict())
        objective = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
        optimizer = torch.optim.Adam(model.parameters(), lr=self.learning_rate)
        model.train()
        bar = progress_bar(self.progress, self.num_steps, "HilbertGP", "step")
        try:
            for _ in range(self.num_steps):
                optimizer.zero_grad()
                loss = -objective(model(*model.train_inputs), model.train_targets)
                loss.backward()
                optimizer.step()
                bar.update(f"loss {loss.item():.4g}")
        finally:
            bar.close()
        self.model_, self._training = model.eval(), (x, targets, weights)

    def _new_model(self, data: Any, x: Tensor) -> HilbertGP:
        kernel = self._default_kernel(x.shape[1]) if self.kernel is None else copy.deepcopy(self.kernel)
        hilbert = HilbertKernel.from_tolerance(kernel.double(), x, self.tol)
        return HilbertGP(data, GaussianLikelihood().double(), hilbert).double()

    def _default_kernel(self, num_dims: int) -> Kernel:
        levels = self.columns_.categories
        if num_dims > MAX_INPUTS:
            raise InputError(
                f"HilbertRegressor takes at most {MAX_INPUTS} inputs; got {num_dims}. Use TKRRRegressor, or a kernel "
                "that is a sum over few inputs each."
            )
        if math.prod(levels.values()) > MAX_COMBINATIONS:
            raise InputError(
                f"HilbertRegressor takes at most {MAX_COMBINATIONS} combinations of levels; got "
                f"{' x '.join(map(str, levels.values()))}. Use TKRRRegressor, or a kernel in which categories are "
                "added: ScaleKernel(MaternKernel(active_dims=[0])) + ScaleKernel(IndicatorKernel(active_dims=[1]))."
            )
        numbers = [d for d in range(num_dims) if d not in levels]
        parts: list[Kernel] = [CategoricalKernel(active_dims=[d]) for d in levels]
        if numbers:
            parts.insert(0, MaternKernel(2.5, ard_num_dims=len(numbers), active_dims=numbers))
        product = parts[0]
        for part in parts[1:]:
            product = product * part
        return ScaleKernel(product)

    def _standardised(self, x: Tensor) -> Tensor:
        return (x - self.shift_) / self.scale_

    @torch.no_grad()
    def _moments(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
        rows = self._standardised(self._rows(X))
        parts = [self.model_.likelihood(self.model_(piece)) for piece in rows.split(1024)]
        mean, variance = (torch.cat([getattr(part, name) for part in parts]) for name in ("mean", "variance"))
        return as_numpy(self.target_shift_ + self.target_scale_ * mean), as_numpy(self.target_scale_ * variance.sqrt())

    def _fitted_state(self) -> dict[str, Any]:
        return {
            "inputs": (self.shift_, self.scale_),
            "targets": (self.target_shift_, self.target_scale_),
            "edges": self.model_.train_inputs[0],
            "model": self.model_.state_dict(),
        }

    def _load_fitted_state(self, state: dict[str, Any]) -> None:
        self.shift_, self.scale_ = state["inputs"]
        self.target_shift_, self.target_scale_ = state["targets"]
        self.model_ = self._new_model(None, state["edges"])
        self.model_.load_state_dict(state["model"])
        self.model_.eval()

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "model_")


def _spread(values: Tensor) -> Tensor:
    sd = values.std(0, correction=0)
    return torch.where(sd > 0, sd, torch.ones_like(sd))
