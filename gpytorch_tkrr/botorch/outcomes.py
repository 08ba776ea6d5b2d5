"""Some of the outcomes of a model, on their own scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from botorch.acquisition.objective import PosteriorTransform
from botorch.posteriors import GPyTorchPosterior
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from torch import Tensor


def choose_outcomes(output_indices: Sequence[int] | None, num_outputs: int) -> list[int]:
    """
    Which outcomes are meant.

    :param output_indices: Their indices, which may count from the end, or None for all.
    :param num_outputs: How many there are.
    """
    return list(range(num_outputs)) if output_indices is None else [range(num_outputs)[i] for i in output_indices]


def join_outcomes(
    model: Any,
    normals: Sequence[MultivariateNormal],
    chosen: list[int],
    x: Tensor,
    posterior_transform: PosteriorTransform | None,
) -> Any:
    """
    The posterior of independent outcomes, after the inverse of the model's outcome transform.

    :param model: Has an `outcome_transform`, or none.
    :param normals: The chosen outcomes as the model sees them.
    :param chosen: Which outcomes of the model these are.
    :param x: Transformed inputs.
    :param posterior_transform: Applied to the result.
    """
    normal = normals[0] if len(normals) == 1 else MultitaskMultivariateNormal.from_independent_mvns(list(normals))
    posterior: Any = GPyTorchPosterior(distribution=normal)
    if hasattr(model, "outcome_transform"):
        transform = model.outcome_transform
        if chosen != list(range(model.num_outputs)):
            transform = transform.subset_output(chosen)
        posterior = transform.untransform_posterior(posterior, X=x)
    return posterior if posterior_transform is None else posterior_transform(posterior=posterior, X=x)
