from __future__ import annotations

import gpytorch
import torch
from models import gaussian, rbf

import gpytorch_tkrr as tkrr


def make_model(num_dims=2, rank=3, noise=0.05, num_rows=120):
    x = torch.rand(num_rows, num_dims, dtype=torch.float64)
    y = 4 + 3 * torch.sin(5 * x).prod(-1) + noise**0.5 * torch.randn(num_rows, dtype=torch.float64)
    return tkrr.TKRR(x, y, gaussian(noise), kernel=rbf(0.4, 5.0), rank=rank, num_basis=8), x, y


def dense_covariance(model, x, x_test):
    """The sum over factors of design rows times the inverse of the dense precision matrix."""
    posterior = model.posterior
    modes, factors = model.separate().modes, posterior.weights.balanced()
    noise, outputscale = model.noise().detach(), model.separate().outputscale().detach()

    def designs(x):
        z = [mode.basis(x[:, d]) * mode.variances().detach().sqrt() for d, mode in enumerate(modes)]
        projections = [zd @ factor.mT for zd, factor in zip(z, factors, strict=True)]
        rows = []
        for d in range(len(z)):
            p = torch.ones_like(projections[0])
            for k, projection in enumerate(projections):
                p = p * projection if k != d else p
            rows.append((p.unsqueeze(-1) * z[d].unsqueeze(1)).flatten(1))
        return rows

    total = 0
    for d, (train, test) in enumerate(zip(designs(x), designs(x_test), strict=True)):
        prior = torch.ones(len(factors[0]), len(factors[0]), dtype=torch.float64)
        for k, factor in enumerate(factors):
            prior = prior * (factor @ factor.mT) if k != d else prior
        size = factors[d].shape[1]
        precision = train.mT @ train / noise + torch.kron(prior, torch.eye(size).double()) / outputscale
        total = total + test @ torch.linalg.solve(precision, test.mT)
    return total


def test_block_laplace_is_the_dense_formula():
    for num_dims in (1, 2, 3):
        model, x, _ = make_model(num_dims, rank=1 if num_dims == 1 else 3)
        tkrr.fit_als(model, seed=0)
        x_test = torch.rand(15, num_dims, dtype=torch.float64)
        covariance = model.eval()(x_test).covariance_matrix
        torch.testing.assert_close(covariance, dense_covariance(model, x, x_test), rtol=1e-6, atol=1e-8)


def test_one_dimension_is_the_exact_posterior_of_the_feature_gp():
    model, x, _ = make_model(1, rank=1)
    tkrr.fit_als(model)
    (mode,) = model.separate().modes
    x_test = torch.rand(9, 1, dtype=torch.float64)
    z, z_test = (mode.basis(v[:, 0]) * (5.0 * mode.variances().detach()).sqrt() for v in (x, x_test))
    precision = z.mT @ z / 0.05 + torch.eye(8).double()
    expected = z_test @ torch.linalg.solve(precision, z_test.mT)
    torch.testing.assert_close(model.eval()(x_test).covariance_matrix, expected, rtol=1e-7, atol=1e-9)


def test_intervals_cover_about_what_they_say():
    torch.manual_seed(1)
    model, _, _ = make_model(2, num_rows=400)
    tkrr.fit_als(model, seed=0)
    x = torch.rand(2000, 2, dtype=torch.float64)
    y = 4 + 3 * torch.sin(5 * x).prod(-1) + 0.05**0.5 * torch.randn(2000, dtype=torch.float64)
    lower, upper = model.likelihood(model.eval()(x)).confidence_region()  # two standard deviations
    assert 0.92 < float(((lower < y) & (y < upper)).double().mean()) < 0.98


def test_classification_takes_its_noise_from_the_residuals():
    x = torch.rand(200, 2, dtype=torch.float64)
    y = (x[:, 0] > 0.5).double()
    model = tkrr.TKRR(x, y, gpytorch.likelihoods.BernoulliLikelihood(), rank=3)
    tkrr.fit_als(model, seed=0, penalty=tkrr.FrobeniusPenalty(1e-2))
    residual = 2 * y - 1 - model.eval()(x).mean
    torch.testing.assert_close(model.posterior.noise.squeeze(), residual.detach().square().mean(), rtol=1e-6, atol=0)
