"""A Gaussian process with few inputs and any number of observations."""

from __future__ import annotations

import math
from typing import Any

import torch
from botorch.acquisition.objective import PosteriorTransform
from botorch.models import SingleTaskGP
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.models.utils import add_output_dim, gpt_posterior_settings
from botorch.utils.types import DEFAULT, _DefaultType
from gpytorch.constraints import Interval
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel, RBFKernel
from gpytorch.likelihoods import Likelihood
from gpytorch.means import Mean
from torch import Tensor

from ..distribution import ReducedRankNormal
from ..domain import Domain
from ..errors import SizeError
from ..index_set import FullTensor, HyperbolicCross, IndexSet
from ..kernel import HilbertKernel
from .box import input_range
from .outcomes import choose_outcomes, join_outcomes

#: More inputs than this are for :class:`TKRRModel`.
MAX_DIMS = 6

#: Up to so many inputs all products of functions are kept, above it a hyperbolic cross.
MAX_FULL_DIMS = 3

#: How many functions are used at most where nothing else is said; the more inputs, the dearer the others are to fit.
NUM_FUNCTIONS = {1: 100, 2: 1000, 3: 1000}
CROSS_NUM_FUNCTIONS = 550

#: Half width of the box divided by half the range of the inputs: the more inputs, the fewer functions for each.
BOUNDARY_FACTORS = {1: 10.0, 2: 5.0, 3: 3.5}
CROSS_BOUNDARY_FACTOR = 3.0

#: Prior variance that the basis may leave out at either end of the lengthscales' interval, all inputs together.
MISSING = 0.025

#: With a hyperbolic cross the reduced-rank prior is the model; what it leaves out is made up for outside the box only.
CROSS_ACCEPTED_ERROR = 1 - 1e-6


class HilbertGPModel(SingleTaskGP):
    r"""
    A :class:`~botorch.models.SingleTaskGP` whose kernel is a :class:`~gpytorch_tkrr.HilbertKernel`: the same arguments,
    transforms and priors, but a fit whose cost hardly depends on the number of observations, and function draws that
    are exact.

    The box holds `bounds` and the training inputs, with a margin. In one to three dimensions it carries all products of
    the functions, in four to six a hyperbolic cross of them. The default kernel is BoTorch's: RBF with its
    dimension-scaled prior on the lengthscales, here kept in the interval that the basis represents. On the unit cube
    that is [0.07, 3.3] in one dimension, [0.13, 1.35] in two, [0.29, 0.81] in three, and [0.06, 0.82] to [0.11, 0.82]
    in four to six, for which BoTorch's prior has its mode at 0.4 to 0.5. Give more functions to go beyond.

    :param train_X: Inputs `(*batch, n, d)`.
    :param train_Y: Outcomes `(*batch, n, m)`.
    :param train_Yvar: Their noise variances, where known.
    :param likelihood: As for SingleTaskGP.
    :param covar_module: The kernel to expand, or a HilbertKernel to use as it is.
    :param mean_module: As for SingleTaskGP.
    :param outcome_transform: As for SingleTaskGP.
    :param input_transform: As for SingleTaskGP.
    :param bounds: The search space, `(2, d)`, as for `optimize_acqf`; by default the unit cube.
    :param num_functions: At most so many functions; by default 100 for one input, 1 000 for two or three, 550 for more.

    Example:
        >>> import torch
        >>> from botorch.fit import fit_gpytorch_mll
        >>> from gpytorch.mlls import ExactMarginalLogLikelihood
        >>> from gpytorch_tkrr.botorch import HilbertGPModel
        >>> train_X = torch.rand(30, 2, dtype=torch.float64)
        >>> train_Y = torch.sin(6 * train_X).sum(-1, keepdim=True)
        >>> model = HilbertGPModel(train_X, train_Y)
        >>> mll = fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        >>> bool((model.posterior(train_X).mean - train_Y).abs().max() < 0.1)
        True
    """

    def __init__(
        self,
        train_X: Tensor,
        train_Y: Tensor,
        train_Yvar: Tensor | None = None,
        likelihood: Likelihood | None = None,
        covar_module: Kernel | None = None,
        mean_module: Mean | None = None,
        outcome_transform: OutcomeTransform | _DefaultType | None = DEFAULT,
        input_transform: InputTransform | None = None,
        *,
        bounds: Tensor | None = None,
        num_functions: int | None = None,
    ):
        super().__init__(
            train_X=train_X,
            train_Y=train_Y,
            train_Yvar=train_Yvar,
            likelihood=likelihood,
            covar_module=covar_module,
            mean_module=mean_module,
            outcome_transform=outcome_transform,
            input_transform=input_transform,
        )
        hilbert = [module for module in self.covar_module.modules() if isinstance(module, HilbertKernel)]
        if not hilbert:
            with torch.no_grad():
                x = self.transform_inputs(train_X)
            lower, upper = input_range(x, bounds, input_transform)
            self.covar_module = _expand(self.covar_module, lower, upper, num_functions, is_default=covar_module is None)
            hilbert = [self.covar_module]
        if covar_module is None:
            raw = self._subset_batch_dict.pop("covar_module.raw_lengthscale")
            self._subset_batch_dict["covar_module.base_kernel.raw_lengthscale"] = raw
        self._num_functions = max(kernel.expansion(self._num_columns(kernel)).num_functions for kernel in hilbert)
        self.to(train_X)

    def _num_columns(self, kernel: HilbertKernel) -> int:
        return self.train_inputs[0].shape[-1] if kernel.domain.num_dims is None else kernel.domain.num_dims

    def forward(self, x: Tensor) -> MultivariateNormal:
        """
        The prior.

        :param x: Inputs `(..., n, d)`.
        """
        if self.training:
            x = self.transform_inputs(x)
        # BoTorch turns low-rank likelihoods off; with fewer rows than functions the dense one is indeed the faster.
        normal = ReducedRankNormal if x.shape[-2] > self._num_functions else MultivariateNormal
        return normal(self.mean_module(x), self.covar_module(x))

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
        :param output_indices: Which outcomes; all by default.
        :param observation_noise: Whether to add the noise variance, or the (transformed) variances to add,
            `(*batch, q, m)`.
        :param posterior_transform: Applied to the result.
        """
        if output_indices is None or self.num_outputs == 1:
            return super().posterior(X, None, observation_noise, posterior_transform)
        self.eval()
        x = self.transform_inputs(X)
        with gpt_posterior_settings():
            batch, dim = add_output_dim(X=x, original_batch_shape=self._input_batch_shape)
            normal = self._apply_noise(X=batch, mvn=self(batch), observation_noise=observation_noise)
            mean, covariance = normal.mean, normal.lazy_covariance_matrix
            chosen = choose_outcomes(output_indices, self.num_outputs)
            normals = [MultivariateNormal(mean.select(dim, i), covariance[(slice(None),) * dim + (i,)]) for i in chosen]
        return join_outcomes(self, normals, chosen, x, posterior_transform)


def _expand(
    kernel: Kernel, lower: Tensor, upper: Tensor, num_functions: int | None, *, is_default: bool
) -> HilbertKernel:
    """The kernel on a box around a range of inputs."""
    num_dims = len(lower)
    if num_dims > MAX_DIMS:
        raise SizeError(
            f"HilbertGPModel takes up to {MAX_DIMS} inputs; got {num_dims}. Use TKRRModel(train_X, train_Y), whose "
            "size is linear in their number, or pass covar_module=HilbertKernel(...) over a sum of kernels of few "
            "inputs each."
        )
    if num_functions is None:
        num_functions = NUM_FUNCTIONS.get(num_dims, CROSS_NUM_FUNCTIONS)
    num_basis, index_set = _choose_functions(num_dims, num_functions)
    domain = Domain.from_bounds(lower, upper, boundary_factor=BOUNDARY_FACTORS.get(num_dims, CROSS_BOUNDARY_FACTOR))
    if is_default:
        _bound_lengthscales(kernel, domain, (upper - lower) / 2, num_basis)
    hilbert = HilbertKernel(kernel, domain, num_basis, index_set=index_set)
    if not isinstance(index_set, FullTensor):
        hilbert._accepted_error = CROSS_ACCEPTED_ERROR
    return hilbert


def _choose_functions(num_dims: int, num_functions: int) -> tuple[int, IndexSet]:
    """Functions per dimension, and which of their products are kept."""
    if num_dims <= MAX_FULL_DIMS:
        return max(int(num_functions ** (1 / num_dims) + 1e-9), 1), FullTensor()
    limit = 1
    while HyperbolicCross(limit + 1).size([limit + 1] * num_dims) <= num_functions:
        limit += 1
    return limit, HyperbolicCross(limit)


def _bound_lengthscales(kernel: RBFKernel, domain: Domain, half_range: Tensor, num_basis: int) -> None:
    r"""
    Keep the lengthscales of an RBF kernel where box and basis represent its variance.

    With a highest frequency w the basis leaves out :math:`\operatorname{erfc}(w \ell / \sqrt 2)` of the variance of one
    dimension; at the edge of the inputs the box leaves out :math:`k(2 (L - S))`.
    """
    num_dims = len(half_range)
    missing = torch.tensor(MISSING / num_dims if num_dims <= MAX_FULL_DIMS else 2 * MISSING, dtype=torch.float64)
    _, half_width = domain.sides(num_dims)
    highest = math.pi * num_basis / (2 * half_width)
    lower = math.sqrt(2) * torch.erfinv(1 - missing) / highest
    upper = 2 * (half_width - half_range) / (-2 * missing.log()).sqrt()
    prior = kernel.lengthscale_prior
    initial = torch.minimum(torch.maximum(prior.mode.double(), lower), upper)
    kernel.register_constraint("raw_lengthscale", Interval(lower, upper, transform=None, initial_value=initial))
    kernel.register_prior("lengthscale_prior", prior, _get_lengthscale, _set_lengthscale)


def _get_lengthscale(kernel: RBFKernel) -> Tensor:
    return kernel.lengthscale


def _set_lengthscale(kernel: RBFKernel, value: Any) -> None:
    """Draws from the prior, which `fit_gpytorch_mll` restarts from, may lie outside of the interval."""
    constraint = kernel.raw_lengthscale_constraint
    value = torch.as_tensor(value).to(kernel.raw_lengthscale)
    kernel.lengthscale = torch.minimum(torch.maximum(value, constraint.lower_bound), constraint.upper_bound)
