"""How `fit_gpytorch_mll` finds the way to fit our models.

From version 0.18 on BoTorch calls a model's `custom_fit` where there is one. Before, it asked a dispatcher; here the
dispatcher is told to follow the same rule.
"""

from __future__ import annotations

from typing import Any

import botorch.fit
from botorch.models import SingleTaskGP
from gpytorch.mlls import ExactMarginalLogLikelihood, MarginalLogLikelihood

#: BoTorch's dispatcher, or None where models are asked. BoTorch versions that have one fit batches of models jointly.
DISPATCHER: Any = getattr(botorch.fit, "FitGPyTorchMLL", None)


def register_custom_fit(model_class: type) -> None:
    """
    Let `fit_gpytorch_mll` call `custom_fit` of a class of models in all versions of BoTorch.

    :param model_class: The class.
    """
    if DISPATCHER is not None:
        DISPATCHER.register(ExactMarginalLogLikelihood, object, model_class)(_fit)


def _fit(mll: MarginalLogLikelihood, likelihood: type, _: type, **kwargs: Any) -> MarginalLogLikelihood:
    if hasattr(mll.model, "custom_fit"):
        return mll.model.custom_fit(mll, **kwargs)
    return DISPATCHER.dispatch(type(mll), likelihood, SingleTaskGP)(mll, likelihood, SingleTaskGP, **kwargs)
