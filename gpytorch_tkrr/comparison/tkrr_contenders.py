"""T-KRR in the comparison: the estimators for scikit-learn, in the units of the data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from .baselines import all_classes
from .contender import Contender, Prediction, register_contender

if TYPE_CHECKING:
    from ..sklearn.classifier import TKRRClassifier
    from ..sklearn.regressor import TKRRRegressor


@register_contender("tkrr-als")
@dataclass
class ALSContender(Contender):
    """
    T-KRR, fitted by alternating least squares with learned hyperparameters. Classes are regressed on as -1 and +1; the
    probability of a class is that of a positive response.

    :param options: Further options of the estimator.
    """

    options: dict[str, Any] = field(default_factory=dict)

    title: ClassVar[str] = "T-KRR, ALS"
    note: ClassVar[str] = "fit_als with learned hyperparameters, rank 10; the rest are defaults, in units of the data."
    method: ClassVar[str] = "als"
    knows_levels: ClassVar[bool] = True

    def fit(self, x: Tensor, y: Tensor) -> None:
        self.estimator = self._new_estimator().fit(x.numpy(), y.numpy())

    def _new_estimator(self) -> TKRRClassifier | TKRRRegressor:
        from ..sklearn.classifier import TKRRClassifier
        from ..sklearn.regressor import TKRRRegressor

        options: dict[str, Any] = {
            "categorical": sorted(self.categories) or None,
            "random_state": self.seed,
            "progress": self.progress,
            "method": self.method,
            **self.options,
        }
        if self.task == "classification":
            return TKRRClassifier(**options)
        return TKRRRegressor(**{"noise": self._noise, **options})

    @property
    def _noise(self) -> str:
        return "gaussian"

    def predict(self, x: Tensor) -> Prediction:
        estimator: Any = self.estimator
        if self.task == "classification":
            probabilities = estimator.predict_proba(x.numpy())
            return all_classes(probabilities, estimator.classes_, self.num_classes)
        return estimator.predictive(x.numpy())

    @property
    def num_parameters(self) -> int:
        return self.estimator.num_parameters


@register_contender("tkrr-gibbs")
@dataclass
class GibbsContender(ALSContender):
    """
    T-KRR, fitted by Gibbs sampling with all hyperparameters drawn; a probit likelihood for classes. It has the noise
    that is asked for, or that its training rows choose.
    """

    title: ClassVar[str] = "T-KRR, Bayesian"
    note: ClassVar[str] = "fit_gibbs with its defaults, in units of the data. Parameters: those of one draw."
    method: ClassVar[str] = "gibbs"

    @property
    def _noise(self) -> str:
        return self.noise

    @property
    def chosen(self) -> str:
        choice = getattr(self.estimator, "noise_choice_", None)
        return "" if choice is None else f"noise {choice.kind}"

    @property
    def remark(self) -> str:
        choice = getattr(self.estimator, "noise_choice_", None)
        return "" if choice is None else choice.message
