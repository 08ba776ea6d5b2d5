"""Whole functions drawn from prior and posterior."""

from __future__ import annotations

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from models import GP

from gpytorch_tkrr import Domain, HilbertKernel, OutOfDomainWarning, draw_posterior_functions, draw_prior_functions


def make_model(batch=(), scaled=False):
    shape = torch.Size(batch)
    base = ScaleKernel(RBFKernel(batch_shape=shape), batch_shape=shape)
    base.base_kernel.lengthscale = 0.4
    kernel = HilbertKernel(base, Domain(0.5, 2.0), 12)
    kernel = ScaleKernel(kernel) if scaled else kernel
    x = torch.rand(*batch, 15, 2, dtype=torch.float64)
    likelihood = GaussianLikelihood(batch_shape=shape)
    model = GP(x, torch.sin(5 * x).sum(-1), likelihood, kernel).double().eval()
    model.mean_module.initialize(constant=0.7)
    model.likelihood.noise = 0.1
    return model


def assert_moments(values, mean, covariance):
    """Mean and covariance of S draws lie within five standard errors of what they should be."""
    num = values.shape[0]
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    assert ((values.mean(0) - mean).abs() < 5 * (variance / num).sqrt()).all()
    centred = (values - values.mean(0)).movedim(0, -1)
    estimate = centred @ centred.mT / num
    error = ((variance.unsqueeze(-1) * variance.unsqueeze(-2) + covariance.square()) / num).sqrt()
    assert ((estimate - covariance).abs() < 5 * error).all()


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_moments(batch, scaled):
    model = make_model(batch, scaled)
    x = torch.rand(*batch, 6, 2, dtype=torch.float64)
    with torch.no_grad():
        posterior, prior = model(x), model.forward(x)
        draws = draw_posterior_functions(model, 2000)(x)
        assert draws.shape == (2000, *batch, 6)
        assert_moments(draws, posterior.mean, posterior.covariance_matrix)
        assert_moments(draw_prior_functions(model, 2000)(x), prior.mean, prior.covariance_matrix)


def test_draws_are_functions():
    model = make_model()
    draws = draw_posterior_functions(model, 3)
    x = torch.rand(4, 5, 2, dtype=torch.float64)
    values = draws(x)
    assert values.shape == (3, 4, 5)
    for i in range(4):
        assert torch.allclose(draws(x[i]), values[:, i])
    assert torch.equal(draws(x), values)


def test_inputs_with_more_batches_than_the_model():
    model = make_model((2,))
    draws = draw_prior_functions(model, 3)
    x = torch.rand(4, 2, 5, 2, dtype=torch.float64)
    values = draws(x)
    assert values.shape == (3, 4, 2, 5)
    assert torch.allclose(draws(x[1]), values[:, 1])
    shared = draws(x[:, :1])  # one set of inputs for both models
    assert shared.shape == (3, 4, 2, 5)
    assert torch.allclose(shared[:, :, 0], values[:, :, 0])


def test_differentiable_in_the_inputs():
    draws = draw_posterior_functions(make_model(), 2)
    x = torch.rand(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(draws, (x,))


def test_generator_makes_draws_repeatable():
    model = make_model()
    x = torch.rand(3, 2, dtype=torch.float64)
    for draw in (draw_prior_functions, draw_posterior_functions):
        first, second = (draw(model, 2, generator=torch.Generator().manual_seed(7))(x) for _ in range(2))
        other = draw(model, 2, generator=torch.Generator().manual_seed(8))(x)
        assert torch.equal(first, second)
        assert not torch.equal(first, other)


def test_posterior_draws_pass_near_precise_data():
    model = make_model()
    model.likelihood.noise = 1e-4
    values = draw_posterior_functions(model, 20)(model.train_inputs[0])
    assert (values - model.train_targets).abs().max() < 0.1


def test_other_models_are_refused():
    x = torch.rand(5, 2)
    model = GP(x, x[:, 0], GaussianLikelihood(), ScaleKernel(RBFKernel())).eval()
    with pytest.raises(TypeError, match="HilbertKernel"):
        draw_posterior_functions(model, 1)
    with pytest.raises(TypeError, match="HilbertKernel"):
        draw_prior_functions(model, 1)


def test_posterior_of_a_model_in_training_mode_is_refused():
    model = make_model().train()
    with pytest.raises(RuntimeError, match=r"training mode. Call model.eval\(\)"):
        draw_posterior_functions(model, 1)
    draw_posterior_functions(model.eval(), 1)


@pytest.mark.parametrize("draw", [draw_prior_functions, draw_posterior_functions])
def test_draws_outside_the_box_are_the_prior_mean_and_warn(draw):
    model = make_model()
    draws = draw(model, 5)
    outside = torch.tensor([[9.0, 0.5], [0.5, -7.0]], dtype=torch.float64)
    with pytest.warns(OutOfDomainWarning, match="2 of 2 inputs"):
        values = draws(outside)
    assert torch.allclose(values, torch.full_like(values, 0.7))
    with torch.no_grad():
        assert torch.allclose(model(outside).variance, model.covar_module.base_kernel.outputscale)


def test_what_is_printed_names_the_users_kernel_and_the_sizes():
    model = make_model()
    shown = repr(model.covar_module)
    assert "num_basis=12" in shown and "(base_kernel): ScaleKernel(" in shown
    assert repr(draw_posterior_functions(model, 3)) == "3 functions of a GP; call them with inputs (n, d)"
