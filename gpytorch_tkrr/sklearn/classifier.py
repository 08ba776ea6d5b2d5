"""Classification by CP weights for scikit-learn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from gpytorch.kernels import Kernel
from sklearn.base import ClassifierMixin
from sklearn.utils import assert_all_finite, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from torch import Tensor

from ..errors import InputError
from ..inference.one_vs_rest import OneVsRest
from ..model.tkrr import TKRR
from .table_estimator import all_or_nothing, as_numpy, as_seed, joined_weights, positive_rows
from .tkrr_estimator import TKRREstimator, weighted_data


class TKRRClassifier(ClassifierMixin, TKRREstimator):
    r"""
    Classification by :class:`~gpytorch_tkrr.TKRR`, for scikit-learn: a probit model for two classes, one against all
    others for several (:class:`~gpytorch_tkrr.OneVsRest`).

    Inputs are those of :class:`TKRRRegressor`.

    :param rank: R, the number of components. None: "gibbs" finds out how many are needed, "als" takes 10.
    :param num_basis: Sines per input; None for the model's own choice.
    :param method: "gibbs" for a probit model; "als" regresses on -1 and +1 by alternating least squares, and the
        probability is that of a positive response.
    :param num_draws: Draws of each chain, with "gibbs"; None to choose them by the number of rows, see
        :func:`~gpytorch_tkrr.fit_gibbs`.
    :param num_warmup: Sweeps before them; None as for `num_draws`.
    :param num_chains: Independent chains; None as for `num_draws`.
    :param kernel: A separable GPyTorch kernel of the encoded inputs; None for :func:`~gpytorch_tkrr.anova_kernel`.
    :param categorical: Names or numbers of columns that are categories although they hold numbers.
    :param missing: "integrate" for inputs that may be missing (NaN, None, an empty date): f is integrated over the
        distribution of their column among the training rows. None to refuse them. See :class:`~gpytorch_tkrr.TKRR`.
    :param random_state: Seed of all that is random.
    :param progress: Whether to show a progress bar.

    :ivar classes_: The classes, sorted.
    :ivar model_: The fitted :class:`~gpytorch_tkrr.OneVsRest`.
    :ivar results_: What the fits did, one for each model.
    :ivar columns_: What the columns of the table are.

    Example:
        >>> import numpy as np, gpytorch_tkrr as tkrr
        >>> X = np.random.default_rng(0).uniform(size=(200, 2))
        >>> y = np.where(X.sum(1) > 1, "large", "small")
        >>> model = tkrr.sklearn.TKRRClassifier(rank=3, num_draws=30, num_warmup=30, random_state=0).fit(X, y)
        >>> bool(model.score(X, y) > 0.9), model.predict_proba(X).shape, model.classes_.tolist()
        (True, (200, 2), ['large', 'small'])
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
        self.kernel = kernel
        self.categorical = categorical
        self.missing = missing
        self.random_state = random_state
        self.progress = progress

    @all_or_nothing
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> TKRRClassifier:
        """
        Fit the model.

        :param X: Inputs `(N, D)`: an array or a DataFrame.
        :param y: Classes `(N,)`: numbers, text, booleans.
        :param sample_weight: Row weights `(N,)`. With "als" those of the squared errors; with "gibbs" whole numbers,
            how often each row counts.
        """
        return self._fit_anew(X, y, sample_weight, None)

    def _fit_anew(self, X: Any, y: Any, sample_weight: Any, classes: Any) -> TKRRClassifier:
        self._check_parameters()
        x = self._learn_rows(X)
        labels = self._labels(y)
        self.classes_ = np.unique(labels if classes is None else np.asarray(classes))
        codes = self._codes(labels)
        x, codes, weights = positive_rows(x, codes, self._weights(sample_weight, x, labels))
        self._fit_rows(*self._repeated(x, codes, weights))
        return self

    def _fit_rows(self, x: Tensor, codes: Tensor, weights: Tensor | None) -> None:
        if len(codes.unique()) < 2:
            raise InputError(
                f"Classification takes at least two classes; all rows are of class {self.classes_[int(codes[0])]!r}."
            )
        seed = as_seed(self.random_state)
        models = self._new_models(x, codes)
        self.results_ = [
            self.fit_model(model, seed + number, data=weighted_data(model, weights))
            for number, model in enumerate(_each(models))
        ]
        self.model_ = models
        self._training = (x, codes, weights)

    @all_or_nothing
    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> TKRRClassifier:
        """
        Append rows to those of the last fit, and go on from where it ended. Where the new rows have classes, levels or
        a range that the model does not know, or rows have weights, it is fitted anew to all rows.

        :param X: Inputs `(n, D)`.
        :param y: Classes `(n,)`.
        :param classes: All classes there will be; by default those of the first rows.
        :param sample_weight: Row weights `(n,)`.
        """
        if not hasattr(self, "model_"):
            return self._fit_anew(X, y, sample_weight, classes)
        if not hasattr(self, "_training"):
            raise InputError("This model was loaded from a file, which holds no rows to append to. Fit it anew.")
        (x, is_new), labels = self._more_rows(X), self._labels(y)
        codes = self._codes(labels)
        x, codes, weights = positive_rows(x, codes, self._weights(sample_weight, x, labels))
        x, codes, weights = self._repeated(x, codes, weights)
        old_x, old_codes, old_weights = self._training
        seed, known = as_seed(self.random_state), cast("Tensor", self.model_.classes)
        is_known = not is_new and bool(torch.isin(codes, known).all())
        weights = joined_weights(old_weights, len(old_codes), weights, len(codes))
        if weights is None and is_known:
            numbers = known[1:] if len(known) == 2 else known
            models = self.models()
            if all(
                self._refit_model(model, x, (codes == number).to(x), seed + k)
                for k, (model, number) in enumerate(zip(models, numbers, strict=True))
            ):
                self._training = (torch.cat([old_x, x]), torch.cat([old_codes, codes]), None)
                return self
        self._fit_rows(torch.cat([old_x, x]), torch.cat([old_codes, codes]), weights)
        return self

    @torch.no_grad()
    def predict_proba(self, X: Any) -> np.ndarray:
        """
        The probability of each class, `(n, K)`, in the order of `classes_`.

        :param X: Inputs `(n, D)`.
        """
        rows = self._rows(X)
        present = self.model_.class_probabilities(rows)
        if present.shape[1] == len(self.classes_):
            return as_numpy(present)
        probabilities = np.zeros((len(present), len(self.classes_)))  # a class without rows so far
        probabilities[:, as_numpy(cast("Tensor", self.model_.classes))] = as_numpy(present)
        return probabilities

    def predict(self, X: Any) -> np.ndarray:
        """
        The most probable class of each row, `(n,)`.

        :param X: Inputs `(n, D)`.
        """
        probabilities = self.predict_proba(X)
        return self.classes_[probabilities.argmax(1)]

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """
        Classes drawn by their probabilities, `(n, n_samples)`.

        :param X: Inputs `(n, D)`.
        :param n_samples: How many.
        :param random_state: Seed.
        """
        cumulated = self.predict_proba(X).cumsum(1)
        u = np.random.default_rng(as_seed(random_state)).uniform(size=(len(cumulated), n_samples, 1))
        numbers = (u > cumulated[:, None, :-1]).sum(-1)
        return self.classes_[numbers]

    def log_predictive_density(self, X: Any, y: Any) -> np.ndarray:
        """
        The log probability of the classes, `(n,)`. Its mean is a score for model selection.

        :param X: Inputs `(n, D)`.
        :param y: Classes `(n,)`.
        """
        probabilities = self.predict_proba(X)
        codes = as_numpy(self._codes(self._labels(y)))
        return np.log(np.maximum(probabilities[np.arange(len(codes)), codes], np.finfo(float).tiny))

    def models(self) -> list[TKRR]:
        return _each(self.model_)

    def empty_models(self, num_classes: int) -> Iterator[tuple[TKRR, int]]:
        """
        Models without rows, one after the other, each with the number of its class.

        :param num_classes: K.
        """
        self.model_ = self._new_models(None, None).with_classes(torch.arange(num_classes)).double()
        numbers = range(1, 2) if num_classes == 2 else range(num_classes)
        yield from zip(self.models(), numbers, strict=True)

    def _new_models(self, x: Tensor | None, codes: Tensor | None) -> OneVsRest:
        return OneVsRest(x, codes, rank=self.rank, num_basis=self.num_basis, **self._input_options()).double()

    def _labels(self, y: Any) -> np.ndarray:
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None.")
        labels = column_or_1d(y, warn=True)
        if labels.dtype.kind == "f":
            assert_all_finite(labels, input_name="y")
        check_classification_targets(labels)
        if labels.dtype.kind == "O" and any(value is None or value != value for value in labels):
            raise InputError("Input y contains NaN: some rows have no class. Drop these rows.")
        return labels

    def _codes(self, labels: np.ndarray) -> Tensor:
        codes = np.searchsorted(self.classes_, labels).clip(max=len(self.classes_) - 1)
        unknown = self.classes_[codes] != labels
        if unknown.any():
            new, known = np.asarray(labels)[unknown].tolist()[0], self.classes_.tolist()
            raise InputError(f"The class {new!r} is none of {known}. Name all in classes=, or fit anew.")
        return torch.as_tensor(codes)

    def _repeated(self, x: Tensor, codes: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rows as often as they count: a class has no noise variance that a weight could divide."""
        if weights is None or self.method == "als":
            return x, codes, weights
        if bool((weights != weights.round()).any()):
            raise InputError(
                "With method='gibbs' sample weights of classes must be whole numbers, how often each row counts. Use "
                "method='als' for others."
            )
        repeats = weights.long()
        return x.repeat_interleave(repeats, 0), codes.repeat_interleave(repeats), None

    def _fitted_state(self) -> dict[str, Any]:
        return {"classes": self.classes_.tolist(), "models": self.model_.state_dict()}

    def _load_fitted_state(self, state: dict[str, Any]) -> None:
        self.classes_ = np.array(state["classes"])
        known = state["models"]["_extra_state"]["classes"]
        self.model_ = self._new_models(None, None).with_classes(known).double()
        self.model_.load_state_dict(state["models"])
        self.model_.eval()

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "model_")


def _each(models: OneVsRest) -> list[TKRR]:
    return [cast("TKRR", model) for model in models.models]
