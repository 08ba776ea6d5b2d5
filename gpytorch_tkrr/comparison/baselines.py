"""Models that any other should beat, and boosted trees for orientation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from .contender import Contender, Prediction, Scaler, register_contender
from .distribution import QuantileDistribution

#: Quantiles of boosted trees.
LEVELS = (0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)

#: Two quantiles are at least so far apart, in standard deviations of the targets, and all are moved from the median
#: by such a factor; which ones is decided by training rows that are held out. Trees fit their own rows too well.
LEAST_WIDTHS = (1e-3, 1e-2, 3e-2, 0.1)
STRETCHES = (1.0, 1.5, 2.0, 3.0)
HELD_OUT = 0.2

#: HistGradientBoosting takes categories of at most so many levels.
MAX_LEVELS = 254


@register_contender("mean")
@dataclass
class MeanBaseline(Contender):
    """The mean and the spread of the training targets, whatever the inputs."""

    title: ClassVar[str] = "mean"

    def fit(self, x: Tensor, y: Tensor) -> None:
        if self.task == "classification":
            self.shares = torch.bincount(y.long(), minlength=self.num_classes).double() / len(y)
            return
        self.mean, self.sd = y.mean(), y.std()

    def predict(self, x: Tensor) -> Prediction:
        if self.task == "classification":
            return self.shares.expand(len(x), -1)
        return self.mean.expand(len(x)), self.sd.expand(len(x))

    @property
    def num_parameters(self) -> int:
        return self.num_classes - 1 if self.task == "classification" else 2


@register_contender("linear")
@dataclass
class LinearBaseline(Contender):
    """Bayesian linear regression, or logistic regression."""

    title: ClassVar[str] = "linear"

    def fit(self, x: Tensor, y: Tensor) -> None:
        from sklearn.linear_model import BayesianRidge, LogisticRegression

        self.inputs = Scaler(x)
        self.model = LogisticRegression(max_iter=1000) if self.task == "classification" else BayesianRidge()
        self.model.fit(self.inputs(x).numpy(), y.numpy())

    def predict(self, x: Tensor) -> Prediction:
        rows = self.inputs(x).numpy()
        if self.task == "classification":
            return all_classes(self.model.predict_proba(rows), self.model.classes_, self.num_classes)
        mean, sd = self.model.predict(rows, return_std=True)
        return torch.as_tensor(mean), torch.as_tensor(sd)

    @property
    def num_parameters(self) -> int:
        return self.model.coef_.size + 1


@register_contender("boosting")
@dataclass
class GradientBoosting(Contender):
    """Boosted trees, no Gaussian process: for orientation."""

    title: ClassVar[str] = "gradient boosting"
    knows_levels: ClassVar[bool] = True
    note: ClassVar[str] = (
        f"scikit-learn's HistGradientBoosting with its defaults: one model of the mean and {len(LEVELS)} of quantiles "
        '(loss="quantile"), between which the distribution is interpolated; held-out training rows decide how much '
        "they are widened."
    )

    def fit(self, x: Tensor, y: Tensor) -> None:
        from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

        few = [d for d, number in self.categories.items() if number <= MAX_LEVELS]  # others are taken for numbers
        options = {"random_state": self.seed, "categorical_features": few or None}
        if self.task == "classification":
            self.model = HistGradientBoostingClassifier(**options).fit(x.numpy(), y.numpy())
            return
        self.sd = float(y.std())
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(self.seed))
        held_out, rest = order.tensor_split([max(int(HELD_OUT * len(y)), 1)])
        self.quantiles = self._fit_quantiles(x[rest], y[rest], options)
        choices = [(width, stretch) for width in LEAST_WIDTHS for stretch in STRETCHES]
        values = self._quantile_values(x[held_out])
        made = [self._distribution(values, values[:, len(LEVELS) // 2], *choice) for choice in choices]
        scores = [float(each.log_prob(y[held_out]).mean()) for each in made]
        self.choice = choices[int(np.argmax(scores))]
        self.model = HistGradientBoostingRegressor(**options).fit(x.numpy(), y.numpy())
        self.quantiles = self._fit_quantiles(x, y, options)

    def _fit_quantiles(self, x: Tensor, y: Tensor, options: dict[str, Any]) -> list[Any]:
        from sklearn.ensemble import HistGradientBoostingRegressor

        models = (HistGradientBoostingRegressor(loss="quantile", quantile=level, **options) for level in LEVELS)
        return [model.fit(x.numpy(), y.numpy()) for model in models]

    def _quantile_values(self, x: Tensor) -> Tensor:
        """`(n, number of levels)`."""
        return torch.stack([torch.as_tensor(model.predict(x.numpy())) for model in self.quantiles], -1)

    def _distribution(self, values: Tensor, mean: Tensor, least_width: float, stretch: float) -> QuantileDistribution:
        levels, middle = torch.tensor(LEVELS, dtype=torch.float64), values[:, len(LEVELS) // 2, None]
        return QuantileDistribution(levels, middle + stretch * (values - middle), mean, least_width * self.sd)

    def predict(self, x: Tensor) -> Prediction:
        if self.task == "classification":
            return all_classes(self.model.predict_proba(x.numpy()), self.model.classes_, self.num_classes)
        mean = torch.as_tensor(self.model.predict(x.numpy()))
        return self._distribution(self._quantile_values(x), mean, *self.choice)


def all_classes(probabilities: np.ndarray, present: np.ndarray, num_classes: int) -> Tensor:
    """
    Probabilities of all classes, zero for those that the training rows did not have.

    :param probabilities: Of the classes that are present, `(n, k)`.
    :param present: Their numbers `(k,)`.
    :param num_classes: K.
    """
    full = np.zeros((len(probabilities), num_classes))
    full[:, present.astype(int)] = probabilities
    return torch.as_tensor(full)
