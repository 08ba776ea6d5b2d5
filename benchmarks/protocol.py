r"""The protocol of Wesel & Batselier (2021): splits, scaling, hyperparameters, and the three methods they compare.

Inputs are scaled to :math:`[0, 1]` by the training data; the sines live on the box :math:`[-1/2, 3/2]`. All methods
share one lengthscale and one ridge :math:`\lambda`, and minimise :math:`\sum_n (y_n - f(x_n))^2 + \lambda \|w\|^2`.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import gpytorch
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from torch import Tensor

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.cp.penalty import Penalty

from .datasets import Dataset

SWEEPS = 10


@dataclass
class Split:
    """
    Training and test data, scaled.

    :param train_x: Inputs `(N, D)` in [0, 1].
    :param train_y: Targets `(N,)`: standardised, or -1 and +1.
    :param test_x: Inputs `(n, D)`, scaled by the range of the training inputs.
    :param test_y: Targets `(n,)`.
    """

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


def split(data: Dataset, generator: torch.Generator, *, train: float = 0.9, rows: int | None = None) -> Split:
    """
    A random split, scaled.

    :param data: The data.
    :param generator: Draws the split.
    :param train: Fraction of the rows that are trained on.
    :param rows: Number of rows to use; all by default.
    """
    x, y = torch.from_numpy(data.x), torch.from_numpy(data.y)
    order = torch.randperm(len(y), generator=generator)[:rows]
    size = math.floor(train * len(order))
    first, rest = order[:size], order[size:]
    scale_x = unit_scaler(x[first])
    scale_y = as_signs if data.task == "classification" else standardiser(y[first])
    return Split(scale_x(x[first]), scale_y(y[first]), scale_x(x[rest]), scale_y(y[rest]))


def unit_scaler(x: Tensor) -> Callable[[Tensor], Tensor]:
    """
    The map that takes the range of each column to [0, 1]; a constant column is only shifted.

    :param x: Training inputs `(N, D)`.
    """
    lower, width = x.amin(0), x.amax(0) - x.amin(0)
    width = torch.where(width > 0, width, torch.ones_like(width))
    return lambda x: (x - lower) / width


def standardiser(y: Tensor) -> Callable[[Tensor], Tensor]:
    """
    The map that takes the targets to mean 0 and standard deviation 1 (with N - 1).

    :param y: Training targets `(N,)`.
    """
    mean, sd = y.mean(), y.std()
    return lambda y: (y - mean) / sd


def as_signs(y: Tensor) -> Tensor:
    """
    Class labels {0, 1} or {-1, +1} as -1 and +1.

    :param y: Labels `(N,)`.
    """
    return torch.where(y > 0, 1.0, -1.0).to(y)


def mean_squared_error(prediction: Tensor, y: Tensor) -> float:
    """
    The mean squared error.

    :param prediction: Predicted targets `(n,)`.
    :param y: Targets `(n,)`.
    """
    return float((prediction - y).square().mean())


def misclassification(prediction: Tensor, y: Tensor) -> float:
    """
    The fraction of wrong signs.

    :param prediction: Predicted response `(n,)`.
    :param y: Classes -1 and +1, `(n,)`.
    """
    return float((as_signs(prediction) != y).double().mean())


# Hyperparameters


@dataclass(frozen=True)
class Hyperparameters:
    r"""
    What all methods share.

    :param lengthscale: The lengthscale of all inputs.
    :param ridge: :math:`\lambda`.
    """

    lengthscale: float
    ridge: float


def mean_sd_lengthscale(x: Tensor) -> float:
    """
    The mean over the inputs of their standard deviations.

    :param x: Training inputs `(N, D)`.
    """
    return float(x.std(0).mean())


class ExactGP(gpytorch.models.ExactGP):
    """
    An exact GP with zero mean and one lengthscale.

    :param x: Inputs `(N, D)`.
    :param y: Targets `(N,)`, standardised.
    """

    def __init__(self, x: Tensor, y: Tensor):
        positive = gpytorch.constraints.GreaterThan(1e-10)  # some of the data hardly have noise
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood(noise_constraint=positive))
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = ScaleKernel(RBFKernel())

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def exact_gp_hyperparameters(x: Tensor, y: Tensor, *, starts: tuple[float, ...] = (1.0, 0.3)) -> Hyperparameters:
    r"""
    Lengthscale and :math:`\lambda` = noise / outputscale that maximise the marginal likelihood of an exact GP.

    :param x: Inputs `(N, D)`.
    :param y: Targets `(N,)`, standardised.
    :param starts: Lengthscales to start from; the best result counts.
    """
    found = []
    for lengthscale in starts:
        model = ExactGP(x, y).to(x)
        model.covar_module.base_kernel.lengthscale = lengthscale
        model.covar_module.outputscale = 1.0
        model.likelihood.noise = math.exp(-2)
        loss = _maximise_marginal_likelihood(model)
        ratio = model.likelihood.noise / model.covar_module.outputscale
        found.append((loss, model.covar_module.base_kernel.lengthscale.item(), ratio.item()))
    return Hyperparameters(*min(found)[1:])


def _maximise_marginal_likelihood(model: ExactGP) -> float:
    """Train by L-BFGS until it stands still; return the loss."""
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -objective(model(*model.train_inputs), model.train_targets)
        loss.backward()
        return loss

    with gpytorch.settings.max_cholesky_size(len(model.train_targets)):
        optimizer.step(closure)
        return closure().item()


# The three methods


@dataclass
class Method:
    """
    A trained regressor.

    :param predict: Inputs `(n, D)` -> response `(n,)`.
    :param seconds: Time of training.
    """

    predict: Callable[[Tensor], Tensor]
    seconds: float


def fit_krr(x: Tensor, y: Tensor, theta: Hyperparameters) -> Method:
    """
    Full kernel ridge regression, the mean of an exact GP.

    :param x: Inputs `(N, D)`.
    :param y: Targets `(N,)`.
    :param theta: Lengthscale and ridge.
    """
    start = time.process_time()
    covariance = _gaussian(x, x, theta.lengthscale)
    covariance.diagonal().add_(theta.ridge)
    weights = torch.cholesky_solve(y.unsqueeze(-1), torch.linalg.cholesky(covariance)).squeeze(-1)
    return Method(lambda test: _gaussian(test, x, theta.lengthscale) @ weights, _since(start))


def _gaussian(x: Tensor, z: Tensor, lengthscale: float) -> Tensor:
    return torch.cdist(x / lengthscale, z / lengthscale).square().mul(-0.5).exp()


def fit_rff(x: Tensor, y: Tensor, theta: Hyperparameters, *, num_features: int, generator: torch.Generator) -> Method:
    r"""
    Ridge regression on random Fourier features :math:`\sqrt{2 / M} \cos(\omega^\top x + b)`.

    :param x: Inputs `(N, D)`.
    :param y: Targets `(N,)`.
    :param theta: Lengthscale and ridge.
    :param num_features: Number of features.
    :param generator: Draws them.

    Reference: Rahimi & Recht (2007), *Random features for large-scale kernel machines*.
    """
    start = time.process_time()
    omega = torch.randn(x.shape[1], num_features, generator=generator, dtype=x.dtype) / theta.lengthscale
    phase = 2 * math.pi * torch.rand(num_features, generator=generator, dtype=x.dtype)

    def features(x: Tensor) -> Tensor:
        return math.sqrt(2 / num_features) * (x @ omega + phase).cos()

    gram, rhs = theta.ridge * torch.eye(num_features, dtype=x.dtype), torch.zeros(num_features, dtype=x.dtype)
    for rows, targets in zip(x.split(8192), y.split(8192), strict=True):
        block = features(rows)
        gram += block.mT @ block
        rhs += block.mT @ targets
    weights = torch.linalg.solve(gram, rhs)
    return Method(lambda test: torch.cat([features(rows) @ weights for rows in test.split(8192)]), _since(start))


def fit_tkrr(
    x: Tensor,
    y: Tensor,
    theta: Hyperparameters,
    *,
    num_basis: int,
    rank: int,
    generator: torch.Generator,
    penalty: Callable[[float], Penalty] = tkrr.ColumnPenalty,
) -> Method:
    """
    T-KRR: ten sweeps from the authors' random start.

    :param x: Inputs `(N, D)`.
    :param y: Targets `(N,)`.
    :param theta: Lengthscale and ridge.
    :param num_basis: M, the number of sines per dimension.
    :param rank: R.
    :param generator: Draws the start.
    :param penalty: Makes the penalty from the ridge.
    """
    start = time.process_time()
    model = tkrr_model(x, y, theta.lengthscale, num_basis=num_basis, rank=rank)
    factors = initial_factors(x.shape[1], num_basis, rank, generator)
    tkrr.fit_als(model, max_sweeps=SWEEPS, rel_tol=0.0, penalty=penalty(theta.ridge), initial_factors=factors)
    return Method(lambda test: predict_mean(model, test), _since(start))


def tkrr_model(x: Tensor, y: Tensor, lengthscale: float, *, num_basis: int, rank: int) -> tkrr.TKRR:
    """
    The model of the paper: one lengthscale, zero mean, box [-1/2, 3/2].

    :param x: Inputs `(N, D)` in [0, 1].
    :param y: Targets `(N,)`.
    :param lengthscale: The lengthscale.
    :param num_basis: M, the number of sines per dimension.
    :param rank: R.
    """
    kernel = RBFKernel()
    kernel.lengthscale = lengthscale
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    domain = tkrr.Domain(torch.full((x.shape[1],), 0.5), 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tkrr.ApproximationWarning)  # the authors' box is small for long lengthscales
        return tkrr.TKRR(
            x,
            y,
            likelihood,
            kernel=kernel.to(x),
            rank=rank,
            num_basis=num_basis,
            domain=domain,
            mean_module=gpytorch.means.ZeroMean(),
        )


def initial_factors(num_dims: int, num_basis: int, rank: int, generator: torch.Generator) -> list[Tensor]:
    """
    The authors' start: D standard normal matrices `(M, R)`, each divided by its spectral norm.

    :param num_dims: D.
    :param num_basis: M.
    :param rank: R.
    :param generator: Draws them.
    """
    draws = torch.randn(num_dims, num_basis, rank, generator=generator, dtype=torch.float64)
    return list(draws / torch.linalg.matrix_norm(draws, 2, keepdim=True))


def predict_mean(model: tkrr.TKRR, x: Tensor) -> Tensor:
    """
    The predictive mean, without a warning about the small box.

    :param model: A fitted model.
    :param x: Inputs `(n, D)`.
    """
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", tkrr.OutOfDomainWarning)
        return torch.cat([model.eval()(rows).mean for rows in x.split(8192)])


def _since(start: float) -> float:
    return time.process_time() - start
