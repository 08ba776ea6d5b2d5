from __future__ import annotations

import gpytorch
import pytest
import torch
from models import gaussian, rbf
from torch.distributions import MultivariateNormal

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.bases.covariance import Covariance
from gpytorch_tkrr.cp.conditional import DenseGram
from gpytorch_tkrr.cp.evidence import FactorData, FactorEvidence


def random_problem(dense=False, num_rows=30, rank=2, size=4):
    design = torch.randn(num_rows, rank * size, dtype=torch.float64)
    y = torch.randn(num_rows, dtype=torch.float64)
    gram = (design.mT @ design).reshape(rank, size, rank, size)
    data = FactorData(DenseGram(gram), (design.mT @ y).reshape(rank, size), y @ y, torch.tensor(float(num_rows)))
    covariance = Covariance(torch.rand(size, dtype=torch.float64) + 0.1)
    if dense:
        covariance = Covariance(covariance.variances, torch.randn(size, size, dtype=torch.float64))
    root = torch.randn(rank, rank, dtype=torch.float64)
    return design, y, data, covariance, root @ root.mT + torch.eye(rank, dtype=torch.float64)


def dense_covariance(design, form, eta):
    """Of y, from the natural coordinates of the evidence."""
    *log_variances, log_strength, log_noise = eta
    variances = torch.stack(log_variances).exp().diag()
    prior = torch.kron(torch.linalg.inv(log_strength.exp() * form).contiguous(), variances)
    return design @ prior @ design.mT + log_noise.exp() * torch.eye(len(design), dtype=torch.float64)


def test_the_evidence_and_its_derivatives_are_the_dense_gaussian_ones():
    design, y, data, variances, form = random_problem()
    strength, noise = torch.tensor(1.7, dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64)
    evidence = FactorEvidence(data.mixed(form), variances, strength, noise)
    eta = torch.cat([variances.variances, strength.reshape(1), noise.reshape(1)]).log().requires_grad_()
    covariance = dense_covariance(design, form, eta)
    dense = MultivariateNormal(torch.zeros(30).double(), covariance).log_prob(y)
    gradient, fisher = evidence.derivatives()
    assert evidence.value() == pytest.approx(dense.item())
    torch.testing.assert_close(gradient, torch.autograd.grad(dense, eta)[0])
    slopes = torch.autograd.functional.jacobian(lambda e: dense_covariance(design, form, e), eta.detach())
    whitened = [torch.linalg.solve(covariance.detach(), slope) for slope in slopes.unbind(-1)]
    expected = torch.stack([torch.stack([torch.trace(a @ b) / 2 for b in whitened]) for a in whitened])
    torch.testing.assert_close(fisher, expected)


def test_derivatives_where_weights_are_correlated():
    design, y, data, covariance, form = random_problem(dense=True)
    one = torch.ones((), dtype=torch.float64)
    other = torch.randn(2, 4, 4, dtype=torch.float64)
    changes = other @ other.mT  # of V, in two parameters
    evidence = FactorEvidence(data.mixed(form), covariance, one, 0.3 * one)
    whitened = torch.stack([covariance.whiten(covariance.whiten(change).mT) for change in changes])
    gradient, fisher = evidence.derivatives(whitened)

    def dense(theta):
        weights = covariance.to_dense() + (theta[:2, None, None] * changes).sum(0)
        prior = torch.kron(torch.linalg.inv(theta[2].exp() * form).contiguous(), weights)
        return design @ prior @ design.mT + 0.3 * theta[3].exp() * torch.eye(30, dtype=torch.float64)

    theta = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    expected = MultivariateNormal(torch.zeros(30).double(), dense(theta)).log_prob(y)
    assert evidence.value() == pytest.approx(expected.item())
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, theta)[0])
    slopes = torch.autograd.functional.jacobian(dense, theta.detach()).unbind(-1)
    solved = [torch.linalg.solve(dense(theta.detach()), slope) for slope in slopes]
    torch.testing.assert_close(
        fisher, torch.tensor([[torch.trace(a @ b) / 2 for b in solved] for a in solved]).double()
    )


def test_components_that_do_not_differ_count_once():
    _, _, data, variances, _ = random_problem()
    one = torch.ones((), dtype=torch.float64)
    single = FactorData(DenseGram(data.gram.dense()[:1, :, :1]), data.rhs[:1], data.square, data.count)
    twice = FactorData(
        DenseGram(single.gram.dense().repeat(2, 1, 2, 1)), single.rhs.repeat(2, 1), data.square, data.count
    )
    alone = FactorEvidence(single.mixed(torch.ones(1, 1).double()), variances, one, 0.3 * one)
    evidence = FactorEvidence(twice.mixed(torch.ones(2, 2).double()), variances, one, 0.3 * one)
    assert evidence.value() == pytest.approx(alone.value())
    torch.testing.assert_close(evidence.derivatives(), alone.derivatives())


def test_the_effective_number_of_parameters_leaves_out_the_sizes_of_components():
    _, _, data, variances, form = random_problem()
    one = torch.ones((), dtype=torch.float64)
    free = FactorEvidence(data.mixed(form), variances, 1e-9 * one, 0.3 * one)
    assert free.num_parameters() == pytest.approx(2 * 4 - 2, abs=1e-6)  # R M less R
    assert FactorEvidence(data.mixed(form), variances, 1e9 * one, 0.3 * one).num_parameters() < 1e-6


def test_a_vanishing_variance_does_not_spoil_the_derivatives():
    _, _, data, variances, form = random_problem()
    one = torch.ones((), dtype=torch.float64)
    evidence = FactorEvidence(
        data.mixed(form), Covariance(torch.cat([variances.variances[:-1], torch.zeros(1)])), one, 0.3 * one
    )
    assert all(torch.isfinite(part).all() for part in evidence.derivatives())


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
