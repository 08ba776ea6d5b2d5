"""What stands in the place of a SingleTaskGP."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from botorch.acquisition.objective import PosteriorTransform
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.utils import add_output_dim, gpt_posterior_settings
from botorch.posteriors import GPyTorchPosterior
from botorch.utils.datasets import SupervisedDataset
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.mlls import MarginalLogLikelihood
from torch import Tensor

from .outcomes import module_of_outcomes


class DropInGP(SingleTaskGP):
    """
    A :class:`~botorch.models.SingleTaskGP` with a fit of its own, which may call BoTorch's, columns of categories, and
    a posterior that can be asked for any of its outcomes.
    """

    @classmethod
    def construct_inputs(
        cls, training_data: SupervisedDataset, *, categorical_features: list[int] | None = None
    ) -> dict[str, Any]:
        """
        Arguments of the constructor.

        :param training_data: The data.
        :param categorical_features: Columns of categories.
        """
        inputs: dict[str, Any] = super().construct_inputs(training_data=training_data)
        return {**inputs, "cat_dims": list(categorical_features)} if categorical_features else inputs

    # Fit

    _is_fitted_as_botorch = False

    @property
    def custom_fit(self) -> Callable[..., MarginalLogLikelihood]:
        """What `fit_gpytorch_mll` calls; BoTorch's own way to fit is taken where it is missing."""
        if self._is_fitted_as_botorch:
            raise AttributeError("custom_fit: this is a fit by BoTorch's own way.")
        return self._fit

    @abstractmethod
    def _fit(self, mll: MarginalLogLikelihood, **kwargs: Any) -> MarginalLogLikelihood: ...

    def _fit_as_botorch(self, mll: MarginalLogLikelihood, **kwargs: Any) -> MarginalLogLikelihood:
        """
        The fit of a SingleTaskGP.

        :param mll: The marginal log likelihood that holds this model.
        :param kwargs: As for `fit_gpytorch_mll`.
        """
        self._is_fitted_as_botorch = True
        try:
            return fit_gpytorch_mll(mll, **kwargs)
        finally:
            self._is_fitted_as_botorch = False

    # Outcomes

    def posterior(  # type: ignore[override]
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: PosteriorTransform | None = None,
    ) -> Any:
        """
        The posterior at given inputs.

        :param X: Inputs `(*batch, q, d)`.
        :param output_indices: Which outcomes, also counted from the end; all by default.
        :param observation_noise: Whether to add the noise variance, or the (transformed) variances to add,
            `(*batch, q, m)`.
        :param posterior_transform: Applied to the result.
        """
        if output_indices is None or self.num_outputs == 1:
            return super().posterior(X, None, observation_noise, posterior_transform)
        self.eval()
        x = self.transform_inputs(X)
        chosen = [range(self.num_outputs)[i] for i in output_indices]
        with gpt_posterior_settings():
            batch, dim = add_output_dim(X=x, original_batch_shape=self._input_batch_shape)
            normal = self._apply_noise(X=batch, mvn=self(batch), observation_noise=observation_noise)
            mean, covariance = normal.mean, normal.lazy_covariance_matrix
            normals = [MultivariateNormal(mean.select(dim, i), covariance[(slice(None),) * dim + (i,)]) for i in chosen]
        joint = normals[0] if len(normals) == 1 else MultitaskMultivariateNormal.from_independent_mvns(normals)
        posterior: Any = GPyTorchPosterior(distribution=joint)
        if hasattr(self, "outcome_transform"):
            transform: Any = self.outcome_transform
            if chosen != list(range(self.num_outputs)):
                transform = transform.subset_output(chosen)
            posterior = transform.untransform_posterior(posterior, X=x)
        return posterior if posterior_transform is None else posterior_transform(posterior=posterior, X=x)

    def subset_output(self, idcs: list[int]) -> Any:
        """
        The model of some of the outcomes, for any kernel.

        :param idcs: Which ones.
        """
        subset: Any = copy.deepcopy(self)
        if self.num_outputs == 1 or idcs == list(range(self.num_outputs)):
            return subset
        chosen: int | list[int] = idcs if len(idcs) > 1 else idcs[0]
        subset._num_outputs = len(idcs)
        subset._aug_batch_shape = self._aug_batch_shape[:-1] + torch.Size([len(idcs)] if len(idcs) > 1 else [])
        subset.train_inputs = tuple(x[..., chosen, :, :] for x in subset.train_inputs)
        subset.train_targets = subset.train_targets[..., chosen, :]
        subset.prediction_strategy = None
        for name in ("mean_module", "covar_module", "likelihood"):
            setattr(subset, name, module_of_outcomes(getattr(self, name), chosen, self._aug_batch_shape))
        if hasattr(subset, "outcome_transform"):
            subset.outcome_transform = subset.outcome_transform.subset_output(idcs=idcs)
        return subset
