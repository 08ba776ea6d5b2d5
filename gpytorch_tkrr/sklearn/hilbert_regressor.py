"""Regression with few inputs by Hilbert-space features for scikit-learn."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import gpytorch
import numpy as np
import torch
from gpytorch.kernels import Kernel, MaternKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from scipy.special import ndtri
from sklearn.base import RegressorMixin
from sklearn.utils.validation import _check_y, check_consistent_length
from torch import Tensor

from ..data.progress import progress_bar
from ..errors import InputError
from ..hilbert.gp import HilbertGP
from ..hilbert.kernel import HilbertKernel
from .table_estimator import TableEstimator, as_seed

#: More inputs have too many products of functions.
MAX_INPUTS = 3


class HilbertRegressor(RegressorMixin, TableEstimator):
    r"""
    Gaussian process regression with one to three inputs by :class:`~gpytorch_tkrr.HilbertGP`, for scikit-learn: the
    exact GP up to a tolerance, for any number of rows.

    :param kernel: A GPyTorch kernel of standardised inputs; None for a scaled Matérn-5/2 kernel with a lengthscale for
        each input.
    :param tol: Error of the kernel that is allowed, see :meth:`gpytorch_tkrr.HilbertKernel.from_tolerance`.
    :param num_steps: Steps of Adam that maximise the marginal likelihood.
    :param learning_rate: Their size.
    :param categorical: Names or numbers of columns that are categories; they are one-hot coded.
    :param random_state: Not used by the fit; seed of :meth:`sample_y`.
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

    def fit(self, X: Any, y: Any) -> HilbertRegressor:
        """
        Fit the model.

        :param X: Inputs `(N, D)`: an array or a DataFrame.
        :param y: Targets `(N,)`, numbers.
        """
        x = self._numeric(self._learn_rows(X))
        targets = self._targets(y)
        check_consistent_length(x, targets)
        self.shift_, self.scale_ = x.mean(0), _spread(x)
        self.target_shift_, self.target_scale_ = float(targets.mean()), float(_spread(targets))
        self._start((x, targets), None)
        return self

    def partial_fit(self, X: Any, y: Any) -> HilbertRegressor:
        """
        Append rows to those of the last fit, and go on from its hyperparameters.

        :param X: Inputs `(n, D)`.
        :param y: Targets `(n,)`.
        """
        if not hasattr(self, "model_"):
            return self.fit(X, y)
        if not hasattr(self, "_training"):
            raise InputError("This model was loaded from a file, which holds no rows to append to. Fit it anew.")
        x, targets = self._numeric(self._rows(X)), self._targets(y)
        check_consistent_length(x, targets)
        old_x, old_targets = self._training
        self._start((torch.cat([old_x, x]), torch.cat([old_targets, targets])), self.model_)
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
            answers.append(mean[:, None] + sd[:, None] * ndtri(np.atleast_1d(return_quantiles)))
        return answers[0] if len(answers) == 1 else tuple(answers)

    @torch.no_grad()
    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """
        Draws of new observations, `(n, n_samples)`; those of one column share a draw of the function.

        :param X: Inputs `(n, D)`.
        :param n_samples: How many.
        :param random_state: Seed.
        """
        rows = self._standardised(self._numeric(self._rows(X)))
        distribution = self.model_.likelihood(self.model_(rows))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(as_seed(random_state))
            draws = distribution.sample(torch.Size([n_samples]))
        return (self.target_shift_ + self.target_scale_ * draws).numpy().T

    def log_predictive_density(self, X: Any, y: Any) -> np.ndarray:
        """
        The log density of targets under the predictive distribution, `(n,)`.

        :param X: Inputs `(n, D)`.
        :param y: Targets `(n,)`.
        """
        mean, sd = (torch.as_tensor(part) for part in self._moments(X))
        return torch.distributions.Normal(mean, sd).log_prob(self._targets(y)).numpy()

    def _start(self, rows: tuple[Tensor, Tensor], earlier: HilbertGP | None) -> None:
        """Make the model for these rows and train it."""
        self._training = rows
        x, y = self._standardised(rows[0]), (rows[1] - self.target_shift_) / self.target_scale_
        model = self._new_model((x, y), x)
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
        self.model_ = model.eval()
        with torch.no_grad():
            self.model_(x[:1])  # on the basis that suits what has been learned; it stays
        self.model_.covar_module.keep_basis()

    def _new_model(self, data: Any, x: Tensor) -> HilbertGP:
        num_dims = x.shape[1]
        if self.kernel is None and num_dims > MAX_INPUTS:
            raise InputError(
                f"HilbertRegressor takes at most {MAX_INPUTS} inputs; got {num_dims}. Use TKRRRegressor, or a kernel "
                "that is a sum over few inputs each."
            )
        kernel = ScaleKernel(MaternKernel(2.5, ard_num_dims=num_dims)) if self.kernel is None else self.kernel
        hilbert = HilbertKernel.from_tolerance(copy.deepcopy(kernel).double(), x, self.tol)
        return HilbertGP(data, GaussianLikelihood().double(), hilbert).double()

    def _numeric(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.columns_.expand(x.numpy()))

    def _standardised(self, x: Tensor) -> Tensor:
        return (x - self.shift_) / self.scale_

    @torch.no_grad()
    def _moments(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
        rows = self._standardised(self._numeric(self._rows(X)))
        parts = [self.model_.likelihood(self.model_(piece)) for piece in rows.split(1024)]
        mean, variance = (torch.cat([getattr(part, name) for part in parts]) for name in ("mean", "variance"))
        return (self.target_shift_ + self.target_scale_ * mean).numpy(), (self.target_scale_ * variance.sqrt()).numpy()

    def _targets(self, y: Any) -> Tensor:
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None.")
        return torch.from_numpy(np.array(_check_y(y, y_numeric=True, estimator=self), dtype=np.float64))

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
        self.model_.covar_module.keep_basis()  # the one that was saved
        self.model_.eval()

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "model_")


def _spread(values: Tensor) -> Tensor:
    sd = values.std(0, correction=0)
    return torch.where(sd > 0, sd, torch.ones_like(sd))
