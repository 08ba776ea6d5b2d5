r"""Whole functions drawn exactly from the prior or the posterior: :math:`f(x) = m(x) + \phi(x)^\top a`."""

from __future__ import annotations

import torch
from gpytorch.models import ExactGP
from torch import Tensor

from .prediction import HilbertPredictionStrategy, by_functions, split_covariance


class FunctionDraws:
    """
    Functions with fixed weights; they can be evaluated again and again, and differentiated in x.

    Draws are made of the kernel's basis functions only. Outside the box of the kernel these are zero: each draw is the
    prior mean there, with variance zero, where the model itself predicts the prior variance as independent noise.
    In eval mode the kernel then issues its :class:`~gpytorch_tkrr.OutOfDomainWarning`.

    :param model: The model that they were drawn from.
    :param weights: `(S, *batch, M)`.

    Example:
        >>> import gpytorch, torch, gpytorch_tkrr as tkrr
        >>> class Model(gpytorch.models.ExactGP):
        ...     def __init__(self, x, y, likelihood):
        ...         super().__init__(x, y, likelihood)
        ...         self.mean_module = gpytorch.means.ConstantMean()
        ...         self.covar_module = tkrr.HilbertKernel.from_tolerance(gpytorch.kernels.RBFKernel(), x)
        ...     def forward(self, x):
        ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
        >>> x = torch.linspace(0, 1, 20)
        >>> model = Model(x, torch.sin(6 * x), gpytorch.likelihoods.GaussianLikelihood())
        >>> f = tkrr.draw_posterior_functions(model.eval(), 2)
        >>> point = torch.tensor([0.3], requires_grad=True)
        >>> torch.equal(f(point), f(point))  # the same functions each time
        True
        >>> slope, = torch.autograd.grad(f(point)[0].sum(), point)
        >>> slope.shape
        torch.Size([1])
    """

    def __init__(self, model: ExactGP, weights: Tensor):
        self.model = model
        self.weights = weights

    def __repr__(self) -> str:
        return f"{len(self.weights)} functions of a {type(self.model).__name__}; call them with inputs (n, d)"

    def __call__(self, x: Tensor) -> Tensor:
        """
        :param x: Inputs `(..., n, d)`, or `(n,)` for one dimension.
        :return: Values `(S, ..., n)`.
        """
        prior = self.model.forward(x.unsqueeze(-1) if x.dim() == 1 else x)
        with by_functions(self.model):
            low_rank, _ = split_covariance(prior.lazy_covariance_matrix.evaluate_kernel())
        features = low_rank.features.double()
        weights = self.weights
        extra = features.dim() - weights.dim()  # batches of inputs that the model does not have
        weights = weights.reshape(weights.shape[0], *([1] * max(extra, 0)), *weights.shape[1:])
        values = (features @ weights.movedim(0, -1)).movedim(-1, 0)  # (S, ..., n)
        return prior.mean + values.to(prior.mean.dtype)


def draw_prior_functions(model: ExactGP, num_draws: int, *, generator: torch.Generator | None = None) -> FunctionDraws:
    """
    Draw functions from the prior of a Gaussian process with a :class:`~gpytorch_tkrr.HilbertKernel`.

    Outside the box of the kernel the draws have variance zero, not the prior variance: see :class:`FunctionDraws`.

    :param model: An :class:`~gpytorch.models.ExactGP` with training inputs.
    :param num_draws: S.
    :param generator: Source of random numbers.

    Example:
        >>> import gpytorch, torch, gpytorch_tkrr as tkrr
        >>> class Model(gpytorch.models.ExactGP):
        ...     def __init__(self, x, y, likelihood):
        ...         super().__init__(x, y, likelihood)
        ...         self.mean_module = gpytorch.means.ConstantMean()
        ...         self.covar_module = tkrr.HilbertKernel.from_tolerance(gpytorch.kernels.RBFKernel(), x)
        ...     def forward(self, x):
        ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
        >>> x = torch.linspace(0, 1, 20)
        >>> model = Model(x, torch.sin(6 * x), gpytorch.likelihoods.GaussianLikelihood())
        >>> f = tkrr.draw_prior_functions(model, 5)
        >>> f(torch.rand(3)).shape
        torch.Size([5, 3])
    """
    with torch.no_grad(), by_functions(model):
        prior = model.forward(*(x[..., :1, :] for x in model.train_inputs))
        low_rank, _ = split_covariance(prior.lazy_covariance_matrix.evaluate_kernel())
        scale = low_rank.scale
        noise = torch.randn(num_draws, *scale.shape, dtype=scale.dtype, device=scale.device, generator=generator)
        weights = low_rank.prior.unmix((noise * scale).unsqueeze(-2)).squeeze(-2)
    return FunctionDraws(model, weights)


def draw_posterior_functions(
    model: ExactGP, num_draws: int, *, generator: torch.Generator | None = None
) -> FunctionDraws:
    """
    Draw functions from the posterior of a Gaussian process with a :class:`~gpytorch_tkrr.HilbertKernel`.

    Outside the box of the kernel the draws have variance zero, not the prior variance: see :class:`FunctionDraws`.

    :param model: An :class:`~gpytorch.models.ExactGP` in eval mode.
    :param num_draws: S.
    :param generator: Source of random numbers.
    :raises RuntimeError: Where the model is in training mode.

    Example:
        >>> import gpytorch, torch, gpytorch_tkrr as tkrr
        >>> class Model(gpytorch.models.ExactGP):
        ...     def __init__(self, x, y, likelihood):
        ...         super().__init__(x, y, likelihood)
        ...         self.mean_module = gpytorch.means.ConstantMean()
        ...         self.covar_module = tkrr.HilbertKernel.from_tolerance(gpytorch.kernels.RBFKernel(), x)
        ...     def forward(self, x):
        ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
        >>> x = torch.linspace(0, 1, 20)
        >>> model = Model(x, torch.sin(6 * x), gpytorch.likelihoods.GaussianLikelihood()).eval()
        >>> f = tkrr.draw_posterior_functions(model, 5)
        >>> f(torch.rand(3)).shape
        torch.Size([5, 3])
    """
    if model.training:
        raise RuntimeError(
            "draw_posterior_functions needs a model in eval mode; this one is in training mode. Call model.eval() "
            "first, or draw_prior_functions for draws that know nothing of the data."
        )
    with torch.no_grad(), by_functions(model):
        if model.prediction_strategy is None:
            first = [x[..., :1, :] for x in model.train_inputs]
            model(*first)
        strategy = model.prediction_strategy
        if not isinstance(strategy, HilbertPredictionStrategy):
            raise TypeError(
                "draw_posterior_functions needs an ExactGP in eval mode whose kernel is a HilbertKernel (possibly "
                f"inside a ScaleKernel); its prediction strategy is {type(strategy).__name__}."
            )
        mean, root = strategy.posterior
        noise = torch.randn(num_draws, *mean.shape, dtype=mean.dtype, device=mean.device, generator=generator)
    return FunctionDraws(model, mean + (root @ noise.unsqueeze(-1)).squeeze(-1))
