"""Simulation-based calibration of `fit_gibbs` as a whole (Talts, Betancourt, Simpson, Vehtari & Gelman, 2018).

Parameters are drawn from the prior and data from the model. The rank of every true quantity among its posterior draws
is then uniform if, and only if, the draws come from the posterior.
"""

from __future__ import annotations

import math

import gpytorch
import numpy as np
import pytest
import scipy.stats
import torch
from gpytorch.kernels import AdditiveKernel, ConstantKernel, ProductKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.priors import LogNormalPrior

from gpytorch_tkrr import TKRR, Domain, fit_gibbs
from gpytorch_tkrr.features.represented import MAX_MISSING
from gpytorch_tkrr.sampling.priors import TAU_SHAPE

NUM_DIMS, RANK, NUM_BASIS, NUM_ROWS = 2, 2, 6, 15
LENGTHSCALE, OUTPUTSCALE, NOISE = (math.log(0.4), 0.3), (math.log(30.0), 0.5), (math.log(3.0), 0.5)  # log-normal


def _model(x: torch.Tensor, y: torch.Tensor) -> TKRR:
    """A tiny model in units far from 1, with priors on lengthscales, output scale and noise."""
    factors = []
    for d in range(NUM_DIMS):
        constant = ConstantKernel(active_dims=(d,))
        constant.constant = torch.tensor(0.5)
        constant.raw_constant.requires_grad_(False)
        factors.append(
            AdditiveKernel(constant, RBFKernel(active_dims=(d,), lengthscale_prior=LogNormalPrior(*LENGTHSCALE)))
        )
    kernel = ScaleKernel(ProductKernel(*factors), outputscale_prior=LogNormalPrior(*OUTPUTSCALE))
    kernel.outputscale = 30.0
    for factor in factors:
        factor.kernels[1].lengthscale = 0.4
    likelihood = GaussianLikelihood(noise_prior=LogNormalPrior(*NOISE))
    return TKRR(
        x,
        y,
        likelihood.double(),
        kernel=kernel.double(),
        rank=RANK,
        num_basis=NUM_BASIS,
        domain=Domain(torch.full((NUM_DIMS,), 0.5), 1.1),
        mean_module=gpytorch.means.ZeroMean(),
    )


class _Simulation:
    """Draws from the prior and the model, and ranks of what was drawn among posterior draws."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        corners = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
        self.x = torch.cat([corners, torch.from_numpy(self.rng.random((NUM_ROWS - 2, NUM_DIMS)))])
        self.model = _model(self.x, torch.zeros(NUM_ROWS, dtype=torch.float64))
        self.watched = torch.tensor([[0.1, 0.9], [0.5, 0.4]], dtype=torch.float64)
        self.grid = torch.linspace(0, 1, 33, dtype=torch.float64)

    def draw_lengthscales(self) -> list[float]:
        """From their prior, without those that the box cannot represent."""
        modes = self.model.separate().modes
        while True:
            lengthscales = self.rng.lognormal(*LENGTHSCALE, NUM_DIMS).tolist()
            for factor, value in zip(self.model.covar_module.base_kernel.kernels, lengthscales, strict=True):
                factor.kernels[1].lengthscale = value
            shares = [mode.represented_variance(self.grid) / mode.prior_variance(self.grid) for mode in modes]
            if min(float(share.min()) for share in shares) >= 1 - MAX_MISSING:
                return lengthscales

    def draw(self) -> tuple[list[float], torch.Tensor]:
        """True quantities (function values, log noise, log lengthscales, log output scale), and data."""
        lengthscales = self.draw_lengthscales()
        outputscale, noise = self.rng.lognormal(*OUTPUTSCALE), self.rng.lognormal(*NOISE)
        tau = torch.from_numpy(self.rng.gamma(TAU_SHAPE, RANK ** (1 / NUM_DIMS) / TAU_SHAPE, (RANK, 1)))
        points = torch.cat([self.watched, self.x])
        product = torch.ones(len(points), RANK, dtype=torch.float64)
        for d, mode in enumerate(self.model.separate().modes):
            sd = (mode.variances() * outputscale ** (1 / NUM_DIMS) / tau).sqrt()  # (R, M)
            factor = sd * torch.from_numpy(self.rng.standard_normal(sd.shape))
            product = product * (mode.basis(points[:, d]) @ factor.mT)
        f = product.sum(-1)
        y = f[len(self.watched) :] + math.sqrt(noise) * torch.from_numpy(self.rng.standard_normal(NUM_ROWS))
        true = [*f[: len(self.watched)].tolist(), *np.log([noise, *lengthscales, outputscale]).tolist()]
        return true, y

    def ranks(self, seed: int, *, num_warmup: int, num_draws: int, thin: int) -> list[float]:
        """Rank of each true quantity among its draws, between 0 and 1; ties with the uniform distribution broken."""
        with torch.no_grad():
            true, y = self.draw()
        model = _model(self.x, y)
        posterior = fit_gibbs(model, num_draws=num_draws, num_warmup=num_warmup, seed=seed).posterior
        hyper = posterior.hyperparameters
        lengthscales = [draws for name, draws in hyper.items() if name.endswith("lengthscale")]
        scalars = torch.stack([posterior.noise, *lengthscales, hyper["outputscale"]], dim=-1).log()
        draws = torch.cat([model.draws(self.watched), scalars], dim=-1)[thin - 1 :: thin]  # (S / thin, Q)
        below = (draws < torch.tensor(true, dtype=torch.float64)).sum(0).numpy()
        return ((below + self.rng.random(len(below))) / (len(draws) + 1)).tolist()


def _check(ranks: list[list[float]]) -> None:
    names = ["f at a corner", "f in the middle", "noise", "lengthscale 0", "lengthscale 1", "outputscale"]
    for name, values in zip(names, np.transpose(ranks), strict=True):
        assert scipy.stats.kstest(values, "uniform").pvalue > 1e-3, (name, np.sort(values).round(2))
        counts = np.histogram(values, bins=5, range=(0, 1))[0]
        assert scipy.stats.chisquare(counts).pvalue > 1e-3, (name, counts)


def test_ranks_are_uniform():
    simulation = _Simulation(seed=0)
    _check([simulation.ranks(seed, num_warmup=25, num_draws=36, thin=4) for seed in range(30)])


@pytest.mark.slow
def test_many_ranks_are_uniform():
    simulation = _Simulation(seed=1)
    _check([simulation.ranks(seed, num_warmup=100, num_draws=190, thin=10) for seed in range(300)])
