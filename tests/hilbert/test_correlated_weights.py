"""A HilbertKernel whose weights have a dense covariance, against dense algebra and the kernel's own forward."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import RBFKernel, ScaleKernel
from levels import LevelsKernel

import gpytorch_tkrr as tkrr
from gpytorch_tkrr import Domain, HilbertKernel

NUM_LEVELS = 3


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood, kernel):
        super().__init__(x, y, likelihood)
        self.mean_module, self.covar_module = gpytorch.means.ConstantMean(), kernel

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def data(num):
    x = torch.rand(num, 2, dtype=torch.float64)
    x[:, 1] = torch.randint(NUM_LEVELS, (num,)).double()
    return x, torch.sin(6 * x[:, 0]) * (x[:, 1] - 0.7) + 0.1 * torch.randn(num, dtype=torch.float64)


def make_base():
    kernel = ScaleKernel(RBFKernel(active_dims=0) * LevelsKernel(NUM_LEVELS, rank=2, active_dims=1)).double()
    kernel = kernel + LevelsKernel(NUM_LEVELS, active_dims=1).double() + ScaleKernel(RBFKernel(active_dims=0)).double()
    kernel.kernels[0].base_kernel.kernels[0].lengthscale = kernel.kernels[2].base_kernel.lengthscale = 0.4
    return kernel


def make_kernel(base):
    return HilbertKernel(base, Domain(torch.tensor([0.5, 1.0]), torch.tensor([2.0, 3.0])), num_basis=24)


def dense(kernel, x, z):
    """Phi V Phi' with V as one matrix."""
    expansion = kernel.expansion(2)
    return expansion.features(x) @ expansion.covariance().to_dense() @ expansion.features(z).mT


@pytest.fixture
def problem():
    x, y = data(40)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    likelihood.noise = 0.05
    kernel = make_kernel(make_base())
    return x, y, likelihood, kernel, Model(x, y, likelihood, kernel).double()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # IndexKernel
def test_features_and_covariance_are_the_kernel(problem):
    x, _, _, kernel, _ = problem
    exact = kernel.base_kernel(x, torch.cat([x, x[:1]])).to_dense()[:, :-1]
    torch.testing.assert_close(kernel(x).to_dense(), exact, rtol=0, atol=1e-4)
    torch.testing.assert_close(kernel(x, x[:5]).to_dense(), exact[:, :5], rtol=0, atol=1e-4)
    torch.testing.assert_close(kernel(x, diag=True), exact.diagonal(), rtol=0, atol=1e-4)
    assert kernel.approximation_error(x) < 1e-4


@pytest.mark.parametrize("fixed", [False, True], ids=["one noise", "noise of each row"])
def test_likelihood_and_its_gradient(problem, fixed):
    x, y, likelihood, kernel, model = problem
    noise = torch.rand(40, dtype=torch.float64) + 0.05
    if fixed:
        likelihood = model.likelihood = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(noise)
    value = likelihood(model(x)).log_prob(y)
    covariance = dense(kernel, x, x) + (noise.diag() if fixed else likelihood.noise * torch.eye(40))
    expected = torch.distributions.MultivariateNormal(torch.zeros(40).double(), covariance).log_prob(y)
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-8)
    parameters = list(kernel.parameters())
    for actual, exact in zip(
        torch.autograd.grad(value, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        torch.testing.assert_close(actual, exact, rtol=1e-6, atol=1e-8)


def test_prediction(problem):
    x, y, likelihood, kernel, model = problem
    z, _ = data(9)
    with torch.no_grad():
        prediction = model.eval()(z)
        inverse = torch.linalg.inv(dense(kernel, x, x) + likelihood.noise * torch.eye(40))
        cross = dense(kernel, z, x)
        torch.testing.assert_close(prediction.mean, cross @ inverse @ y)
        expected = dense(kernel, z, z) - cross @ inverse @ cross.mT
        torch.testing.assert_close(prediction.covariance_matrix, expected, rtol=1e-6, atol=1e-9)
        fantasy = model.get_fantasy_model(z[:2], torch.ones(2, dtype=torch.float64))(z[2:])
        rows, targets = torch.cat([x, z[:2]]), torch.cat([y, torch.ones(2, dtype=torch.float64)])
        inverse = torch.linalg.inv(dense(kernel, rows, rows) + likelihood.noise * torch.eye(42))
        torch.testing.assert_close(fantasy.mean, dense(kernel, z[2:], rows) @ inverse @ targets)


def test_sums_over_data_serve_as_well(problem):
    x, y, likelihood, kernel, model = problem
    summed = tkrr.HilbertGP((x, y), likelihood, kernel, mean_module=model.mean_module)
    value = likelihood(summed(*summed.train_inputs)).log_prob(summed.train_targets)
    torch.testing.assert_close(value, likelihood(model(x)).log_prob(y))
    z, _ = data(9)
    with torch.no_grad():
        one, other = model.eval()(z), summed.eval()(z)
        torch.testing.assert_close(other.mean, one.mean)
        torch.testing.assert_close(other.covariance_matrix, one.covariance_matrix, rtol=1e-6, atol=1e-9)


def test_draws_of_whole_functions(problem):
    x, _, _, kernel, model = problem
    f = tkrr.draw_prior_functions(model, 20_000, generator=torch.Generator().manual_seed(0))
    z = x[:4]
    values = f(z)
    torch.testing.assert_close(values.mT.cov(), dense(kernel, z, z).detach(), rtol=0.05, atol=0.1)
