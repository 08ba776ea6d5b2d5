"""The draws of a sampled model, one by one, as BoTorch's ensembles are."""

from __future__ import annotations

from typing import Any

import torch
from botorch.acquisition.objective import PosteriorTransform
from botorch.exceptions.errors import UnsupportedError
from botorch.models.ensemble import EnsembleModel
from botorch.posteriors.ensemble import EnsemblePosterior
from torch import Tensor

from ..model.draws import DrawsPosterior
from ..model.tkrr import TKRR
from .tkrr_model import TKRRModel


class TKRREnsemble(EnsembleModel):
    """
    The sampled functions of a :class:`TKRRModel`. Its posterior is BoTorch's `EnsemblePosterior`: a mixture of as many
    points as there are draws, not the Gaussian with their mean and covariance. It is for Monte Carlo acquisition
    functions. Draws of several outcomes are paired by their number; outcomes are independent, so any pairing will do.
    All draws count the same: of several chains a fit keeps draws in proportion to their weights. A draw is a function
    without a variance of its own, so this is no mixture of Gaussians (`_is_ensemble` is false), which closed-form
    acquisition functions would ask for; these take the model itself.

    With tasks a posterior is, as that of the model, one of the tasks named in the inputs, or of all `output_tasks` at
    inputs without that column.

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
        outcomes = model.all_outcomes()
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

    def posterior(  # type: ignore[override]
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        posterior_transform: PosteriorTransform | None = None,
        **kwargs: Any,
    ) -> Any:
        """
        All draws at given inputs.

        :param X: Inputs `(*batch, q, d)`; with tasks also without their column.
        :param output_indices: Which outcomes, or which tasks; all by default.
        :param posterior_transform: Applied to the result.
        """
        columns = self.model._columns
        if columns.task is None or X.shape[-1] == columns.num_dims:
            return super().posterior(X, output_indices, posterior_transform, **kwargs)
        tasks = self.model._output_tasks if output_indices is None else output_indices
        values = super().posterior(columns.with_tasks(X, tasks), **kwargs).values  # (*batch, S, T' q, 1)
        posterior: Any = EnsemblePosterior(values.squeeze(-1).unflatten(-1, (len(tasks), -1)).mT)
        return posterior if posterior_transform is None else posterior_transform(posterior=posterior, X=X)

    def forward(self, X: Tensor) -> Tensor:
        """
        All draws.

        :param X: Transformed inputs `(*batch, q, d)`.
        :return: `(*batch, S, q, m)`, on the scale of the transformed outcomes.
        """
        draws = [self._draws(outcome.model, X) for outcome in self.model.all_outcomes()]
        least = min(each.shape[-2] for each in draws)  # outcomes may have kept draws of other numbers of chains
        chosen = [torch.linspace(0, each.shape[-2] - 1, least).round().long() for each in draws]
        return torch.stack([each[..., index, :] for each, index in zip(draws, chosen, strict=True)], dim=-1)

    def _draws(self, model: TKRR, x: Tensor) -> Tensor:
        values = model.mean_module(x).double() + model.posterior.functions(model.warped(x))  # (S, *batch, q)
        return values.movedim(0, -2).to(x.dtype)
