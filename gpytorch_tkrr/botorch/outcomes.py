"""What our models of several outcomes share: a choice of outcomes, and the modules of one outcome."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from botorch.acquisition.objective import PosteriorTransform
from botorch.models import SingleTaskGP
from botorch.models.utils import add_output_dim, gpt_posterior_settings
from botorch.posteriors import GPyTorchPosterior
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.likelihoods.noise_models import FixedGaussianNoise, HomoskedasticNoise
from gpytorch.means import Mean
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


class OutcomeChoice(SingleTaskGP):
    """A :class:`~botorch.models.SingleTaskGP` whose posterior can be asked for any of its outcomes."""

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


def module_of_outcomes(module: Module, chosen: int | list[int], batch_shape: torch.Size) -> Module:
    """
    A copy of a kernel, a mean or a likelihood for some of the outcomes.

    :param module: For all outcomes; those of its parts that have no batch shape serve each of them.
    :param chosen: Which outcome, or which outcomes.
    :param batch_shape: The batch shape of a part that has one, the number of outcomes last; empty for one outcome.
    """
    copied = copy.deepcopy(module)
    if not batch_shape:
        return copied
    dim = len(batch_shape) - 1
    index = (slice(None),) * dim + (chosen,)
    for part in copied.modules():
        if isinstance(part, FixedGaussianNoise):
            part.noise = part.noise[index]
        elif _batch_shape(part) == batch_shape:
            for name, value in part._parameters.items():
                if value is not None:
                    picked = value.detach()[index].clone()
                    part._parameters[name] = nn.Parameter(picked, requires_grad=value.requires_grad)
            if isinstance(part, Kernel | Mean):
                part.batch_shape = batch_shape[:dim] + torch.Size([] if isinstance(chosen, int) else [len(chosen)])
    return copied


@torch.no_grad()
def read_outcome(single: nn.Module, module: nn.Module, i: int) -> None:
    """
    Give the module of one outcome the present values of the module of all.

    :param single: Made by :func:`module_of_outcomes`; changed in place.
    :param module: For all outcomes.
    :param i: Which outcome.
    """
    for mine, all_values in zip(single.parameters(), module.parameters(), strict=True):
        mine.copy_(all_values[i] if mine.shape != all_values.shape else all_values)


@torch.no_grad()
def write_outcomes(module: nn.Module, singles: Sequence[nn.Module]) -> None:
    """
    Give a module of all outcomes the values of the modules of each; what they share gets the mean.

    :param module: For all outcomes; changed in place.
    :param singles: Those of each outcome.
    """
    for all_values, *each in zip(module.parameters(), *(single.parameters() for single in singles), strict=True):
        values = torch.stack([value.to(all_values) for value in each])
        all_values.copy_(values.mean(0) if values[0].shape == all_values.shape else values)


def _batch_shape(part: nn.Module) -> torch.Size | None:
    """That of the parameters of a module, without those of its parts."""
    if isinstance(part, HomoskedasticNoise):
        return part.raw_noise.shape[:-1]
    return getattr(part, "batch_shape", None) if isinstance(part, Kernel | Mean) else None
