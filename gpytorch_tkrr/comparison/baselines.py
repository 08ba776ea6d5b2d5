"""Models that any other should beat, and boosted trees for orientation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from .contender import Contender, Prediction, Scaler, register_contender


@register_contender("mean")
@dataclass
class MeanBaseline(Contender):
    """The mean and the spread of the training targets, whatever the inputs."""

    title: ClassVar[str] = "mean"

    def fit(self, x: Tensor, y: Tensor) -> None:
        self.mean, self.sd = y.mean(), y.std()

    def predict(self, x: Tensor) -> Prediction:
        mean = self.mean.expand(len(x))
        return mean if self.task == "classification" else (mean, self.sd.expand(len(x)))

    @property
    def num_parameters(self) -> int:
        return 1 if self.task == "classification" else 2


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
            return torch.as_tensor(self.model.predict_proba(rows)[:, 1])
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
    note: ClassVar[str] = (
        "scikit-learn's HistGradientBoosting with its defaults. It predicts no variance: the standard deviation is "
        "that of the residuals of a tenth of the training rows, which were held out."
    )

    def fit(self, x: Tensor, y: Tensor) -> None:
        from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

        if self.task == "classification":
            self.model = HistGradientBoostingClassifier(random_state=self.seed).fit(x.numpy(), y.numpy())
            return
        order = np.random.default_rng(self.seed).permutation(len(y))
        held_out, rest = order[: max(2, len(y) // 10)], order[max(2, len(y) // 10) :]
        self.model = HistGradientBoostingRegressor(random_state=self.seed).fit(x[rest].numpy(), y[rest].numpy())
        residuals = y[held_out].numpy() - self.model.predict(x[held_out].numpy())
        self.sd = max(float(np.sqrt(np.mean(residuals**2))), 1e-6 * float(y.std()))

    def predict(self, x: Tensor) -> Prediction:
        if self.task == "classification":
            return torch.as_tensor(self.model.predict_proba(x.numpy())[:, 1])
        mean = torch.as_tensor(self.model.predict(x.numpy()))
        return mean, torch.full_like(mean, self.sd)
