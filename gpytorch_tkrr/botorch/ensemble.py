"""The draws of a sampled model, one by one, as BoTorch's ensembles are."""

from __future__ import annotations

import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.models.ensemble import EnsembleModel
from torch import Tensor

from ..model.draws import DrawsPosterior
from .tkrr_model import TKRRModel


class TKRREnsemble(EnsembleModel):
    """
    The sampled functions of a :class:`TKRRModel`. Its posterior is BoTorch's `EnsemblePosterior`: a mixture of as many
    points as there are draws, not the Gaussian with their mean and covariance. It is for Monte Carlo acquisition
    functions. Draws of several outcomes are paired by their number; outcomes are independent, so any pairing will do.

    :param model: A model that `fit_gpytorch_mll` has sampled.

    Example:
        >>> import torch
        >>> from botorch.fit import fit_gpytorch_mll
        >>> from gpytorch.mlls import ExactMarginalLogLikelihood
        >>> from gpytorch_tkrr.botorch import TKRREnsemble, TKRRModel
        >>> train_X = torch.rand(40, 3, dtype=torch.float64)
        >>> model = TKRRModel(train_X, train_X.sum(-1, keepdim=True), rank=2)
        >>> mll = fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        >>> TKRREnsemble(model).posterior(torch.rand(5, 2, 3, dtype=torch.float64)).values.shape
        torch.Size([5, 20, 2, 1])
    """

    def __init__(self, model: TKRRModel):
        super().__init__()
        outcomes = [] if model.is_exact else [model.outcome(i) for i in range(model.num_outputs)]
        is_sampled = outcomes and all(
            outcome.model.is_fitted and isinstance(outcome.model.posterior, DrawsPosterior) and outcome.update is None
            for outcome in outcomes
        )
        if not is_sampled:
            raise UnsupportedError(
                "The model holds no draws: it is exact (up to 500 observations, unless rank= is given), not fitted, "
                "fitted by fit_als, or conditioned on further observations. Use the model itself."
            )
        self.model = model
        self._num_outputs = model.num_outputs
        for name in ("input_transform", "outcome_transform"):
            if hasattr(model, name):
                setattr(self, name, getattr(model, name))

    def forward(self, X: Tensor) -> Tensor:
        """
        All draws.

        :param X: Transformed inputs `(*batch, q, d)`.
        :return: `(*batch, S, q, m)`, on the scale of the transformed outcomes.
        """
        return torch.stack([self._draws(i, X) for i in range(self._num_outputs)], dim=-1)

    def _draws(self, i: int, x: Tensor) -> Tensor:
        model = self.model.outcome(i).model
        values = model.mean_module(x).double() + model.posterior.functions(model.warped(x))  # (S, *batch, q)
        return values.movedim(0, -2).to(x.dtype)
