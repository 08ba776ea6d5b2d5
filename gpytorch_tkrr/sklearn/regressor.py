"""Regression by CP weights for scikit-learn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood, MultitaskGaussianLikelihood
from sklearn.base import RegressorMixin
from sklearn.utils import check_array
from torch import Tensor

from ..errors import InputError
from ..inference.noise_choice import choose_noise, make_noise
from ..model.multioutput import MultioutputTKRR
from ..model.prediction import Prediction
from ..model.tkrr import TKRR
from ..tables.columns import require_finite
from .table_estimator import all_or_nothing, as_numpy, as_seed, joined_weights, positive_rows
from .tkrr_estimator import TKRREstimator, weighted_data
from .transform import learn_transform, transform_from_plain

#: The smallest noise variance, relative to the variance of the targets; GPyTorch's own, for targets of unit variance.
LEAST_NOISE = 1e-4

#: Samples whose spread is the standard deviation of targets that were transformed.
NUM_SAMPLES = 1000


class TKRRRegressor(RegressorMixin, TKRREstimator):
    r"""
    Regression by :class:`~gpytorch_tkrr.TKRR`, many inputs and many rows, for scikit-learn.

    Arrays of numbers are taken in any units. Columns of a DataFrame may also be text, categories, booleans and dates. A
    level that the training rows did not have gets the prior's variance, and :meth:`extrapolates` tells.

    Several outputs, targets `(N, T)`, are one :class:`~gpytorch_tkrr.MultioutputTKRR`: what they have in common is
    learned, and targets that are NaN were not observed.

    :param rank: R, the number of components. None: "gibbs" finds out how many are needed, "als" takes 10.
    :param num_basis: Sines per input; None for the model's own choice.
    :param method: "gibbs" draws weights and hyperparameters from their posterior; "als" finds one solution by
        alternating least squares, with approximate intervals.
    :param num_draws: Draws of each chain, with "gibbs"; None to choose them by the number of rows, see
        :func:`~gpytorch_tkrr.fit_gibbs`.
    :param num_warmup: Sweeps before them; None as for `num_draws`.
    :param num_chains: Independent chains; None as for `num_draws`.
    :param noise: "gaussian", "student" (heavy tails), "by-inputs" (a variance that depends on the inputs, and heavy
        tails), "skewed" (the same with skewed tails), or "auto": training rows that are held out decide, see
        :func:`~gpytorch_tkrr.choose_noise`. With "als" it is Gaussian.
    :param target_transform: "log" or "yeo-johnson" for a model of transformed targets, None for the targets themselves.
        With a transform :meth:`predict` returns the median of y: its mean may not exist.
    :param kernel: A separable GPyTorch kernel of the encoded inputs; None for :func:`~gpytorch_tkrr.anova_kernel`.
    :param categorical: Names or numbers of columns that are categories although they hold numbers. Columns of text and
        of pandas' categorical type are categories anyway.
    :param missing: "integrate" for inputs that may be missing (NaN, None, an empty date): f is integrated over the
        distribution of their column among the training rows. None to refuse them. See :class:`~gpytorch_tkrr.TKRR`.
    :param random_state: Seed of all that is random.
    :param progress: Whether to show a progress bar.

    :ivar model_: The fitted :class:`~gpytorch_tkrr.TKRR`, or :class:`~gpytorch_tkrr.MultioutputTKRR`.
    :ivar result_: What the fit did.
    :ivar columns_: What the columns of the table are.
    :ivar noise_: The kind of noise.
    :ivar n_outputs_: T, the number of outputs.

    Example:
        >>> import numpy as np, gpytorch_tkrr as tkrr
        >>> rng = np.random.default_rng(0)
        >>> X = rng.uniform(size=(200, 3))
        >>> y = np.sin(6 * X[:, 0]) + X[:, 1] + 0.1 * rng.normal(size=200)
        >>> model = tkrr.sklearn.TKRRRegressor(rank=4, num_draws=30, num_warmup=30, random_state=0)
        >>> mean, sd = model.fit(X, y).predict(X, return_std=True)
        >>> bool(model.score(X, y) > 0.9), mean.shape, sd.shape
        (True, (200,), (200,))
        >>> model.predict(X[:5], return_quantiles=[0.05, 0.95])[1].shape
        (5, 2)
    """

    def __init__(
        self,
        rank: int | None = None,
        *,
        num_basis: int | None = None,
        method: str = "gibbs",
        num_draws: int | None = None,
        num_warmup: int | None = None,
        num_chains: int | None = None,
        noise: str = "gaussian",
        target_transform: str | None = None,
        kernel: Kernel | None = None,
        categorical: Sequence[str | int] | None = None,
        missing: Any = None,
        random_state: Any = None,
        progress: bool = False,
    ):
        self.rank = rank
        self.num_basis = num_basis
        self.method = method
        self.num_draws = num_draws
        self.num_warmup = num_warmup
        self.num_chains = num_chains
        self.noise = noise
        self.target_transform = target_transform
        self.kernel = kernel
        self.categorical = categorical
        self.missing = missing
        self.random_state = random_state
        self.progress = progress

    @all_or_nothing
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> TKRRRegressor:
        """
        Fit the model.

        :param X: Inputs `(N, D)`: an array or a DataFrame.
        :param y: Targets `(N,)`, numbers; or `(N, T)` for several outputs, NaN where an output was not observed.
        :param sample_weight: Row weights `(N,)`: the noise variance of a row is divided by its weight, and a row of
            weight zero is left out.
        """
        self._check_parameters()
        x = self._learn_rows(X)
        targets = self._targets(y)
        weights = self._weights(sample_weight, x, targets)
        seed = as_seed(self.random_state)
        self.learn_target(lambda: (x, torch.from_numpy(targets)), seed, num_outputs=targets[:1].size)
        self._fit_rows(*positive_rows(x, self.transformed(targets), weights), seed)
        return self

    def _fit_rows(self, x: Tensor, t: Tensor, weights: Tensor | None, seed: int) -> None:
        model = self._new_model(x, t)
        self.result_ = self.fit_model(model, seed, data=weighted_data(model, weights))
        self.model_, self._weighted = model, weights

    @all_or_nothing
    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> TKRRRegressor:
        """
        Append rows to those of the last fit, and go on from where it ended. Where the new rows have levels or a range
        that the model does not know, or rows have weights, it is fitted anew to all rows.

        :param X: Inputs `(n, D)`.
        :param y: Targets `(n,)` or `(n, T)`.
        :param sample_weight: Row weights `(n,)`.
        """
        if not hasattr(self, "model_"):
            return self.fit(X, y, sample_weight)
        if self.model_.train_inputs is None or self.model_.train_targets is None:
            raise InputError("This model was loaded from a file, which holds no rows to append to. Fit it anew.")
        targets = self._known_targets(y)
        x, is_new = self._more_rows(X)
        weights = self._weights(sample_weight, x, targets)
        x, t, weights = positive_rows(x, self.transformed(targets), weights)
        seed = as_seed(self.random_state)
        old_x, old_t = self.model_.train_inputs[0], self.model_.train_targets
        weights = joined_weights(self._weighted, len(old_t), weights, len(t))
        if weights is None and not is_new and self._refit_model(self.model_, x, t, seed):
            return self
        self._fit_rows(torch.cat([old_x, x]), torch.cat([old_t, t]), weights, seed)
        return self

    def predict(
        self, X: Any, return_std: bool = False, return_quantiles: Sequence[float] | None = None
    ) -> np.ndarray | tuple[np.ndarray, ...]:
        """
        The mean of new observations; their median where targets were transformed.

        :param X: Inputs `(n, D)`.
        :param return_std: Whether to return their standard deviation `(n,)`, too: noise included.
        :param return_quantiles: Probabilities whose quantiles are returned, too, `(n, k)`.
        :return: `(n,)`, or what was asked for, one after the other. Of several outputs mean and standard deviation have
            the shape `(n, T)`, quantiles `(n, T, k)`.
        """
        prediction = self.predictive(X)
        answers = [as_numpy(prediction.mean) if self.transform_ is None else self._back(prediction.quantile(0.5))]
        if return_std:
            answers.append(self._spread(prediction))
        if return_quantiles is not None:
            levels = torch.as_tensor(np.atleast_1d(return_quantiles), dtype=torch.float64)
            answers.append(np.moveaxis(self._back(prediction.quantile(levels)), 0, -1))
        return answers[0] if len(answers) == 1 else tuple(answers)

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """
        Draws of new observations, `(n, n_samples)`, of several outputs `(n, T, n_samples)`; those of one column share a
        draw of the function.

        :param X: Inputs `(n, D)`.
        :param n_samples: How many.
        :param random_state: Seed.
        """
        return np.moveaxis(self._back(self.predictive(X).sample(n_samples, seed=as_seed(random_state))), 0, -1)

    def log_predictive_density(self, X: Any, y: Any) -> np.ndarray:
        """
        The log density of targets under the predictive distribution, `(n,)`. Its mean is a score for model selection.
        Of several outputs that of each, `(n, T)`, NaN where a target is.

        :param X: Inputs `(n, D)`.
        :param y: Targets `(n,)` or `(n, T)`.
        """
        targets = self._known_targets(y)
        density = as_numpy(self.predictive(X).log_prob(self.transformed(targets)))
        return density if self.transform_ is None else density + self.transform_.log_slope(targets)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = self.method == "gibbs"
        return tags

    def models(self) -> list[TKRR]:
        return [self.model_]

    def predictive(self, X: Any) -> Prediction:
        """
        The predictive distribution of new observations; of their transforms where targets were transformed.

        :param X: Inputs `(n, D)`.
        """
        rows = self._rows(X)
        with torch.no_grad():
            return self.model_.predict(rows)

    def _targets(self, y: Any) -> np.ndarray:
        """Targets `(n,)`, or of several outputs `(n, T)`, NaN where they were not observed."""
        shape = np.asarray(y).shape
        if len(shape) != 2 or shape[1] == 1:
            is_one_of_several = len(shape) == 2 and self.method == "gibbs"  # else scikit-learn's warning says so
            return self._numbers(np.ravel(y) if is_one_of_several else y)
        values = check_array(y, dtype=np.float64, ensure_all_finite="allow-nan", copy=True, input_name="y")
        require_finite(values, [f"output {t}" for t in range(shape[1])], allow_missing=True, what="Target y")
        return values

    def _known_targets(self, y: Any) -> np.ndarray:
        """Targets as many as those of the fit."""
        targets = self._targets(y)
        if targets[:1].size != min(self.n_outputs_, targets.size):
            raise InputError(f"The fit was of {self.n_outputs_} outputs; got targets of shape {targets.shape}.")
        return targets

    def transformed(self, y: np.ndarray) -> Tensor:
        """
        Targets as the model sees them.

        :param y: Targets `(n,)` or `(n, T)`.
        """
        return torch.from_numpy(np.array(y if self.transform_ is None else self.transform_(y)))

    def _back(self, values: Tensor) -> np.ndarray:
        return as_numpy(values) if self.transform_ is None else self.transform_.inverse(as_numpy(values))

    def _spread(self, prediction: Prediction) -> np.ndarray:
        if self.transform_ is None:
            return as_numpy(prediction.stddev)
        return self._back(prediction.sample(NUM_SAMPLES, seed=0)).std(axis=0)

    def learn_target(self, rows: Callable[[], tuple[Tensor, Tensor]], seed: int, *, num_outputs: int = 1) -> None:
        """
        Choose the transform of the targets and the kind of noise.

        :param rows: Called for inputs `(n, D)` and targets `(n,)` or `(n, T)` of training rows, where they are needed.
        :param seed: Seed of the choice.
        :param num_outputs: T.
        """
        self.transform_ = self.noise_choice_ = None
        self.n_outputs_ = num_outputs
        if num_outputs > 1 and (self.method != "gibbs" or self.noise not in ("gaussian", "auto")):
            raise InputError(
                f"Several outputs need method='gibbs' and noise='gaussian'; got method={self.method!r} and "
                f"noise={self.noise!r}. For a model of each output on its own use "
                "sklearn.multioutput.MultiOutputRegressor."
            )
        if self.noise != "auto":
            make_noise(self.noise)
        chooses = self.noise == "auto" and self.method == "gibbs" and self.kernel is None and num_outputs == 1
        self.noise_ = "gaussian" if self.noise == "auto" else self.noise
        if self.target_transform is None and not chooses:
            return
        x, y = rows()
        if self.target_transform is not None:
            self.transform_ = learn_transform(self.target_transform, as_numpy(y))
        if chooses:
            self.noise_choice_ = choose_noise(
                x,
                self.transformed(as_numpy(y)),
                num_basis=self.num_basis,
                categorical=tuple(self.columns_.categories),
                missing=self.missing,
                seed=seed,
            )
            self.noise_ = self.noise_choice_.kind

    def _new_model(self, x: Tensor | None, t: Tensor | None) -> TKRR:
        likelihood = self._likelihood(1.0 if t is None else _least_variance(t)).double()
        kind = TKRR if self.n_outputs_ == 1 else MultioutputTKRR
        return kind(x, t, likelihood, rank=self.rank, num_basis=self.num_basis, **self._input_options())

    def _likelihood(self, variance: float) -> Likelihood:
        """The likelihood, whose smallest noise follows the units of the targets."""
        bound = {"noise_constraint": GreaterThan(LEAST_NOISE * variance)} if 0 < variance < 1 else {}
        if self.n_outputs_ > 1:
            return MultitaskGaussianLikelihood(self.n_outputs_, **bound)
        return GaussianLikelihood(**bound) if self.noise_ == "gaussian" else make_noise(self.noise_)

    def new_model(self) -> TKRR:
        """A model without rows, of the noise that was chosen."""
        return self._new_model(None, None).double()

    def _fitted_state(self) -> dict[str, Any]:
        return {
            "noise": self.noise_,
            "outputs": self.n_outputs_,
            "transform": None if self.transform_ is None else self.transform_.plain(),
            "model": self.model_.state_dict(),
        }

    def _load_fitted_state(self, state: dict[str, Any]) -> None:
        self.noise_, self.n_outputs_ = state["noise"], state.get("outputs", 1)
        self.transform_ = None if state["transform"] is None else transform_from_plain(state["transform"])
        self.model_ = self.new_model()
        self.model_.load_state_dict(state["model"])
        self.model_.eval()

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "model_")


def _least_variance(t: Tensor) -> float:
    """The smallest variance among the outputs `(N,)` or `(N, T)`, of those that vary."""
    known = (column[~column.isnan()] for column in t.reshape(len(t), -1).mT)
    variances = [float(column.var(correction=0)) for column in known if len(column)]
    return min((variance for variance in variances if variance > 0), default=1.0)
