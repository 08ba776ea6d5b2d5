"""Probit Gibbs: latent targets against scipy, invariance under batching, calibrated probabilities."""

from __future__ import annotations

import gpytorch
import numpy as np
import pytest
import scipy.stats
import torch

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.data.keyed import uniform
from gpytorch_tkrr.model.likelihoods.probit import truncated_noise


@pytest.mark.parametrize("mean", [-9.0, -2.0, 0.0, 1.5, 30.0])
@pytest.mark.parametrize("label", [-1.0, 1.0])
def test_noise_has_the_truncated_normal_distribution(mean, label):
    num = 2000
    labels = torch.full((num,), label, dtype=torch.float64)
    noise = truncated_noise(labels, torch.full((num,), mean, dtype=torch.float64), 0, key=3).numpy()
    assert (label * (mean + noise) >= 0).all()
    low, high = (-mean, np.inf) if label > 0 else (-np.inf, -mean)
    if abs(mean) < 10 or label * mean > 0:
        assert scipy.stats.kstest(noise, scipy.stats.truncnorm(low, high).cdf).pvalue > 1e-3


def test_far_on_the_wrong_side_noise_stays_finite_and_just_reaches_the_right_one():
    labels, mean = torch.ones(100, dtype=torch.float64), torch.full((100,), -60.0, dtype=torch.float64)
    noise = truncated_noise(labels, mean, 0, key=1)
    assert torch.isfinite(noise).all() and (noise >= 60).all() and (noise < 61).all()


def test_random_numbers_are_uniform_and_do_not_depend_on_batches():
    index = torch.arange(20000)
    u = uniform(index, key=5)
    assert scipy.stats.kstest(u.numpy(), "uniform").pvalue > 1e-3
    assert abs(float(torch.corrcoef(torch.stack([u[1:], u[:-1]]))[0, 1])) < 0.03
    assert abs(float(torch.corrcoef(torch.stack([u, uniform(index, key=6)]))[0, 1])) < 0.03
    torch.testing.assert_close(torch.cat([uniform(index[:7], 5), uniform(index[7:], 5)]), u, rtol=0, atol=0)


def _two_classes(num: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(num, 2, dtype=torch.float64, generator=generator)
    probability = torch.special.ndtr(3 * torch.sin(6 * x[:, 0]) * x[:, 1] - 0.5)
    y = (torch.rand(num, dtype=torch.float64, generator=generator) < probability).double()
    return x, y, probability


def test_probabilities_are_those_of_the_simulation():
    x, y, probability = _two_classes(800)
    model = tkrr.TKRR(x, y, gpytorch.likelihoods.BernoulliLikelihood(), rank=4)
    result = tkrr.fit_gibbs(model, num_draws=60, num_warmup=60, seed=0)
    estimate = model.class_probabilities(x).detach()
    assert float((estimate - probability).abs().mean()) < 0.06
    marginal = model.likelihood(model.eval()(x)).mean.detach()  # the draws as a Gaussian
    torch.testing.assert_close(marginal, estimate, rtol=0, atol=0.03)
    expected = torch.where(y > 0, estimate, 1 - estimate).log()
    torch.testing.assert_close(result.log_predictive_density(x, y), expected)
    assert "noise" not in result.summary()


def test_draws_do_not_depend_on_batches_or_labels_convention():
    x, y, _ = _two_classes(150)
    fits = []
    for data in ((x, y), [(x[:40], y[:40]), (x[40:], y[40:])], (x, 2 * y - 1)):
        model = tkrr.TKRR(x, y, gpytorch.likelihoods.BernoulliLikelihood(), rank=2, num_basis=6)
        tkrr.fit_gibbs(model, data=data, num_draws=4, num_warmup=2, seed=0)
        fits.append(model.draws(x))
    torch.testing.assert_close(fits[0], fits[1], rtol=0, atol=1e-6)
    torch.testing.assert_close(fits[0], fits[2], rtol=0, atol=1e-6)


def test_one_class_only_and_unsuitable_means():
    x = torch.rand(30, 1, dtype=torch.float64)
    model = tkrr.TKRR(x, torch.ones(30, dtype=torch.float64), gpytorch.likelihoods.BernoulliLikelihood(), rank=2)
    tkrr.fit_gibbs(model, num_draws=10, num_warmup=10, seed=0)
    assert (model.class_probabilities(x) > 0.8).all()
    y = (x[:, 0] > 0.5).double()
    linear = tkrr.TKRR(x, y, gpytorch.likelihoods.BernoulliLikelihood(), mean_module=gpytorch.means.LinearMean(1))
    with pytest.raises(tkrr.InputError, match="ConstantMean"):
        tkrr.fit_gibbs(linear, num_draws=4, num_warmup=0)
