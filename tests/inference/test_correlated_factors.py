"""CP weights whose prior covariance is dense in one mode: the levels of a category."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from levels import LevelsKernel

import gpytorch_tkrr as tkrr

NUM_LEVELS = 4


def data(num=150):
    x = torch.rand(num, 2, dtype=torch.float64)
    x[:, 1] = torch.randint(NUM_LEVELS, (num,)).double()
    return x, torch.sin(6 * x[:, 0]) * (x[:, 1] - 1.2) + 0.1 * torch.randn(num, dtype=torch.float64)


def make_model(x, y, rank=NUM_LEVELS):
    levels = LevelsKernel(NUM_LEVELS, rank=2, active_dims=1)
    kernel = ScaleKernel(RBFKernel(active_dims=0) * levels).double()
    kernel.base_kernel.kernels[0].lengthscale = 0.3
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    likelihood.noise = 0.01
    return tkrr.TKRR(x, y, likelihood, kernel=kernel, rank=rank, num_basis=12)


def dense_posterior(model, x, y, x_test):
    """Mean and variance of the Gaussian process on all products of functions, by N x N matrices."""
    modes, scale = model.separate().modes, model.separate().outputscale()

    def covariance(a, b):
        parts = (m.basis(a[:, d]) @ m.covariance().to_dense() @ m.basis(b[:, d]).mT for d, m in enumerate(modes))
        return scale * torch.stack(list(parts)).prod(0)

    noisy = covariance(x, x) + model.noise() * torch.eye(len(x))
    return y.mean() + covariance(x_test, x) @ torch.linalg.solve(noisy, y - y.mean())


@torch.no_grad()
def test_als_at_full_rank_is_the_gaussian_process():
    x, y = data()
    model = make_model(x, y)
    result = tkrr.fit_als(model, max_sweeps=400, rel_tol=1e-14, seed=0)
    x_test, _ = data(30)
    torch.testing.assert_close(
        model.eval()(x_test).mean, dense_posterior(model, x, y, x_test), rtol=0, atol=1e-4 * float(y.std())
    )
    objective = torch.tensor(result.objective, dtype=torch.float64)
    assert (objective.diff() <= 1e-9 * objective[:-1]).all()
    restored = make_model(x, y)
    restored.load_state_dict(model.state_dict())
    for name in ("mean", "variance"):
        torch.testing.assert_close(getattr(restored.eval()(x_test), name), getattr(model(x_test), name))


@torch.no_grad()
def test_each_update_of_als_solves_the_dense_normal_equations():
    """After the last update the gradient of squared error plus penalty in that factor's raw weights is zero."""
    x, y = data(80)
    model = make_model(x, y, rank=2)
    tkrr.fit_als(model, max_sweeps=3, rel_tol=0.0, seed=0)
    modes, weights = model.separate().modes, model.factors  # (M_d, R), of unit-variance functions
    roots = [torch.linalg.cholesky(mode.covariance().to_dense()) for mode in modes]
    features = [mode.basis(x[:, d]) @ root for d, (mode, root) in enumerate(zip(modes, roots, strict=True))]
    strength = model.noise() / model.separate().outputscale()
    gradients = []
    for d in (0, 1):
        other = features[1 - d] @ weights[1 - d]  # (N, R)
        design = (other.unsqueeze(-1) * features[d].unsqueeze(-2)).flatten(1)  # (N, R M)
        form = weights[1 - d].mT @ weights[1 - d]
        u = weights[d].mT.reshape(-1)
        residual = y - y.mean() - design @ u
        gradient = design.mT @ residual - strength * (form @ weights[d].mT).reshape(-1)
        gradients.append(float(gradient.norm() / (design.mT @ (y - y.mean())).norm()))
    assert min(gradients) < 1e-8  # the factor that was updated last


def test_hyperparameters_are_learned_through_the_covariance_of_levels():
    x, y = data()
    model = make_model(x, y)
    before = model.covar_module.base_kernel.kernels[1].covar_matrix.to_dense().detach().clone()
    tkrr.fit_als(model, learn_hyperparameters=True, max_sweeps=10, rel_tol=0.0, seed=0)
    after = model.covar_module.base_kernel.kernels[1].covar_matrix.to_dense().detach()
    assert not torch.allclose(before, after)
    x_test, y_test = data(100)
    assert float((model.eval()(x_test).mean.detach() - y_test).square().mean()) < 0.1 * float(y.var())


@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.ConvergenceWarning")
def test_gibbs_draws_agree_with_the_gaussian_process():
    x, y = data()
    model = make_model(x, y)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    tkrr.fit_gibbs(model, num_draws=150, num_warmup=50, seed=0)
    x_test, _ = data(30)
    expected = dense_posterior(model, x, y, x_test)
    assert float((model.eval()(x_test).mean - expected).abs().max()) < 0.1
