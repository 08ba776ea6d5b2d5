"""T-KRR in the comparison, in the units of the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood
from torch import Tensor

from ..inference.als import fit_als
from ..inference.gibbs import fit_gibbs
from ..model.tkrr import TKRR
from .contender import Contender, Prediction, register_contender


@register_contender("tkrr-als")
@dataclass
class ALSContender(Contender):
    """
    T-KRR, fitted by alternating least squares with learned hyperparameters. Classes are regressed on as -1 and +1; the
    probability of class 1 is that of a positive response.

    :param rank: R.
    :param num_basis: Sines per input, or None for the model's own choice.
    """

    title: ClassVar[str] = "T-KRR, ALS"
    note: ClassVar[str] = "fit_als with learned hyperparameters, rank 10; the rest are defaults, in units of the data."
    rank: int = 10
    num_basis: int | None = None

    def new_model(self, x: Tensor | None = None, y: Tensor | None = None) -> TKRR:
        """
        The model before it is fitted.

        :param x: Inputs `(N, D)`.
        :param y: Targets `(N,)`.
        """
        y = 2 * y - 1 if y is not None and self.task == "classification" else y
        return TKRR(x, y, GaussianLikelihood(), rank=self.rank, num_basis=self.num_basis)

    def fit(self, x: Tensor, y: Tensor) -> None:
        self.model = self.new_model(x, y)
        fit_als(self.model, learn_hyperparameters=True, seed=self.seed, progress=self.progress)
        self.model.eval()

    @torch.no_grad()
    def predict(self, x: Tensor) -> Prediction:
        prediction = self.model.predict(x)
        if self.task == "classification":
            return 1 - prediction.cdf(torch.zeros_like(x[:, 0]))
        return prediction

    @property
    def num_parameters(self) -> int:
        weights = sum(mode.num_functions for mode in self.model.separate().modes) * self.model.rank
        return weights + sum(parameter.numel() for parameter in self.model.parameters())


@register_contender("tkrr-gibbs")
@dataclass
class GibbsContender(ALSContender):
    """T-KRR, fitted by Gibbs sampling with all hyperparameters drawn; a probit likelihood for classes."""

    title: ClassVar[str] = "T-KRR, Bayesian"
    note: ClassVar[str] = "fit_gibbs, rank 12; the rest are defaults, in units of the data. Numbers: of one draw."
    rank: int = 12

    def new_model(self, x: Tensor | None = None, y: Tensor | None = None) -> TKRR:
        likelihood = BernoulliLikelihood() if self.task == "classification" else GaussianLikelihood()
        return TKRR(x, y, likelihood, rank=self.rank, num_basis=self.num_basis)

    def fit(self, x: Tensor, y: Tensor) -> None:
        self.model = self.new_model(x, y)
        fit_gibbs(self.model, seed=self.seed, progress=self.progress)
        self.model.eval()

    @torch.no_grad()
    def predict(self, x: Tensor) -> Prediction:
        if self.task == "classification":
            return self.model.class_probabilities(x)
        return super().predict(x)
