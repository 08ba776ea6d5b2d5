"""Kernel machines of scikit-learn: support vector machines, kernel ridge regression and Nyström features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..errors import NotApplicableError
from .contender import Contender, Prediction, Scaler, register_contender

#: Kernel matrices of more rows are left to others: a random subset is used.
MAX_ROWS = 3_000

#: Candidates of the width of the kernel, in units of the number of inputs.
WIDTHS = (0.1, 0.3, 1.0, 3.0)

#: Candidates of the ridge, and of C = 1 / (2 ridge).
RIDGES = (1e-3, 1e-2, 1e-1, 1.0)


@dataclass
class _HeldOut(Contender):
    """Candidates are compared on a tenth of the training rows, which then also tells the spread of predictions."""

    def fit(self, x: Tensor, y: Tensor) -> None:
        if self.task == "classification" and len(y.unique()) > 2:
            raise NotApplicableError(f"{self.title} is compared on two classes only.")
        self.inputs, self.targets = Scaler(x), Scaler(y)
        rows, targets = self.inputs(x).numpy(), y.numpy()
        if self.task == "regression":
            targets = self.targets(y).numpy()
        order = np.random.default_rng(self.seed).permutation(len(targets))[: self._num_rows()]
        held_out, rest = order[: max(2, len(order) // 10)], order[max(2, len(order) // 10) :]
        found = [candidate.fit(rows[rest], targets[rest]) for candidate in self._candidates(x.shape[1])]
        scores = [candidate.score(rows[held_out], targets[held_out]) for candidate in found]
        self.model = found[int(np.argmax(scores))]
        self._calibrate(rows[held_out], targets[held_out])

    def _num_rows(self) -> int | None:
        """At most so many rows are used; None for all."""
        return None

    def _candidates(self, num_dims: int) -> list[Any]:
        raise NotImplementedError

    def _calibrate(self, rows: np.ndarray, targets: np.ndarray) -> None:
        """Learn from rows that were held out how far predictions are off."""
        residuals = targets - self.model.predict(rows)
        self.sd = max(float(np.sqrt(np.mean(residuals**2))), 1e-6)

    def predict(self, x: Tensor) -> Prediction:
        mean = torch.as_tensor(self.model.predict(self.inputs(x).numpy()))
        return self.targets.mean + self.targets.sd * mean, torch.full_like(mean, self.sd * float(self.targets.sd))


@register_contender("kernel-machine")
@dataclass
class KernelMachine(_HeldOut):
    """Kernel ridge regression, or a support vector machine."""

    title: ClassVar[str] = "SVC / KRR"
    note: ClassVar[str] = (
        "scikit-learn's KernelRidge or SVC, RBF kernel, on at most 3000 random rows; width and ridge by a tenth of the "
        "training rows, and from the same tenth the standard deviation, or the logistic curve of the probabilities."
    )
    is_default: ClassVar[bool] = False

    def _num_rows(self) -> int:
        return MAX_ROWS

    def _candidates(self, num_dims: int) -> list[Any]:
        from sklearn.kernel_ridge import KernelRidge
        from sklearn.svm import SVC

        widths = [width / num_dims for width in WIDTHS]
        if self.task == "classification":
            return [SVC(C=1 / (2 * ridge), gamma=gamma) for ridge in RIDGES for gamma in widths]
        return [KernelRidge(kernel="rbf", alpha=ridge, gamma=gamma) for ridge in RIDGES for gamma in widths]

    def _calibrate(self, rows: np.ndarray, targets: np.ndarray) -> None:
        if self.task == "regression":
            super()._calibrate(rows, targets)
            return
        from sklearn.linear_model import LogisticRegression

        response = self.model.decision_function(rows)
        if len(np.unique(targets)) > 1:
            self.curve = LogisticRegression().fit(response[:, None], targets)
        else:  # one class alone tells nothing about the curve
            self.curve = LogisticRegression().fit(np.array([[-1.0], [1.0]]), np.array([0, 1]))

    def predict(self, x: Tensor) -> Prediction:
        if self.task == "regression":
            return super().predict(x)
        response = self.model.decision_function(self.inputs(x).numpy())
        return torch.as_tensor(self.curve.predict_proba(response[:, None])[:, 1])


@register_contender("nystrom")
@dataclass
class NystromFeatures(_HeldOut):
    """
    Ridge or logistic regression on Nyström features.

    :param num_features: Number of training rows that the features are made of.

    Reference: Williams & Seeger (2001), *Using the Nyström method to speed up kernel machines*.
    """

    title: ClassVar[str] = "Nyström"
    note: ClassVar[str] = (
        "scikit-learn's Nystroem with 512 random rows and an RBF kernel, whose width is chosen by a tenth of the "
        "training rows; then Bayesian ridge or logistic regression."
    )
    is_default: ClassVar[bool] = False
    num_features: int = 512

    def _candidates(self, num_dims: int) -> list[Any]:
        from sklearn.kernel_approximation import Nystroem
        from sklearn.linear_model import BayesianRidge, LogisticRegression
        from sklearn.pipeline import make_pipeline

        return [
            make_pipeline(
                Nystroem(gamma=width / num_dims, n_components=self.num_features, random_state=self.seed),
                LogisticRegression(max_iter=1000) if self.task == "classification" else BayesianRidge(),
            )
            for width in WIDTHS
        ]

    def fit(self, x: Tensor, y: Tensor) -> None:
        self.num_features = min(self.num_features, max(len(y) // 2, 1))
        super().fit(x, y)

    def _calibrate(self, rows: np.ndarray, targets: np.ndarray) -> None:
        """Both regressions know how far they are off."""

    def predict(self, x: Tensor) -> Prediction:
        rows = self.inputs(x).numpy()
        if self.task == "classification":
            return torch.as_tensor(self.model.predict_proba(rows)[:, 1])
        mean, sd = (torch.as_tensor(part) for part in self.model.predict(rows, return_std=True))
        return self.targets.mean + self.targets.sd * mean, self.targets.sd * sd

    @property
    def num_parameters(self) -> int:
        return self.num_features + 2
