r"""Pathwise sampling: BoTorch's Matheron paths in the weight space of a :class:`~gpytorch_tkrr.HilbertKernel`.

A prior path is :math:`f(x) = m(x) + z(x)^\top w` with :math:`z = \sqrt v \phi` and standard normal weights; the update
by data adds :math:`z(x)^\top u`,

.. math:: u = (I + Z^\top D^{-1} Z)^{-1} Z^\top D^{-1} (y - f(X) - \epsilon), \qquad \epsilon \sim N(0, D),

so that no N x N matrix is needed. A :class:`TKRRModel` holds whole functions already; a path is one of them.
"""

from __future__ import annotations

from typing import Any

import torch
from botorch.models import SingleTaskGP
from botorch.sampling.pathwise.features.generators import GenKernelFeatures
from botorch.sampling.pathwise.features.maps import FeatureMap
from botorch.sampling.pathwise.paths import GeneralizedLinearPath, SamplePath
from botorch.sampling.pathwise.posterior_samplers import DrawMatheronPaths
from botorch.sampling.pathwise.update_strategies import GaussianUpdate
from botorch.sampling.pathwise.utils import (
    get_input_transform,
    get_output_transform,
    get_train_inputs,
    get_train_targets,
)
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from torch import Tensor

from ..bases.covariance import Covariance
from ..hilbert.kernel import HilbertKernel
from ..hilbert.weights import weight_mean
from ..operators.capacitance import root
from ..operators.gram import weighted_product
from .hilbert_model import HilbertGPModel
from .tkrr_model import TKRRModel


class HilbertFeatureMap(FeatureMap):
    r"""
    The features :math:`z = \sqrt v \phi` of a :class:`~gpytorch_tkrr.HilbertKernel`, for BoTorch's sample paths.

    :param kernel: The kernel.
    :param num_inputs: Number of input columns.

    Example:
        >>> import torch
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch_tkrr import Domain, HilbertKernel
        >>> from gpytorch_tkrr.botorch import HilbertFeatureMap
        >>> kernel = HilbertKernel(RBFKernel(), Domain(0.0, 5.0), num_basis=32)
        >>> z = HilbertFeatureMap(kernel, num_inputs=1)(torch.rand(4, 1))
        >>> z.shape
        torch.Size([4, 32])
    """

    def __init__(self, kernel: HilbertKernel, num_inputs: int):
        super().__init__()
        self.kernel = kernel
        self.input_transform = torch.nn.Identity()  # a ScaleKernel around the kernel chains others to them
        self.output_transform = torch.nn.Identity()
        self._num_columns = num_inputs if kernel.active_dims is None else len(kernel.active_dims)

    @property
    def num_outputs(self) -> int:  # type: ignore[override]
        """M, the number of features."""
        return self.kernel.expansion(self._num_columns).num_functions

    @property
    def batch_shape(self) -> torch.Size:  # type: ignore[override]
        """That of the kernel."""
        return self.kernel.batch_shape

    def forward(self, x: Tensor) -> Tensor:
        """
        :param x: Inputs `(..., n, d)`.
        :return: `(..., n, M)`.
        """
        if self.kernel.active_dims is not None:
            x = x.index_select(-1, self.kernel.active_dims)
        expansion = self.kernel.expansion(self._num_columns)
        prior = expansion.covariance()
        return (prior.mix(expansion.features(x)) * root(prior.variances).unsqueeze(-2)).to(x.dtype)


@GenKernelFeatures.register(HilbertKernel)
def _(kernel: HilbertKernel, *, num_inputs: int, num_outputs: int, **ignore: Any) -> HilbertFeatureMap:
    # The number of features is the kernel's own.
    return HilbertFeatureMap(kernel, num_inputs)


@GaussianUpdate.register(HilbertGPModel, _GaussianLikelihoodBase)
def _(
    model: HilbertGPModel,
    likelihood: _GaussianLikelihoodBase,
    *,
    sample_values: Tensor,
    target_values: Tensor | None = None,
    points: Tensor | None = None,
    noise_covariance: Any = None,
    **ignore: Any,
) -> GeneralizedLinearPath:
    if not any(isinstance(module, HilbertKernel) for module in model.covar_module.modules()):  # exact
        exact = GaussianUpdate.dispatch(SingleTaskGP, type(likelihood))
        return exact(
            model, likelihood, sample_values=sample_values, target_values=target_values, points=points,
            noise_covariance=noise_covariance, **ignore,
        )  # fmt: skip
    points = get_train_inputs(model, transformed=True)[0] if points is None else points
    targets = get_train_targets(model, transformed=True) if target_values is None else target_values
    covariance = likelihood.noise_covar(shape=points.shape[:-1]) if noise_covariance is None else noise_covariance
    noise = covariance.diagonal(dim1=-1, dim2=-2).double()  # (..., N)
    feature_map = GenKernelFeatures(model.covar_module, num_inputs=points.shape[-1], num_outputs=0)
    features = feature_map(points).double()  # Z, (..., N, M)
    errors = targets - sample_values - noise.sqrt() * torch.randn_like(sample_values)
    target = (features.mT @ (errors.double() / noise).unsqueeze(-1)).squeeze(-1)
    precision = weighted_product(features, features, 1 / noise)
    weight = weight_mean(Covariance(torch.ones_like(features[..., 0, :])), precision, target)
    return GeneralizedLinearPath(
        feature_map=feature_map, weight=weight.to(sample_values), input_transform=get_input_transform(model)
    )


class CPPath(SamplePath):
    r"""
    Functions :math:`\bar f(x) + r(x)^\top z` of a :class:`TKRRModel` with fixed z.

    :param model: The model.
    :param weights: z of each outcome, `(*sample_shape, *batch, S)`.
    """

    def __init__(self, model: TKRRModel, weights: list[Tensor]):
        super().__init__()
        self.model = model
        self.weights = weights
        self.input_transform = get_input_transform(model)
        self.output_transform = get_output_transform(model)

    def forward(self, x: Tensor) -> Tensor:
        """
        :param x: Transformed inputs `(..., n, d)`; with several outcomes `(..., 1, n, d)`.
        :return: `(*sample_shape, ..., n)`; with several outcomes `(*sample_shape, ..., m, n)`.
        """
        several = len(self.weights) > 1
        x = x.squeeze(-3) if several else x
        values = []
        for i, weights in enumerate(self.weights):
            mean, root = self.model.outcome(i).functions(x)
            values.append(mean + (root @ weights.unsqueeze(-1)).squeeze(-1))
        return (torch.stack(values, -2) if several else values[0]).to(x.dtype)

    def set_ensemble_as_batch(self, ensemble_as_batch: bool) -> None:
        """A TKRRModel is no ensemble: nothing to set."""


@DrawMatheronPaths.register(TKRRModel)
def _(model: TKRRModel, *, sample_shape: torch.Size, **options: Any) -> SamplePath:
    if model.is_exact:
        return DrawMatheronPaths.dispatch(SingleTaskGP)(model, sample_shape=sample_shape, **options)
    model.eval()
    return CPPath(model, [outcome.draw_weights(sample_shape) for outcome in model.all_outcomes()])
