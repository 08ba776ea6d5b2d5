"""No test rows: an empty prediction from every model, and training without rows is refused."""

from __future__ import annotations

import functools

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood
from models import GP, wavy_data

import gpytorch_tkrr as tkrr

fit_gibbs = functools.partial(tkrr.fit_gibbs, num_draws=4, num_warmup=4, seed=0)


def hilbert():
    return tkrr.HilbertKernel(RBFKernel(), tkrr.Domain(0.5, 2.0), 8)


def exact(x, y, kernel):
    return GP(x, y, GaussianLikelihood(), kernel).double()


def cp(x, y, fit, likelihood):
    model = tkrr.TKRR(x, y, likelihood(), rank=2, num_basis=6)
    fit(model)
    return model


MODELS = {
    "HilbertKernel": lambda x, y: exact(x, y, hilbert()),
    "scaled": lambda x, y: exact(x, y, ScaleKernel(hilbert())),
    "HilbertGP": lambda x, y: tkrr.HilbertGP((x, y), GaussianLikelihood(), hilbert()).double(),
    "als": lambda x, y: cp(x, y, tkrr.fit_als, GaussianLikelihood),
    "gibbs": lambda x, y: cp(x, y, fit_gibbs, GaussianLikelihood),
    "probit": lambda x, y: cp(x, (y > 0).double(), fit_gibbs, BernoulliLikelihood),
}


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.TKRRWarning")  # the chains are short, the box is small
@pytest.mark.parametrize("name", MODELS)
def test_empty_predictions(name):
    x, y = wavy_data(30)
    model = MODELS[name](x, y).eval()
    for shape in [(0, 2), (3, 0, 2)]:
        prediction = model(x.new_empty(shape))
        assert prediction.mean.shape == prediction.variance.shape == shape[:-1]
        assert prediction.covariance_matrix.shape == (*shape[:-1], 0)
        observed = model.likelihood(prediction)
        assert observed.mean.shape == observed.variance.shape == observed.sample().shape == shape[:-1]
    assert torch.isfinite(model(x[:3]).mean).all()  # nothing is left behind


@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.TKRRWarning")
def test_empty_draws_and_classes():
    x, y = wavy_data(30)
    model = cp(x, y, fit_gibbs, GaussianLikelihood)
    assert model.draws(x[:0]).shape == (4, 0)
    classes = tkrr.OneVsRest(x, (3 * x[:, 0]).long(), rank=2, num_basis=6)
    classes.fit(num_draws=4, num_warmup=4, seed=0)
    assert classes.class_probabilities(x[:0]).shape == (0, 3)
    assert tkrr.draw_posterior_functions(exact(x, y, hilbert()).eval(), 5)(x[:0]).shape == (5, 0)


def test_no_training_rows_are_refused():
    x, y = wavy_data(30)
    with pytest.raises(tkrr.InputError, match="N >= 1"):
        hilbert().train()(x[:0]).to_dense()
    with pytest.raises(tkrr.InputError):
        tkrr.fit_als(tkrr.TKRR(x[:0], y[:0], GaussianLikelihood(), rank=2))
