"""A first look at the lengthscales, by an exact Gaussian process of some of the rows."""

from __future__ import annotations

from typing import Any

import torch
from botorch.exceptions.errors import ModelFittingError
from botorch.fit import fit_gpytorch_mll
from botorch.models.gpytorch import GPyTorchModel
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.means import Mean
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.models import ExactGP
from torch import Tensor

from ..model.likelihoods.registry import observe
from .robust import OutlierLikelihood
from .units import fit_in_units

#: At most so many rows.
NUM_ROWS = 500

#: Steps of L-BFGS-B where nothing else is said. A first look needs no more; where parameters are redundant, as those of
#: a covariance of tasks, it would take thousands to the end.
OPTIONS = {"maxiter": 100}

#: With some of the rows a step that raises the log posterior density of the hyperparameters by less is the last.
FIRST_GAIN = 1.0


def fit_pilot(
    x: Tensor, y: Tensor, mean: Mean, kernel: Kernel, likelihood: Likelihood, options: dict[str, Any] | None = None
) -> None:
    """
    Fit mean, kernel and likelihood, which are changed in place, to some of the rows, evenly spread.

    Where BoTorch gives up they are left as they were.

    :param x: Inputs `(..., N, D)`.
    :param y: Targets `(..., N)`.
    :param mean: The mean.
    :param kernel: The kernel.
    :param likelihood: The likelihood; one with a noise variance for each row is not changed.
    :param options: Of SciPy's L-BFGS-B.
    """
    num_rows = x.shape[-2]
    settings: dict[str, Any] = {"optimizer_kwargs": {"options": {**OPTIONS, **(options or {})}}}
    if num_rows > NUM_ROWS:
        rows = torch.linspace(0, num_rows - 1, NUM_ROWS, device=x.device).round().long()
        x, y = x[..., rows, :], y[..., rows]
        if not isinstance(likelihood, OutlierLikelihood):  # which is made for these rows, and takes many small steps
            likelihood = observe(likelihood).of_rows(rows)
            in_few_steps = {**OPTIONS, "ftol": FIRST_GAIN / NUM_ROWS}  # BoTorch divides by the number of rows
            settings = {"optimizer": fit_in_units, "optimizer_kwargs": {"options": {**in_few_steps, **(options or {})}}}
    pilot = _Pilot(x, y, mean, kernel, likelihood)
    try:
        fit_gpytorch_mll(ExactMarginalLogLikelihood(likelihood, pilot), **settings)
    except ModelFittingError:
        pass  # the fit to all rows says so, if it is as hard


class _Pilot(ExactGP, GPyTorchModel):
    def __init__(self, x: Tensor, y: Tensor, mean: Mean, kernel: Kernel, likelihood: Likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = mean
        self.covar_module = kernel

    def forward(self, x: Tensor) -> MultivariateNormal:
        """
        The prior.

        :param x: Inputs `(..., n, d)`.
        """
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))
