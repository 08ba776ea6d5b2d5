"""The noise variance is drawn from its conditional, also where its prior and the data disagree."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.priors import GammaPrior, LogNormalPrior

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.model.likelihoods.noise import NoiseModel


@pytest.mark.parametrize(
    "prior", [LogNormalPrior(math.log(0.09), 1.0), LogNormalPrior(math.log(2.0), 0.02), GammaPrior(3.0, 60.0)]
)
def test_draws_have_the_conditional_distribution(prior):
    """Against the density on a grid: 80 residuals of variance 0.09."""
    square, count, unit = 80 * 0.09, 80, 1.7
    noise = NoiseModel.of(GaussianLikelihood(noise_prior=prior, noise_constraint=GreaterThan(1e-8)), unit)
    rng, value = np.random.default_rng(0), 1.0
    draws = []
    for _ in range(3050):
        value = noise.draw(value, square, count, rng)
        draws.append(math.log(value))
    grid = np.linspace(math.log(1e-3), math.log(20), 40_001)
    values = torch.from_numpy(np.exp(grid))
    density = prior.log_prob(values * unit).numpy() + grid - count / 2 * grid - square / (2 * np.exp(grid))
    weights = np.exp(density - density.max())
    cdf = np.cumsum(weights) / weights.sum()
    thinned = np.array(draws[50::10])  # nearly independent
    assert scipy.stats.kstest(np.interp(thinned, grid, cdf), "uniform").pvalue > 1e-3


def test_a_fit_with_a_prior_far_from_the_data_moves():
    torch.manual_seed(0)
    x = torch.rand(80, 1, dtype=torch.float64)
    y = torch.sin(6 * x[:, 0]) + 0.3 * torch.randn(80, dtype=torch.float64)
    likelihood = GaussianLikelihood(noise_prior=LogNormalPrior(math.log(2.0), 0.02))
    model = tkrr.TKRR(x, y, likelihood, rank=2, num_basis=6)
    tkrr.fit_gibbs(model, num_draws=40, num_warmup=20, num_chains=1, seed=0)
    draws = model.posterior.parameters["noise"].log()
    assert 0.005 < draws.std() < 0.05 and abs(float(draws.mean()) - math.log(2.0)) < 0.1
