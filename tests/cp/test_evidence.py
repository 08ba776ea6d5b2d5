from __future__ import annotations

import gpytorch
import pytest
import torch
from models import gaussian, rbf
from torch.distributions import MultivariateNormal

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.cp.evidence import FactorData, log_evidence
from gpytorch_tkrr.features.covariance import Covariance


def random_problem(dense=False, num_rows=30, rank=2, size=4):
    design = torch.randn(num_rows, rank * size, dtype=torch.float64)
    y = torch.randn(num_rows, dtype=torch.float64)
    gram = (design.mT @ design).reshape(rank, size, rank, size)
    data = FactorData(gram, (design.mT @ y).reshape(rank, size), y @ y, torch.tensor(float(num_rows)))
    covariance = Covariance(torch.rand(size, dtype=torch.float64) + 0.1)
    if dense:
        covariance = Covariance(covariance.variances, torch.randn(size, size, dtype=torch.float64))
    root = torch.randn(rank, rank, dtype=torch.float64)
    return design, y, data, covariance, root @ root.mT + torch.eye(rank, dtype=torch.float64)


@pytest.mark.parametrize("dense", [False, True])
def test_log_evidence_is_the_dense_gaussian_one(dense):
    design, y, data, weights, prior = random_problem(dense)
    noise = torch.tensor(0.3, dtype=torch.float64)
    covariance = design @ torch.kron(torch.linalg.inv(prior).contiguous(), weights.to_dense()) @ design.mT
    expected = MultivariateNormal(torch.zeros(30).double(), covariance + noise * torch.eye(30).double()).log_prob(y)
    torch.testing.assert_close(log_evidence(data, weights, prior, noise), expected)


def test_log_evidence_gradients():
    _, _, data, covariance, prior = random_problem(dense=True)
    noise = torch.tensor(0.3, dtype=torch.float64)
    parts = (covariance.variances, covariance.mixing, prior, noise)

    def function(v, t, q, s):
        return log_evidence(data, Covariance(v, t), (q + q.mT) / 2, s)

    assert torch.autograd.gradcheck(function, [part.requires_grad_() for part in parts])


def test_a_vanishing_variance_does_not_spoil_the_gradient():
    _, _, data, covariance, prior = random_problem()
    variances = torch.cat([covariance.variances[:-1], torch.zeros(1)]).requires_grad_()
    value = log_evidence(data, Covariance(variances), prior, torch.tensor(0.3, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(value, variances)
    assert torch.isfinite(value) and torch.isfinite(gradient).all()


def make_model(shared, **kwargs):
    x = torch.rand(300, 2, dtype=torch.float64)
    y = 5 * torch.sin(7 * x[:, 0]) * torch.cos(7 * x[:, 1]) + 0.3 * torch.randn(300, dtype=torch.float64)
    kernel = rbf(0.7, 10.0, ard=None if shared else 2)
    return tkrr.TKRR(x, y, gaussian(1.0), kernel=kernel, rank=4, num_basis=20, **kwargs)


@pytest.mark.parametrize("shared", [False, True])
def test_learned_hyperparameters_are_near_those_of_the_exact_gp(shared):
    model = make_model(shared)
    tkrr.fit_als(model, seed=0, learn_hyperparameters=True, max_sweeps=25, rel_tol=1e-5)
    noise, lengthscale = model.likelihood.noise.item(), model.covar_module.base_kernel.lengthscale.flatten().tolist()
    assert 0.06 < noise < 0.12  # 0.09 was simulated
    assert all(0.2 < value < 0.5 for value in lengthscale)  # the exact GP says about 0.3


def test_fixed_parameters_stay_fixed_and_priors_pull():
    model = make_model(False)
    model.likelihood.noise_covar.raw_noise.requires_grad_(False)
    model.covar_module.base_kernel.register_prior(
        "lengthscale_prior", gpytorch.priors.NormalPrior(0.6, 1e-4), "lengthscale"
    )
    tkrr.fit_als(model, seed=0, learn_hyperparameters=True, max_sweeps=10)
    assert model.likelihood.noise.item() == pytest.approx(1.0)
    assert model.covar_module.base_kernel.lengthscale.flatten().tolist() == pytest.approx([0.6, 0.6], abs=5e-3)


def test_learned_lengthscales_stay_within_what_the_box_represents():
    x = torch.rand(200, 2, dtype=torch.float64)
    y = x.sum(-1) + 0.01 * torch.randn(200, dtype=torch.float64)  # linear: the evidence wants a very long lengthscale
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=2)).double()
    kernel.base_kernel.lengthscale = 0.3
    model = tkrr.TKRR(x, y, gpytorch.likelihoods.GaussianLikelihood().double(), kernel=kernel, rank=3)
    tkrr.fit_als(model, seed=0, learn_hyperparameters=True, max_sweeps=10)
    for d, mode in enumerate(model.separate().modes):
        assert (mode.represented_variance(x[:, d]) / mode.prior_variance(x[:, d])).min().item() > 0.95


def test_a_fixed_strength_contradicts_learning():
    with pytest.raises(ValueError, match="strength=None"):
        tkrr.fit_als(make_model(True), penalty=tkrr.FrobeniusPenalty(1e-3), learn_hyperparameters=True)
